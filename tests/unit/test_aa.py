"""benchmarks/aa.py: what it counts, on a simulated timer and on the real one."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks import aa

from wavecrest.measure import timing
from wavecrest.measure.speedup import LEAST_BLOCKS


@pytest.mark.parametrize(
    ("ends", "counts"),
    [((0.99, 1.01), (0, 0, 0)), ((1.001, 1.02), (4, 0, 0)), ((1.03, 1.05), (4, 0, 4)), ((0.9, 0.99), (0, 4, 0))],
)
def test_sides_that_win_are_counted(
    ends: tuple[float, float], counts: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pair(*_works: Any, **_options: Any) -> timing.Paired:
        return timing.Paired((1.0,), (1.0,), 1.0, timing.Interval(*ends), "made up", 7)

    monkeypatch.setattr(aa.timing, "measure_pair", pair)
    row = aa.one_kind(aa.made("cpu"), "eager", 4, 0.01)
    assert (row["faster"], row["slower"], row["kept"]) == counts and row["seeds"] == [7] * 4


def test_both_sides_are_one_object_and_the_inputs_go_round() -> None:
    workload = aa.made("cpu")
    seen = set()
    forward = workload.model.forward
    workload.model.forward = lambda x: (seen.add(x.data_ptr()), forward(x))[1]  # type: ignore[method-assign]
    row = aa.one_kind(workload, "eager", 2, 0.02)
    assert len(seen) > 2 and len(row["ratios"]) == 2 and row["blocks"] >= LEAST_BLOCKS


def test_as_many_wins_are_allowed_as_chance_explains() -> None:
    assert aa.most(200) == pytest.approx(200 * 0.025 + 3 * (200 * 0.025 * 0.975) ** 0.5)
