"""LayerNorm over the last dimension: y = (x − mean) / sqrt(var + eps) · weight + bias (Ba et al., 2016)."""

from __future__ import annotations

from torch import Tensor

from wavecrest.ops.rows import backend as _row_op


def _operands(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> _row_op.Operands:
    return _row_op.Operands("layer", x, None, weight, bias, eps)


_op = _row_op.register("layer_norm", _operands, kind="layer")


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """y = (x − mean(x)) / sqrt(var(x) + eps) · weight + bias over the last dimension, in float32 and rounded once.

    Args:
        x: [..., N], any strides, float32, float16, bfloat16 or float64.
        weight: [N] of any floating dtype, or None.
        bias: [N] of any floating dtype, or None; may be given without a weight.
        eps: added to the (population) variance, inside the root.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        InvalidArgument: a shape, dtype, device or eps is outside this.
    """
    result: Tensor = _op(x, weight, bias, eps)
    return result
