"""Strided 1-D convolutions as GEMMs over windows: answers, gradients, layouts, autocast, sites and refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from wavecrest import hardware
from wavecrest.errors import StepRefused
from wavecrest.measure.workload import from_example
from wavecrest.nn import window_conv
from wavecrest.nn.window_conv import WindowConv1d, is_conv1d, window_refusal
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, Found, StepContext, build, step_by_id, structural_copy

STEP = step_by_id("window_conv")
GPU = hardware.Device("cuda", 0, "sm_90", "pretended", 132, 1 << 30, "cuda")


def find(model: nn.Module, x: Any, device: hardware.Device = GPU) -> Found:
    return STEP.find(StepContext(from_example(model, x), device, model=structural_copy(model)))


@pytest.mark.parametrize("length", [2, 3, 4, 21, 64, 401])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 2), (2, 2), (10, 5), (4, 2), (3, 4), (2, 3)])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_convolution(kernel: int, stride: int, length: int, bias: bool) -> None:
    torch.manual_seed(0)
    conv = nn.Conv1d(16, 24, kernel, stride, bias=bias).double()
    if length < kernel:
        WindowConv1d.adopt(conv)
        with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
            conv(torch.randn(2, 16, length, dtype=torch.float64))
        return
    x = torch.randn(2, 16, length, dtype=torch.float64, requires_grad=True)
    learned = [x, *conv.parameters()]
    # as a convolution of this kind, and as PyTorch's makes it; and a part of a larger tensor
    wide = torch.randn(2, length, 20, dtype=torch.float64)
    inputs = [x, x.transpose(1, 2).contiguous().transpose(1, 2), wide[..., 4:].transpose(1, 2), wide[0, :, 4:].mT]
    wanted = [conv(one) for one in inputs]
    grads = torch.autograd.grad(wanted[0].square().sum(), learned)
    WindowConv1d.adopt(conv)
    for one, right in zip(inputs, wanted, strict=True):
        made = conv(one)
        torch.testing.assert_close(made, right, rtol=1e-12, atol=1e-12)
        # the memory that the next one reads without a copy
        assert made.mT.is_contiguous()
    torch.testing.assert_close(torch.autograd.grad(conv(x).square().sum(), learned), grads, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [1, 8, 101])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("kernel", "stride", "padding", "groups"), [(128, 1, 64, 4), (64, 2, 5, 1), (33, 1, 16, 8)])
def test_long_kernels_copy_their_windows(
    kernel: int, stride: int, padding: int, groups: int, normed: bool, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the convolution that tells a wav2vec 2.0 positions, whose weight is normed."""
    torch.manual_seed(0)
    conv = nn.Conv1d(16, 24, kernel, stride, padding=padding, groups=groups).double()
    if normed:
        conv = nn.utils.parametrizations.weight_norm(conv, dim=2)
    assert is_conv1d(conv) and not window_refusal(conv)
    x = torch.randn(3, 16, length, dtype=torch.float64, requires_grad=True)
    if length + 2 * padding < kernel:
        WindowConv1d.adopt(conv)
        with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
            conv(x)
        return
    learned, wanted, keys = [x, *conv.parameters()], conv(x), conv.state_dict().keys()
    grads = torch.autograd.grad(wanted.square().sum(), learned)
    WindowConv1d.adopt(conv)
    assert not is_conv1d(conv) and isinstance(conv, nn.Conv1d) and conv.state_dict().keys() == keys
    made = conv(x)
    torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(made.square().sum(), learned), grads, rtol=1e-10, atol=1e-10)
    # windows of one sequence at a time
    monkeypatch.setattr(window_conv, "MOST_BYTES", 1)
    torch.testing.assert_close(conv(x), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(copy.deepcopy(conv)(x), wanted, rtol=1e-12, atol=1e-12)


def test_a_wav2vec_has_its_convolutions_replaced() -> None:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    config = Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=(32,) * 7,
        num_conv_pos_embeddings=64, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    model, x = Wav2Vec2Model(config).eval(), torch.randn(1, 4000)
    found = find(model, {"input_values": x})
    names = [f"feature_extractor.conv_layers.{index}.conv" for index in range(1, 7)]
    assert found.sites == (*names, "encoder.pos_conv_embed.conv")
    made = build(model, AppliedSteps().plus(STEP, found.params))
    with torch.no_grad():
        wanted, got = model(x).last_hidden_state, made(x).last_hidden_state
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_wrong_inputs_have_the_error_of_the_convolution() -> None:
    conv = nn.Conv1d(16, 24, 3, 2)
    WindowConv1d.adopt(conv)
    with pytest.raises(RuntimeError, match="expected input"):
        conv(torch.randn(2, 15, 9))


def test_no_copy_is_made_between_two() -> None:
    first, second = nn.Conv1d(16, 24, 3, 2, bias=False), nn.Conv1d(24, 16, 3, 2, bias=False)
    for conv in (first, second):
        WindowConv1d.adopt(conv)
    with torch.no_grad():
        y = nn.functional.gelu(first(torch.randn(2, 16, 33)))
        assert y.transpose(1, 2).reshape(2, -1).data_ptr() == y.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_narrow_types(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    conv, x = nn.Conv1d(16, 24, 3, 2), torch.randn(2, 16, 33)
    wanted = conv(x)
    WindowConv1d.adopt(conv)
    with torch.autocast("cpu", dtype):
        made = conv(x)
    assert made.dtype == dtype
    torch.testing.assert_close(made.float(), wanted, rtol=2e-2, atol=2e-2)
    made = conv.to(dtype)(x.to(dtype))
    assert made.dtype == dtype
    torch.testing.assert_close(made.float(), wanted, rtol=2e-2, atol=2e-2)


def test_compiled_it_is_one_graph() -> None:
    model = nn.Sequential(nn.Conv1d(16, 24, 3, 2, bias=False), nn.GELU(), nn.Conv1d(24, 16, 2, 2))
    x = torch.randn(2, 16, 21)
    made = build(model, AppliedSteps().plus(STEP, find(model, x).params))
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


def test_sites_and_refusals() -> None:
    model = nn.Sequential(
        nn.Conv1d(1, 16, 10, 5),
        nn.Conv1d(16, 16, 3, 2),
        nn.Conv1d(16, 16, 3, 1),
        nn.Conv1d(16, 16, 3, 2, padding=1),
        nn.Conv1d(16, 16, 2, 2, groups=2),
        nn.Conv1d(16, 16, 1),
        nn.Conv1d(16, 16, 2, 2, bias=False),
    )
    x = torch.randn(2, 1, 601)
    found = find(model, x)
    assert found.sites == ("1", "6")
    assert found.note == (
        "left out: 0: a GEMM of it would have 5 columns; 2: it would be 3 GEMMs (kernel 3, stride 1); "
        "3: it has groups or padding, and a kernel below 32; 4: it has groups or padding, and a kernel below 32; "
        "5: its kernel is 1"
    )
    workload = from_example(model, x)
    made = build(model, AppliedSteps().plus(STEP, found.params))
    assert not failures(Gate.prepare(workload).check(made))
    assert type(made[1]) is WindowConv1d and type(model[1]) is nn.Conv1d
    assert made[1].weight is model[1].weight and made.state_dict().keys() == model.state_dict().keys()
    with pytest.raises(StepRefused, match="2 is no Conv1d of this step: it would be 3 GEMMs"):
        STEP.apply(structural_copy(model), {"sites": ["2"]})
    assert "on the CPU" in find(model, x, hardware.cpu()).note
    assert find(nn.Sequential(nn.Linear(2, 2)), torch.randn(1, 2)).note == "no 1-D convolution in the model"
