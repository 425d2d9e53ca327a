"""The configuration of the sequence kernel where nothing measured is known."""

from __future__ import annotations

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch

# a program has four gates and four states of its rows in registers
LARGEST_HEAD_DIM = 256
# the largest heads that are one launch where nothing measured says otherwise: a token of heads of 256 in bfloat16 took
# 13 to 15 µs of it, and a call of slstm_step 11 to 12 (H100, 2026-11-26_slstm-peers_slstm.jsonl.gz)
KEPT_HEAD_DIM = 128
# least rows of an operand of a matrix unit
ROWS = 16
# most bytes of a head's weights that a program keeps in registers, or where the compiler puts what it keeps
KEPT = 128 << 10
# the same for what a program of the cooperative kernel loads at a time: it comes to its lanes through LDS, 64 KiB
KEPT_AT_ONCE = 64 << 10


def block_d(head_dim: int) -> int:
    """The columns of a program: a power of two, at least the 16 that a matrix unit takes."""
    return max(ROWS, _layout.power_of_two(head_dim))


def default(head_dim: int, dtype: str, arch: Arch | None) -> Config:
    """16 rows a program; the weights of a head are kept up to 128 KiB, larger ones are read again by each token.

    Chosen for code without spills (triton 3.6.0, gfx90a to gfx1201 and sm_90, 2026-11-26), not by times. On RDNA
    nothing is kept or read ahead: weights of heads of 64 that are kept spill 116 registers on gfx1100.
    """
    block, wide = block_d(head_dim), dtype == "float32"
    if arch is not None and arch.vendor == "amd" and arch.wave_size == 32:
        warps = 4 if block <= 64 and not wide else 8
        return Config(BLOCK_B=ROWS, BLOCK_K=16, STAGES=1, num_warps=warps, num_stages=1)
    nvidia = arch is not None and arch.vendor == "nvidia"
    block_k = block
    if 4 * block * block * (4 if wide else 2) > KEPT:
        # of a GPU with copies past registers, the larger tile has the fewer waits
        block_k = 128 if nvidia and not wide else 32
    warps = 4 if block <= 64 and not (nvidia and wide) else 8
    return Config(BLOCK_B=ROWS, BLOCK_K=block_k, STAGES=2, num_warps=warps, num_stages=1)


def kept_bytes(head_dim: int, columns: int, dtype: str, arch: Arch | None) -> int:
    """Bytes of weights that a program of the cooperative kernel keeps, of four gates.

    float32 is kept in two terms on NVIDIA, whose matrix units take three products of them.
    """
    wide = dtype == "float32"
    size = 8 if wide and arch is not None and arch.vendor == "nvidia" else 4 if wide else 2
    return 4 * block_d(head_dim) * columns * size


def programs(heads: int, head_dim: int, columns: int) -> int:
    """Programs of the cooperative kernel that run for the same rows: those of all heads."""
    return heads * _layout.ceil_div(head_dim, columns)


def default_cooperative(heads: int, head_dim: int, dtype: str, arch: Arch | None, units: int) -> Config:
    """32 columns a program: 16 where the weights of 32 are more than KEPT, more where the device has too few units.

    Reasoned, not measured: fewer columns are more programs, each of which multiplies less, and fewer rows at a time.

    Args:
        heads, head_dim, dtype: of the key.
        arch: the architecture.
        units: programs that the device runs at once, one a compute unit.
    """
    block = block_d(head_dim)
    columns = min(32, block)
    if kept_bytes(head_dim, columns, dtype, arch) > KEPT:
        columns = ROWS
    while (
        columns < block
        and programs(heads, head_dim, columns) > units
        and kept_bytes(head_dim, 2 * columns, dtype, arch) <= KEPT
    ):
        columns *= 2
    # as many columns of the four gates a warp as a matrix unit takes, and an element of h for each thread
    wide = 8 if arch is not None and arch.vendor == "nvidia" else ROWS
    return Config(BLOCK_B=ROWS, BLOCK_N=columns, num_warps=min(8, 4 * columns // wide, block // ROWS), num_stages=1)
