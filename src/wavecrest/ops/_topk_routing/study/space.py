"""The router's configurations that `wavecrest tune topk_routing` tries."""

from __future__ import annotations

from collections.abc import Iterator

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._topk_routing.config import configured


def space(key: Key, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first."""
    first = configured(key[0], key[1], arch.wave_size)
    yield first
    width = _layout.power_of_two(key[1])
    for rows in (1, 2, 4, 8, 16):
        for warps in (1, 2, 4, 8):
            # 1 to 64 numbers a lane, and no more rows than tokens
            each = rows * width / (warps * arch.wave_size)
            made = Config(BLOCK_T=rows, num_warps=warps)
            if made != first and each <= 64 and (each >= 1 or warps == 1) and rows <= max(1, key[0] or rows):
                yield made
