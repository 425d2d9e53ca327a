"""Machine code is what was recorded: a change that is not meant to change it, such as a move, shows here. No GPU.

After a change that is meant to: python tests/compile/write_recorded.py [OP ...]
"""

from __future__ import annotations

from importlib.metadata import version

import pytest

from tests.compile import recorded
from tests.compile.conftest import ops_with_kernels
from tests.compile.recorded import Compiled


@pytest.mark.parametrize("op", ops_with_kernels())
def test_machine_code_is_as_recorded(op: str, kernels: dict[str, Compiled]) -> None:
    record, found = recorded.load(), kernels[op]
    if version("triton") != record.triton:
        pytest.skip(f"recorded with triton {record.triton}, this is {version('triton')}")
    there = {(case, arch) for case, archs in record.ops[op].items() for arch in archs}
    assert {(one.case, one.arch) for one in found.places} == there, "other cases: run write_recorded.py"
    changed = []
    for row in found.rows:
        before = record.of(op, row.case, row.arch)
        assert before is not None
        if row.facts is None or row.facts.code_hash != before[1]:
            changed.append((row.case, row.arch))
    assert not changed, f"{len(changed)} of {len(found.rows)} kernels changed: {changed[:8]}"


def test_a_kernel_is_known_by_compiler_budget_and_key() -> None:
    place = recorded.Place(op="rms_norm", case="N=64", arch="gfx950", key="k")
    record = recorded.Recorded(
        triton=version("triton"), budgets={"rms_norm": recorded.budget("rms_norm")},
        ops={"rms_norm": {"N=64": {"gfx950": ("k", "code"), recorded.ALWAYS: ("k", "code")}}},
    )  # fmt: skip
    assert record.has(place)
    assert not record.has(place.model_copy(update={"key": "other"}))
    assert not record.has(place.model_copy(update={"case": "N=65"}))
    assert not record.has(place.model_copy(update={"arch": recorded.ALWAYS}))
    assert not record.model_copy(update={"triton": "0.0"}).has(place)
    assert not record.model_copy(update={"budgets": {"rms_norm": "other"}}).has(place)
