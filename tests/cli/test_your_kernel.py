"""docs/your_kernel.md: every block runs in one folder, in the order of the page; the kernel of the page wins."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from wavecrest import errors, records
from wavecrest.backends import user
from wavecrest.cli import main
from wavecrest.dispatch import registry
from wavecrest.isa.emulate import machine, opcodes

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "your_kernel.md"
KINDS = {"python", "console", "text", "toml"}


class Block(NamedTuple):
    kind: str
    marks: tuple[str, ...]
    text: str


def blocks() -> Iterator[Block]:
    for found in re.finditer(
        r"^```(\S+)([^\n]*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ):
        yield Block(found[1], tuple(found[2].split()), found[3])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to run the page in; what its blocks register and import is gone after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    # the child's threads would wait for a core in a loop
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # set by --kernels
    monkeypatch.setenv("WAVECREST_KERNELS", "")
    known = set(sys.modules)
    yield tmp_path
    for op, name in list(user.KERNELS):
        registry.get(op).unpin()
        registry.get(op).detach_user(name)
        del user.KERNELS[op, name]
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) in {str(file) for file in tmp_path.glob("*.py")}:
            del sys.modules[name]


def unavailable(block: Block) -> str:
    """Why a block cannot run here; "" if it can."""
    if "gpu" in block.marks and not torch.cuda.is_available():
        return "torch sees no GPU"
    if "emulated" in block.marks:
        try:
            opcodes.tables("cdna")
            machine.load()
        except errors.EnvironmentProblem as problem:
            return str(problem)
    return ""


@pytest.mark.slow
def test_every_block_of_the_page_runs(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    left, printed = [], ""
    for block in blocks():
        assert block.kind in KINDS, block
        marks = dict(mark.partition("=")[::2] for mark in block.marks)
        reason = unavailable(block)
        if "file" in marks:
            (folder / marks["file"]).write_text(block.text)
        elif reason or block.kind in ("text", "toml"):
            left.append((block, reason))
        elif block.kind == "python" and "raises" in marks:
            with pytest.raises(getattr(errors, marks["raises"])) as raised:
                exec(compile(block.text, str(PAGE), "exec"), {})
            # the page shows what is printed
            shown = [other.text.strip() for other in blocks() if other.kind == "text" and not other.marks]
            assert f"{marks['raises']}: {raised.value}" in shown
        elif block.kind == "python":
            exec(compile(block.text, str(PAGE), "exec"), {})
        elif "emulated" in marks:
            # kernels that are defined for the interpreter, as here, cannot be compiled
            environment = os.environ | {"TRITON_INTERPRET": "0"}
            command = [sys.executable, "-m", *shlex.split(block.text)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr[-2000:]
        else:
            for line in block.text.splitlines():
                assert main.main(shlex.split(line)[1:]) == 0, capfd.readouterr().err
        printed += capfd.readouterr().out
    assert [block.kind for block, reason in left if not reason] == ["text", "toml"]
    (key,) = records.load_as(folder / "tuned.json", records.TuneRecord).keys
    # which one wins depends on the machine and its load; all of them are right, and the winner is served
    assert key.backend in ("cpu_norm", "torch") and len(key.candidates) == 4
    assert {one.status for one in key.candidates} <= {"won", "timed", "dropped"}, key
    assert printed.count("cases passed") == 2 and "1 key pinned" in printed
    assert "not triton_norm" in printed
    assert ("cpu_norm Config(ROWS=" in printed) == (key.backend == "cpu_norm")


def test_a_new_op_is_refused_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.txt").write_text("mine")
    for name, path, message in (
        ("Scaled-SiLU", "new", "lower-case letters, digits and underscores"),
        ("class", "new", "lower-case letters, digits and underscores"),
        ("rms_norm", "new", "there is an op named rms_norm"),
        ("scaled_silu", "there", "is there and not empty"),
    ):
        assert main.main(["new-op", name, "--path", str(tmp_path / path)]) == 1
        assert message in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "new").exists() and list((tmp_path / "there").iterdir()) == [tmp_path / "there" / "a.txt"]


@pytest.mark.slow
def test_a_new_ops_package_passes_its_own_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As an installed package is found, by its entry point; `tests.cli.new_op_installed` does it with pip."""
    assert main.main(["new-op", "scaled_silu", "--path", str(tmp_path / "package")]) == 0
    assert f"next: pip install -e '{tmp_path / 'package'}[test]' && python -m pytest" in capsys.readouterr().err
    installed = tmp_path / "package" / "src"
    (installed / "wavecrest_scaled_silu-0.1.0.dist-info").mkdir()
    (installed / "wavecrest_scaled_silu-0.1.0.dist-info" / "METADATA").write_text("Name: wavecrest-scaled-silu\n")
    (installed / "wavecrest_scaled_silu-0.1.0.dist-info" / "entry_points.txt").write_text(
        "[wavecrest.ops]\nscaled_silu = wavecrest_scaled_silu\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), os.environ["PYTHONPATH"]])}
    # its budget is a test of Triton's compiler: `tests.cli.new_op_installed` runs it
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not budget", str(tmp_path / "package")]
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "8 passed" in done.stdout, done.stdout + done.stderr
