"""Steps for vision transformers: convolutions of patches, and heads that stay packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from wavecrest import hardware
from wavecrest.errors import StepRefused
from wavecrest.measure.workload import Workload, from_example
from wavecrest.nn.multihead_attention import PackedMultiheadAttention
from wavecrest.nn.patch_conv import PatchConv2d
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, Found, StepContext, build, step_by_id, structural_copy
from wavecrest.optimizer.steps.attention import watch_sdpa


def find(step: str, workload: Workload) -> Found:
    return step_by_id(step).find(StepContext(workload, hardware.cpu(), model=structural_copy(workload.model)))


def applied(step: str, workload: Workload) -> nn.Module:
    found = find(step, workload)
    assert found.sites, found.note
    made = build(workload.model, AppliedSteps().plus(step_by_id(step), found.params))
    assert not failures(Gate.prepare(workload).check(made))
    return made


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("kernel", "image"), [(4, (8, 12)), ((2, 3), (7, 11)), (16, (16, 16))], ids=str)
def test_patches_are_rows_of_one_gemm(kernel: Any, image: tuple[int, int], layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, kernel, stride=kernel).double()
    x = torch.randn(2, 3, *image, dtype=torch.float64).to(memory_format=layout)
    expected, single = conv(x), conv(x[0])
    PatchConv2d.adopt(conv)
    made = conv.to(memory_format=layout)(x)
    torch.testing.assert_close(made, expected)
    torch.testing.assert_close(conv(x[0]), single)
    assert made.is_contiguous(memory_format=torch.channels_last)


def test_only_convolutions_of_patches_are_found() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 4, stride=4),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Conv2d(8, 8, 2, stride=2, groups=2),
        nn.Conv2d(8, 8, 1),
        nn.Conv2d(8, 4, 2, stride=2, bias=False),
    )
    workload = from_example(model, torch.randn(2, 3, 32, 32))
    assert find("patch_conv", workload).sites == ("0", "4")
    made = applied("patch_conv", workload)
    assert type(made[0]) is PatchConv2d and type(model[0]) is nn.Conv2d
    assert made.state_dict().keys() == model.state_dict().keys()
    assert made[0].weight is model[0].weight
    with pytest.raises(StepRefused, match="1 is no Conv2d of patches"):
        step_by_id("patch_conv").apply(structural_copy(model), {"sites": ["1"]})
    assert "no 2-D convolution" in find("patch_conv", from_example(nn.Linear(2, 2), torch.randn(1, 2))).note


class Encoder(nn.Module):
    def __init__(self, *, batch_first: bool = True, mode: str = "plain", **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.mode = nn.LayerNorm(16), mode
        self.mix = nn.MultiheadAttention(16, 4, batch_first=batch_first, **options)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.mode == "weights":
            return self.mix(y, y, y)[1]
        if self.mode == "ignored":
            # as in DETR: places are added to queries and keys, and the weights are made for nobody
            return x + self.mix(y, y, x)[0]
        if self.mode == "stored":
            z, self.mix.last = self.mix(y, y, y)
            return x + z
        if self.mode == "used":
            z, weights = self.mix(y, y, y)
            return x + z * weights.amax()
        if self.mode == "shape":
            z, weights = self.mix(y, y, y)
            return x + z / weights.shape[-1]
        if self.mode == "cross":
            return self.mix(y, x, x, need_weights=False)[0]
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1) if self.mode == "mask" else None
        return x + self.mix(y, y, y, need_weights=False, attn_mask=mask)[0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_heads_stay_packed(batch_first: bool, bias: bool) -> None:
    model = Encoder(batch_first=batch_first, bias=bias).eval()
    workload = from_example(model, torch.randn(3, 5, 16))
    made = applied("attention:pack_heads", workload)
    assert type(made.mix) is PackedMultiheadAttention and type(model.mix) is nn.MultiheadAttention
    assert made.state_dict().keys() == model.state_dict().keys()
    # one graph, without a copy of q, k or v
    with torch.no_grad():
        compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(torch.ones(2, 5, 16)), model(torch.ones(2, 5, 16)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["cross", "mask", "ignored"])
def test_heads_stay_packed_in_other_calls(mode: str) -> None:
    workload = from_example(Encoder(mode=mode).eval(), torch.randn(3, 5, 16))
    made = applied("attention:pack_heads", workload)
    assert type(made.mix) is PackedMultiheadAttention and made.mix.weights_unread == (mode == "ignored")
    calls = watch_sdpa(made, list(workload.buckets.values()))
    assert len(calls) == 1
    with torch.no_grad():
        compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(torch.ones(2, 5, 16)), workload.model(torch.ones(2, 5, 16)))


@pytest.mark.parametrize("mode", ["weights", "used", "stored", "shape"])
def test_weights_that_are_read_stay(mode: str) -> None:
    workload = from_example(Encoder(mode=mode).eval(), torch.randn(3, 5, 16))
    found = find("attention:pack_heads", workload)
    if mode == "shape":
        # an attribute is no read that is seen: the call without weights raises, and the gate refuses it
        made = build(workload.model, AppliedSteps().plus(step_by_id("attention:pack_heads"), found.params))
        with pytest.raises(AttributeError):
            made(torch.randn(2, 5, 16))
        return
    assert not found.sites and found.note == "the weights are read"
    changed = Encoder(mode=mode).eval()
    PackedMultiheadAttention.adopt(changed.mix)
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        torch.testing.assert_close(changed(x), Encoder(mode=mode).eval()(x))


def test_modules_that_cannot_be_packed_say_why() -> None:
    workload = from_example(Encoder(add_bias_kv=True).eval(), torch.randn(3, 5, 16))
    assert "keys of its own" in find("attention:pack_heads", workload).note
    with pytest.raises(StepRefused, match="mix is no MultiheadAttention"):
        step_by_id("attention:pack_heads").apply(structural_copy(workload.model), {"sites": ["mix"]})


def test_training_with_dropout_is_pytorchs() -> None:
    model = Encoder(dropout=0.5)
    PackedMultiheadAttention.adopt(model.mix)
    x = torch.randn(3, 5, 16)
    torch.manual_seed(1)
    packed = model(x)
    again = Encoder(dropout=0.5)
    torch.manual_seed(1)
    torch.testing.assert_close(packed, again(x))
