"""The kernel's configurations where nothing measured is known: reasoned from registers and LDS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import wavecrest.ops._rows as _rows
from wavecrest.hardware import Arch
from wavecrest.tuned import Config


class Shape(NamedTuple):
    """What a configuration is chosen by: never the batch or the heads, so that they do not change a result's bits.

    `queries`: a bucket; `columns`: of q and k, or of v, whichever has more; `bits`: of an element.
    """

    queries: int
    columns: int
    bits: int
    causal: bool


# BLOCK_M, BLOCK_N, num_warps, num_stages
_Tile = tuple[int, int, int, int]


def _nvidia(shape: Shape, arch: Arch | None) -> _Tile:
    """Sums and scores of a row have 1 to 2 registers a column and thread at 128 rows of 4 warps."""
    if shape.bits == 32:
        # without matrix units: each thread multiplies its part from registers
        return (32, 32, 4, 2) if shape.columns <= 128 else (16, 32, 4, 2)
    if shape.columns <= 64:
        return 64, 64, 4, 3
    if shape.columns <= 128:
        return (64, 64, 4, 3) if shape.causal else (128, 64, 8, 2)
    # two stages of k and v are 128 KiB of 64 keys: too much for sm_80 beside q
    return 64, 64 if arch is None or arch.lds_kib > 200 else 32, 4, 2


def _cdna(shape: Shape, arch: Arch) -> _Tile:
    """LDS holds one step of k and v (the next one waits in registers), 64 KiB on gfx90a and gfx942."""
    if shape.bits == 32:
        return (64, 32, 4, 1) if shape.columns <= 128 else (32, 32, 4, 1)
    if shape.columns <= 128:
        return 128, 64, 4, 2
    return 64, 32, 4, 2


def _rdna(shape: Shape) -> _Tile:
    """256 registers a thread of a wave of 32; q as an operand is in each half of a wave on gfx11."""
    if shape.bits == 32:
        return (32, 32, 4, 1) if shape.columns <= 64 else (16, 16, 4, 1)
    if shape.columns <= 64:
        return 64, 32, 4, 1
    return (64, 32, 4, 1) if shape.columns <= 128 else (32, 32, 4, 1)


def _made(shape: Shape, arch: Arch | None, tile: _Tile) -> Config:
    rows, keys, warps, stages = tile
    # no more rows than there are queries
    rows = max(16, min(rows, _rows.power_of_two(shape.queries)))
    more = {"waves_per_eu": 0, "matrix_instr_nonkdim": 16} if arch is not None and arch.wave_size == 64 else {}
    return Config(BLOCK_M=rows, BLOCK_N=keys, num_warps=warps, num_stages=stages, **more)


def default(shape: Shape, arch: Arch | None) -> Config:
    """The tile that registers and LDS have room for, for as many rows as there are."""
    if arch is None or arch.vendor == "nvidia":
        return _made(shape, arch, _nvidia(shape, arch))
    return _made(shape, arch, _cdna(shape, arch) if arch.wave_size == 64 else _rdna(shape))


# tiles that `wavecrest tune flash_attention` tries of 16-bit types
_ON_NVIDIA = (
    (128, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3),
    (64, 128, 4, 2), (64, 128, 4, 3), (128, 32, 4, 3), (64, 32, 4, 3), (16, 64, 4, 3), (16, 128, 4, 3), (32, 64, 4, 3),
)  # fmt: skip
_ON_AMD = (
    (128, 64, 4, 2), (128, 64, 4, 1), (128, 32, 4, 2), (128, 128, 4, 1), (128, 128, 8, 2), (256, 64, 8, 2),
    (64, 64, 4, 2), (64, 64, 4, 1), (64, 32, 4, 2), (64, 32, 4, 1), (32, 64, 4, 2), (32, 32, 4, 1), (16, 64, 4, 2),
    (16, 128, 4, 2),
)  # fmt: skip
# and of float32
_SINGLE = ((32, 32, 4, 2), (64, 32, 4, 1), (64, 32, 8, 1), (32, 64, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1))


def space(shape: Shape, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first; none that needs more LDS than there is."""
    first = default(shape, arch)
    yield first
    seen = {first}
    width = max(16, _rows.power_of_two(shape.columns))
    most = max(16, _rows.power_of_two(shape.queries))
    for tile in _SINGLE if shape.bits == 32 else _ON_NVIDIA if arch.vendor == "nvidia" else _ON_AMD:
        rows, keys, warps, stages = tile
        kept = max(1, stages - 1) if arch.vendor == "amd" else stages
        # k and v of the stages, and q
        if width * (2 * kept * keys + rows) * shape.bits // 8 > arch.lds_kib << 10 or rows > most:
            continue
        # sums and scores, at most 160 registers a lane
        if rows * (width + keys) > 160 * warps * arch.wave_size:
            continue
        for waves in (0, 2) if arch.wave_size == 64 else (None,):
            made = _made(shape, arch, tile)
            if waves is not None:
                made = Config(**(made.kwargs | {"waves_per_eu": waves}))
            if made not in seen:
                seen.add(made)
                yield made
