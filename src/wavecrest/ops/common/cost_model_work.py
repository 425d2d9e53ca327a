"""Helpers that kernels share to describe their work to `wavecrest.dispatch.tuned.cost_model`."""

from __future__ import annotations

import math
from typing import NamedTuple

from wavecrest.dispatch.tuned import Config
from wavecrest.dispatch.tuned.cost_model import Work
from wavecrest.hardware import Arch

# architectures whose matrix unit reads tiles of 64 rows from shared memory, for four warps at a time
WIDE_UNIT = ("sm_90", "sm_100")
# share of the matrix peak that one warp's instructions reach (mma.sync: Luo et al., 2024, arXiv 2402.13499, 62.9 %)
NARROW_RATE = 0.629
# rows, columns and bytes of K of an instruction of one warp
LEAST_M, LEAST_N, LEAST_K_BYTES = 16, 8, 32
# cycles until the next instruction can use the accumulators (m16n8k16: the same paper; MFMA 16×16×16: CDNA 3 ISA guide)
MATRIX_CYCLES = 33
# independent instructions of a warp that hide that
MATRIX_CHAIN = 6
# cycles that a reduction over the lanes of a warp takes (five shuffles, with what depends on them), and one over warps
REDUCED_CYCLES, EXCHANGED_CYCLES = 200, 100
# vector operations an element of scores: scaled, masked by -inf, largest, exponential, sum, rounded; the exponential
# runs at an eighth of the rate on NVIDIA (16 a cycle and unit), at a quarter on AMD
SCORE_OPERATIONS = {"nvidia": 14.0, "amd": 12.0}
# vector operations an element of a weight or a cache that is widened, by its bits (counted in the machine code of gemm)
WIDENED_OPERATIONS = {8: 2.0, 4: 2.5}
# and 16 bytes that a thread copies to LDS without tensor descriptors: addresses, masks and the copy
COPIED_OPERATIONS = 4.0
COPIED_BYTES = 16
# bytes through LDS a byte that is copied so: written, and on its way through the first-level cache, the same memory
COPIED_TWICE = 1.5


class Product(NamedTuple):
    """A product of tiles: operations issued, share of the peak, bytes of LDS read, cycles waited, registers a lane."""

    flops: float
    rate: float
    lds: float
    chain: float
    registers: float


def widened(bits: int, wanted: int) -> float:
    """Vector operations an element that is stored in `bits` and multiplied in `wanted`."""
    return WIDENED_OPERATIONS[bits] if bits < wanted and bits in WIDENED_OPERATIONS else 0.0


def wide(arch: Arch, m: int, warps: int, bits: int) -> bool:
    """True where a product of m rows is one of the matrix unit that reads shared memory."""
    return arch.name in WIDE_UNIT and m >= 64 and warps % 4 == 0 and bits <= 16


def product(m: int, n: int, k: int, bits: int, warps: int, arch: Arch, *, held: bool = False) -> Product:
    """The GEMM [m, k] · [k, n] of elements of `bits`, by `warps` warps; `held`: the left operand is in registers."""
    size = bits / 8
    if wide(arch, m, warps, bits):
        # groups of four warps, 64 rows at a time, side by side along n where there are no more rows
        high = max(1, min(warps // 4, m // 64))
        across = max(1, warps // 4 // high)
        lds = (m // 64) * n * k * size + (0.0 if held else across * m * k * size)
        return Product(2.0 * m * n * k, 1.0, lds, 30.0, 20.0)
    high, across = _warps(m, n, warps)
    # warps without columns repeat those of others
    used = min(across, max(1, n // LEAST_N))
    repeated = across / used
    flops = 2.0 * max(m, LEAST_M) * max(n, LEAST_N) * k * repeated
    lds = (0.0 if held else across * m * k * size) + high * n * k * size * repeated
    rows, columns = max(1.0, m / high / LEAST_M), max(1.0, n / used / LEAST_N)
    idle = 1.0 - min(1.0, rows * columns / MATRIX_CHAIN)
    registers = (rows * LEAST_M + columns * LEAST_N) * LEAST_K_BYTES / 4 / arch.wave_size
    rate = NARROW_RATE if arch.name in WIDE_UNIT else 1.0
    return Product(flops, rate, lds, k * size / LEAST_K_BYTES * MATRIX_CYCLES * idle, registers)


def _warps(m: int, n: int, warps: int) -> tuple[int, int]:
    """Warps along the rows and along the columns: as many rows as columns each, about."""
    high = max(1, min(warps, m // LEAST_M))
    while high > 1 and m / high < n * high / warps and 2 * m / high <= min(64.0, n * high / warps):
        high //= 2
    return high, max(1, warps // high)


def depth(stages: int, wide: bool, arch: Arch) -> float:
    """Steps whose loads are under way while one is worked on.

    Buffers are one fewer than stages where operands go through registers; the oldest of them is being read. Where the
    matrix unit reads a buffer, its product ends in the middle of the next step. On AMD the next step is in registers.
    """
    if arch.vendor == "amd":
        return max(0.0, stages - 1.0)
    return max(0.0, stages - (1.5 if wide else 2.0))


def staged(loaded: float, lanes: int, stages: int, arch: Arch) -> float:
    """Registers a lane that hold a step between memory and LDS: on AMD, and without asynchronous copies."""
    return loaded / 4 / lanes if arch.vendor == "amd" or stages == 1 else 0.0


def kept(tiles: float, stages: int, wide: bool, arch: Arch) -> int:
    """Bytes of LDS that `tiles` bytes a step take over all stages."""
    return int(tiles * (stages if wide else max(1, stages - 1)))


def moved(
    config: Config, programs: int, loaded: float, stored: float, *, registers: float, operations: float = 0.0,
    steps: float = 1.0, fresh: float | None = None, atomics: float = 0.0,
) -> Work:  # fmt: skip
    """Programs that load, work something out, and store; what they load is read once, unless `fresh` says how much is.

    `loaded` and `operations` are of a step, `stored` of a program, in bytes.
    """
    return Work(
        programs=programs, warps=config["num_warps"], steps=steps, loaded=loaded,
        fresh=programs * steps * loaded if fresh is None else fresh, registers=registers, stored=stored,
        vector=operations, atomics=atomics,
    )  # fmt: skip


def summed(programs: int, parts: float, at_once: float, width: float, size: float, *, ends: float = 0.0) -> Work:
    """The second launch of split work: each program adds `parts` rows of `width` float32, `at_once` rows a step.

    `size`: bytes of an element of the result.
    """
    steps = math.ceil(parts / at_once)
    together = min(parts, at_once)
    return Work(
        programs=programs, warps=4, steps=steps, loaded=together * width * 4, fresh=0.0, registers=20.0,
        stored=width * size, vector=together * width * 2, ends=ends,
    )  # fmt: skip
