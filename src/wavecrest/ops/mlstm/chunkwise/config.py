"""The chunkwise kernels' configuration where nothing measured is known, from registers, LDS and traffic."""

from __future__ import annotations

from typing import NamedTuple

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch

LEAST_BLOCK = 16
# tokens and, at most, elements of head_dim of the keys that a program weights
KEYS_T, KEYS_K = 64, 256


class Shape(NamedTuple):
    """Parts of a call that a configuration depends on; not batch and tokens, which must not change a result's bits.

    `dtype`: of an element; `chunk`: the caller's chunk, 0 where it is left open.
    """

    dk: int
    dv: int
    dtype: str
    chunk: int = 0


class _Tile(NamedTuple):
    """Sizes of a program's tiles.

    The chunks kernel: `rows` queries, `keys` tokens, `part` of DK of q and k, `step` rows of a state, `columns` of DV.
    The states kernel: `state`, its tokens, rows and columns. Warps and stages of both. `lane`: bytes of keys a lane
    weights.
    """

    rows: int
    keys: int
    part: int
    step: int
    columns: int
    state: tuple[int, int, int]
    warps: int
    state_warps: int
    stages: int
    state_stages: int
    lane: int


def width(size: int, most: int) -> int:
    """A block for a dimension: a power of two from LEAST_BLOCK to `most`."""
    return max(LEAST_BLOCK, min(most, _layout.power_of_two(size)))


def keys_width(dk: int) -> int:
    """Elements of head_dim of the keys that a program weights at a time."""
    return width(dk, KEYS_K)


def chunked(config: Config, chunk: int) -> Config:
    """A configuration with the caller's chunk, in tiles that divide it."""
    if not chunk:
        return config
    made = config.kwargs | {"CHUNK": chunk}
    for name in ("BLOCK_T", "BLOCK_S", "STATE_T"):
        while chunk % made[name] != 0:
            made[name] //= 2
    return Config(**made)


def _nvidia(shape: Shape, arch: Arch | None) -> _Tile:
    """For 64 queries and 256 columns of DV, 4 warps hold h in 128 registers a lane.

    One H200, 2026-11-22, bfloat16, 2,048 tokens of 8 heads of 256 × 512, in µs (the log was not kept): chunks of 256
    tokens 47.5 with 128 queries in 8 warps and 3 stages, 52.8 with 64 in 4 and 2 stages; states 21.9 in tiles of
    64 × 64 in steps of 128 tokens, 25 to 32 in larger tiles, which are fewer than the multiprocessors. 64 queries are
    the most that leave room for the stages on GPUs with less shared memory than Hopper.

    float32 in three products of tf32, 2026-11-27, 4 × 512 tokens of 4 heads of 128 × 256 (no record): 103 µs, and 209
    in tiles of 32 queries and states of 32 × 32, which took 311 without matrix units.
    """
    if shape.dtype == "float32":
        return _Tile(64, 32, 32, 32, 64, (64, 64, 32), 4, 4, 1, 2, 256)
    if shape.dtype == "float16":
        return _Tile(64, 32, 256, 64, 128, (64, 64, 64), 4, 8, 2, 3, 256)
    wide = shape.dv > 256 and shape.dv % 256 == 0
    if not wide:
        return _Tile(64, 32, 256, 64, 128, (64, 128, 128), 4, 8, 2, 3, 256)
    if 128 < shape.dk <= 256 and (arch is None or arch.lds_kib >= 224):
        return _Tile(128, 32, 256, 64, 256, (128, 64, 64), 8, 4, 3, 3, 256)
    return _Tile(64, 32, 256, 64, 256, (128, 64, 64), 4, 4, 2, 3, 256)


def _cdna(shape: Shape) -> _Tile:
    """4 waves of 512 registers: every wave has 16 queries, and all 128 of DV of v and states."""
    if shape.dtype == "float32":
        return _Tile(32, 32, 32, 32, 64, (32, 32, 32), 4, 4, 1, 1, 64)
    return _Tile(64, 32, 256, 64, 128, (64, 64, 64), 4, 4, 1, 1, 64)


def _rdna(shape: Shape) -> _Tile:
    """256 registers, and on gfx11 both halves of a wave hold operands twice: 16 queries, a strip of columns a wave."""
    wide = shape.dtype == "float32"
    return _Tile(16, 16, 32, 32, 128, (16, 32, 32) if wide else (16, 32, 64), 8, 4, 1, 1, 128)


def default(shape: Shape, arch: Arch | None) -> Config:
    """The tiles that registers have room for, and a chunk by the traffic of states.

    A state is written and read once a chunk: with DK 256, DV 512 and chunks of 256 tokens that is 2 KiB a token, where
    the token itself has 3 KiB. Smaller heads have smaller states, so 128 tokens, which halve the GEMMs, are enough.
    Where DV is at most 128 a program has all of a head's h, and applies the norm to it.
    """
    if arch is None or arch.vendor == "nvidia":
        tile = _nvidia(shape, arch)
    else:
        tile = _cdna(shape) if arch.wave_size == 64 else _rdna(shape)
    # a tile that is wider than DV takes masks, and registers
    most = tile.columns if shape.dv <= tile.columns or shape.dv % tile.columns == 0 else tile.columns // 2
    state_k = width(shape.dk, tile.state[1])
    lanes = 32 if arch is None else arch.wave_size
    keys = KEYS_T * keys_width(shape.dk) * (4 if shape.dtype == "float32" else 2)
    # 16 columns a lane of matrix instructions on CDNA: few registers for their results
    more = {"matrix_instr_nonkdim": 16} if arch is not None and arch.vendor == "amd" and arch.wave_size == 64 else {}
    made = Config(
        CHUNK=256 if shape.dk * shape.dv >= 1 << 16 else 128, BLOCK_T=tile.rows, BLOCK_S=tile.keys,
        BLOCK_K=width(shape.dk, tile.part), BLOCK_C=min(state_k, tile.step), BLOCK_V=width(shape.dv, most),
        STATE_T=tile.state[0], STATE_K=state_k, STATE_V=width(shape.dv, tile.state[2]), STATE_WARPS=tile.state_warps,
        STATE_STAGES=tile.state_stages, KEYS_WARPS=max(1, min(8, keys // (tile.lane * lanes))), num_warps=tile.warps,
        num_stages=tile.stages, **more,
    )  # fmt: skip
    return chunked(made, shape.chunk)
