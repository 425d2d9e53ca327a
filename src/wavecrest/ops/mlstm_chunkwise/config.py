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
    """Tokens of a tile, columns of q and k and of h at a time, a tile of a state, warps of both kernels, stages."""

    rows: int
    part: int
    columns: int
    state: tuple[int, int]
    warps: int
    state_warps: int
    stages: int


def _width(columns: int, most: int) -> int:
    return max(LEAST_BLOCK, min(most, _rows.power_of_two(columns)))


def chunked(config: Config, chunk: int) -> Config:
    """A configuration with the caller's chunk, in tiles that divide it."""
    if not chunk:
        return config
    tile = config["BLOCK_T"]
    while chunk % tile != 0:
        tile //= 2
    return Config(**(config.kwargs | {"CHUNK": chunk, "BLOCK_T": tile}))


def _part(shape: Shape) -> int:
    """64 columns of q and k at a time, in two parts at least: those of one part alone would be kept in registers."""
    return 64 if shape.dk > 64 else 32


def _nvidia(shape: Shape) -> _Tile:
    """64 tokens and 128 columns: 32 registers of 256 lanes for h, 16 for scores.

    256 columns of wide heads: every program of the same tokens works out all scores, which two do instead of four.
    float16 has products of its own beside its sums, which are added with their unit: 32 tokens. float32 has no matrix
    units.
    """
    if shape.dtype == "float32":
        return _Tile(32, 32, 64, (32, 32), 8, 4, 1)
    if shape.dtype == "float16":
        return _Tile(32, 32, 128, (64, 64), 4, 8, 2)
    columns = 256 if shape.dv > 256 and shape.dv % 256 == 0 else 128
    return _Tile(64, _part(shape), columns, (64, 64), 8, 8, 2)


def _cdna(shape: Shape) -> _Tile:
    """The same in 4 waves of 512 registers: every wave has 16 tokens, and of v and states all 128 columns."""
    if shape.dtype == "float32":
        return _Tile(32, 32, 64, (32, 32), 4, 4, 1)
    return _Tile(64, _part(shape), 128, (64, 64), 4, 4, 1)


def _rdna(shape: Shape) -> _Tile:
    """256 registers, and on gfx11 both halves of a wave hold operands twice: 16 tokens, a strip of columns a wave."""
    wide = shape.dtype == "float32"
    return _Tile(16, 32, 128, (32, 32) if wide else (32, 64), 8, 4, 1)


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
    part = min(_width(shape.dk, tile.part), tile.state[0])
    # columns of no head take masks, and registers
    most = tile.columns if shape.dv <= tile.columns or shape.dv % tile.columns == 0 else tile.columns // 2
    # 16 columns a lane of matrix instructions on CDNA: few registers for their results
    more = {"matrix_instr_nonkdim": 16} if arch is not None and arch.vendor == "amd" and arch.wave_size == 64 else {}
    made = Config(
        CHUNK=256 if shape.dk * shape.dv >= 1 << 16 else 128, BLOCK_T=tile.rows, BLOCK_K=part,
        BLOCK_V=_width(shape.dv, most), STATE_K=_width(shape.dk, tile.state[0]),
        STATE_V=_width(shape.dv, tile.state[1]), STATE_WARPS=tile.state_warps, num_warps=tile.warps,
        num_stages=tile.stages, **more,
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
    rows_tried = (first["BLOCK_T"], 64, 128) if nvidia and size == 2 else (16, 32, 64)
    stages = (2, 3) if nvidia else (1, 2)
    choices = itertools.product(chunks, rows_tried, (32, 64), (64, 128, 256), (64, 128), (4, 8), stages)
    for chunk, rows, part, columns, state, warps, deep in choices:
        part, columns = _width(shape.dk, part), _width(shape.dv, columns)
        # sums of a tile of h and of one of scores, 8 to 96 registers a lane: above that they spill
        sums = rows * (columns + rows) // (warps * arch.wave_size)
        # what the products of a step take of LDS: queries, keys, values or states, weights
        held = (deep * (2 * rows * part + max(rows, part) * columns) + rows * rows) * size
        if chunk % rows != 0 or not 8 <= sums <= 96 or held > arch.lds_kib << 10:
            continue
        made = first.kwargs | {
            "CHUNK": chunk, "BLOCK_T": rows, "BLOCK_K": part, "BLOCK_V": columns,
            "STATE_K": max(part, first["STATE_K"]), "STATE_V": _width(shape.dv, state), "num_warps": warps,
            "num_stages": deep,
        }  # fmt: skip
        config = Config(**made)
        if config not in seen:
            seen.add(config)
            yield config
