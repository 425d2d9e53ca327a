"""The kernels' configurations where nothing measured is known: reasoned from registers, LDS and traffic."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import wavecrest.ops._rows as _rows
from wavecrest.hardware import Arch
from wavecrest.tuned import Config

LEAST_BLOCK = 16


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
    states: `state` tokens, rows and columns. Warps and stages of both.
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


def _width(columns: int, most: int) -> int:
    return max(LEAST_BLOCK, min(most, _rows.power_of_two(columns)))


def chunked(config: Config, chunk: int) -> Config:
    """A configuration with the caller's chunk, in tiles that divide it."""
    if not chunk:
        return config
    made = config.kwargs | {"CHUNK": chunk}
    for name in ("BLOCK_T", "BLOCK_S", "STATE_T"):
        while chunk % made[name] != 0:
            made[name] //= 2
    return Config(**made)


def _nvidia(shape: Shape) -> _Tile:
    """64 queries, keys and values of 256 columns, in 4 warps whose 128 registers a lane hold h: two programs a
    multiprocessor, of which one multiplies while the other takes exponents.

    A state of 128 by 128 in 8 warps: every program reads all keys or values that it needs, wider ones read less.
    float32 has no matrix units.
    """
    if shape.dtype == "float32":
        return _Tile(32, 32, 32, 32, 64, (32, 32, 32), 8, 4, 1, 1)
    columns = 256 if shape.dv > 256 and shape.dv % 256 == 0 and shape.dtype != "float16" else 128
    state = (64, 64, 64) if shape.dtype == "float16" else (64, 128, 128)
    return _Tile(64, 32, 256, 64, columns, state, 4, 8, 2, 3)


def _cdna(shape: Shape) -> _Tile:
    """4 waves of 512 registers: every wave has 16 queries, and of v and states all 128 columns."""
    if shape.dtype == "float32":
        return _Tile(32, 32, 32, 32, 64, (32, 32, 32), 4, 4, 1, 1)
    return _Tile(64, 32, 256, 64, 128, (64, 64, 64), 4, 4, 1, 1)


def _rdna(shape: Shape) -> _Tile:
    """256 registers, and on gfx11 both halves of a wave hold operands twice: 16 queries, a strip of columns a wave."""
    wide = shape.dtype == "float32"
    return _Tile(16, 16, 32, 32, 128, (16, 32, 32) if wide else (16, 32, 64), 8, 4, 1, 1)


def default(shape: Shape, arch: Arch | None) -> Config:
    """The tiles that registers have room for, and a chunk by the traffic of states.

    A state is written and read once a chunk: a chunk of 256 tokens makes that 2 KiB a token of heads of 256 and 512
    columns, where a token has 3 KiB; smaller heads have so little of it that 128 tokens, half the products, are enough.
    All of a head's columns in one program, where they are 128 or fewer, let it normalise them.
    """
    if arch is None or arch.vendor == "nvidia":
        tile = _nvidia(shape)
    else:
        tile = _cdna(shape) if arch.wave_size == 64 else _rdna(shape)
    # columns of no head take masks, and registers
    most = tile.columns if shape.dv <= tile.columns or shape.dv % tile.columns == 0 else tile.columns // 2
    state_k = _width(shape.dk, tile.state[1])
    # 16 columns a lane of matrix instructions on CDNA: few registers for their results
    more = {"matrix_instr_nonkdim": 16} if arch is not None and arch.vendor == "amd" and arch.wave_size == 64 else {}
    made = Config(
        CHUNK=256 if shape.dk * shape.dv >= 1 << 16 else 128, BLOCK_T=tile.rows, BLOCK_S=tile.keys,
        BLOCK_K=_width(shape.dk, tile.part), BLOCK_C=min(state_k, tile.step), BLOCK_V=_width(shape.dv, most),
        STATE_T=tile.state[0], STATE_K=state_k, STATE_V=_width(shape.dv, tile.state[2]), STATE_WARPS=tile.state_warps,
        STATE_STAGES=tile.state_stages, num_warps=tile.warps, num_stages=tile.stages, **more,
    )  # fmt: skip
    return chunked(made, shape.chunk)


def space(shape: Shape, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first: chunks, tiles of both kernels, warps, stages.

    Chunks half and twice as long as the default's: longer ones have more products, shorter ones more states to move.
    """
    first = default(shape, arch)
    yield first
    seen, size = {first}, 4 if shape.dtype == "float32" else 2
    chunks = (shape.chunk,) if shape.chunk else (first["CHUNK"], first["CHUNK"] // 2, 2 * first["CHUNK"])
    nvidia = arch.vendor == "nvidia"
    # NVIDIA's matrix units take 64 rows of 16 bits at a time
    rows_tried = (64, 128) if nvidia and size == 2 else (first["BLOCK_T"], 64)
    stages = (2, 3) if nvidia else (1, 2)
    states = ((64, 64, 4), (128, 128, 8), (64, 128, 4)) if nvidia and size == 2 else ((64, 64, 4), (32, 64, 4))
    choices = itertools.product(chunks, states, rows_tried, (32, 64), (128, 256), (4, 8), stages)
    for chunk, (state_k, state_v, state_warps), rows, keys, columns, warps, deep in choices:
        columns = _width(shape.dv, columns)
        # sums of a tile of h and of one of scores, 8 to 160 registers a lane: above that they spill
        sums = rows * (columns + keys) // (warps * arch.wave_size)
        # what the products of a step take of LDS: queries, keys and values
        held = (rows * first["BLOCK_K"] + deep * keys * (first["BLOCK_K"] + columns) + rows * keys) * size
        if not 8 <= sums <= 160 or held > arch.lds_kib << 10:
            continue
        made = first.kwargs | {
            "BLOCK_T": rows, "BLOCK_S": keys, "BLOCK_V": columns,
            "STATE_K": _width(shape.dk, state_k), "STATE_V": _width(shape.dv, state_v), "STATE_WARPS": state_warps,
            "num_warps": warps, "num_stages": deep,
        }  # fmt: skip
        made["BLOCK_C"] = min(made["BLOCK_C"], made["STATE_K"])
        config = chunked(Config(**made), chunk)
        if config not in seen:
            seen.add(config)
            yield config
