"""The convolution's configurations where nothing measured is known: reasoned from tile sizes, registers and LDS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch

# most of a step's channels that may be padding before smaller steps, or all of K without padding, are better
PADDING = 0.25
# channels below which K is walked flat
FEW_CHANNELS = 8


class Shape(NamedTuple):
    """What a configuration is chosen by. `rows`: pixels of the result, a bucket; `outputs`, `channels`: of a group."""

    rows: int
    outputs: int
    channels: int
    taps: int
    groups: int
    bits: int


def _block_k(shape: Shape, flat: bool) -> int:
    """Up to 64 (32 of float32), and no more than a quarter of it padding where a smaller one has less."""
    along = shape.channels * shape.taps if flat else shape.channels
    for block in (64, 32) if shape.bits == 16 else (32,):
        if -(-along // block) * block <= (1 + PADDING) * along:
            return block
    return 16 if along <= 16 else 32


def _tiles(shape: Shape, arch: Arch | None) -> tuple[tuple[int, int, int], ...]:
    """BLOCK_M, BLOCK_N and num_warps, from large to small."""
    if arch is not None and arch.vendor == "amd" and arch.wave_size == 32:
        # without matrix instructions for float32 each thread multiplies its part of both tiles from registers
        return (64 if shape.bits == 16 else 32, 64, 4), (32, 32, 4)
    if shape.bits == 32:
        return (64, 64, 4), (32, 32, 4)
    return (128, 128, 8), (128, 64, 4), (64, 64, 4), (32, 32, 4)


def default(shape: Shape, arch: Arch | None) -> Config:
    """The largest tile of which there are enough for every compute unit, or the smallest."""
    units = 132 if arch is None else arch.compute_units
    widest = max(16, _layout.power_of_two(shape.outputs))
    made = [(m, min(n, widest), warps) for m, n, warps in _tiles(shape, arch)]
    filling = (one for one in made if -(-shape.rows // one[0]) * -(-shape.outputs // one[1]) * shape.groups >= units)
    m, n, warps = next(filling, made[-1])
    flat = shape.channels < FEW_CHANNELS and shape.taps > 1
    if n <= 32 and not flat:
        # more threads would have less than 16 bytes each to load
        warps = 4
    nvidia = arch is None or arch.vendor == "nvidia"
    more = {"waves_per_eu": 0, "matrix_instr_nonkdim": 16} if arch is not None and arch.wave_size == 64 else {}
    return Config(
        BLOCK_M=m, BLOCK_N=n, BLOCK_K=_block_k(shape, flat), GROUP_M=8, FLAT=int(flat), num_warps=warps,
        num_stages=3 if nvidia else 2, **more,
    )  # fmt: skip


# BLOCK_M, BLOCK_N, BLOCK_K, num_warps and num_stages that `wavecrest tune conv2d` tries of 16-bit types
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
# and of float32, or with waves of 32
_SMALL = ((64, 64, 32, 4, 2), (128, 64, 32, 8, 2), (64, 128, 32, 8, 2), (32, 64, 32, 4, 2), (32, 32, 32, 4, 2))


def space(shape: Shape, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first; none that needs more LDS than there is."""
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
