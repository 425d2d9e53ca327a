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

    `bits`: of an element; `chunk`: the caller's chunk, 0 where it is left open.
    """

    dk: int
    dv: int
    bits: int
    chunk: int = 0


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


def default(shape: Shape, arch: Arch | None) -> Config:
    """64 tokens a tile, 128 columns of h: 32 registers of 256 lanes have their sums, 16 the scores.

    A state is written and read once a chunk: a chunk of 256 tokens makes that 2 KiB a token of heads of 256 and 512
    columns, where a token has 3 KiB; smaller heads have so little of it that 128 tokens, half the products, are enough.
    All of a head's columns in one program, where they are 128 or fewer, let it normalise them.
    """
    wide = shape.bits == 32
    rows = 32 if wide else 64
    chunk = 256 if shape.dk * shape.dv >= 1 << 16 else 128
    made = {
        "CHUNK": chunk, "BLOCK_T": rows, "BLOCK_K": _width(shape.dk, 32 if wide else 64),
        "BLOCK_V": _width(shape.dv, 64 if wide else 128), "STATE_K": _width(shape.dk, 32 if wide else 64),
        "STATE_V": _width(shape.dv, 32 if wide else 64), "STATE_WARPS": 4,
        "num_warps": 8 if arch is None or arch.wave_size == 32 else 4,
        "num_stages": 1 if wide or (arch is not None and arch.vendor == "amd") else 2,
    }  # fmt: skip
    if arch is not None and arch.vendor == "amd" and arch.wave_size == 64:
        # the widest K of a matrix instruction, and few registers for its results
        made["matrix_instr_nonkdim"] = 16
    return chunked(Config(**made), shape.chunk)


def space(shape: Shape, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first: chunks, tiles of both kernels, warps, stages."""
    first = default(shape, arch)
    yield first
    seen = {first}
    chunks = (shape.chunk,) if shape.chunk else (64, 128, 256, 512)
    stages = (1, 2, 3) if arch.vendor == "nvidia" else (1, 2)
    widths = [width for width in (64, 128, 256) if width <= max(64, _rows.power_of_two(shape.dv))]
    choices = itertools.product(chunks, (32, 64, 128), (32, 64, 128), widths, (32, 64, 128), (4, 8), stages)
    for chunk, rows, part, columns, state, warps, deep in choices:
        # sums of a tile of h and of one of scores, at most 160 registers a lane
        if chunk % rows != 0 or rows * (columns + rows) > 160 * warps * arch.wave_size:
            continue
        # what both products of a step take of LDS: queries, keys, values or states, weights
        held = deep * (2 * rows * part + max(rows, part) * columns) + rows * rows
        if held * shape.bits // 8 > arch.lds_kib << 10 or part > _width(shape.dk, 128):
            continue
        made = Config(
            **(
                first.kwargs
                | {
                    "CHUNK": chunk, "BLOCK_T": rows, "BLOCK_K": part, "BLOCK_V": _width(shape.dv, columns),
                    "STATE_K": _width(shape.dk, 64), "STATE_V": _width(shape.dv, state), "num_warps": warps,
                    "num_stages": deep,
                }
            )
        )  # fmt: skip
        if made not in seen:
            seen.add(made)
            yield made
