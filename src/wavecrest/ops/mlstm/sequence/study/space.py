"""The configurations worth trying for the recurrent kernel."""

from __future__ import annotations

from collections.abc import Iterator

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.mlstm.sequence.config import default


def space(dk: int, dv: int, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first: other widths and numbers of warps."""
    first = default(dk, dv, arch)
    yield first
    block_k = _layout.power_of_two(dk)
    for block_v in (8, 16, 32, 64, 128, 256):
        for warps in (1, 2, 4, 8):
            # from 8 elements of a state a lane to the registers that there are
            each = block_k * block_v // (warps * arch.wave_size)
            made = Config(BLOCK_V=block_v, num_warps=warps)
            if 8 <= each <= 128 and block_v <= _layout.power_of_two(dv) and made != first:
                yield made
