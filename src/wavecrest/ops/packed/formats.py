"""Formats of packed weights: their layouts, the rounding to 8 and 4 bits, and the checks of the parts.

mxfp4 is MXFP4 of the OCP Microscaling Formats (MX) specification, version 1.0: e2m1 elements, and for 32 of them an
e8m0 scale, 2^(byte − 127), 255 for NaN. The order of the elements in memory is wavecrest's, as of int4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import InvalidArgument
from wavecrest.ops.common.quantized import LARGEST

FORMATS = ("plain", "shuffled", "int8", "int4", "mxfp4", "fp8", "fp8_block")
# dtypes of the weights that a packed one may stand for
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
# dtypes that each format stores; the first is the default of the quantized ones
STORED: dict[str, tuple[torch.dtype, ...]] = {
    "plain": DTYPES,
    "shuffled": (torch.bfloat16, torch.float16, torch.int8, *FP8),
    "int8": (torch.int8,),
    "int4": (torch.uint8,),
    "mxfp4": (torch.uint8,),
    "fp8": FP8,
    "fp8_block": FP8,
}
# formats that store two values in a byte
NIBBLES = ("int4", "mxfp4")
# columns of K that may share a scale, beside all of them
GROUPS = (32, 64, 128)
# rows and columns of a scale of fp8_block
BLOCK = 128
# columns of a unit of int4 and mxfp4: two halves in the low and the high nibbles of the same bytes
INT4_UNIT = 64
# quantized values are 0 to 15; without a zero point they are around 8, and ± 7 from it
INT4_MOST, INT4_ZERO, INT4_LARGEST = 15, 8, 7
# of mxfp4: what 0 to 7 stand for, negative with 8 added; elements that share a scale; the exponent of the largest
# value, 6; what is added to a scale's exponent
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MX_GROUP, E2M1_EXPONENT, E8M0_BIAS = 32, 2, 127
FLOAT32_MANTISSA = 23
# rows and columns of a tile of the shuffled layout, and the bytes of a run along K within it
TILE_ROWS, TILE_COLUMNS, RUN_BYTES = 16, 32, 16
# rows that a scale or a tile joins, where it is not one: a weight is cut and joined at multiples of them
ROWS_TOGETHER = {"fp8_block": BLOCK, "shuffled": TILE_ROWS}


def named(value: Any) -> str:
    """A tensor as dtype and shape, anything else as its type; for messages."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def names(dtypes: Sequence[torch.dtype]) -> str:
    """Dtypes without "torch.", for messages."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def ceil(total: int, size: int) -> int:
    """The number of pieces of a size that hold a total."""
    return -(-total // size)


def shape_of(format: str, stored: Tensor, shape: Sequence[int] | None) -> tuple[int, int]:
    """(N, K): given, or read from the stored values."""
    rows, columns = int(stored.shape[0]), int(stored.shape[1])
    if shape is None:
        shape = (rows, columns * 2 if format in NIBBLES else columns)
    if len(shape) != 2:
        raise InvalidArgument(f"packed weight: shape is (N, K), not {list(shape)}")
    n, k = int(shape[0]), int(shape[1])
    wanted = ceil(k, INT4_UNIT) * INT4_UNIT // 2 if format in NIBBLES else k
    if rows != n or columns != wanted:
        raise InvalidArgument(f"packed weight: {format} of {[n, k]} stores {[n, wanted]}, got {[rows, columns]}")
    return n, k


def dtype_of(format: str, stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype a weight stands for: given, or that of values that are not quantized."""
    if stored in DTYPES:
        if dtype not in (None, stored):
            raise InvalidArgument(f"packed weight: {format} values of {stored} stand for that dtype, not {dtype}")
        return stored
    if dtype not in DTYPES:
        raise InvalidArgument(f"packed weight: dtype is what {format} stands for: {names(DTYPES)}, not {dtype}")
    return dtype


def group_of(format: str, stored: torch.dtype, k: int, group: int | None) -> int:
    """Columns that share a scale: given and possible, or the format's own."""
    if format == "fp8_block":
        allowed: tuple[int, ...] = (BLOCK,)
    elif format == "mxfp4":
        allowed = (MX_GROUP,)
    elif format == "int4":
        allowed = GROUPS
    elif stored == torch.int8:
        allowed = (k, *GROUPS)
    else:
        allowed = (k,)
    if group is None and format != "int4":
        return allowed[0]
    if group not in allowed:
        takes = ", ".join(str(one) for one in allowed)
        raise InvalidArgument(f"packed weight: group of {format} ({names([stored])}, K = {k}) is {takes}, not {group}")
    assert group is not None
    return int(group)


def check_divisible(format: str, n: int, k: int) -> None:
    """Raise InvalidArgument unless a weight is made of whole tiles, where its format has tiles."""
    if format == "shuffled" and (n % TILE_ROWS or k % TILE_COLUMNS):
        raise InvalidArgument(
            f"packed weight: shuffled takes N in multiples of {TILE_ROWS} and K in multiples of {TILE_COLUMNS}, not "
            f"{[n, k]}; pad the weight or choose another format"
        )


def scale_shape(format: str, stored: torch.dtype, shape: tuple[int, int], group: int) -> tuple[int, int] | None:
    """The shape of the scale, None where values are not quantized."""
    n, k = shape
    if stored in DTYPES:
        return None
    if format == "fp8_block":
        return ceil(n, BLOCK), ceil(k, BLOCK)
    # one scale a row exists without columns too
    return n, 1 if group == k else ceil(k, group)


def scale_dtype(format: str) -> torch.dtype:
    """The dtype of the scales: bytes of e8m0 for mxfp4."""
    return torch.uint8 if format == "mxfp4" else torch.float32


def check_part(name: str, part: Any, dtype: torch.dtype, shape: tuple[int, int] | None, stored: Tensor) -> None:
    """Raise InvalidArgument unless a scale or zero point is what its format has; shape None: it has none."""
    if shape is None:
        if part is not None:
            raise InvalidArgument(f"packed weight: this format of {stored.dtype} has no {name}, got {named(part)}")
        return
    if not isinstance(part, Tensor) or part.dtype != dtype or tuple(part.shape) != shape:
        raise InvalidArgument(f"packed weight: the {name} must be {dtype} {list(shape)}, got {named(part)}")
    if part.device != stored.device:
        raise InvalidArgument(
            f"packed weight: the {name} is on {part.device}, the values on {stored.device}; move one of them"
        )


def quantized(
    weight: Tensor, format: str, target: torch.dtype, group: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(values, scale, zero) of a weight [N, K]; int4 as bytes, shuffled not yet shuffled."""
    wide = weight.float()
    if not weight.is_meta and not bool(wide.isfinite().all()):
        raise InvalidArgument(
            f"pack: the weight holds NaN, infinity or a value beyond float32, which {format} cannot represent; repair "
            "it (weight.isfinite() shows where) or use the plain format"
        )
    shape = (int(weight.shape[0]), int(weight.shape[1]))
    wanted = scale_shape(format, target, shape, group)
    assert wanted is not None
    rows = BLOCK if format == "fp8_block" else 1
    if weight.numel() == 0:
        low = high = wide.new_zeros(wanted)
    else:
        tiles = _tiles(wide, rows, group)
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
    if format == "mxfp4":
        return *_mxfp4(wide, torch.maximum(-low, high)), None
    if format == "int4":
        return _int4(wide, low, high, group, symmetric)
    largest = LARGEST[target]
    scale = _scale(torch.maximum(-low, high), largest)
    # beyond the largest by no more than the rounding of scale and quotient, which rounds to it
    scaled = wide / expanded(scale, shape, rows, group)
    return (scaled.round() if target == torch.int8 else scaled).to(target), scale, None


def _tiles(x: Tensor, rows: int, columns: int) -> Tensor:
    """[N, K], padded with zeros, as [ceil(N / rows), rows, ceil(K / columns), columns]."""
    n, k = x.shape
    down, across = ceil(n, rows), ceil(k, columns)
    padded = nn.functional.pad(x, (0, across * columns - k, 0, down * rows - n))
    return padded.view(down, rows, across, columns)


def expanded(scale: Tensor, shape: Sequence[int], rows: int, columns: int) -> Tensor:
    """One scale for `rows` × `columns` weights, as a tensor that broadcasts against the weights."""
    n, k = shape
    if rows > 1:
        scale = scale.repeat_interleave(rows, dim=0)[:n]
    return scale if columns == k else scale.repeat_interleave(columns, dim=1)[:, :k]


def _scale(span: Tensor, steps: float) -> Tensor:
    """The float32 scale that divides a span into steps: 1 for no span, never so small that its inverse is infinite."""
    return torch.where(span == 0, torch.ones_like(span), (span / steps).clamp_min(2.0**-126)).float()


def _int4(wide: Tensor, low: Tensor, high: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """4-bit values, two in a byte, with their scale and zero point; `low` and `high` are each group's extremes."""
    zero: Tensor | None = None
    if symmetric:
        scale = _scale(torch.maximum(-low, high), INT4_LARGEST)
        centre = torch.full_like(scale, INT4_ZERO)
    else:
        # 0 is in the range, so that it has a quantized value; float64, as the span may be infinite in float32
        low, high = low.clamp_max(0), high.clamp_min(0)
        scale = _scale(high.double() - low.double(), INT4_MOST)
        centre = (-low / scale).round().clamp(0, INT4_MOST)
        zero = centre.to(torch.uint8)
    values = (wide / expanded(scale, wide.shape, 1, group)).round() + expanded(centre, wide.shape, 1, group)
    return int4_bytes(values.clamp(0, INT4_MOST).to(torch.uint8), zero), scale, zero


def _mxfp4(wide: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    """e2m1 values, two in a byte, and e8m0 scales; `peak`: the largest magnitude of each group.

    As section 6.3 of the specification has it: a scale is 2^(⌊log2(peak)⌋ − 2), values are divided by it, rounded to
    nearest with ties to even, and those beyond 6 become 6.
    """
    # frexp's mantissa is below 1: its exponent is one more than that of the specification
    exponent = torch.frexp(peak).exponent - 1 - E2M1_EXPONENT
    exponent = torch.where(peak == 0, torch.zeros_like(exponent), exponent).clamp_min(-E8M0_BIAS)
    scale = (exponent + E8M0_BIAS).to(torch.uint8)
    # exact: powers of two, and what becomes smaller than float32 has is rounded to 0 anyway
    inverse = ((E8M0_BIAS - exponent) << FLOAT32_MANTISSA).view(torch.float32)
    scaled = wide * expanded(inverse, wide.shape, 1, MX_GROUP)
    size = scaled.abs()
    # steps of 1/2 up to 2, of 1 up to 4, then of 2; stored numbers are even where the last bit of the mantissa is 0
    stored = torch.where(
        size < 2, (size * 2).round(), torch.where(size < 4, size.round() + 2, (size / 2).round().clamp_max(3) + 4)
    )
    return nibble_bytes(stored.to(torch.uint8) | (scaled.signbit().to(torch.uint8) << 3)), scale


def e2m1_values(stored: Tensor) -> Tensor:
    """The float32 values of e2m1, stored as 0 to 15."""
    table = torch.tensor((*E2M1, *(-value for value in E2M1)), dtype=torch.float32, device=stored.device)
    return table[stored.long()]


def e8m0_values(scale: Tensor) -> Tensor:
    """The float32 scales of e8m0 bytes: 2^(byte − 127), NaN for 255."""
    bits = scale.int() << FLOAT32_MANTISSA
    # float32 has 0 and 255 for other things: the first bit of the mantissa makes them 2^-127 and NaN
    special = (scale == 0) | (scale == 255)
    return (bits | special.int() << (FLOAT32_MANTISSA - 1)).view(torch.float32)


def nibble_bytes(values: Tensor) -> Tensor:
    """4-bit values uint8 [N, K], 0 to 15, two in a byte: uint8 [N, Kp / 2]; those beyond K are 0."""
    n, k = values.shape
    count = ceil(k, INT4_UNIT)
    units = nn.functional.pad(values, (0, count * INT4_UNIT - k)).view(n, count, 2, INT4_UNIT // 2)
    return (units[:, :, 0] | (units[:, :, 1] << 4)).reshape(n, count * INT4_UNIT // 2)


def nibbles_of_pairs(pairs: Tensor) -> Tensor:
    """4-bit values [..., K] of bytes [..., K / 2] that hold neighbours, that with an even index in the low nibble."""
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)


def int4_bytes(values: Tensor, zero: Tensor | None) -> Tensor:
    """4-bit values uint8 [N, K], 0 to 15, two in a byte: uint8 [N, Kp / 2]; `zero` [N, groups]: their zero points.

    Columns beyond K stand for 0: they hold the zero point of the last group.
    """
    n, k = values.shape
    last = values.new_full((n, 1), INT4_ZERO) if zero is None else zero[:, -1:]
    return nibble_bytes(torch.cat([values, last.expand(n, ceil(k, INT4_UNIT) * INT4_UNIT - k)], dim=1))


def nibbles(stored: Tensor) -> Tensor:
    """The 4-bit values [N, Kp] of bytes [N, Kp / 2]: of each unit the low nibbles, then the high ones."""
    n, columns = stored.shape
    units = stored.view(n, columns * 2 // INT4_UNIT, INT4_UNIT // 2)
    return torch.stack([units & 15, units >> 4], dim=2).view(n, columns * 2)


def shuffled(x: Tensor) -> Tensor:
    """The (16, 16) layout: tiles of 16 rows × 32 columns; in a tile, runs of 16 bytes along K, then rows."""
    n, k = x.shape
    run = RUN_BYTES // x.element_size()
    tiles = x.reshape(n // TILE_ROWS, TILE_ROWS, k // TILE_COLUMNS, TILE_COLUMNS // run, run)
    return tiles.permute(0, 2, 3, 1, 4).contiguous().view(n, k)


def unshuffled(x: Tensor) -> Tensor:
    """The inverse of `shuffled`."""
    n, k = x.shape
    run = RUN_BYTES // x.element_size()
    tiles = x.view(n // TILE_ROWS, k // TILE_COLUMNS, TILE_COLUMNS // run, TILE_ROWS, run)
    return tiles.permute(0, 3, 1, 2, 4).contiguous().view(n, k)
