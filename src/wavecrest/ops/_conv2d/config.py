"""The convolution's configurations where nothing measured is known: reasoned from tile sizes, registers and LDS."""

from __future__ import annotations

from typing import NamedTuple

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch

# most of a step's channels that may be padding before smaller steps, or all of K without padding, are better
PADDING = 0.25
# channels below which K is one flat loop (`FLAT`)
FEW_CHANNELS = 8


class Shape(NamedTuple):
    """Sizes that a configuration depends on.

    `rows`: pixels of the result, a bucket; `outputs`, `channels`: of a group.
    """

    rows: int
    outputs: int
    channels: int
    taps: int
    groups: int
    bits: int


def _block_k(shape: Shape, flat: bool) -> int:
    """Channels of a step: up to 64 (32 of float32); fewer where more than a quarter of a step would be padding."""
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
    """The largest tile that still gives every compute unit a tile, or else the smallest."""
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
