"""mlstm_step stores over what it loads without a barrier: each element of a state must be loaded by one lane alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compile.conftest import answer

QUESTIONS = (("lanes.py",),)


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    return answer("lanes.py")  # type: ignore[no-any-return]


def _alone(load: dict[str, Any]) -> bool:
    """True if no two lanes hold the same element."""
    lane, warp, warps = load["layout"]
    return all(size % (a * b * c) == 0 for size, a, b, c in zip(load["shape"], lane, warp, warps, strict=True))


def test_each_element_has_one_lane_or_there_is_a_barrier(kernels: dict[str, Any]) -> None:
    assert len(kernels) == 30
    for name, found in kernels.items():
        assert len(found["loads"]) == found["parts"], name
        assert found["barrier"] or all(_alone(load) for load in found["loads"]), name


def test_few_elements_are_held_by_several_lanes(kernels: dict[str, Any]) -> None:
    """Where the barrier is for."""
    few = {name: found for name, found in kernels.items() if " few " in name}
    assert len(few) == 6
    for name, found in few.items():
        assert found["barrier"] and not all(_alone(load) for load in found["loads"]), name
    assert not any(found["barrier"] for name, found in kernels.items() if name not in few)
