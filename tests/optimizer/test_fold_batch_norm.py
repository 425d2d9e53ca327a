"""Batch norms are folded where the data flows from a layer into them alone, and the answers stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from wavecrest import hardware
from wavecrest.errors import PlanError, StepRefused
from wavecrest.measure.workload import Workload, from_example
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, Found, StepContext, build, step_by_id, structural_copy
from wavecrest.records import BucketProfile, CategoryTime

STEP = step_by_id("fold_batch_norm")


def trained(model: nn.Module) -> nn.Module:
    """The model in eval mode, with statistics and parameters that are not those of a new one."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.2, 3.0)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return model.eval()


def find(workload: Workload) -> Found:
    return STEP.find(StepContext(workload, hardware.cpu(), model=structural_copy(workload.model)))


def folded(workload: Workload) -> nn.Module:
    found = find(workload)
    assert found.sites, found.note
    made = build(workload.model, AppliedSteps().plus(STEP, found.params))
    assert not failures(Gate.prepare(workload).check(made))
    return made


class Block(nn.Module):
    """As in a residual network: names that say nothing, and one ReLU for all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.x = nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.b, self.y = nn.Conv2d(6, 4, 1), nn.BatchNorm2d(4, affine=False)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.y(self.b(self.act(self.x(self.a(x)))))
        return self.act(y + x)


def test_convolutions_and_linear_layers_take_them_in() -> None:
    model = nn.Sequential(Block(), nn.Flatten(), nn.Linear(4 * 36, 8), nn.BatchNorm1d(8))
    workload = from_example(trained(model), torch.randn(3, 4, 6, 6))
    made = folded(workload)
    assert not [one for one in made.modules() if isinstance(one, nn.BatchNorm1d | nn.BatchNorm2d)]
    assert isinstance(model[0].x, nn.BatchNorm2d) and model[0].a.bias is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_rounded_once(dtype: torch.dtype) -> None:
    model = trained(nn.Sequential(nn.Conv2d(3, 5, 3).to(dtype), nn.BatchNorm2d(5)))
    layer, norm = model[0], model[1]
    scale = norm.weight.double() * torch.rsqrt(norm.running_var.double() + norm.eps)
    made = STEP.apply(structural_copy(model), {"pairs": [["0", "1"]]})
    expected = (layer.weight.double() * scale[:, None, None, None]).to(dtype)
    assert made[0].weight.dtype == made[0].bias.dtype == dtype
    assert torch.equal(made[0].weight, expected)


def test_the_layout_of_a_weight_stays() -> None:
    model = trained(nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5))).to(memory_format=torch.channels_last)
    made = STEP.apply(structural_copy(model), {"pairs": [["0", "1"]]})
    assert made[0].weight.is_contiguous(memory_format=torch.channels_last)


class TwoUsers(nn.Module):
    """The layer's result goes to the norm and to another module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.other = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return self.norm(y) + self.other(y)


class Twice(nn.Module):
    """One layer in front of two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.first, self.second = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.layer(self.first(self.layer(x))))


class AlongLength(nn.Module):
    """A norm along the second dimension of a linear layer's result, which happens to be as long as the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x.flatten(2)))


@pytest.mark.parametrize("model", [TwoUsers(), Twice(), AlongLength()], ids=lambda model: type(model).__name__)
def test_what_does_not_flow_into_one_norm_alone_stays(model: nn.Module) -> None:
    shape = (2, 4, 2, 2) if type(model) is AlongLength else (2, 4, 3, 3)
    assert not find(from_example(trained(model), torch.randn(shape))).sites


def test_batch_statistics_and_hooks_are_refused() -> None:
    live = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5, track_running_stats=False)).eval()
    assert not find(from_example(live, torch.randn(2, 3, 5, 5))).sites
    hooked = trained(nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5)))
    hooked[0].register_forward_hook(lambda *_: None)
    with pytest.raises(StepRefused, match="a hook sees"):
        STEP.apply(structural_copy(hooked), {"pairs": [["0", "1"]]})


def test_a_plan_names_pairs_that_fit() -> None:
    model = trained(nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU()))
    with pytest.raises(PlanError, match="pairs"):
        STEP.check_params({"pairs": [["0"]]})
    with pytest.raises(StepRefused, match="2 cannot be folded into 0"):
        STEP.apply(structural_copy(model), {"pairs": [["0", "2"]]})
    assert "no batch norm in the model" in find(from_example(nn.Linear(2, 2), torch.randn(1, 2))).note


def test_the_prediction_counts_the_bias_that_a_gpu_adds_in_a_pass_of_its_own() -> None:
    """ResNet-50 on an H200: norms 33% of the time, convolutions without a bias, 1.07x and 1.10x measured."""
    norm = CategoryTime(category="normalisation", ms=0.33, share=0.33, calls=53)
    seen = [
        BucketProfile(
            bucket="default", wall_ms=1, kernel_ms=1, idle_ms=None, launches=0, categories=[norm], ops=[],
            uncategorized=[],
        )
    ]  # fmt: skip
    model = nn.Sequential(nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))
    work = from_example(model, torch.ones(1, 2, 2, 2))
    gpu = hardware.Device("cuda", 0, "sm_90", "pretended", 132, 1 << 30, "cuda")

    def ratio(device: hardware.Device, *pairs: list[str]) -> float | None:
        return STEP.predict(Found(("0",), {"pairs": list(pairs)}), StepContext(work, device, seen, model)).ratio

    assert ratio(gpu, ["0", "1"]) == pytest.approx(1.08, abs=0.01)
    assert ratio(gpu, ["0", "1"], ["2", "3"]) == pytest.approx(1.23, abs=0.01)
    assert ratio(gpu, ["2", "3"]) == ratio(hardware.cpu(), ["0", "1"]) == pytest.approx(1.42, abs=0.01)
