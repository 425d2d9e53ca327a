"""Rounding to 8-bit floating point with a scale: q = x / scale, saturating, x ≈ q · scale."""

from __future__ import annotations

import torch
from torch import Tensor

import wavecrest.ops.common.target as _target
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tracing import constant_in_graphs
from wavecrest.ops.common.quantized import float8_of
from wavecrest.ops.rows.backend import register
from wavecrest.ops.rows.call import RowCall, Spec

FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


_op: Op[RowCall, tuple[Tensor, Tensor]] = register(Spec("quantize_fp8", "identity", quantized=True, dtypes=FLOATS))
_run = _op.of_fields(RowCall)


# a constant where Dynamo traces a call
@constant_in_graphs
def _native() -> torch.dtype:
    return float8_of(_target.arch())


def quantize_fp8(
    x: Tensor, scale: Tensor | None = None, granularity: str = "token", dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """q = x / scale rounded to 8-bit floating point, within ± its largest value; and the scale.

    Without a scale it is max |x| / largest (at least 2^-126; 1 where all x are 0), in float32; the largest value is
    448 (e4m3fn), 240 (e4m3fnuz) or 57,344 (e5m2, e5m2fnuz). A NaN stays one; an infinity saturates with a scale that
    is given, and makes one that is worked out infinite.

    Args:
        x: [..., N], any strides, float32, float16, bfloat16 or float64.
        scale: float32, of the granularity's shape, or None: worked out from x.
        granularity: "tensor" (scale []), "token" ([..., 1]) or "group" of 128 columns ([..., ceil(N / 128)]).
        dtype: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz or float8_e5m2fnuz; None: the e4m3 form that the current
            GPU multiplies with (e4m3fnuz on gfx942, e4m3fn elsewhere).

    Returns:
        (q, scale): q contiguous, of x's shape.

    Raises:
        InvalidArgument: a shape, dtype, device or granularity is outside this.
    """
    return _run("identity", x, dtype=_native() if dtype is None else dtype, granularity=granularity, scale=scale)
