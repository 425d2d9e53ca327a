"""The configurations that `wavecrest tune flash_decoding` tries."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._flash_decoding.config import MOST_CHUNK, Shape, default
from wavecrest.ops._flash_decoding.key import shape_of


def space(key: Key, arch: Arch) -> Iterator[Config]:
    """The configurations for a key."""
    return space_of(shape_of(key), arch)


def space_of(shape: Shape, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first: other tiles, and more or fewer splits."""
    first = default(shape, arch)
    yield first
    seen = {first}
    nvidia = arch.vendor == "nvidia"
    stages = ((3, 5) if shape.page > 0 else (2, 3)) if nvidia else (1, 2)
    waves = (2, 4) if nvidia else (1, 2, 4)
    parts = (0.25, 1, 2) if nvidia else (1, 2, 4)
    most = max(MOST_CHUNK, first["CHUNK"])
    for keys, warps, deep, finer in itertools.product((16, 32, 64, 128), waves, stages, parts):
        # the batch must not change how keys are split
        chunk = first["CHUNK"] if shape.pairs == 0 else max(keys, min(most, int(first["CHUNK"] / finer)))
        taken = keys * max(16, _layout.power_of_two(shape.head_dim)) * shape.kv_bits // 8 * 2 * deep
        made = Config(BLOCK_M=first["BLOCK_M"], BLOCK_N=keys, CHUNK=chunk, num_warps=warps, num_stages=deep)
        if taken <= arch.lds_kib << 10 and chunk % keys == 0 and made not in seen:
            seen.add(made)
            yield made
