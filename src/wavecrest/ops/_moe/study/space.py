"""The configurations of the mixture-of-experts kernels that `wavecrest tune moe` tries."""

from __future__ import annotations

from collections.abc import Iterator

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._moe.config import default
from wavecrest.ops._moe.key import shape_of

# BLOCK_M, BLOCK_N, BLOCK_K, DOWN_N, DOWN_K, num_warps and num_stages for 16-bit types
_NVIDIA = (
    (16, 32, 128, 64, 128, 4, 4), (16, 32, 64, 64, 64, 4, 5), (16, 64, 64, 128, 64, 4, 4),
    (16, 64, 128, 128, 128, 4, 3), (16, 16, 256, 32, 256, 4, 3), (16, 32, 128, 32, 256, 4, 3),
    (16, 64, 128, 64, 128, 8, 4), (32, 32, 128, 64, 128, 4, 3), (32, 64, 64, 128, 64, 4, 4),
    (64, 64, 64, 128, 64, 4, 3), (64, 64, 64, 128, 64, 4, 4), (64, 128, 64, 128, 64, 8, 3),
    (64, 128, 64, 256, 64, 8, 3), (128, 64, 64, 128, 64, 8, 3), (128, 64, 64, 128, 64, 8, 4),
    (128, 128, 64, 128, 64, 8, 3), (128, 128, 64, 256, 64, 8, 3), (128, 64, 64, 128, 64, 4, 3),
    (256, 64, 64, 128, 64, 8, 3),
)  # fmt: skip
_AMD = (
    (16, 32, 128, 64, 128, 4, 2), (16, 32, 64, 64, 64, 4, 2), (16, 64, 64, 128, 64, 4, 2),
    (16, 16, 256, 32, 256, 4, 2), (16, 32, 128, 32, 256, 4, 2), (32, 32, 128, 64, 128, 4, 2),
    (32, 64, 64, 128, 64, 4, 2), (64, 64, 64, 128, 64, 4, 2), (64, 64, 64, 128, 64, 8, 2),
    (128, 64, 64, 128, 64, 8, 2), (128, 128, 32, 256, 32, 8, 2), (128, 128, 64, 128, 64, 8, 2),
    (256, 64, 64, 128, 64, 8, 2),
)  # fmt: skip
# for float32, and for AMD's waves of 32
_SMALL = (
    (16, 32, 32, 64, 32, 4, 2), (16, 64, 32, 64, 32, 4, 2), (32, 32, 32, 64, 32, 4, 2), (64, 32, 32, 64, 32, 4, 2),
    (64, 64, 32, 64, 32, 8, 2),
)  # fmt: skip


def space(key: Key, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first; none that needs more LDS than there is."""
    shape = shape_of(key)
    first = default(shape, arch)
    yield first
    seen = {first}
    small = shape.bits == 32 or (arch.vendor == "amd" and arch.wave_size == 32)
    width, depth = _layout.power_of_two(shape.intermediate), _layout.power_of_two(shape.hidden)
    for m, n, k, down_n, down_k, warps, stages in _SMALL if small else _NVIDIA if arch.vendor == "nvidia" else _AMD:
        # tiles much higher than an expert has rows, if tokens choose evenly, or than half of them
        if m > max(16, 4 * _layout.power_of_two(shape.rows)) or (4 * m < shape.rows and m < 64):
            continue
        if max(n, down_k) > max(16, width) or max(k, down_n) > max(16, depth):
            continue
        if min(k, down_k) < shape.least or max(k, down_k) > (shape.step or max(k, down_k)):
            continue
        # on AMD the step that is multiplied is in registers; sums take at most 128 of them a lane
        kept = stages - 1 if arch.vendor == "amd" else stages
        lds = kept * max(k * (m + 2 * n), down_k * (m + down_n)) * shape.bits // 8
        if lds > arch.lds_kib << 10 or m * max(2 * n, down_n) > 128 * warps * arch.wave_size:
            continue
        for direct in (0, 1) if m == 16 and 0 < shape.tokens <= 8 else (0,):
            sizes = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "DOWN_N": down_n, "DOWN_K": down_k, "DIRECT": direct}
            made = Config(**(first.kwargs | sizes | {"num_warps": warps, "num_stages": stages}))
            if made not in seen:
                seen.add(made)
                yield made
