"""The definition of the product, dull: everything widened, one matrix product, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

import wavecrest.ops.common.quantized as _quantized
from wavecrest.ops._gemm.call import GATED, INT4_UNIT, SCALE_BLOCK, Operands, kinds
from wavecrest.ops.common.activation import activated


def codes(b: Tensor) -> Tensor:
    """The 4-bit codes [Kp, N] of stored bytes [Kp / 2, N]: 32 low halves, then 32 high halves, of every 32 bytes."""
    half = INT4_UNIT // 2
    units = b.reshape(b.shape[0] // half, half, b.shape[1])
    return torch.cat((units & 15, units >> 4), dim=1).reshape(2 * b.shape[0], b.shape[1])


def unshuffled(b: Tensor) -> Tensor:
    """b [K, N] from the transposed (16, 16) shuffle of [N, K] (see `wavecrest.ops.packed`)."""
    stored = b.mT
    (n, k), vector = stored.shape, 16 // stored.element_size()
    blocks = stored.reshape(n // 16, k // 32, 32 // vector, 16, vector)
    return blocks.permute(0, 3, 1, 2, 4).reshape(n, k).mT


def _wide(x: Tensor, given: Operands) -> Tensor:
    """Integers as float64, which holds every sum of their products; the rest as float32 or float64."""
    return x.double() if given.integers or x.dtype == torch.float64 else x.float()


def values_of_b(given: Operands) -> Tensor:
    """b as it is meant, scaled, and the tail behind it, [..., K, N]."""
    if given.tail is not None:
        alone = values_of_b(given._replace(tail=None))
        return torch.cat((alone, given.tail.to(alone.dtype)), dim=-1)
    b, K = given.b, given.K
    if given.form == "int4":
        zero = 8.0 if given.zero is None else given.zero.float().repeat_interleave(given.group, 0)[:K]
        wide = codes(b)[:K].float() - zero
    else:
        wide = _wide(unshuffled(b) if given.form == "shuffled" else b, given)
    kind = kinds(given)[1]
    if given.scale_b is None:
        return wide
    scale = given.scale_b.to(wide.dtype)
    if kind == "group":
        scale = scale.repeat_interleave(given.group, 0)[:K]
    elif kind == "block":
        scale = scale.repeat_interleave(SCALE_BLOCK, 0)[:K].repeat_interleave(SCALE_BLOCK, 1)[:, : given.columns]
    elif kind == "tensor":
        scale = scale.reshape(())
    else:
        scale = scale.reshape(1, -1)
    return wide * scale


def values_of_a(given: Operands) -> Tensor:
    """a scaled or normalised, [..., K]."""
    wide = _wide(given.a, given)
    if given.norm_weight is not None:
        mean = wide.square().mean(-1, keepdim=True)
        return wide * torch.rsqrt(mean + given.norm_eps) * given.norm_weight.to(wide.dtype)
    if given.scale_a is None:
        return wide
    scale, kind = given.scale_a.to(wide.dtype), kinds(given)[0]
    if kind == "tensor":
        return wide * scale.reshape(())
    if kind == "block":
        scale = scale.repeat_interleave(SCALE_BLOCK, 1)[:, : given.K]
    else:
        scale = scale.reshape(given.M, 1)
    return (wide.reshape(given.M, given.K) * scale).reshape(wide.shape)


def reference(given: Operands) -> Tensor:
    """The result in `given.dtype`; sums in float32 (float64 for float64 and for integers)."""
    wide = torch.float64 if torch.float64 in (given.a.dtype, given.b.dtype) or given.integers else torch.float32
    a, b = values_of_a(given).to(wide), values_of_b(given).to(wide)
    y = torch.matmul(a, b)
    if given.dtype == torch.int32:
        return y.to(torch.int32)
    if given.alpha != 1.0:
        y = y * given.alpha
    if given.bias is not None:
        bias = given.bias.to(wide)
        y = y + (bias if given.bias_along == "n" else bias.reshape(*y.shape[:-1] if given.flat else (-1,), 1))
    if given.activation in GATED:
        gate, up = y.chunk(2, dim=-1)
        y = activated(gate, GATED[given.activation]) * up
    else:
        y = activated(y, given.activation, given.slope)
    if given.residual is not None:
        y = y + given.residual.to(wide)
    if given.out_scale is not None:
        how = _quantized.Quantization(given.dtype, "tensor", given.out_scale.reshape(()))
        return _quantized.reference(y, how)[0]
    return y.to(given.dtype)


def unpacked(given: Operands) -> Operands:
    """The same product with a weight that is stored in fewer bits, or shuffled, as a plain one of a's dtype."""
    if given.form == "plain" and not given.weight_only:
        return given
    weight = values_of_b(given).to(given.a.dtype).mT.contiguous()
    return given._replace(b=weight.mT, scale_b=None, zero=None, form="plain", group=0, tail=None)
