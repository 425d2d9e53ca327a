"""The kernel's configurations where nothing measured is known: reasoned from registers and LDS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._flash_attention.launch import multiplies


class Shape(NamedTuple):
    """Parts of a call that a configuration depends on; without batch and heads, which must not change a result's bits.

    `seqlen_q`: a bucket; `head_dim`: the larger one of q and of v; `bits`: of an element of q; `more`: the number of
    operations on scores (bias, slopes, softcap, a window's left edge, dropout), which take registers; `kv_dtype`: the
    dtype of 8-bit k and v, else None; `window`: a window has a left edge.
    """

    seqlen_q: int
    head_dim: int
    bits: int
    causal: bool
    more: int
    kv_dtype: str | None = None
    dropout: bool = False
    window: bool = False


# BLOCK_M, BLOCK_N, num_warps, num_stages
_Tile = tuple[int, int, int, int]


def _nvidia(shape: Shape) -> _Tile:
    """With D = 128, 128 rows in 8 warps, or 64 in 4, have 128 registers a thread for accumulators and scores."""
    if shape.bits == 32:
        # without matrix units: each thread multiplies its part from registers
        return (32, 32, 4, 2) if shape.head_dim <= 64 and shape.kv_dtype is None else (32, 16, 8, 2)
    if shape.bits == 8 and not 64 < shape.head_dim <= 128:
        # integer accumulators hold one tile alone and take as many registers again
        return (64, 64, 4, 2) if shape.head_dim <= 64 else (64, 32, 8, 2)
    if shape.head_dim <= 64 and not (shape.kv_dtype is not None and shape.more):
        return 64, 64, 4, 3
    if shape.head_dim <= 128:
        if shape.more:
            return 64, 32, 4, 2
        # fewer rows leave less of the diagonal's tiles hidden; a third stage takes registers too
        return (64, 64, 4, 2) if shape.causal else (128, 64, 8, 2)
    # two stages of k and v are 64 KiB, which sm_80 has room for beside q
    return 128, 32, 8, 2


def _multiplies_8_bits(shape: Shape, arch: Arch | None) -> bool:
    """True where 8-bit q and k are multiplied as they are."""
    return shape.bits == 8 and shape.kv_dtype is not None and multiplies(getattr(torch, shape.kv_dtype), arch)


def _wide_matrix(shape: Shape, arch: Arch | None) -> bool:
    """True where matrix instructions of 32 rows take fewer instructions around them, and no more registers.

    Counted in the emulator, triton 3.6, causal, D = 128: 8 to 10 % fewer on gfx942, 12 to 14 % on gfx950, with 2,048 to
    8,192 tokens (docs/attention.md).
    """
    if arch is None or arch.name not in ("gfx942", "gfx950") or _layout.power_of_two(shape.seqlen_q) < 128:
        return False
    return shape.bits == 16 and shape.kv_dtype is None and not shape.more and 64 < shape.head_dim <= 128


def _cdna(shape: Shape, arch: Arch) -> _Tile:
    """32 rows a wave, as then k and v go from LDS to registers no slower than MFMA multiplies them.

    A step of k and v of 64 keys takes as long through LDS (128 bytes a cycle) with 32 rows a wave as half of its
    products, and with 16 rows as long as all of them. Two waves a SIMD hide each other's softmax: 256 registers each,
    which a next step of k and v in registers (num_stages=2) is too much for beside D = 128.
    """
    if shape.bits == 32:
        return (64, 32, 4, 1) if shape.head_dim <= 128 else (32, 32, 4, 1)
    if shape.head_dim <= 128:
        if shape.more >= 3 and shape.dropout:
            # the keys of Philox's rounds are scalars too
            return 64, 16, 8, 1
        if shape.more >= 3 and shape.head_dim > 64:
            # a mask takes two scalar registers for each element of a lane, and there are about 100 scalar registers
            return 64, 32, 8, 1
        # 8-bit values as they are loaded, and widened, or sums of a tile's integers, take registers too; masks take
        # scalar registers
        crowded = shape.kv_dtype is not None and (
            shape.head_dim > 64 or shape.causal or not _multiplies_8_bits(shape, arch)
        )
        if shape.more or crowded:
            return 128, 32, 4, 1
        if _wide_matrix(shape, arch) and arch.name == "gfx942":
            # the next step's keys beside it, and no spills, which 64 keys have
            return 128, 32, 4, 2
        return 128, 64, 4, 2 if shape.head_dim <= 64 else 1
    # sums alone would be 128 registers of 32 rows a wave
    return 64, 32, 8, 2


def _rdna(shape: Shape, arch: Arch) -> _Tile:
    """256 registers a thread of a wave of 32; on gfx11 each half of a wave holds the operands of all of it."""
    if shape.bits == 32:
        # without matrix instructions for it
        return (32, 16, 8, 1) if shape.head_dim <= 64 else (16, 16, 16, 1)
    if shape.head_dim > 128:
        return 32, 32, 8, 1
    if shape.more and (shape.kv_dtype is not None or (shape.dropout and shape.head_dim > 64)):
        return 32, 16, 4, 1
    if _multiplies_8_bits(shape, arch) and shape.head_dim > 64:
        # scores may be integers before they are floats, weights floats before they are rounded to 8 bits
        return 64, 16, 4, 1
    return 64, 16 if shape.more and shape.head_dim > 64 else 32, 4, 1


def _made(shape: Shape, arch: Arch | None, tile: _Tile, matrix: int = 16) -> Config:
    """`matrix`: rows of a matrix instruction, where a program has 128 rows in 4 waves."""
    rows, keys, warps, stages = tile
    # no more rows than there are queries
    fewer = max(16, min(rows, _layout.power_of_two(shape.seqlen_q)))
    if rows > 32 >= fewer:
        warps = 4
    more = {}
    if arch is not None and arch.wave_size == 64:
        # without waves_per_eu the compiler takes accumulation registers too, and moves sums there and back; it is a
        # limit as well, and 8 waves have two a SIMD without it
        waves = 2 if shape.bits != 32 and fewer == 128 and warps == 4 else 0
        more = {"waves_per_eu": waves, "matrix_instr_nonkdim": matrix if waves else 16}
        if shape.causal and not shape.window:
            # by the model of benchmarks/causal_order.py: the longest tiles of several heads first, as long as an L2
            # cache holds their k and v; behind a window's left edge tiles are about equally long
            more["SECTION_MIB"] = int(arch.l2_mib)
    return Config(BLOCK_M=fewer, BLOCK_N=keys, num_warps=warps, num_stages=stages, **more)


def default(shape: Shape, arch: Arch | None) -> Config:
    """The tile that registers and LDS have room for, for as many rows as there are."""
    if arch is None or arch.vendor == "nvidia":
        return _made(shape, arch, _nvidia(shape))
    if arch.wave_size == 64:
        return _made(shape, arch, _cdna(shape, arch), 32 if _wide_matrix(shape, arch) else 16)
    return _made(shape, arch, _rdna(shape, arch))


# tiles that `wavecrest tune flash_attention` tries of 16-bit types
_ON_NVIDIA = (
    (128, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3),
    (64, 128, 4, 2), (64, 128, 4, 3), (128, 32, 4, 3), (64, 32, 4, 3), (16, 64, 4, 3), (16, 128, 4, 3), (32, 64, 4, 3),
    (16, 32, 4, 3),
)  # fmt: skip
_ON_AMD = (
    (128, 64, 4, 2), (128, 64, 4, 1), (128, 32, 4, 2), (128, 128, 4, 1), (128, 128, 8, 2), (256, 64, 8, 2),
    (64, 64, 4, 2), (64, 64, 4, 1), (64, 32, 4, 2), (64, 32, 4, 1), (32, 64, 4, 2), (32, 32, 4, 1), (16, 64, 4, 2),
    (16, 128, 4, 2), (16, 32, 4, 1),
)  # fmt: skip
# and those of them and others that it tries with matrix instructions of 32 rows, on gfx942 and gfx950
_WIDE_ON_AMD = (
    (128, 64, 4, 1), (128, 32, 4, 2), (128, 32, 4, 1), (256, 64, 8, 1), (256, 64, 8, 2), (256, 128, 8, 1),
    (64, 64, 2, 1), (64, 32, 2, 1),
)  # fmt: skip
# and of float32
_SINGLE = ((32, 32, 4, 2), (64, 32, 4, 1), (64, 32, 8, 1), (32, 64, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1))


def space(shape: Shape, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first; none that needs more LDS than there is."""
    first = default(shape, arch)
    yield first
    seen = {first}
    if "SECTION_MIB" in first:
        # head after head, and what half of the L2 cache holds, or a cache behind it
        for mib in (0, int(arch.l2_mib) // 2, 4 * int(arch.l2_mib)):
            made = Config(**(first.kwargs | {"SECTION_MIB": mib}))
            seen.add(made)
            yield made
    tiles = _SINGLE if shape.bits == 32 else _ON_NVIDIA if arch.vendor == "nvidia" else _ON_AMD
    for tile in [one for one in tiles if _fits(one, shape, arch)]:
        one = _made(shape, arch, tile)
        waves = (0, 2) if "waves_per_eu" in one else ()
        for made in [Config(**(one.kwargs | {"waves_per_eu": n})) for n in waves] or [one]:
            if made not in seen:
                seen.add(made)
                yield made
    if shape.bits != 32 and arch.name in ("gfx942", "gfx950"):
        for tile in [one for one in _WIDE_ON_AMD if _fits(one, shape, arch)]:
            wide = {"waves_per_eu": 2, "matrix_instr_nonkdim": 32}
            made = Config(**(_made(shape, arch, tile).kwargs | wide))
            if made not in seen:
                seen.add(made)
                yield made


def _fits(tile: _Tile, shape: Shape, arch: Arch) -> bool:
    """True if a tile has no more rows than there are queries, and room in LDS and registers."""
    rows, keys, warps, stages = tile
    width = max(16, _layout.power_of_two(shape.head_dim))
    kept = max(1, stages - 1) if arch.vendor == "amd" else stages
    # k and v of the stages, and q
    if width * (2 * kept * keys + rows) * shape.bits // 8 > arch.lds_kib << 10:
        return False
    # sums and scores, at most 160 registers a lane
    sums = rows * (width + keys) <= 160 * warps * arch.wave_size
    return sums and rows <= max(16, _layout.power_of_two(shape.seqlen_q))
