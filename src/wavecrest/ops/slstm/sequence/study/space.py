"""The configurations worth trying for the sequence kernel."""

from __future__ import annotations

from collections.abc import Iterator

from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.slstm.sequence.config import block_d, default


def space(head_dim: int, dtype: str, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first: rows, weights at a time, numbers of warps."""
    first = default(head_dim, dtype, arch)
    yield first
    block, size = block_d(head_dim), 4 if dtype == "float32" else 2
    stages = first["STAGES"]
    for rows in (16, 32):
        for block_k in sorted({16, 32, 64, 128, block}):
            for warps in (1, 2, 4, 8, 16):
                # four states and four gates in float32, and the weights of all gates or of one tile
                numbers = 8 * rows * block + (4 if block_k == block else 1) * block_k * block * size // 4
                made = Config(BLOCK_B=rows, BLOCK_K=block_k, STAGES=stages, num_warps=warps, num_stages=1)
                if block_k <= block and 16 <= numbers // (warps * arch.wave_size) <= 256 and made != first:
                    yield made
