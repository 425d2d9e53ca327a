"""Every planted cheat is refused by the rule that is meant for it, and every rule is needed for one of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.optimizer.cheats import CHEATS, Cheat
from wavecrest.errors import StepRefused
from wavecrest.measure.workload import Workload
from wavecrest.optimizer.gate import ALL_RULES, Gate, RuleBroken
from wavecrest.optimizer.gate.process import ProcessState

# rules that hold for a whole run, which other tests turn off
OF_A_RUN = {"model", "timing"}


@pytest.fixture(autouse=True)
def as_before(one_thread: None) -> Iterator[None]:
    """Whatever a cheat did to the process, and a rule that is off let pass."""
    state = ProcessState()
    yield
    state.put_back()


def verdict(gate: Gate, candidate: Callable[..., Any]) -> str:
    """The rule that refuses a candidate, or "passed"."""
    try:
        rows = gate.check(candidate, thorough=True)
    except RuleBroken as error:
        return error.rule
    except StepRefused as error:
        return f"raised: {error}"
    return next((row.rule for row in rows if not row.passed), "passed")


def judged(cheat: Cheat, rules: frozenset[str]) -> str:
    model, inputs, candidate = cheat.make()
    state = ProcessState(model)
    try:
        return verdict(Gate.prepare(Workload(model, {"one": inputs}), rules=rules), candidate)
    finally:
        state.put_back()


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.name)
def test_a_cheat_is_refused_by_its_rule(cheat: Cheat) -> None:
    assert judged(cheat, ALL_RULES) in cheat.rule.split(" or ")


@pytest.mark.parametrize("rule", sorted(ALL_RULES - OF_A_RUN))
def test_a_rule_is_needed(rule: str) -> None:
    """With the rule turned off a cheat passes."""
    needing = [cheat for cheat in CHEATS if cheat.needs == rule]
    assert needing, f"no cheat shows that {rule} is needed"
    assert [judged(cheat, ALL_RULES - {rule}) for cheat in needing] == ["passed"] * len(needing)


def test_the_catalogue_is_large_enough() -> None:
    assert len(CHEATS) >= 60 and len({cheat.name for cheat in CHEATS}) == len(CHEATS)
    assert {cheat.needs for cheat in CHEATS} - {""} == ALL_RULES - OF_A_RUN


def test_processors_are_put_back_where_openmp_does_not_choose_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that leaves one processor to what is called next slows the original."""
    given = {0, 1, 2, 3}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(given), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, wanted: given.update(wanted), raising=False)
    for name in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    state = ProcessState()
    given -= {1, 2, 3}
    assert state.put_back() == ["it changed the processors of this thread from [0, 1, 2, 3] to [0]"]
    assert given == {0, 1, 2, 3} and state.put_back() == []
    # the first parallel region binds the thread that begins it
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    state = ProcessState()
    given -= {1, 2, 3}
    assert state.put_back() == []


def test_the_gate_leaves_the_process_as_it_was() -> None:
    before = ProcessState()
    flags = (torch.get_num_threads(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
    model, inputs, candidate = next(cheat for cheat in CHEATS if cheat.name == "zeros").make()
    verdict(Gate.prepare(Workload(model, {"one": inputs})), candidate)
    assert before.put_back() == []
    assert flags == (torch.get_num_threads(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
