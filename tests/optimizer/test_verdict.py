"""Verdicts and the final claim from made-up measurements."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.clock import SimulatedClock
from wavecrest.measure import timing
from wavecrest.measure.speedup import TAIL
from wavecrest.optimizer.alternate import LOOKS, Claim, alternate, claim_of, in_turn
from wavecrest.optimizer.children import SideReport
from wavecrest.optimizer.verdict import judge, no_gain_verdict, result_verdict
from wavecrest.records import BucketBench, OptimizeRecord, StepOutcome


def pair(base: float, new: float, blocks: int = 20, wobble: float = 0.002) -> timing.Paired:
    a = tuple(base * (1 + wobble * (i % 5 - 2)) for i in range(blocks))
    b = tuple(new * (1 + wobble * (i % 7 - 3)) for i in range(blocks))
    ratio, ci = timing.block_speedup([(a, b)])
    return timing.Paired(a, b, ratio, ci, "host wall")


@pytest.mark.parametrize(
    ("pairs", "verdict"),
    [
        ({"a": pair(10, 8)}, "kept"),
        ({"a": pair(10, 9.9)}, "tie"),
        ({"a": pair(10, 10)}, "tie"),
        ({"a": pair(10, 11)}, "reverted"),
        ({"a": pair(10, 5), "b": pair(10, 11)}, "reverted"),
        ({"a": pair(10, 8), "b": pair(10, 10)}, "kept"),
    ],
    ids=["faster", "below the gain", "the same", "slower", "slower on one bucket", "faster on one bucket"],
)
def test_verdicts(pairs: dict[str, timing.Paired], verdict: str) -> None:
    assert judge(pairs, 0.02)[0] == verdict


def test_a_difference_that_the_machine_does_not_resolve_is_no_gain() -> None:
    """The original differs from itself by as much."""
    pairs = {"a": pair(10, 9.5)}
    assert judge(pairs, 0.02)[0] == "kept" == judge(pairs, 0.02, 0.04)[0]
    verdict, reason, *_ = judge(pairs, 0.02, 0.06)
    assert verdict == "tie" and reason.startswith("undecided: no difference that is resolved here") and "6.0%" in reason
    assert judge({"a": pair(10, 10.2)}, 0.02, 0.06)[0] == "tie"
    assert judge({"a": pair(10, 10.2)}, 0.02, 0.01)[0] == "reverted"


def test_a_tie_says_whether_the_gain_is_excluded() -> None:
    assert judge({"a": pair(10, 10)}, 0.02)[1] == "no gain of 2%; the simpler model stays"
    noisy = judge({"a": pair(10, 9.9, wobble=0.05)}, 0.02)
    assert noisy[0] == "tie" and noisy[1].startswith("undecided: the interval holds a gain of 2%")


def claimed(ratio: float, low: float, high: float, unit: Any = "processes", pairs: int = 3) -> Claim:
    sides = [{"a": [10.0 * (1 + 0.01 * pair)]} for pair in range(pairs)], [{"a": [10.0 / ratio]}] * pairs
    return Claim(unit, *sides, ratio, timing.Interval(low, high), [], "made up")


@pytest.mark.parametrize(
    ("found", "verdict", "reason"),
    [
        (claimed(1.1, 1.05, 1.15), "faster", "1.100× [1.050, 1.150] over 3 fresh processes a side"),
        (claimed(1.1, 1.02, 1.15), "undecided", "differ by more than the gain"),
        (claimed(1.01, 1.005, 1.015), "undecided", "less than the 2% that were to be proven"),
        (claimed(0.9, 0.85, 0.99), "slower", "0.900×"),
        (claimed(0.9, 0.8, 1.1), "undecided", "differ by more than the gain. Each step was proven by itself and stays"),
        (
            claimed(0.9, 0.8, 1.1, pairs=8),
            "undecided",
            "and the original itself changed by +7% meanwhile. Each step was",
        ),
        (claimed(1.1, 1.0, 1.2, "phases"), "undecided", "the phases differ by more than the gain"),
        (claimed(1.1, 1.05, 1.15, "phases"), "faster", "in one process, its 3 phases a side between 1.100× and 1.122×"),
    ],
)
def test_verdicts_of_a_result(found: Claim, verdict: str, reason: str) -> None:
    decided, why = result_verdict(found, 0.02)
    assert decided == verdict and reason in why


def test_one_process_is_never_shown_with_an_interval() -> None:
    """`[1.272, 1.272]` was printed of a single process."""
    report = side([10.0])
    one = claim_of([report], [side([8.0])], unit="processes", tail=TAIL)
    assert one.ci is None and one.describe() == "1.250× in one fresh process a side, which has no interval"
    assert "[" not in claim_of([report] * 3, [side([8.0])] * 3, unit="phases", tail=TAIL).describe()
    assert result_verdict(one, 0.02)[0] == "undecided"


def side(times: list[float]) -> SideReport:
    return SideReport(clock="made up", times={"a": times}, numerics=[], quality=[], warnings=[])


def test_sides_alternate_and_pairs_are_taken_until_the_interval_decides() -> None:
    """The first look decides where a gain, a loss, or that there is neither, is plain; none where nothing ever is."""
    first, last = min(LOOKS), max(LOOKS)
    for new, spread, wanted in ((9.0, 0.001, first), (11.0, 0.001, first), (10.0, 0.001, first), (9.0, 0.2, last)):
        order: list[tuple[str, int]] = []
        random = np.random.default_rng(1)

        def run(
            which: str, pair: int, new: float = new, spread: float = spread, order: Any = order, random: Any = random
        ) -> SideReport:
            order.append((which, pair))
            return side([(10.0 if which == "base" else new) * (1 + spread * random.standard_normal())] * 5)

        found = alternate(in_turn(run), unit="processes", looks=LOOKS, min_gain=0.02, seconds_left=lambda: math.inf)
        assert found.pairs == wanted
        sides = [which for which, _ in order]
        assert sides == (["base", "new", "new", "base"] * wanted)[: 2 * wanted]
        assert [pair for _, pair in order] == [pair for pair in range(wanted) for _ in range(2)]


def test_intervals_of_buckets_allow_for_all_looks_too() -> None:
    random = np.random.default_rng(2)
    base, new = ([side(list(scale * random.uniform(0.9, 1.1, 1))) for _ in range(5)] for scale in (10.0, 8.0))
    once, often = (claim_of(base, new, unit="processes", tail=tail) for tail in (TAIL, TAIL / 3))
    for wide, narrow in ((often.ci, once.ci), (often.speed[0].ci, once.speed[0].ci)):
        assert wide is not None and narrow is not None
        assert wide.low < narrow.low < narrow.high < wide.high


def test_more_pairs_are_taken_only_while_the_budget_covers_them() -> None:
    clock, random = SimulatedClock(), np.random.default_rng(1)

    def run(which: str, pair: int) -> SideReport:
        clock.advance(10.0)
        return side([float(random.uniform(5, 15))])

    for budget, pairs in ((0.0, 4), (115.0, 4), (121.0, 6), (241.0, 12)):
        clock.seconds = 0.0
        found = alternate(
            in_turn(run),
            unit="processes",
            looks=LOOKS,
            min_gain=0.02,
            seconds_left=lambda budget=budget: budget - clock(),
        )
        assert found.pairs == pairs, budget


@pytest.mark.parametrize(
    ("luck", "drift", "noise"), [(0.03, 0, 0), (0.05, 0, 0), (0.10, 0, 0), (0.02, 0.03, 0), (0.02, 0, 0.05)],
    ids=["luck 3 %", "luck 5 %", "luck 10 %", "drift", "noise"],
)  # fmt: skip
def test_luck_of_processes_is_no_gain(luck: float, drift: float, noise: float) -> None:
    """Each process is slower by 0 to `luck`: false claims are as rare as the interval says, over all looks."""
    random, runs = np.random.default_rng(3), 1000
    sides = {"faster": 0, "slower": 0, "undecided": 0}

    for _ in range(runs):
        age = iter(range(100))

        def run(which: str, pair: int, age: Any = age) -> SideReport:
            ms = 10 * (1 + luck * random.random()) * (1 + drift * next(age)) * (1 + noise * random.random())
            return side([ms])

        found = alternate(in_turn(run), unit="processes", looks=LOOKS, min_gain=0.0, seconds_left=lambda: math.inf)
        sides[result_verdict(found, 0.0)[0]] += 1
    # 2.5 % and three standard errors
    assert sides["faster"] <= 40 and sides["slower"] <= 40


@pytest.mark.parametrize(
    ("luck", "gain", "share"), [(0.03, 1.10, 0.95), (0.10, 1.10, 0.6), (0.01, 1.03, 0.6), (0.005, 1.03, 0.9)]
)
def test_gains_are_found_over_the_luck_of_processes(luck: float, gain: float, share: float) -> None:
    random, faster = np.random.default_rng(4), 0
    for _ in range(200):

        def run(which: str, pair: int) -> SideReport:
            return side([10 / (gain if which == "new" else 1) * (1 + luck * random.random())])

        found = alternate(in_turn(run), unit="processes", looks=LOOKS, min_gain=0.02, seconds_left=lambda: math.inf)
        faster += result_verdict(found, 0.02)[0] == "faster"
    assert faster >= share * 200


def test_drift_is_of_the_originals() -> None:
    found = claim_of([side([10.0]), side([10.2]), side([11.0])], [side([5.0])] * 3, unit="processes", tail=TAIL)
    assert found.drift == pytest.approx(0.1)


def step(verdict: Any, reason: str = "why", step_id: str = "some") -> StepOutcome:
    return StepOutcome(id=step_id, title=step_id, level=3, verdict=verdict, reason=reason)


LATE = "no time left"


@pytest.mark.parametrize(
    ("steps", "changes", "verdict", "reason"),
    [
        ([step("tie"), step("reverted", step_id="other")], {}, "already optimal", "2 steps tried, none with a proven"),
        ([step("skipped", "nothing to change")], {}, "already optimal", "no step applies"),
        ([step("tie"), step("skipped", f"{LATE} in it", "late")], {}, "undecided", "no time was left for late"),
        ([step("tie"), step("refused", "no g++", "compile:default")], {}, "undecided", "refused here: no g++"),
        ([step("refused"), step("refused", step_id="b")], {}, "undecided", "every step was refused (2): why"),
        ([step("refused", "a"), step("refused", "b", "b"), step("refused", "b", "c")], {}, "undecided",
         "every step was refused (3): 2 of them because b"),
        ([step("refused"), step("tie", step_id="b")], {}, "already optimal",
         "2 steps tried, none with a proven gain of 2%; 1 refused, the table says why"),
        ([step("tie"), step("skipped", f"{LATE} in it", "late")], {"unstable": True}, "undecided",
         "no time was left for late, and the original's own times are unstable (a); run again on a quieter machine"),
        ([step("tie", "undecided: noise")], {}, "undecided", "too noisy to decide on some"),
        # the second try of a step is what counts
        ([step("tie", "undecided: noise"), step("tie", "no gain")], {}, "already optimal", "1 steps"),
        ([step("tie")], {"resolution": {"a": 0.03}}, "undecided", "differences below 3.0% are not resolved here"),
        ([step("tie")], {"resolution": {"a": 0.01}}, "already optimal", "1 steps"),
        ([step("tie")], {"unstable": True}, "undecided", "the original's own times are unstable (a)"),
    ],
)  # fmt: skip
def test_a_model_is_called_optimal_on_stable_times_of_every_step_alone(
    steps: list[StepOutcome], changes: dict[str, Any], verdict: str, reason: str
) -> None:
    samples = [10.0, 30.0] * 15 if changes.pop("unstable", False) else [10.0] * 30
    measured = timing.Measurement(tuple(samples), tuple(samples), 1.0, "host wall", timing.bootstrap_median(samples))
    baseline = [BucketBench(bucket="a", measurement=measured, shapes={}, peak_memory_bytes=None)]
    record = OptimizeRecord.model_construct(steps=steps, baseline=baseline, min_gain=0.02, resolution={})
    found = no_gain_verdict(record.model_copy(update=changes), LATE)
    assert found[0] == verdict and reason in found[1]
