"""Residual addition, RMSNorm and rounding to 8 bits in one pass: (q, scale, h)."""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.dispatch.op import Op
from wavecrest.ops.rows.backend import register
from wavecrest.ops.rows.call import RowCall, Spec

_op: Op[RowCall, tuple[Tensor, Tensor, Tensor]] = register(
    Spec("add_rms_norm_quantize", "rms", residual=True, quantized=True)
)
_run = _op.of_fields(RowCall)


def add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    dtype: torch.dtype = torch.int8,
    granularity: str = "token",
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """h = x + residual; rms_norm(h, weight, eps) as 8-bit values and their scale.

    Rounded once: the norm's result stays in float32 until it is scaled (see `wavecrest.ops.quantize_int8`).

    Args:
        x: [..., N], any strides, float32, float16, bfloat16 or float64.
        residual: the shape, dtype and device of x, strides of its own.
        weight: [N] of any floating dtype, or None.
        eps: added to the mean square, inside the root.
        dtype: int8, float8_e4m3fn, float8_e5m2, or their fnuz forms (gfx942).
        granularity: of the scale: "token" (one a row), "group" (one for 128 columns) or "tensor" (given).
        scale: float32 [] for the whole tensor, or None: worked out from the values.

    Returns:
        (q, scale, h): q contiguous, of x's shape; scale float32 [], [..., 1] or [..., ceil(N / 128)]; y ≈ q · scale.
        h is the residual of the next layer, of x's dtype.

    Raises:
        InvalidArgument: a shape, dtype, device, granularity or eps is outside this.
    """
    return _run("rms", x, residual, weight, None, eps, dtype, granularity, scale)
