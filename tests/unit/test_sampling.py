"""tests/sampling.py: a share of each large test, another one with every turn, and in the end all of it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from tests import sampling


def cases(test: str, count: int) -> list[str]:
    return [f"{test}[{index % 4}-{index // 4}]" for index in range(count)]


LARGE, SMALL = cases("tests/ops/test_a.py::test_b", 50), cases("tests/ops/test_a.py::test_c", sampling.LEAST - 1)
PAGES = cases("tests/docs/test_snippets.py::test_blocks_run", 50)


def test_a_share_of_each_large_test_runs() -> None:
    other = cases("tests/unit/test_d.py::test_e", sampling.LEAST)
    out = sampling.left_out([*LARGE, *SMALL, *PAGES, *other], 3, "abc")
    assert not out.intersection([*SMALL, *PAGES])
    assert len(out.intersection(LARGE)) == 50 - 17 and len(out.intersection(other)) == 2
    assert out == sampling.left_out(reversed([*LARGE, *other]), 3, "abc")
    assert sampling.left_out(LARGE, 1, "abc") == set()


def test_slow_tests_are_chosen_from_together() -> None:
    slow = [f"tests/unit/test_d.py::test_{name}" for name in "abcdefgh"]
    runs = [set(slow) - sampling.left_out([*slow, *SMALL], 4, str(turn), set(slow)) for turn in range(30)]
    assert {len(run) for run in runs} == {2} and set().union(*runs) == set(slow)
    # of another folder they all run
    assert not sampling.left_out(["tests/package/test_a.py::test_b"], 4, "abc", {"tests/package/test_a.py::test_b"})


def test_every_turn_takes_others_and_some_turns_take_all() -> None:
    runs = [set(LARGE) - sampling.left_out(LARGE, 3, str(turn)) for turn in range(30)]
    assert all(one != two for one, two in itertools.pairwise(runs))
    assert set().union(*runs) == set(LARGE)


def test_pytest_takes_the_share_and_says_so() -> None:
    def item(name: str, mark: str) -> Any:
        marks = {mark: True}
        return SimpleNamespace(nodeid=name, get_closest_marker=marks.get)

    gone: list[Any] = []
    config: Any = SimpleNamespace(
        getoption={"--share": 5, "--turn": "abcdef123456"}.get,
        hook=SimpleNamespace(pytest_deselected=lambda items: gone.extend(items)),
    )
    items = [item(name, "gpu") for name in LARGE] + [item(f"{name}2", "whole") for name in LARGE]
    every = list(items)
    sampling.leave_out(config, items)
    assert len(items) == 10 + 50 and len(gone) == 40 and {one.nodeid for one in gone} < set(LARGE)
    # in the order in which they were collected
    assert items == [one for one in every if one not in gone]
    assert "one case in 5 runs, chosen by abcdef123: scripts/test --whole" in sampling.note(config)
