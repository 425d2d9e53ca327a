"""LayerNorm of a sum in one pass, as post-norm layers end: y = layer_norm(x + residual)."""

from __future__ import annotations

from torch import Tensor

from wavecrest.dispatch.op import Op
from wavecrest.ops.rows.backend import register
from wavecrest.ops.rows.call import RowCall, Spec

_op: Op[RowCall, Tensor] = register(Spec("post_layer_norm", "layer", residual=True, keeps_sum=False))
_run = _op.of_fields(RowCall)


def post_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """y = layer_norm(h) · weight + bias of h = x + residual rounded to x's dtype; in float32, y rounded once.

    `add_layer_norm` without the sum as a result, which the next layer of a post-norm transformer does not need.

    Args:
        x: [..., N], any strides, float32, float16, bfloat16 or float64.
        residual: the shape, dtype and device of x, strides of its own.
        weight: [N] of any floating dtype, or None.
        bias: [N] of any floating dtype, or None; may be given without a weight.
        eps: added to the (population) variance, inside the root.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        InvalidArgument: a shape, dtype, device or eps is outside this.
    """
    return _run("layer", x, residual, weight, bias, eps, keeps_sum=False)
