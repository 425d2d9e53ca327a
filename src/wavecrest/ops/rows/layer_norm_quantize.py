"""LayerNorm rounded to 8 bits in the same pass: (q, scale) with q · scale ≈ layer_norm(x, …)."""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.dispatch.op import Op
from wavecrest.ops.rows.backend import register
from wavecrest.ops.rows.call import RowCall, Spec

_op: Op[RowCall, tuple[Tensor, Tensor]] = register(Spec("layer_norm_quantize", "layer", quantized=True))
_run = _op.of_fields(RowCall)


def layer_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    dtype: torch.dtype = torch.int8,
    granularity: str = "token",
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """layer_norm(x, weight, bias, eps) as 8-bit values and their scale.

    Rounded once: the norm's result stays in float32 until it is scaled (see `wavecrest.ops.quantize_int8`).

    Args:
        x: [..., N], any strides, float32, float16, bfloat16 or float64.
        weight: [N] of any floating dtype, or None.
        bias: [N] of any floating dtype, or None; may be given without a weight.
        eps: added to the (population) variance, inside the root.
        dtype: int8, float8_e4m3fn, float8_e5m2, or their fnuz forms (gfx942).
        granularity: of the scale: "token" (one a row), "group" (one for 128 columns) or "tensor" (given).
        scale: float32 [] for the whole tensor, or None: worked out from the values.

    Returns:
        (q, scale): q contiguous, of x's shape; scale float32 [], [..., 1] or [..., ceil(N / 128)]; y ≈ q · scale.

    Raises:
        InvalidArgument: a shape, dtype, device, granularity or eps is outside this.
    """
    return _run("layer", x, None, weight, bias, eps, dtype, granularity, scale)
