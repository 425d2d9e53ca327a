"""The kernels' configurations where nothing measured is known: reasoned from registers, LDS and programs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch

# keys of a split where neither the batch nor the cache's size may change a result's bits
INVARIANT_KEYS = 1024
# otherwise the least: below it reading and adding sums costs more than the keys
LEAST_KEYS = 128
MOST_SPLITS = 64
# what a program of split keys costs beside them, in keys: sums of 64 rows, written and read again, are as many bytes as
# about 230 keys, and the queries are read
PROGRAM_KEYS = 256


class Shape(NamedTuple):
    """What a configuration is chosen by: `batch` 0 for any number of sequences, whose bits must not depend on it.

    `width`: the power of two that holds a latent; `bits`: of an element; `page`: tokens of a page, 0 without pages;
    `more`: how many of cap and rotation there are, which take registers.
    """

    batch: int
    rows: int
    capacity: int
    width: int
    bits: int
    page: int = 0
    more: int = 0


# BLOCK_M, BLOCK_N, PART, num_warps, num_stages
_Tile = tuple[int, int, int, int, int]


def _nvidia(rows: int, shape: Shape, arch: Arch | None) -> _Tile:
    """64 rows of 8 warps have 128 registers a thread for sums; three tiles of 576 columns are 216 of 227 KiB.

    The queries' and two stages of keys', which the matrix unit of sm_90 reads from there.
    """
    if shape.bits == 32:
        # without matrix units: each thread multiplies its part from registers
        return 16, 16, 32, 4, 1
    if arch is not None and arch.name == "sm_80":
        # queries are held in registers, beside the sums of 32 rows
        return min(rows, 32), 32, shape.width, 8, 2
    # where rows of a tile lie in several pages their addresses take registers too
    fewer = rows == 64 and (shape.page % 64 != 0 or shape.more == 2)
    return rows, 32 if fewer else 64, shape.width, 8, 2


def _cdna(rows: int, shape: Shape, arch: Arch) -> _Tile:
    """A wave has 512 registers: of 64 rows in 4 waves, sums take 128 and queries 72.

    32 keys fill the K of every MFMA instruction, and take 32 KiB twice, once for each product. gfx950 has room for a
    second stage.
    """
    if shape.bits == 32:
        return 16, 16, 64, 4, 1
    return rows, 32, shape.width, 4, 2 if arch.name == "gfx950" and rows == 64 else 1


def _rdna(rows: int, shape: Shape) -> _Tile:
    """256 registers, and on gfx11 each half of a wave holds the operands of all of it: queries in parts."""
    if shape.bits == 32:
        # without matrix instructions for it
        return 16, 16, 32, 16, 1
    return min(rows, 16 if shape.more else 32), 32, 64, 8, 1


def _tile(shape: Shape, arch: Arch | None) -> _Tile:
    rows = max(16, min(64, _layout.power_of_two(shape.rows)))
    if arch is None or arch.vendor == "nvidia":
        return _nvidia(rows, shape, arch)
    return _cdna(rows, shape, arch) if arch.wave_size == 64 else _rdna(rows, shape)


def splits_for(programs: int, keys: int, slots: int) -> int:
    """Over how many programs the keys of a row are split so that `slots` that run at a time end soonest.

    The time of a program is that of its keys, and of PROGRAM_KEYS more where they are split. The fewest splits of those
    within 5 % of the best, as sums take memory.
    """
    most = max(1, min(MOST_SPLITS, keys // LEAST_KEYS))
    times = [
        _layout.ceil_div(programs * splits, slots) * (keys / splits + (PROGRAM_KEYS if splits > 1 else 0))
        for splits in range(1, most + 1)
    ]
    return next(splits for splits, time in enumerate(times, 1) if time <= 1.05 * min(times))


def _made(shape: Shape, arch: Arch | None, tile: _Tile) -> Config:
    rows, keys, part, warps, stages = tile
    splits, least = 0, INVARIANT_KEYS
    if shape.batch > 0:
        units = 132 if arch is None else arch.compute_units
        programs = shape.batch * _layout.ceil_div(shape.rows, rows)
        # of the smaller tiles two programs fit on a unit
        splits, least = splits_for(programs, shape.capacity, units * (1 if rows == 64 else 2)), LEAST_KEYS
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
    """The tile that registers and LDS have room for; SPLITS 0: as many as there are KEYS in a sequence."""
    return _made(shape, arch, _tile(shape, arch))


def space(shape: Shape, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first: other tiles, and more or fewer splits."""
    first = default(shape, arch)
    yield first
    seen = {first}
    stages = (1, 2, 3) if arch.vendor == "nvidia" else (1, 2)
    most = _layout.power_of_two(shape.rows)
    choices = itertools.product((16, 32, 64), (16, 32, 64, 128), (4, 8), stages, (1, 2))
    for rows, keys, warps, deep, finer in choices:
        # the queries' tile where it is not in registers, and the keys' of each stage
        tiles = keys * deep + (rows if arch.vendor == "nvidia" and rows == 64 else 0)
        if tiles * (shape.width + 64) * shape.bits // 8 > arch.lds_kib << 10 or rows > max(16, most):
            continue
        # sums, at most 160 registers a lane
        if rows * shape.width > 160 * warps * arch.wave_size:
            continue
        made = _made(shape, arch, (rows, keys, first["PART"], warps, deep))
        made = Config(**(made.kwargs | {"SPLITS": made["SPLITS"] * finer}))
        if made not in seen:
            seen.add(made)
            yield made


def product(rows: int, bits: int, invariant: bool) -> Config:
    """The tile of the products of each head: memory bound at few rows, where all the weights are read once.

    `invariant`: one for any number of rows, as other matrix instructions add in another order.
    """
    if bits == 32:
        return Config(BLOCK_M=16 if invariant else min(32, max(16, _layout.power_of_two(rows))), BLOCK_N=32, BLOCK_K=32,
                      num_warps=4, num_stages=1)  # fmt: skip
    size = 64 if invariant else max(16, min(64, _layout.power_of_two(rows)))
    return Config(BLOCK_M=size, BLOCK_N=128, BLOCK_K=64, num_warps=4, num_stages=2)
