"""Residual addition and RMSNorm in one pass: h = x + residual; y = rms_norm(h) · weight; returns (y, h)."""

from __future__ import annotations

from torch import Tensor

from wavecrest.dispatch.op import Op
from wavecrest.ops.rows.backend import register
from wavecrest.ops.rows.call import RowCall, Spec

_op: Op[RowCall, tuple[Tensor, Tensor]] = register(Spec("add_rms_norm", "rms", residual=True))
_run = _op.of_fields(RowCall)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """h = x + residual rounded to x's dtype; y = h / sqrt(mean(h²) + eps) · weight in float32, rounded once.

    The norm is that of the rounded sum, as in transformers, where the sum is a tensor of its own.

    Args:
        x: [..., N], any strides, float32, float16, bfloat16 or float64.
        residual: the shape, dtype and device of x, strides of its own.
        weight: [N] of any floating dtype, or None.
        eps: added to the mean square, inside the root.

    Returns:
        (y, h): contiguous tensors of x's shape and dtype; h is the residual of the next layer.

    Raises:
        InvalidArgument: a shape, dtype, device or eps is outside this.
    """
    return _run("rms", x, residual, weight, None, eps)
