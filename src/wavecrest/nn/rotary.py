"""Rotary position embedding as a module: the tables of cos and sin, and the op over them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import InvalidArgument
from wavecrest.ops import rope

STYLES = ("neox", "gptj")


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All frequencies divided by `factor` ("linear" in transformers' modeling_rope_utils)."""

    factor: float

    def __post_init__(self) -> None:
        _positive("LinearScaling", factor=self.factor)

    def __call__(self, frequencies: Tensor) -> Tensor:
        """Radians per position [R/2], scaled."""
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's: long waves divided by `factor`, short ones kept, a ramp between ("llama3" in transformers).

    A wave is long above `original_max_positions` / `low_frequency_factor` positions, short below
    `original_max_positions` / `high_frequency_factor`. The defaults are those of Llama 3.1.
    """

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        _positive(
            "Llama3Scaling",
            factor=self.factor,
            low_frequency_factor=self.low_frequency_factor,
            original_max_positions=self.original_max_positions,
        )
        if not self.high_frequency_factor > self.low_frequency_factor:
            raise InvalidArgument(
                f"Llama3Scaling: high_frequency_factor {self.high_frequency_factor} must be above "
                f"low_frequency_factor {self.low_frequency_factor}"
            )

    def __call__(self, frequencies: Tensor) -> Tensor:
        """Radians per position [R/2], scaled."""
        waves = self.original_max_positions * frequencies / (2 * math.pi)
        # 0 for long waves, 1 for short ones
        kept = (waves - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        kept = kept.clamp(0.0, 1.0)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


Scaling = LinearScaling | Llama3Scaling


def _positive(name: str, **values: float) -> None:
    for field, value in values.items():
        if not (isinstance(value, (int, float)) and 0 < value < math.inf):
            raise InvalidArgument(f"{name}: {field} must be a number above 0, got {value!r}")


def rope_tables(
    max_positions: int,
    rotary_dim: int,
    base: float = 10000.0,
    scaling: Scaling | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin [max_positions, rotary_dim / 2], float32: row p holds the angles p · base^(−2i / rotary_dim).

    Frequencies and angles are float32 as in transformers, whose models were trained with them: at position 131,072 an
    angle is off by up to 0.008 radians. Worked out on the CPU, so that every device has the same tables.

    Raises:
        InvalidArgument: a size is not positive, or rotary_dim is odd.
    """
    if type(max_positions) is not int or max_positions < 1:
        raise InvalidArgument(f"rope_tables: max_positions must be a whole number above 0, got {max_positions!r}")
    if type(rotary_dim) is not int or rotary_dim < 2 or rotary_dim % 2 != 0:
        raise InvalidArgument(f"rope_tables: rotary_dim must be an even number above 0, got {rotary_dim!r}")
    _positive("rope_tables", base=base)
    target = torch.get_default_device() if device is None else torch.device(device)
    if target.type == "meta":
        shape = (max_positions, rotary_dim // 2)
        table = torch.empty(shape, dtype=torch.float32, device=target)
        return table, torch.empty_like(table)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    frequencies = 1.0 / (base**exponents)
    if scaling is not None:
        frequencies = scaling(frequencies)
    angles = torch.arange(max_positions, dtype=torch.float32, device="cpu")[:, None] * frequencies
    return angles.cos().to(target), angles.sin().to(target)


def rotate_qk(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, heads_dim: int = 1, style: str = "neox"
) -> tuple[Tensor, Tensor]:
    """q and k of one attention rotated; by one launch where they lie side by side, as a fused projection leaves them.

    Args:
        q, k: [B, H, S, D] (`heads_dim` 1, as in transformers) or [B, S, H, D] (2); k may have fewer heads.
        cos, sin: [B or 1, S, R] with each angle twice, as transformers makes them: the second half as the first
            ("neox"), or neighbours alike ("gptj"). One of each two is read.
        heads_dim: dimension of the heads.
        style: which columns are a pair; see `wavecrest.ops.rope`.

    Raises:
        InvalidArgument: a shape, dtype or style that `rope` does not take.
    """
    if heads_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    step = slice(0, cos.shape[-1] // 2) if style == "neox" else slice(0, None, 2)
    cos, sin, joined = cos[..., step], sin[..., step], _side_by_side(q, k)
    if joined is None:
        q, k = rope(q, cos, sin, style=style), rope(k, cos, sin, style=style)
    else:
        both, heads = rope(joined, cos, sin, style=style), q.shape[2]
        q, k = both[:, :, :heads], both[:, :, heads:]
    return (q.transpose(1, 2), k.transpose(1, 2)) if heads_dim == 1 else (q, k)


def _side_by_side(q: Tensor, k: Tensor) -> Tensor | None:
    """The tensor [B, S, Hq + Hk, D] whose first heads are q's and the rest k's, if they lie so in memory."""
    # there are no addresses
    if torch.compiler.is_compiling() or q.is_meta:
        return None
    if q.ndim != 4 or q.stride() != k.stride() or q.dtype != k.dtype:
        return None
    batch, length, heads, dim = q.shape
    if k.shape != (batch, length, k.shape[2], dim) or k.untyped_storage().data_ptr() != q.untyped_storage().data_ptr():
        return None
    if k.storage_offset() != q.storage_offset() + heads * q.stride(2):
        return None
    return q.as_strided((batch, length, heads + k.shape[2], dim), q.stride())


class RotaryEmbedding(nn.Module):
    """`wavecrest.ops.rope` with tables of its own.

    The tables are buffers `cos` and `sin` [max_positions, rotary_dim / 2] that are not saved and stay float32:
    converting a module to another dtype, or giving a module of the device "meta" memory, makes them anew.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        rotary_dim: int,
        max_positions: int,
        base: float = 10000.0,
        style: str = "neox",
        scaling: Scaling | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if style not in STYLES:
            raise InvalidArgument(f"RotaryEmbedding: style is neox or gptj, not {style!r}")
        self.rotary_dim = rotary_dim
        self.max_positions = max_positions
        self.base = base
        self.style = style
        self.scaling = scaling
        cos, sin = rope_tables(max_positions, rotary_dim, base, scaling, device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """x [..., S, H, D] and positions [..., S], None for 0 to S − 1; see `wavecrest.ops.rope`."""
        return rope(x, self.cos, self.sin, positions, self.style)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RotaryEmbedding:
        before = self.cos
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # rounded to another dtype, or memory that nothing has filled
        if self.cos.dtype != torch.float32 or (before.is_meta and not self.cos.is_meta):
            self.cos, self.sin = rope_tables(
                self.max_positions, self.rotary_dim, self.base, self.scaling, self.cos.device
            )
        return self

    def extra_repr(self) -> str:
        return (
            f"{self.rotary_dim}, max_positions={self.max_positions}, base={self.base}, style={self.style!r}, "
            f"scaling={self.scaling}"
        )
