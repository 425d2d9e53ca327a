"""The configuration of the step kernel where nothing measured is known."""

from __future__ import annotations

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch

# elements of a state that a program has under way at a time: 32 KiB in registers
TILE = 8192


def default(dk: int, dv: int, arch: Arch | None) -> Config:
    """Columns of the state so that a program has 8,192 elements of it, all rows at once; on NVIDIA 32 rows at a time.

    Reasoned, not measured: 32 registers a lane of 8 warps or 4 waves, all of them loaded at once, and of a state of 256
    rows 128 bytes of each, a full line of every cache. The batch has no say, so that a row has the same bits in any.
    """
    rows, width = _layout.power_of_two(dk), _layout.power_of_two(dv)
    if arch is not None and arch.vendor == "nvidia" and rows > 64 and width >= 64:
        # 256 x 512, 64 rows of a batch in place: 141 us, 177 with 256 rows and 32 columns at once (H200, 2026-11-22)
        return Config(BLOCK_K=32, BLOCK_V=64, num_warps=4, EARLY=1)
    block_v = max(4, min(width, TILE // rows))
    wave = 32 if arch is None else arch.wave_size
    return Config(BLOCK_K=rows, BLOCK_V=block_v, num_warps=max(1, min(8, rows * block_v // (32 * wave))))
