"""RMSNorm over the last dimension: y = x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from torch import Tensor

from wavecrest.ops.rows import backend as _row_op


def _operands(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
) -> _row_op.Operands:
    return _row_op.Operands("rms", x, None, weight, None, eps)


_op = _row_op.register("rms_norm", _operands, kind="rms")


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32 and rounded once.

    Args:
        x: [..., N], any strides, float32, float16, bfloat16 or float64.
        weight: [N] of any floating dtype, or None.
        eps: added to the mean square, inside the root.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        InvalidArgument: a shape, dtype, device or eps is outside this.
    """
    result: Tensor = _op(x, weight, eps)
    return result
