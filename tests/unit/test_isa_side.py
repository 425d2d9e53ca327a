"""The sides of `wavecrest isa diff`: what an option names, and what becomes of a child process."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from wavecrest.errors import EnvironmentProblem, InvalidArgument, RecordError
from wavecrest.hardware import cpu
from wavecrest.isa import compiler, side, survey
from wavecrest.isa.facts import IsaRecord, Row
from wavecrest.isa.side import Place, Task
from wavecrest.ops.common import triton as _triton
from wavecrest.records import files, provenance

TASK = Task(target="nothing", archs=["gfx942"])


def record(*rows: Row) -> IsaRecord:
    return IsaRecord(header=provenance.header(cpu(), evidence="compiled"), target="op", rows=list(rows))


def crashed() -> Row:
    return Row(
        target="op", case="a", arch="gfx942", config={}, chosen="shipped", kernel="k", reason="the compiler crashed"
    )


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_what_an_option_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert side.place(None) == Place("here") and side.place(None).words == "this environment"
    (tmp_path / "other" / "triton").mkdir(parents=True)
    (tmp_path / "other" / "triton" / "__init__.py").touch()
    folder = side.place(str(tmp_path / "other"))
    assert folder.kind == "folder" and folder.words == "…/other"
    python = program(tmp_path / "venv" / "bin" / "python", "")
    assert side.place(str(python)) == side.place(str(tmp_path / "venv")) == Place("python", python)
    assert side.place(str(python)).words == "…/venv/bin/python"
    monkeypatch.setenv("PATH", str(python.parent))
    assert side.place("python") == Place("python", python)
    assert side.place("base.json") == Place("file", Path("base.json"))
    assert side.place("base.jsonl.gz").words == "base.jsonl.gz"


@pytest.mark.parametrize(
    ("text", "message"), [("", "a folder without a package triton"), ("nowhere", "no interpreter, no folder")]
)
def test_what_names_nothing(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=message):
        side.place(text or str(tmp_path))


def test_a_saved_side_is_read(tmp_path: Path) -> None:
    files.write_model(tmp_path / "a.jsonl.gz", record(crashed()))
    files.write_model(tmp_path / "b.json", record(crashed()))
    for name in ("a.jsonl.gz", "b.json"):
        found = side.run(side.place(str(tmp_path / name)), TASK)
        assert found.target == "op" and found.rows == [crashed()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "it has no format_version"),
        ('{"format_version": 1, "kind": "bench"}', "no record of `wavecrest isa show --json`: kind 'bench'"),
        ('{"format_version": 1, "kind": "isa", "rows": 3}', "is damaged: header: Field required"),
        ('{"format_version": 9, "kind": "isa"}', "has format 9"),
    ],
)
def test_a_file_that_is_no_side(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(RecordError, match=message):
        side.run(side.place(str(tmp_path / "a.json")), TASK)


def test_the_error_of_a_child_is_raised_here() -> None:
    """The child is a process of this interpreter, whose kernels cannot be compiled."""
    with pytest.raises(EnvironmentProblem, match="TRITON_INTERPRET=1 is set"):
        side.run(Place(), Task(target="rms_norm", archs=["gfx942"], variables={"TRITON_INTERPRET": "1"}))


def test_an_interpreter_that_cannot_import_wavecrest(tmp_path: Path) -> None:
    python = program(tmp_path / "python", "import sys\nsys.exit(\"ModuleNotFoundError: No module named 'numpy'\")")
    with pytest.raises(
        EnvironmentProblem, match=r"…/.*/python compiles nothing: .*'numpy'; it needs torch, .*--target"
    ):
        side.run(Place("python", python), TASK)
    silent = program(tmp_path / "silent", "import sys\nsys.exit(7)")
    with pytest.raises(EnvironmentProblem, match=r"…/.*/silent compiles nothing: exit code 7$"):
        side.run(Place("python", silent), TASK)


def test_the_triton_of_a_folder_goes_before_the_installed_one(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('the one of this folder')")
    with pytest.raises(EnvironmentProblem, match=f"…/{tmp_path.name}: .* needs the package triton"):
        side.run(side.place(str(tmp_path)), TASK)


@pytest.mark.parametrize("kind", ["folder", "python"])
def test_an_installed_wavecrest_brings_no_triton_of_its_environment(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed packages are one folder: wavecrest is to be found there, and the Triton beside it is not."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    said = tmp_path / "said"
    shown = f"import json, sys\nopen({str(said)!r}, 'w').write(json.dumps(sys.path))\nsys.exit(1)"
    if kind == "folder":
        (tmp_path / "triton").mkdir()
        (tmp_path / "triton" / "__init__.py").write_text(shown)
        where = side.place(str(tmp_path))
    else:
        where = Place("python", program(tmp_path / "python", shown))
    with pytest.raises(EnvironmentProblem):
        side.run(where, TASK)
    searched = [Path(path) for path in json.loads(said.read_text())]
    # behind the folder of the program itself: wavecrest alone, then the side's own packages
    assert searched[1].name == "source" and searched[2] != Path(side.__file__).resolve().parents[2]
    assert kind == "python" or searched[2] == tmp_path


def test_a_child_has_its_variables_and_a_cache_of_its_own(tmp_path: Path) -> None:
    said = tmp_path / "said"
    write = f"open({str(said)!r}, 'w').write(json.dumps([sys.argv, dict(os.environ)]))"
    python = program(tmp_path / "python", f"import json, os, sys\n{write}\nsys.exit(1)")

    def environment(task: Task) -> dict[str, str]:
        with pytest.raises(EnvironmentProblem):
            side.run(Place("python", python), task)
        arguments, found = json.loads(said.read_text())
        assert arguments[1:5] == ["-m", "wavecrest.measure.child", str(os.getpid()), "wavecrest.isa.side"]
        assert side.command_task(arguments[5]) == task
        return dict(found)

    plain = environment(TASK)
    assert plain.get("TRITON_CACHE_DIR") == os.environ.get("TRITON_CACHE_DIR")
    changed = environment(TASK.model_copy(update={"variables": {"AMDGCN_USE_BUFFER_OPS": "0"}}))
    assert changed["AMDGCN_USE_BUFFER_OPS"] == "0" and changed["TRITON_CACHE_DIR"] != plain.get("TRITON_CACHE_DIR")
    assert "TRITON_CACHE_DIR" in environment(TASK.model_copy(update={"llvm": ["x"]}))
    own = environment(TASK.model_copy(update={"variables": {"TRITON_CACHE_DIR": "mine"}}))
    assert own["TRITON_CACHE_DIR"] == "mine"


def test_progress_is_passed_on_and_other_output_is_not() -> None:
    seen: list[tuple[int, int, str]] = []
    for line in ("3 8 gemm 64x64 gfx942\n", "3 warnings of a module\n", "hello\n", "\n"):
        side._note(line, lambda *one: seen.append(one))
    assert seen == [(3, 8, "gemm 64x64 gfx942")]


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    asked: list[str] = []
    monkeypatch.setattr(compiler, "set_llvm_switches", asked.extend)
    yield asked


def test_a_switch_that_llvm_does_not_have(switched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "record", lambda *_, **__: record(crashed()))
    with pytest.raises(InvalidArgument, match="its LLVM has no switch a-b"):
        side.compile_side(TASK.model_copy(update={"llvm": ["a-b"]}))
    assert switched == ["a-b"]
    # without switches a crash is a row of the result
    assert side.compile_side(TASK).rows == [crashed()]


def test_switches_need_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "interpreted", True)
    with pytest.raises(EnvironmentProblem):
        compiler.set_llvm_switches(["a-b"])
