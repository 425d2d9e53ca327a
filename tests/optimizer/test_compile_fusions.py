"""The steps that compile a rewritten graph: found where there is something to fuse, right, and replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wavecrest import hardware, records
from wavecrest.errors import PlanError
from wavecrest.graphs import fusions
from wavecrest.graphs.inductor import strict_compilation
from wavecrest.measure.workload import Buckets, Workload, from_example
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, Found, StepContext, build, gemm_choices, step_by_id, structural_copy

GPU = hardware.Device("cuda", 0, "sm_90", "pretended", 132, 1 << 30, "cuda")


class Block(nn.Module):
    """A post-norm block with positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.places, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.up, self.act, self.down = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places(torch.arange(x.shape[1], device=x.device))
        return self.norm(x + self.down(self.act(self.up(x))))


@pytest.fixture
def workload(monkeypatch: pytest.MonkeyPatch) -> Workload:
    """A block for which the fake GPU's faster backend is oneDNN."""

    def choices(calls: Any, _device: str) -> gemm_choices.Choices:
        return gemm_choices.Choices({gemm_choices.name_of(call): "onednn" for call in calls}, 0.5, {})

    monkeypatch.setattr("wavecrest.optimizer.steps.compile_fusions.choices", choices)
    return from_example(Block().eval(), Buckets(a=torch.randn(2, 5, 8), b=torch.randn(1, 9, 8)))


def find(step: str, workload: Workload, device: Any = GPU) -> Found:
    return step_by_id(step).find(StepContext(workload, device, model=structural_copy(workload.model)))


@pytest.mark.parametrize("step", ["compile:fusions", "compile:graph"])
def test_found_right_and_replayed(step: str, workload: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fusions.rewrite.__kwdefaults__, "norms", lambda _call: True)
    found = find(step, workload)
    assert found.params == {
        "preset": step.removeprefix("compile:"),
        "backends": {"gelu 10x8x32 float32 bias": "onednn", "gelu 9x8x32 float32 bias": "onednn"},
    }
    more = ", 2 residual additions with their norm" if step == "compile:graph" else ""
    assert found.note == f"4 calls whose results are constants, 2 linear layers that end in their activation{more}"
    assert step_by_id(step).check_params(found.params) == []
    made = build(workload.model, AppliedSteps().plus(step_by_id(step), found.params))
    with strict_compilation(graphs=32):
        assert not failures(Gate.prepare(workload).check(made))
    prediction = step_by_id(step).predict(found, StepContext(workload, GPU))
    assert prediction.ratio == 1.0 and found.note in prediction.basis


@pytest.mark.parametrize("step", ["compile:fusions", "compile:graph"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("attention", [0.0, 0.3])
def test_no_prediction_is_above_what_was_hoped_for(step: str, compiled: bool, attention: float) -> None:
    """Before a model is traced, a step counts with what it gains at best."""
    shares = {"elementwise": 0.3, "normalisation": 0.1, "attention": attention, "gemm": 0.6 - attention}
    rows = [records.CategoryTime(category=name, ms=share, share=share, calls=1) for name, share in shares.items()]
    profile = records.BucketProfile(
        bucket="b", wall_ms=1.0, kernel_ms=1.0, idle_ms=0.0, launches=4, categories=rows, ops=[], uncategorized=[]
    )
    context = StepContext(from_example(Block().eval(), torch.randn(2, 5, 8)), GPU, profile=[profile], compiled=compiled)
    hoped = step_by_id(step).hope(context).ratio
    assert hoped is not None
    written_out = {"attentions": {"a": "b"}} if not attention else {}
    predicted = step_by_id(step).predict(Found(("model",), {"backends": {"a": "b"}, **written_out}), context).ratio
    fewer = step_by_id(step).predict(Found(("model",), {"backends": {}}), context).ratio
    if step == "compile:graph" and compiled:
        assert hoped == 1.0 and predicted is fewer is None
    else:
        assert predicted is not None and fewer is not None and hoped == predicted > fewer >= 1.0


def test_additions_before_norms_of_ours_are_not_promised() -> None:
    context = StepContext(from_example(nn.Linear(2, 2), torch.randn(1, 2)), GPU)
    context.profile = [
        records.BucketProfile.model_construct(
            bucket="default", wall_ms=1.0, kernel_ms=1.0, idle_ms=0.0, launches=4, ops=[],
            categories=[records.CategoryTime.model_construct(category="normalisation", ms=0.2, share=0.2)],
        )
    ]  # fmt: skip
    step, found = step_by_id("compile:graph"), Found(("model",), {"backends": {}})
    assert (step.predict(found, context).ratio or 0) > 1.05
    context.own_layer_norms = True
    assert step.predict(found, context).ratio == 1.0


def test_nothing_to_fuse_and_other_devices_say_so(workload: Workload) -> None:
    plain = from_example(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval(), torch.randn(2, 4))
    assert "nothing in the graphs" in find("compile:graph", plain).note
    assert "not tried on cpu" in find("compile:fusions", workload, hardware.cpu()).note


def test_parameters_from_a_plan_are_checked() -> None:
    step = step_by_id("compile:graph")
    with pytest.raises(PlanError):
        step.check_params({"preset": "graph", "backends": {"gelu": 3}})
    with pytest.raises(PlanError, match="preset is 'fusions'"):
        step.check_params({"preset": "fusions"})


def test_without_backends_in_a_plan_nothing_is_replaced(workload: Workload) -> None:
    step = step_by_id("compile:graph")
    made = build(workload.model, AppliedSteps().plus(step, {"preset": "graph"}))
    with torch.no_grad(), strict_compilation(graphs=32):
        x = torch.randn(2, 5, 8)
        torch.testing.assert_close(made(x), workload.model(x))


@pytest.mark.gpu
@pytest.mark.parametrize("step", ["compile:fusions", "compile:graph"])
def test_on_a_gpu(step: str) -> None:
    x = torch.randn(4, 9, 8, device="cuda").half()
    workload = from_example(Block().eval().half().cuda(), x)
    found = find(step, workload, hardware.detect("cuda"))
    assert "2 calls whose results are constants" in found.note
    assert ("residual additions" in found.note) == (step == "compile:graph")
    with strict_compilation(graphs=32):
        made = build(workload.model, AppliedSteps().plus(step_by_id(step), found.params))
        assert not failures(Gate.prepare(workload).check(made))
