"""GeGLU's activation: y = gelu(gate) · up, gelu exact (erf) or by tanh (Hendrycks and Gimpel, 2016; Shazeer, 2020)."""

from __future__ import annotations

from torch import Tensor

from wavecrest.ops.gated.backend import gelu_op as _op
from wavecrest.ops.gated.call import GatedCall

_run = _op.of_fields(GatedCall)


def gelu_and_mul(gate: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    """y = gelu(gate) · up, in float32 and rounded once.

    Args:
        gate: [..., N], any strides, float32, float16, bfloat16 or float64; with `up` None, [..., 2N] holding gate
            in its first and up in its second half.
        up: the shape, dtype and device of gate, strides of its own.
        approximate: "none" (erf) or "tanh".

    Returns:
        A contiguous tensor [..., N] of gate's dtype.

    Raises:
        InvalidArgument: a shape, dtype or device, or approximate, is outside this.
    """
    return _run("gelu", gate, up, approximate)
