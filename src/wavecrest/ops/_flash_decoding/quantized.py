"""Caches of 4 bits: two codes a byte, scales and shifts of groups of columns."""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.errors import InvalidArgument
from wavecrest.ops._flash_decoding.call import FLOATS, GROUPS, SCALE_DTYPES

LARGEST = 15


def quantize_cache(x: Tensor, groups: int = 1, *, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    """Keys or values in 4 bits, as `flash_decoding` reads them: code · scale + shift.

    The scale is (largest − smallest) / 15 of a group, the shift its smallest value, both rounded to `dtype`; codes are
    rounded to nearest against what they were rounded to. So a value is off by at most half a scale and what rounding
    the two takes from the ends: |shift| and 15 scales times half a unit of `dtype`. A group of one value, or whose
    scale is less than `dtype` has, has a scale of 0 and comes back as its shift. NaN or infinity in a group makes its
    scale or shift NaN or infinite, and all of it NaN.

    Byte j of a group holds the code of its column j in the low 4 bits and that of its column D / (2 · groups) + j in
    the high ones, so that a kernel takes two halves of a group without moving them between lanes.

    Args:
        x: [..., D], float32, float16, bfloat16 or float64; D a multiple of 2 · groups.
        groups: how many groups of columns next to each other have their own scale and shift: 1, 2, 4 or 8.
        dtype: of scales and shifts: float16, bfloat16 or float32.

    Returns:
        Codes, uint8 [..., D / 2]; scales and shifts in `dtype`, [..., groups]; all contiguous.

    Raises:
        InvalidArgument: a shape or dtype is outside this.
    """
    if not isinstance(x, Tensor) or x.dtype not in FLOATS or x.ndim == 0:
        raise InvalidArgument(f"quantize_cache: x must be a floating-point tensor [..., D], got {x!r}")
    if groups not in GROUPS or x.shape[-1] == 0 or x.shape[-1] % (2 * groups) != 0:
        raise InvalidArgument(
            f"quantize_cache: columns must be a multiple of 2 · groups, and groups one of {list(GROUPS)}; "
            f"got x {list(x.shape)} and groups {groups!r}"
        )
    if dtype not in SCALE_DTYPES:
        raise InvalidArgument(f"quantize_cache: dtype must be one of {list(SCALE_DTYPES)}, got {dtype!r}")
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    wide = wide.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    least, most = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    scale, shift = ((most - least) / LARGEST).to(dtype), least.to(dtype)
    steps = (wide - shift.to(wide.dtype)) / scale.to(wide.dtype).where(scale != 0, 1.0)
    codes = steps.nan_to_num(0.0).round().clamp(0, LARGEST).to(torch.uint8)
    low, high = codes.chunk(2, dim=-1)
    return (low | high << 4).flatten(-2).contiguous(), scale.squeeze(-1), shift.squeeze(-1)


def dequantize(codes: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
    """code · scale + shift in `dtype`, [..., D], of codes [..., D / 2], scales and shifts [..., groups]."""
    groups = scale.shape[-1]
    grouped = codes.reshape(*codes.shape[:-1], groups, codes.shape[-1] // groups)
    values = torch.cat((grouped & 15, grouped >> 4), dim=-1).to(dtype)
    return (values * scale[..., None].to(dtype) + shift[..., None].to(dtype)).flatten(-2)
