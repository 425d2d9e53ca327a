"""The configurations of the mixture-of-experts layer where nothing measured is known: reasoned, not swept."""

from __future__ import annotations

from typing import NamedTuple

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch


class Shape(NamedTuple):
    """Sizes that a configuration depends on; `tokens` is a bucket, `topk` the experts of a token.

    `step`: columns of K that a step has at most, as they share a scale of its sums; 0 without one. `least`: at least.
    """

    tokens: int
    experts: int
    topk: int
    hidden: int
    intermediate: int
    bits: int
    step: int = 0
    least: int = 16

    def depth(self, wanted: int, columns: int) -> int:
        """Columns of K of a step."""
        return max(self.least, min(wanted, _layout.power_of_two(columns), self.step or wanted))

    @property
    def pairs(self) -> int:
        """Pairs of a token and an expert."""
        return self.tokens * self.topk

    @property
    def rows(self) -> int:
        """Rows of an expert that is chosen, if tokens choose evenly."""
        return _layout.ceil_div(self.pairs, max(1, min(self.experts, self.pairs)))


def most_blocks(pairs: int, experts: int, block_m: int) -> int:
    """The most blocks of `block_m` rows that pairs, sorted by their experts, can make."""
    return min(pairs, (pairs + min(experts, pairs) * (block_m - 1)) // block_m)


def is_direct(shape: Shape) -> bool:
    """True where each pair is a block of its own, so that no kernel has to sort them: few pairs share an expert."""
    return shape.tokens == 1 or 8 * shape.pairs <= shape.experts


def _made(
    shape: Shape, m: int, tiles: tuple[int, int], down: tuple[int, int], warps: int, stages: int, **more: int
) -> Config:
    """`tiles`: BLOCK_N and BLOCK_K of the GEMM of gate and up, `down`: those of the GEMM behind it."""
    width, depth = _layout.power_of_two(shape.intermediate), _layout.power_of_two(shape.hidden)
    return Config(
        BLOCK_M=m, BLOCK_N=max(16, min(tiles[0], width)), BLOCK_K=shape.depth(tiles[1], shape.hidden),
        DOWN_N=max(16, min(down[0], depth)), DOWN_K=shape.depth(down[1], shape.intermediate), GROUP_M=8,
        DIRECT=int(m == 16 and is_direct(shape)), num_warps=warps, num_stages=stages, **more,
    )  # fmt: skip


def default(shape: Shape, arch: Arch | None) -> Config:
    """Tiles as high as an expert has rows: 16 of them are as good as one where reading weights is the limit."""
    if arch is not None and arch.vendor == "amd":
        return _amd(shape, arch)
    if shape.bits == 32:
        m = 16 if shape.rows <= 16 else 64
        return _made(shape, m, (32, 32), (64, 32), 4, 3)
    if shape.rows <= 16:
        return _made(shape, 16, (32, 128), (64, 128), 4, 4)
    if shape.rows <= 64:
        return _made(shape, 64, (64, 64), (128, 64), 4, 3)
    return _made(shape, 128, (64, 64), (128, 64), 8, 3)


def _amd(shape: Shape, arch: Arch) -> Config:
    """LDS holds num_stages − 1 tiles; 64 KiB of it on gfx942."""
    if arch.wave_size == 32:
        m = 16 if shape.rows <= 16 else 32
        # a step of 4 bits has 64 columns: with 32 of gate and of up int4 spills (compiled for gfx1100, triton 3.6)
        return _made(shape, m, (32 if shape.least <= 32 else 16, 32), (64, 32), 4, 2)
    more = {"waves_per_eu": 0, "matrix_instr_nonkdim": 16}
    if shape.bits == 32:
        m = 16 if shape.rows <= 16 else 64
        return _made(shape, m, (32, 32), (64, 32), 4, 2, **more)
    if shape.rows <= 16:
        return _made(shape, 16, (32, 128), (64, 128), 4, 2, **more)
    if shape.rows <= 64:
        return _made(shape, 32 if shape.rows <= 32 else 64, (64, 64), (128, 64), 4, 2, **more)
    return _made(shape, 128, (64, 64), (128, 64), 8, 2, **more)
