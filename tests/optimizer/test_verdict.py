"""Verdicts and the final claim from made-up measurements."""

from __future__ import annotations

import pytest

from wavecrest.measure import timing
from wavecrest.optimizer.verdict import claim, judge


def pair(base: float, new: float, blocks: int = 20, wobble: float = 0.002) -> timing.Paired:
    a = tuple(base * (1 + wobble * (i % 5 - 2)) for i in range(blocks))
    b = tuple(new * (1 + wobble * (i % 7 - 3)) for i in range(blocks))
    ratio, ci = timing.bootstrap_speedup([(a, b)])
    return timing.Paired(a, b, ratio, ci, "host wall")


def alone(ms: float) -> timing.Measurement:
    samples = tuple(ms * (1 + 0.002 * (i % 5 - 2)) for i in range(30))
    return timing.Measurement(samples, samples, ms, "host wall", timing.bootstrap_median(samples))


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


def test_claim_takes_the_faster_original() -> None:
    """An original that was slowed down in the final comparison must not make the result look better."""
    found = claim({"a": pair(23.2, 9.26)}, {"a": alone(11.9)})
    assert found.ratio == pytest.approx(11.9 / 9.26, rel=0.01)
    assert found.ci.low < found.ratio < found.ci.high < 1.35
    assert found.speed[0].base_ms == pytest.approx(11.9, rel=0.01) and "23.2" in found.speed[0].note


def test_claim_stays_paired_where_the_original_was_not_faster_alone() -> None:
    pairs = {"a": pair(10, 8)}
    found = claim(pairs, {"a": alone(12)})
    assert found.ratio == pairs["a"].ratio and found.ci == pairs["a"].ci and not found.speed[0].note


def test_claim_over_buckets_is_the_geometric_mean_with_the_wider_interval() -> None:
    found = claim({"a": pair(20, 10), "b": pair(9, 10)}, {"a": alone(16), "b": alone(20)})
    assert found.ratio == pytest.approx((1.6 * 0.9) ** 0.5, rel=0.01)
    lows = [row.ci.low for row in found.speed]
    assert found.ci.low == pytest.approx((lows[0] * lows[1]) ** 0.5)
