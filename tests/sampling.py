"""Which cases of large tests, and which slow tests, a run takes: with `--share N` one in N, others with every turn.

`scripts/test` has the commit choose the turn, so that a commit runs the same cases everywhere and the next one runs
others. A test of fewer than LEAST cases runs all of them, unless it is marked `slow`: of those one in N runs. What is
marked `whole` runs.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Container, Iterable

import pytest

LEAST = 3
# in other folders a case is a page, a command or a kernel of its own
FOLDERS = ("tests/models/", "tests/ops/", "tests/optimizer/", "tests/unit/")
OF_SLOW = (*FOLDERS, "tests/cli/")


def left_out(cases: Iterable[str], share: int, turn: str, slow: Container[str] = ()) -> set[str]:
    """The cases that do not run.

    Args:
        cases: node ids, a test's name before the first "[".
        share: one case in this many runs, of each test.
        turn: any text; another one chooses other cases.
        slow: those of them that are slow, which are chosen from together.
    """
    tests: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        if case in slow and case.startswith(OF_SLOW):
            tests["slow"].append(case)
        elif case.startswith(FOLDERS):
            tests[case.partition("[")[0]].append(case)
    found: set[str] = set()
    for name, every in tests.items():
        if len(every) >= LEAST or name == "slow":
            # in an order that follows no parameter: with every third case some values would never meet
            every.sort(key=lambda case: hashlib.sha256(f"{turn} {case}".encode()).digest())
            found.update(every[-(-len(every) // share) :])
    return found


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take the cases that do not run out of those collected, as `--share` and `--turn` ask."""
    share = config.getoption("--share")
    sampled = [item.nodeid for item in items if item.get_closest_marker("whole") is None]
    slow = {item.nodeid for item in items if item.get_closest_marker("slow") is not None}
    out = left_out(sampled, share, config.getoption("--turn"), slow)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
    items[:] = [item for item in items if item.nodeid not in out]


def note(config: pytest.Config) -> str:
    """The line that says so, at the end of a run; "" where all cases run."""
    share, turn = config.getoption("--share"), config.getoption("--turn")
    if share == 1:
        return ""
    return (
        f"of tests with {LEAST} cases or more in {', '.join(FOLDERS)}, and of slow ones, one case in {share} runs, "
        f"chosen by {turn[:9]}: scripts/test --whole runs all"
    )
