"""The gated kernel's configuration: the tile of a program and its threads."""

from __future__ import annotations

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config

# most columns a program takes
BLOCK_COLUMNS = 1024
# rows that are too few to fill a GPU
FEW_ROWS = 64


def configured(rows: int, columns: int, wave_size: int) -> Config:
    """A tile of 1,024 columns, or several narrow rows; 16 elements a thread: two 16-byte loads of 16-bit data each.

    Smaller tiles with more threads where rows are few (`rows` is a bucket, 0 for any number). Chosen by a sweep on one
    H200 in bfloat16, 2026-11-20.
    """
    block_n = min(_layout.power_of_two(columns), BLOCK_COLUMNS)
    if 0 < rows <= FEW_ROWS:
        block_n = min(block_n, BLOCK_COLUMNS // 2)
        return Config(BLOCK_M=1, BLOCK_N=block_n, num_warps=max(1, block_n // (4 * wave_size)))
    block_m = 1 if block_n == BLOCK_COLUMNS else min(16, 2048 // block_n)
    return Config(BLOCK_M=block_m, BLOCK_N=block_n, num_warps=max(1, block_m * block_n // (16 * wave_size)))
