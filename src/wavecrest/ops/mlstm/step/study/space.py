"""The configurations worth trying for the step kernel."""

from __future__ import annotations

from collections.abc import Iterator

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.mlstm.step.config import default


def space(dk: int, dv: int, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first: rows at a time, widths, numbers of warps."""
    first = default(dk, dv, arch)
    yield first
    rows, width = _layout.power_of_two(dk), _layout.power_of_two(dv)
    for block_k in sorted({rows, *(size for size in (16, 32, 64, 128) if size < rows)}):
        for block_v in (16, 32, 64, 128, 256, 512):
            for warps in (1, 2, 4, 8):
                # from two 16-byte accesses per lane up to the register limit; at most 16 K blocks
                each = block_k * block_v // (warps * arch.wave_size)
                made = Config(BLOCK_K=block_k, BLOCK_V=block_v, num_warps=warps)
                if 8 <= each <= 64 and block_v <= width and rows // block_k <= 16 and made != first:
                    yield made
