"""Caches in 8 bits, with a scale a row, and in 4: two quantized values a byte, scales and shifts of groups."""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.errors import InvalidArgument
from wavecrest.ops.common import quantized as _quantized

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# groups of a row that may have a scale and a shift each
GROUPS = (1, 2, 4, 8)
# dtypes of the scales and shifts of tokens
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST = 15


def quantize_cache(x: Tensor, groups: int = 1, *, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    """Keys or values in 4 bits, as `flash_decoding` reads them: quantized · scale + shift.

    The scale is (largest − smallest) / 15 of a group, the shift its smallest value, both rounded to `dtype`; values
    are then rounded to nearest with the rounded two. So a value is off by at most half a scale plus what rounding the
    two takes from the ends: |shift| and 15 scales times half a unit of `dtype`. A group of one value, or with a scale
    that `dtype` rounds to 0, has a scale of 0 and comes back as its shift. NaN or infinity in a group makes its scale
    or shift NaN or infinite, and the whole group NaN.

    Byte j of a group holds its element j in the low 4 bits and its element D / (2 · groups) + j in the high ones, so
    that a kernel takes two halves of a group without moving them between lanes.

    Args:
        x: [..., D], float32, float16, bfloat16 or float64; D a multiple of 2 · groups.
        groups: groups of neighbouring elements that have a scale and a shift each: 1, 2, 4 or 8.
        dtype: of scales and shifts: float16, bfloat16 or float32.

    Returns:
        Quantized values, uint8 [..., D / 2]; scales and shifts in `dtype`, [..., groups]; all contiguous.

    Raises:
        InvalidArgument: a shape or dtype is outside this.
    """
    if not isinstance(x, Tensor) or x.dtype not in FLOATS or x.ndim == 0:
        raise InvalidArgument(f"quantize_cache: x must be a floating-point tensor [..., D], got {x!r}")
    if groups not in GROUPS or x.shape[-1] == 0 or x.shape[-1] % (2 * groups) != 0:
        raise InvalidArgument(
            f"quantize_cache: D must be a multiple of 2 · groups, and groups one of {list(GROUPS)}; "
            f"got x {list(x.shape)} and groups {groups!r}"
        )
    if dtype not in SCALE_DTYPES:
        raise InvalidArgument(f"quantize_cache: dtype must be one of {list(SCALE_DTYPES)}, got {dtype!r}")
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    wide = wide.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    least, most = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    scale, shift = ((most - least) / LARGEST).to(dtype), least.to(dtype)
    steps = (wide - shift.to(wide.dtype)) / scale.to(wide.dtype).where(scale != 0, 1.0)
    values = steps.nan_to_num(0.0).round().clamp(0, LARGEST).to(torch.uint8)
    low, high = values.chunk(2, dim=-1)
    return (low | high << 4).flatten(-2).contiguous(), scale.squeeze(-1), shift.squeeze(-1)


def quantize_cache_8bit(x: Tensor, to: torch.dtype, *, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    """Keys or values in 8 bits with a scale for each row, as `flash_decoding` reads and writes them: quantized · scale.

    The scale is a row's largest magnitude / the type's largest value, rounded to `dtype`; values are divided by the
    rounded one, rounded to nearest even, within ± the type's largest value; NaN is 0 in int8. A row with a scale that
    `dtype` rounds to 0 comes back as 0.

    Args:
        x: [..., D], float32, float16, bfloat16 or float64.
        to: int8 or an 8-bit float.
        dtype: of the scales: float16, bfloat16 or float32.

    Returns:
        Quantized values [..., D] and scales [..., 1].

    Raises:
        InvalidArgument: a shape or dtype is outside this.
    """
    if not isinstance(x, Tensor) or x.dtype not in FLOATS or x.ndim == 0 or x.shape[-1] == 0:
        raise InvalidArgument(f"quantize_cache_8bit: x must be a floating-point tensor [..., D], got {x!r}")
    if to not in _quantized.LARGEST or dtype not in SCALE_DTYPES:
        raise InvalidArgument(
            f"quantize_cache_8bit: rounds to one of {list(_quantized.LARGEST)} with scales of {list(SCALE_DTYPES)}, "
            f"got {to!r} and {dtype!r}"
        )
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    scale = (wide.abs().amax(-1, keepdim=True) / _quantized.LARGEST[to]).to(dtype)
    return round_to(wide / scale.to(wide.dtype).where(scale != 0, 1.0), to), scale


def round_to(scaled: Tensor, to: torch.dtype) -> Tensor:
    """Values rounded to nearest even within an 8-bit type; NaN stays one, and is 0 in int8."""
    scaled = scaled.clamp(-_quantized.LARGEST[to], _quantized.LARGEST[to])
    if to == torch.int8:
        scaled = scaled.round().nan_to_num(0.0)
    return scaled.float().to(to)


def dequantize(quantized: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
    """quantized · scale + shift in `dtype`, [..., D], of bytes [..., D / 2], scales and shifts [..., groups]."""
    groups = scale.shape[-1]
    grouped = quantized.reshape(*quantized.shape[:-1], groups, quantized.shape[-1] // groups)
    values = torch.cat((grouped & 15, grouped >> 4), dim=-1).to(dtype)
    return (values * scale[..., None].to(dtype) + shift[..., None].to(dtype)).flatten(-2)
