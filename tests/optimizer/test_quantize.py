"""Quantized layers as a step: only when asked, within the quality asked for, and others are held to their answers."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.optimizer.conftest import NoAnalysis, Run
from tests.optimizer.planted import CLOCK, PAUSE, Planted
from wavecrest import hardware
from wavecrest.errors import InvalidArgument, PlanError, StepRefused
from wavecrest.measure.workload import Workload, from_example
from wavecrest.nn import Linear
from wavecrest.optimizer.checking import check_applied
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.options import Options, Wish
from wavecrest.optimizer.plan import Plan
from wavecrest.optimizer.steps import AppliedSteps, StepContext, build, step_by_id, structural_copy
from wavecrest.optimizer.steps.quantize import Quantize
from wavecrest.profile.least_time import LeastTimes, Work
from wavecrest.records import StepOutcome


class Net(nn.Module):
    """Two layers and a pause, which is longer while a layer has its own precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.lm_head = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 8)
        self.pause, self.off = PAUSE, 0.0

    def forward(self, x: Tensor) -> Tensor:
        CLOCK.advance(self.pause * (0.5 if isinstance(self.up, Linear) else 1.0))
        return self.lm_head(x + self.down(self.up(x).relu())) + self.off


def workload() -> Workload:
    model = Net().eval()
    return from_example(model, torch.randn(16, 64))


def context(work: Workload, *wish: Any) -> StepContext:
    asked = Wish.of(*wish) if wish else None
    return StepContext(work, hardware.cpu(), model=structural_copy(work.model), quantize=asked)


def test_it_is_tried_only_when_asked_for_and_keeps_the_original() -> None:
    work, step = workload(), step_by_id("quantize")
    assert "not asked for" in step.find(context(work)).note
    found = step.find(context(work, "int4,int8", "2%"))
    # what quantize keeps by default is kept, and 4 bits are too few for this quality in at least one layer
    assert set(found.params["formats"]) == {"up", "down"} and "int8" in found.params["formats"].values()
    assert found.saved is not None and 0.3 < found.saved < 0.9
    assert all(type(module) is nn.Linear for module in (work.model.up, work.model.down))
    made = build(work.model, AppliedSteps().plus(step, found.params))
    assert made.up.weight.format == found.params["formats"]["up"] and type(made.lm_head) is nn.Linear
    with pytest.raises(StepRefused, match="the limits are not met"):
        step.find(context(work, "int4", 1e-6))


def test_the_quality_is_held_wherever_a_plan_is_checked() -> None:
    work, step = workload(), step_by_id("quantize")
    found = step.find(context(work, "int8", "2%"))
    steps = AppliedSteps().plus(step, found.params)
    made = build(work.model, steps)
    gate = Gate.prepare(work, seed=0)
    assert failures(gate.check(made)), "int8 is not within float32's limits"
    assert not failures(check_applied(gate, made, steps, final=True))
    (note,) = [text for text in gate.summary.notes if "quantized model" in text]
    assert "within the quality of 2.00% that was asked for: relative 0.0" in note
    # what follows is held to the quantized model's answers, by float32's limits
    made.off = 1e-3
    assert failures(check_applied(gate, made, steps, final=False))
    # the same plan with a quality that these formats do not meet
    strict = AppliedSteps().plus(step, {**found.params, "quality": 1e-4})
    with pytest.raises(StepRefused, match=r"not within the quality of 0.01%: relative 0\.0"):
        check_applied(Gate.prepare(work, seed=0), made, strict, final=False)


def test_a_run_quantizes_first_and_goes_on_from_there(run: Run) -> None:
    class SlightlyWrong(Planted):
        id = title = "slightly wrong"

        def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
            model.off, model.pause = 1e-3, 0.0
            return model

    class Faster(Planted):
        id = title = "faster"

        def find(self, context: StepContext) -> Any:
            assert isinstance(context.model.up, Linear), "it looks at the quantized model"
            return super().find(context)

        def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
            model.pause /= 2
            return model

    work = workload()
    result = run(SlightlyWrong(), Quantize(), workload=work, quantize="int8", quality="2%", budget=300.0)
    assert [(row.id, row.verdict) for row in result.record.steps] == [
        ("quantize", "kept"),
        ("slightly wrong", "refused"),
    ]
    assert result.plan.stack == ["quantize"] and result.record.result.verdict == "faster"
    assert any("held to those of the quantized model" in note for note in result.record.notes)
    assert isinstance(result.model.up, Linear) and type(work.model.up) is nn.Linear
    again = run(Faster(), Quantize(), workload=workload(), quantize="int8", quality="2%", budget=300.0)
    assert again.plan.stack == ["quantize", "faster"]
    plain = run(SlightlyWrong(), Quantize(), workload=workload(), budget=300.0)
    assert "quantize" not in plain.plan.stack


@pytest.mark.parametrize(
    ("formats", "nbytes", "bound"),
    # float32 weights; 8-bit activations: half of these bytes again are counted by the lower precision itself
    [("int8", 250, True), ("int4,int8", 125, True), ("mxfp4", 125, True), ("w8a8-int8", 500, False)],
)
def test_the_least_time_is_of_the_fewest_bits(run: Run, formats: str, nbytes: int, bound: bool) -> None:
    made: list[LeastTimes] = []

    class Bounded(NoAnalysis):
        def least_times(self, ceilings: Any, *, lower_precision: bool) -> tuple[Any, str]:
            assert lower_precision != bound
            made.append(LeastTimes({"default": Work(bytes=1000)}, lambda: None, None, 0, lower_precision))
            return made[0], ""

    work = workload()
    run(Quantize(), workload=work, analysis=Bounded(work), quantize=formats, quality="50%", budget=300.0)
    assert made[0].work["default"].bytes == nbytes


def test_a_plan_gives_the_same_bits_again(run: Run, tmp_path: Any) -> None:
    work = workload()
    made = run(Quantize(), workload=work, quantize="int8", quality="2%", budget=300.0)
    made.plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json").apply(workload().model, torch.randn(16, 64))
    x = work.buckets["default"].args[0]
    assert torch.equal(again(x), made.model(x))


@pytest.mark.parametrize("other_versions", [False, True], ids=["same versions", "verified again"])
def test_original_weights_are_free_once_the_model_is_given_up(other_versions: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 8)).bfloat16().eval(), torch.randn(4, 512)
    work, step = from_example(model, x.bfloat16()), step_by_id("quantize")
    plan = Plan.start(work, hardware.cpu(), {"default": {}})
    params = {"formats": {"0": "int8"}, "quality": 0.1}
    outcome = StepOutcome(
        id=step.id, title=step.title, level=step.level, params=params, verdict="kept", reason="planted"
    )
    plan.steps, plan.stack = [outcome], [step.id]
    if other_versions:
        plan.fingerprint.torch = "0.0"
    del work
    weight, bias = weakref.ref(model[0].weight), weakref.ref(model[0].bias)
    made: Any = plan.apply(model, x.bfloat16()) if other_versions else plan.apply(model)
    with torch.no_grad():
        made(x.bfloat16())
    gc.collect()
    # the model stays as it is, and is what holds the weight
    assert weight() is model[0].weight and made[0].weight.format == "int8"
    del model
    gc.collect()
    assert weight() is None and bias() is made[0].bias


def test_bad_wishes_and_plans_are_named() -> None:
    with pytest.raises(InvalidArgument, match="go together, and quality is missing"):
        Options(quantize="int8")
    with pytest.raises(InvalidArgument, match="go together, and quantize is missing"):
        Options(quality="1%")
    with pytest.raises(InvalidArgument, match="quality is one share here"):
        Options(quantize="int8", quality={"kl": 0.1})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="of level 3, and the level is 2"):
        Options(quantize="int8", quality="1%", level=2)
    with pytest.raises(InvalidArgument, match="not 'int3'"):
        Options(quantize="int3", quality="1%")
    step = step_by_id("quantize")
    for params, text in (
        ({"formats": {"up": "int3"}, "quality": 0.01}, "int3"),
        ({"formats": {}, "quality": 0.01}, "formats"),
        ({"formats": {"up": "int8"}, "quality": -1.0}, "quality"),
    ):
        with pytest.raises(PlanError, match=text):
            step.check_params(params)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with pytest.raises(StepRefused, match="1: the model has no such linear layer"):
        build(model, AppliedSteps().plus(step, {"formats": {"1": "int8"}, "quality": 0.1}))
