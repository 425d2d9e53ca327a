"""The kernels' configurations where nothing measured is known."""

from __future__ import annotations

from typing import NamedTuple

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch

# keys of a split where the batch must not change a result's bits
INVARIANT_CHUNK = 1024
# programs a compute unit that the keys are split for: those that run at once
PROGRAMS = {"nvidia": 4, "amd": 8}
# on NVIDIA, where one program a multiprocessor reads all keys or nearly: it has tiles twice as large, and what joins
# splits has less to do. H100, 2026-11-28, 32 heads over 8, D = 128, bfloat16, µs with and without: 1 x 2,176 keys 14.6,
# 15.3; 16 x 2,176 53.1, 62.0; 32 x 1,152 57.0, 57.8 (evidence/nvidia-h100/2026-11-28_tune_decode.jsonl.gz, the quick
# round)
FEW_PROGRAMS = 2
# keys of one split, for any number of sequences: without a limit all wait for the longest. One H200, 2026-11-22, 64
# sequences of 8,192 keys: whole ones 497 µs, splits of 2,048 503 µs; of 256 to 8,192 keys 340 µs and 301 µs
LEAST_CHUNK, MOST_CHUNK = 128, 2048


class Shape(NamedTuple):
    """Parts of a call that a configuration depends on.

    `pairs`: sequences times heads of the cache, 0 for any number of them; `page`: tokens of a page, 0 without pages;
    `cache`: its dtype's name; `more`: the number of operations on scores (slopes, softcap, a window's left edge),
    which take registers; `groups`: groups of a row, for a cache in 4 bits.
    """

    pairs: int
    rows: int
    capacity: int
    page: int
    head_dim: int
    q_bits: int
    cache: str
    more: int
    groups: int = 0

    @property
    def kv_bits(self) -> int:
        """Bits of an element of the cache."""
        return {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "uint8": 4}.get(self.cache, 8)


# BLOCK_N, num_warps, num_stages
_Tile = tuple[int, int, int]


def _nvidia(shape: Shape, rows: int, width: int, few: bool) -> _Tile:
    """4 KiB of k a warp and step, three steps under way: what hides the way to memory. Warps share a step's keys.

    Two warps where their registers hold the sums, and there are not `few` programs; in pages a step more, as the
    numbers of pages take one.
    """
    if shape.q_bits == 32:
        # without matrix units: each thread multiplies its part from registers
        return (16, 8, 2) if rows <= 16 else (16, 16, 2)
    warps = 2 if rows == 16 and width <= 128 and shape.groups < 2 and not few else 4
    keys = 4096 * warps * 8 // (width * shape.kv_bits)
    # 8 bits are widened in registers, 16 KiB of them into 32
    keys = min(keys, 64 if shape.kv_bits <= 8 or width == 256 else 128)
    if shape.kv_bits == 4 and rows > 16:
        # and 4 bits into four tiles, beside scores of more rows
        keys = min(keys, 16)
    return keys, warps, 4 if shape.page > 0 else 3


def _cdna(shape: Shape, rows: int, width: int) -> _Tile:
    """A wave for each 16 rows: triton 3.6 lets waves beyond that repeat the first product, and widen k again each.

    8 KiB of k and of v a wave and step are 64 registers of what is loaded; with sums and scores two waves a SIMD are
    left, and so 8 tiles a compute unit under way (gfx942, D = 128: 429 instructions for 32 keys; two waves 304 each).
    """
    waves = rows // 16
    if shape.q_bits == 32:
        return (16, waves, 1) if width <= 128 else (16, 2 * waves, 1)
    if width == 256:
        # sums alone are 64 registers of one wave
        return 32, 2 * waves, 1
    keys = 32 if width == 128 else 64
    if shape.groups > 1:
        # a scale and a shift for each byte: one wave has no scalar registers for what it keeps (gfx942: 12 too few)
        return keys // 2, 2 * waves, 1
    # scales and shifts of keys in small pages have an address each
    crowded = shape.kv_bits == 4 and shape.page % 16 != 0
    # a mask takes two scalar registers for each element of a lane, and there are about 100 scalar registers
    return keys // 2 if shape.more or crowded else keys, waves, 1


def _rdna(shape: Shape, rows: int, width: int) -> _Tile:
    """Two waves for each 16 rows: one lane of 32 holds twice of what one of 64 does.

    On gfx11 each half of a wave holds the operands of all of it.
    """
    waves = rows // 16
    if shape.q_bits == 32:
        # without matrix instructions for it
        return 16, 16, 1
    if width == 256:
        return 16, 4 * waves, 1
    # widened values take registers beside the loaded ones, four times as many with 4 bits
    return 16 if shape.kv_bits == 4 else 32, (4 if shape.kv_bits <= 8 and rows > 16 else 2) * waves, 1


def _chunk(shape: Shape, units: int, programs: int) -> int:
    """Keys of a split with this number of programs a compute unit; `shape` has pairs."""
    splits = max(1, programs * units // shape.pairs)
    return _layout.power_of_two(min(MOST_CHUNK, max(LEAST_CHUNK, _layout.ceil_div(shape.capacity, splits))))


def _programs(shape: Shape, units: int) -> float:
    """Programs a compute unit where keys are split for one; infinite where the number of pairs is not known."""
    if shape.pairs == 0:
        return float("inf")
    return shape.pairs * _layout.ceil_div(shape.capacity, _chunk(shape, units, 1)) / units


def default(shape: Shape, arch: Arch | None) -> Config:
    """Tiles of as many rows as there are queries; keys are split until every compute unit has some programs."""
    rdna = arch is not None and arch.vendor == "amd" and arch.wave_size == 32
    # float32 has no matrix instructions there: sums of more rows have no room
    most = 16 if rdna and shape.q_bits == 32 else 64
    rows = max(16, min(most, _layout.power_of_two(shape.rows)))
    width = max(16, _layout.power_of_two(shape.head_dim))
    units = 132 if arch is None else arch.compute_units
    nvidia = arch is None or arch.vendor == "nvidia"
    few = nvidia and shape.kv_bits == 16 and rows == 16 and width <= 128 and _programs(shape, units) <= FEW_PROGRAMS
    if nvidia:
        keys, warps, stages = _nvidia(shape, rows, width, few)
    else:
        keys, warps, stages = _rdna(shape, rows, width) if rdna else _cdna(shape, rows, width)
    # within one page, where pages are multiples of a tile that matrix units take: its number is then loaded once
    divides = shape.page & -shape.page
    keys = min(keys, divides) if divides >= 16 else keys
    chunk = INVARIANT_CHUNK
    if shape.pairs > 0:
        chunk = _chunk(shape, units, 1 if few else PROGRAMS["nvidia" if arch is None else arch.vendor])
    return Config(BLOCK_M=rows, BLOCK_N=keys, CHUNK=max(chunk, keys), num_warps=warps, num_stages=stages)
