"""8-bit values back to floating point: x = q · scale."""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.dispatch.op import Op
from wavecrest.ops.rows.backend import register
from wavecrest.ops.rows.call import RowCall, Spec

_op: Op[RowCall, Tensor] = register(Spec("dequantize", "scaled", quantized=True))
_run = _op.of_fields(RowCall)


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x = q · scale, in float32 and rounded once: the inverse of `quantize_int8` and `quantize_fp8`.

    Args:
        q: [..., N], any strides, int8 or an 8-bit floating-point type.
        scale: float32 [] (whole tensor), [..., 1] (each row) or [..., ceil(N / 128)] (groups of 128 columns).
        dtype: float32, float16, bfloat16 or float64.

    Returns:
        A contiguous tensor of q's shape.

    Raises:
        InvalidArgument: a shape, dtype or device is outside this.
    """
    return _run("scaled", q, dtype=dtype, scale=scale)
