"""docs/attacks.md: what is said to hold an attack exists, and refuses by the rule that is named."""

from __future__ import annotations

import re
from pathlib import Path

from tests.optimizer.cheats import CHEATS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "attacks.md").read_text(encoding="utf-8")
# rows of the tables: attack, then, now, held by
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_every_attack_is_held_by_a_cheat_or_a_test_that_exists() -> None:
    tests = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8"))
    }
    known = tests | {cheat.name for cheat in CHEATS}
    held = [row for row in ROWS if row[-1] != "held by"]
    assert len(held) > 60 and all(names(row[-1]) for row in held)
    assert {name for row in held for name in names(row[-1])} - known == set()


def test_every_cheat_is_refused_by_the_rule_that_the_page_names() -> None:
    rules = {cheat.name: cheat.rule for cheat in CHEATS}
    listed = {name: row[2] for row in ROWS for name in names(row[-1]) if name in rules}
    assert len(listed) > 40 and listed == {name: rules[name] for name in listed}
