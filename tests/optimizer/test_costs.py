"""A run keeps to its budget: a step that would not fit is not begun."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.optimizer.conftest import Run
from tests.optimizer.planted import CLOCK, Nothing, Planted, TakePauseOut
from wavecrest.optimizer.alternate import LOOKS
from wavecrest.optimizer.costs import (
    COMPILE_START,
    LATER_SHARE,
    OWN_NORMS_FACTOR,
    PROCESS_SHARE,
    SEARCH_FACTOR,
    TRACE_SHARE,
    Costs,
    kind_of,
)
from wavecrest.optimizer.finish import MOST_SECONDS


class Slow(Planted):
    """Takes `seconds` to apply and changes nothing."""

    def __init__(self, number: int, seconds: float, phase: str = "surgery") -> None:
        self.id = self.title = f"slow {number}"
        self.seconds = seconds
        self.phase = phase  # type: ignore[assignment]

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        CLOCK.advance(self.seconds)
        return model


@pytest.mark.parametrize("seconds", [5.0, 20.0, 45.0])
@pytest.mark.parametrize("phase", ["surgery", "compile"])
def test_a_run_ends_within_its_budget(run: Run, phase: str, seconds: float) -> None:
    budget = 120.0
    record = run(*(Slow(number, seconds, phase) for number in range(40)), budget=budget).record
    tried = [row for row in record.steps if row.verdict != "skipped"]
    skipped = [row for row in record.steps if row.verdict == "skipped"]
    assert record.seconds <= 1.1 * budget
    assert tried and skipped and all("no time left" in row.reason for row in skipped)
    assert "it takes about" in skipped[0].reason
    # nor is time left in which one more and its proof would have fitted
    last = max(row.seconds for row in tried)
    proof = 2 * min(LOOKS) * MOST_SECONDS + (3 * last if phase == "compile" else 0.0)
    assert record.seconds + last + proof >= 0.9 * budget


def test_a_kept_step_leaves_time_to_prove_it(run: Run) -> None:
    record = run(TakePauseOut(), *(Slow(number, 10.0) for number in range(40)), budget=120.0).record
    assert record.result is not None and record.result.verdict == "faster"
    assert record.seconds <= 1.1 * 120.0


def test_cheap_steps_go_on_after_an_expensive_one_is_skipped(run: Run) -> None:
    record = run(
        Slow(1, 50.0, "compile"), Slow(2, 50.0, "compile"), Slow(3, 50.0, "compile"), Nothing(), budget=120.0
    ).record
    # by noise a tie may be called slower, once in 40
    skipped = [row.id for row in record.steps if row.verdict == "skipped"]
    assert "slow 3" in skipped and "noise" not in skipped


def test_what_a_trial_takes_is_learned() -> None:
    costs = Costs(sampling=4.0, ops=200)
    # before anything is known: the gate, and 10 s for a compilation of 200 ops
    assert costs.expect("plain") == 6.0 and costs.expect("first") == 6.0 + COMPILE_START + 2.0
    costs.add("plain", 5.0)
    costs.add("first", 25.0)
    assert costs.compilation == 20.0 and not costs.nothing_compiled
    assert costs.expect("later") == 5.0 + LATER_SHARE * 20.0 and costs.expect("search") == 5.0 + SEARCH_FACTOR * 20.0
    assert costs.expect("captured") < costs.expect("later")
    costs.add("later", 12.0)
    costs.add("later", 9.0)
    assert costs.expect("later") == 12.0


def test_a_first_compilation_with_own_norms_is_expected_to_take_longer() -> None:
    costs = Costs(sampling=4.0, ops=320)
    before = costs.compilation
    costs.own_norms = True
    assert costs.compilation == OWN_NORMS_FACTOR * before and costs.expect("plain") == 6.0
    assert costs.expect("first") == 6.0 + OWN_NORMS_FACTOR * before
    # what is known stays as it is
    costs.add("first", 40.0, compiling=30.0)
    assert costs.compilation == 30.0


def test_what_compilers_say_they_take_is_taken_at_their_word() -> None:
    costs = Costs(sampling=4.0, least_final=20.0, loads=4)
    costs.add("plain", 5.0)
    # of 40 s are 12 s of a profile and of the gate, which no later compilation takes
    costs.add("first", 40.0, compiling=23.0, tracing=9.0)
    assert costs.compilation == 23.0 and costs.cached == 9.0
    later = LATER_SHARE * 23.0
    # code for other shapes is in no cache: the first compilation again, twice
    assert costs.final(900.0, looks=1, compiled=True) == pytest.approx(20.0 + later + 2 * 23.0 + 4 * 9.0)
    costs.add("later", 30.0, compiling=12.0, tracing=8.0)
    assert costs.expect("later") == 30.0
    assert costs.final(900.0, looks=1, compiled=True) == 20.0 + 12.0 + 2 * 23.0 + 4 * 9.0
    costs.add("later", 50.0, compiling=25.0, tracing=8.0)
    assert costs.final(900.0, looks=1, compiled=True) == 20.0 + 3 * 25.0 + 4 * 9.0
    # where processes are not forked from one that has the compilers
    costs.imports = 3.0
    assert costs.final(900.0, looks=1, compiled=True) == 20.0 + 3 * 25.0 + 4 * (9.0 + 3.0)
    assert costs.final(900.0, looks=1, compiled=False) == 20.0


def test_a_look_that_traced_the_model_says_what_a_compilation_takes_at_least() -> None:
    costs = Costs(sampling=4.0, ops=500)
    prior = costs.compilation
    costs.traced = TRACE_SHARE * prior / 2
    assert costs.compilation == prior
    costs.traced = 21.0
    assert costs.compilation == 21.0 / TRACE_SHARE > prior
    costs.add("first", 30.0, compiling=20.0)
    assert costs.compilation == 20.0


def test_time_is_left_for_the_end() -> None:
    costs = Costs(sampling=4.0, least_final=20.0, later_looks=(4.0, 12.0))
    # one look is never cut, all are taken where 60 % of the budget holds them
    assert costs.final(900.0, looks=1, compiled=False) == 20.0 == costs.final(30.0, compiled=False)
    assert costs.final(50.0, compiled=False) == 30.0 and costs.final(900.0, compiled=False, looks=2) == 24.0
    assert costs.final(900.0, compiled=False) == 36.0
    later = costs.expect("later") - costs.expect("plain")
    first = costs.compilation
    assert costs.recompiling == 2 * first and first > 2 * later
    assert costs.final(900.0, compiled=True) == 36.0 + later + 2 * first
    # without the check at other shapes, and nothing of that where nothing is compiled
    assert costs.final(900.0, compiled=True, recompiled=False) == 36.0
    assert costs.final(900.0, compiled=False, recompiled=False) == 36.0
    costs.loads = 4
    cached = PROCESS_SHARE * costs.compilation
    assert costs.final(900.0, compiled=True) == pytest.approx(36.0 + later + 2 * first + 4 * cached)
    assert costs.final(900.0, compiled=False) == 36.0
    costs.loads, costs.sizes = 0, 5
    assert costs.serving == 5 * later
    assert costs.final(900.0, compiled=True) == pytest.approx(36.0 + 6 * later + 2 * first)
    assert costs.final(900.0, compiled=False) == 36.0


@pytest.mark.parametrize(
    ("phase", "compiled", "first", "kind"),
    [
        ("surgery", False, True, "plain"),
        ("surgery", True, False, "later"),
        ("compile", False, True, "first"),
        ("compile", True, False, "later"),
        ("capture", False, True, "plain"),
        ("capture", True, False, "captured"),
    ],
)
def test_kinds_of_trials(phase: str, compiled: bool, first: bool, kind: str) -> None:
    assert kind_of(Slow(1, 1.0, phase), compiled=compiled, first=first) == kind
