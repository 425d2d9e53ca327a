"""RMSNorm over the last dimension: y = x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from torch import Tensor

from wavecrest.dispatch.op import Op
from wavecrest.ops.rows.backend import register
from wavecrest.ops.rows.call import RowCall, Spec

_op: Op[RowCall, Tensor] = register(Spec("rms_norm", "rms"))
_run = _op.of_fields(RowCall)


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
    return _run("rms", x, None, weight, None, eps)
