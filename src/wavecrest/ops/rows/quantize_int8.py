"""Rounding to int8 with a scale: q = round(x / scale), saturating, x ≈ q · scale."""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.dispatch.op import Op
from wavecrest.ops.rows.backend import register
from wavecrest.ops.rows.call import RowCall, Spec

_op: Op[RowCall, tuple[Tensor, Tensor]] = register(
    Spec("quantize_int8", "identity", quantized=True, dtypes=(torch.int8,))
)
_run = _op.of_fields(RowCall)


def quantize_int8(x: Tensor, scale: Tensor | None = None, granularity: str = "token") -> tuple[Tensor, Tensor]:
    """q = round(x / scale) to the nearest, ties to even, within ±127; and the scale.

    Without a scale it is max |x| / 127 (at least 2^-126; 1 where all x are 0), in float32. A NaN gives 0, with a scale
    worked out that is NaN itself; an infinity likewise, so that neither comes back as an ordinary number.

    Args:
        x: [..., N], any strides, float32, float16, bfloat16 or float64.
        scale: float32, of the granularity's shape, or None: worked out from x.
        granularity: "tensor" (scale []), "token" ([..., 1]) or "group" of 128 columns ([..., ceil(N / 128)]).

    Returns:
        (q, scale): q int8, contiguous, of x's shape.

    Raises:
        InvalidArgument: a shape, dtype, device or granularity is outside this.
    """
    return _run("identity", x, dtype=torch.int8, granularity=granularity, scale=scale)
