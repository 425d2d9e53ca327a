"""Imports point down only, lazy ones counted; no cycles; triton, os.environ and print stay where they belong."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "wavecrest"

MODULES = {
    ".".join(("wavecrest", *(parts[:-1] if parts[-1] == "__init__" else parts)))
    for parts in (path.relative_to(SRC).with_suffix("").parts for path in SRC.rglob("*.py"))
}

# layer of each package below wavecrest; docs/architecture.md explains the rules
LAYERS = {
    "errors": 0, "hardware": 0, "env": 0,
    "measure": 1, "records": 1, "dispatch": 1, "settings": 1, "cc": 1,
    "ops": 2,
    "backends": 3,
    "nn": 4, "models": 4,
    "graphs": 5, "bench": 5, "profile": 5, "report": 5, "doctor": 5, "isa": 5, "tune": 5,
    "quantizer": 5,
    "optimizer": 6,
    "cli": 7, "compat": 7, "integrations": 7,
}  # fmt: skip
# imports inside a layer that are allowed: (from, to)
SIDEWAYS = {
    ("hardware", "errors"),
    # rows and records are read with the backend names of today
    ("dispatch", "records"),
    # strictness and the rows that decide are dispatch's
    ("settings", "dispatch"),
    # a record stores measurements as the timer made them
    ("records", "measure"),
    ("models", "nn"),
    ("tune", "bench"), ("tune", "isa"),
    # its report is written as the others are
    ("quantizer", "report"),
    ("cli", "integrations"),
}  # fmt: skip
# report reads the schema of records and writes one file; nothing else may be reached
REPORT_MAY = {"records", "errors", "measure", "report"}
# places that name a module above or beside them by string and import it when asked: (module, what it names)
PLUG_POINTS = {
    # the public names, loaded on first use
    ("", "wavecrest"),
    # backends attach to ops by name
    ("dispatch.registry", "wavecrest.backends"),
    # a user's kernel is held to the contract when it is first asked for
    ("backends.user", "wavecrest.tune"),
    ("backends.user", "wavecrest.ops"),
    # an op names its study, which tools ask for
    ("ops", "study"),
    # ways of loading a workload
    ("measure.workload", "wavecrest.integrations"),
    # the program of a child process that applies a plan, which steps that need no plan start too
    ("optimizer.children", "wavecrest.optimizer.side"),
}


def _modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    """The syntax tree of a file, walked once: every test here asks for all of them."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def _imports(path: Path) -> list[tuple[int, str]]:
    """Every import of wavecrest in a file, lazy ones too; blocks under TYPE_CHECKING are not imports."""
    return list(_imported(_nodes(path)))


def _imported(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    skipped = {
        id(child)
        for node in nodes
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in ast.walk(node)
    }
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                # `from package import module` needs the module; `from module import name` needs the module named first
                whole = f"{node.module}.{alias.name}"
                yield node.lineno, whole if whole in MODULES else node.module


def _violations(name: str, path: Path) -> Iterator[str]:
    own = name.split(".")[0]
    if own in ("", "__main__"):
        return
    for line, target in _imports(path):
        if not target.startswith("wavecrest."):
            continue
        other = target.split(".")[1]
        if other.startswith("__") or other == own:
            continue
        if other not in LAYERS:
            yield f"{name}:{line}: {other} has no layer"
        elif own == "report" and other not in REPORT_MAY:
            yield f"{name}:{line}: report may not import {other}"
        elif LAYERS[other] > LAYERS[own] or (LAYERS[other] == LAYERS[own] and (own, other) not in SIDEWAYS):
            yield f"{name}:{line}: layer {LAYERS[own]} {own} imports layer {LAYERS[other]} {other}"


def test_imports_point_down() -> None:
    found = [line for name, path in _modules() for line in _violations(name, path)]
    assert not found, "\n".join(found)


def test_every_module_has_a_layer() -> None:
    tops = {name.split(".")[0] for name, _ in _modules()} - {"", "__main__"}
    assert tops <= set(LAYERS), tops - set(LAYERS)


def _named(path: Path) -> Iterator[str]:
    """Every module of wavecrest that a file names: imports, lazy and for types alone, and strings."""
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in MODULES:
            yield node.value


def _plugged(name: str, target: str) -> bool:
    """True where a plug point names what it loads when asked."""
    if name == "":
        return True
    if name.startswith("ops.") and target.endswith(".study"):
        return True
    return any(name == place and target.startswith(what) for place, what in PLUG_POINTS)


def test_no_import_cycles() -> None:
    edges: dict[str, set[str]] = {}
    for name, path in _modules():
        found = {target for target in _named(path) if target in MODULES and target != "wavecrest"}
        edges[name] = {target.removeprefix("wavecrest.") for target in found if not _plugged(name, target)} - {name}
    state: dict[str, int] = {}
    cycles: list[str] = []

    def visit(node: str, trail: list[str]) -> None:
        if state.get(node) == 2:
            return
        if state.get(node) == 1:
            cycles.append(" -> ".join([*trail[trail.index(node) :], node]))
            return
        state[node] = 1
        for target in sorted(edges.get(node, ())):
            visit(target, [*trail, node])
        state[node] = 2

    for name in sorted(edges):
        visit(name, [])
    assert not cycles, "\n".join(cycles)


@pytest.mark.parametrize(("package", "allowed"), [("triton", ("ops.", "ops", "isa."))])
def test_triton_stays_in_ops_and_isa(package: str, allowed: tuple[str, ...]) -> None:
    found = [
        f"{name}:{line}"
        for name, path in _modules()
        for line, target in _imports(path)
        if target.split(".")[0] == package and not name.startswith(allowed)
    ]
    assert not found, found


def test_only_env_reads_the_environment() -> None:
    found = []
    for name, path in _modules():
        for node in _nodes(path):
            uses = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
            if uses and name != "env":
                found.append(f"{name}:{node.lineno}")
    assert not found, found


# readers of what comes from a file: `records.decode` is the one that knows limits
READERS = {
    "json": ("load", "loads", "JSONDecoder"),
    "yaml": ("load", "load_all", "safe_load", "safe_load_all", "full_load", "unsafe_load", "compose", "parse"),
    "tomllib": ("load", "loads"),
    "pickle": ("load", "loads", "Unpickler"),
    "marshal": ("load", "loads"),
    "torch": ("load",),
}
# the package's own data, and the project file of a checkout
OWN_DATA = ("env", "dispatch.tuned.spaces", "records.provenance")
# reads what the process before it wrote, from a folder that its user alone can write to
OWN_COPIES = "measure.copies"


def test_one_decoder_reads_files() -> None:
    found = []
    for name, path in _modules():
        if name == "records.decode":
            continue
        for node in _nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module in READERS and node.module != "torch":
                found.append(f"{name}:{node.lineno}: from {node.module} import")
            if not isinstance(node, ast.Attribute):
                continue
            module = node.value.id if isinstance(node.value, ast.Name) else ""
            own = (module == "tomllib" and name in OWN_DATA) or (module == "torch" and name == OWN_COPIES)
            if node.attr == "model_validate_json" or (node.attr in READERS.get(module, ()) and not own):
                found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert not found, found


def test_only_cli_prints() -> None:
    found = []
    for name, path in _modules():
        for node in _nodes(path):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            if called and not name.startswith("cli"):
                found.append(f"{name}:{node.lineno}")
    assert not found, found


def _swallows(handler: ast.ExceptHandler) -> bool:
    broad = handler.type is None or (
        isinstance(handler.type, ast.Name) and handler.type.id in ("Exception", "BaseException")
    )
    if not broad:
        return False
    raises = any(isinstance(node, ast.Raise) for node in ast.walk(handler))
    # a recorded refusal: the error's text becomes part of a verdict, a refusal or a note
    records = handler.name is not None and any(
        isinstance(node, ast.Name) and node.id == handler.name for stmt in handler.body for node in ast.walk(stmt)
    )
    return not raises and not records


def test_no_swallowed_exceptions() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, path in _modules()
        for node in _nodes(path)
        if isinstance(node, ast.ExceptHandler) and _swallows(node)
    ]
    assert not found, found


def test_import_is_light() -> None:
    code = (
        "import time; t = time.perf_counter(); import wavecrest; dt = time.perf_counter() - t\n"
        "import sys; assert 'triton' not in sys.modules and 'torch' not in sys.modules, 'heavy import'\n"
        "print(dt)"
    )
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 0.5
    assert time.perf_counter() - begin < 60


def test_public_names_sorted_and_real() -> None:
    import wavecrest

    assert wavecrest.__all__ == sorted(
        wavecrest.__all__, key=lambda name: (not name[0].isupper(), name.lstrip("_") if name[0] != "_" else name)
    )
    for name in wavecrest.__all__:
        assert getattr(wavecrest, name) is not None
