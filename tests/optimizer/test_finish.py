"""The final measurement in fresh processes: who runs what, what a dead child leads to, and how long it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.optimizer.conftest import Run
from tests.optimizer.planted import CLOCK, PAUSE, WORK, TakePauseOut, pairs_of
from wavecrest.errors import EnvironmentProblem
from wavecrest.measure import workload
from wavecrest.optimizer import finish
from wavecrest.optimizer.alternate import LOOKS
from wavecrest.optimizer.children import SideReport, Task
from wavecrest.optimizer.costs import Costs
from wavecrest.optimizer.plan import Plan
from wavecrest.optimizer.side import measure_side
from wavecrest.optimizer.steps import AppliedSteps, step_by_id
from wavecrest.records import BucketError

SLOW = "tests.optimizer.planted:slow"
FIRST = min(LOOKS)


class Children:
    """Children that run in this process on the simulated clock; `luck` slows each down, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str | None, dict[str, str | None]]] = []
        self.stacks: list[list[str]] = []
        self.luck: list[float] = [1.0]
        monkeypatch.setattr(finish, "run_pairs", pairs_of(self.run))

    def run(self, task: Task, changes: Mapping[str, str | None], name: str) -> SideReport:
        self.asked.append((name, dict(changes)))
        if task.plan is not None:
            self.stacks.append(Plan.load(Path(task.plan)).stack)
        found = measure_side(task, now=CLOCK)
        factor = self.luck[(len(self.asked) - 1) % len(self.luck)]
        times = {bucket: [ms * factor for ms in samples] for bucket, samples in found.times.items()}
        return found.model_copy(update={"times": times})


def test_a_note_says_how_many_processes_were_loaded() -> None:
    assert "were loaded 2 at a time: a pair takes 45 GB and two processors" in finish.loading(1, 45_000_000_000)
    assert "were loaded one by one: a pair takes 150 GB" in finish.loading(0, 150_000_000_000)


@pytest.mark.parametrize(("left", "compiled", "may"), [(65.0, True, True), (60.0, True, False), (45.0, False, True)])
def test_compiled_code_is_checked_at_other_shapes_where_there_is_time(left: float, compiled: bool, may: bool) -> None:
    """A CLIP ended after 122 s of 90 and a Swin after 164: it took 41 and 58 s (H200, 2026-11-27)."""
    costs = Costs(sampling=4.0, least_final=20.0)
    costs.add("first", 25.0, compiling=20.0)
    costs.add("later", 12.0, compiling=12.0)
    step = step_by_id("compile:default" if compiled else "replace_norm")
    run: Any = SimpleNamespace(
        ledger=SimpleNamespace(applied=AppliedSteps().plus(step, {"preset": "default"} if compiled else {"sites": []})),
        options=SimpleNamespace(budget=90.0),
        costs=costs,
        seconds_left=left,
    )
    assert finish.may_recompile(run) is may


@pytest.mark.parametrize("may", [False, True])
def test_without_time_the_result_is_the_model_of_its_trial(
    may: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With it, a new one, compiled from nothing."""
    made: list[nn.Module] = []
    resets: list[bool] = []

    class Remembers(TakePauseOut):
        def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
            made.append(super().apply(model, params))
            return made[-1]

    monkeypatch.setattr(finish, "may_recompile", lambda _run: may)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(True))
    result = run(Remembers())
    assert result.record.result is not None and result.record.result.verdict == "faster"
    # a trial makes two, of which one is held to causality; the third is the result, or the steps without compilation
    assert len(made) == 3 and result.model is made[2 if may else 1] and bool(resets) == may
    assert (finish.NOT_RECOMPILED in result.record.notes) == (not may)


@pytest.mark.parametrize("wrong", [False, True])
def test_steps_of_a_result_that_is_not_compiled_again_are_held_to_other_shapes(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    asked: list[tuple[list[str], bool]] = []

    def check(model: Any, applied: AppliedSteps, *, final: bool, recompiled: bool = True) -> list[BucketError]:
        names = [item.step_id for item in applied.steps]
        asked.append((names, recompiled))
        failed = wrong and "compile:default" not in names
        return [BucketError(bucket="b", output="y", error=9.0, own=0.0, limit=1.0, passed=not failed)]

    applied = AppliedSteps().plus(step_by_id("replace_norm"), {"sites": []})
    applied = applied.plus(step_by_id("compile:default"), {"preset": "default"})
    ledger = SimpleNamespace(applied=applied, note=notes.append, record=SimpleNamespace(final_parts={}))
    run: Any = SimpleNamespace(
        ledger=ledger, workload=SimpleNamespace(model=None), current=None, now=CLOCK, check=check
    )
    monkeypatch.setattr(finish, "build", lambda model, applied: model)
    monkeypatch.setattr(finish, "check_quality", lambda _workload, _model: [])
    monkeypatch.setattr(finish, "_drop_last", lambda _run, reason: f"dropped: {reason}")

    class Measured(Exception):
        """The check was passed."""

    def measured(_run: Any) -> None:
        raise Measured

    monkeypatch.setattr(finish, "_measured", measured)
    if wrong:
        assert str(finish._final(run, recompiled=False)).startswith("dropped: y of bucket b")
    else:
        with pytest.raises(Measured):
            finish._final(run, recompiled=False)
    assert asked == [(["replace_norm", "compile:default"], False), (["replace_norm"], True)]
    assert notes == [finish.NOT_RECOMPILED]


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    return Children(monkeypatch)


def test_a_workload_that_can_be_loaded_is_measured_in_alternating_processes(run: Run, children: Children) -> None:
    result = run(TakePauseOut(), workload=workload.load(SLOW))
    found = result.record.result
    assert found is not None and found.unit == "processes" and found.verdict == "faster"
    assert found.ratio == pytest.approx((PAUSE + WORK) / WORK, rel=0.02) and found.speed[0].blocks == FIRST
    names = [name for name, _ in children.asked]
    assert names == [
        "original, process 1", "result, process 1", "result, process 2", "original, process 2",
        "original, process 3", "result, process 3", "result, process 4", "original, process 4",
    ]  # fmt: skip
    assert children.stacks == [["gain"]] * FIRST
    assert f"over {FIRST} fresh processes a side" in found.reason
    assert {row.attempt for row in result.record.samples if row.step == "result"} == {1, 2, 3, 4}
    parts, record = result.record.final_parts, result.record
    assert record.final_expected is not None and record.final_expected > 0
    assert record.final_seconds is not None and record.final_seconds >= parts["check of answers"] + parts["measurement"]
    # a mean of the result's processes; the original's are in the measurement too
    assert parts["measurement"] > FIRST * parts["times and waits of a process"] > 0
    assert {"load of a process", "steps of a process"} <= set(parts)


def test_variables_that_help_are_set_for_the_result_alone(
    run: Run, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wavecrest.optimizer.plan import EnvironmentSetting

    real = finish.finish

    def with_variable(state: Any) -> None:
        state.ledger.environment = [EnvironmentSetting(name="OMP_WAIT_POLICY", value="active", ratio=1.1)]
        real(state)

    monkeypatch.setattr("wavecrest.optimizer.engine.finish", with_variable)
    run(TakePauseOut(), workload=workload.load(SLOW))
    sides = {(name.split(",")[0], tuple(changes.items())) for name, changes in children.asked if name}
    assert sides == {("original", ()), ("result", (("OMP_WAIT_POLICY", "active"),))}


def test_a_child_that_dies_leads_to_phases_of_one_process(
    run: Run, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_arguments: object, **_more: object) -> SideReport:
        raise EnvironmentProblem("result, process 1 failed: planted death")

    monkeypatch.setattr(finish, "run_pairs", dies)
    record = run(TakePauseOut(), workload=workload.load(SLOW)).record
    assert record.result is not None and record.result.unit == "phases" and record.result.verdict == "faster"
    assert "measured in one process: result, process 1 failed: planted death" in record.notes
    assert "in one process" in record.result.reason and "[" not in record.result.reason


@pytest.mark.parametrize("phase", ["surgery", "compile"])
def test_a_compiled_result_is_measured_here_where_no_time_is_left_for_processes(
    phase: Any, run: Run, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A UNet's compilation that gains 1.67 times was put back: its proof would have ended late (H200, 2026-11-28)."""

    class Gains(TakePauseOut):
        pass

    Gains.phase = phase
    monkeypatch.setattr(finish, "_seconds_of_processes", lambda _run, _pairs: 1e4)
    record = run(Gains(), workload=workload.load(SLOW), budget=100.0).record
    assert record.result is not None and record.result.verdict == "faster"
    assert record.result.unit == ("phases" if phase == "compile" else "processes") and record.seconds <= 110.0
    said = [note for note in record.notes if note.startswith("measured in one process: 8 fresh processes take about")]
    assert len(said) == (phase == "compile") and bool(children.asked) == (phase == "surgery")


def test_luck_of_processes_takes_more_pairs_and_drops_nothing(run: Run, children: Children) -> None:
    """Processes that differ by far more than the gain: undecided, with the step in the plan."""
    children.luck = [1.0, 90.0, 0.02, 1.0, 50.0, 0.1]
    result = run(TakePauseOut(), workload=workload.load(SLOW), budget=600.0)
    found = result.record.result
    assert found is not None and found.verdict == "undecided" and found.speed[0].blocks == max(LOOKS)
    assert result.plan.stack == ["gain"] and result.model.pause == 0.0
    assert "the processes differ by more than the gain" in found.reason


def test_a_model_in_memory_is_measured_from_a_copy(
    run: Run, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[Task] = []

    def child(task: Task, changes: Mapping[str, str | None], name: str) -> SideReport:
        tasks.append(task)
        return children.run(task, changes, name)

    monkeypatch.setattr(finish, "run_pairs", pairs_of(child))
    result = run(TakePauseOut(), copied=True, budget=600.0)
    record = result.record
    assert record.result is not None and record.result.unit == "processes" and record.spec is None
    assert all(task.copied for task in tasks) and len({task.spec for task in tasks}) == 1
    assert not Path(tasks[0].spec).exists()
    assert "the fresh processes of the final measurement loaded a copy of the model's pickle" in record.notes


def test_a_small_budget_holds_no_processes_for_a_model_in_memory(run: Run, children: Children) -> None:
    record = run(TakePauseOut(), copied=True, budget=30.0).record
    assert record.result is not None and record.result.unit == "phases" and not children.asked
    assert any(note.startswith("measured in one process: 8 fresh processes take about") for note in record.notes)
