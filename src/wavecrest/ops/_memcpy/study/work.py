"""Work of the bandwidth kernel, for the cost model."""

from __future__ import annotations

import wavecrest.ops.common.cost_model_work as _work
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config, Work
from wavecrest.hardware import Arch
from wavecrest.ops._memcpy.call import WORD_BYTES


def work(key: Key, config: Config, arch: Arch) -> tuple[Work, ...]:
    """Work of the kernel, for the cost model; empty where the size is not known.

    The sums of mode "read" are added at one address.
    """
    blocks, mode, programs, *_ = key
    if blocks == 0:
        return ()
    tile, size = config["BLOCK"] * WORD_BYTES, blocks * 4096
    tiles = _layout.ceil_div(size, tile)
    at_once = min(tiles, programs or tiles)
    steps = _layout.ceil_div(tiles, at_once)
    read, written = (tile if mode != "write" else 0), (tile if mode != "read" else 0)
    registers = 2 * config["BLOCK"] / (config["num_warps"] * arch.wave_size)
    return (
        _work.moved(
            config, at_once, read, steps * written, registers=registers, steps=steps, fresh=size if read else 0,
            atomics=0 if written else 1,
        ),
    )  # fmt: skip
