"""Clocks that only tests move: what is timed on them says the same on an idle and on a busy machine."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

# more readings than any measurement takes between two calls of its work
STANDSTILL = 100_000


class SimulatedClock:
    """Seconds that pass when a test says so. A copy is the clock itself, so copies of a model share it.

    Raises:
        AssertionError: it is read again and again without moving; a timer that waits for it would wait for ever.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._readings = 0
        # the gate calls models from two threads at once
        self._lock = threading.Lock()

    def __call__(self) -> float:
        self._readings += 1
        assert self._readings < STANDSTILL, "the work that is timed does not move the simulated clock"
        return self.seconds

    def advance(self, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds
            self._readings = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> SimulatedClock:
        return self


# what a call of a disturbed work takes by itself, in ms
MS = 20.0
# (clock, number of the call) -> how many times as long the call takes
Disturb = Callable[["Disturbed", int], float]


class Disturbed(SimulatedClock):
    """Works whose calls take MS with 1 % of noise, times what the machine does to the call by its number and time."""

    def __init__(self, seed: int, disturb: Disturb) -> None:
        super().__init__()
        self.random, self.disturb, self.count = np.random.default_rng(seed), disturb, 0

    def work(self, gain: float = 1.0) -> Callable[[], None]:
        def call() -> None:
            factor = self.disturb(self, self.count) * max(0.1, 1 + 0.01 * self.random.standard_normal())
            self.count += 1
            self.advance(MS * factor / gain / 1e3)

        return call


def periodic(period: int, phase: int, share: float) -> Disturb:
    return lambda _clock, call: 1 + share if call % period == phase else 1.0


def _bursts(clock: Disturbed, _call: int) -> float:
    # a neighbour takes half of the machine for a second, every three seconds
    return 2.0 if clock.seconds % 3 < 1 else 1.0


def _long_bursts(clock: Disturbed, _call: int) -> float:
    return 1.4 if math.sin(clock.seconds) > 0.5 else 1.0


DISTURBANCES = {
    **{
        f"every {period} calls, phase {phase}": periodic(period, phase, 0.2)
        for period in (4, 5, 6, 7, 8)
        for phase in (0, 3)
    },
    "two of seven": lambda _clock, call: 1.3 if call % 7 in (0, 3) else 1.0,
    "drift": lambda clock, _call: 1 + 0.05 * clock.seconds,
    "quadratic drift": lambda clock, _call: 1 + 0.03 * clock.seconds**2,
    "bursts": _bursts,
    "long bursts": _long_bursts,
    "heavy tail": lambda clock, _call: 1 + 0.02 * float(clock.random.pareto(1.5)),
}
