"""The router's configuration: tokens of a program, and its threads."""

from __future__ import annotations

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config


def configured(tokens: int, experts: int, wave_size: int) -> Config:
    """A warp a token, so that no reduction leaves it, and up to four tokens a program; wide rows take more warps.

    Reasoned, not swept. `tokens` is 0 where it is not known.
    """
    # 16 numbers a lane
    warps = max(1, min(8, _layout.power_of_two(experts) // (16 * wave_size)))
    rows = 1 if 0 < tokens <= 4 or warps > 1 else 4
    return Config(BLOCK_T=rows, num_warps=warps * rows)
