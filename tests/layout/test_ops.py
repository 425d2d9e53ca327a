"""One op, one name, one place each; an op folder has fixed file names; a call is typed and cheap."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.ops.op_harness import assert_short
from wavecrest import ops
from wavecrest.dispatch import registry

ROOT = Path(__file__).parents[2]
OPS = ROOT / "src/wavecrest/ops"
NAMES = registry.names()
# public beside the ops: other ways to call one of them, what it may be given, and the registry's look-up
BESIDE = ["PackedWeight", "get", "linear", "mlstm_parallel", "names", "pack"]
# packages of ops/ that are no op: what kernels share, and packed weights
SHARED = {"common", "packed"}
# families: ops over one kernel or one state, with a public function a file or a folder
FAMILIES = {"rows", "gated", "mlstm", "slstm"}
GRAMMAR = {"__init__", "call", "key", "reference", "kernel", "launch", "config", "backend", "study"}
STUDY = {"__init__", "cases", "space", "work", "bound"}


def _home(name: str) -> Path:
    """The file of an op's public function."""
    return Path(inspect.getfile(getattr(ops, name)))


def _folders() -> Iterator[Path]:
    """The folders of one op, those of families included."""
    for path in sorted(OPS.iterdir()):
        if path.is_dir() and path.name not in SHARED and path.name != "__pycache__":
            yield path
            yield from (
                one for one in sorted(path.iterdir()) if one.is_dir() and one.name not in ("study", "__pycache__")
            )


@pytest.mark.parametrize("name", NAMES)
def test_has_its_places(name: str) -> None:
    assert OPS in _home(name).parents
    assert (ROOT / "tests/ops" / f"test_{name}.py").exists(), "no test file"
    page = ROOT / "docs/ops" / f"{name}.md"
    assert page.exists(), "no documentation page"
    assert f"wavecrest explain {name}" in page.read_text(), "the page does not say how to see the dispatch"


@pytest.mark.parametrize("name", NAMES)
def test_is_public(name: str) -> None:
    function = getattr(ops, name)
    assert inspect.isfunction(function)
    assert function.__doc__ and "Raises:" in function.__doc__


def test_an_op_stands_where_its_name_says() -> None:
    found = {}
    for name in NAMES:
        place = _home(name).relative_to(OPS)
        family = place.parts[0] in FAMILIES
        # a folder that carries the name of a public function has an underscore, so that neither replaces the other
        found[name] = f"{place.parts[0]}/{name}.py" if family and len(place.parts) == 2 else f"_{name}/__init__.py"
        if place.parts[0] in ("mlstm", "slstm"):
            found[name] = f"{place.parts[0]}/{name.removeprefix(f'{place.parts[0]}_')}/__init__.py"
        assert str(place) == found[name]


def test_folders_have_the_fixed_file_names() -> None:
    wrong = []
    for folder in _folders():
        own = {path.stem for path in folder.glob("*.py")} | {path.name for path in folder.iterdir() if path.is_dir()}
        for name in sorted(own - {"__pycache__"} - GRAMMAR):
            variant = name.startswith(("kernel_", "launch_"))
            in_family = folder.name in FAMILIES and (name in NAMES or name in {"device", *_subfolders(folder)})
            if not variant and not in_family:
                wrong.append(f"{folder.relative_to(OPS)}/{name}")
        study = {path.stem for path in (folder / "study").glob("*.py")}
        wrong += [f"{folder.relative_to(OPS)}/study/{name}" for name in sorted(study - STUDY)]
    assert not wrong, wrong


def _subfolders(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


@pytest.mark.parametrize("name", NAMES)
def test_declares_what_tools_need(name: str) -> None:
    op = registry.get(name)
    assert "reference" in op.backends and "torch" in op.backends
    if "triton" in op.backends:
        assert op.study.compile_cases is not None, "a kernel without compile_cases is not held to any budget"
    assert op.key_fields
    assert issubclass(op.call_type, tuple) and op.call_type.__name__.endswith("Call")


def test_nothing_takes_untyped_arguments() -> None:
    found = []
    for room in ("ops", "backends"):
        for path in (ROOT / "src/wavecrest" / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, (ast.FunctionDef, ast.Lambda)) and node.args.vararg is not None:
                    annotation = node.args.vararg.annotation
                    if annotation is None or ast.unparse(annotation) == "Any":
                        found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    # a kernel's positional arguments are its own; a class's refused constructor takes anything
    allowed = ("ops/common/launcher.py", "ops/common/triton.py", "ops/common/warmup.py", "ops/packed/weight.py")
    found = [one for one in found if not one.split(":")[0].endswith(allowed)]
    assert not found, "\n".join(found)


def test_all_is_sorted_and_complete() -> None:
    assert ops.__all__ == sorted([*NAMES, *BESIDE])


def test_only_one_file_asks_whether_triton_is_there() -> None:
    found = set()
    for path in OPS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(name.split(".")[0] == "triton" for name in names):
                found.add(str(path.relative_to(OPS)))
    assert found == {"common/triton.py"}


def _python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ops_import_and_run_without_triton() -> None:
    _python("""
import sys
sys.modules["triton"] = None
import torch
from wavecrest import ops
assert ops.rms_norm(torch.ones(2, 8)).shape == (2, 8)
for name in ops.names():
    op = ops.get(name)
    decision = op.decide(op.study.inputs(*(2, 8, 8, 8)[: len(op.study.sizes)], torch.float32, "cpu"))
    # C code needs no Triton
    assert decision.backend in ("torch", "c"), decision
    assert any("triton is not importable" in refusal.reason for refusal in decision.refused), decision
from wavecrest.ops.common import device
try:
    device.row_offsets[(1,)]()
except Exception as error:
    assert "triton is not importable" in str(error), error
else:
    raise AssertionError("the stand-in was launched")
""")


def test_a_call_loads_nothing_of_the_studies() -> None:
    _python("""
import sys
import torch
from wavecrest import ops
ops.rms_norm(torch.ones(2, 8))
ops.linear(torch.ones(2, 8), torch.ones(4, 8))
loaded = [name for name in sys.modules if name.startswith("wavecrest.ops.") and ".study" in name]
assert not loaded, loaded
assert ops.get("rms_norm").study.sizes == ("M", "N") and "wavecrest.ops.rows.study" in sys.modules
""")


def test_packages_and_functions_do_not_replace_each_other() -> None:
    _python("""
import inspect
import sys
import wavecrest.ops
# torch.compile's tracer takes longer to import than all of wavecrest
assert "torch._dynamo" not in sys.modules
import wavecrest.ops._gemm.call as c
import wavecrest.ops.rows.rms_norm as module
assert inspect.ismodule(c) and inspect.ismodule(module)
assert inspect.isfunction(wavecrest.ops.gemm) and inspect.isfunction(wavecrest.ops.rms_norm)
""")
    modules = {path.stem for path in OPS.iterdir()}
    assert not modules & set(ops.__all__)


# ops whose backend "torch" loops over experts, tokens or chunks, as PyTorch has no function for them: the launches of
# a step take the longest
COMPOSED = {"mlstm_chunkwise", "mlstm_sequence", "mlstm_step", "moe", "slstm_sequence", "slstm_step"}
SHORT = [
    (name, backend)
    for name in NAMES
    for backend in registry.get(name).backends
    if backend in ("triton", "c") or (backend == "torch" and name not in COMPOSED)
]


@pytest.mark.parametrize(("name", "backend"), SHORT)
def test_a_bound_call_is_short(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry.get(name)
    given = op.study.inputs(*(2, 16, 16, 16)[: len(op.study.sizes)], torch.float32, "cpu")
    run = op.of_fields(op.call_type)
    op.force(backend)
    # the public function gives its arguments to `run`
    assert_short(lambda: run(*given), monkeypatch, others=1)


def _imported(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports, lazily or for types too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if _file(whole) is not None else node.module


def _file(module: str) -> Path | None:
    place = ROOT.joinpath("src", *module.split("."))
    found = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return found if found.exists() else None


# files below ops/ that an op needs, those that it shares with others included: numbers that may only fall,
# unless a kernel comes (of gemm: one more kernel and its launch on 2026-11-28, and one on 2026-11-29)
MOST_FILES = {"rms_norm": 17, "flash_attention": 28, "gemm": 40}


@pytest.mark.parametrize("name", MOST_FILES)
def test_an_op_needs_few_files(name: str) -> None:
    needed: set[Path] = set()
    waiting = [_home(name)]
    while waiting:
        path = waiting.pop()
        if OPS in path.parents and path not in needed:
            needed.add(path)
            waiting += [found for module in _imported(path) if (found := _file(module)) is not None]
    assert len(needed) == MOST_FILES[name], sorted(str(path.relative_to(OPS)) for path in needed)


def test_spaces_to_tune_are_in_studies() -> None:
    found = []
    for path in OPS.rglob("*.py"):
        if "study" not in path.parts:
            names = [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
            found += [f"{path.relative_to(OPS)}: {name}" for name in names if name.startswith("space")]
    assert not found, found


# modules of an op that rooms above import, beside its call and the op itself (`backend`)
SEEN_ABOVE = {
    # what a model's own operations are made of
    "bench/peers.py": {"wavecrest.ops._flash_decoding.reference", "wavecrest.ops._rope.reference"},
    "models/xlstm/generation.py": {"wavecrest.ops._gemm.config"},
    "optimizer/steps/fuse_append.py": {"wavecrest.ops._flash_decoding.key"},
}


def test_rooms_above_see_little_of_an_op() -> None:
    found: dict[str, set[str]] = {}
    for path in (ROOT / "src/wavecrest").rglob("*.py"):
        place = path.relative_to(ROOT / "src/wavecrest")
        if place.parts[0] in ("ops", "backends") or "wavecrest.ops." not in path.read_text(encoding="utf-8"):
            continue
        for module in _imported(path):
            parts = module.split(".")
            inner = parts[:2] == ["wavecrest", "ops"] and len(parts) > 2 and parts[2] not in SHARED
            if inner and parts[-1] not in ("call", "backend"):
                found.setdefault(str(place), set()).add(module)
    assert found == SEEN_ABOVE
