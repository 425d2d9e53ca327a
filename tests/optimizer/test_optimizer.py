"""The engine on planted steps: every kind of verdict, interruption, resumption, replay."""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.optimizer.conftest import NoAnalysis, Run
from tests.optimizer.planted import (
    CLOCK,
    PAUSE,
    WORK,
    AddPause,
    FadingGain,
    FastButWrong,
    Interrupts,
    MisalignedCausal,
    NaNs,
    Nothing,
    Planted,
    RaisesHalfWay,
    RaisesInForward,
    SlightlyWrong,
    Slow,
    TakeHalfOut,
    TakePauseOut,
    WrongLater,
    normal,
    raise_at_the_end,
    slow,
    start_clock,
)
from wavecrest import ops, records
from wavecrest.errors import DeviceFailed, InvalidArgument, PlanMismatch
from wavecrest.measure import timing
from wavecrest.measure.timing import Interval
from wavecrest.measure.workload import Buckets, Quality, from_example
from wavecrest.optimizer import analysis, engine
from wavecrest.optimizer.alternate import LOOKS, Claim
from wavecrest.optimizer.api import OptimizeInterrupted, OptimizeResult, Options
from wavecrest.optimizer.gate import ALL_RULES, Gate
from wavecrest.optimizer.gate.untouched import Untouched
from wavecrest.optimizer.measurer import LEAST_SECONDS, Measurer
from wavecrest.optimizer.options import Silent
from wavecrest.optimizer.plan import Plan
from wavecrest.optimizer.steps import Found, Prediction, Step, StepContext, steps_up_to
from wavecrest.optimizer.steps.environment import EnvironmentTrial, Trials
from wavecrest.profile.least_time import LeastTimes, Work


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
    assert speed.base_ms == pytest.approx(7, rel=0.02) and speed.new_ms == pytest.approx(1, rel=0.02)
    assert step.ratio == pytest.approx(7, rel=0.02) and 6.8 < step.ci.low < step.ci.high < 7.2
    assert speed.seed is not None
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


def test_answers_of_timed_calls_are_compared(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is right for every call of the gate, and wrong once it is timed; without the rule it is kept."""
    result = run(WrongLater(), TakePauseOut())
    row = outcome(result, "wrong later")
    assert row.verdict == "refused" and "while it was timed" in row.reason and "(rule: timing)" in row.reason
    assert row.ratio is None and outcome(result, "gain").verdict == "kept"
    assert result.record.gate is not None and result.record.gate.timed > 0
    prepare = functools.partial(Gate.prepare, rules=ALL_RULES - {"timing"})
    monkeypatch.setattr("wavecrest.optimizer.engine.Gate.prepare", prepare)
    assert outcome(run(WrongLater()), "wrong later").verdict == "kept"


def test_asking_for_a_precision_loosens_no_other_step(run: Run) -> None:
    """An error of 2e-4 would pass bfloat16's limits; no precision step is applied, so float32's hold."""
    row = outcome(run(SlightlyWrong(), precision="bf16"), "slightly wrong")
    assert row.verdict == "refused" and row.reason.startswith("wrong answers")


def test_a_precision_in_the_stack_has_its_own_limits_and_so_has_what_follows(run: Run) -> None:
    class Precise(TakePauseOut):
        id = "precision:bf16"

    result = run(SlightlyWrong(), Precise(), precision="bf16")
    tries = [(row.id, row.attempt, row.verdict) for row in result.record.steps]
    # nothing is retried after a refusal
    assert tries == [("slightly wrong", 1, "refused"), ("precision:bf16", 1, "kept")]
    after = run(Precise(), SlightlyWrong(), precision="bf16")
    # twice as much would be refused: 2e-4 is inside bfloat16's floor, and as fast as what is there
    assert outcome(after, "slightly wrong").verdict == "tie"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_noise_is_not_kept(run: Run, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    # one run in forty would call noise slower, by chance
    generator = np.random.default_rng
    monkeypatch.setattr(timing.np.random, "default_rng", lambda given=seed: generator(given))
    monkeypatch.setattr(timing.secrets, "randbits", lambda _bits: seed)
    found = []
    for _ in range(2):
        start_clock()
        found.append(outcome(run(Nothing()), "noise"))
    assert found[0].verdict == "tie" and found[0].ci == found[1].ci
    assert run(Nothing()).plan.stack == []


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


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ({}, {"min_gain": 0.1}, "had min_gain 0.02: give the same options"),
        ({"quantize": "int8", "quality": 0.01}, {}, "had quantize int8, quality 0.01:"),
        ({}, {"quantize": "int8", "quality": 0.01}, "had quantize none, quality none:"),
        ({}, {"precision": "bf16"}, "had precision none:"),
    ],
)
def test_resume_refuses_other_allowances(
    run: Run, tmp_path: Path, then: dict[str, Any], now: dict[str, Any], said: str
) -> None:
    Interrupts.armed = True
    with pytest.raises(OptimizeInterrupted):
        run(Interrupts(), out=tmp_path, **then)
    with pytest.raises(PlanMismatch, match=said):
        run(Interrupts(), out=tmp_path, resume=True, **now)


def test_reverted_step_is_retried_once_after_the_ground_changed(run: Run) -> None:
    result = run(AddPause(), TakePauseOut())
    tries = [(row.id, row.attempt, row.verdict) for row in result.record.steps]
    assert tries == [("slow", 1, "reverted"), ("gain", 1, "kept"), ("slow", 2, "reverted")]


def test_a_step_is_not_retried_beside_its_rival_nor_on_the_same_ground(run: Run) -> None:
    class Rival(AddPause):
        group = "one of two"

    class Winner(TakePauseOut):
        group = "one of two"

    for steps in ((Rival(), Winner()), (TakePauseOut(), AddPause())):
        assert all(row.attempt == 1 for row in run(*steps).record.steps)


def test_steps_can_be_left_out(run: Run) -> None:
    result = run(TakePauseOut(), AddPause(), Nothing(), skip=("slow",), only=("slow", "gain"))
    assert [row.id for row in result.record.steps] == ["gain"]
    assert "not tried, as asked: slow" in result.record.notes


def test_outcomes_say_how_long_they_took(run: Run) -> None:
    (row,) = run(TakePauseOut()).record.steps
    # at least 15 blocks of two calls a side, at most the sampling time of a bucket, its last block and warm-up
    assert 30 * (PAUSE + 2 * WORK) * 0.9 < row.seconds < LEAST_SECONDS + 1


def test_a_proven_step_stays_where_the_final_measurement_does_not_decide(run: Run) -> None:
    """A noisy end throws nothing away: it says undecided, why, and what to do."""
    workload = from_example(*slow())
    # a gain that is there and too small to prove
    result = run(FadingGain(-0.005 * (PAUSE + WORK)), workload=workload)
    row, found = outcome(result, "fading"), result.record.result
    assert row.verdict == "kept" and result.plan.stack == ["fading"] and result.model is not workload.model
    assert found is not None and found.verdict == "undecided" and found.speed and found.ci.low < 1.02
    assert "in one process" in found.reason and (
        "run `wavecrest verify`" in found.reason or "less than" in found.reason
    )


def test_what_is_slower_in_the_end_goes(run: Run) -> None:
    workload = from_example(*slow())
    result = run(FadingGain(2 * PAUSE), workload=workload)
    row = outcome(result, "fading")
    assert row.verdict == "reverted" and "final measurement contradicts it" in row.reason
    assert result.model is workload.model and result.plan.stack == [] and result.plan.steps == result.record.steps
    found = result.record.result
    # two measurements that contradict each other prove nothing
    assert found is not None and found.ratio == 1.0 and found.verdict == "undecided" and "contradicts" in found.reason
    ratio = float(row.reason.split("together ")[1].split("×")[0])
    assert ratio == pytest.approx((PAUSE + WORK) / (3 * PAUSE + WORK), rel=0.02)


def test_a_result_that_raises_in_the_final_check_takes_its_last_step_back(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_at_the_end(monkeypatch)
    result = run(TakePauseOut())
    row = outcome(result, "gain")
    assert row.verdict == "refused" and "the final check failed with it" in row.reason and "planted" in row.reason
    assert result.plan.stack == [] and result.record.result is not None and result.record.result.verdict != "faster"


def test_the_final_measurement_is_of_original_against_result(run: Run) -> None:
    record = run(TakeHalfOut(), TakePauseOut()).record
    # each step is measured against the model before it
    assert [row.ratio for row in record.steps] == pytest.approx([7 / 4, 4 / 1], rel=0.02)
    result = record.result
    assert result is not None and result.ratio == pytest.approx(7, rel=0.02)
    assert result.speed[0].base_ms == pytest.approx(7, rel=0.02) and result.speed[0].blocks == min(LOOKS)
    # a model in memory is measured in phases of one process, each side by itself
    assert result.unit == "phases" and result.drift == pytest.approx(0.0, abs=0.02)
    assert "measured in one process: its time is simulated" in record.notes


def test_a_model_that_cannot_be_copied_is_not_called_optimal(run: Run) -> None:
    model, x = slow()
    model.lock = threading.Lock()
    found = run(TakePauseOut(), AddPause(), workload=from_example(model, x)).record.result
    assert found is not None and found.verdict == "undecided"
    assert found.reason.startswith("every step was refused (2): the model cannot be copied (TypeError: cannot pickle")
    assert "keep locks, files and generators outside" in found.reason


def test_budget_skips_with_a_reason(run: Run) -> None:
    result = run(TakePauseOut(), budget=0.001)
    row = outcome(result, "gain")
    assert row.verdict == "skipped" and row.reason.startswith("no time left in the budget of 0 s")
    assert result.record.result.verdict == "undecided" and row.sites == ["model"] and row.predicted == 1.5


def test_time_before_an_interruption_counts_for_the_budget(run: Run, tmp_path: Path) -> None:
    Interrupts.armed = True
    with pytest.raises(OptimizeInterrupted):
        run(AddPause(), Interrupts(), out=tmp_path)
    saved = Plan.load(tmp_path / "plan.json")
    saved.steps[0].seconds = 59.8
    saved.save(tmp_path / "plan.json")
    Interrupts.armed = False
    result = run(AddPause(), Interrupts(), TakePauseOut(), out=tmp_path, resume=True)
    # the baseline takes more than the fifth of a second that is left
    assert [row.verdict for row in result.record.steps] == ["reverted", "skipped", "skipped"]


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
    assert row.verdict == "refused" and "final check" in row.reason and "pause is 0, limit 0.001" in row.reason
    assert result.plan.stack == [] and result.model is workload.model


def test_failing_quality_leaves_the_steps_before(run: Run) -> None:
    workload = from_example(*slow())
    workload.quality = lambda original, model: [
        Quality("pause", float(model.pause), 0.001, model.pause > 0.001, "must stay")
    ]
    result = run(TakeHalfOut(), TakePauseOut(), workload=workload)
    assert [row.verdict for row in result.plan.steps] == ["kept", "refused"]
    assert result.plan.stack == ["half"] and result.model.pause == PAUSE / 2
    assert result.record.result is not None and result.record.result.verdict == "faster"
    assert result.record.result.quality[0].passed


def test_two_buckets_are_both_measured(run: Run) -> None:
    model, x = slow()
    result = run(TakePauseOut(), workload=from_example(model, Buckets(b4=x, b2=x[:2])))
    assert [row.bucket for row in outcome(result, "gain").speed] == ["b4", "b2"]
    assert [(row.step, row.attempt, row.bucket) for row in result.record.samples] == [
        *(("resolution", 1, bucket) for bucket in ("b4", "b2")),
        *(("gain", 1, bucket) for bucket in ("b4", "b2")),
        *(("result", pair, bucket) for pair in range(1, min(LOOKS) + 1) for bucket in ("b4", "b2")),
    ]


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


def test_unknown_step(run: Run) -> None:
    with pytest.raises(InvalidArgument, match="no step nonsense at level 4; there are gain"):
        run(TakePauseOut(), only=("nonsense",))
    with pytest.raises(InvalidArgument, match="no step nonsense at level 4; there are gain"):
        run(TakePauseOut(), skip=("nonsense",))


def test_real_ladder_has_unique_ids_in_level_order_where_it_matters() -> None:
    steps = steps_up_to(5)
    assert len({step.id for step in steps}) == len(steps)
    assert [step.id for step in steps[:3]] == ["environment", "quantize", "compile:default"]
    assert {step.level for step in steps_up_to(2)} == {1, 2}


def test_a_step_of_level_1_is_not_retried(run: Run) -> None:
    class Early(AddPause):
        level = 1

    assert [row.id for row in run(Early(), TakePauseOut()).record.steps] == ["slow", "gain"]


def test_the_plan_is_made_from_the_record(run: Run, tmp_path: Path) -> None:
    result = run(TakePauseOut(), FastButWrong(), out=tmp_path)
    assert result.plan.steps == result.record.steps and result.plan.result == result.record.result
    assert result.plan.dispatch == result.record.coverage
    assert Plan.load(tmp_path / "plan.json").steps == result.record.steps


@pytest.mark.parametrize(
    ("budget", "buckets", "seconds"), [(60.0, 1, 4.0), (600.0, 1, 8.0), (600.0, 2, 4.0), (3000.0, 1, 10.0)]
)
def test_sampling_takes_a_part_of_the_budget(budget: float, buckets: int, seconds: float) -> None:
    model, x = slow()
    workload = from_example(model, Buckets({f"b{index}": x for index in range(buckets)}))
    assert Measurer(workload, budget, Silent()).seconds == seconds


def test_what_cannot_be_analysed_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = from_example(*slow())

    def fails(*_args: object, **_more: object) -> None:
        raise InvalidArgument("planted")

    monkeypatch.setattr(analysis, "measure_ceilings", fails)
    monkeypatch.setattr(analysis, "profile_workload", fails)
    found = analysis.Analysis(workload)
    assert found.ceilings() == (None, "no measured ceilings: planted")
    assert found.profile(workload.model, None) == ([], "no profile: InvalidArgument: planted")
    breaks, note = analysis.Analysis(from_example(torch.nn.Linear(4, 4), torch.ones(2, 4))).breaks()
    assert (breaks, note) == ([], "Dynamo sees 1 graph")


def test_original_and_result_are_profiled(run: Run) -> None:
    class Profiles(NoAnalysis):
        def profile(
            self, model: torch.nn.Module, ceilings: records.Ceilings | None
        ) -> tuple[list[records.BucketProfile], str]:
            pause = float(model.pause) * 1e3
            row = records.BucketProfile(
                bucket="default",
                wall_ms=pause,
                kernel_ms=0,
                idle_ms=None,
                launches=0,
                categories=[],
                ops=[],
                uncategorized=[],
            )
            return [row], ""

    workload = from_example(*slow())
    record = run(TakePauseOut(), workload=workload, analysis=Profiles(workload)).record
    assert [row.wall_ms for row in (*record.profile_before, *record.profile_after)] == [PAUSE * 1e3, 0]
    assert record.notes[:2] == ["no ceilings", "no breaks"]


def test_trials_of_variables_have_their_part_of_the_budget(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    class Environment(Nothing):
        id = title = "environment"
        level = 1
        phase = "environment"

        def find(self, context: StepContext) -> Found:
            return Found(("OMP_WAIT_POLICY=active",), {"candidates": [("OMP_WAIT_POLICY", "active")]})

    def candidates(_context: StepContext, _pairs: object, *, allowance: float, **_more: object) -> Trials:
        asked.append(allowance)
        sides = ([{"default": [ms]} for ms in (2.0, 2.1)], [{"default": [ms]} for ms in (1.0, 1.1)])
        gain = EnvironmentTrial(
            "OMP_WAIT_POLICY", "active", Claim("processes", *sides, 2.0, Interval(1.9, 2.1), [], "made up")
        )
        return Trials([gain], [gain], ["OMP_WAIT_POLICY=active helps"])

    monkeypatch.setattr("wavecrest.optimizer.trial.try_candidates", candidates)
    result = run(Environment(), budget=100.0)
    row = outcome(result, "environment")
    assert asked == [pytest.approx(30.0)] and row.verdict == "kept" and row.ratio == 2.0
    assert row.params["set"] == {"OMP_WAIT_POLICY": "active"} and "set them before import" in row.reason
    assert [(setting.name, setting.value) for setting in result.plan.environment] == [("OMP_WAIT_POLICY", "active")]
    # it acts in other processes alone: nothing is in force in this one
    assert result.plan.stack == []
    rows = [(row.step, row.attempt, row.base, row.new) for row in result.record.samples if row.step != "resolution"]
    assert rows == [
        ("environment OMP_WAIT_POLICY=active", 1, [2.0], [1.0]),
        ("environment OMP_WAIT_POLICY=active", 2, [2.1], [1.1]),
    ]


def test_the_coverage_is_that_of_the_result(run: Run) -> None:
    """Ops that a candidate called which was turned down are not in the table."""

    class Normed(AddPause):
        id = "normed"

        def apply(self, model: torch.nn.Module, params: dict[str, Any]) -> torch.nn.Module:
            forward, slower = model.forward, super().apply(model, params)
            slower.forward = lambda x: forward(x) + 0 * ops.rms_norm(x, torch.ones(16))
            return slower

    result = run(Normed())
    assert outcome(result, "normed").verdict == "reverted"
    assert result.record.coverage == [] == result.plan.dispatch


def test_steps_are_told_whether_the_model_is_compiled(run: Run) -> None:
    seen: list[bool] = []

    class Compiles(TakePauseOut):
        phase = "compile"

    class Looks(Nothing):
        def find(self, context: StepContext) -> Found:
            seen.append(context.compiled)
            return Found((), note="only looks")

    run(Looks(), Compiles())
    # before, and again once another step has changed the ground
    assert seen == [False, True]


def test_the_result_is_measured_with_fresh_compiler_state(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo forgets what candidates left in its caches after the last step and before the final measurement."""
    told: list[str] = []

    class Told(Silent):
        def phase(self, text: str) -> None:
            told.append(text)

    reset = torch._dynamo.reset
    monkeypatch.setattr(torch._dynamo, "reset", lambda: (told.append("reset"), reset()))
    run(TakePauseOut(), progress=Told())
    end = told.index("final check of answers")
    assert told[end : end + 3] == ["final check of answers", "reset", "final measurement: original, phase 1"]
    assert "gain" in told[:end]


class Bounded(NoAnalysis):
    """The original takes 7 ms and cannot take less than 2; ceilings that say so were measured before."""

    def __init__(self, workload: Any, least: float = 2.0) -> None:
        super().__init__(workload)
        object.__setattr__(self, "work", {"default": Work(bytes=int(least * 1.1e6))})

    def ceilings(self) -> tuple[records.Ceilings | None, str]:
        return records.Ceilings(source="measured", bandwidth=1.0, peak={}), ""

    def least_times(self, ceilings: Any, *, lower_precision: bool) -> tuple[Any, str]:
        return LeastTimes(self.work, lambda: ceilings, ceilings, 0, lower_precision), ""  # type: ignore[attr-defined]


def test_a_step_faster_than_the_hardware_allows_is_refused(run: Run) -> None:
    workload = from_example(*slow())
    result = run(TakePauseOut(), TakeHalfOut(), workload=workload, analysis=Bounded(workload))
    assert outcome(result, "gain").reason.startswith("faster than the hardware allows: bucket default took ")
    assert [row.verdict for row in result.record.steps] == ["refused", "kept"] and result.plan.stack == ["half"]


def test_a_result_faster_than_the_hardware_allows_is_taken_back(run: Run) -> None:
    """Possible when it was tried, impossible in the end."""
    workload = from_example(*slow())
    result = run(FadingGain(-PAUSE), workload=workload, analysis=Bounded(workload, least=0.9))
    assert result.record.result is not None and result.record.result.verdict == "faster"
    workload = from_example(*slow())
    later = FadingGain(-PAUSE)
    later.first = PAUSE / 2
    result = run(later, workload=workload, analysis=Bounded(workload))
    row = outcome(result, "fading")
    assert row.verdict == "refused" and "final check failed with it: faster than the hardware allows" in row.reason
    assert result.plan.stack == [] and result.model is workload.model


def test_a_ceiling_that_the_original_beats_bounds_nothing(run: Run) -> None:
    workload = from_example(*slow())
    record = run(TakePauseOut(), workload=workload, analysis=Bounded(workload, least=8.0)).record
    assert record.steps[0].verdict == "kept" and record.ceilings is not None
    assert "ceiling not valid: the original is faster than it allows" in record.ceilings.source
    assert any(note.startswith("ceiling not valid") for note in record.notes)


def test_a_step_that_changes_the_number_of_threads_is_refused_and_the_number_put_back(run: Run) -> None:
    class Threads(TakePauseOut):
        def apply(self, model: torch.nn.Module, params: dict[str, Any]) -> torch.nn.Module:
            torch.set_num_threads(2)
            return super().apply(model, params)

    before = torch.get_num_threads()
    result = run(Threads())
    reason = f"it changed the number of threads from {before} to 2"
    assert outcome(result, "gain").reason.startswith(reason) and torch.get_num_threads() == before


def test_what_the_machine_resolves_is_measured_first(run: Run) -> None:
    """2 % of noise a call: the original differs from itself by less, since a block has many."""
    record = run(Nothing()).record
    assert 0 < record.resolution["default"] < 0.02


def test_a_busy_moment_at_the_start_hides_no_later_gain(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the interval decides and the resolution alone makes it a tie, the resolution is measured again."""
    measured: list[bool] = []

    def resolve(measurer: Measurer, model: nn.Module, *, as_long: bool = False) -> dict[str, timing.Paired]:
        measured.append(as_long)
        pairs = first(measurer, model, as_long=as_long)
        if not as_long:
            measurer.resolution = 10.0
        return pairs

    first = Measurer.resolve
    monkeypatch.setattr(Measurer, "resolve", resolve)
    result = run(TakePauseOut(), Nothing())
    row = outcome(result, "gain")
    assert row.verdict == "kept" and row.resolution is not None and row.resolution < 0.02
    # once for the gain; what is a tie by its interval too is not worth another look
    assert measured == [False, True]
    attempts = {sample.attempt for sample in result.record.samples if sample.step == "resolution"}
    assert attempts == {1, 2} and result.record.resolution["default"] < 0.02


class Restless(Slow):
    """Its calls differ by `noise`, as those of an eager model do that waits for a busy host."""

    noise, work = 0.8, WORK

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CLOCK.advance((self.work + self.pause) * max(0.2, 1 + self.noise * normal()))
        return self.second(self.first(x).relu()) * self.scale


class TakeNoiseOut(Planted):
    id = title = "capture"

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        model.pause, model.noise = 0.0, 0.002
        return model


class LessWork(Planted):
    id = title = "less work"

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        model.work = 0.95 * model.work
        return model


def test_a_restless_original_hides_no_gain_over_a_quiet_model(run: Run) -> None:
    """The resolution is that of the model that a candidate is compared with."""
    torch.manual_seed(0)
    result = run(TakeNoiseOut(), LessWork(), workload=from_example(Restless().eval(), torch.randn(4, 16)))
    capture, less = outcome(result, "capture"), outcome(result, "less work")
    assert capture.verdict == "kept" and capture.resolution is not None and capture.resolution > 0.06
    assert less.verdict == "kept" and less.resolution is not None and less.resolution < 0.02


def test_a_gpu_that_fails_in_a_trial_ends_the_run_so_that_another_process_goes_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = [False]

    class Fails(Planted):
        id = title = "fails"

        def predict(self, found: Found, context: StepContext) -> Prediction:
            return Prediction(1.01, "after the gain")

        def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
            dead[0] = True
            raise RuntimeError("CUDA error: unspecified launch failure\nSearch for ...")

    def put_back(self: Untouched) -> list[str]:
        if dead[0]:
            raise RuntimeError("CUDA error: unspecified launch failure\nof everything that follows")
        return real(self)

    real = Untouched.put_back
    monkeypatch.setattr(Untouched, "put_back", put_back)
    monkeypatch.setattr(engine, "has_failed", lambda device: dead[0])
    model, x = slow()
    with pytest.raises(DeviceFailed, match=f"the GPU failed .CUDA error: unspecified launch.*--resume {tmp_path}"):
        run(TakePauseOut(), Fails(), Nothing(), workload=from_example(model, x), out=tmp_path)
    dead[0] = False
    result = run(TakePauseOut(), Fails(), Nothing(), workload=from_example(model, x), out=tmp_path, resume=True)
    rows = {row.id: row for row in result.record.steps}
    assert rows["gain"].verdict == "kept" and rows["fails"].verdict == "refused" and rows["noise"].verdict == "tie"
    assert rows["fails"].reason == "it raised RuntimeError: CUDA error: unspecified launch failure"
    assert any(note.startswith("the GPU failed: CUDA error") for note in result.record.notes)
