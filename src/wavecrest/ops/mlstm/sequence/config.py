"""The configuration of the recurrent kernel where nothing measured is known."""

from __future__ import annotations

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch

# elements of a state that a program keeps: 32 KiB in registers
TILE = 8192


def default(dk: int, dv: int, arch: Arch | None) -> Config:
    """Columns of the state so that a program has 8,192 elements of it.

    Reasoned, not measured: 32 registers a lane of 8 warps or 4 waves, all of them loaded at once, and of a state of 256
    rows 128 bytes of each, a full line of every cache. The batch has no say, so that a row has the same bits in any.
    """
    block_k = _layout.power_of_two(dk)
    block_v = max(4, min(_layout.power_of_two(dv), TILE // block_k))
    wave = 32 if arch is None else arch.wave_size
    return Config(BLOCK_V=block_v, num_warps=max(1, min(8, block_k * block_v // (32 * wave))))
