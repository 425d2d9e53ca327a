"""The configurations worth trying for the kernels that take a sequence in one launch."""

from __future__ import annotations

from collections.abc import Iterator

from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.slstm.sequence.config import (
    KEPT,
    ROWS,
    block_d,
    default,
    default_cooperative,
    kept_bytes,
    programs,
)


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


def space_cooperative(heads: int, head_dim: int, dtype: str, arch: Arch) -> Iterator[Config]:
    """The same for programs that share a head: columns and numbers of warps; 32 rows spill (triton 3.6.0)."""
    first = default_cooperative(heads, head_dim, dtype, arch, arch.compute_units)
    yield first
    block = block_d(head_dim)
    for columns in (16, 32, 64):
        kept = kept_bytes(head_dim, columns, dtype, arch)
        if columns > block or kept > KEPT or programs(heads, head_dim, columns) > arch.compute_units:
            continue
        for warps in (1, 2, 4, 8, 16):
            made = Config(BLOCK_B=ROWS, BLOCK_N=columns, num_warps=warps, num_stages=1)
            lanes = warps * arch.wave_size
            # weights in at most 128 registers a lane, and words of h, looked at in two parts, for each lane
            if kept // 4 <= 128 * lanes <= 128 * ROWS * block // 2 and made != first:
                yield made
