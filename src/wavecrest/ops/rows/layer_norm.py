"""LayerNorm over the last dimension: y = (x − mean) / sqrt(var + eps) · weight + bias (Ba et al., 2016)."""

from __future__ import annotations

from torch import Tensor

from wavecrest.dispatch.op import Op
from wavecrest.ops.rows.backend import register
from wavecrest.ops.rows.call import RowCall, Spec

_op: Op[RowCall, Tensor] = register(Spec("layer_norm", "layer"))
_run = _op.of_fields(RowCall)


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
    return _run("layer", x, None, weight, bias, eps)
