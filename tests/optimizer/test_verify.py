"""`verify` on planted plans: wrong, slower, bad in quality, of other versions; in this process and in a real child."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.optimizer import planted
from tests.optimizer.conftest import Run
from tests.optimizer.planted import (
    CLOCK,
    PAUSE,
    WORK,
    AddPause,
    ChangesTheOriginal,
    FastButWrong,
    TakePauseOut,
    pairs_of,
    slow,
    watched,
)
from wavecrest import hardware, ops
from wavecrest.cli.main import main
from wavecrest.errors import EnvironmentProblem, PlanError, StepRefused, WorkloadError
from wavecrest.measure import workload
from wavecrest.measure.timing import Interval
from wavecrest.ops.rows.call import RowCall
from wavecrest.optimizer import children, verify
from wavecrest.optimizer.alternate import Claim
from wavecrest.optimizer.children import Job, SideReport, Task, run_child
from wavecrest.optimizer.plan import EnvironmentSetting, Plan
from wavecrest.optimizer.side import measure_side
from wavecrest.optimizer.steps import ladder
from wavecrest.records import BucketError, DecisionRow, QualityResult, StepOutcome, VerifyProcess

SLOW, WATCHED = "tests.optimizer.planted:slow", "tests.optimizer.planted:watched"
FASTER, SLOWER, EQUAL = Interval(1.2, 1.4), Interval(0.7, 0.9), Interval(0.9, 1.1)


def claim(ci: Interval | None, ratio: float = 1.3) -> Claim:
    return Claim("processes", [{"b": [1.0]}] * 2, [{"b": [1.0]}] * 2, ratio, ci, [], "made up")


def process(number: int, *, answers: bool = True, quality: bool | None = None) -> VerifyProcess:
    numerics = [
        BucketError(bucket="b", output=name, error=0.5, own=0.1, limit=0.2, passed=passed)
        for name, passed in (("fine", True), ("planted", answers))
    ]
    rows = [QualityResult(name="bleu", value=3, limit=7, passed=quality)] if quality is not None else []
    return VerifyProcess(process=number, numerics=numerics, quality=rows, speed=[])


@pytest.fixture
def plan(run: Run) -> Plan:
    return run(TakePauseOut()).plan


@pytest.mark.parametrize(
    ("results", "ci", "reason"),
    [
        ([process(0), process(1, answers=False)], FASTER, "1 of 2 processes give wrong answers; process 1: planted"),
        ([process(0, answers=False), process(1, answers=False)], FASTER, "2 of 2 processes give wrong answers"),
        ([process(0, quality=True), process(1, quality=False)], FASTER, "process 1: bleu is 3, limit 7"),
        ([process(0)], SLOWER, "slower than the original: 1.300× [0.700, 0.900]"),
        ([process(0, answers=False, quality=False)], SLOWER, "wrong answers"),
    ],
    ids=["wrong", "wrong in all", "quality", "slower", "everything"],
)
def test_plans_that_fail(plan: Plan, results: list[VerifyProcess], ci: Interval, reason: str) -> None:
    passed, why = verify.verdict_of(results, claim(ci), plan)
    assert passed is False and reason in why


@pytest.mark.parametrize("ci", [FASTER, EQUAL], ids=["faster", "no proof"])
def test_plans_that_pass(plan: Plan, ci: Interval) -> None:
    passed, why = verify.verdict_of([process(0, quality=True), process(1)], claim(ci), plan)
    assert passed is True and why == f"numerics hold in 2 processes; 1.300× {ci} over 2 fresh processes a side"


def test_the_speed_of_a_plan_without_steps_is_not_judged(plan: Plan) -> None:
    empty = plan.model_copy(update={"stack": []})
    assert verify.verdict_of([process(0)], claim(SLOWER, 0.8), empty)[0] is True
    assert verify.verdict_of([process(0)], claim(Interval(1.02, 1.1)), empty)[0] is True


def test_a_plan_without_steps_that_is_faster_fails(plan: Plan) -> None:
    """The workload slows its own model where it sees no plan."""
    empty = plan.model_copy(update={"stack": []})
    passed, why = verify.verdict_of([process(0)], claim(FASTER), empty)
    assert passed is False and "the plan has no steps, and yet: 1.300× [1.200, 1.400]" in why
    # variables are no steps, and may make it faster
    row = EnvironmentSetting(name="OMP_WAIT_POLICY", value="active", ratio=1.3)
    assert verify.verdict_of([process(0)], claim(FASTER), empty.model_copy(update={"environment": [row]}))[0] is True


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children run in this process, on the simulated clock."""

    def child(task: Task, _changes: object, _name: str) -> SideReport:
        return measure_side(task, now=CLOCK)

    monkeypatch.setattr(verify, "run_pairs", pairs_of(child))


def test_a_good_plan_passes_with_its_speed(run: Run, here: None, tmp_path: Path) -> None:
    run(TakePauseOut(), out=tmp_path)
    told: list[tuple[int, int]] = []
    record = verify.run(SLOW, tmp_path / "plan.json", processes=2, seconds=0.5, on_process=lambda *at: told.append(at))
    assert record.passed and told == [(0, 2), (1, 2)] and [row.process for row in record.processes] == [0, 1]
    speedup = (PAUSE + WORK) / WORK
    assert record.ratio == pytest.approx(speedup, rel=0.02)
    # of every twenty intervals of 95 % one does not hold the true value: how near it is, is held above
    assert record.ci is not None and record.ci.low < record.ratio < record.ci.high
    assert record.drift == pytest.approx(0.0, abs=0.02)
    for row in record.processes:
        assert row.speed[0].base_ms == pytest.approx(7, rel=0.02) and row.speed[0].new_ms == pytest.approx(1, rel=0.02)
        assert not row.warnings and all(error.passed for error in row.numerics)


def test_the_optimized_model_is_what_is_gated(
    run: Run, here: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The step gave right answers when the plan was made; now it does not, and the original still does."""
    run(TakePauseOut(), out=tmp_path)
    monkeypatch.setattr(TakePauseOut, "apply", FastButWrong.apply)
    record = verify.run(SLOW, tmp_path / "plan.json", processes=1, seconds=0.1)
    assert not record.passed and record.reason.startswith("1 of 1 processes give wrong answers")
    assert any(not row.passed for row in record.processes[0].numerics)


@pytest.mark.parametrize("lazily", [False, True], ids=["when applied", "when called"])
def test_the_original_is_not_what_a_step_has_made_of_it(
    run: Run, here: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lazily: bool
) -> None:
    """The right answers come from the original, whose weights a step shares: with those changed both agree."""
    run(TakePauseOut(), out=tmp_path)
    monkeypatch.setattr(TakePauseOut, "change", ChangesTheOriginal.change, raising=False)
    monkeypatch.setattr(TakePauseOut, "lazily", lazily, raising=False)
    monkeypatch.setattr(TakePauseOut, "apply", ChangesTheOriginal.apply)
    with pytest.raises(StepRefused, match=r"it changed parameter second.weight of the original \(rule: model\)"):
        verify.run(SLOW, tmp_path / "plan.json", processes=1, seconds=0.1)


def test_the_optimized_model_is_what_is_timed(
    run: Run, here: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(TakePauseOut(), out=tmp_path)
    monkeypatch.setattr(TakePauseOut, "apply", AddPause.apply)
    record = verify.run(SLOW, tmp_path / "plan.json", processes=3, seconds=0.1)
    assert not record.passed and "slower than the original: 0.5" in record.reason


def test_quality_is_that_of_the_optimized_model(run: Run, here: None, tmp_path: Path) -> None:
    run(TakePauseOut(), out=tmp_path)
    record = verify.run(WATCHED, tmp_path / "plan.json", processes=1, seconds=0.1)
    assert not record.passed and record.reason == "process 0: pause is 0, limit 0.001"
    run(AddPause(), workload=watched(), out=tmp_path)
    assert verify.run(WATCHED, tmp_path / "plan.json", processes=1, seconds=0.1).passed


def test_a_step_that_no_longer_verifies_is_dropped_and_said(
    run: Run, here: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = run(TakePauseOut()).plan
    plan.fingerprint.torch = "2.0.0"
    plan.save(tmp_path / "plan.json")
    monkeypatch.setattr(TakePauseOut, "apply", FastButWrong.apply)
    # simulated seconds: enough samples for the limit below
    record = verify.run(SLOW, tmp_path / "plan.json", processes=1, seconds=2.0)
    (found,) = record.processes
    assert len(found.warnings) == 1 and "no longer verifies (torch 2.0.0 → " in found.warnings[0]
    # what is left is the original
    assert record.ratio == pytest.approx(1, rel=0.02) and all(row.passed for row in found.numerics)


def test_a_precision_has_the_limits_of_that_precision(
    run: Run, here: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An error of 2e-4 is wrong in float32, and inside what bfloat16 may differ."""

    class Coarse(TakePauseOut):
        id = "precision:bf16"

        def apply(self, model: Any, params: dict[str, Any]) -> Any:
            model.pause, model.scale = 0.0, model.scale * 1.0002
            return model

    run(Coarse(), precision="bf16", out=tmp_path)
    assert verify.run(SLOW, tmp_path / "plan.json", processes=1, seconds=0.1).passed


def test_each_process_has_its_own_times(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(TakePauseOut(), out=tmp_path)
    times = {"process 0 of the original": 8.0, "process 1 of the original": 9.0, "process 0": 2.0, "process 1": 3.0}

    def child(_task: Task, _changes: Any, name: str) -> SideReport:
        return SideReport(clock="made up", times={"b": [times[name]] * 3}, numerics=[], quality=[], warnings=[])

    monkeypatch.setattr(verify, "run_pairs", pairs_of(child))
    record = verify.run(SLOW, tmp_path / "plan.json", processes=2)
    found = [(row.process, row.speed[0].base_ms, row.speed[0].new_ms, row.speed[0].ratio) for row in record.processes]
    assert found == [(0, 8.0, 2.0, 4.0), (1, 9.0, 3.0, 3.0)]
    assert record.ratio == pytest.approx(12**0.5) and record.drift == pytest.approx(1 / 8)


def test_one_process_has_no_interval_and_its_speed_is_not_judged(
    run: Run, here: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(TakePauseOut(), out=tmp_path)
    monkeypatch.setattr(TakePauseOut, "apply", AddPause.apply)
    record = verify.run(SLOW, tmp_path / "plan.json", processes=1, seconds=0.1)
    assert record.passed and record.ci is None and record.processes[0].speed[0].ci is None
    assert record.reason.startswith("numerics hold in 1 process; 0.5") and "[" not in record.reason


def test_the_original_runs_alone(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In processes that no plan was applied in, and without its variables: as it runs today."""
    plan = run(TakePauseOut()).plan
    setting = {"name": "OMP_WAIT_POLICY", "value": "active", "ratio": 1.1}
    Plan.model_validate({**json.loads(plan.model_dump_json()), "environment": [setting]}).save(tmp_path / "plan.json")
    asked: list[tuple[bool, bool, dict[str, Any]]] = []

    def child(task: Task, changes: Any, _name: str) -> SideReport:
        asked.append((task.plan is not None, task.check, dict(changes)))
        return measure_side(task, now=CLOCK)

    monkeypatch.setattr(verify, "run_pairs", pairs_of(child))
    verify.run(SLOW, tmp_path / "plan.json", processes=2, seconds=0.1)
    original, result = (False, False, {}), (True, True, {"OMP_WAIT_POLICY": "active"})
    assert asked == [original, result, result, original]


def test_all_processes_have_the_plan_that_was_read(run: Run, here: None, tmp_path: Path) -> None:
    """A run that goes on in the same folder writes its plan anew."""
    run(TakePauseOut(), out=tmp_path)
    plan = tmp_path / "plan.json"
    record = verify.run(
        SLOW, plan, processes=2, seconds=0.1, on_process=lambda number, _: plan.write_text("{}") if number else None
    )
    assert record.passed and record.plan == str(plan) and len(record.processes) == 2


def test_processes_that_load_different_workloads_are_not_compared(
    run: Run, here: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A length that is drawn without a seed, or a file that is edited meanwhile: the sides would differ by that."""
    run(TakePauseOut(), out=tmp_path)
    rows = itertools.count(4)
    own = planted.slow
    monkeypatch.setattr(planted, "slow", lambda: (own()[0], torch.randn(next(rows), 16)))
    text = r"bucket default is args\[0\] \d+x16 float32 in one process and args\[0\] \d+x16 float32 in another"
    with pytest.raises(WorkloadError, match=text):
        verify.run(SLOW, tmp_path / "plan.json", processes=1, seconds=0.1)
    monkeypatch.setattr(planted, "slow", own)
    source = tmp_path / "work.py"
    source.write_text("from tests.optimizer.planted import slow\n")
    edits = {1: lambda: source.write_text("from tests.optimizer.planted import slow\n# edited\n")}
    with pytest.raises(WorkloadError, match=r"work\.py was changed while processes were compared"):
        verify.run(
            f"{source}:slow", tmp_path / "plan.json", processes=2, seconds=0.1,
            on_process=lambda number, _: edits.get(number, int)() and None,
        )  # fmt: skip


STEPS = """
from torch import nn

from wavecrest.optimizer.steps import Step

class Doubled(Step):
    id = title = "doubled"
    level = 3

    def apply(self, model, params):
        model.weight = nn.Parameter(2 * model.weight.detach())
        return model

    def excludes(self, other):
        return False
"""
WORKLOAD = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Linear(16, 16), torch.randn(4, 16)
"""


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with a wrong step, which child processes find by its entry point."""
    info = tmp_path / "planted_steps-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-steps\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[wavecrest.steps]\ndoubled = planted_steps:Doubled\n")
    (tmp_path / "planted_steps.py").write_text(STEPS)
    (tmp_path / "work.py").write_text(WORKLOAD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # and this one, which looks at the plan before it starts any
    monkeypatch.syspath_prepend(tmp_path)
    ladder._steps.cache_clear()
    ladder.step_by_id("doubled")
    yield tmp_path
    ladder._steps.cache_clear()
    sys.modules.pop("planted_steps")


def wrong_plan(folder: Path) -> Path:
    """The plan of the workload's linear layer with the step "doubled" in it."""
    loaded = workload.load(f"{folder / 'work.py'}:make", device="cpu")
    plan = Plan.start(loaded, hardware.cpu(), {"default": {}})
    plan.steps = [StepOutcome(id="doubled", title="doubled", level=3, verdict="kept", reason="planted")]
    plan.stack = ["doubled"]
    plan.save(folder / "plan.json")
    return folder / "plan.json"


def test_a_real_child_finds_a_wrong_plan(extension: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = wrong_plan(extension)
    arguments = ["verify", f"{extension / 'work.py'}:make", "--plan", str(plan), "--processes", "1"]
    out = extension / "verify.json"
    assert main([*arguments, "--seconds", "0.1", "-o", str(out)]) == 2
    shown = capsys.readouterr().out
    assert "failed: 1 of 1 processes give wrong answers; process 0: output of bucket default" in " ".join(shown.split())
    record = json.loads(out.read_text())
    assert record["passed"] is False and record["processes"][0]["numerics"][0]["error"] > 0.5


def test_a_child_that_dies_is_an_environment_problem(extension: Path) -> None:
    plan = wrong_plan(extension)
    (extension / "planted_steps.py").write_text("raise SystemExit('planted death')\n")
    spec = f"{extension / 'work.py'}:make"
    with pytest.raises(EnvironmentProblem, match="process 0 failed: planted death"):
        verify.run(spec, plan, processes=1, seconds=0.1)


def test_a_child_has_the_variables_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, str]] = []
    report = SideReport(clock="made up", times={"a": [1.0]}, numerics=[], quality=[], warnings=["planted"])

    def start(command: list[str], *, env: dict[str, str], **_more: Any) -> Any:
        asked.append(env)
        assert json.loads(command[-2])["spec"] == SLOW
        Path(command[-1]).write_text(report.model_dump_json())
        return real([sys.executable, "-c", ""], start_new_session=True)

    real = subprocess.Popen
    monkeypatch.setattr(children.subprocess, "Popen", start)
    task = Task(SLOW, "cpu", 0.1)
    assert run_child(Job(task, {"PLANTED": "7"}, "it")) == report == run_child(Job(task, {}, "it"))
    assert asked[0]["PLANTED"] == "7" and "PLANTED" not in asked[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "magic"}, "no step 'magic'"),
        ({"id": "replace_norm", "params": {"magic": 1}}, "parameters of step replace_norm"),
        ({}, "dispatch row of rms_norm is damaged"),
    ],
    ids=["step", "parameters", "row"],
)
def test_a_plan_is_looked_at_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    plan = Plan.start(workload.load(SLOW, device="cpu"), hardware.cpu(), {"default": {}})
    if change:
        plan.steps = [StepOutcome(**{"title": "t", "level": 3, "verdict": "kept", "reason": "r", **change})]
        plan.stack = [change["id"]]
    else:
        plan.dispatch = [row("{")]
    plan.save(tmp_path / "plan.json")
    monkeypatch.setattr(verify, "run_pairs", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(PlanError, match=message):
        verify.run(SLOW, tmp_path / "plan.json", processes=1, seconds=0.1)


def row(key: str) -> DecisionRow:
    return DecisionRow(op="rms_norm", key=key, backend="torch", config={}, source="exact", reason="", calls=1)


def test_a_process_pins_the_plans_rows_as_apply_does(tmp_path: Path) -> None:
    op = ops.get("rms_norm")
    call = RowCall("rms", torch.randn(4, 64), None, torch.ones(64), None, 1e-6)
    key = op.key(call)
    model, _ = slow()
    plan = Plan.start(workload.load(SLOW, device="cpu"), hardware.cpu(), {"default": {}})
    plan.dispatch = [row(json.dumps(list(key)))]
    plan.save(tmp_path / "plan.json")

    def decided() -> str:
        return op.decide(call).reason

    own = decided()
    found = {}
    for name, apply in {
        "apply": lambda: plan.apply(model),
        "verify": lambda: measure_side(Task(SLOW, "cpu", 0.05, str(tmp_path / "plan.json")), now=CLOCK),
        "the original": lambda: measure_side(Task(SLOW, "cpu", 0.05), now=CLOCK),
    }.items():
        try:
            apply()
            found[name] = decided()
        finally:
            op.unpin()
    assert found["apply"] == found["verify"] == "plan" != own == found["the original"]
