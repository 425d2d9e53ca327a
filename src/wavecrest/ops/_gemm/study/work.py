"""Work of gemm's kernels, for the cost model: bytes, operations and steps by configuration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import wavecrest.ops._gemm.launch as _launch
import wavecrest.ops._gemm.launch_cdna as _cdna
import wavecrest.ops.common.cost_model_work as _work
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config
from wavecrest.dispatch.tuned.cost_model import Work, l2_bytes
from wavecrest.hardware import Arch
from wavecrest.ops._gemm.config import GEMV_ROWS, Shape, in_one_loop
from wavecrest.ops._gemm.key import KEY_FIELDS, shape_of
from wavecrest.ops._gemm.study import space as _space

# bytes of an element of the result, by its dtype; else one
_SIZES = {"float64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}
# columns of 16 bytes that a step of matrix instructions of sm_90 multiplies at a time, and cycles until the last one's
# sums are there: what each waits where ptxas has them wait for each other
_HOPPER_K_BYTES, _DRAINED_CYCLES = 32, 90.0
# warps of two consumer groups and one producer group, which hand registers to each other
_HOPPER_WARPS = 12
# rows that tiles normalise cost operations a value, and cycles of a step from registers through shared memory to the
# matrix unit, as the keys of 2026-11-22_tune_xlstm_decode_16.jsonl.gz are ranked best by (H200, 2026-11-22)
_NORMED_OPERATIONS, _NORMED_CYCLES = 16.0, 180.0


def _waits(shape: Shape, config: Config, arch: Arch) -> bool:
    """True where ptxas has each matrix instruction of sm_90 wait for the one before.

    Read in the machine code (compiled for sm_90, triton 3.6): two groups of warps with 64 × 256 sums of floats each, in
    the kernel of a tile a program, of 16 bits always and of 8 bits where K is split.
    """
    if arch.name != "sm_90" or (config["BLOCK_M"], config["BLOCK_N"], config["num_warps"]) != (128, 256, 8):
        return False
    return not config.get("PERSISTENT", 1) and (shape.a_bits == 16 or (shape.a_bits == 8 and config["SPLIT_K"] > 1))


def _matrix_bytes(shape: Shape) -> tuple[float, float]:
    """Bytes of a and of b."""
    both = 1 + shape.gated
    a, b = shape.rows * shape.K * shape.a_bits / 8, shape.columns * both * shape.K * shape.b_bits / 8
    return a * shape.batch, b * shape.batch


def _in_groups(shape: Shape, config: Config, arch: Arch) -> float:
    """Bytes from memory where tiles run in groups of GROUP_M rows: those that run at a time share rows and columns."""
    a, b = _matrix_bytes(shape)
    if a + b <= l2_bytes(arch):
        return a + b
    tiles_m = _layout.ceil_div(shape.rows, config["BLOCK_M"])
    tiles_n = _layout.ceil_div(shape.columns, config["BLOCK_N"])
    high = min(config["GROUP_M"], tiles_m)
    across = min(tiles_n, max(1.0, arch.compute_units / high))
    rounds = tiles_m * tiles_n / (high * across)
    return max(a + b, rounds * (a * high / tiles_m + b * across / tiles_n))


def _tile(shape: Shape, part: dict[str, object], config: Config, arch: Arch, programs: int, steps: float) -> Work:
    """Programs that go through `steps` of a tile each."""
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    warps, stages, tma = config["num_warps"], config["num_stages"], config.get("TMA", 0)
    both, rows = 1 + shape.gated, min(m, shape.rows)
    # a is read, and normalised, in each loop over K
    loops = 1 if in_one_loop(shape.gated, shape.step > 0 or shape.b_bits == 4, config) else both
    wide = _work.wide(arch, m, warps, shape.a_bits)
    product = _work.product(m, n * both, k, shape.a_bits, warps, arch)
    a, b = rows * k * shape.a_bits / 8, n * both * k * shape.b_bits / 8
    whole = m * k * shape.a_bits / 8 + b
    vector = n * both * k * _work.widened(shape.b_bits, shape.a_bits) + (2.0 * m * n if shape.step else 0.0)
    if shape.normed:
        # widened, squared, multiplied by the norm's weight, rounded, stored and loaded
        vector += _NORMED_OPERATIONS * m * k * loops
    if not tma:
        vector += whole / _work.COPIED_BYTES * _work.COPIED_OPERATIONS
    # sums in CHAINS do not wait for each other, but the loads of each are waited for in turn: as if there were one
    chain = product.chain
    if _waits(shape, config, arch):
        chain += k * shape.a_bits / 8 / _HOPPER_K_BYTES * _DRAINED_CYCLES
    if shape.normed:
        # rows go through shared memory once more, after a barrier
        chain += _NORMED_CYCLES * loops
    split = config.get("SPLIT_K", 2) > 1
    size = 4 if split else _SIZES.get(str(part["out"]), 1)
    dtype = "tf32" if shape.a_bits == 32 and not shape.ieee else str(part["a"])
    lanes = warps * arch.wave_size
    return Work(
        programs=programs * shape.batch, warps=warps, steps=steps, loaded=a + b, fresh=_in_groups(shape, config, arch),
        depth=_work.depth(stages, wide, arch), shared=_space.shared_bytes(config, shape, arch),
        registers=_space.sums_a_lane(config, shape, arch) + product.registers
        + _work.staged(a + b, lanes, stages, arch),
        stored=rows * n * size, matrix=product.flops, dtype=dtype, rate=product.rate, vector=vector,
        lds=product.lds + (a + b) * (1.0 if tma else _work.COPIED_TWICE), chain=chain, ends=rows * n * size / 64,
    )  # fmt: skip


def tiled(shape: Shape, part: dict[str, object], config: Config, arch: Arch) -> tuple[Work, ...]:
    """`_tile_kernel`, and `_sum_kernel` where K is split."""
    split = config["SPLIT_K"]
    tiles = _layout.ceil_div(shape.rows, config["BLOCK_M"]) * _layout.ceil_div(shape.columns, config["BLOCK_N"])
    steps = _layout.ceil_div(_layout.ceil_div(shape.K, config["BLOCK_K"]), split)
    programs = tiles * split
    if config["PERSISTENT"]:
        programs = min(arch.compute_units, tiles)
        steps *= math.ceil(tiles / programs)
    first = _tile(shape, part, config, arch, programs, steps)
    if config["PERSISTENT"]:
        # all tiles of a program but the last are stored while others are worked on
        first = replace(first, fresh=first.fresh + (tiles - programs) * shape.batch * first.stored)
    return (first,) if split == 1 else (first, _sum(shape, part, split))


def _sum(shape: Shape, part: dict[str, object], split: int) -> Work:
    programs = shape.rows * _layout.ceil_div(shape.columns, _launch.SUM_COLUMNS) * shape.batch
    return _work.summed(programs, split, split, _launch.SUM_COLUMNS, _SIZES.get(str(part["out"]), 1))


def streamed(shape: Shape, part: dict[str, object], config: Config, arch: Arch) -> tuple[Work, ...]:
    """The launches of `_stream_k_kernel` and `_join_kernel`.

    Shares begin anywhere in K, so programs that run at the same time read different data: hits in L2 are by chance.
    """
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    tiles = _layout.ceil_div(shape.rows, m) * _layout.ceil_div(shape.columns, n)
    steps = tiles * _layout.ceil_div(shape.K, config["BLOCK_K"])
    programs = min(steps, arch.compute_units * config["PROGRAMS"])
    first = _tile(shape, part, config, arch, programs, steps / programs)
    once = sum(_matrix_bytes(shape))
    missed = 1.0 - min(1.0, l2_bytes(arch) / once)
    first = replace(first, fresh=max(once, steps * shape.batch * first.loaded * missed))
    size = _SIZES.get(str(part["out"]), 1)
    # two parts of a tile, a lane's share of which it adds in registers
    second = Work(
        programs=max(1, programs - 1) * shape.batch, warps=config["num_warps"], steps=1, loaded=2.0 * m * n * 4,
        fresh=0.0, registers=m * n / (config["num_warps"] * arch.wave_size), stored=m * n * size,
    )  # fmt: skip
    return first, second


def gemv(shape: Shape, part: dict[str, object], config: Config, arch: Arch) -> tuple[Work, ...]:
    """`_multiply_kernel` or `_words_kernel`, and `_sum_kernel` where K is split."""
    if shape.rows > GEMV_ROWS:
        return ()
    n, k, split = config["BLOCK_N"], config["BLOCK_K"], config["SPLIT_K"]
    warps, stages, both = config["num_warps"], config["num_stages"], 1 + shape.gated
    lanes, size = warps * arch.wave_size, _SIZES.get(str(part["out"]), 1)
    a, b = shape.rows * k * shape.a_bits / 8, n * k * both * shape.b_bits / 8
    # sums that a lane keeps apart: the values of a word are unpacked one after another
    kept = n * k / lanes / (8 if shape.b_bits == 4 else 1)
    unpacked = {16: 1.0, 4: 4.0}.get(shape.b_bits, 2.0)
    copied, squares = stages > 1, shape.rows * k if shape.normed else 0
    first = Work(
        programs=_layout.ceil_div(shape.columns, n) * split * shape.batch, warps=warps,
        steps=_layout.ceil_div(_layout.ceil_div(shape.K, k), split), loaded=a + b, fresh=sum(_matrix_bytes(shape)),
        depth=max(0, stages - 1), shared=int((stages - 1) * (a + b)) if arch.vendor == "nvidia" else 0,
        registers=kept * (shape.rows + 1) * both + squares / lanes + (0.0 if copied else b / lanes / 4),
        stored=shape.rows * n * (4 if split > 1 else size),
        # a row's squares, and its products with the norm's weight
        vector=n * k * both * (shape.rows + unpacked) + shape.rows * k + 2.0 * squares,
        lds=(1.0 + _work.COPIED_TWICE) * (a + b) if copied else 0.0,
        # the sums of a lane's products, and over lanes
        ends=kept * shape.rows * 4 + _work.REDUCED_CYCLES,
    )  # fmt: skip
    return (first,) if split == 1 else (first, _sum(shape, part, split))


def hopper(shape: Shape, part: dict[str, object], config: Config, arch: Arch) -> tuple[Work, ...]:
    """`_hopper_gemm_kernel`: as persistent tiles of both groups, which begin their next tile without a gap."""
    if arch.name != "sm_90":
        return ()
    like = {name: config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M")}
    # of a gated product BLOCK_N counts gate and up as one
    like["BLOCK_N"] *= 1 if shape.gated else 2
    like |= {"SPLIT_K": 1, "PERSISTENT": 1, "TMA": 1, "num_warps": 8, "num_stages": config["STAGES"]}
    return tuple(replace(one, warps=_HOPPER_WARPS, registers=0.0) for one in tiled(shape, part, Config(**like), arch))


def hopper_blocks(shape: Shape, part: dict[str, object], config: Config, arch: Arch) -> tuple[Work, ...]:
    """`_hopper_blocks_kernel`: as persistent tiles, and `_sum_kernel` where K is split."""
    if arch.name != "sm_90":
        return ()
    split = config["SPLIT_K"]
    like = {
        "BLOCK_M": 64 * config["GROUPS"], "BLOCK_N": config["BLOCK_N"] * (1 if shape.gated else config["HALVES"]),
        "BLOCK_K": 128, "GROUP_M": config["GROUP_M"], "SPLIT_K": split, "PERSISTENT": int(split == 1), "TMA": 1,
        "num_warps": 4 * config["GROUPS"], "num_stages": config["STAGES"],
    }  # fmt: skip
    first, *second = tiled(shape, part, Config(**like), arch)
    return replace(first, warps=4 + 4 * config["GROUPS"], registers=0.0), *second


def cdna(shape: Shape, part: dict[str, object], config: Config, arch: Arch) -> tuple[Work, ...]:
    """`_cdna_kernel`: as tiles of `_tile_kernel` whose loads, on gfx950, do not go through registers."""
    float8 = str(part["a"]).startswith("float8")
    if not (arch.name == _cdna.ARCH or (float8 and arch.name in _cdna.FLOAT8)):
        return ()
    if shape.rows < _cdna.TILE or shape.columns < _cdna.TILE:
        return ()
    like = {"BLOCK_M": _cdna.TILE, "BLOCK_N": _cdna.TILE, "BLOCK_K": config["BLOCK_K"], "GROUP_M": config["GROUP_M"]}
    like |= {"SPLIT_K": 1, "PERSISTENT": 0, "num_warps": config["num_warps"], "num_stages": 3}
    like["TMA"] = int(arch.name == _cdna.ARCH)
    return tiled(shape, part, Config(**like), arch)


_BY_BACKEND: dict[str, Callable[[Shape, dict[str, object], Config, Arch], tuple[Work, ...]]] = {
    "triton": tiled,
    "triton_stream_k": streamed,
    "triton_gemv": gemv,
    "triton_hopper": hopper,
    "triton_hopper_blocks": hopper_blocks,
    "triton_cdna": cdna,
}


def work(backend: str, key: Key, config: Config, arch: Arch) -> tuple[Work, ...]:
    """The launches of a call; empty where its rows are not known or too many for the backend, or a size is 0."""
    shape = shape_of(key)
    if shape.rows == 0 or shape.K == 0 or shape.columns == 0:
        return ()
    return _BY_BACKEND[backend](shape, dict(zip(KEY_FIELDS, key, strict=True)), config, arch)
