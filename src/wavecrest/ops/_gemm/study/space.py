"""What `wavecrest tune gemm` tries for a key: configurations by regime, without those that cannot work.

Which tiles are worth trying follows from what limits a product. Up to 16 rows it is reading b: tiles of 16 rows, deep
along K, several programs a unit, K split where there are too few tiles. From some hundred rows on it is the matrix
unit: tiles of 128 × 256 values, which reuse what was loaded the most. In between both matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import wavecrest.ops._gemm.launch as _launch
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._gemm.call import Operands
from wavecrest.ops._gemm.config import FEW_ROWS, Shape, in_one_loop
from wavecrest.ops._gemm.key import shape_of

# registers a lane that sums may take; there are 256 (512 on AMD CDNA, where twice as many threads share a tile)
MOST_SUMS = 128
# registers a lane that sums and weights of `_multiply_kernel` may take
MOST_MULTIPLIED = 200
# parts of K at most
MOST_SPLITS = 16
# what a kernel keeps in shared memory beside tiles (barriers of loads through descriptors)
BESIDE_TILES = 256
# architectures whose matrix unit reads tiles of 64 rows from shared memory, and that load through tensor descriptors
WIDE_UNIT = ("sm_90", "sm_100")


class Tile(NamedTuple):
    """A tile; `k` for operands of 16 bits: half of it for 32, twice for 8."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# programs a unit that K is split for, by regime
FEW_PROGRAMS, SOME_PROGRAMS, MORE_PROGRAMS = (1, 2, 4), (1, 2, 4), (1,)

_NVIDIA_FEW = (
    Tile(16, 16, 256, 2, 4), Tile(16, 16, 512, 4, 3), Tile(16, 32, 128, 2, 5), Tile(16, 32, 128, 4, 6),
    Tile(16, 32, 256, 2, 4), Tile(16, 32, 256, 4, 4), Tile(16, 32, 512, 4, 3), Tile(16, 64, 64, 2, 6),
    Tile(16, 64, 128, 2, 4), Tile(16, 64, 128, 4, 3), Tile(16, 64, 128, 4, 5), Tile(16, 64, 256, 4, 3),
    Tile(16, 64, 256, 8, 3), Tile(16, 128, 64, 4, 6), Tile(16, 128, 128, 4, 4), Tile(16, 128, 128, 8, 4),
)  # fmt: skip
# weights of 8 bits: twice the columns for as many bytes
_NVIDIA_FEW_INT8 = (
    Tile(16, 32, 512, 4, 4), Tile(16, 64, 256, 4, 4), Tile(16, 64, 512, 4, 3), Tile(16, 128, 256, 4, 3),
    Tile(16, 128, 256, 8, 3), Tile(16, 16, 1024, 4, 3), Tile(16, 32, 256, 2, 5),
)  # fmt: skip
# 4-bit codes: a step takes a group of 128 columns at most, so that bytes in flight come from stages and programs
_NVIDIA_FEW_INT4 = (
    Tile(16, 16, 128, 1, 6), Tile(16, 32, 128, 1, 6), Tile(16, 32, 128, 2, 5), Tile(16, 32, 128, 4, 5),
    Tile(16, 32, 64, 2, 6), Tile(16, 64, 128, 2, 5), Tile(16, 64, 128, 4, 4), Tile(16, 64, 128, 4, 6),
    Tile(16, 64, 64, 2, 5), Tile(16, 128, 128, 4, 4), Tile(16, 128, 128, 8, 4), Tile(16, 128, 64, 4, 5),
    Tile(16, 256, 64, 8, 4), Tile(16, 128, 128, 4, 3), Tile(16, 64, 128, 2, 4), Tile(16, 256, 128, 8, 3),
    Tile(16, 128, 128, 2, 4), Tile(16, 256, 128, 4, 3),
)  # fmt: skip
_NVIDIA_32 = (
    Tile(32, 32, 128, 4, 5), Tile(32, 32, 256, 4, 4), Tile(32, 64, 128, 2, 4), Tile(32, 64, 128, 4, 4),
    Tile(32, 64, 256, 4, 3), Tile(32, 128, 64, 4, 5), Tile(32, 128, 128, 4, 3),
)  # fmt: skip
_NVIDIA_64 = (
    Tile(64, 64, 128, 4, 4), Tile(64, 64, 128, 4, 3), Tile(64, 64, 64, 4, 6), Tile(64, 128, 64, 4, 5),
    Tile(64, 128, 128, 4, 4), Tile(64, 128, 128, 4, 3), Tile(64, 32, 128, 4, 4), Tile(64, 32, 256, 4, 3),
    Tile(64, 64, 256, 4, 3), Tile(64, 128, 64, 8, 4), Tile(64, 256, 64, 4, 4),
)  # fmt: skip
_NVIDIA_256 = (
    Tile(128, 128, 64, 4, 4), Tile(128, 128, 64, 8, 4), Tile(64, 128, 128, 4, 3), Tile(64, 256, 64, 4, 4),
    Tile(128, 64, 128, 4, 3), Tile(64, 128, 64, 4, 4), Tile(64, 64, 128, 4, 4), Tile(128, 64, 64, 4, 4),
    Tile(128, 128, 128, 8, 3), Tile(128, 256, 64, 8, 3), Tile(128, 256, 64, 8, 4), Tile(256, 128, 64, 8, 3),
    Tile(64, 128, 64, 4, 3), Tile(64, 128, 64, 4, 6), Tile(256, 64, 64, 8, 4), Tile(64, 128, 128, 4, 4),
)  # fmt: skip
_NVIDIA_MORE = (
    Tile(128, 256, 64, 8, 3), Tile(256, 128, 64, 8, 3), Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 4, 4),
    Tile(128, 128, 64, 8, 4), Tile(64, 256, 64, 4, 4), Tile(256, 128, 64, 8, 4), Tile(128, 128, 128, 8, 3),
    Tile(64, 256, 128, 4, 2), Tile(256, 64, 64, 4, 4), Tile(64, 128, 64, 4, 5), Tile(64, 128, 128, 4, 3),
    Tile(128, 64, 64, 4, 5), Tile(64, 64, 128, 4, 4),
)  # fmt: skip
# twice the registers a value: both halves of a gate, or sums and a step's own that is scaled
_NVIDIA_DOUBLE = (
    Tile(128, 128, 64, 8, 4), Tile(128, 128, 64, 8, 3), Tile(128, 64, 64, 4, 4), Tile(64, 128, 64, 4, 4),
    Tile(256, 64, 64, 8, 4), Tile(64, 256, 64, 8, 4), Tile(128, 128, 128, 8, 3), Tile(128, 64, 64, 8, 4),
    Tile(128, 64, 128, 4, 3), Tile(64, 128, 128, 4, 3), Tile(128, 64, 64, 4, 5), Tile(64, 128, 64, 4, 5),
    Tile(64, 64, 128, 4, 4), Tile(64, 64, 64, 4, 5),
)  # fmt: skip
# without matrix instructions for true float32
_IEEE = (
    Tile(64, 64, 64, 4, 3), Tile(64, 64, 32, 4, 3), Tile(64, 64, 64, 8, 3), Tile(64, 128, 32, 8, 3),
    Tile(128, 64, 32, 8, 3), Tile(128, 128, 32, 8, 3), Tile(32, 64, 64, 4, 3), Tile(16, 64, 64, 4, 3),
    Tile(16, 32, 128, 2, 3), Tile(16, 128, 64, 4, 3),
)  # fmt: skip

_AMD_FEW = (
    Tile(16, 16, 256, 2, 2), Tile(16, 16, 512, 4, 2), Tile(16, 32, 128, 2, 2), Tile(16, 32, 256, 2, 2),
    Tile(16, 32, 256, 4, 2), Tile(16, 32, 512, 4, 2), Tile(16, 64, 128, 2, 2), Tile(16, 64, 128, 4, 2),
    Tile(16, 64, 256, 4, 2), Tile(16, 128, 128, 4, 2), Tile(16, 64, 128, 4, 3),
)  # fmt: skip
_AMD_64 = (
    Tile(32, 64, 128, 4, 2), Tile(32, 32, 256, 4, 2), Tile(32, 64, 256, 4, 2), Tile(32, 128, 128, 4, 2),
    Tile(64, 32, 128, 4, 2), Tile(64, 64, 128, 4, 2), Tile(64, 64, 64, 4, 2), Tile(64, 128, 64, 4, 2),
    Tile(64, 128, 128, 8, 2), Tile(64, 64, 128, 4, 3),
)  # fmt: skip
_AMD_256 = (
    Tile(128, 128, 64, 8, 2), Tile(128, 128, 64, 4, 2), Tile(64, 64, 128, 4, 2), Tile(64, 128, 64, 4, 2),
    Tile(128, 64, 64, 4, 2), Tile(64, 128, 128, 8, 2), Tile(128, 128, 32, 4, 2), Tile(128, 256, 64, 8, 2),
    Tile(256, 128, 64, 8, 2), Tile(128, 128, 64, 8, 3),
)  # fmt: skip
_AMD_MORE = (
    Tile(256, 256, 64, 8, 2), Tile(256, 128, 64, 8, 2), Tile(128, 256, 64, 8, 2), Tile(128, 128, 64, 4, 2),
    Tile(128, 128, 64, 8, 2), Tile(256, 256, 32, 8, 2), Tile(128, 128, 32, 4, 2), Tile(256, 64, 64, 4, 2),
    Tile(256, 256, 32, 8, 3), Tile(128, 256, 32, 8, 3),
)  # fmt: skip
# waves of 32, and tiles of 16 × 16 alone
_RDNA_FEW = (
    Tile(16, 16, 128, 1, 2), Tile(16, 16, 256, 2, 2), Tile(16, 32, 64, 2, 2), Tile(16, 32, 128, 2, 2),
    Tile(16, 32, 128, 4, 2), Tile(16, 64, 64, 2, 2), Tile(16, 64, 64, 4, 2), Tile(16, 64, 128, 4, 2),
    Tile(16, 128, 64, 4, 2),
)  # fmt: skip
_RDNA_MORE = (
    Tile(64, 64, 32, 4, 2), Tile(32, 64, 64, 4, 2), Tile(64, 64, 64, 4, 2), Tile(64, 128, 32, 4, 2),
    Tile(128, 64, 32, 4, 2), Tile(128, 128, 32, 8, 2), Tile(64, 128, 32, 8, 2), Tile(128, 128, 32, 4, 2),
    Tile(32, 32, 64, 2, 2), Tile(64, 32, 64, 4, 2),
)  # fmt: skip

# (columns, products along K of 16 bits, warps) of a program of `_multiply_kernel`
_MULTIPLY = (
    (1, 512, 1), (1, 1024, 2), (1, 2048, 4), (1, 4096, 8), (2, 512, 1), (2, 1024, 2), (2, 1024, 4), (2, 2048, 4),
    (2, 2048, 8), (4, 256, 1), (4, 512, 2), (4, 512, 4), (4, 1024, 4), (4, 1024, 8), (8, 256, 2), (8, 512, 4),
)  # fmt: skip
MULTIPLY_PROGRAMS = (8,)
# (columns, columns of K, warps) of a program of `_words_kernel`
_WORDS = (
    (1, 2048, 2), (2, 1024, 1), (2, 2048, 2), (2, 4096, 4), (4, 1024, 1), (4, 1024, 2), (4, 2048, 2), (4, 2048, 4),
    (4, 4096, 4), (8, 1024, 2), (8, 1024, 4), (8, 2048, 4), (8, 512, 1), (16, 512, 2), (16, 1024, 4),
)  # fmt: skip


def _least_k(shape: Shape) -> int:
    """Columns of K that a step of matrix instructions needs, and that 4-bit codes come in."""
    return 64 if shape.b_bits == 4 else 32 if shape.a_bits == 8 else 16


def _steps_k(tile: Tile, shape: Shape) -> int:
    """BLOCK_K: a tile's for these bits, within what shares a scale, and not much more than K."""
    k = min(tile.k * 16 // max(shape.a_bits, 8), max(32, _layout.power_of_two(shape.K)))
    if shape.step:
        k = min(k, shape.step)
    return max(k, _least_k(shape))


def _splits(shape: Shape, tiles: int, block_k: int, arch: Arch, programs: tuple[int, ...]) -> list[int]:
    """Powers of two of parts of K, so that about so many programs a unit run, each with two steps at least."""
    if shape.normed:
        return [1]
    most = min(MOST_SPLITS, max(1, _layout.ceil_div(shape.K, block_k) // 2))
    found = []
    for wanted in programs:
        parts = 1 << max(0, round(math.log2(max(1.0, wanted * arch.compute_units / max(1, tiles)))))
        while parts > most:
            parts //= 2
        found.append(parts)
    return list(dict.fromkeys(found))


def stages_kept(m: int, warps: int, stages: int, arch: Arch) -> int:
    """Steps of tiles in shared memory: one less than stages, unless the matrix unit reads it while others arrive."""
    wide = arch.name in WIDE_UNIT and m >= 64 and warps % 4 == 0
    return stages if wide else max(1, stages - 1)


def shared_bytes(config: Config, shape: Shape, arch: Arch) -> int:
    """Bytes of LDS or shared memory that a tile configuration takes, about."""
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    halves = 1 + in_one_loop(shape.gated, shape.step > 0, config)
    step = m * k * shape.a_bits // 8 + halves * n * k * shape.b_bits // 8
    kept = stages_kept(m, config["num_warps"], config["num_stages"], arch)
    # a weight of fewer bits is made a's type on its way to the matrix unit
    widened = halves * n * k * shape.a_bits // 8 if shape.b_bits < shape.a_bits and m >= 64 else 0
    # rows that are normalised go back there, rounded
    widened += m * k * shape.a_bits // 8 if shape.normed else 0
    return kept * step + widened + BESIDE_TILES * config.get("TMA", 0)


def sums_a_lane(config: Config, shape: Shape, arch: Arch) -> float:
    """Registers a lane that the sums of a tile take: both halves where gated, and a step's own where it is scaled.

    Squares of rows that are normalised too.
    """
    lanes = config["num_warps"] * arch.wave_size
    squares = config["BLOCK_M"] * config["BLOCK_K"] if shape.normed else 0
    return (config["BLOCK_M"] * config["BLOCK_N"] * (1 + shape.gated) * (1 + (shape.step > 0)) + squares) / lanes


def problem(config: Config, shape: Shape, arch: Arch) -> str | None:
    """Why a configuration of the kernels over tiles cannot work, or does not make sense."""
    k = config["BLOCK_K"]
    if shape.step and (shape.step % k != 0) and not (shape.b_bits == 4 and k == 64):
        return f"a BLOCK_K of {k} takes more than the {shape.step} columns that share a scale"
    if k < _least_k(shape) or (shape.b_bits == 4 and k % 64 != 0):
        return f"a BLOCK_K of {k} is too small for these operands"
    if config["BLOCK_N"] > max(16, _layout.power_of_two(shape.columns)):
        return f"a BLOCK_N of {config['BLOCK_N']} is wider than {shape.columns} columns"
    if config.get("TMA", 0) and not (shape.described and arch.name in WIDE_UNIT):
        return "has no tensor descriptors here"
    chains = config.get("CHAINS", 1)
    if chains > 1 and (shape.step or config.get("TMA", 0) or k // chains < max(64, _least_k(shape))):
        return f"divides no step of {k} columns into {chains}"
    if shape.normed and (chains > 1 or config.get("SPLIT_K", 1) > 1 or config.get("PERSISTENT", 0)):
        return "normalises in one sum of a program of its own"
    if chains > 1 and config["BLOCK_N"] > 16 * config["num_warps"]:
        return "has independent sums enough"
    if config.get("matrix_instr_nonkdim", 16) > min(config["BLOCK_M"], config["BLOCK_N"]):
        return "the matrix instruction is larger than the tile"
    needed = shared_bytes(config, shape, arch)
    if needed > arch.lds_kib << 10:
        return f"takes {needed} bytes of shared memory, of {arch.lds_kib << 10}"
    sums = sums_a_lane(config, shape, arch)
    return f"its sums take {sums:.0f} registers a lane, of {MOST_SUMS}" if sums > MOST_SUMS else None


def multiply_problem(config: Config, shape: Shape, arch: Arch) -> str | None:
    """Why a configuration of `_multiply_kernel` cannot work."""
    each = config["BLOCK_N"] * config["BLOCK_K"] / (config["num_warps"] * arch.wave_size)
    if shape.b_bits == 4:
        # the codes of a word are made one after another
        each = each / 8
    if each < 1:
        return "has less than one product a lane"
    if (shape.normed or shape.tail) and config["SPLIT_K"] > 1:
        return "has all of K in one program"
    taken = each * (max(1, shape.rows) + 1) * (1 + shape.gated)
    if shape.normed:
        # squares, one row of them for all columns
        taken += config["BLOCK_K"] / (config["num_warps"] * arch.wave_size) * max(1, shape.rows)
    if taken > MOST_MULTIPLIED:
        return f"its sums and weights take {taken:.0f} registers a lane, of {MOST_MULTIPLIED}"
    return None


def _regime(shape: Shape, arch: Arch) -> tuple[tuple[Tile, ...], tuple[int, ...]]:
    """Tiles, and programs a unit to split K for."""
    rows = shape.rows
    few, some = 0 < rows <= FEW_ROWS, 0 < rows <= 64
    programs = FEW_PROGRAMS if few else SOME_PROGRAMS if 0 < rows <= 256 else MORE_PROGRAMS
    if shape.ieee:
        return tuple(tile for tile in _IEEE if not few or tile.m == 16), programs
    if arch.wave_size == 32 and arch.vendor == "amd":
        return (_RDNA_FEW if few else _RDNA_MORE), programs
    if arch.vendor == "amd":
        return (_AMD_FEW if few else _AMD_64 if some else _AMD_256 if 0 < rows <= 256 else _AMD_MORE), programs
    if few:
        if shape.b_bits == 4:
            return _NVIDIA_FEW_INT4, (1, 2, 4, 8)
        return (_NVIDIA_FEW_INT8 + _NVIDIA_FEW if shape.b_bits == 8 < shape.a_bits else _NVIDIA_FEW), programs
    if 0 < rows <= 32:
        return _NVIDIA_32 + _NVIDIA_64[:6], programs
    if some:
        return _NVIDIA_64, programs
    if shape.gated or shape.step:
        return _NVIDIA_DOUBLE, programs
    return (_NVIDIA_256 if 0 < rows <= 256 else _NVIDIA_MORE), programs


def _variants(index: int, few: bool, arch: Arch, described: bool) -> list[dict[str, int]]:
    """What is tried of a regime's index-th tile beside its sizes: the first ones are the likeliest, and get more."""
    first = {"GROUP_M": 8, "PERSISTENT": 0, "TMA": 0}
    if arch.vendor == "amd":
        if arch.wave_size == 32:
            return [first]
        first |= {"matrix_instr_nonkdim": 16, "waves_per_eu": 0}
        found = [first]
        if few:
            return [*found, first | {"waves_per_eu": 2}] if index < 4 else found
        found.append(first | {"matrix_instr_nonkdim": 32})
        if index < 3:
            found += [first | more for more in ({"waves_per_eu": 2}, {"GROUP_M": 4}, {"GROUP_M": 16})]
        return [*found, first | {"PERSISTENT": 1}] if index < 2 else found
    if few:
        # a warp with few columns waits for each of its sums: more of them, where there is K to divide
        return [first, *(first | {"CHAINS": chains} for chains in (2, 4))]
    best = first | {"TMA": int(described)}
    found = [best]
    if described and index < 4:
        found.append(first)
    if index < 3:
        found += [best | {"PERSISTENT": 1}, best | {"GROUP_M": 4}, best | {"GROUP_M": 16}]
    return found


def tiled(shape: Shape, arch: Arch) -> Iterator[Config]:
    """For `_tile_kernel`."""
    tiles, programs = _regime(shape, arch)
    few = 0 < shape.rows <= FEW_ROWS
    described = shape.described and arch.name in WIDE_UNIT
    for index, tile in enumerate(tiles):
        k = _steps_k(tile, shape)
        count = _layout.ceil_div(max(1, shape.rows), tile.m) * _layout.ceil_div(shape.columns, tile.n) * shape.batch
        # rows of 0 are any number of rows
        splits = _splits(shape, count, k, arch, programs) if shape.rows else [1]
        for position, split in enumerate(splits):
            for more in _variants(index, few, arch, described)[: None if position == 0 else 1]:
                if split > 1 and more["PERSISTENT"]:
                    continue
                yield Config(
                    BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=k, SPLIT_K=split, num_warps=tile.warps,
                    num_stages=tile.stages, **more,
                )  # fmt: skip


def stream_k(shape: Shape, arch: Arch) -> Iterator[Config]:
    """For `_stream_k_kernel`: some tiles of the regime, with one or more programs a unit."""
    tiles, _ = _regime(shape, arch)
    few = 0 < shape.rows <= FEW_ROWS
    described = shape.described and arch.name in WIDE_UNIT
    for index, tile in enumerate(tiles[3::4] if few else tiles[:5]):
        # two stores and a loop around the tile take registers
        if arch.vendor == "amd" and tile.m * tile.n > 128 * 256:
            continue
        more = {
            name: value for name, value in _variants(index, few, arch, described)[0].items() if name != "PERSISTENT"
        }
        for programs in (1, 2, 4) if few else (1, 2):
            yield Config(
                BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=_steps_k(tile, shape), PROGRAMS=programs,
                num_warps=tile.warps, num_stages=tile.stages, **more,
            )  # fmt: skip


def multiplied(shape: Shape, arch: Arch) -> Iterator[Config]:
    """For `_multiply_kernel` and `_words_kernel`: steps loaded ahead, or more programs a unit instead."""
    stages_tried = (1, 3, 4) if arch.vendor == "nvidia" else (1, 2)
    if shape.b_bits == 4:
        for n, k, warps in _WORDS:
            block_k = max(shape.step, min(k, _layout.power_of_two(shape.K)))
            for stages in stages_tried:
                yield Config(BLOCK_N=n, BLOCK_K=block_k, SPLIT_K=1, num_warps=warps, num_stages=stages)
        return
    for n, k, warps in _MULTIPLY:
        block_k = min(k * 16 // max(shape.b_bits, 8), _layout.power_of_two(shape.K))
        count = _layout.ceil_div(shape.columns, n) * shape.batch
        for split in _splits(shape, count, block_k, arch, MULTIPLY_PROGRAMS):
            for stages in stages_tried:
                yield Config(BLOCK_N=n, BLOCK_K=block_k, SPLIT_K=split, num_warps=warps, num_stages=stages)


def _many_programs(config: Config, shape: Shape, arch: Arch) -> str | None:
    """As `problem`; stream-K also needs room for all its programs at once, or they run one after another."""
    needed = config["PROGRAMS"] * shared_bytes(config, shape, arch)
    if needed > arch.lds_kib << 10 and config["PROGRAMS"] > 1:
        return f"{config['PROGRAMS']} programs a unit take {needed} bytes of shared memory"
    return problem(config, shape, arch)


Made = Callable[[Shape, Arch], Iterator[Config]]
Judged = Callable[[Config, Shape, Arch], str | None]
# by backend: what is tried, and what keeps a configuration out
SPACES: dict[str, tuple[Made, Judged]] = {
    "triton": (tiled, problem),
    "triton_stream_k": (stream_k, _many_programs),
    "triton_multiply": (multiplied, multiply_problem),
}


def space(backend: str, default: Callable[[Shape, Arch | None], Config], key: Key, arch: Arch) -> Iterator[Config]:
    """The configurations of a backend worth trying for a key, each once, the default first; see `Backend`."""
    shape = shape_of(key)
    make, judge = SPACES[backend]
    first = default(shape, arch)
    yield first
    seen = {first}
    for config in make(shape, arch):
        if config not in seen and judge(config, shape, arch) is None:
            seen.add(config)
            yield config


def launches(planner: _launch.Planner, *args: Any, config: Config, arch: Arch) -> list[_launcher.Launch]:
    """The launches of a call, as `launch.bind` makes them; see `Backend`."""
    given = Operands(*args)
    if math.prod(given.shape) == 0:
        return []
    y = given.a.new_empty(0, dtype=given.dtype)
    sums = given.a.new_empty(0, dtype=_launch.partial_dtype(given))
    tma = _launch.with_descriptors(given, config)
    plan = planner(given, y, sums, config, arch, tma)
    if plan.parts is None:
        # a call without partial sums passes the result in their place
        plan = planner(given, y, y, config, arch, tma)
    return [plan.first] if plan.second is None else [plan.first, plan.second]
