"""llvm-mca: what is made of its output, with programs that stand in for it, and with the real one where it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from wavecrest.errors import MissingDependency
from wavecrest.isa import mca
from wavecrest.isa.assembly import AMD, Line

LOOP = AMD.parse("""
.LBB0_1:
	global_load_dwordx4 v[0:3], v[32:33], off
	s_waitcnt vmcnt(0)
	v_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
	s_cbranch_scc0 .LBB0_1
""")

OUTPUT = """Iterations:        100
Instructions:      7100
Total Cycles:      15372
Total uOps:        7100

Resources:
[0]   - HWBranch
[1]   - HWSALU
[2]   - HWXDL


Resource pressure per iteration:
[0]    [1]    [2]    
 -     18.00  64.00  

Resource pressure by instruction:
[0]    [1]    [2]    Instructions:
 -      -     8.00   v_mfma
"""


def _tool(tmp_path: Path, *, output: str = "", error: str = "", code: str = "exit 0") -> mca.Tool:
    (tmp_path / "out").write_text(output)
    (tmp_path / "err").write_text(error)
    path = tmp_path / "llvm-mca"
    answer = f"cat > {tmp_path}/input; cat {tmp_path}/out; cat {tmp_path}/err >&2"
    path.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "  Debian LLVM version 99.1" && exit 0\n'
        f'echo "$@" > {tmp_path}/arguments; {answer}\n{code}\n'
    )
    path.chmod(0o755)
    return mca.Tool(str(path), "llvm-mca 99.1")


def test_estimate(tmp_path: Path) -> None:
    assert mca.estimate(_tool(tmp_path, output=OUTPUT), "gfx942", LOOP) == mca.Estimate(153.72, 64.0)
    given = (tmp_path / "input").read_text()
    # the tool repeats what it gets: no labels, no branches
    assert given.count("\n") == 3 and "LBB" not in given and "v_mfma" in given
    assert "-mcpu=gfx942" in (tmp_path / "arguments").read_text()


def test_a_loop_that_leaves_the_matrix_unit_alone(tmp_path: Path) -> None:
    tool = _tool(tmp_path, output=OUTPUT.replace("64.00  \n\nRes", " -  \n\nRes"))
    assert mca.estimate(tool, "gfx942", LOOP[:3]) == mca.Estimate(153.72, 0.0)


@pytest.mark.parametrize(
    ("arch", "parts", "reason"),
    [
        ("sm_90", {"output": OUTPUT}, "no model of sm_90"),
        # its figures would be those of another processor
        (
            "gfx950",
            {"output": OUTPUT, "error": "'gfx950' is not a recognized processor for this target"},
            "does not know",
        ),
        ("gfx942", {"output": OUTPUT, "code": "kill -ABRT $$"}, "crashed (signal 6)"),
        (
            "gfx942",
            {"error": "<stdin>:1:1: error: instruction not supported", "code": "exit 1"},
            "error: instruction not",
        ),
        ("gfx942", {"code": "exit 3"}, "exit code 3"),
        ("gfx942", {"output": "Cycles: 3"}, "another format"),
        ("gfx942", {"output": OUTPUT.replace(" 64.00", "")}, "another format"),
        ("gfx1100", {"output": OUTPUT.replace("HWXDL", "HWVALU")}, "no matrix unit"),
    ],
)
def test_reasons(arch: str, parts: dict[str, str], reason: str, tmp_path: Path) -> None:
    found = mca.estimate(_tool(tmp_path, **parts), arch, LOOP)
    assert isinstance(found, str) and reason in found


def test_no_loop(tmp_path: Path) -> None:
    assert mca.estimate(_tool(tmp_path, output=OUTPUT), "gfx942", [Line(".L:", label=".L")]) == "no loop"


def test_the_newest_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    _tool(tmp_path)
    shutil.copy(tmp_path / "llvm-mca", tmp_path / "llvm-mca-29")
    shutil.copy(tmp_path / "llvm-mca", tmp_path / "llvm-mca-30")
    assert mca.find() == mca.Tool(str(tmp_path / "llvm-mca-30"), "llvm-mca 99.1")
    for name in ("llvm-mca-29", "llvm-mca-30"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
    # those that do not run are passed over
    assert mca.find().path not in (str(tmp_path / "llvm-mca-29"), str(tmp_path / "llvm-mca-30"))


def test_one_that_does_not_know_the_chip_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(mca, "_PLACES", ("llvm-mca",))
    _tool(tmp_path)
    tool = tmp_path / "llvm-mca"
    tool.write_text(tool.read_text().replace("99.1", "14.0.6"))
    with pytest.raises(MissingDependency, match="17 or newer"):
        mca.find()


def test_none_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(mca, "_PLACES", ("llvm-mca",))
    with pytest.raises(MissingDependency, match="--mca needs the package llvm") as caught:
        mca.find()
    assert caught.value.exit_code == 3


def test_the_real_tool() -> None:
    try:
        tool = mca.find()
    except MissingDependency as error:
        pytest.skip(str(error))
    found = mca.estimate(tool, "gfx942", LOOP)
    assert isinstance(found, mca.Estimate), found
    # 16 passes of a 32x32x8 instruction; each iteration waits for its load
    assert found.matrix_cycles == 8.0 and found.cycles > 8
    twice = mca.estimate(tool, "gfx942", [*LOOP[:-1], LOOP[3], LOOP[-1]])
    assert isinstance(twice, mca.Estimate) and twice.matrix_cycles == 16.0
