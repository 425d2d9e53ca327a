"""Budget files: what they refuse, and that they cannot outlive what they are about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wavecrest.errors import RecordError
from wavecrest.isa import budget
from wavecrest.isa.facts import KernelFacts, Row, Stretch, wide_share

PLAIN = """
[limits]
spills = 0

[waves]
"*" = { gfx942 = 4, sm_90 = 8 }
"N=64*" = { gfx942 = 8 }

[[exception]]
cases = "N=1000"
archs = "gfx*"
wide_loads = 0.0
why = "rows of 2,000 bytes start at no multiple of 16"
"""


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "op.toml"
    path.write_text(text)
    return path


def _row(case: str = "N=4096", arch: str = "gfx942", **changes: Any) -> Row:
    part = Stretch(
        instructions=10,
        matrix={},
        loads=changes.pop("loads", {16: 4}),
        stores=changes.pop("stores", {16: 2}),
        barriers=0,
        waits=1,
        drains=1,
    )
    values: dict[str, Any] = {
        "warps": 4, "vgpr": 32, "agpr": 0, "sgpr": 20, "spills": 0, "sgpr_spills": 0, "scratch": 0, "lds": 64,
        "waves": 8, "most_waves": 8, "limit": "", "register_waves": 8, "llvm_waves": 8, "code_bytes": 100,
        "code_hash": "0",
        "kernel": part, "loops": 0, "hot": None,
    }  # fmt: skip
    facts = KernelFacts(**(values | changes))
    return Row(target="op", case=case, arch=arch, config={}, chosen="shipped", kernel="k", facts=facts)


def _rows(**changes: Any) -> list[Row]:
    """Rows that use every part of PLAIN, the first with `changes`."""
    return [_row(**changes), _row("N=64"), _row("N=1000", loads={2: 8})]


def test_a_kernel_within_its_budget(tmp_path: Path) -> None:
    assert budget.check(budget.load(_file(tmp_path, PLAIN)), _rows()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spills": 1}, "op N=4096 on gfx942: 1 spills, at most 0"),
        ({"sgpr_spills": 2}, "2 spills"),
        ({"scratch": 8}, "8 bytes of scratch"),
        ({"lds": 65537}, "65537 bytes of LDS, the architecture has 65536"),
        ({"loads": {2: 8}}, "0.00 of the bytes in loads of 16 bytes, at least 0.75"),
        ({"loads": {16: 1, 8: 1}}, "0.67 of the bytes in loads"),
        ({"stores": {8: 8}}, "bytes in stores"),
        ({"loads": {16: 8, 0: 1}}, "loads of a width that is not known"),
        ({"waves": 3.5, "limit": "vgpr"}, "3.5 waves per SIMD, at least 4, limited by vgpr"),
        ({"waves": 0, "limit": "lds"}, "0 waves per SIMD, at least 4, limited by lds"),
    ],
)
def test_over_the_budget(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (found,) = budget.check(budget.load(_file(tmp_path, PLAIN)), _rows(**changes))
    assert message in found


def test_no_access_of_a_kind_is_no_narrow_one(tmp_path: Path) -> None:
    assert budget.check(budget.load(_file(tmp_path, PLAIN)), _rows(stores={})) == []


def test_patterns_and_their_order(tmp_path: Path) -> None:
    loaded = budget.load(_file(tmp_path, PLAIN))
    assert [loaded.waves_of(_row(case)) for case in ("N=4096", "N=64", "N=64 packed")] == [4, 8, 8]
    # the later pattern says nothing about sm_90, so that the earlier one counts
    assert loaded.waves_of(_row("N=64", "sm_90")) == 8
    assert loaded.waves_of(_row("N=64", "gfx1100")) is None
    assert [loaded.limits_of(_row("N=1000", arch)).wide_loads for arch in ("gfx1100", "sm_90")] == [0, 0.75]
    later = PLAIN + '[[exception]]\ncases = "N=1*"\nwide_loads = 0.5\nwhy = "the later of two exceptions"\n'
    assert budget.load(_file(tmp_path, later)).limits_of(_row("N=1000")).wide_loads == 0.5


def test_an_architecture_without_a_floor(tmp_path: Path) -> None:
    (found,) = budget.check(budget.load(_file(tmp_path, PLAIN)), [*_rows(), _row(arch="gfx950")])
    assert "op N=4096 on gfx950: no least number of waves" in found


def test_a_kernel_that_does_not_compile(tmp_path: Path) -> None:
    failed = _row().model_copy(update={"facts": None, "reason": "no such instruction"})
    assert budget.check(budget.load(_file(tmp_path, PLAIN)), [*_rows(), failed]) == [
        "op N=4096 on gfx942: no such instruction"
    ]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('"N=5" = { gfx942 = 1 }', "waves: no case is named 'N=5'"),
        ('"N=1000" = { gfx94 = 1 }', "no architecture 'gfx94'"),
        (
            '[[exception]]\ncases = "N=7"\nspills = 1\nwhy = "a case that is no more"',
            "exception: no case is named 'N=7'",
        ),
        ('[[exception]]\narchs = "gfx11*"\nspills = 1\nwhy = "an arch not looked at"', "on 'gfx11*'"),
    ],
)
def test_parts_about_nothing(more: str, message: str, tmp_path: Path) -> None:
    head, tail = PLAIN.split("[[exception]]")
    text = PLAIN + more if more.startswith("[[") else f"{head}{more}\n[[exception]]{tail}"
    (found,) = budget.check(budget.load(_file(tmp_path, text)), _rows())
    assert message in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[waves", "is damaged"),
        ("", "waves: Field required"),
        ("[waves]\n[limit]\n", "limit: Extra inputs"),
        ("[waves]\n[limits]\nspill = 1\n", "limits.spill"),
        ("[waves]\n[limits]\nwide_loads = 2\n", "less than or equal to 1"),
        ('[waves]\n[[exception]]\ncases = "N=1"\nspills = 1\n', "exception.0.why"),
        ('[waves]\n[[exception]]\ncases = "N=1"\nspills = 1\nwhy = ""\n', "exception.0.why"),
        ('[waves]\n[[exception]]\ncases = "N=1"\nwhy = "an exception from nothing"\n', "changes no limit"),
    ],
)
def test_files_that_are_no_budget(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=message):
        budget.load(_file(tmp_path, text))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no budget at"):
        budget.load(tmp_path / "op.toml")


@pytest.mark.parametrize(
    ("accesses", "share"), [({}, None), ({16: 1}, 1.0), ({4: 4, 16: 1}, 0.5), ({2: 1}, 0.0), ({16: 2, 2: 1}, 32 / 34)]
)
def test_share_of_wide_accesses(accesses: dict[int, int], share: float | None) -> None:
    assert wide_share(accesses) == share
