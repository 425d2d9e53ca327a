"""The configurations where nothing measured is known: reasoned from tile sizes, registers and LDS."""

from __future__ import annotations

from typing import NamedTuple

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch

# rows up to which reading b is the limit, and a tile has 16 rows
FEW_ROWS = 16
# most rows of the GEMV kernels
GEMV_ROWS = 8
# the longest row whose digits the programs of `_hopper_row_kernel` make by default: two programs then hold 64 KiB of
# them. 4,096 columns are faster so, 14,336 are not; none between was measured (H200, 2026-11-29)
STAYING_K = 8192


class Shape(NamedTuple):
    """Parts of a call that a configuration depends on.

    `rows`: of a GEMM, a bucket; `columns`: of the result, half of b's where the activation is gated; `a_bits`,
    `b_bits`: of an element.
    """

    rows: int
    columns: int
    K: int
    a_bits: int
    b_bits: int
    batch: int = 1
    # columns of K that share a scale, which is applied to the sums of each step; 0: no scale changes along K
    step: int = 0
    gated: bool = False
    # contiguous along K, or along the other dimension, and aligned: what tensor descriptors need
    has_descriptors: bool = False
    # float32 that is not rounded before it is multiplied, where no matrix unit of NVIDIA takes it
    ieee: bool = False
    # there it is three products of tf32
    thrice: bool = False
    # bytes that one access to a and b may have
    access: int = 16
    # a is normalised by the kernel: one program has all of K
    normed: bool = False
    # there are columns of a tail: one program has all of K
    tail: bool = False
    # 8-bit floats whose sums sm_90's matrix unit may not keep: those of a step take registers beside the others
    unit_sums: bool = False


def in_one_loop(gated: bool, scaled: bool, config: Config) -> bool:
    """True if `_tile_kernel` sums both halves of a gated GEMM in one loop over K, which reads a once.

    It is two loops, one after the other, where each step has a scale or is divided into CHAINS.
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
    """BLOCK_K within the columns that share a scale, and not much more than K; at least 64 for 4-bit b, else 32."""
    least = 64 if shape.b_bits == 4 else 32
    block_k = min(block_k, max(least, _layout.power_of_two(shape.K)))
    if shape.step:
        block_k = min(block_k, shape.step)
    return max(least, block_k) if shape.step or shape.b_bits == 4 else block_k


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
    if shape.thrice and not shape.gated and not 0 < shape.rows <= FEW_ROWS:
        # 79 TFLOP/s at 2048 × 1024 × 1024, where 128 × 64 × 32 in 4 warps has 71 (one H200, 2026-11-27, no record)
        if not 0 < shape.rows <= 128 and arch is not None and arch.lds_kib >= 224:
            return _made(shape, arch, 128, 128, 64, 8, 3)
        return _made(shape, arch, 64 if 0 < shape.rows <= 64 else 128, 64, 32, 4, 3)
    if shape.ieee:
        return _made(shape, arch, 16 if 0 < shape.rows <= FEW_ROWS else 64, 64, 32, 4, 3)
    if 0 < shape.rows <= FEW_ROWS:
        return _made(shape, arch, 16, 32 if shape.gated else 64, 2048 // wide, 4, 4)
    if 0 < shape.rows <= 64:
        return _made(shape, arch, 64, 32 if shape.gated else 64, 2048 // wide, 4, 3)
    descriptors = shape.has_descriptors and arch is not None and arch.name in ("sm_90", "sm_100") and shape.batch == 1
    if shape.gated and descriptors and wide < 32 and not 0 < shape.rows <= 128:
        # both halves: as many sums as of 256 columns
        return _made(shape, arch, 128, 128, 1024 // wide, 8, 4, TMA=1)
    if shape.gated or shape.step or shape.b_bits == 4 or wide == 32 or 0 < shape.rows <= 128:
        return _made(
            shape, arch, 128, 64 if shape.gated else 128, 1024 // wide, 8 if shape.gated or shape.step else 4, 3
        )
    if shape.access < 16:
        return _made(shape, arch, 128, 128, 512 // wide, 8, 2)
    if shape.unit_sums and arch is not None and arch.name == "sm_90":
        # two programs a unit: one multiplies while the other adds (the fastest or within 3 % of it of six tiles from
        # 256 × 4096 × 4096 to 8192³ on one H200, 2026-11-25)
        return _made(shape, arch, 64, 128, 1024 // wide, 4, 4, TMA=int(descriptors))
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
    if shape.gated or shape.step or shape.b_bits == 4 or 0 < shape.rows <= 256:
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


def gemv(shape: Shape, arch: Arch | None) -> Config:
    """For the GEMV kernels: 16 bytes of b a thread, threads side by side along K, so that a is laid out alike."""
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
        # a word of 8 values four times a thread, and whole groups
        block_k = max(64, shape.step, min(2048, _layout.power_of_two(shape.K)))
        warps = max(1, block_k // (32 * wave))
        return Config(BLOCK_N=4, BLOCK_K=block_k, SPLIT_K=1, num_warps=warps, num_stages=stages)
    return Config(BLOCK_N=block_n, BLOCK_K=block_k, SPLIT_K=split, num_warps=warps, num_stages=stages)


def hopper(columns: int = 128, stages: int = 4, group: int = 8, behind: int = 2) -> Config:
    """For `_hopper_gemm_kernel`: 128 rows, 64 of each group of warps.

    The sums of two halves of 128 columns are 128 registers of 240. `columns`: of a half. `behind`: steps that the
    second group stays behind the first.
    """
    # warps of the group that the launch counts: the kernel adds the other groups, and its stages are its own
    return Config(
        BLOCK_M=128, BLOCK_N=columns, BLOCK_K=64, GROUP_M=group, STAGES=stages, BEHIND=behind, num_warps=4, num_stages=1
    )


def hopper_epilogue(columns: int = 128, stages: int = 3, group: int = 8) -> Config:
    """As `hopper`, for `_hopper_epilogue_kernel`: sums take shared memory too, and no group stays behind."""
    return Config(BLOCK_M=128, BLOCK_N=columns, BLOCK_K=64, GROUP_M=group, STAGES=stages, num_warps=4, num_stages=1)


def hopper_blocks(
    groups: int = 2, columns: int = 128, halves: int = 1, stages: int = 0, group: int = 8, split: int = 1
) -> Config:
    """For `_hopper_blocks_kernel`: 64 rows of each of `groups` groups of warps, `halves` of `columns` columns of b.

    `stages` of 0: as many as there is shared memory for, beside a result of 16 bits and 1 KiB of barriers; at most 12.
    """
    rows = 64 * groups
    stages = stages or min(12, ((226 << 10) - 2 * rows * columns) // ((rows + halves * columns) * 128))
    return Config(
        BLOCK_N=columns, GROUPS=groups, HALVES=halves, GROUP_M=group, STAGES=stages, SPLIT_K=split, num_warps=4,
        num_stages=1,
    )  # fmt: skip


def hopper_blocks_of(shape: Shape, arch: Arch | None) -> Config:
    """The one for a call: as many tiles as there are units where rows are few, else the wider of two even covers.

    Of those that `wavecrest tune` tries it is the fastest or within 4 % of it for all shapes of
    `benchmarks/fp8_blocks.py` (one H200, 2026-11-26).
    """
    units, steps = _units(arch), _layout.ceil_div(shape.K, 128)
    halves = 2 if shape.gated else 1
    if 0 < shape.rows <= 128:
        return _few_rows(shape, units, steps, halves)
    if not shape.gated:
        # the part of the units' time that tiles fill, of 128 and of 256 columns
        narrow, wide = (
            tiles / _layout.ceil_div(tiles, units) for tiles in (_tiles(shape, 128, 128), _tiles(shape, 128, 256))
        )
        halves = 2 if shape.rows == 0 or 1.1 * wide >= narrow else 1
    return hopper_blocks(halves=halves, group=16)


def hopper_words(
    columns: int = 16, warps: int = 4, ahead: int = 4, early: int = 1, registers: int = 0, programs: int = 0
) -> Config:
    """For `_hopper_words_kernel`: `columns` of b a program, and blocks of K that each of its warps loads at a time.

    `registers`: of a thread at most, 0 for as many as the compiler takes. `programs`: programs of a multiprocessor, for
    `_hopper_row_kernel`, of which a warp loads lines of 128 bytes at a time; 0 for a program a tile.
    """
    more = {name: value for name, value in (("maxnreg", registers), ("PROGRAMS", programs)) if value}
    return Config(BLOCK_N=columns, AHEAD=ahead, EARLY=early, num_warps=warps, num_stages=1, **more)


def hopper_words_of(shape: Shape, arch: Arch | None) -> Config:
    """The one for a call: within 6 % of the fastest for the GEMMs of Llama 3.1 8B in int4 (one row, in a row, H200,
    2026-11-29_tune_llm_quantized_in_a_row.jsonl.gz).

    Programs that stay for one row that is not long. Elsewhere less is loaded ahead where gate and up are, or where more
    than two rows need the registers, and more warps share K where there are few programs.
    """
    if shape.rows == 1 and shape.K <= STAYING_K:
        return hopper_words(8, 8, 2, registers=128, programs=2)
    warps = 8 if _layout.ceil_div(shape.columns, 16) <= 2 * _units(arch) else 4
    return hopper_words(warps=warps, ahead=1 if shape.gated or shape.rows > 4 else 4 if shape.rows <= 2 else 2)


def _few_rows(shape: Shape, units: int, steps: int, halves: int) -> Config:
    """For up to 128 rows.

    Parts of K that fill the units are faster than narrow tiles where there are few sums of parts to add, or where K is
    long beside them.
    """
    groups, columns, split = 1, 128, 1
    in_parts = shape.rows <= 32 or steps >= 64
    if not in_parts:
        groups = 1 if shape.rows <= 64 else 2
        columns = _narrowed(shape, units, groups, columns)
        if (groups, columns) == (2, 32):
            groups, columns = 1, 64
    while _tiles(shape, 64 * groups, columns) * split * 2 <= units and steps >= 8 * split:
        split *= 2
    if in_parts:
        columns = _narrowed(shape, units, groups, columns, split)
    return hopper_blocks(groups, columns, halves, 10 if (groups, columns, halves) == (1, 64, 1) else 0, split=split)


def _narrowed(shape: Shape, units: int, groups: int, columns: int, split: int = 1) -> int:
    """Columns of a tile, of 32 at least, halved while half of the units have no tile."""
    while columns > 32 and _tiles(shape, 64 * groups, columns) * split * 2 <= units:
        columns //= 2
    return columns


def cdna(matrix: int = 32, group: int = 8, step: int = 64) -> Config:
    """For `_cdna_kernel` and `_cdna3_kernel`: tiles of 256 × 256; `matrix`: rows of a matrix instruction.

    `step`: columns of K, see `cdna_step`.
    """
    return Config(BLOCK_K=step, GROUP_M=group, MATRIX=matrix, num_warps=8, num_stages=1, waves_per_eu=0)


def cdna_step(bits: int, arch: Arch | None) -> int:
    """Columns of K of a step: 128 bytes, and 64 on gfx942, whose LDS has room for two steps of those."""
    return (512 if arch is not None and arch.name == "gfx942" else 1024) // bits


def cdna_default(shape: Shape, arch: Arch | None) -> Config:
    """The first configuration of `cdna` for a shape."""
    return cdna(step=cdna_step(shape.a_bits, arch))
