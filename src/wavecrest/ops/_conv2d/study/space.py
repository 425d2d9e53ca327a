"""The convolution's configurations that `wavecrest tune conv2d` tries."""

from __future__ import annotations

from collections.abc import Iterator

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._conv2d.config import default
from wavecrest.ops._conv2d.key import shape_of

# BLOCK_M, BLOCK_N, BLOCK_K, num_warps and num_stages for 16-bit types
_NVIDIA = (
    (128, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 64, 4, 4), (128, 128, 32, 8, 4),
    (256, 64, 64, 8, 3), (256, 128, 64, 8, 3), (128, 64, 64, 4, 4), (128, 64, 32, 4, 4), (64, 64, 64, 4, 4),
    (64, 128, 64, 4, 4), (256, 64, 32, 8, 4), (256, 128, 32, 8, 4), (128, 128, 128, 8, 2), (64, 64, 32, 4, 4),
    (256, 32, 32, 4, 4), (32, 64, 64, 4, 4),
)  # fmt: skip
_AMD = (
    (256, 256, 32, 8, 2), (256, 128, 64, 8, 2), (128, 256, 32, 8, 2), (128, 128, 64, 8, 2), (128, 128, 32, 4, 2),
    (256, 64, 64, 8, 2), (128, 64, 64, 4, 2), (128, 64, 32, 4, 2), (64, 64, 64, 4, 2), (64, 128, 64, 4, 2),
    (64, 64, 32, 4, 2), (32, 64, 64, 4, 2),
)  # fmt: skip
# for float32, and for AMD's waves of 32
_SMALL = ((64, 64, 32, 4, 2), (128, 64, 32, 8, 2), (64, 128, 32, 8, 2), (32, 64, 32, 4, 2), (32, 32, 32, 4, 2))


def space(key: Key, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first; none that needs more LDS than there is."""
    shape = shape_of(key)
    first = default(shape, arch)
    yield first
    seen = {first}
    rdna = arch.vendor == "amd" and arch.wave_size == 32
    widest = max(16, _layout.power_of_two(shape.outputs))
    along = shape.channels * shape.taps if first["FLAT"] else shape.channels
    for m, n, k, warps, stages in _SMALL if shape.bits == 32 or rdna else _NVIDIA if arch.vendor == "nvidia" else _AMD:
        if n > widest or k > max(16, _layout.power_of_two(along)):
            continue
        # on AMD the step that is multiplied is in registers; sums take at most 128 of them a lane
        kept = stages - 1 if arch.vendor == "amd" else stages
        if kept * k * (m + n) * shape.bits // 8 > arch.lds_kib << 10 or m * n > 128 * warps * arch.wave_size:
            continue
        for group in (8, 1) if m * n >= 128 * 128 else (8,):
            sizes = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group}
            made = Config(**(first.kwargs | sizes | {"num_warps": warps, "num_stages": stages}))
            if made not in seen:
                seen.add(made)
                yield made
