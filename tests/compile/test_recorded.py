"""Machine code is what was recorded: a change that is not meant to change it, such as a move, shows here. No GPU.

After a change that is meant to: python tests/compile/write_recorded.py [OP ...]
"""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.compile import recorded
from tests.compile.conftest import ARCHS, ops_with_kernels
from tests.compile.recorded import Compiled
from wavecrest.hardware import occupancy
from wavecrest.isa import budget, compiler

KERNEL = recorded.Kernel(
    key="k", code="code", spills=0, sgpr_spills=0, scratch=0, lds=1024, waves=4, instructions=20, matrix=5,
    loads={16: 6, 4: 8}, stores={16: 3},
)  # fmt: skip


@pytest.mark.parametrize("op", ops_with_kernels())
def test_machine_code_is_as_recorded(op: str, kernels: dict[str, Compiled]) -> None:
    record, found = recorded.load(), kernels[op]
    if version("triton") != record.triton:
        pytest.skip(f"recorded with triton {record.triton}, this is {version('triton')}")
    stale = [place for place in found.places if not record.has(place)]
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
        # the facts as well: those of a kernel that is not compiled are held to its budget
        if row.facts is None or recorded.Kernel.of(before.key, row.facts) != before:
            changed.append((row.case, row.arch))
    assert not changed, f"{len(changed)} of {len(found.rows)} kernels changed: {changed[:8]}"


def test_a_kernel_is_known_by_compiler_and_key() -> None:
    place = recorded.Place(op="rms_norm", case="N=64", arch="gfx950", key="k")
    record = recorded.Recorded(
        triton=version("triton"), ops={"rms_norm": {"N=64": {"gfx950": KERNEL, recorded.ALWAYS: KERNEL}}}
    )
    assert record.has(place)
    assert not record.has(place.model_copy(update={"key": "other"}))
    assert not record.has(place.model_copy(update={"case": "N=65"}))
    assert record.has(place.model_copy(update={"arch": recorded.ALWAYS}))
    assert not record.model_copy(update={"triton": "0.0"}).has(place)


@pytest.mark.parametrize(
    ("fact", "value", "line"),
    [
        ("spills", 1, "1 spills, at most 0"),
        ("sgpr_spills", 2, "2 spills, at most 0"),
        ("scratch", 8, "8 bytes of scratch, at most 0"),
        ("lds", 65537, "65537 bytes of LDS, the architecture has 65536"),
        ("waves", 3.0, "3 waves per SIMD, at least 4"),
        ("matrix", 1, "0.050 of the hot loop are matrix instructions, at least 0.1"),
        ("instructions", 0, "0.000 of the hot loop are matrix instructions, at least 0.1"),
        ("loads", {16: 5, 4: 7}, "0.74 of the bytes in loads of 16 bytes, at least 0.75"),
        ("loads", {0: 1}, "loads of a width that is not known"),
        ("stores", {2: 1}, "0.00 of the bytes in stores of 16 bytes, at least 0.75"),
    ],
)
def test_a_kernel_that_is_not_compiled_is_held_to_its_budget(
    fact: str, value: object, line: str, tmp_path: Path
) -> None:
    """Seen: two kernels of moe were recorded with a budget that their machine code broke, and no test was red."""
    limits = budget.Budget.model_validate({"limits": {"matrix": 0.1}, "waves": {"*": {"gfx942": 4}}})
    known = recorded.Compiled(places=[recorded.Place(op="moe", case="t=16", arch="gfx942", key="k")], rows=[])

    def lines(kernel: recorded.Kernel) -> list[str]:
        record = recorded.Recorded(triton=version("triton"), ops={"moe": {"t=16": {"gfx942": kernel}}})
        recorded.save(record, tmp_path / "recorded.json")
        again = recorded.load(tmp_path / "recorded.json")
        assert again == record and again.has(known.places[0])
        return budget.check(limits, again.rows(known))

    assert lines(KERNEL) == []
    assert lines(KERNEL._replace(**{fact: value})) == [f"moe t=16 on gfx942: {line}"]


@pytest.mark.parametrize("op", ["rms_norm", "gemm"])
def test_facts_are_recorded_as_they_are_compiled(op: str, kernels: dict[str, Compiled]) -> None:
    """A budget says the same of a kernel, compiled or not."""
    record, made = recorded.load(), kernels[op].rows
    places = [recorded.Place(op=op, case=row.case, arch=row.arch, key="") for row in made]
    strict = budget.Budget.model_validate(
        {
            "limits": {"spills": -1, "scratch": -1, "wide_loads": 1, "wide_stores": 1, "matrix": 1},
            "waves": {"*": dict.fromkeys(ARCHS, 99)},
        }
    )
    said = [budget.over(strict, row) for row in record.rows(Compiled(places=places, rows=[]))]
    limited = re.compile(", limited by .*")
    assert said == [[limited.sub("", line) for line in budget.over(strict, row)] for row in made]
    assert said and all(len(lines) >= 3 for lines in said)


def test_a_share_of_one_architecture_is_compiled_again_and_moves_with_the_record() -> None:
    every = [
        recorded.Place(op=op, case=str(number), arch=arch, key="k")
        for op, count in (("rms_norm", 30), ("softmax", 1))
        for number in range(count)
        for arch in (recorded.ALWAYS, "gfx950")
    ]
    ops: dict[str, dict[str, dict[str, recorded.Kernel]]] = {}
    for place in every:
        ops.setdefault(place.op, {}).setdefault(place.case, {})[place.arch] = KERNEL
    record = recorded.Recorded(triton=version("triton"), reader=recorded.reader(), ops=ops)

    def again(one: recorded.Recorded) -> list[tuple[str, str, str]]:
        needed = zip(every, one.needed(every), strict=True)
        return [(place.op, place.case, place.arch) for place, needs in needed if needs]

    first = again(record)
    assert len(first) == -(-30 // recorded.SHARE) + 1 and {arch for _, _, arch in first} == {recorded.ALWAYS}
    assert {op for op, _, _ in first} == set(ops) and first == again(record)
    # after some changes of the record each had its turn
    seen: set[tuple[str, str, str]] = set()
    for change in range(100):
        record.ops["softmax"]["0"]["gfx90a"] = KERNEL._replace(code=str(change))
        seen |= set(again(record))
    assert len(seen) == 31
    # code that reads machine code otherwise is tried on all of it
    assert len(again(record.model_copy(update={"reader": "other"}))) == 31
    record.ops["rms_norm"]["7"]["gfx950"] = KERNEL._replace(key="other")
    assert ("rms_norm", "7", "gfx950") in again(record)


def test_who_reads_machine_code_is_all_that_a_compilation_imports() -> None:
    """A change of any other module of isa, such as a command's, compiles nothing anew."""
    script = (
        "import sys; import wavecrest.isa.survey, wavecrest.isa.budget, wavecrest.hardware.occupancy\n"
        "print(*[one.__file__ for name, one in sys.modules.items() if name.startswith('wavecrest.isa')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert {Path(name) for name in done.stdout.split()} == set(recorded.readers()) - {Path(occupancy.__file__)}


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
