"""The configuration of the step kernel where nothing measured is known."""

from __future__ import annotations

from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.slstm.sequence.config import ROWS, block_d


def default(head_dim: int, arch: Arch | None) -> Config:
    """32 columns a program and 64 rows of the weights at a time.

    Reasoned, not measured: a head of 128 is read by 4 programs, each of which has tiles of 4 KiB under way. On RDNA
    (32 lanes a wave) such tiles spill: smaller ones there.
    """
    block = block_d(head_dim)
    if arch is not None and arch.vendor == "amd" and arch.wave_size == 32:
        return Config(BLOCK_B=ROWS, BLOCK_N=min(32, block), BLOCK_K=ROWS, STAGES=1, num_warps=2, num_stages=1)
    warps = 4 if block > ROWS else 1
    return Config(BLOCK_B=ROWS, BLOCK_N=min(32, block), BLOCK_K=min(64, block), STAGES=2, num_warps=warps, num_stages=1)
