"""The whole way to a claim on sides of equal speed, simulated: steps that are tried, and the final measurement.

A run has a process of its own for the steps, and fresh ones for the result. Each process is slower than the fastest by
its luck of memory layout, starts at another phase of what disturbs it, and time goes on from one to the next.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from tests.clock import DISTURBANCES, Disturbed
from wavecrest.measure import timing
from wavecrest.measure.speedup import student_quantile
from wavecrest.optimizer.alternate import LOOKS, alternate, in_turn
from wavecrest.optimizer.children import SideReport
from wavecrest.optimizer.verdict import is_hidden_by_resolution, judge, result_verdict

MIN_GAIN = 0.02
# luck of memory layout of a process: slower than the fastest by up to this share
LUCK = 0.10
RUNS = 100
# drift as a host has it over minutes; a share of a second would grow without end over a dozen processes
OVER_PROCESSES = DISTURBANCES | {
    "drift": lambda clock, _call: 1 + 0.002 * clock.seconds,
    "quadratic drift": lambda clock, _call: 1 + 2e-5 * clock.seconds**2,
}


class Machine:
    """Makes processes, one after the other, on one disturbed machine."""

    def __init__(self, seed: int, name: str, luck: float) -> None:
        self.random, self.name, self.luck = np.random.default_rng(seed), name, luck
        self.seconds = 0.0

    def process(self) -> Disturbed:
        luck, disturb = 1 + self.luck * self.random.random(), OVER_PROCESSES[self.name]
        clock = Disturbed(int(self.random.integers(1 << 32)), lambda clock, call: luck * disturb(clock, call))
        clock.seconds, clock.count = self.seconds, int(self.random.integers(100))
        return clock

    def step(self, gain: float) -> str:
        """The verdict of a step, as the optimizer comes to it."""
        clock = self.process()
        seed = int(self.random.integers(1 << 32))
        same = timing.measure_pair(clock.work(), clock.work(), device="cpu", seconds=2.0, seed=seed, now=clock)
        pair = timing.measure_pair(
            clock.work(), clock.work(gain), device="cpu", seconds=4.0, threshold=1 + MIN_GAIN, seed=seed + 1, now=clock
        )
        if is_hidden_by_resolution({"b": pair}, MIN_GAIN, timing.resolution(same)):
            same = timing.measure_pair(clock.work(), clock.work(), device="cpu", seconds=4.0, seed=seed + 2, now=clock)
        self.seconds = clock.seconds
        return judge({"b": pair}, MIN_GAIN, timing.resolution(same))[0]

    def result(self, gain: float) -> str:
        """The verdict of a result in fresh processes."""

        def run(side: timing.Side, _pair: int) -> SideReport:
            clock = self.process()
            work = clock.work(gain if side == "new" else 1.0)
            found = timing.measure(work, device="cpu", seconds=1.0, now=clock)
            self.seconds = clock.seconds + 1.0
            return SideReport(clock="simulated", times={"b": list(found.samples)}, numerics=[], quality=[], warnings=[])

        claim = alternate(in_turn(run), unit="processes", looks=LOOKS, min_gain=MIN_GAIN, seconds_left=lambda: math.inf)
        return result_verdict(claim, MIN_GAIN)[0]


def most(share: float) -> float:
    """The most of RUNS that may be wrong: the share, and three standard errors of it."""
    return share * RUNS + 3 * math.sqrt(share * (1 - share) * RUNS)


@pytest.mark.parametrize("name", [name for name in OVER_PROCESSES if "phase 3" not in name])
def test_equal_sides_are_not_kept_and_not_claimed(name: str) -> None:
    kept, claims = 0, Counter[str]()
    for seed in range(RUNS):
        machine = Machine(seed, name, LUCK)
        kept += machine.step(1.0) == "kept"
        claims[machine.result(1.0)] += 1
    assert kept <= 0.01 * RUNS
    assert claims["faster"] <= most(0.025) and claims["slower"] <= most(0.025)


@pytest.mark.parametrize(
    ("name", "gain", "share"),
    [("drift", 1.03, 0.95), ("bursts", 1.03, 0.7), ("every 7 calls, phase 0", 1.10, 0.8), ("heavy tail", 1.10, 0.85)],
)
def test_gains_are_kept(name: str, gain: float, share: float) -> None:
    assert sum(Machine(seed, name, LUCK).step(gain) == "kept" for seed in range(50)) >= share * 50


@pytest.mark.parametrize(
    ("name", "luck", "gain", "share"),
    [
        ("drift", 0.005, 1.03, 0.8),
        ("bursts", 0.005, 1.03, 0.9),
        ("every 7 calls, phase 0", 0.005, 1.03, 0.95),
        ("every 4 calls, phase 0", 0.005, 1.10, 0.95),
        ("every 7 calls, phase 0", 0.03, 1.10, 0.95),
        ("drift", 0.10, 1.10, 0.8),
        ("bursts", 0.10, 1.10, 0.9),
    ],
)
def test_gains_are_claimed(name: str, luck: float, gain: float, share: float) -> None:
    assert sum(Machine(seed, name, luck).result(gain) == "faster" for seed in range(50)) >= share * 50


def _claims(gain: float, spread: float, threshold: float, runs: int, luck: str) -> tuple[float, float]:
    """Shares of runs whose claim is above and below a threshold, all looks together; pairs differ by `spread`."""
    random, most = np.random.default_rng(5), max(LOOKS)
    if luck == "normal":
        lucks = spread * random.standard_normal((runs, most))
    else:
        # the difference of two processes that are slower by up to a share each
        lucks = spread * math.sqrt(6) * (random.random((runs, most)) - random.random((runs, most)))
    logs = math.log(gain / threshold) + lucks
    undecided, above, below = np.ones(runs, bool), np.zeros(runs, bool), np.zeros(runs, bool)
    for pairs, tail in LOOKS.items():
        seen = logs[:, :pairs]
        reach = student_quantile(1 - tail, pairs - 1) * seen.std(axis=1, ddof=1) / math.sqrt(pairs)
        above |= undecided & (seen.mean(axis=1) - reach > 0)
        below |= undecided & (seen.mean(axis=1) + reach < 0)
        undecided &= ~(above | below)
    return above.mean(), below.mean()


@pytest.mark.parametrize("luck", ["normal", "uniform"])
def test_all_looks_together_are_wrong_in_one_of_forty(luck: str) -> None:
    runs = 40_000
    for share in _claims(1.0, 0.03, 1.0, runs, luck):
        assert 0.015 < share <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / runs)


@pytest.mark.parametrize(
    ("gain", "luck", "share"), [(1.08, 0.03, 0.99), (1.08, 0.05, 0.9), (1.10, 0.05, 0.99), (1.10, 0.07, 0.85)]
)
def test_gains_of_a_tenth_are_claimed_over_luck_of_processes(gain: float, luck: float, share: float) -> None:
    """`luck`: standard deviation of the ratio of a pair."""
    assert _claims(gain, luck, 1 + MIN_GAIN, 10_000, "normal")[0] >= share


def test_luck_of_a_process_would_be_claimed_from_one_process_a_side() -> None:
    """The samples of one process a side, as if they told of other processes: an interval that is not printed."""
    wrong = 0
    for seed in range(RUNS):
        machine = Machine(seed, "heavy tail", LUCK)
        base, new = (
            timing.measure(clock.work(), device="cpu", seconds=1.0, now=clock).samples
            for clock in (machine.process(), machine.process())
        )
        wrong += timing.bootstrap_unpaired(base, new)[1].low > 1
    assert wrong > 0.25 * RUNS
