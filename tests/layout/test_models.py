"""Models name no backend: they ask Decisions which kernel runs. Their modules do not import each other in circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from wavecrest import ops

SRC = Path(__file__).parents[2] / "src"
MODELS = SRC / "wavecrest" / "models"
# names of kernels in published configurations are data: this file's table says which backend each stands for
TABLE = (MODELS / "xlstm" / "kernels.py", "KERNELS")
BACKENDS = {backend for name in ops.names() for backend in ops.get(name).backends}


def names_of_backends(source: str, table: str | None = None) -> Iterator[str]:
    """LINE: TEXT of each string that is a backend's name, or begins as our kernels' do; not in assignment `table`."""
    tree = ast.parse(source)
    allowed = {
        id(part)
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == table
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in allowed:
            continue
        if node.value in BACKENDS or node.value.startswith("triton"):
            yield f"{node.lineno}: {node.value!r}"


def test_no_backend_is_named() -> None:
    assert "torch" in BACKENDS and "triton" in BACKENDS
    found = [
        f"{path.relative_to(SRC)}:{place}"
        for path in sorted(MODELS.rglob("*.py"))
        for place in names_of_backends(path.read_text(), TABLE[1] if path == TABLE[0] else None)
    ]
    assert not found, "\n".join(found)


def test_a_name_is_found_and_the_table_is_not() -> None:
    planted = 'TAKES_TAILS = "triton_multiply"\nfound = backend == "torch" or backend.startswith("triton")\n'
    assert list(names_of_backends(planted)) == ["1: 'triton_multiply'", "2: 'torch'", "2: 'triton'"]
    table = 'KERNELS: dict[str, str] = {"a": "triton_x"}\nother: str = "triton"\n'
    assert list(names_of_backends(table, "KERNELS")) == ["2: 'triton'"]


def _modules() -> dict[str, Path]:
    found = {}
    for path in MODELS.rglob("*.py"):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def edges_of(sources: dict[str, str]) -> dict[str, set[str]]:
    """Imports between the modules: lazy ones too, and those for types alone."""
    found: dict[str, set[str]] = {}
    for name, source in sources.items():
        imported = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                wholes = {f"{node.module}.{alias.name}" for alias in node.names}
                imported |= (wholes & sources.keys()) or {node.module}
        found[name] = (imported & sources.keys()) - {name}
    return found


def circle(edges: dict[str, set[str]]) -> list[str]:
    """The modules that cannot be put below others: in a circle, or above one."""
    left = dict(edges)
    while lowest := [name for name, below in left.items() if not below & left.keys()]:
        for name in lowest:
            del left[name]
    return sorted(left)


def test_no_import_circle() -> None:
    assert not circle(edges_of({name: path.read_text() for name, path in _modules().items()}))


@pytest.mark.parametrize(
    "lazy", ["import b", "if TYPE_CHECKING:\n    from b import x", "def f():\n    from b import x"]
)
def test_a_circle_is_found(lazy: str) -> None:
    assert circle(edges_of({"a": lazy, "b": "import a", "c": ""})) == ["a", "b"]
