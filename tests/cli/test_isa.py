"""`wavecrest isa` as a user runs it: its tables with made-up facts, and a few real compilations in a child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wavecrest.cli import isa, main
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import cpu
from wavecrest.isa.facts import HotLoop, IsaRecord, KernelFacts, McaEstimate, Row
from wavecrest.ops.common import triton as _triton
from wavecrest.records import provenance

PARTS: dict[str, Any] = {
    "instructions": 200, "matrix": {}, "loads": {16: 8, 2: 1}, "stores": {16: 4},
    "barriers": 0, "waits": 5, "drains": 1,
}  # fmt: skip


def _facts(**changes: Any) -> KernelFacts:
    values: dict[str, Any] = {
        "warps": 4, "vgpr": 60, "agpr": 0, "sgpr": 30, "spills": 0, "sgpr_spills": 0, "scratch": 0, "lds": 8,
        "waves": 8, "most_waves": 8, "limit": "", "register_waves": 8, "llvm_waves": 8, "code_bytes": 2848,
        "code_hash": "0", "kernel": PARTS, "loops": 0, "hot": None,
    }  # fmt: skip
    return KernelFacts.model_validate(values | changes)


def _row(arch: str = "gfx942", facts: KernelFacts | None = None, **changes: Any) -> Row:
    values: dict[str, Any] = {
        "target": "op", "case": "N=64", "arch": arch, "config": {"BLOCK_N": 64, "num_warps": 4}, "chosen": "shipped",
        "kernel": "_kernel",
    }  # fmt: skip
    return Row(**(values | changes), facts=facts)


def _shown(rows: list[Row], capsys: pytest.CaptureFixture[str], **options: bool) -> str:
    isa.show(IsaRecord(header=provenance.header(cpu(), evidence="compiled"), target="op", rows=rows), **options)
    return capsys.readouterr().out


def _line(text: str, label: str) -> list[str]:
    (found,) = [line for line in text.splitlines() if line.strip().startswith(label)]
    return found.replace(label, "", 1).split()


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa._shared.out, "width", 80)


def test_five_architectures_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    archs = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
    text = _shown([_row(arch, _facts(vgpr=60 + index)) for index, arch in enumerate(archs)], capsys)
    assert max(map(len, text.splitlines())) <= 80
    assert _line(text, "VGPR") == ["60", "61", "62", "63", "64"]
    assert "N=64 · _kernel · BLOCK_N=64 num_warps=4" in text
    assert "nothing was run" in text
    for absent in ("AGPR", "matrix", "hot loop", "limited by", "waits"):
        assert absent not in text, absent


def test_every_fact_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    hot = PARTS | {"instructions": 100, "matrix": {"v_mfma": 16}, "loads": {16: 4}, "stores": {}, "barriers": 2}
    facts = _facts(
        vgpr=140, agpr=64, spills=67, sgpr_spills=3, scratch=216, lds=32768, waves=0.5, limit="lds", loops=1, hot=hot,
        kernel=PARTS | {"matrix": {"v_mfma": 50}, "loads": {16: 8, 0: 1}},
        mca=McaEstimate(tool="llvm-mca 22.1", cycles=200, matrix_cycles=64),
    )  # fmt: skip
    text = _shown([_row(facts=facts), _row("sm_90", _facts(agpr=None, sgpr=None, sgpr_spills=None))], capsys)
    wanted = {
        "VGPR": ["140", "60"], "AGPR": ["64", "–"], "SGPR": ["30", "–"], "spills": ["67+3s", "0"],
        "scratch B": ["216", "0"], "LDS B": ["32768", "8"], "waves per SIMD": ["0.5", "of", "8", "8", "of", "8"],
        "limited by": ["lds", "–"], "code B": ["2848", "2848"], "hot loop": ["100", "–"],
        "waits (full)": ["5", "(1)", "–"],
        "barriers": ["2", "–"], "model": ["64/200", "32%", "–"],
    }  # fmt: skip
    for label, cells in wanted.items():
        assert _line(text.split("n×B:")[0], label) == cells, label
    assert "8×16 1×?" in text and "50 (25%)" in text and "16 (16%)" in text
    assert "llvm-mca 22.1" in text and "not a time" in text


def test_a_row_without_facts_has_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    text = _shown([_row(facts=_facts()), _row("gfx950", reason="does not compile: [x]")], capsys)
    assert "gfx950 shipped: does not compile: [x]" in text and _line(text, "VGPR") == ["60"]
    assert "VGPR" not in _shown([_row("gfx950", reason="no")], capsys)


def test_a_reason_for_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert "gfx942: no model: no loop" in _shown([_row(facts=_facts(mca_reason="no loop"))], capsys)


def test_diff_shows_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    other = _facts(vgpr=21, waves=4, limit="vgpr")
    rows = [_row(facts=_facts()), _row(facts=other, chosen="num_warps=8", config={"BLOCK_N": 64, "num_warps": 8})]
    text = _shown(rows, capsys, diff=True)
    assert _line(text, "VGPR") == ["60", "21", "-39"] and _line(text, "num_warps") == ["4", "8", "+4"]
    assert _line(text, "waves per SIMD")[-1] == "-4" and _line(text, "limited by") == ["–", "vgpr"]
    assert "SGPR" not in text and "N=64 · _kernel · BLOCK_N=64\n" in text
    assert "no difference" in _shown([_row(facts=_facts()), _row("gfx90a", _facts())], capsys, diff=True)


def test_cases_of_several_ops_with_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    text = _shown([_row(facts=_facts(), target="a"), _row(facts=_facts(vgpr=61), target="b")], capsys)
    assert text.index("a\nN=64") < text.index("b\nN=64")
    assert [line.split() for line in text.splitlines() if "VGPR" in line] == [["VGPR", "60"], ["VGPR", "61"]]


def test_many_columns_become_several_tables(capsys: pytest.CaptureFixture[str]) -> None:
    archs = ("gfx90a", "gfx942", "gfx950")
    rows = [_row(arch, _facts(), chosen=chosen) for chosen in ("shipped", "num_warps=8") for arch in archs]
    text = _shown(rows, capsys)
    assert text.count("VGPR") == 2 and max(map(len, text.splitlines())) <= 80


def test_code(capsys: pytest.CaptureFixture[str]) -> None:
    loop = HotLoop(**PARTS, code=[".LBB0_1:", "    v_add_f32_e32 v1, v[0], v2"])
    text = _shown([_row(facts=_facts(hot=loop)), _row("gfx950", _facts(body=["    s_endpgm"]))], capsys, code=True)
    assert "hot loop\n.LBB0_1:\n    v_add_f32_e32 v1, v[0], v2\n" in text
    assert "whole kernel (it has no loop)\n    s_endpgm" in text


@pytest.mark.parametrize(
    ("archs", "configs", "columns"),
    [
        (["gfx942", "gfx950"], [], []),
        (["gfx942", "gfx950"], ["num_warps=8"], ["num_warps=8"]),
        (["gfx942"], ["num_warps=8"], ["shipped", "num_warps=8"]),
        (["gfx942"], ["num_warps=4", "num_warps=8"], ["num_warps=4", "num_warps=8"]),
    ],
)
def test_what_diff_compares(archs: list[str], configs: list[str], columns: list[str]) -> None:
    assert isa._pair(archs, configs) == columns


@pytest.mark.parametrize(
    ("archs", "configs"),
    [
        (None, []),
        (["gfx942"], []),
        (["gfx942", "gfx950"], ["a=1", "b=2"]),
        (None, ["a=1", "b=2"]),
        (["a", "b", "c"], []),
    ],
)
def test_diff_needs_two_columns(archs: list[str] | None, configs: list[str]) -> None:
    with pytest.raises(InvalidArgument, match="compares two columns"):
        isa._pair(archs, configs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "no op named 'nothing'"),
        (["rms_norm", "--arch", "gfx94"], "no architecture 'gfx94'"),
        (["rms_norm", "--arch", ","], "--arch names no architecture"),
        (["rms_norm", "--arch", "gfx942,gfx942"], "--arch names the same twice"),
        (["rms_norm", "--config", "num_warps=8", "--config", "num_warps=8"], "--config names the same twice"),
        (["rms_norm", "--config", "x"], "KEY=NUMBER"),
        (["rms_norm", "--diff"], "compares two columns"),
        (["show", "rms_norm", "--case", "N=5"], "no case 'N=5'"),
        (["--arch", "gfx94", "rms_norm"], "no architecture 'gfx94'"),
        (["rms_norm", "--budget", "/nowhere.toml"], "no budget at /nowhere.toml"),
        (["all", "--budget", "/nowhere.toml"], "a budget is of one op"),
        (["all", "--arch", "gfx942", "--case", "N=64"], "has no case 'N=64'"),
        (["/nowhere.py:cases"], "no file /nowhere.py"),
        (["rms_norm", "--what"], "No such option"),
    ],
)
def test_user_errors_exit_1(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_triton, "interpreted", False)
    assert main.main(["isa", *arguments]) == 1
    captured = capsys.readouterr()
    assert message in captured.err.replace("\n", " ") and captured.err.count("error:") == 1 and not captured.out


@pytest.mark.parametrize(
    ("rows", "budget", "code"),
    [
        ([_row(facts=_facts())], "", 0),
        ([_row(facts=_facts()), _row("gfx950", reason="does not compile")], "", 2),
        ([_row(facts=_facts())], '[waves]\n"*" = { gfx942 = 8 }\n', 0),
        ([_row(facts=_facts(waves=7))], '[waves]\n"*" = { gfx942 = 8 }\n', 2),
    ],
)
def test_exit_codes(rows: list[Row], budget: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = IsaRecord(header=provenance.header(cpu(), evidence="compiled"), target="op", rows=rows)
    monkeypatch.setattr(isa, "run", lambda target, **options: record)
    (tmp_path / "budget.toml").write_text(budget)
    assert main.main(["isa", "op", *(["--budget", str(tmp_path / "budget.toml")] if budget else [])]) == code


def test_the_interpreter_is_an_environment_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_triton, "interpreted", True)
    assert main.main(["isa", "rms_norm"]) == 3
    assert "TRITON_INTERPRET=1 is set" in capsys.readouterr().err


KERNELS = Path(__file__).parents[1] / "compile" / "kernels.py"


# two commands in one process, whose imports take longer than they do
COMMANDS = """
import contextlib, io, json, sys
from wavecrest.cli import main
found = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main.main(words)
    found.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, str]]:
    """Exit code, output and standard error of two commands that compile, as JSON with a budget and as a table."""
    pytest.importorskip("triton", reason="cross-compiling needs triton")
    budget = tmp_path_factory.mktemp("isa") / "budget.toml"
    budget.write_text('[waves]\n"float16" = { gfx942 = 9 }\n')
    case = ["isa", f"{KERNELS}:cases", "--case", "float16", "--asm"]
    warps = ["--config", "num_warps=1", "--config", "num_warps=3"]
    commands = [
        [*case, "--arch", "gfx942", *warps, "--budget", str(budget), "--json"],
        [*case, "--arch", "gfx942,sm_90", "--diff"],
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [(code, out, err) for code, out, err in json.loads(done.stdout)]


def test_real_kernels(compiled: list[tuple[int, str, str]]) -> None:
    code, out, err = compiled[0]
    assert code == 2, err
    record = IsaRecord.model_validate_json(out)
    assert json.loads(out)["header"]["evidence"] == "compiled"
    good, bad = record.rows
    assert good.facts is not None and good.facts.hot is not None and good.facts.hot.code[0].startswith(".LBB")
    assert bad.facts is None and "num_warps must be a power of 2" in bad.reason
    assert "8 waves per SIMD, at least 9" in err and err.count("over budget:") == 2


def test_real_table(compiled: list[tuple[int, str, str]]) -> None:
    code, out, err = compiled[1]
    assert code == 0, err
    assert _line(out, "SGPR")[-1] == "–" and "hot loop\n.LBB" in out
    assert err == ""
