from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from wavecrest import nn as wnn
from wavecrest.errors import InvalidArgument, StepRefused
from wavecrest.ops import PackedWeight
from wavecrest.ops.packed import from_plain, to_plain

FORMATS = {
    "shuffled": {},
    "int8": {},
    "int8-64": {"group": 64},
    "int4": {"group": 32},
    "int4-zero": {"group": 32, "symmetric": False},
    "fp8": {},
    "fp8_block": {},
}


def _layer(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, 48, bias=bias, dtype=dtype)


def _packed(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Linear, wnn.Linear]:
    layer = _layer(dtype=dtype)
    return layer, wnn.Linear.from_module(layer, name.partition("-")[0], **FORMATS[name])


@pytest.mark.parametrize("bias", [True, False])
def test_a_plain_one_shares_parameters_and_learns(bias: bool) -> None:
    layer = _layer(bias)
    made = wnn.Linear.from_module(layer)
    assert made.weight is layer.weight and made.bias is layer.bias
    x = torch.randn(2, 5, 96, requires_grad=True)
    assert torch.allclose(made(x), layer(x), atol=1e-6)
    made(x).square().sum().backward()
    theirs = copy.deepcopy(layer)
    theirs.zero_grad()
    theirs(x.detach()).square().sum().backward()
    assert theirs.weight.grad is not None and layer.weight.grad is not None
    assert torch.allclose(layer.weight.grad, theirs.weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_one_computes_with_what_it_holds(name: str) -> None:
    layer, made = _packed(name)
    assert isinstance(made.weight, PackedWeight) and not made.weight.requires_grad
    assert layer.bias is made.bias and (made.in_features, made.out_features) == (96, 48)
    x = torch.randn(2, 5, 96, dtype=torch.bfloat16)
    with torch.no_grad():
        got = made(x)
        exact = x.double() @ made.weight.dequantize_float32().double().mT + layer.bias.double()
    assert got.dtype == torch.bfloat16 and got.shape == (2, 5, 48)
    assert (got.double() - exact).abs().max() < 2e-2
    # and not with something else: a weight rounded to 4 bits is off by about a tenth
    assert (got.double() - layer(x).double()).norm() / exact.norm() < (0.2 if "int4" in name else 0.05)


def test_activation_and_residual() -> None:
    layer = _layer()
    x, residual = torch.randn(3, 96), torch.randn(3, 48)
    with torch.no_grad():
        got = wnn.Linear.from_module(layer, activation="silu")(x, residual)
        assert torch.allclose(got, nn.functional.silu(layer(x)) + residual, atol=1e-5)
        gated = wnn.Linear.from_module(layer, activation="silu_and_mul")
        gate, up = layer(x).chunk(2, dim=-1)
        assert torch.allclose(gated(x), nn.functional.silu(gate) * up, atol=1e-5) and gated.out_features == 24


@pytest.mark.parametrize("name", FORMATS)
def test_state_dict_through_safetensors(name: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    _, made = _packed(name)
    other = wnn.Linear.from_module(_layer(dtype=torch.bfloat16), name.partition("-")[0], **FORMATS[name])
    with torch.no_grad():
        for parameter in (other.weight.stored, other.bias):  # type: ignore[union-attr]
            parameter.zero_()  # type: ignore[union-attr]
    safetensors.save_file(to_plain(made.state_dict()), tmp_path / "weights.safetensors")
    other.load_state_dict(from_plain(safetensors.load_file(tmp_path / "weights.safetensors")))
    x = torch.randn(4, 96, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(other(x), made(x)) and made(x).abs().max() > 0.1


@pytest.mark.parametrize("assign", [False, True])
def test_weights_of_another_format_are_refused(assign: bool) -> None:
    _, int4 = _packed("int4")
    _, int8 = _packed("int8")
    before = int8(torch.ones(1, 96, dtype=torch.bfloat16))
    with pytest.raises((InvalidArgument, RuntimeError), match="int4"):
        int8.load_state_dict(int4.state_dict(), assign=assign)
    assert torch.equal(int8(torch.ones(1, 96, dtype=torch.bfloat16)), before)


def test_compiled_copied_and_shown() -> None:
    _, made = _packed("int4")
    x = torch.randn(4, 96, dtype=torch.bfloat16)
    with torch.no_grad():
        twin = copy.deepcopy(made)
        assert torch.equal(twin(x), made(x))
        assert torch.equal(torch.compile(made, fullgraph=True)(x), made(x))
    assert repr(made) == "Linear(96, 48, bias=True, int4)"


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Bilinear(2, 2, 2), "Bilinear is not an nn.Linear"),
        (type("Mine", (nn.Linear,), {})(2, 2), "Mine is not an nn.Linear"),
    ],
    ids=["bilinear", "derived"],
)
def test_what_is_refused(module: nn.Module, reason: str) -> None:
    with pytest.raises(StepRefused, match=reason):
        wnn.Linear.from_module(module)


def test_hooks_and_wrong_arguments_are_refused() -> None:
    layer = _layer()
    layer.register_forward_hook(lambda *_: None)
    with pytest.raises(StepRefused, match="hooks"):
        wnn.Linear.from_module(layer)
    with pytest.raises(InvalidArgument, match=r"weight must be \[N, K\]"):
        wnn.Linear.from_weight(torch.zeros(3))
    with pytest.raises(InvalidArgument, match="activation takes relu"):
        wnn.Linear.from_weight(torch.zeros(3, 4), activation="swish")
    with pytest.raises(InvalidArgument):
        wnn.Linear.from_module(nn.Linear(96, 47), "shuffled")
