"""The product's configurations where nothing measured is known: reasoned from tile sizes, registers and LDS."""

from __future__ import annotations

from typing import NamedTuple

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch

# rows up to which a product is limited by reading b, and a tile has 16 rows
FEW_ROWS = 16
# most rows of the kernel without matrix instructions
MULTIPLY_ROWS = 8


class Shape(NamedTuple):
    """What a configuration is chosen by. `rows`: of a product, a bucket; `columns`: of the result, of which a gated one
    has half as many as b; `bits`: of an element of a and of b.
    """

    rows: int
    columns: int
    K: int
    a_bits: int
    b_bits: int
    batch: int = 1
    # products are made step by step with scales between them, of at most this many columns; 0: they are not
    step: int = 0
    gated: bool = False
    # contiguous along K, or along the other dimension, and aligned: what tensor descriptors need
    described: bool = False
    # true float32 products
    ieee: bool = False
    # bytes that one access to a and b may have
    access: int = 16
    # a is normalised on its way: one program has all of K
    normed: bool = False
    # columns of a's own width lie behind those of b: one program has all of K too
    tail: bool = False


def in_one_loop(gated: bool, scaled: bool, config: Config) -> bool:
    """True if `_tile_kernel` makes both halves of a gated result in one loop over K, which reads a once.

    Two loops, one after the other, where steps have a scale of their own or are divided.
    """
    return gated and not scaled and config.get("CHAINS", 1) == 1


def _units(arch: Arch | None) -> int:
    return 132 if arch is None else arch.compute_units


def _tiles(shape: Shape, m: int, n: int) -> int:
    return _layout.ceil_div(max(1, shape.rows), m) * _layout.ceil_div(shape.columns, n) * shape.batch


def _splits(tiles: int, steps: int, units: int) -> int:
    """Parts of K so that about two programs a unit run, each with four steps at least."""
    wanted = 2 * units // max(1, tiles)
    return max(1, min(wanted, steps // 4, 16))


def tiled(shape: Shape, arch: Arch | None) -> Config:
    """For `_tile_kernel`."""
    if arch is not None and arch.vendor == "amd":
        return _amd(shape, arch)
    return _nvidia(shape, arch)


def _clamped(shape: Shape, block_k: int) -> int:
    """BLOCK_K within what shares a scale and not much more than K; at least 64 for 4-bit weights, else 32."""
    least = 64 if shape.b_bits == 4 else 32
    block_k = min(block_k, max(least, _layout.power_of_two(shape.K)))
    if shape.step:
        block_k = max(least, min(block_k, shape.step))
    return block_k


def _made(shape: Shape, arch: Arch | None, m: int, n: int, k: int, warps: int, stages: int, **more: int) -> Config:
    if shape.normed:
        # squares take registers beside the sums
        m, n = min(m, 64), min(n, 128)
    k = _clamped(shape, k)
    n = max(16, min(n, _layout.power_of_two(shape.columns)))
    tiles = _tiles(shape, m, n)
    steps = _layout.ceil_div(shape.K, k)
    split = _splits(tiles, steps, _units(arch)) if 0 < shape.rows <= 128 and not shape.normed else 1
    return Config(
        BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=8, SPLIT_K=split, PERSISTENT=0, num_warps=warps, num_stages=stages,
        **({"TMA": 0} | more),
    )  # fmt: skip


def _nvidia(shape: Shape, arch: Arch | None) -> Config:
    wide = max(shape.a_bits, 8)
    if shape.ieee:
        return _made(shape, arch, 16 if 0 < shape.rows <= FEW_ROWS else 64, 64, 32, 4, 3)
    if 0 < shape.rows <= FEW_ROWS:
        return _made(shape, arch, 16, 32 if shape.gated else 64, 2048 // wide, 4, 4)
    if 0 < shape.rows <= 64:
        return _made(shape, arch, 64, 32 if shape.gated else 64, 2048 // wide, 4, 3)
    descriptors = shape.described and arch is not None and arch.name in ("sm_90", "sm_100") and shape.batch == 1
    if shape.gated and descriptors and wide < 32 and not 0 < shape.rows <= 128:
        # both halves: as many sums as of 256 columns
        return _made(shape, arch, 128, 128, 1024 // wide, 8, 4, TMA=1)
    if shape.gated or shape.step or wide == 32 or 0 < shape.rows <= 128:
        return _made(
            shape, arch, 128, 64 if shape.gated else 128, 1024 // wide, 8 if shape.gated or shape.step else 4, 3
        )
    if shape.access < 16:
        return _made(shape, arch, 128, 128, 512 // wide, 8, 2)
    large = _tiles(shape, 128, 256) >= _units(arch)
    n = 256 if large or shape.rows == 0 else 128
    return _made(shape, arch, 128, n, 1024 // wide, 8, 3, TMA=int(descriptors))


def _amd(shape: Shape, arch: Arch) -> Config:
    """LDS holds num_stages − 1 tiles of a and b; gfx942 has 64 KiB, and 512 registers a lane with two waves a SIMD."""
    wide = max(shape.a_bits, 8)
    if arch.wave_size == 32:
        if shape.ieee:
            return _made(shape, arch, 16 if 0 < shape.rows <= FEW_ROWS else 32, 64, 16 * 2, 4, 2)
        if 0 < shape.rows <= FEW_ROWS:
            return _made(shape, arch, 16, 32, 1024 // wide, 2, 2)
        return _made(shape, arch, 64, 32 if shape.gated else 64, 512 // wide, 4, 2)
    more = {"waves_per_eu": 0, "matrix_instr_nonkdim": 16}
    if shape.ieee or wide == 32:
        return _made(shape, arch, 16 if 0 < shape.rows <= FEW_ROWS else 64, 64, 32, 4, 2, **more)
    if 0 < shape.rows <= FEW_ROWS:
        return _made(shape, arch, 16, 32 if shape.gated else 64, 2048 // wide, 4, 2, **more)
    if 0 < shape.rows <= 64:
        return _made(shape, arch, 32, 32 if shape.gated else 64, 2048 // wide, 4, 2, **more)
    if shape.access < 16:
        return _made(shape, arch, 128, 64 if shape.gated else 128, 512 // wide, 8, 2, **more)
    if shape.gated or shape.step or 0 < shape.rows <= 256:
        return _made(shape, arch, 128, 64 if shape.gated or shape.step else 128, 1024 // wide, 8, 2, **more)
    if shape.a_bits == 8 and arch.fp8 is None:
        # gfx90a's int8 instructions are half as wide: 256 × 256 spills
        return _made(shape, arch, 256, 128, 1024 // wide, 8, 2, **more)
    return _made(shape, arch, 256, 256, 1024 // wide, 8, 2, **more)


def stream_k(shape: Shape, arch: Arch | None) -> Config:
    """For `_stream_k_kernel`: the tile of `tiled`, a program a unit."""
    made = dict(tiled(shape._replace(rows=0), arch).kwargs)
    for name in ("SPLIT_K", "PERSISTENT"):
        del made[name]
    if arch is not None and arch.vendor == "amd":
        # two stores and a loop around the tile: 256 × 256 spills on gfx942
        made["BLOCK_N"] = min(128, made["BLOCK_N"])
    return Config(**made, PROGRAMS=1)


def multiplied(shape: Shape, arch: Arch | None) -> Config:
    """For `_multiply_kernel`: 16 bytes of b a thread, threads side by side along K, so that a is laid out alike."""
    wave = 32 if arch is None else arch.wave_size
    warps = 1 if shape.rows > 2 else 2
    block_k = min(warps * wave * 128 // max(shape.b_bits, 8), _layout.power_of_two(shape.K))
    block_n = 4 if shape.rows <= 2 else 2
    tiles = _layout.ceil_div(shape.columns, block_n) * shape.batch
    split = max(1, min(4 * _units(arch) // max(1, tiles), _layout.ceil_div(shape.K, block_k) // 4, 16))
    split = 1 if shape.normed or shape.tail else split
    # on AMD many waves hide the loads; stages would take LDS
    stages = 1 if arch is not None and arch.vendor == "amd" else 3
    if shape.b_bits == 4:
        # a word of 8 codes four times a thread, and whole groups
        block_k = max(shape.step, min(2048, _layout.power_of_two(shape.K)))
        warps = max(1, block_k // (32 * wave))
        return Config(BLOCK_N=4, BLOCK_K=block_k, SPLIT_K=1, num_warps=warps, num_stages=stages)
    return Config(BLOCK_N=block_n, BLOCK_K=block_k, SPLIT_K=split, num_warps=warps, num_stages=stages)
