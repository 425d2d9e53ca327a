"""mlstm_step stores over what it loads without a barrier: each element of a state must be loaded by one lane alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("lanes.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


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
