"""Pages whose blocks are run show what these print."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def walk() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_walk", ROOT / "docs" / "walk.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("page", "blocks"), [("guides.md", 13), ("benchmarks.md", 1)])
def test_a_page_is_what_its_blocks_print(walk: ModuleType, page: str, blocks: int) -> None:
    text = (walk.DOCS / page).read_text(encoding="utf-8")
    assert page in walk.PAGES and text.count("```python") == blocks and walk.fresh(page) == text, "run docs/walk.py"


def test_outputs_are_written_and_replaced(walk: ModuleType) -> None:
    plain = "a\n\n```python\nprint(1)\n```\n\nb\n\n```python\nprint(2)\nprint(3)\n```\n"
    once = walk.walked(plain, "a.md")
    wanted = (
        "```python\nprint(1)\n```\n\n```text\n1\n```\n\nb\n\n```python\nprint(2)\nprint(3)\n```\n\n```text\n2\n3\n```\n"
    )
    assert once == f"a\n\n{wanted}"
    assert walk.walked(once.replace("2\n3", "9"), "a.md") == once


def test_a_block_that_raises_is_named_with_its_line(walk: ModuleType) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        walk.walked("a\n\n```python\nx = 1\nx / 0\n```\n", "a.md")
    assert "a.md, line 4" in str(caught.traceback[-1].path)
    with pytest.raises(NameError):
        walk.walked("```python\nx = 1\n```\n\n```python\nprint(x)\n```\n", "a.md")
