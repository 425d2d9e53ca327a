"""The final measurement in fresh processes: who runs what, what a dead child leads to, and how long it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.optimizer.conftest import Run
from tests.optimizer.planted import CLOCK, PAUSE, WORK, Planted, TakePauseOut
from wavecrest.errors import EnvironmentProblem
from wavecrest.measure import workload
from wavecrest.optimizer import finish
from wavecrest.optimizer.alternate import LOOKS, SideReport, Task
from wavecrest.optimizer.engine import FINAL_SHARE
from wavecrest.optimizer.plan import Plan
from wavecrest.optimizer.side import measure_side

SLOW = "tests.optimizer.planted:slow"


class Children:
    """Children that run in this process on the simulated clock; `luck` slows each down, in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str | None, dict[str, str | None]]] = []
        self.stacks: list[list[str]] = []
        self.luck: list[float] = [1.0]
        monkeypatch.setattr(finish, "run_child", self.run)

    def run(self, task: Task, changes: Mapping[str, str | None], name: str) -> SideReport:
        self.asked.append((name, dict(changes)))
        if task.plan is not None:
            self.stacks.append(Plan.load(Path(task.plan)).stack)
        found = measure_side(task, now=CLOCK)
        factor = self.luck[(len(self.asked) - 1) % len(self.luck)]
        times = {bucket: [ms * factor for ms in samples] for bucket, samples in found.times.items()}
        return found.model_copy(update={"times": times})


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    return Children(monkeypatch)


def test_a_workload_that_can_be_loaded_is_measured_in_alternating_processes(run: Run, children: Children) -> None:
    result = run(TakePauseOut(), workload=workload.load(SLOW))
    found = result.record.result
    assert found is not None and found.unit == "processes" and found.verdict == "faster"
    assert found.ratio == pytest.approx((PAUSE + WORK) / WORK, rel=0.02) and found.speed[0].blocks == LOOKS[0]
    names = [name for name, _ in children.asked]
    assert names == [
        "original, process 1", "result, process 1", "result, process 2",
        "original, process 2", "original, process 3", "result, process 3",
    ]  # fmt: skip
    assert children.stacks == [["gain"]] * 3
    assert f"over {LOOKS[0]} fresh processes a side" in found.reason
    assert {row.attempt for row in result.record.samples if row.step == "result"} == {1, 2, 3}


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
    def dies(*_arguments: object) -> SideReport:
        raise EnvironmentProblem("result, process 1 failed: planted death")

    monkeypatch.setattr(finish, "run_child", dies)
    record = run(TakePauseOut(), workload=workload.load(SLOW)).record
    assert record.result is not None and record.result.unit == "phases" and record.result.verdict == "faster"
    assert "measured in one process: result, process 1 failed: planted death" in record.notes
    assert "in one process" in record.result.reason and "[" not in record.result.reason


def test_luck_of_processes_takes_more_pairs_and_drops_nothing(run: Run, children: Children) -> None:
    """Processes that differ by far more than the gain: undecided, with the step in the plan."""
    children.luck = [1.0, 9.0, 0.2, 1.0, 5.0, 1.5]
    result = run(TakePauseOut(), workload=workload.load(SLOW), budget=600.0)
    found = result.record.result
    assert found is not None and found.verdict == "undecided" and found.speed[0].blocks == LOOKS[-1]
    assert result.plan.stack == ["gain"] and result.model.pause == 0.0
    assert "the processes differ by more than the gain" in found.reason


def test_a_part_of_the_budget_is_left_for_the_final_measurement(run: Run) -> None:
    seen: list[float] = []

    class Slowly(Planted):
        title = "slowly"

        def __init__(self, number: int) -> None:
            self.id = f"slowly {number}"

        def find(self, context: Any) -> Any:
            seen.append(context.seconds_left)
            CLOCK.advance(20.0)
            return super().find(context)

        def apply(self, model: Any, params: Any) -> Any:
            return model

    budget = 100.0
    run(Slowly(0), TakePauseOut(), Slowly(1), budget=budget)
    # nothing is kept yet at the first, so nothing has to be left for it
    assert seen[0] > 0.9 * budget
    assert seen[0] - seen[1] == pytest.approx(20.0 + FINAL_SHARE * budget, abs=10.0)
