"""SwiGLU's activation: y = silu(gate) · up with silu(g) = g / (1 + exp(−g)) (Shazeer, 2020)."""

from __future__ import annotations

from torch import Tensor

from wavecrest.ops.gated.backend import silu_op as _op
from wavecrest.ops.gated.call import GatedCall

_run = _op.of_fields(GatedCall)


def silu_and_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """y = silu(gate) · up, in float32 and rounded once.

    Args:
        gate: [..., N], any strides, float32, float16, bfloat16 or float64; with `up` None, [..., 2N] holding gate
            in its first and up in its second half.
        up: the shape, dtype and device of gate, strides of its own.

    Returns:
        A contiguous tensor [..., N] of gate's dtype.

    Raises:
        InvalidArgument: a shape, dtype or device is outside this.
    """
    return _run("silu", gate, up)
