"""A clock that only tests move: what is timed on it says the same on an idle and on a busy machine."""

from __future__ import annotations

from typing import Any

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

    def __call__(self) -> float:
        self._readings += 1
        assert self._readings < STANDSTILL, "the work that is timed does not move the simulated clock"
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds
        self._readings = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> SimulatedClock:
        return self
