"""How long a kernel takes on an architecture, from what it does: an analytic model, for ranking configurations.

An op describes the launches of a call as `Work`: equal programs, each of so many equal steps. The time of a launch is
that of its slowest resource, with a part of the others' (`Constants.overlap`) as nothing overlaps wholly:

- *matrix*, *vector*, *lds*, *l2*: what the programs of the busiest compute unit take of it. Programs come in rounds of
  as many as registers and LDS let be resident (`occupancy`), so that a last round that is not full costs a whole one
  (wave quantisation);
- *memory*: the bytes read and written, over the bandwidth (the roofline's other side);
- *latency*: the steps of one program one after another, each no shorter than its own chain of dependent instructions,
  nor than the way to memory over the steps whose loads are under way; and what a program does before and after them;
- *launch*: fixed, of each launch.

Peaks, bandwidth, clock, L2 size and compute units come from `hardware.Arch`, registers and LDS from `occupancy`.
`Constants` is what a datasheet does not say. What the model is worth is in docs/cost_model.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from wavecrest.hardware import Arch
from wavecrest.occupancy import occupancy, unit

@dataclass(frozen=True, slots=True)
class Constants:
    overlap: float = 0.2
    launch: float = 2.0        # µs
    following: float = 1.0      # µs of a second launch
    memory_cycles: float = 1000   # latency of memory
    l2_cycles: float = 300
    matrix: float = 0.8
    bandwidth: float = 0.9
    l2: float = 0.78
    lds: float = 1.0
    vector: float = 0.7
    step_cycles: float = 60
    program_cycles: float = 600
    registers: float = 40


CONSTANTS = Constants()
L2_BYTES = 64
LDS_BYTES = 128
TERMS = ("matrix", "vector", "lds", "l2", "memory", "latency", "ends", "store", "launch")


@dataclass(frozen=True, slots=True)
class Work:
    programs: int
    warps: int
    steps: float
    loaded: float
    fresh: float
    depth: float
    shared: int
    registers: float
    stored: float = 0.0
    matrix: float = 0.0
    dtype: str = "float32"
    rate: float = 1.0
    vector: float = 0.0
    lds: float = 0.0
    chain: float = 0.0
    ends: float = 0.0
    groups: float = 1.0


@dataclass(frozen=True, slots=True)
class Prediction:
    us: float
    terms: dict[str, float] = field(default_factory=dict)


def resident(work: Work, arch: Arch, c=CONSTANTS) -> int:
    regs = math.ceil(work.registers + c.registers)
    cap = 255 if arch.vendor == "nvidia" else 512 if arch.wave_size == 64 else 256
    # no more than the file has for its waves
    one = unit(arch)
    cap = min(cap, one.registers // math.ceil(work.warps / one.simds) // one.granule * one.granule)
    found = occupancy(arch, vgpr=min(regs, cap), sgpr=0, lds=work.shared, warps=work.warps)
    return int(found.waves * one.simds / work.warps + 1e-6)


def units(arch: Arch) -> int:
    """compute units, or pairs"""
    return arch.compute_units * 4 // unit(arch).simds // (2 if arch.wave_size == 32 and arch.vendor == "amd" else 1)


def launch_us(work: Work, arch: Arch, c: Constants = CONSTANTS) -> Prediction | None:
    fit = resident(work, arch, c)
    if fit == 0:
        return None
    number = arch.compute_units
    clock = arch.clock * 1e3   # cycles a µs
    rounds, rest = divmod(work.programs, number * fit)
    busiest = rounds * fit + math.ceil(rest / number)
    rounds += rest > 0
    peak = arch.peak(work.dtype) * 1e12 / (number * arch.clock * 1e9)   # flop a cycle a unit
    lanes = arch.peak_fp32 * 1e12 / (2 * number * arch.clock * 1e9)
    matrix = work.matrix / (peak * work.rate * c.matrix)
    own_lanes = min(lanes, work.warps * lanes / 4)
    vector = work.vector / (lanes * c.vector)
    spilled = max(0.0, work.registers + c.registers - (255 if arch.vendor == "nvidia" else 512 if arch.wave_size == 64 else 256))
    spills = spilled * work.warps * arch.wave_size * 8
    lds = work.lds / (LDS_BYTES * c.lds)
    total = busiest * work.steps
    asked = work.programs * work.steps * work.loaded
    through = work.loaded + spills
    miss = min(1.0, work.fresh / asked) if asked else 0
    way = c.l2_cycles + (c.memory_cycles - c.l2_cycles) * math.sqrt(miss)
    chain = (matrix + work.vector / (own_lanes * c.vector)) / work.groups + work.chain + c.step_cycles + spills / L2_BYTES
    transfer = way + work.loaded / L2_BYTES
    step = max(chain, transfer / work.depth) if work.depth >= 1 else chain + transfer
    ends = way + c.program_cycles + work.ends
    latency = rounds * work.steps * step + (rounds - 1) * ends / fit
    written = work.programs * work.stored
    terms = {
        "matrix": total * matrix / clock,
        "vector": total * vector / clock,
        "lds": total * lds / clock,
        "l2": max(work.programs * work.steps * through / (number * L2_BYTES * c.l2), total * through / L2_BYTES) / clock,
        "memory": work.fresh / (arch.bandwidth * c.bandwidth * 1e3),
        "latency": latency / clock,
    }
    most = max(terms, key=lambda name: terms[name])
    shares = {n: v if n == most else v * c.overlap for n, v in terms.items()}
    # what all programs write at their ends
    shares["store"] = written / (arch.bandwidth * c.bandwidth * 1e3) / (fit if rounds > 1 else 1)
    shares["ends"] = ends / clock
    shares["launch"] = c.launch
    return Prediction(sum(shares.values()), shares)


def predict(works: Sequence[Work], arch: Arch, c: Constants = CONSTANTS) -> Prediction | None:
    terms = dict.fromkeys(TERMS, 0.0)
    for i, w in enumerate(works):
        one = launch_us(w, arch, c)
        if one is None:
            return None
        for n, v in one.terms.items():
            terms[n] += v if n != "launch" or i == 0 else c.following
    return Prediction(sum(terms.values()), terms)
