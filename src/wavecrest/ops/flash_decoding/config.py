"""The kernels' configurations where nothing measured is known."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import wavecrest.ops._rows as _rows
from wavecrest.hardware import Arch
from wavecrest.tuned import Config

# keys of a split where the batch must not change a result's bits
INVARIANT_CHUNK = 1024
# programs a compute unit that the keys are split for: enough to have every memory channel busy
PROGRAMS = 4
LEAST_CHUNK = 128


class Shape(NamedTuple):
    """What a configuration is chosen by: `pairs`, sequences times heads of the cache; 0 for any number of them."""

    pairs: int
    rows: int
    capacity: int
    columns: int
    q_bits: int
    kv_bits: int


def default(shape: Shape, arch: Arch | None) -> Config:
    """Tiles of as many rows as there are queries; keys are split until every compute unit has some programs."""
    nvidia = arch is None or arch.vendor == "nvidia"
    wave = 32 if arch is None else arch.wave_size
    rows = max(16, min(64, _rows.power_of_two(shape.rows)))
    width = max(16, _rows.power_of_two(shape.columns))
    # 16 KiB of k a step
    keys = max(16, min(128, 16384 * 8 // (width * shape.kv_bits)))
    if shape.q_bits == 32 or width == 256:
        keys = min(keys, 32)
    chunk = INVARIANT_CHUNK
    if shape.pairs > 0:
        units = 132 if arch is None else arch.compute_units
        splits = max(1, PROGRAMS * units // shape.pairs)
        chunk = _rows.power_of_two(max(LEAST_CHUNK, _rows.ceil_div(shape.capacity, splits)))
    return Config(
        BLOCK_M=rows, BLOCK_N=keys, CHUNK=max(chunk, keys), num_warps=4 if wave == 32 else 2 if rows == 16 else 4,
        num_stages=3 if nvidia else 1,
    )  # fmt: skip


def space(shape: Shape, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first: other tiles, and more or fewer splits."""
    first = default(shape, arch)
    yield first
    seen = {first}
    stages = (2, 3, 4) if arch.vendor == "nvidia" else (1, 2)
    for keys, warps, deep, finer in itertools.product((16, 32, 64, 128), (2, 4, 8), stages, (0, 1, 2)):
        # the batch must not change how keys are split
        chunk = first["CHUNK"] if shape.pairs == 0 else max(keys, first["CHUNK"] >> finer)
        taken = keys * max(16, _rows.power_of_two(shape.columns)) * shape.kv_bits // 8 * 2 * deep
        made = Config(BLOCK_M=first["BLOCK_M"], BLOCK_N=keys, CHUNK=chunk, num_warps=warps, num_stages=deep)
        if taken <= arch.lds_kib << 10 and chunk % keys == 0 and made not in seen:
            seen.add(made)
            yield made
