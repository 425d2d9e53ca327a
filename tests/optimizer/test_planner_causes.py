"""The planner and the causes of what lost: the step that removes one is tried next, and then what had lost by it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.optimizer.conftest import NoAnalysis, Run
from tests.optimizer.planted import PAUSE, AddPause, Nothing, Planted, TakeHalfOut, slow
from wavecrest import records
from wavecrest.measure.workload import from_example
from wavecrest.optimizer.steps import Found, Prediction, StepContext


class Masked(NoAnalysis):
    """A longer pause than the original's is attention on the math path; of others half is a fused kernel."""

    def profile(self, model: nn.Module, ceilings: records.Ceilings | None) -> tuple[list[records.BucketProfile], str]:
        pause: Any = model.pause
        math = pause > PAUSE
        ms = pause * 1e3 if math else pause * 5e2
        row = records.OpTime(
            name="aten::_scaled_dot_product_attention_math" if math else "aten::_scaled_dot_product_flash_attention",
            category="attention", shapes="2x2x8x8, 2x2x8x8, 2x2x8x8 float32", calls=2, ms=ms, share=1.0,
        )  # fmt: skip
        profile = records.BucketProfile(
            bucket="default", wall_ms=1 + pause * 1e3, kernel_ms=1 + pause * 1e3, idle_ms=None, launches=1,
            categories=[], ops=[row], uncategorized=[],
        )  # fmt: skip
        return [profile], ""


class LosesByMath(Planted):
    """A gain that a slow kernel hides, until another step has taken it out."""

    id = title = "loses"
    done = False

    def predict(self, found: Found, context: StepContext) -> Prediction:
        return Prediction(3.0, "planted")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        model.pause = 0.0 if getattr(model, "repaired", False) else 2 * PAUSE
        return model


class Repairs(Planted):
    """Gains little alone, and takes the slow kernel of the other step out."""

    id = title = "repairs"
    cures = ("math_attention",)

    def predict(self, found: Found, context: StepContext) -> Prediction:
        return Prediction(1.0, "nothing")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        model.pause, model.repaired = model.pause * 0.9, True
        return model


class Other(Nothing):
    """Promises more than the cure."""

    id = title = "other"

    def predict(self, found: Found, context: StepContext) -> Prediction:
        return Prediction(1.4, "planted")


def test_the_cure_of_a_named_cause_is_tried_next_and_then_what_had_lost(run: Run) -> None:
    workload = from_example(*slow())
    record = run(LosesByMath(), Other(), Repairs(), workload=workload, analysis=Masked(workload), budget=200.0).record
    lost, cure, again, *rest = record.steps
    assert (lost.id, lost.verdict) == ("loses", "reverted") and lost.causes[0].kind == "math_attention"
    assert (cure.id, cure.verdict) == ("repairs", "kept") and "because of a cause that was named" in cure.chosen
    assert "loses lost by it: attention 3 → 12 ms: SDPA took the math path" in cure.prediction
    assert (again.id, again.attempt, again.verdict) == ("loses", 2, "kept")
    assert [row.id for row in rest] == ["other"]


def test_a_cure_that_compiles_first_goes_by_its_gain(run: Run) -> None:
    """It makes the surgery behind it dearer: the cause raises what is predicted of it, and not its rank."""

    class Compiles(Repairs):
        id, phase = "compile:default", "compile"
        title = "repairs"

    workload = from_example(*slow())
    steps = LosesByMath(), Other(), Compiles()
    record = run(*steps, workload=workload, analysis=Masked(workload), budget=200.0).record
    lost, other, cure = record.steps[:3]
    assert (lost.id, other.id, cure.id) == ("loses", "other", "compile:default")
    assert "loses lost by it: attention 3 → 12 ms" in cure.prediction and cure.predicted is not None
    assert cure.predicted > 1.4
    assert "; with a cause that was named: attention 3 → 12 ms" in cure.chosen and "comes first" not in cure.chosen


def test_without_a_cure_the_order_is_that_of_the_predictions(run: Run) -> None:
    class Harmless(Repairs):
        cures = ("layout",)

    workload = from_example(*slow())
    record = run(LosesByMath(), Other(), Harmless(), workload=workload, analysis=Masked(workload), budget=200.0).record
    assert [row.id for row in record.steps][:3] == ["loses", "other", "repairs"]


class Idle(NoAnalysis):
    """A pause is a wait for the host, and more of the time than it takes."""

    def profile(self, model: nn.Module, ceilings: records.Ceilings | None) -> tuple[list[records.BucketProfile], str]:
        pause: Any = model.pause
        profile = records.BucketProfile(
            bucket="default", wall_ms=1 + pause * 1e3, kernel_ms=1.0, idle_ms=pause * 1.1e3, launches=9,
            categories=[], ops=[], uncategorized=[],
        )  # fmt: skip
        return [profile], ""


class Waits(AddPause):
    """Promises most, and waits for the host."""

    id = title = "waits"

    def predict(self, found: Found, context: StepContext) -> Prediction:
        return Prediction(3.0, "planted")


class SavesLaunches(Repairs):
    id = title = "launches"
    cures = ("launch_gaps",)


class Captures(TakeHalfOut):
    id = title = "captured"

    def predict(self, found: Found, context: StepContext) -> Prediction:
        return Prediction(4.0, "planted")


@pytest.mark.parametrize(("phase", "order"), [("surgery", ["launches", "other"]), ("capture", ["other", "launches"])])
def test_a_replayed_graph_is_not_cured_of_launches(run: Run, phase: Any, order: list[str]) -> None:
    first = Captures()
    first.phase = phase
    workload = from_example(*slow())
    steps = (first, Waits(), Other(), SavesLaunches())
    record = run(*steps, workload=workload, analysis=Idle(workload), budget=200.0).record
    assert [row.id for row in record.steps][:2] == ["captured", "waits"]
    assert [cause.kind for cause in record.steps[1].causes] == ["launch_gaps"]
    assert [row.id for row in record.steps if row.id in order and row.attempt == 1] == order
