"""The engine on planted steps: every kind of verdict, interruption, resumption, replay."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.optimizer.planted import (
    PAUSE,
    AddPause,
    FastButWrong,
    Interrupts,
    MisalignedCausal,
    NaNs,
    Nothing,
    RaisesHalfWay,
    RaisesInForward,
    SlightlyWrong,
    TakePauseOut,
    slow,
)
from wavecrest import records
from wavecrest.errors import InvalidArgument, PlanMismatch
from wavecrest.measure.workload import Quality, Workload, from_example
from wavecrest.optimizer import api as optimizer
from wavecrest.optimizer.api import OptimizeInterrupted, OptimizeResult, Options
from wavecrest.optimizer.plan import Plan
from wavecrest.optimizer.steps import Step, steps_up_to

Run = Callable[..., OptimizeResult]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the ladder with the given steps in place of the real ones; their effects are large, so sampling is short."""
    monkeypatch.setattr("wavecrest.optimizer.engine.LEAST_SECONDS", 0.5)
    monkeypatch.setattr("wavecrest.optimizer.engine.Engine._ceilings", lambda self: None)

    def with_steps(*steps: Step, workload: Workload | None = None, **more: object) -> OptimizeResult:
        monkeypatch.setattr("wavecrest.optimizer.steps.ladder._steps", lambda: {step.id: step for step in steps})
        options = Options(level=4, budget=more.pop("budget", 60.0))  # type: ignore[arg-type]
        return optimizer.run(workload or from_example(*slow()), options, **more)  # type: ignore[arg-type]

    return with_steps


def outcome(result: OptimizeResult, step: str) -> records.StepOutcome:
    return next(row for row in result.record.steps if row.id == step)


def same_answers(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    x = torch.randn(3, 16)
    with torch.no_grad():
        return bool(torch.allclose(a(x), b(x), atol=1e-6))


def test_gain_is_kept_and_measured(run: Run) -> None:
    result = run(TakePauseOut())
    step = outcome(result, "gain")
    assert step.verdict == "kept" and step.ratio is not None and step.ci is not None
    speed = step.speed[0]
    assert step.ci.low > 5 and speed.base_ms >= 6 and speed.base_ms - speed.new_ms > 5
    assert result.record.result is not None and result.record.result.verdict == "faster"
    assert result.model.pause == 0.0 and result.plan.stack == ["gain"]


def test_slow_step_is_reverted_and_optimal_model_is_called_so(run: Run) -> None:
    workload = from_example(*slow())
    result = run(AddPause(), workload=workload)
    step = outcome(result, "slow")
    assert step.verdict == "reverted" and step.ci is not None and step.ci.high < 1
    assert result.record.result is not None and result.record.result.verdict == "already optimal"
    assert result.model is workload.model and result.plan.stack == []


@pytest.mark.parametrize("step", [FastButWrong(), SlightlyWrong(), NaNs()], ids=lambda step: step.id)
def test_fast_but_wrong_is_refused_unmeasured(run: Run, step: Step) -> None:
    result = run(step)
    row = outcome(result, step.id)
    assert row.verdict == "refused" and row.reason.startswith("wrong answers")
    # no speed is reported on a red gate
    assert row.ratio is None and not row.speed
    assert not [sample for sample in result.record.samples if sample.step == step.id]


def test_asking_for_a_precision_loosens_no_other_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of 2e-4 would pass bfloat16's limits; no precision step is in the stack, so float32's hold."""
    monkeypatch.setattr("wavecrest.optimizer.engine.LEAST_SECONDS", 0.5)
    monkeypatch.setattr("wavecrest.optimizer.engine.Engine._ceilings", lambda self: None)
    monkeypatch.setattr("wavecrest.optimizer.steps.ladder._steps", lambda: {"slightly wrong": SlightlyWrong()})
    result = optimizer.run(from_example(*slow()), Options(level=4, budget=60.0, precision="bf16"))
    row = outcome(result, "slightly wrong")
    assert row.verdict == "refused" and row.reason.startswith("wrong answers")


def test_noise_is_not_kept(run: Run) -> None:
    result = run(Nothing())
    assert outcome(result, "noise").verdict in ("tie", "reverted")
    assert result.plan.stack == []


@pytest.mark.parametrize("step", [RaisesHalfWay(), RaisesInForward()], ids=lambda step: step.id)
def test_raising_step_leaves_the_model_and_the_ladder_goes_on(run: Run, step: Step) -> None:
    model, x = slow()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = run(step, TakePauseOut(), workload=from_example(model, x))
    row = outcome(result, step.id)
    assert row.verdict == "refused" and ("planted failure" in row.reason or "first" in row.reason)
    assert outcome(result, "gain").verdict == "kept"
    assert model.pause == PAUSE and hasattr(model, "first")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_misaligned_causal_mask_is_never_introduced(run: Run) -> None:
    row = outcome(run(MisalignedCausal()), "is_causal")
    assert row.verdict == "refused" and "is_causal=True for q_len 1 and k_len 5" in row.reason


def test_interrupt_leaves_a_resumable_run_and_the_untouched_model(run: Run, tmp_path: Path) -> None:
    model, x = slow()
    steps = (AddPause(), Interrupts(), TakePauseOut())
    Interrupts.armed = True
    with pytest.raises(OptimizeInterrupted) as caught:
        run(*steps, workload=from_example(model, x), out=tmp_path)
    assert model.pause == PAUSE
    assert isinstance(caught.value, KeyboardInterrupt) and str(tmp_path) in str(caught.value)
    saved = records.load_as(tmp_path / "run.json", records.OptimizeRecord)
    assert [row.id for row in saved.steps] == ["slow"] and saved.result is None
    assert saved.notes[-1] == "interrupted by the user" and (tmp_path / "report.html").exists()
    assert Plan.load(tmp_path / "plan.json").result is None

    Interrupts.armed = False
    result = run(*steps, workload=from_example(model, x), out=tmp_path, resume=True)
    first_try = [row for row in result.record.steps if row.attempt == 1]
    assert [row.id for row in first_try] == ["slow", "interrupt", "gain"]
    # the verdict of before the interruption was taken over, not measured again
    assert first_try[0].speed == saved.steps[0].speed
    assert result.record.result is not None and result.record.result.verdict == "faster"
    assert any("resumed" in note for note in result.record.notes)


def test_resume_refuses_another_model(run: Run, tmp_path: Path) -> None:
    Interrupts.armed = True
    with pytest.raises(OptimizeInterrupted):
        run(Interrupts(), out=tmp_path)
    other = from_example(torch.nn.Linear(16, 16), torch.randn(4, 16))
    with pytest.raises(PlanMismatch, match="other modules or shapes"):
        run(Interrupts(), workload=other, out=tmp_path, resume=True)


def test_reverted_step_is_retried_once_after_the_ground_changed(run: Run) -> None:
    result = run(AddPause(), TakePauseOut())
    tries = [(row.id, row.attempt, row.verdict) for row in result.record.steps]
    assert tries == [("slow", 1, "reverted"), ("gain", 1, "kept"), ("slow", 2, "reverted")]


def test_budget_skips_with_a_reason(run: Run) -> None:
    result = run(TakePauseOut(), budget=0.001)
    row = outcome(result, "gain")
    assert row.verdict == "skipped" and "budget" in row.reason and result.record.result.verdict == "undecided"


def test_without_a_compiler_a_model_is_not_called_optimal(run: Run) -> None:
    class NoCompiler(RaisesHalfWay):
        id = "compile:default"

    result = run(NoCompiler())
    assert result.record.result is not None and result.record.result.verdict == "undecided"


def test_failing_quality_takes_the_step_back(run: Run) -> None:
    workload = from_example(*slow())
    workload.quality = lambda original, model: [
        Quality("pause", float(model.pause), 0.001, model.pause > 0.001, "must stay")
    ]
    result = run(TakePauseOut(), workload=workload)
    row = outcome(result, "gain")
    assert row.verdict == "refused" and "final check" in row.reason
    assert result.plan.stack == [] and result.model is workload.model


def test_plan_replays_on_a_fresh_model(run: Run, tmp_path: Path) -> None:
    result = run(TakePauseOut(), out=tmp_path)
    model, _ = slow()
    made = Plan.load(tmp_path / "plan.json").apply(model)
    assert made.pause == 0.0 and model.pause == PAUSE and same_answers(made, model)
    # weights are shared, not copied
    assert made.first.weight is model.first.weight
    assert (tmp_path / "report.html").read_text().startswith("<!")
    assert result.folder == tmp_path


def test_plan_from_another_arch_is_refused(run: Run) -> None:
    plan = run(TakePauseOut()).plan
    plan.fingerprint.arch = "gfx942"
    with pytest.raises(PlanMismatch, match="measured on gfx942"):
        plan.apply(slow()[0])


def test_plan_of_other_versions_verifies_again(run: Run) -> None:
    plan = run(TakePauseOut()).plan
    plan.fingerprint.torch = "2.0.0"
    model, x = slow()
    with pytest.raises(PlanMismatch, match="example_inputs"):
        plan.apply(model)
    assert plan.apply(model, x).pause == 0.0


def test_plan_of_other_versions_drops_what_no_longer_verifies(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = run(TakePauseOut()).plan
    plan.fingerprint.torch = "2.0.0"
    monkeypatch.setattr(TakePauseOut, "apply", FastButWrong.apply)
    model, x = slow()
    with pytest.warns(UserWarning, match="no longer verifies"):
        made = plan.apply(model, x)
    assert same_answers(made, model) and made.pause == PAUSE
    with pytest.raises(PlanMismatch, match="no longer verifies"):
        plan.apply(model, x, strict=True)


def test_record_and_plan_survive_the_disk(run: Run, tmp_path: Path) -> None:
    result = run(TakePauseOut(), FastButWrong(), out=tmp_path)
    assert records.load(tmp_path / "run.json") == result.record
    assert Plan.load(tmp_path / "plan.json") == result.plan
    assert "pickle" not in (tmp_path / "plan.json").read_text()
    assert json.loads((tmp_path / "plan.json").read_text())["format_version"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": 0}, "level must be 1 to 5"),
        ({"level": 9}, "level must be 1 to 5"),
        ({"min_gain": -0.1}, "min_gain"),
        ({"budget": 0}, "budget must be positive"),
        ({"precision": "int3"}, "precision is one of"),
    ],
    ids=str,
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Options(**options)  # type: ignore[arg-type]


def test_unknown_step() -> None:
    with pytest.raises(InvalidArgument, match="no step nonsense"):
        optimizer.run(from_example(*slow()), Options(level=3, steps=("nonsense",)))


def test_real_ladder_has_unique_ids_in_level_order_where_it_matters() -> None:
    steps = steps_up_to(5)
    assert len({step.id for step in steps}) == len(steps)
    assert steps[0].id == "environment" and steps[1].id == "compile:default"
    assert {step.level for step in steps_up_to(2)} == {1, 2}
