"""Code that the ops that round to 8 bits share: types, scales, their granularity, the definition, device functions.

Symmetric quantization: q = round(x / scale) within ± the largest value of the type (saturating), x ≈ q · scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.target as _target
from wavecrest.dispatch.tracing import constant_in_graphs
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops.common.triton import tl, triton

# the largest finite value of each type (OCP 8-bit floating point specification; AMD's fnuz forms on gfx942)
LARGEST: dict[torch.dtype, float] = {
    torch.int8: 127.0,
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.float8_e5m2fnuz: 57344.0,
}
# where each type can be made in a kernel; int8 everywhere
KERNEL_ARCHS: dict[str, tuple[str, ...]] = {
    "float8_e4m3fn": ("gfx942", "gfx950", "gfx1201", "sm_90", "sm_100"),
    "float8_e5m2": ("gfx942", "gfx950", "gfx1201", "sm_90", "sm_100"),
    "float8_e4m3fnuz": ("gfx942",),
    "float8_e5m2fnuz": ("gfx942",),
}
GRANULARITIES = ("tensor", "token", "group")
# dtypes that 8-bit values are dequantized to
OUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# columns of a group
GROUP = 128
# the smallest scale worked out: the smallest normal float32, whose inverse is finite
SMALLEST_SCALE = tl.constexpr(2.0**-126)


def float8_of(arch: Arch | None) -> torch.dtype:
    """The e4m3 that an architecture multiplies with: e4m3fnuz on gfx942, e4m3fn elsewhere and without a GPU."""
    return torch.float8_e4m3fnuz if arch is not None and arch.fp8 == "e4m3fnuz" else torch.float8_e4m3fn


class Quantization(NamedTuple):
    """The rounding of values to 8 bits. `scale` None: the scale is computed from the values."""

    dtype: torch.dtype
    granularity: str
    scale: Tensor | None


def scale_shape(shape: torch.Size | tuple[int, ...], granularity: str) -> tuple[int, ...]:
    """The shape of the scale of a tensor [..., N]: [] (tensor), [..., 1] (token) or [..., ceil(N / 128)] (group)."""
    if granularity == "tensor":
        return ()
    if granularity == "token":
        return (*shape[:-1], 1)
    return (*shape[:-1], (shape[-1] + GROUP - 1) // GROUP)


def check(op: str, x: Tensor, how: Quantization | None, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise InvalidArgument unless type, granularity and scale fit `x`; `how` is None for a call without a dtype."""
    if how is None or how.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InvalidArgument(f"{op}: dtype takes {names}, not {None if how is None else how.dtype}")
    if how.granularity not in GRANULARITIES:
        raise InvalidArgument(f"{op}: granularity takes {', '.join(GRANULARITIES)}, not {how.granularity!r}")
    if how.scale is not None:
        check_scale(op, how.scale, x, how.granularity)


def check_scale(op: str, scale: Any, x: Tensor, granularity: str) -> None:
    """Raise InvalidArgument unless `scale` is a float32 tensor of a granularity's shape beside `x`."""
    wanted = scale_shape(x.shape, granularity)
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or tuple(scale.shape) != wanted:
        found = f"{scale.dtype} {list(scale.shape)}" if isinstance(scale, Tensor) else type(scale).__name__
        raise InvalidArgument(f"{op}: a {granularity} scale must be torch.float32 {list(wanted)}, got {found}")
    if scale.device != x.device:
        raise InvalidArgument(f"{op}: scale is on {scale.device}, x on {x.device}")


def check_dequantize(op: str, q: Any, how: Quantization | None) -> None:
    """Raise InvalidArgument unless `q` is an 8-bit tensor [..., N] with a scale that fits it."""
    if not isinstance(q, Tensor) or q.ndim == 0 or q.dtype not in LARGEST:
        found = f"{q.dtype} {list(q.shape)}" if isinstance(q, Tensor) else type(q).__name__
        raise InvalidArgument(f"{op}: takes an int8 or 8-bit floating-point tensor [..., N], got {found}")
    if how is None or how.dtype not in OUT_DTYPES:
        raise InvalidArgument(f"{op}: dtype takes {', '.join(map(str, OUT_DTYPES))}, not {how and how.dtype}")
    if how.granularity not in GRANULARITIES:
        # the shape said nothing that fits
        shapes = ", ".join(f"{list(scale_shape(q.shape, one))} ({one})" for one in GRANULARITIES)
        found = str(list(how.scale.shape)) if isinstance(how.scale, Tensor) else type(how.scale).__name__
        raise InvalidArgument(f"{op}: the scale of {list(q.shape)} has one of the shapes {shapes}, got {found}")
    check_scale(op, how.scale, q, how.granularity)


def granularity_of(q: Any, scale: Any) -> str:
    """The granularity whose scale has this shape, or "unknown"."""
    if isinstance(q, Tensor) and isinstance(scale, Tensor):
        for granularity in GRANULARITIES:
            if tuple(scale.shape) == scale_shape(q.shape, granularity):
                return granularity
    return "unknown"


def dequantized(q: Tensor, how: Quantization | None) -> Tensor:
    """The definition: q · scale, for q widened to float32 or float64."""
    assert how is not None and how.scale is not None
    return (q * expand_scale(how.scale.to(q.dtype), q.shape, how.granularity)).to(how.dtype)


# Dynamo would trace the detection of the GPU, which it cannot
@constant_in_graphs
def kernel_refusal(dtype: torch.dtype) -> str | None:
    """Why a kernel does not make an 8-bit type on the current architecture."""
    name = str(dtype).removeprefix("torch.")
    archs, arch = KERNEL_ARCHS.get(name), _target.arch()
    if archs is None:
        return None
    if arch is None:
        return f"Triton's interpreter has no {name}" if name.endswith("fnuz") else None
    return None if arch.name in archs else f"{arch.name} has no {name}; {', '.join(archs)} do"


def expand_scale(scale: Tensor, shape: torch.Size | tuple[int, ...], granularity: str) -> Tensor:
    """A scale as a tensor that broadcasts against [..., N]."""
    if granularity != "group":
        return scale
    return scale.repeat_interleave(GROUP, dim=-1)[..., : shape[-1]]


def reference(y: Tensor, how: Quantization) -> tuple[Tensor, Tensor]:
    """The definition, on values [..., N] in float32 or float64: (8-bit values, float32 scale).

    A scale worked out is max |y| / largest (no less than 2^-126), and 1 where all values are 0. int8 rounds to nearest
    even and has 0 for a NaN; where values hold a NaN or an infinity so does their scale: they do not come back as
    ordinary numbers.
    """
    largest = LARGEST[how.dtype]
    scale = how.scale
    if scale is None:
        peak = _amax(y, how.granularity)
        scale = torch.where(peak == 0, torch.ones_like(peak), (peak / largest).clamp_min(2.0**-126))
    scaled = (y / expand_scale(scale.to(y.dtype), y.shape, how.granularity)).clamp(-largest, largest)
    if how.dtype == torch.int8:
        scaled = scaled.round().nan_to_num(0.0)
    # through float32, as PyTorch has no conversion from float64 that rounds once to each of the types
    return scaled.float().to(how.dtype), scale.float()


def _amax(y: Tensor, granularity: str) -> Tensor:
    if y.numel() == 0:
        return y.new_zeros(scale_shape(y.shape, granularity))
    if granularity == "tensor":
        return y.abs().amax()
    if granularity == "token":
        return y.abs().amax(dim=-1, keepdim=True)
    groups = scale_shape(y.shape, "group")[-1]
    padded = torch.nn.functional.pad(y, (0, groups * GROUP - y.shape[-1]))
    return padded.abs().view(*y.shape[:-1], groups, GROUP).amax(dim=-1)


@triton.jit
def scale_of(peak, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The scale for values whose largest magnitude is `peak` (as `magnitude` gives it)."""
    scale = peak.to(tl.float32, bitcast=True) * (1.0 / LARGEST)
    # a comparison, as a maximum would lose a NaN
    scale = tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)
    return tl.where(peak == 0, 1.0, scale)


@triton.jit
def whole_numbers(y, inverse):  # type: ignore[no-untyped-def]
    """y · inverse as int8, where it is within int8 and finite."""
    # 1.5 · 2²³ leaves no fraction bits: the sum is rounded to nearest even, and its low byte is the integer
    return (y * inverse + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def rounded(y, scale, out_type: tl.constexpr, LARGEST: tl.constexpr, SATURATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """y / scale in an 8-bit type; a NaN stays one, and is 0 in int8.

    SATURATE: values may lie outside the type. With a scale worked out from them they do not, by more than rounds off.
    """
    # one division a scale and a product an element: a few units in the last place of float32 from the quotient
    inverse = 1.0 / scale
    if SATURATE:
        y *= inverse
        # comparisons keep a NaN, where minimum and maximum would lose it
        y = tl.where(y > LARGEST, LARGEST, tl.where(y < -LARGEST, -LARGEST, y))
    elif out_type != tl.int8:
        y *= inverse
    if out_type == tl.int8:
        if SATURATE:
            q = tl.where(y == y, whole_numbers(y, 1.0), 0)
        else:
            # an infinity has an infinite scale, and a NaN makes all others 0
            q = tl.where(tl.abs(y) < float("inf"), whole_numbers(y, tl.where(scale == scale, inverse, 0.0)), 0)
    else:
        q = y.to(out_type)
    return q
