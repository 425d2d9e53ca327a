"""The definition of gemm, dull: everything widened, one matrix product, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

import wavecrest.ops.common.quantized as _quantized
from wavecrest.ops._gemm.call import GATED, INT4_UNIT, SCALE_BLOCK, GemmCall, kinds
from wavecrest.ops.common.activation import activated
from wavecrest.ops.packed.formats import e2m1_values, e8m0_values


def nibbles(b: Tensor) -> Tensor:
    """The 4-bit values [Kp, N] of stored bytes [Kp / 2, N]: 32 low halves, then 32 high halves, of every 32 bytes."""
    half = INT4_UNIT // 2
    units = b.reshape(b.shape[0] // half, half, b.shape[1])
    return torch.cat((units & 15, units >> 4), dim=1).reshape(2 * b.shape[0], b.shape[1])


def unshuffled(b: Tensor) -> Tensor:
    """b [K, N] from the transposed (16, 16) shuffle of [N, K] (see `wavecrest.ops.packed`)."""
    stored = b.mT
    (n, k), vector = stored.shape, 16 // stored.element_size()
    blocks = stored.reshape(n // 16, k // 32, 32 // vector, 16, vector)
    return blocks.permute(0, 3, 1, 2, 4).reshape(n, k).mT


def _wide(x: Tensor, call: GemmCall) -> Tensor:
    """Integers as float64, in which every sum of their products is exact; the rest as float32 or float64."""
    return x.double() if call.integers or x.dtype == torch.float64 else x.float()


def values_of_b(call: GemmCall) -> Tensor:
    """b [..., K, N] in its plain form, times its scales, with the tail after it."""
    if call.tail is not None:
        alone = values_of_b(call._replace(tail=None))
        return torch.cat((alone, call.tail.to(alone.dtype)), dim=-1)
    b, K = call.b, call.K
    if call.form == "mxfp4":
        wide = e2m1_values(nibbles(b)[:K])
    elif call.form == "int4":
        zero = 8.0 if call.zero is None else call.zero.float().repeat_interleave(call.group, 0)[:K]
        wide = nibbles(b)[:K].float() - zero
    else:
        wide = _wide(unshuffled(b) if call.form == "shuffled" else b, call)
    kind = kinds(call)[1]
    if call.scale_b is None:
        return wide
    scale = (e8m0_values(call.scale_b) if call.form == "mxfp4" else call.scale_b).to(wide.dtype)
    if kind == "group":
        scale = scale.repeat_interleave(call.group, 0)[:K]
    elif kind == "block":
        scale = scale.repeat_interleave(SCALE_BLOCK, 0)[:K].repeat_interleave(SCALE_BLOCK, 1)[:, : call.columns]
    elif kind == "tensor":
        scale = scale.reshape(())
    else:
        scale = scale.reshape(1, -1)
    return wide * scale


def values_of_a(call: GemmCall) -> Tensor:
    """a scaled or normalised, [..., K]."""
    wide = _wide(call.a, call)
    if call.norm_weight is not None:
        mean = wide.square().mean(-1, keepdim=True)
        return wide * torch.rsqrt(mean + call.norm_eps) * call.norm_weight.to(wide.dtype)
    if call.scale_a is None:
        return wide
    scale, kind = call.scale_a.to(wide.dtype), kinds(call)[0]
    if kind == "tensor":
        return wide * scale.reshape(())
    if kind == "block":
        scale = scale.repeat_interleave(SCALE_BLOCK, 1)[:, : call.K]
    else:
        scale = scale.reshape(call.M, 1)
    return (wide.reshape(call.M, call.K) * scale).reshape(wide.shape)


def reference(call: GemmCall) -> Tensor:
    """The result in `call.dtype`; sums in float32 (float64 for float64 and for integers)."""
    wide = torch.float64 if torch.float64 in (call.a.dtype, call.b.dtype) or call.integers else torch.float32
    a, b = values_of_a(call).to(wide), values_of_b(call).to(wide)
    y = torch.matmul(a, b)
    if call.dtype == torch.int32:
        return y.to(torch.int32)
    if call.alpha != 1.0:
        y = y * call.alpha
    if call.bias is not None:
        bias = call.bias.to(wide)
        y = y + (bias if call.bias_along == "n" else bias.reshape(*y.shape[:-1] if call.flat else (-1,), 1))
    if call.activation in GATED:
        gate, up = y.chunk(2, dim=-1)
        y = activated(gate, GATED[call.activation]) * up
    else:
        y = activated(y, call.activation, call.slope)
    if call.residual is not None:
        y = y + call.residual.to(wide)
    if call.out_scale is not None:
        how = _quantized.Quantization(call.dtype, "tensor", call.out_scale.reshape(()))
        return _quantized.reference(y, how)[0]
    return y.to(call.dtype)
