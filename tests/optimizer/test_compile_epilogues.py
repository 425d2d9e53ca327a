"""The step that folds, changes the layout and compiles: found where cuDNN has a kernel for it, and right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.optimizer.test_fold_batch_norm import Block, trained
from wavecrest import hardware
from wavecrest.graphs import epilogues
from wavecrest.graphs.inductor import strict_compilation
from wavecrest.measure.workload import Workload, from_example
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, StepContext, build, step_by_id, structural_copy

STEP = step_by_id("compile:epilogues")
GPU = hardware.Device("cuda", 0, "sm_90", "pretended", 132, 1 << 30, "cuda")


def context(workload: Workload) -> StepContext:
    return StepContext(workload, GPU, model=structural_copy(workload.model))


def residual() -> Workload:
    return from_example(trained(nn.Sequential(Block(), Block())), torch.randn(2, 4, 6, 6))


def test_found_where_there_is_such_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = residual()
    assert "no convolution whose result goes into a ReLU" in STEP.find(context(workload)).note
    monkeypatch.setattr(epilogues.rewrite, "__defaults__", (lambda _call: True,))
    found = STEP.find(context(workload))
    assert found.params["pairs"] == [["0.a", "0.x"], ["0.b", "0.y"], ["1.a", "1.x"], ["1.b", "1.y"]]
    assert found.note.startswith("4 convolutions end in ReLU, 4 batch norms are folded")
    assert STEP.check_params(found.params) == ["0.a", "0.x", "0.b", "0.y", "1.a", "1.x", "1.b", "1.y"]
    made = build(workload.model, AppliedSteps().plus(STEP, found.params))
    assert made[0].a.weight.is_contiguous(memory_format=torch.channels_last)
    assert type(made) is type(workload.model) and isinstance(workload.model[0].x, nn.BatchNorm2d)
    with strict_compilation(graphs=8):
        assert not failures(Gate.prepare(workload).check(made))


def test_other_devices_and_models_say_why() -> None:
    workload = from_example(nn.Linear(2, 2), torch.randn(1, 2))
    assert STEP.find(context(workload)).note == "no 2-D convolution in the model"
    assert "not tried on cpu" in STEP.find(StepContext(residual(), hardware.cpu())).note


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    if torch.version.hip is not None:
        pytest.skip("cuDNN is NVIDIA's")
    model = trained(nn.Sequential(nn.Conv2d(3, 4, 3), Block(), Block())).half().cuda()
    workload = from_example(model, torch.randn(2, 3, 8, 8, device="cuda", dtype=torch.float16))
    found = STEP.find(StepContext(workload, hardware.detect("cuda"), model=structural_copy(model)))
    assert found.note.startswith("4 convolutions end in ReLU, 4 batch norms are folded")
    with strict_compilation(graphs=8):
        assert not failures(Gate.prepare(workload).check(build(model, AppliedSteps().plus(STEP, found.params))))
