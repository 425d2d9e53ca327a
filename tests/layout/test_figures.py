"""Every measured figure in README and docs names its record, or says what it is instead.

A figure is a number with a unit of time or rate, a ratio, or a share of a limit, outside of code. Its record is named
in its own block (a paragraph, an item of a list with what is indented below it, a table with the blocks above and
below), or in the first block of its section; a pattern with stars names records too.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
EVIDENCE = {path.name for path in (ROOT / "evidence").glob("*/*")}
# made from records and the table of variables by docs/generate.py, which names them
GENERATED = {"cli.md", "env.md", "speed.md", "triton_versions.md", "tuned.md", "zoo.md"}
PAGES = [
    ROOT / "README.md",
    *(path for path in sorted((ROOT / "docs").glob("**/*.md")) if path.name not in GENERATED),
]

_NUMBER = r"\d[\d,]*(?:\.\d+)?"
FIGURE = re.compile(
    rf"{_NUMBER}\s?(?:µs|ms|ns|s|tokens/s|[GMT]B/s|[GT]FLOP/s)(?![\w/])"
    # a ratio, not sizes such as 64 × 128
    rf"|\d+\.\d+\s?×(?!\s?\d)|\d+\.\d+ times"
    rf"|{_NUMBER}\s?% of (?:a |the )?(?:copy|peak|limit|floor|bandwidth|datasheet)"
)
# of a table's first line
COLUMN = re.compile(r"µs|\bms\b|tokens/s|[GMT]B/s|FLOP/s|times|speed-up|faster")
RECORD = re.compile(r"(?:\d{4}-\d\d-\d\d|\*)_[a-z-]+_[a-z0-9_*]+\.(?:jsonl\.gz|log)")
# what a figure is if nobody measured it, or what became of the measurement; in the same block
SAYS = re.compile(
    r"datasheet|log was not kept|not in the tree|limit of the test|an aim|is counted",
    re.IGNORECASE,
)
_CODE = re.compile(r"`[^`]*`")


class Block(NamedTuple):
    """A piece of a page: its first line's number, its text, and the texts that may name its record."""

    line: int
    text: str
    around: str


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a page, without headings and code."""
    parts = list(_parts(text))
    lead = item = ""
    for index, (line, part) in enumerate(parts):
        if part.startswith("#"):
            lead = item = ""
            continue
        above = parts[index - 1][1] if index else ""
        below = parts[index + 1][1] if index + 1 < len(parts) else ""
        if above.startswith("#") or not above:
            lead = part
        table = part.startswith("|")
        # what an item of a list has said so far holds for what is indented below it, and for tables between
        item = f"{item}\n{part}" if part.startswith("  ") or table else part
        yield Block(line, part, "\n".join((lead, item, *((above, below) if table else ()))))


def _parts(text: str) -> Iterator[tuple[int, str]]:
    """Headings, paragraphs, items and tables with the numbers of their first lines."""
    held: list[str] = []
    start, fenced = 1, False
    for number, line in enumerate(text.splitlines(), 1):
        fence = line.lstrip().startswith("```")
        begins = re.match(r"#|[-*] |\d+\. ", line) or (line.startswith("|") != bool(held and held[0].startswith("|")))
        if held and (fence or fenced or not line.strip() or begins):
            yield start, "\n".join(held)
            held = []
        if not (fence or fenced) and line.strip():
            start = start if held else number
            held.append(line)
        fenced = fenced != fence
    if held:
        yield start, "\n".join(held)


def figures(text: str) -> list[str]:
    """The figures of a page that have no record, "line: figure"."""
    found = []
    for block in blocks(text):
        plain = _CODE.sub("", block.text)
        shown = FIGURE.findall(plain)
        first, _, rest = plain.partition("\n")
        if plain.startswith("|") and COLUMN.search(first) and re.search(r"\d", rest):
            shown.append("a column of a table")
        if shown and not (any(map(records, RECORD.findall(block.text + block.around))) or SAYS.search(block.text)):
            found.append(f"line {block.line}: {', '.join(one.strip() for one in shown[:4])}")
    return found


def records(name: str) -> list[str]:
    """The records that a name, or a pattern, is of."""
    return fnmatch.filter(EVIDENCE, name)


def unknown(text: str) -> list[str]:
    """The records that a page names and that are not there."""
    return sorted(name for name in set(RECORD.findall(text)) if not records(name))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_figure_names_its_record(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert unknown(text) == [], "no such records"
    assert figures(text) == [], "name the record in evidence/, or say that its log was not kept"


LINKED = "[r](evidence/h/2026-11-22_bench_rope.jsonl.gz)"


@pytest.mark.parametrize(
    "text",
    [
        f"It takes 3.2 ms ({LINKED}).",
        f"Lead: {LINKED}.\n\nIt takes 3.2 ms.",
        f"- one: {LINKED}\n\n| a | ms |\n|---|---|\n| b | 3.2 |\n\n  which is 1.5 × the other",
        f"| a | ms |\n|---|---|\n| b | 3.2 |\n\nFrom {LINKED}.",
        "It took 3.2 ms; its log was not kept.",
        "At 4.8 TB/s, of the datasheet.",
        "`sleep 3 ms` and 64 × 128 and 5 % of the elements",
        "```\n3.2 ms\n```",
        "3.2 ms in all records, `*_bench_rop*.jsonl.gz`",
    ],
)
def test_figures_with_a_record(text: str) -> None:
    assert figures(text) == [] and unknown(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "It takes 3.2 ms.", "It takes 1,020 µs.", "4,000 tokens/s", "3.1 TB/s", "1.5 × as fast", "1.5× as fast",
        "1.5 times", "91 % of the peak", "for 12 s",
        "It takes 3.2 ms (2026-11-22_bench_nothing.jsonl.gz).",
        f"# A\n\n{LINKED}\n\n# B\n\nIt takes 3.2 ms.",
        f"Lead.\n\n{LINKED}\n\nIt takes 3.2 ms.",
        f"Lead.\n\n- {LINKED}\n- It takes 3.2 ms.",
        "| a | ms |\n|---|---|\n| b | 3.2 |",
        "3.2 ms, `*_bench_nothing*.jsonl.gz`",
    ],
)  # fmt: skip
def test_figures_without_one(text: str) -> None:
    assert len(figures(text)) == 1


def test_records_that_are_not_there() -> None:
    assert unknown(f"{LINKED} 2026-11-22_bench_nothing.jsonl.gz") == ["2026-11-22_bench_nothing.jsonl.gz"]
