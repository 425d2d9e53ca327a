"""The row kernel's configurations: how much of a row a program takes, with how many threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.quantized as _quantized
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch

# columns of a program where it need not see the whole row
TILE_COLUMNS = 2048


class Shape(NamedTuple):
    """Parts of a call that a configuration depends on, beside rows and columns; `rounding`: that of 8-bit results."""

    kind: str
    dtype: str
    residual: bool = False
    rounding: str | None = None
    static: bool = False

    @property
    def tiled(self) -> bool:
        """True if nothing of a row is needed but the element, or its group."""
        return self.kind in ("identity", "scaled") and (self.static or self.rounding != "token")


# rows that are too few to fill a GPU: latency counts, and more threads a row shorten it
FEW_ROWS = 64


def configured(rows: int, columns: int, shape: Shape, arch: Arch | None) -> Config:
    """A program a row, or several narrow rows a program; wider rows than a program holds well are split.

    `rows` is a bucket, 0 for any number. Chosen by sweeps over 1,024 to 262,144 columns of bfloat16 on one H200,
    2026-11-20; float32 counts as twice the columns, and where a wave is 64 wide the same numbers of threads are used.
    `maxnreg` (NVIDIA only) lets more programs run side by side: softmax over 65,536 columns went from 0.83 to 0.93 of
    a copy by it.
    """
    wave = 32 if arch is None else arch.wave_size
    least = _quantized.GROUP if shape.rounding == "group" and not shape.static else 1
    block_n = max(_layout.power_of_two(columns), least)

    def made(block_m: int, block_n: int, threads: int, packed: bool = False, registers: int = 0) -> Config:
        limit = {"maxnreg": registers} if registers and arch is not None and arch.vendor == "nvidia" else {}
        packed = packed and shape.dtype != "float32" and shape.kind != "softmax"
        warps = max(1, threads // wave)
        return Config(BLOCK_M=block_m, BLOCK_N=block_n, PACKED=int(packed), num_warps=warps, **limit)

    quantized = shape.rounding is not None and shape.kind != "scaled"
    # not where a row is summed: its sum must not depend on how many other rows there are
    few = 0 < rows <= FEW_ROWS and shape.kind in ("identity", "scaled")
    if shape.tiled:
        block_n = min(block_n, 2 * TILE_COLUMNS if few else TILE_COLUMNS)
        block_m = 1 if few else max(1, min(16, TILE_COLUMNS // block_n))
        return made(block_m, block_n, block_m * block_n // (8 if few else 32 if quantized else 16))
    if few and block_n <= 8192:
        return made(1, block_n, block_n // 8)
    if block_n <= 2048:
        # 8-bit results are stored 16 at a time, so that fewer threads have more of a row each
        elements, per_thread = (1024, 32) if quantized else (2048, 16)
        block_m = max(1, min(16, elements // block_n))
        return made(block_m, block_n, block_m * block_n // per_thread)
    return _wide_config(columns, block_n, shape, arch, made)


def _wide_config(columns: int, block_n: int, shape: Shape, arch: Arch | None, made: Callable[..., Config]) -> Config:
    """The same for rows of more than 2,048 columns."""
    quantized = shape.rounding is not None
    doubled = 2 if shape.dtype == "float32" else 1
    width = block_n * doubled
    # RMSNorm alone needs few registers beside the row
    light = shape.kind == "rms" and not quantized
    norm_to_8_bits = quantized and shape.kind != "identity"
    if width <= 4096:
        return made(1, block_n, block_n // (64 if shape.kind == "identity" else 32 if quantized else 16))
    if width <= 8192:
        if quantized or shape.kind == "layer":
            # a block that the row does not fill costs as much as a full one: more programs side by side hide some of it
            return made(1, block_n, width // 64, registers=96 if columns < block_n and not shape.residual else 0)
        return made(1, block_n, width // 64, packed=True) if columns < block_n else made(1, block_n, width // 16)
    if width <= 16384:
        return made(1, block_n, width // 64)
    if width <= 32768:
        # 4,096 rows of a layer norm to 8 bits took 175 µs whole and 200 µs split (H200, 2026-11-21)
        if norm_to_8_bits and shape.kind == "layer" and not shape.residual:
            return made(1, block_n, width // 64, registers=112)
        if shape.kind in ("rms", "identity") and not norm_to_8_bits:
            return made(1, block_n, width // 64, packed=True, registers=96 if shape.residual else 64)
    if width <= 65536 and light and not shape.residual:
        return made(1, block_n, width // 64, packed=True)
    return _split_config(width, shape, arch, made)


def _split_config(width: int, shape: Shape, arch: Arch | None, made: Callable[..., Config]) -> Config:
    """The same for rows that are split: `width` columns of 16 bits.

    Chosen by sweeps over 32,768 to 262,144 columns on one H200, 2026-11-21, of which no result file was kept: with 16
    bits unpacked once, in twice the registers, an RMSNorm to 8 bits of 65,536 columns took 131 µs instead of 144.
    """
    doubled = 2 if shape.dtype == "float32" else 1
    quantized, layer, widest = shape.rounding is not None, shape.kind == "layer", width > 131072
    part, per_thread, packed = 4096 if widest else 2048, 64, True
    if shape.kind == "rms" and not quantized:
        part, registers = 4096 if widest else 8192, 0
    elif quantized and shape.kind == "rms":
        packed = False
        if shape.residual and width > 32768:
            part = 4096
        # with 96 they spill, in what is hardly ever run, and took 0.93 to 0.97 of the time
        registers = 128
    elif quantized and layer:
        packed = shape.residual
        registers = 152 if widest and shape.residual else 0
    elif layer and shape.residual:
        per_thread, registers = (32, 64) if widest else (64, 96)
    else:
        registers = 96 if layer and width <= 32768 else 80
    if arch is not None and arch.vendor == "amd" and (quantized or shape.kind != "rms" or shape.residual):
        # not measured there. Compilers spill where a thread has 64 elements and a residual or 8-bit results beside them
        packed, per_thread = True, 32
        if quantized and not widest:
            part = 2048
    return made(1, part // doubled, part // per_thread, packed=packed, registers=registers)
