"""Every code block of README and docs runs as it stands, or says why not."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs import snippets
from wavecrest import settings
from wavecrest.optimizer import api, measurer

WITH_BLOCKS = [page for page in snippets.PAGES if snippets.blocks(page)]
# blocks that are not run: fewer is better; who adds one raises the number, and says why above the block
NOT_RUN = 35
# a run that a page starts tries this step alone, which compiles nothing; seconds of its budget, of sampling a bucket
STEP, BUDGET, SAMPLING = "fuse_qkv", 10.0, 0.2


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[snippets.Reader]:
    """In an empty folder, with little time, a terminal of 100 columns, and a database of measured rows of their own."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"COLUMNS": "100", "WAVECREST_DATABASE": str(tmp_path / "user.db")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(measurer, "LEAST_SECONDS", SAMPLING)
    monkeypatch.setattr(measurer, "RESOLUTION_SECONDS", SAMPLING)
    options = api.Options

    def short(*args: Any, **named: Any) -> api.Options:
        return replace(options(*args, **named), steps=(STEP,), budget=BUDGET)

    monkeypatch.setattr(api, "Options", short)
    torch.manual_seed(0)
    before, handlers = settings.current(), list(settings.logger.handlers)
    yield snippets.Reader(tmp_path)
    settings.update(precision=before.precision, strict=before.strict, deterministic=before.deterministic)
    settings.STATE.log_level = before.log_level
    settings.logger.setLevel(logging.NOTSET)
    settings.logger.handlers[:] = handlers
    # every page has a serve.py of its own
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.relative_to(snippets.ROOT).as_posix())
def test_blocks_run(page: Path, reader: snippets.Reader) -> None:
    for block in snippets.blocks(page):
        reader.paste(block)


def test_pages_that_are_run_elsewhere_are() -> None:
    for page, test in snippets.ELSEWHERE.items():
        assert page.is_file() and page.stem in test.read_text(encoding="utf-8")


def test_what_is_not_run_says_why(request: pytest.FixtureRequest) -> None:
    left_out = [block for page in WITH_BLOCKS for block in snippets.blocks(page) if "not run" in block.notes]
    writer = request.config.get_terminal_writer()
    writer.line(f"\n{len(left_out)} blocks of README and docs are not run:")
    for block in left_out:
        writer.line(f"  {block.place}: {block.notes['not run']}")
    assert all(len(block.notes["not run"].split()) > 1 for block in left_out)
    assert len(left_out) <= NOT_RUN


def page(folder: Path, text: str) -> list[snippets.Block]:
    path = folder / "page.md"
    path.write_text(text, encoding="utf-8")
    return snippets.blocks(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\nx = y + 1\n```\n", "name 'y' is not defined"),
        ("```python\nf(x, /)\n```\n", "invalid syntax"),
        ("<!-- not run: needs a GPU -->\n```python\nf(x, /)\n```\n", "invalid syntax"),
        ("```\nwavecrest\n```\n", "language ''"),
        ("```console\n$ wavecrest --version\nwavecrest 99\n```\n", "printed:"),
        ("```console\n$ wavecrest optimise\n```\n", "ended with 1"),
        ("<!-- not run: needs a GPU -->\n```sh\nwavecrest tune gemm --fast\n```\n", "No such option"),
        ("```sh\npip install wavecrest\n```\n", "pip is not run here"),
        ("<!-- signature -->\n```python\ndef rms_norm(x, weight=None, eps=1e-5): ...\n```\n", "rms_norm takes"),
    ],
    ids=lambda value: re.sub(r"\W+", " ", value)[:40],
)
def test_what_fails_is_found(tmp_path: Path, reader: snippets.Reader, text: str, message: str) -> None:
    with pytest.raises((AssertionError, NameError, SyntaxError), match=re.escape(message)):
        for block in page(tmp_path, text):
            reader.paste(block)


def test_a_page_is_pasted_from_top_to_bottom(tmp_path: Path, reader: snippets.Reader) -> None:
    text = (
        '1. A file in a list:\n\n   ```toml title="work/one.toml"\n   x = 1\n   ```\n\n'
        "```python\nx = 1\n```\n\n"
        "```python\n# two.py\nimport sys\nprint(2, sys.argv[1:])\n```\n\n"
        "```python\nassert x == 1\n```\n\n"
        "<!-- exit code 1 -->\n```console\n$ PLACE=here python two.py 3   # a comment\n2 ['3']\n"
        "$ wavecrest --version\nwavecrest …\n$ wavecrest explain nothing\nerror: …\n```\n"
    )
    found = page(tmp_path, text)
    assert [(block.language, block.file) for block in found] == [
        ("toml", "work/one.toml"), ("python", ""), ("python", "two.py"), ("python", ""), ("console", ""),
    ]  # fmt: skip
    for block in found:
        reader.paste(block)
    assert (tmp_path / "work" / "one.toml").read_text() == "x = 1\n"


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a  1.0 ms", "a   1.0 ms  \n", True),
        ("a … ms", "a 12.5 ms", True),
        ("a\n…\nz", "a\nb\nc\nz\n", True),
        ("a\n…\nz", "a\nz\n", True),
        ("a 1 ms", "a 2 ms", False),
        ("a", "a\nb", False),
        ("a … z", "a\nz", False),
    ],
)
def test_outputs_are_compared(shown: str, printed: str, same: bool) -> None:
    assert snippets.matches(shown, printed) is same
