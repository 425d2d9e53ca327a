"""`wavecrest isa diff` as a user runs it: with made-up sides, and once with kernels that are compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_isa_compare import facts, record, row
from wavecrest.cli import _shared, isa_diff, main
from wavecrest.isa import side
from wavecrest.isa.compare import IsaDiffRecord
from wavecrest.isa.facts import IsaRecord, load
from wavecrest.isa.side import Place, Task
from wavecrest.records import files

KERNELS = Path(__file__).parents[1] / "compile" / "kernels.py"
GOOD = record(row(facts()), row(facts(), case="N=65"))
BAD = record(row(facts(scratch=24, loop_scratch=24, spills=6)), row(facts(code_bytes=20000), case="N=65"))
WATCH = record(row(facts(code_bytes=20000)), row(facts(vgpr=100), case="N=65"))


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shared.out, "width", 200)


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Place, Task]]:
    """The sides that would be compiled: each gives GOOD."""
    asked: list[tuple[Place, Task]] = []

    def compiled(where: Place, task: Task, **_: Any) -> IsaRecord:
        if where.kind == "file":
            return load(where.path)
        asked.append((where, task))
        return GOOD

    monkeypatch.setattr(side, "run", compiled)
    return asked


def saved(folder: Path, **sides: IsaRecord) -> list[str]:
    for name, held in sides.items():
        files.write_model(folder / f"{name}.json", held)
    return [str(folder / f"{name}.json") for name in sides]


@pytest.mark.parametrize(
    ("new", "options", "code", "shown"),
    [
        (GOOD, [], 0, "2 kernels: 0 with a regression, 0 to watch, 0 better, 0 changed where it does not matter"),
        (BAD, [], 2, "op N=64 · _kernel · gfx942\n  regression: spills in a loop appeared: 0 → 24 accesses"),
        (WATCH, [], 0, "op N=64 · _kernel · gfx942\n  watch: 4,000 → 20,000 bytes of code"),
        (WATCH, ["--strict"], 2, "0 with a regression, 1 to watch, 0 better, 1 changed where it does not matter"),
        (WATCH, ["--every"], 0, "  changed: no change that matters\n  VGPR 128 → 100"),
        (BAD, ["--case", "N=65"], 0, "1 kernel: 0 with a regression, 1 to watch"),
    ],
)
def test_two_saved_sides(
    new: IsaRecord, options: list[str], code: int, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, other = saved(tmp_path, base=GOOD, new=new)
    assert main.main(["isa", "diff", "--base", base, "--with", other, *options]) == code
    captured = capsys.readouterr()
    assert shown in captured.out and "…/base.json" in captured.out and str(tmp_path) not in captured.out
    assert ("became worse" in captured.err) == (code == 2)


def test_a_saved_base_against_this_environment(tasks: list[tuple[Place, Task]], tmp_path: Path) -> None:
    (base,) = saved(tmp_path, base=BAD)
    options = ["--base", base, "--save", str(tmp_path / "new.json"), "-o", str(tmp_path / "diff.jsonl.gz")]
    assert main.main(["isa", "diff", *options]) == 0
    # op and architecture are those of the saved side
    assert tasks == [(Place(), Task(target="op", archs=["gfx942"]))]
    assert load(tmp_path / "new.json") == GOOD
    written = files.read_json(tmp_path / "diff.jsonl.gz", what="record")
    found = IsaDiffRecord.model_validate(written)
    assert [one.verdict for one in found.kernels] == ["better", "changed"] and found.base.source == "…/base.json"


def test_what_the_new_side_is_compiled_with(
    tasks: list[tuple[Place, Task]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").touch()
    options = ["--with", str(tmp_path), "--config", "num_warps=8", "--env", "A_B=c=d", "--env", "E=", "--llvm", "x-y"]
    assert main.main(["isa", "diff", "gemm", "--case", "N=64", *options, "--json"]) == 0
    common = {"target": "gemm", "archs": ["gfx942", "gfx950"], "case": "N=64"}
    changes = {"config": {"num_warps": 8}, "variables": {"A_B": "c=d", "E": ""}, "llvm": ["x-y"]}
    assert tasks == [(Place(), Task(**common)), (Place("folder", tmp_path), Task(**common, **changes))]
    assert [one["case"] for one in json.loads(capsys.readouterr().out)["kernels"]] == ["N=64"]
    assert main.main(["isa", "diff", "gemm", "--arch", "gfx942", "--new-arch", "gfx950"]) == 1
    assert [task.archs for _, task in tasks[2:]] == [["gfx942"], ["gfx950"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gemm"], "both sides are the same"),
        (["gemm", "--base", "a.json", "--with", "a.json"], "both sides are the same"),
        (["--config", "num_warps=8"], "give an op, all, or file.py:function"),
        (["gemm", "--with", "a.json", "--config", "num_warps=8"], "--config, --env, --llvm and --new-arch change how"),
        (["gemm", "--with", "a.json", "--save", "b.json"], "--save writes what --with compiles"),
        (["gemm", "--new-arch", "gfx950"], "--new-arch compares two architectures: give one --arch"),
        (["gemm", "--with", "nowhere"], "nowhere is no interpreter, no folder"),
        (["gemm", "--with", "nowhere.json"], "no record of wavecrest isa at nowhere.json"),
        (["gemm", "--arch", ","], "--arch names no architecture"),
        (["gemm", "--env", "3=4"], "--env takes NAME=VALUE"),
        (["gemm", "--env", "A=4", "--env", "A=5"], "--env names A twice"),
        (["gemm", "--llvm", "-mllvm=x"], "--llvm takes a switch"),
        (["gemm", "--config", "x"], "KEY=NUMBER"),
    ],
)
def test_user_errors_exit_1(
    arguments: list[str],
    message: str,
    tasks: list[tuple[Place, Task]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path, a=GOOD)
    assert main.main(["isa", "diff", *arguments]) == 1
    captured = capsys.readouterr()
    assert message in captured.err.replace("\n", " ") and captured.err.count("error:") == 1 and not captured.out
    assert tasks == []


def test_architectures_of_two_saved_sides() -> None:
    first = record(*(row(facts(), arch=arch) for arch in ("gfx942", "gfx950")))
    second = record(*(row(facts(), arch=arch) for arch in ("gfx950", "gfx90a")))
    assert isa_diff._archs([first, second]) == ["gfx950"] and isa_diff._archs([]) == ["gfx942", "gfx950"]


def test_spills_that_an_option_brings_are_found() -> None:
    """Half the waves hold the same tile in too few registers: compiled, in two processes."""
    pytest.importorskip("triton", reason="cross-compiling needs triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    options = ["--case", "large", "--arch", "gfx1100", "--config", "num_warps=4", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "wavecrest", "isa", "diff", f"{KERNELS}:cases", *options],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    found = IsaDiffRecord.model_validate_json(done.stdout)
    (kernel,) = found.kernels
    assert kernel.verdict == "regression" and kernel.words[0].startswith("spills in a loop appeared: 0 → ")
    assert any(text.startswith("occupancy 8 → 4 waves per SIMD") for text in kernel.words)
    assert found.base.config == "shipped" and found.new.config == "num_warps=4"
    assert "the machine code of 1 of 1 kernel became worse" in done.stderr
