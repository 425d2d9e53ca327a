"""Without torch every command says in one line what to install, or does what it can without."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from wavecrest import INSTALL_TORCH, env
from wavecrest.cli.main import COMMANDS

# in a child: torch cannot be imported, and neither can triton
CHILD = """
import contextlib, io, json, sys

sys.modules["torch"] = sys.modules["triton"] = None
from wavecrest.cli import _shared
from wavecrest.cli.main import main

def command(words):
    out, err = io.StringIO(), io.StringIO()
    _shared.out.file, _shared.err.file = out, err
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
    except BaseException as error:
        code = f"{type(error).__name__}: {error}"
    return code, out.getvalue(), err.getvalue()

def statement(text):
    try:
        exec(text, {})
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""

asked = json.loads(sys.argv[1])
print(json.dumps({
    "commands": [command(words) for words in asked["commands"]],
    "statements": [statement(text) for text in asked["statements"]],
}))
"""
NEED_TORCH = (
    "doctor", "optimize work.py:make", "optimize --hf x", "bench work.py:make", "bench rms_norm",
    "profile work.py:make",
    "verify work.py:make --plan plan.json", "verify --bundle proof.zip", "plan check plan.json", "explain rms_norm",
    "tune rms_norm", "tune work.py:make", "db show", "db check", "db export x", "db import x.csv", "isa show softmax",
    "isa run softmax", "new-op mine",
)  # fmt: skip
# what a command says, and its exit code
DO_WITHOUT = {
    "": (0, "Usage:"),
    "--help": (0, "Usage:"),
    "--version": (0, "wavecrest "),
    "plan show plan.json": (0, "workload  Linear"),
    "plan diff plan.json plan.json": (0, "the plans decide the same"),
    "compare a.json b.json": (1, "no result file at a.json"),
    "report none": (1, "no result file at none"),
    "optimize": (1, "give one workload"),
    "optimise": (1, "Did you mean 'optimize'?"),
}
STATEMENTS = (
    "import wavecrest; wavecrest.optimize", "from wavecrest import ops", "from wavecrest import nn",
    "from wavecrest import coverage", "from wavecrest import registry", "import wavecrest; wavecrest.hardware.detect()",
    "import wavecrest.ops", "import wavecrest.nn", "from wavecrest.dispatch import registry",
)  # fmt: skip
FINE = ("import wavecrest", "from wavecrest import Plan, Buckets, Workload, env, errors, hardware")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from torch import nn, zeros

    from wavecrest import hardware
    from wavecrest.measure.workload import from_example
    from wavecrest.optimizer.plan import Plan

    folder = tmp_path_factory.mktemp("without")
    (folder / "work.py").write_text("import torch\ndef make():\n    return torch.nn.Linear(4, 4), torch.zeros(2, 4)\n")
    Plan.start(from_example(nn.Linear(4, 4), zeros(2, 4)), hardware.cpu(), {"default": {}}).save(folder / "plan.json")
    asked = {
        "commands": [text.split() for text in (*NEED_TORCH, *DO_WITHOUT)],
        "statements": [*STATEMENTS, *FINE],
    }
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(asked)], env=env.python_child({"COLUMNS": "300"}), cwd=folder,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {
        **dict(zip((*NEED_TORCH, *DO_WITHOUT), found["commands"], strict=True)),
        **dict(zip((*STATEMENTS, *FINE), found["statements"], strict=True)),
    }


def test_every_command_is_asked() -> None:
    asked = {text.split()[0] for text in (*NEED_TORCH, *DO_WITHOUT) if text and not text.startswith("-")}
    assert set(COMMANDS) <= asked


@pytest.mark.parametrize("text", NEED_TORCH)
def test_one_line_says_what_to_install(said: dict[str, Any], text: str) -> None:
    code, out, err = said[text]
    assert code == 3, err
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: ") and not out, (out, err)
    assert INSTALL_TORCH in lines[0], lines[0]


@pytest.mark.parametrize("text", DO_WITHOUT, ids=lambda text: text or "bare")
def test_what_needs_no_torch_works(said: dict[str, Any], text: str) -> None:
    code, out, err = said[text]
    wanted, message = DO_WITHOUT[text]
    assert code == wanted and message in out + err, (code, out, err)


@pytest.mark.parametrize("text", STATEMENTS)
def test_from_python_the_error_is_named(said: dict[str, Any], text: str) -> None:
    assert said[text].startswith("MissingDependency: ") and INSTALL_TORCH in said[text]


@pytest.mark.parametrize("text", FINE)
def test_what_is_imported_without_torch(said: dict[str, Any], text: str) -> None:
    assert said[text] == ""
