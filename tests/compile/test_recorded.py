"""Machine code is what was recorded: a change that is not meant to change it, such as a move, shows here. No GPU.

After a change that is meant to: python tests/compile/write_recorded.py [OP ...]
"""

from __future__ import annotations

import warnings
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.compile import recorded
from tests.compile.conftest import ops_with_kernels
from tests.compile.recorded import Compiled
from wavecrest.isa import compiler


@pytest.mark.parametrize("op", ops_with_kernels())
def test_machine_code_is_as_recorded(op: str, kernels: dict[str, Compiled]) -> None:
    record, found = recorded.load(), kernels[op]
    if version("triton") != record.triton:
        pytest.skip(f"recorded with triton {record.triton}, this is {version('triton')}")
    stale = [place for place in found.places if (record.of(op, place.case, place.arch) or ("",))[0] != place.key]
    if stale:
        # their machine code is held to the record below, so this costs time and hides nothing
        warnings.warn(f"{len(stale)} kernels of {op} have other keys: write_recorded.py --keys", stacklevel=1)
    if record.reader != recorded.reader():
        warnings.warn(
            f"other code reads machine code: all of {recorded.ALWAYS} is compiled; write_recorded.py --keys",
            stacklevel=1,
        )
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
    assert record.has(place.model_copy(update={"arch": recorded.ALWAYS}))
    assert not record.model_copy(update={"triton": "0.0"}).has(place)
    assert not record.model_copy(update={"budgets": {"rms_norm": "other"}}).has(place)


def test_a_share_of_one_architecture_is_compiled_again_and_moves_with_the_record() -> None:
    every = [
        recorded.Place(op=op, case=str(number), arch=arch, key="k")
        for op, count in (("rms_norm", 30), ("softmax", 1))
        for number in range(count)
        for arch in (recorded.ALWAYS, "gfx950")
    ]
    ops: dict[str, dict[str, dict[str, tuple[str, str]]]] = {}
    for place in every:
        ops.setdefault(place.op, {}).setdefault(place.case, {})[place.arch] = ("k", "code")
    budgets = {op: recorded.budget(op) for op in ops}
    record = recorded.Recorded(triton=version("triton"), reader=recorded.reader(), budgets=budgets, ops=ops)

    def again(one: recorded.Recorded) -> list[tuple[str, str, str]]:
        needed = zip(every, one.needed(every), strict=True)
        return [(place.op, place.case, place.arch) for place, needs in needed if needs]

    first = again(record)
    assert len(first) == 30 // recorded.SHARE + 1 and {arch for _, _, arch in first} == {recorded.ALWAYS}
    assert {op for op, _, _ in first} == set(ops) and first == again(record)
    # after some changes of the record each had its turn
    seen: set[tuple[str, str, str]] = set()
    for change in range(40):
        record.ops["softmax"]["0"]["gfx90a"] = ("k", str(change))
        seen |= set(again(record))
    assert len(seen) == 31
    # code that reads machine code otherwise is tried on all of it
    assert len(again(record.model_copy(update={"reader": "other"}))) == 31
    record.ops["rms_norm"]["7"]["gfx950"] = ("other", "code")
    assert ("rms_norm", "7", "gfx950") in again(record)


def test_a_key_is_the_same_wherever_triton_lies(tmp_path: Path) -> None:
    """Triton's own hash of AMD's options holds paths of libraries: a record was of use in one folder only."""

    def key(folder: str, content: str, warps: int = 4) -> str:
        library = tmp_path / folder / "ocml.bc"
        library.parent.mkdir(exist_ok=True)
        library.write_text(content)
        return compiler._options_key(SimpleNamespace(num_warps=warps, extern_libs=(("ocml", str(library)),)))

    assert key("one", "content") == key("another", "content")
    assert key("one", "content") != key("third", "other content")
    assert key("one", "content") != key("another", "content", warps=8)
