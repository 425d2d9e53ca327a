"""The configurations that `wavecrest tune` tries of the kernels over a latent cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._mla_decode.config import Shape, default, default_hopper, with_tile
from wavecrest.ops._mla_decode.key import shape_of


def space(key: Key, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first: other tiles, and more or fewer splits."""
    return space_of(shape_of(key), arch)


def space_of(shape: Shape, arch: Arch) -> Iterator[Config]:
    """The same for what a configuration is chosen by."""
    first = default(shape, arch)
    yield first
    seen = {first}
    stages = (1, 2, 3) if arch.vendor == "nvidia" else (1, 2)
    most = _layout.power_of_two(shape.rows)
    choices = itertools.product((16, 32, 64), (16, 32, 64, 128), (4, 8), stages, (1, 2))
    for rows, keys, warps, num_stages, finer in choices:
        # the queries' tile where it is not in registers, and the keys' of each stage
        tiles = keys * num_stages + (rows if arch.vendor == "nvidia" and rows == 64 else 0)
        if tiles * (shape.width + shape.rope_width) * shape.bits // 8 > arch.lds_kib << 10 or rows > max(16, most):
            continue
        # sums, at most 160 registers a lane
        if rows * shape.width > 160 * warps * arch.wave_size:
            continue
        made = with_tile(shape, arch, (rows, keys, first["PART"], warps, num_stages))
        made = Config(**(made.kwargs | {"SPLITS": made["SPLITS"] * finer}))
        if made not in seen:
            seen.add(made)
            yield made


def space_hopper(key: Key, arch: Arch) -> Iterator[Config]:
    """The same for sm_90's kernel: more splits."""
    shape = shape_of(key)
    for finer in (1, 2) if shape.batch > 0 else (1,):
        yield default_hopper(shape, arch, finer)
