"""The linear layer with 8-bit weights and activations, against a float64 oracle that rounds as it is defined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.unit.quantized_models import DEVICE
from wavecrest.errors import InvalidArgument
from wavecrest.nn import QuantizedLinear
from wavecrest.nn.quantized_linear import pack_native
from wavecrest.ops import PackedWeight, pack

LARGEST = {"int8": 127.0, "fp8": 448.0}


def oracle(layer: Any, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """x̂ ŵᵀ in float64, x rounded to 8 bits by the definition."""
    weight = layer.weight
    wide = x.double()
    if scale is None:
        scale = wide.abs().amax(-1, keepdim=True) / LARGEST[weight.format]
    scaled = (wide / scale.double()).clamp(-LARGEST[weight.format], LARGEST[weight.format])
    rounded = scaled.round() if weight.format == "int8" else scaled.float().to(weight.stored.dtype).double()
    return (rounded * scale.double()) @ (weight.stored.double() * weight.scale.double()).mT


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.shape == wanted.shape
    # a value between two 8-bit ones may go either way, as scales are float32
    limit = {torch.bfloat16: 6e-3, torch.float16: 2e-3}.get(dtype, 1.5e-3)
    assert float((found.double() - wanted).norm() / wanted.norm()) < limit


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_it_is_the_product_of_the_rounded(format: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(23, 77, dtype=dtype).to(DEVICE), torch.randn(23, dtype=dtype).to(DEVICE)
    layer = QuantizedLinear(pack(weight, format), bias)
    x = torch.randn(77, 6, dtype=dtype).to(DEVICE).t().view(2, 3, 77)
    close(layer(x), oracle(layer, x) + bias.double(), dtype)
    close(layer(x[0, 0]), oracle(layer, x[0, :1])[0] + bias.double(), dtype)
    assert layer(x[:0]).shape == (0, 3, 23)
    # a fixed scale: values beyond it saturate
    scale = torch.tensor(0.01, device=DEVICE)
    fixed = QuantizedLinear(pack(weight, format), None, None, scale)
    close(fixed(x), oracle(fixed, x, scale), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_weight_in_blocks_has_activations_in_groups(dtype: torch.dtype) -> None:
    """With scales of x for 128 columns, those of an outlier alone."""
    torch.manual_seed(0)
    weight = torch.randn(200, 320, dtype=dtype).to(DEVICE)
    layer = QuantizedLinear(pack(weight, "fp8_block"), torch.randn(200, dtype=dtype).to(DEVICE))
    x = torch.randn(2, 3, 320, dtype=dtype).to(DEVICE)
    x[1, 1, 130] = 1000
    groups = [one.double() for one in x.split(128, -1)]
    scales = [one.abs().amax(-1, keepdim=True) / LARGEST["fp8"] for one in groups]
    rounded = torch.cat(
        [(a / s).float().to(torch.float8_e4m3fn).double() * s for a, s in zip(groups, scales, strict=True)], -1
    )
    assert isinstance(layer.weight, PackedWeight) and layer.bias is not None
    close(layer(x), rounded @ layer.weight.dequantize_float32().double().mT + layer.bias.double(), dtype)
    assert "a scale for 128 columns" in repr(layer) and layer(x[:0]).shape == (0, 3, 200)
    with pytest.raises(InvalidArgument, match="scales of x for 128 columns"):
        QuantizedLinear(pack(weight, "fp8_block"), None, None, torch.ones(()))


def test_norm_residual_and_activation_are_those_of_linear() -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, 40).to(DEVICE)
    layer = QuantizedLinear(pack(weight, "int8"), None, "silu_and_mul")
    x, residual, norm = (one.to(DEVICE) for one in (torch.randn(5, 40), torch.randn(5, 12), torch.rand(40) + 0.5))
    normed = F.rms_norm(x.double(), (40,), norm.double(), 1e-5)
    gate, up = oracle(layer, normed).chunk(2, -1)
    wanted = F.silu(gate) * up + residual.double()
    close(layer(x, residual, norm, 1e-5), wanted, torch.float32)
    assert (layer.in_features, layer.out_features) == (40, 12) and "silu_and_mul" in repr(layer)


def test_nan_is_not_hidden() -> None:
    layer = QuantizedLinear(pack(torch.randn(8, 16), "int8")).to(DEVICE)
    x = torch.randn(3, 16).to(DEVICE)
    x[1, 4] = float("nan")
    out = layer(x)
    assert bool(out[1].isnan().all()) and bool(out[0].isfinite().all() and out[2].isfinite().all())


def test_scale_and_weight_survive_moves_state_and_tracing() -> None:
    layer = QuantizedLinear(pack(torch.randn(8, 32), "int8"), torch.randn(8), None, torch.tensor(0.0123456789))
    x = torch.randn(4, 32)
    before = layer(x)
    other = QuantizedLinear(pack(torch.randn(8, 32), "int8"), torch.randn(8), None, torch.tensor(1.0))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), before)
    half = layer.half()
    assert half.input_scale is not None and half.input_scale.dtype == torch.float32
    assert float(half.input_scale) == float(torch.tensor(0.0123456789))
    assert isinstance(half.weight, PackedWeight) and half.weight.dtype == torch.float16
    torch._dynamo.reset()
    traced = torch.compile(other, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(traced(x), before)


def test_layers_share_a_parameter() -> None:
    weight: Any = nn.Parameter(pack(torch.randn(8, 32), "int8"), requires_grad=False)
    assert QuantizedLinear(weight).weight is QuantizedLinear(weight).weight


def test_what_it_refuses() -> None:
    weight = torch.randn(8, 64)
    with pytest.raises(InvalidArgument, match="not int4"):
        QuantizedLinear(pack(weight, "int4"))
    with pytest.raises(InvalidArgument, match="not Tensor"):
        QuantizedLinear(weight)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="not one for 32 columns"):
        QuantizedLinear(pack(weight, "int8", group=32))
    with pytest.raises(InvalidArgument, match="not 'tanh'"):
        QuantizedLinear(pack(weight, "int8"), None, "tanh")
    with pytest.raises(InvalidArgument, match=r"float32 \[\], got torch.float32 \[1\]"):
        QuantizedLinear(pack(weight, "int8"), None, None, torch.ones(1))


def test_fp8_of_a_cpu_is_the_common_form() -> None:
    assert pack_native(torch.randn(4, 8), "fp8").stored.dtype == torch.float8_e4m3fn
    assert pack_native(torch.randn(4, 64), "int8", 32).group == 32
