"""The rotary kernel's configuration: tokens and heads of a program, and its threads."""

from __future__ import annotations

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config


def configured(tokens: int, heads: int, head_dim: int, rotary_dim: int, dtype: str, wave_size: int) -> Config:
    """About 8 KiB of x a program, and 64 bytes a thread: two 16-byte loads of either column of the pairs.

    Reasoned, not swept: a program takes all heads of a token if it can, as they share a row of cos and sin. Few tokens
    (decode) are cut into 4 KiB, so that more programs start at once. `tokens` is 0 where it is not known.
    """
    size = 4 if dtype == "float32" else 2
    row = _layout.power_of_two(head_dim) * size
    budget = 4096 if 0 < tokens * heads * row <= 1 << 20 else 8192
    rows = max(1, budget // row)
    block_h = min(rows, _layout.power_of_two(heads))
    # where few columns are rotated, no more threads than they have 16-byte pieces of a half
    threads = min(rows * row // 64, rows * _layout.power_of_two(rotary_dim // 2) * size // 16)
    return Config(BLOCK_T=rows // block_h, BLOCK_H=block_h, num_warps=max(1, threads // wave_size))
