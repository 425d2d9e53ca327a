"""Compilation as a step: what stays, and that nothing falls back in silence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from wavecrest import hardware
from wavecrest.graphs.inductor import PRESETS, strict_compilation
from wavecrest.measure.workload import Buckets, from_example
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, StepContext, build, step_by_id


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8)).eval()


@pytest.mark.parametrize("preset", ["default", "freezing"])
def test_compiled_model_is_the_same_class_and_right(preset: str) -> None:
    workload = from_example(model(), Buckets(b1=(torch.randn(1, 16),), b5=(torch.randn(5, 16),)))
    step = step_by_id(f"compile:{preset}")
    found = step.find(StepContext(workload, hardware.cpu()))
    made = build(workload.model, AppliedSteps().plus(step, found.params))
    assert type(made) is type(workload.model)
    assert made.state_dict().keys() == workload.model.state_dict().keys()
    assert workload.model._compiled_call_impl is None and made._compiled_call_impl is not None
    assert not failures(Gate.prepare(workload).check(made))


def test_presets_name_their_devices() -> None:
    workload = from_example(model(), torch.randn(1, 16))
    context = StepContext(workload, hardware.cpu())
    for name, preset in PRESETS.items():
        found = step_by_id(f"compile:{name}").find(context)
        assert bool(found.sites) == ("cpu" in preset.devices)
        assert found.note


def test_limit_of_variants_raises_instead_of_running_eagerly() -> None:
    class Count(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.n = n

        def forward(self, x: Tensor) -> Tensor:
            return x * self.n

    torch._dynamo.reset()
    with strict_compilation(graphs=8), torch.no_grad(), pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        for n in range(12):
            variant = Count(n)
            variant.compile(backend="eager", dynamic=False)
            variant(torch.ones(2))
    torch._dynamo.reset()


def test_group_replaces_and_order_is_by_phase() -> None:
    default, freezing, fuse = (step_by_id(name) for name in ("compile:default", "compile:freezing", "fuse_qkv"))
    applied = (
        AppliedSteps()
        .plus(default, {"preset": "default"})
        .plus(fuse, {"groups": []})
        .plus(freezing, {"preset": "freezing"})
    )
    assert [item.step_id for item in applied.ordered()] == ["fuse_qkv", "compile:freezing"]
    assert applied.only("surgery").steps[0].step_id == "fuse_qkv"
    assert applied.without("fuse_qkv").steps[0].step_id == "compile:freezing"
