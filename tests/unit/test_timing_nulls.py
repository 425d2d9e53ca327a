"""The paired timer on works of equal speed under disturbances, simulated, and on one real object against itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from rich.console import Console

from tests.clock import SimulatedClock
from wavecrest.cli import _shared
from wavecrest.cli.optimize import Display
from wavecrest.measure import timing

MS = 20.0
# share of null changes that may be called faster, or slower: half of what a 95 % interval leaves out
TAIL = 0.025


class Disturbed(SimulatedClock):
    """Works whose calls take MS with 1 % of noise, times what the machine does to the call by its number and time."""

    def __init__(self, seed: int, disturb: Callable[[Disturbed, int], float]) -> None:
        super().__init__()
        self.random, self.disturb, self.count = np.random.default_rng(seed), disturb, 0

    def work(self, gain: float = 1.0) -> Callable[[], None]:
        def call() -> None:
            factor = self.disturb(self, self.count) * max(0.1, 1 + 0.01 * self.random.standard_normal())
            self.count += 1
            self.advance(MS * factor / gain / 1e3)

        return call


def periodic(period: int, phase: int, share: float) -> Callable[[Disturbed, int], float]:
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


def measured(
    disturb: Callable[[Disturbed, int], float], gain: float, runs: int, seconds: float = 4.0
) -> list[timing.Paired]:
    pairs = []
    for seed in range(runs):
        clock = Disturbed(seed, disturb)
        pairs.append(
            timing.measure_pair(
                clock.work(), clock.work(gain), device="cpu", seconds=seconds, threshold=1.02, seed=seed, now=clock
            )
        )
    return pairs


def most(runs: int, share: float) -> float:
    """The most of `runs` that may be wrong: the share, and three standard errors of it."""
    return share * runs + 3 * math.sqrt(share * (1 - share) * runs)


@pytest.mark.parametrize("name", DISTURBANCES)
def test_disturbances_favour_no_side(name: str) -> None:
    pairs = measured(DISTURBANCES[name], 1.0, 200)
    assert sum(timing.keeps(pair.ci, 0.02) for pair in pairs) <= 0.01 * 200
    assert sum(pair.ci.low > 1 for pair in pairs) <= most(200, TAIL)
    assert sum(pair.ci.high < 1 for pair in pairs) <= most(200, TAIL)


@pytest.mark.parametrize(
    ("name", "gain", "share"),
    [
        ("every 7 calls, phase 0", 1.10, 0.95),
        ("every 4 calls, phase 0", 1.10, 0.75),
        ("drift", 1.03, 0.95),
        ("drift", 1.10, 1.0),
        ("bursts", 1.03, 0.85),
        ("bursts", 1.10, 1.0),
        ("heavy tail", 1.10, 0.95),
    ],
)
def test_gains_are_found_under_disturbances(name: str, gain: float, share: float) -> None:
    pairs = measured(DISTURBANCES[name], gain, 40, seconds=10.0)
    assert sum(timing.keeps(pair.ci, 0.02) for pair in pairs) >= share * 40
    assert np.median([pair.ratio for pair in pairs]) == pytest.approx(gain, abs=0.01)


@pytest.mark.parametrize("name", ["every 7 calls, phase 0", "every 7 calls, phase 3", "drift"])
def test_a_fixed_order_would_favour_a_side(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer of before: base always outside, no calls at random before a block, and a display that costs a call."""
    block = timing._Pair._block
    monkeypatch.setattr(timing, "MOST_SHIFT", 0)
    monkeypatch.setattr(timing._Pair, "_block", lambda self, _outside, hook: block(self, True, hook))
    pairs = measured(DISTURBANCES[name], 1.0, 40)
    wrong = sum(pair.ci.low > 1 or pair.ci.high < 1 for pair in pairs)
    assert wrong == 40 if "every" in name else wrong <= most(40, 2 * TAIL)


def test_one_object_on_both_sides_is_neither_faster_nor_slower() -> None:
    """On the real clock, with the progress display, as `optimize` times a step. The machine may be busy."""
    runs, faster, slower = 200, 0, 0
    layer, x = torch.nn.Linear(64, 64), torch.randn(16, 64)

    def work() -> None:
        layer(x)

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    console, _shared.err = _shared.err, Console(file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    try:
        with torch.no_grad(), Display() as display:
            display.phase("one object on both sides")
            for _ in range(runs):
                pair = timing.measure_pair(work, work, device="cpu", seconds=0.03, on_progress=display.update)
                faster += pair.ci.low > 1
                slower += pair.ci.high < 1
    finally:
        _shared.err.file.close()
        _shared.err = console
        torch.set_num_threads(before)
    assert faster <= most(runs, TAIL) and slower <= most(runs, TAIL)
