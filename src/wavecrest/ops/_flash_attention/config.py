"""The kernel's configurations where nothing measured is known: reasoned from registers and LDS."""

from __future__ import annotations

from typing import NamedTuple

import torch

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._flash_attention.call import KEY_FIELDS
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


def shape_of(key: Key) -> Shape:
    """The parts of a key that a configuration depends on."""
    part = dict(zip(KEY_FIELDS, key, strict=True))
    words = part["dtype"].split()
    bits = 32 if words[0] in ("float32", "float64") else 16 if words[0] in ("float16", "bfloat16") else 8
    dropout = "dropout" in words
    more = [part["bias"] is not None, part["alibi"], part["softcap"] == 1, part["left"] >= 0, dropout].count(True)
    kv_dtype = words[0] if bits == 8 else words[2] if "kv" in words else None
    return Shape(
        part["queries"],
        max(part["d"], part["dv"]),
        bits,
        part["right"] >= 0,
        more,
        kv_dtype,
        dropout,
        part["left"] >= 0,
    )


# BLOCK_M, BLOCK_N, num_warps, num_stages
Tile = tuple[int, int, int, int]


def _nvidia(shape: Shape) -> Tile:
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


def _cdna(shape: Shape, arch: Arch) -> Tile:
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
        return 128, 64, 4, 2 if shape.head_dim <= 64 else 1
    # sums alone would be 128 registers of 32 rows a wave
    return 64, 32, 8, 2


def _rdna(shape: Shape, arch: Arch) -> Tile:
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


def made_of(shape: Shape, arch: Arch | None, tile: Tile, matrix: int = 16) -> Config:
    """The configuration of a tile. `matrix`: rows of a matrix instruction, where a program has 128 rows in 4 waves."""
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
        return made_of(shape, arch, _nvidia(shape))
    if arch.wave_size == 64:
        return made_of(shape, arch, _cdna(shape, arch), 32 if _wide_matrix(shape, arch) else 16)
    return made_of(shape, arch, _rdna(shape, arch))
