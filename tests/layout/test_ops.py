"""One op, one name, one place each: module, test, documentation page, compile cases."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from wavecrest import ops
from wavecrest.dispatch import registry

ROOT = Path(__file__).parents[2]
NAMES = registry.names()
# public beside the ops: another way to call one of them, and what it may be given
BESIDE = ["PackedWeight", "get", "linear", "mlstm_parallel", "names", "pack"]


@pytest.mark.parametrize("name", NAMES)
def test_has_its_places(name: str) -> None:
    module = ROOT / "src/wavecrest/ops" / f"{name}.py"
    folder = ROOT / "src/wavecrest/ops" / name / "op.py"
    assert module.exists() or folder.exists(), "no module of the op's name"
    assert (ROOT / "tests/ops" / f"test_{name}.py").exists(), "no test file"
    page = ROOT / "docs/ops" / f"{name}.md"
    assert page.exists(), "no documentation page"
    assert f"wavecrest explain {name}" in page.read_text(), "the page does not say how to see the dispatch"


@pytest.mark.parametrize("name", NAMES)
def test_is_public(name: str) -> None:
    function = getattr(ops, name)
    assert inspect.isfunction(function)
    assert function.__doc__ and "Raises:" in function.__doc__


@pytest.mark.parametrize("name", NAMES)
def test_declares_what_tools_need(name: str) -> None:
    op = registry.get(name)
    assert "reference" in op.backends and "torch" in op.backends
    if "triton" in op.backends:
        assert op.compile_cases is not None, "a kernel without compile_cases is not held to any budget"
    assert op.key_fields
    signatures = [inspect.signature(part).parameters for part in (op.reference, op.check, op.key, op.cost)]
    assert all(list(parameters) == list(signatures[0]) for parameters in signatures), "the parts take other arguments"


def test_every_module_is_an_op_or_private() -> None:
    modules = {path.stem for path in (ROOT / "src/wavecrest/ops").glob("*.py") if not path.stem.startswith("_")}
    folders = {path.parent.name for path in (ROOT / "src/wavecrest/ops").glob("*/op.py")}
    assert modules - {"packed"} | folders == set(NAMES)


def test_all_is_sorted_and_complete() -> None:
    assert ops.__all__ == sorted([*NAMES, *BESIDE])


def test_only_one_file_asks_whether_triton_is_there() -> None:
    found = set()
    for path in (ROOT / "src/wavecrest/ops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(name.split(".")[0] == "triton" for name in names):
                found.add(path.name)
    assert found == {"_triton.py"}


def test_ops_import_and_run_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
import wavecrest.ops.rms_norm
from wavecrest import ops, registry
assert ops.rms_norm(torch.ones(2, 8)).shape == (2, 8)
for name in registry.names():
    op = registry.get(name)
    decision = op.decide(*op.inputs(*(2, 8, 8, 8)[: len(op.sizes)], torch.float32, "cpu"))
    assert decision.backend == "torch", decision
    assert any("triton is not importable" in refusal.reason for refusal in decision.refused), decision
from wavecrest.ops import _lib
try:
    _lib.row_offsets[(1,)]()
except Exception as error:
    assert "triton is not importable" in str(error), error
else:
    raise AssertionError("the stand-in was launched")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_name_is_the_function_however_it_is_imported() -> None:
    code = """
import wavecrest.ops.rms_norm
import wavecrest.ops as a
from wavecrest import ops as b
import inspect
assert inspect.isfunction(a.rms_norm) and a.rms_norm is b.rms_norm is wavecrest.ops.rms_norm
import importlib
assert importlib.import_module("wavecrest.ops.rms_norm").rms_norm is a.rms_norm
assert inspect.isfunction(a.rms_norm)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
