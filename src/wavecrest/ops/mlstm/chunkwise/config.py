"""The kernels' configurations where nothing measured is known: reasoned from registers, LDS and traffic."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch

LEAST_BLOCK = 16
# tokens and, at most, columns of keys that a program weights
KEYS_T, KEYS_K = 64, 256


class Shape(NamedTuple):
    """What a configuration is chosen by; not the batch and not the tokens, on which no bits may depend.

    `dtype`: of an element; `chunk`: the caller's chunk, 0 where it is left open.
    """

    dk: int
    dv: int
    dtype: str
    chunk: int = 0


class _Tile(NamedTuple):
    """What programs take at a time.

    Of chunks: `rows` queries, `keys` tokens, `part` columns of q and k, `step` rows of a state, `columns` of v. Of
    states: `state` tokens, rows and columns. Warps and stages of both. `lane`: bytes of keys a lane weights.
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


def _width(columns: int, most: int) -> int:
    return max(LEAST_BLOCK, min(most, _layout.power_of_two(columns)))


def keys_width(dk: int) -> int:
    """Columns of keys that a program weights at a time."""
    return _width(dk, KEYS_K)


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
    """Of 64 queries and 256 columns of values, 4 warps hold h in 128 registers a lane.

    One H200, 2026-11-22, bfloat16, 2,048 tokens of 8 heads of 256 × 512, in µs: chunks of 256 tokens 47.5 with 128
    queries in 8 warps and 3 stages, 52.8 with 64 in 4 and 2 stages; states 21.9 in tiles of 64 × 64 in steps of 128
    tokens, 25 to 32 in larger ones, of which there are fewer than multiprocessors. 64 queries are as many as stages
    have room for with less than Hopper's shared memory. float32 has no matrix units.
    """
    if shape.dtype == "float32":
        return _Tile(32, 32, 32, 32, 64, (32, 32, 32), 8, 4, 1, 1, 256)
    if shape.dtype == "float16":
        return _Tile(64, 32, 256, 64, 128, (64, 64, 64), 4, 8, 2, 3, 256)
    wide = shape.dv > 256 and shape.dv % 256 == 0
    if not wide:
        return _Tile(64, 32, 256, 64, 128, (64, 128, 128), 4, 8, 2, 3, 256)
    if 128 < shape.dk <= 256 and (arch is None or arch.lds_kib >= 224):
        return _Tile(128, 32, 256, 64, 256, (128, 64, 64), 8, 4, 3, 3, 256)
    return _Tile(64, 32, 256, 64, 256, (128, 64, 64), 4, 4, 2, 3, 256)


def _cdna(shape: Shape) -> _Tile:
    """4 waves of 512 registers: every wave has 16 queries, and of v and states all 128 columns."""
    if shape.dtype == "float32":
        return _Tile(32, 32, 32, 32, 64, (32, 32, 32), 4, 4, 1, 1, 64)
    return _Tile(64, 32, 256, 64, 128, (64, 64, 64), 4, 4, 1, 1, 64)


def _rdna(shape: Shape) -> _Tile:
    """256 registers, and on gfx11 both halves of a wave hold operands twice: 16 queries, a strip of columns a wave."""
    wide = shape.dtype == "float32"
    return _Tile(16, 16, 32, 32, 128, (16, 32, 32) if wide else (16, 32, 64), 8, 4, 1, 1, 128)


def default(shape: Shape, arch: Arch | None) -> Config:
    """The tiles that registers have room for, and a chunk by the traffic of states.

    A state is written and read once a chunk: a chunk of 256 tokens makes that 2 KiB a token of heads of 256 and 512
    columns, where a token has 3 KiB; smaller heads have so little of it that 128 tokens, half the products, are enough.
    All of a head's columns in one program, where they are 128 or fewer, let it normalise them.
    """
    if arch is None or arch.vendor == "nvidia":
        tile = _nvidia(shape, arch)
    else:
        tile = _cdna(shape) if arch.wave_size == 64 else _rdna(shape)
    # columns of no head take masks, and registers
    most = tile.columns if shape.dv <= tile.columns or shape.dv % tile.columns == 0 else tile.columns // 2
    state_k = _width(shape.dk, tile.state[1])
    lanes = 32 if arch is None else arch.wave_size
    keys = KEYS_T * keys_width(shape.dk) * (4 if shape.dtype == "float32" else 2)
    # 16 columns a lane of matrix instructions on CDNA: few registers for their results
    more = {"matrix_instr_nonkdim": 16} if arch is not None and arch.vendor == "amd" and arch.wave_size == 64 else {}
    made = Config(
        CHUNK=256 if shape.dk * shape.dv >= 1 << 16 else 128, BLOCK_T=tile.rows, BLOCK_S=tile.keys,
        BLOCK_K=_width(shape.dk, tile.part), BLOCK_C=min(state_k, tile.step), BLOCK_V=_width(shape.dv, most),
        STATE_T=tile.state[0], STATE_K=state_k, STATE_V=_width(shape.dv, tile.state[2]), STATE_WARPS=tile.state_warps,
        STATE_STAGES=tile.state_stages, KEYS_WARPS=max(1, min(8, keys // (tile.lane * lanes))), num_warps=tile.warps,
        num_stages=tile.stages, **more,
    )  # fmt: skip
    return chunked(made, shape.chunk)


def space(shape: Shape, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first.

    Kernels are independent of each other: what chunks do is tried beside the default's states and keys, and the other
    way round, each with chunks half and twice as long too. Longer ones have more products, shorter ones more states to
    move.
    """
    first = default(shape, arch)
    seen = set()
    lengths = (shape.chunk,) if shape.chunk else (first["CHUNK"], first["CHUNK"] // 2, 2 * first["CHUNK"])
    changes: list[dict[str, int]] = [{}, *_chunk_changes(shape, arch, first), *_state_changes(shape, arch)]
    changes += [{"KEYS_WARPS": warps} for warps in (1, 2, 4, 8) if first["KEYS_WARPS"] in (warps // 2, 2 * warps)]
    for change, length in itertools.product(changes, lengths):
        made = first.kwargs | change
        made["BLOCK_C"] = min(made["BLOCK_C"], made["STATE_K"])
        config = chunked(Config(**made), length)
        if config not in seen:
            seen.add(config)
            yield config


def _chunk_changes(shape: Shape, arch: Arch, first: Config) -> Iterator[dict[str, int]]:
    """Tiles of the kernel of chunks."""
    size = 4 if shape.dtype == "float32" else 2
    matrix = arch.vendor == "nvidia" and size == 2
    # NVIDIA's matrix units take 64 rows of 16 bits at a time
    rows_tried = (64, 128) if matrix else (first["BLOCK_T"], 64)
    columns_tried = (128, 256, 512) if matrix else (128, 256)
    stages = (2, 3) if arch.vendor == "nvidia" else (1, 2)
    for rows, keys, columns, warps, deep in itertools.product(rows_tried, (32, 64), columns_tried, (4, 8), stages):
        columns = _width(shape.dv, columns)
        # sums of a tile of h and of one of scores, registers a lane: above 160 they spill, and few leave matrix units
        # to wait for shared memory (H200, 2026-11-22: 96 µs with 40, 47.5 with 144)
        sums = rows * (columns + keys) // (warps * arch.wave_size)
        # what the products of a step take of LDS: queries, keys and values
        held = (rows * first["BLOCK_K"] + deep * keys * (first["BLOCK_K"] + columns) + rows * keys) * size
        if (64 if matrix else 8) <= sums <= 160 and held <= arch.lds_kib << 10:
            yield {"BLOCK_T": rows, "BLOCK_S": keys, "BLOCK_V": columns, "num_warps": warps, "num_stages": deep}


def _state_changes(shape: Shape, arch: Arch) -> Iterator[dict[str, int]]:
    """Tiles of the kernel of states: tokens, rows, columns, warps, stages."""
    if arch.vendor == "nvidia" and shape.dtype != "float32":
        tiles = [
            (128, 64, 64, 4, 3), (128, 64, 64, 8, 3), (64, 64, 64, 4, 4), (64, 64, 128, 8, 4), (64, 128, 64, 4, 4),
            (128, 64, 128, 4, 3), (64, 128, 128, 8, 3), (64, 128, 128, 8, 4), (64, 64, 128, 4, 3),
        ]  # fmt: skip
    else:
        tiles = [(32, 64, 64, 4, 1), (64, 64, 64, 4, 1), (64, 64, 64, 4, 2), (32, 32, 64, 4, 1)]
    for tokens, rows, columns, warps, deep in tiles:
        rows, columns = _width(shape.dk, rows), _width(shape.dv, columns)
        size = 4 if shape.dtype == "float32" else 2
        if deep * tokens * (rows + columns) * size <= arch.lds_kib << 10:
            yield {
                "STATE_T": tokens, "STATE_K": rows, "STATE_V": columns, "STATE_WARPS": warps, "STATE_STAGES": deep
            }  # fmt: skip
