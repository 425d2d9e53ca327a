"""The configurations worth trying for the step kernel."""

from __future__ import annotations

from collections.abc import Iterator

from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.slstm.sequence.config import ROWS, block_d
from wavecrest.ops.slstm.step.config import default


def space(head_dim: int, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first: columns, weights at a time, numbers of warps."""
    first = default(head_dim, arch)
    yield first
    block, stages = block_d(head_dim), first["STAGES"]
    for rows in (ROWS, 2 * ROWS):
        for block_n in (16, 32, 64, 128):
            for block_k in (32, 64, 128):
                for warps in (1, 2, 4, 8):
                    made = Config(
                        BLOCK_B=rows, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages, num_warps=warps, num_stages=1
                    )
                    # a tile of weights in at most 64 registers a lane, and an element for each lane
                    each = block_k * block_n // (warps * arch.wave_size)
                    if max(block_n, block_k) <= block and 2 <= each <= 64 and made != first:
                        yield made
