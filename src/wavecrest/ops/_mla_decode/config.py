"""The kernels' configurations where nothing measured is known: reasoned from registers, LDS and programs."""

from __future__ import annotations

from typing import NamedTuple

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch

# keys of a split where neither the batch nor the cache's size may change a result's bits
INVARIANT_KEYS = 1024
# fewest keys of a split otherwise: with fewer, writing and adding partial sums costs more than reading the keys
LEAST_KEYS = 128
MOST_SPLITS = 64
# cost of a program of split keys beside its keys, counted in keys: partial sums of 64 rows, written and read, equal
# the bytes of about 230 keys; reading the queries adds to that
PROGRAM_KEYS = 256
# sm_90's kernel: rows of a program, keys of a tile, and tiles in shared memory beside the queries, 144 of 227 KiB. Two
# tiles of 64 keys take 10 % longer, as the kernel waits for copies (H200, 2026-11-22)
HOPPER_ROWS, HOPPER_KEYS, HOPPER_STAGES = 64, 32, 4


class Shape(NamedTuple):
    """Parts of a call that a configuration depends on.

    Attributes:
        batch: sequences; 0 where a result's bits must not depend on their number.
        rows: queries times heads of a sequence.
        max_seqlen_k: the most keys that a sequence can have.
        width: the power of two that holds a latent.
        bits: of an element.
        page_size: tokens of a page, 0 without pages.
        extras: 0 to 2: one for a logit cap and one for rotation, each of which takes registers.
        rope_width: the power of two that holds the rotary part.
    """

    batch: int
    rows: int
    max_seqlen_k: int
    width: int
    bits: int
    page_size: int = 0
    extras: int = 0
    rope_width: int = 64


# BLOCK_M, BLOCK_N, PART, num_warps, num_stages
Tile = tuple[int, int, int, int, int]


def _nvidia(rows: int, shape: Shape, arch: Arch | None) -> Tile:
    """64 rows of 8 warps have 128 registers a thread for sums; three tiles of 576 columns are 216 of 227 KiB.

    These are the queries' tile and two stages of keys, which the matrix unit of sm_90 reads from shared memory.
    """
    if shape.bits == 32:
        # without matrix units: each thread multiplies its part from registers
        return 16, 16, 32, 4, 1
    if arch is not None and arch.name == "sm_80":
        # queries are held in registers, beside the sums of 32 rows
        return min(rows, 32), 32, shape.width, 8, 2
    # where rows of a tile lie in several pages their addresses take registers too; with a rotary part of 128 columns
    # three tiles of 64 rows are 240 KiB, and on sm_100 four of 576, as compiled by triton 3.6, 281
    wide = shape.width + shape.rope_width > 576 or (arch is not None and arch.name == "sm_100")
    fewer = shape.page_size % 64 != 0 or shape.extras == 2 or wide
    return rows, 32 if rows == 64 and fewer else 64, shape.width, 8, 2


def _cdna(rows: int, shape: Shape, arch: Arch) -> Tile:
    """A wave has 512 registers: of 64 rows in 4 waves, sums take 128 and queries 72.

    32 keys fill the K of every MFMA instruction, and take 32 KiB twice, once for each product. gfx950 has room for a
    second stage.
    """
    if shape.bits == 32:
        return 16, 16, 64, 4, 1
    return rows, 32, shape.width, 4, 2 if arch.name == "gfx950" and rows == 64 else 1


def _rdna(rows: int, shape: Shape) -> Tile:
    """256 registers, and on gfx11 each half of a wave holds the operands of all of it: queries in parts."""
    if shape.bits == 32:
        # without matrix instructions for it
        return 16, 16, 32, 16, 1
    return min(rows, 16 if shape.extras else 32), 32, 64, 8, 1


def _tile(shape: Shape, arch: Arch | None) -> Tile:
    rows = max(16, min(64, _layout.power_of_two(shape.rows)))
    if arch is None or arch.vendor == "nvidia":
        return _nvidia(rows, shape, arch)
    return _cdna(rows, shape, arch) if arch.wave_size == 64 else _rdna(rows, shape)


def splits_for(programs: int, keys: int, slots: int) -> int:
    """The number of programs that share the keys of a row, so that all end soonest where `slots` run at a time.

    A program costs its keys, plus PROGRAM_KEYS if keys are split. Returns the smallest number within 5 % of the best,
    since partial sums take memory.
    """
    most = max(1, min(MOST_SPLITS, keys // LEAST_KEYS))
    times = [
        _layout.ceil_div(programs * splits, slots) * (keys / splits + (PROGRAM_KEYS if splits > 1 else 0))
        for splits in range(1, most + 1)
    ]
    return next(splits for splits, time in enumerate(times, 1) if time <= 1.05 * min(times))


def with_tile(shape: Shape, arch: Arch | None, tile: Tile) -> Config:
    """The configuration of a tile: SPLITS and KEYS go with the shape."""
    rows, keys, part, warps, stages = tile
    splits, least = 0, INVARIANT_KEYS
    if shape.batch > 0:
        units = 132 if arch is None else arch.compute_units
        programs = shape.batch * _layout.ceil_div(shape.rows, rows)
        # two programs with the smaller tiles fit on a compute unit
        splits, least = splits_for(programs, shape.max_seqlen_k, units * (1 if rows == 64 else 2)), LEAST_KEYS
    more = {}
    if arch is not None and arch.wave_size == 64:
        # two waves a SIMD where 256 registers are enough, to read while the other multiplies; queries and sums of 64
        # rows need one's 512
        more = {"waves_per_eu": 2 if shape.bits == 16 and rows == 16 else 0, "matrix_instr_nonkdim": 16}
    return Config(
        BLOCK_M=rows, BLOCK_N=keys, PART=min(part, shape.width), SPLITS=splits, KEYS=max(least, keys), num_warps=warps,
        num_stages=stages, **more,
    )  # fmt: skip


def default(shape: Shape, arch: Arch | None) -> Config:
    """The tile that registers and LDS have room for. SPLITS 0: a split for every KEYS keys of a sequence."""
    return with_tile(shape, arch, _tile(shape, arch))


def default_hopper(shape: Shape, arch: Arch | None, finer: int = 1) -> Config:
    """For sm_90's kernel: `finer` times as many splits as fill all compute units, of which a program takes one."""
    splits, least = 0, INVARIANT_KEYS
    if shape.batch > 0:
        units = 132 if arch is None else arch.compute_units
        programs = shape.batch * _layout.ceil_div(shape.rows, HOPPER_ROWS)
        splits, least = finer * splits_for(programs, shape.max_seqlen_k, units), LEAST_KEYS
    # warps of the group that the launch counts; the kernel adds the others, and its stages are its own
    return Config(
        BLOCK_M=HOPPER_ROWS, BLOCK_N=HOPPER_KEYS, STAGES=HOPPER_STAGES, SPLITS=splits, KEYS=least, num_warps=4,
        num_stages=1,
    )  # fmt: skip


def gemm_config(rows: int, bits: int, invariant: bool) -> Config:
    """The tile of the GEMMs of each head: memory bound at few rows, where all the weights are read once.

    `invariant`: one tile for any number of rows, as other matrix instructions add in another order.
    """
    if bits == 32:
        return Config(BLOCK_M=16 if invariant else min(32, max(16, _layout.power_of_two(rows))), BLOCK_N=32, BLOCK_K=32,
                      num_warps=4, num_stages=1)  # fmt: skip
    size = 64 if invariant else max(16, min(64, _layout.power_of_two(rows)))
    return Config(BLOCK_M=size, BLOCK_N=128, BLOCK_K=64, num_warps=4, num_stages=2)
