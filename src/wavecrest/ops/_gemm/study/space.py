"""Candidates of `wavecrest tune gemm` for a key: configurations by regime, without those that cannot work.

Which tiles are worth trying follows from what limits a GEMM. Up to 16 rows it is reading b: tiles of 16 rows, deep
along K, several programs a unit, K split where there are too few tiles. From some hundred rows on it is the matrix
unit: tiles of 128 × 256 values, which reuse what was loaded the most. In between both matter. The tiles are data:
`dispatch/tuned/spaces/gemm.toml`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

import wavecrest.ops._gemm.launch as _launch
import wavecrest.ops._gemm.launch_cdna as _cdna
import wavecrest.ops._gemm.launch_hopper as _hopper
import wavecrest.ops._gemm.launch_hopper_blocks as _blocks
import wavecrest.ops._gemm.launch_hopper_words as _words
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config
from wavecrest.dispatch.tuned import spaces as _spaces
from wavecrest.hardware import Arch
from wavecrest.ops._gemm.call import SCALE_BLOCK, GemmCall
from wavecrest.ops._gemm.config import (
    FEW_ROWS,
    Shape,
    cdna,
    cdna_step,
    hopper,
    hopper_blocks,
    hopper_blocks_of,
    hopper_epilogue,
    hopper_words,
    hopper_words_of,
    in_one_loop,
)  # fmt: skip
from wavecrest.ops._gemm.key import shape_of

# registers a lane that sums may take; there are 256 (512 on AMD CDNA, where twice as many threads share a tile)
MOST_SUMS = 128
# registers a lane that sums and weights of the GEMV kernels may take
MOST_GEMV = 200
# parts of K at most
MOST_SPLITS = 16
# bytes that a kernel keeps in shared memory beside tiles (barriers of loads through descriptors)
BESIDE_TILES = 256
# and `_hopper_gemm_kernel`: barriers, and what Triton hands from group to group
BESIDE_HOPPER_TILES = 1024
# rows up to which `triton_hopper_blocks` is limited by reading b
FEW_BLOCK_ROWS = 128
# architectures whose matrix unit reads tiles of 64 rows from shared memory, and that load through tensor descriptors
WIDE_UNIT = ("sm_90", "sm_100")


class Tile(NamedTuple):
    """A tile; `k` is that of operands of 16 bits: half of it for 32 bits, twice for 8."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


# programs a unit that K is split for, by regime
FEW_PROGRAMS, SOME_PROGRAMS, MORE_PROGRAMS = (1, 2, 4), (1, 2, 4), (1,)

# programs a unit that K is split for by the GEMV kernel
GEMV_PROGRAMS = (8,)


def _tiles(name: str) -> tuple[Tile, ...]:
    """The tiles of a regime."""
    return tuple([Tile(*row) for row in _spaces.rows("gemm")["tiles"][name]])


def _least_k(shape: Shape) -> int:
    """Columns of K that a step of matrix instructions needs, and that 4-bit values are packed by."""
    return 64 if shape.b_bits == 4 else 32 if shape.a_bits == 8 else 16


def _steps_k(tile: Tile, shape: Shape) -> int:
    """BLOCK_K: a tile's for these bits, within what shares a scale, and not much more than K."""
    k = min(tile.k * 16 // max(shape.a_bits, 8), max(32, _layout.power_of_two(shape.K)))
    if shape.step:
        k = min(k, shape.step)
    return max(k, _least_k(shape))


def _splits(shape: Shape, tiles: int, block_k: int, arch: Arch, programs: tuple[int, ...]) -> list[int]:
    """Powers of two of parts of K: about as many programs a unit as `programs` says, each with two steps at least."""
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
    halves = 1 + in_one_loop(shape.gated, shape.step > 0 or shape.b_bits == 4, config)
    step = m * k * shape.a_bits // 8 + halves * n * k * shape.b_bits // 8
    kept = stages_kept(m, config["num_warps"], config["num_stages"], arch)
    # a weight of fewer bits is widened to a's type before the matrix unit reads it
    widened = halves * n * k * shape.a_bits // 8 if shape.b_bits < shape.a_bits and m >= 64 else 0
    # rows that are normalised go back there, rounded
    widened += m * k * shape.a_bits // 8 if shape.normed else 0
    return kept * step + widened + BESIDE_TILES * config.get("TMA", 0)


def sums_a_lane(config: Config, shape: Shape, arch: Arch) -> float:
    """Registers a lane that the sums of a tile take: both halves where gated, and a step's own where it is scaled.

    Squares of rows that are normalised too, and the sums that sm_90's matrix unit may not add to the others by itself.
    """
    lanes = config["num_warps"] * arch.wave_size
    squares = config["BLOCK_M"] * config["BLOCK_K"] if shape.normed else 0
    sums = (1 + shape.gated) * (1 + (shape.step > 0))
    if shape.unit_sums and not shape.step and arch.name == "sm_90":
        sums += 1
    return (config["BLOCK_M"] * config["BLOCK_N"] * sums + squares) / lanes


def problem(config: Config, shape: Shape, arch: Arch) -> str | None:
    """Why a configuration of the kernels over tiles cannot work, or does not make sense."""
    k = config["BLOCK_K"]
    if shape.step and (shape.step % k != 0) and not (shape.b_bits == 4 and k == 64):
        return f"a BLOCK_K of {k} takes more than the {shape.step} columns that share a scale"
    if k < _least_k(shape) or (shape.b_bits == 4 and k % 64 != 0):
        return f"a BLOCK_K of {k} is too small for these operands"
    if config["BLOCK_N"] > max(16, _layout.power_of_two(shape.columns)):
        return f"a BLOCK_N of {config['BLOCK_N']} is wider than {shape.columns} columns"
    if config.get("TMA", 0) and not (shape.has_descriptors and arch.name in WIDE_UNIT):
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


def gemv_problem(config: Config, shape: Shape, arch: Arch) -> str | None:
    """Why a configuration of the GEMV kernels cannot work."""
    each = config["BLOCK_N"] * config["BLOCK_K"] / (config["num_warps"] * arch.wave_size)
    if shape.b_bits == 4:
        # the values of a word are unpacked one after another
        each = each / 8
    if each < 1:
        return "has less than one product a lane"
    if (shape.normed or shape.tail) and config["SPLIT_K"] > 1:
        return "has all of K in one program"
    taken = each * (max(1, shape.rows) + 1) * (1 + shape.gated)
    if shape.normed:
        # squares, one row of them for all columns
        taken += config["BLOCK_K"] / (config["num_warps"] * arch.wave_size) * max(1, shape.rows)
    if taken > MOST_GEMV:
        return f"its sums and weights take {taken:.0f} registers a lane, of {MOST_GEMV}"
    return None


def _regime(shape: Shape, arch: Arch) -> tuple[tuple[Tile, ...], tuple[int, ...]]:
    """Tiles, and programs a unit to split K for."""
    rows = shape.rows
    few, some = 0 < rows <= FEW_ROWS, 0 < rows <= 64
    programs = FEW_PROGRAMS if few else SOME_PROGRAMS if 0 < rows <= 256 else MORE_PROGRAMS
    if shape.ieee:
        return tuple(tile for tile in _tiles("ieee") if not few or tile.m == 16), programs
    if arch.vendor == "amd" and arch.wave_size == 32:
        return _tiles("rdna_few" if few else "rdna_more"), programs
    if arch.vendor == "amd":
        return _tiles(
            "amd_few" if few else "amd_64" if some else "amd_256" if 0 < rows <= 256 else "amd_more"
        ), programs
    if few and shape.b_bits == 4:
        return _tiles("nvidia_few_int4"), (1, 2, 4, 8)
    if few:
        wider = _tiles("nvidia_few_int8") if shape.b_bits == 8 < shape.a_bits else ()
        return wider + _tiles("nvidia_few"), programs
    if 0 < rows <= 32:
        return _tiles("nvidia_32") + _tiles("nvidia_64")[:6], programs
    if some:
        return _tiles("nvidia_64"), programs
    if shape.gated or shape.step or (shape.unit_sums and arch.name == "sm_90"):
        return _tiles("nvidia_double"), programs
    return _tiles("nvidia_256" if 0 < rows <= 256 else "nvidia_more"), programs


def _variants(index: int, few: bool, arch: Arch, has_descriptors: bool) -> list[dict[str, int]]:
    """Options to try with a regime's index-th tile: the first tiles are the likeliest, so they get more options."""
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
    best = first | {"TMA": int(has_descriptors)}
    found = [best]
    if has_descriptors and index < 4:
        found.append(first)
    if index < 3:
        found += [best | {"PERSISTENT": 1}, best | {"GROUP_M": 4}, best | {"GROUP_M": 16}]
    return found


def tiled(shape: Shape, arch: Arch) -> Iterator[Config]:
    """For `_tile_kernel`."""
    tiles, programs = _regime(shape, arch)
    few = 0 < shape.rows <= FEW_ROWS
    has_descriptors = shape.has_descriptors and arch.name in WIDE_UNIT
    for index, tile in enumerate(tiles):
        k = _steps_k(tile, shape)
        count = _layout.ceil_div(max(1, shape.rows), tile.m) * _layout.ceil_div(shape.columns, tile.n) * shape.batch
        # rows of 0 are any number of rows
        splits = _splits(shape, count, k, arch, programs) if shape.rows else [1]
        for position, split in enumerate(splits):
            for more in _variants(index, few, arch, has_descriptors)[: None if position == 0 else 1]:
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
    has_descriptors = shape.has_descriptors and arch.name in WIDE_UNIT
    for index, tile in enumerate(tiles[3::4] if few else tiles[:5]):
        # two stores and a loop around the tile take registers
        if arch.vendor == "amd" and tile.m * tile.n > 128 * 256:
            continue
        more = {
            name: value
            for name, value in _variants(index, few, arch, has_descriptors)[0].items()
            if name != "PERSISTENT"
        }
        for programs in (1, 2, 4) if few else (1, 2):
            yield Config(
                BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=_steps_k(tile, shape), PROGRAMS=programs,
                num_warps=tile.warps, num_stages=tile.stages, **more,
            )  # fmt: skip


def gemv(shape: Shape, arch: Arch) -> Iterator[Config]:
    """Configurations of `_multiply_kernel` and `_words_kernel`: more steps loaded ahead, or more programs a unit."""
    stages_tried = (1, 3, 4) if arch.vendor == "nvidia" else (1, 2)
    if shape.b_bits == 4:
        for n, k, warps in _spaces.rows("gemm")["gemv"]["int4"]:
            block_k = max(64, shape.step, min(k, _layout.power_of_two(shape.K)))
            for stages in stages_tried:
                yield Config(BLOCK_N=n, BLOCK_K=block_k, SPLIT_K=1, num_warps=warps, num_stages=stages)
        return
    for n, k, warps in _spaces.rows("gemm")["gemv"]["plain"]:
        block_k = min(k * 16 // max(shape.b_bits, 8), _layout.power_of_two(shape.K))
        count = _layout.ceil_div(shape.columns, n) * shape.batch
        for split in _splits(shape, count, block_k, arch, GEMV_PROGRAMS):
            for stages in stages_tried:
                yield Config(BLOCK_N=n, BLOCK_K=block_k, SPLIT_K=split, num_warps=warps, num_stages=stages)


def _many_programs(config: Config, shape: Shape, arch: Arch) -> str | None:
    """As `problem`; and all programs of a unit need room at once, or they run one after another."""
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
    "triton_gemv": (gemv, gemv_problem),
}


def space(backend: str, default: Callable[[Shape, Arch | None], Config], key: Key, arch: Arch) -> Iterator[Config]:
    """The configurations of a backend worth trying for a key, each once, the default first; see `KernelStudy`."""
    shape = shape_of(key)
    make, judge = SPACES[backend]
    first = default(shape, arch)
    yield first
    seen = {first}
    for config in make(shape, arch):
        if config not in seen and judge(config, shape, arch) is None:
            seen.add(config)
            yield config


def launches(planner: _launch.Planner, call: GemmCall, config: Config, arch: Arch) -> list[_launcher.Launch]:
    """The launches of a call, as `launch.bind` makes them; see `KernelStudy`."""
    if math.prod(call.shape) == 0:
        return []
    y = call.a.new_empty(0, dtype=call.dtype)
    sums = call.a.new_empty(0, dtype=_launch.partial_dtype(call))
    tma = _launch.with_descriptors(call, config)
    plan = planner(call, y, sums, config, arch, tma)
    if plan.parts is None:
        # a call without partial sums passes the result in their place
        plan = planner(call, y, y, config, arch, tma)
    return [plan.first] if plan.second is None else [plan.first, plan.second]


def hopper_space(_key: Key, arch: Arch) -> Iterator[Config]:
    """The configurations of `triton_hopper` worth trying, the default first."""
    for row in _spaces.rows("gemm")["hopper"]["tiles"]:
        config = hopper(*row)
        if hopper_shared_bytes(config) <= arch.lds_kib << 10:
            yield config


def epilogue_space(_key: Key, arch: Arch) -> Iterator[Config]:
    """The configurations of `triton_hopper_epilogue` worth trying, the default first."""
    for row in _spaces.rows("gemm")["hopper"]["epilogue"]:
        config = hopper_epilogue(*row)
        # beside two parts of a residual
        if hopper_shared_bytes(config, halves=2) + 4 * 64 * 64 <= arch.lds_kib << 10:
            yield config


def hopper_shared_bytes(config: Config, halves: int = 1) -> int:
    """Shared memory of a program: tiles of each stage, and `halves` of the result or its sums (the epilogue's: 2)."""
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    return 2 * (config["STAGES"] * (m + 2 * n) * k + halves * m * n) + BESIDE_HOPPER_TILES


def hopper_launches(call: GemmCall, config: Config, arch: Arch) -> list[_launcher.Launch]:
    """The launch of a call on `triton_hopper`; see `KernelStudy`."""
    if math.prod(call.shape) == 0:
        return []
    return [_hopper.launch(call, torch.empty(call.shape, dtype=call.dtype, device="meta"), config, arch)]


def epilogue_launches(call: GemmCall, config: Config, arch: Arch) -> list[_launcher.Launch]:
    """The launch of a call on `triton_hopper_epilogue`; see `KernelStudy`."""
    if math.prod(call.shape) == 0:
        return []
    return [_hopper.launch_epilogue(call, torch.empty(call.shape, dtype=call.dtype, device="meta"), config, arch)]


def blocks_space(key: Key, arch: Arch) -> Iterator[Config]:
    """The configurations of `triton_hopper_blocks` worth trying for a key, the default first."""
    shape = shape_of(key)
    few = 0 < shape.rows <= FEW_BLOCK_ROWS
    rows = _spaces.rows("gemm")["hopper_blocks"]["few" if few else "gated" if shape.gated else "more"]
    seen: set[Config] = set()
    for config in (hopper_blocks_of(shape, arch), *(hopper_blocks(*row) for row in rows)):
        if few and config["SPLIT_K"] > max(1, _layout.ceil_div(shape.K, SCALE_BLOCK) // 2):
            continue
        # gate and up are the two halves of a tile
        made = Config(**(config.kwargs | {"HALVES": 2})) if shape.gated else config
        if made not in seen and blocks_shared_bytes(made) <= arch.lds_kib << 10:
            seen.add(made)
            yield made


def blocks_shared_bytes(config: Config) -> int:
    """Shared memory of a program of `triton_hopper_blocks`: tiles of each stage, and of a result of 16 bits."""
    m, n = 64 * config["GROUPS"], config["BLOCK_N"]
    result = 2 * m * n if config["SPLIT_K"] == 1 else 0
    return config["STAGES"] * (m + config["HALVES"] * n) * SCALE_BLOCK + result + BESIDE_HOPPER_TILES


def blocks_launches(call: GemmCall, config: Config, arch: Arch) -> list[_launcher.Launch]:
    """The launches of a call on `triton_hopper_blocks`; see `KernelStudy`."""
    if math.prod(call.shape) == 0:
        return []
    y = torch.empty(call.shape, dtype=call.dtype, device="meta")
    parts = _blocks.parts(call, config)
    return _blocks.launches(call, y, y if parts is None else y.new_empty(parts, dtype=torch.float32), config, arch)


def words_space(key: Key, arch: Arch) -> Iterator[Config]:
    """The configurations of `triton_hopper_words` worth trying for a key, the default first."""
    shape, spaces = shape_of(key), _spaces.rows("gemm")["hopper"]
    rows = [*spaces["words"], *(spaces["row"] if shape.rows == 1 and shape.K <= _words.LONGEST else [])]
    yield from dict.fromkeys((hopper_words_of(shape, arch), *(hopper_words(*row) for row in rows)))


def words_launches(call: GemmCall, config: Config, arch: Arch) -> list[_launcher.Launch]:
    """The launches of a call on `triton_hopper_words`; see `KernelStudy`."""
    if math.prod(call.shape) == 0:
        return []
    digits = torch.empty(_words.size_of_digits(call), dtype=torch.int8, device="meta")
    return _words.launches(call, digits, torch.empty(call.shape, dtype=call.dtype, device="meta"), config, arch)


def cdna_space(key: Key, arch: Arch) -> Iterator[Config]:
    """The configurations of `triton_cdna` worth trying, the default first."""
    step = cdna_step(shape_of(key).a_bits, arch)
    for matrix, group in _spaces.rows("gemm")["cdna"]["tiles"]:
        yield cdna(matrix, group, step)


def cdna_launches(call: GemmCall, config: Config, arch: Arch) -> list[_launcher.Launch]:
    """The launch of a call on `triton_cdna`; see `KernelStudy`."""
    if math.prod(call.shape) == 0:
        return []
    return [_cdna.launch(call, torch.empty(call.shape, dtype=call.dtype, device="meta"), config, arch)]
