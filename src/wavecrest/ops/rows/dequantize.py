"""8-bit values back to floating point: x = q · scale."""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.ops.common import quantized as _quantized
from wavecrest.ops.common.quantized import Quantization
from wavecrest.ops.rows import backend as _row_op


def _operands(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> _row_op.Operands:
    how = Quantization(dtype, _quantized.granularity_of(q, scale), scale)
    return _row_op.Operands("scaled", q, how=how)


_op = _row_op.register("dequantize", _operands, kind="scaled", quantized=True)


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
    result: Tensor = _op(q, scale, dtype)
    return result
