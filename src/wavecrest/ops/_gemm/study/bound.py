"""How far an element of a kernel's result may be from the reference's, for `wavecrest tune`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import wavecrest.ops._gemm.launch as _launch
import wavecrest.ops.common.target as _target
from wavecrest.measure import numerics
from wavecrest.ops._gemm.call import FAST_ACCUM, GATED, GemmCall, kinds
from wavecrest.ops._gemm.reference import values_of_a, values_of_b
from wavecrest.ops.common.activation import activated

# no activation of the op is steeper, nor its float32 form off by more units than this
STEEPEST, ACTIVATION_UNITS = 1.2, 8
# half a unit in the last place of float32, in which the epilogue is computed
STEP = 2.0**-24
# significant bits and smallest normal exponent
_FLOATS = {torch.float32: (24, -126), torch.float16: (11, -14), torch.bfloat16: (8, -126)}


def _exactness(call: GemmCall) -> tuple[float, float, float, float]:
    """`unit`, `sums`, `shrink` and `cut` of `numerics.product_bound` for the kernels."""
    if call.integers and "block" not in kinds(call):
        return 0.0, 0.0, 0.0, 0.0
    unit = numerics.PRODUCT_UNITS[call.precision if call.a.dtype == torch.float32 else "ieee"]
    known = _target.arch()
    if not call.a.is_cuda or known is None or known.vendor != "nvidia":
        return unit, 2.0**-24, 0.0, 0.0
    short = _launch.adds_short(call, known)
    bits = 8 if short else max(16, call.a.itemsize * 8)
    # products whose sum the matrix unit keeps in 14 bits; such sums are added in float32, and their errors at random
    alone = min(call.K, _launch.UNIT_SUMS) if short and call.precision != FAST_ACCUM else call.K
    sums = 2.0**-13 * math.sqrt(alone / max(1, call.K)) if short else 0.0
    return unit, sums + 2.0**-24, *numerics.matrix_unit_shrink(alone, bits, call.precision)


def _normalised(call: GemmCall, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Part of the bound that comes from the norm of a's rows; y: the GEMM of the normalised a, before alpha.

    Errors of single elements of a: three roundings of float32 in the kernel and in the reference, and in kernels over
    tiles and in PyTorch one to a's dtype, half a unit of it at most. The factor of a row is the root of a sum of K
    squares: √K roundings, four times that as a limit, of which the root leaves half, and 8 roundings for the mean and
    the root. This error is that of the whole row, in the kernel and in the reference.
    """
    unit = 6 * STEP
    rounded = _FLOATS[call.a.dtype]
    if call.a.itemsize == 2:
        unit += 2.0 ** -rounded[0]
    off: Tensor = 4 * unit * (a.square() @ b.square()).sqrt()
    # below the smallest normal number half a unit is the same for all
    if call.a.itemsize == 2:
        off = off + 4 * 2.0 ** (rounded[1] - rounded[0]) * b.norm(dim=-2)
    return off + 2 * (2 * math.sqrt(call.K) + 8) * STEP * y.abs()


def _half_unit(size: Tensor, dtype: torch.dtype) -> Tensor:
    """Half a unit in the last place of a type at values ≥ 0."""
    bits, smallest = _FLOATS[dtype]
    exponent = torch.frexp(size).exponent.clamp(min=smallest + 1)
    return torch.ldexp(torch.ones_like(size), exponent - bits - 1)


def bound(call: GemmCall) -> Tensor | None:
    """Most that an element may differ from the reference's: rounding errors of both, taken for independent.

    None for results of 8 bits and for sums of integers, which their tolerance judges value by value.
    """
    if call.dtype not in _FLOATS or torch.float64 in (call.a.dtype, call.b.dtype):
        return None
    a, b = values_of_a(call).double(), values_of_b(call).double()
    unit, sums, shrink, cut = _exactness(call)
    # the reference sums in float32 too, integers times their scales in float64: where they cancel, not to 0
    own = 2.0**-52 if call.integers else 2.0**-24
    off = numerics.product_bound(a, b, unit=unit + own, sums=sums + own, shrink=shrink, cut=cut) * abs(call.alpha)
    y = torch.matmul(a, b) * call.alpha
    if call.norm_weight is not None:
        off = off + _normalised(call, a, b, y / call.alpha if call.alpha else y) * abs(call.alpha)
    del a, b
    size = y.abs()
    if call.bias is not None:
        bias = call.bias.double()
        bias = bias if call.bias_along == "n" else bias.reshape(*(y.shape[:-1] if call.flat else (-1,)), 1)
        y = y + bias
        size = size + bias.abs() + y.abs()
    off = off + 8 * STEP * size
    if call.activation in GATED:
        (gate, up), (gate_off, up_off) = y.chunk(2, dim=-1), off.chunk(2, dim=-1)
        gate = activated(gate, GATED[call.activation])
        gate_off = STEEPEST * gate_off + 2 * ACTIVATION_UNITS * STEP * (1 + gate.abs())
        y, off = gate * up, gate_off * (up.abs() + up_off) + gate.abs() * up_off
        off = off + 4 * STEP * y.abs()
    elif call.activation is not None:
        y = activated(y, call.activation, call.slope)
        off = max(STEEPEST, abs(call.slope)) * off + 2 * ACTIVATION_UNITS * STEP * (1 + y.abs())
    if call.residual is not None:
        y = y + call.residual.double()
        off = off + 4 * STEP * y.abs()
    # both round to the result's type once
    off = off + 2 * _half_unit((y.abs() + off).nan_to_num(0.0, 0.0), call.dtype)
    return off.reshape(call.shape)
