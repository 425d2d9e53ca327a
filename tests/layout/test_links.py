"""Relative links between pages lead to files and headings that exist, and the README fits a stranger's patience."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("benchmarks/*.md")])
README_LINES = 80
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub names them."""
    found = set()
    for title in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        text = LINK.sub(lambda match: match[0].partition("](")[0], title)
        words = re.sub(r"[^\w\- ]", "", text.lower())
        found.add(words.replace(" ", "-"))
    return found


def broken(page: Path) -> list[str]:
    """The relative links of a page that lead nowhere."""
    found = []
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        at = (page.parent / file) if file else page
        if not at.exists():
            found.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(at):
            found.append(f"{target}: no such heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken(page)


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading: `code`\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](gone.md) [b](other.md#a-heading-code) [c](other.md#no) [d](https://x.org/y)\n```\n[e](f)\n```\n",
        encoding="utf-8",
    )
    assert broken(page) == ["gone.md: no such file", "other.md#no: no such heading"]


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= README_LINES
    assert any("No AMD timing exists yet" in line for line in lines[:12])
