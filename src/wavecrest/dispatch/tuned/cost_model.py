"""Predict the time of a kernel on an architecture from its work: an analytic model, for ranking configurations.

An op describes the launches of a call as `Work`: equal programs of equal steps. The time of a launch is the time of its
slowest resource plus a part of the time of every other one (`Constants.overlap`), because no overlap is complete:

- *matrix*, *vector*, *lds*: the time that the programs of the busiest compute unit use it. Programs run in rounds; a
  round has the number of programs that registers and LDS allow to be resident (`occupancy`). A last round that is not
  full costs as much as a full one (wave quantisation);
- *l2*: the loads of all programs at the rate of the whole L2, or those of the busiest unit at the rate of its port;
- *memory*: the bytes that must come from memory, over its bandwidth;
- *latency*: the steps of a program one after another. A step takes at least as long as its chain of dependent
  instructions, and at least the latency of a load divided by the number of steps whose loads are in flight.

Three terms are never hidden: the *ends* (the first load, and the work of a program before and after its steps), the
*store* of results where programs end together, and the *launch*.

Peaks, bandwidth, clock, L2 size and compute units are those of `hardware.Arch`, registers and LDS of `occupancy`;
`Constants` has the numbers that no datasheet gives. docs/cost_model.md says how good the model is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from wavecrest.dispatch.tuned.config import Config
from wavecrest.dispatch.tuned.row import Proposal
from wavecrest.hardware import Arch
from wavecrest.hardware.occupancy import occupancy, unit

# bytes a cycle and compute unit: its port to the L2 (NVIDIA: 64, AMD CDNA 2 white paper: 64), and LDS
L2_BYTES, LDS_BYTES = 64, 128
# the share of the L2 that keeps operands from one use to the next
L2_KEPT = 0.7
# registers that a lane can address
MOST_REGISTERS = {("nvidia", 32): 255, ("amd", 64): 512, ("amd", 32): 256}
# bytes of a register that is spilled and loaded again, in each step
SPILLED_BYTES = 8
# the parts of a prediction
TERMS = ("matrix", "vector", "lds", "l2", "memory", "latency", "ends", "store", "launch")
# times faster than the default, by the model, that a configuration must be to run instead of it
LEAD = 1.05
# architectures with measurements that the model was held against (docs/cost_model.md)
HELD_AGAINST = ("sm_90",)


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants that no datasheet gives; docs/cost_model.md says how each was obtained.

    Args:
        overlap: the part of the time of every other resource that is not hidden behind the slowest one.
        launch, following: µs of the first launch of a call, and of each later one.
        memory_cycles, l2_cycles: latency of a load from memory and from the L2, in cycles.
        matrix, matrix_8bit: the fraction of the peak that matrix instructions reach; of 8-bit types.
        bandwidth, l2, vector: likewise.
        step_cycles: cycles of a step beside its matrix instructions: it waits for its loads and for the other warps.
        program_cycles: cycles of a program beside its steps.
        registers: registers of a lane beside operands and accumulators.
    """

    overlap: float = 0.2
    launch: float = 2.5
    following: float = 4.0
    memory_cycles: float = 1100.0
    l2_cycles: float = 350.0
    matrix: float = 0.7
    matrix_8bit: float = 0.7
    bandwidth: float = 0.94
    l2: float = 0.78
    vector: float = 0.85
    step_cycles: float = 70.0
    program_cycles: float = 600.0
    registers: float = 42.0


# fitted to measurements on one H200
CONSTANTS = Constants()
# fitted to times of GEMMs that AMD published for MI300X and MI355X, of half of the weights (evidence/published,
# `python -m benchmarks.published_times fit`, 2026-11-25); every other architecture has CONSTANTS
FITTED = {
    "gfx942": Constants(
        overlap=0.23, launch=2.1, matrix_8bit=0.46, bandwidth=0.61, l2=0.63, program_cycles=520.0
    ),
    "gfx950": Constants(
        overlap=0.21, launch=2.7, matrix=1.0, matrix_8bit=0.48, bandwidth=0.89, l2=1.0, program_cycles=75.0
    ),
}  # fmt: skip


def constants_of(arch: Arch) -> Constants:
    """The constants of an architecture."""
    return FITTED.get(arch.name, CONSTANTS)


@dataclass(frozen=True, slots=True)
class Work:
    """One launch: equal programs, each of equal steps.

    Args:
        programs, warps, steps: programs of the launch; warps of a program; steps of a program.
        loaded: bytes that a program loads in a step.
        fresh: bytes that the launch reads from memory: each operand once, or more often where the L2 is too small.
        depth: steps whose loads are in flight while one step computes; 0: a step waits for its own loads.
        shared: bytes of LDS per program.
        registers: registers of a lane for operands and accumulators.
        stored: bytes that a program writes at its end.
        matrix: operations of matrix instructions in a step, padding included, in the type `dtype`.
        rate: the fraction of the peak of `dtype` that these instructions reach.
        vector: other operations in a step, of 32 bits.
        lds: bytes through LDS in a step.
        chain: cycles that a step waits for its own results, beside its matrix and vector operations.
        ends: cycles before and after the steps, beyond those that every program has.
        groups: warp groups that work at different places of a step.
        atomics: atomic operations of a program to one address that all programs share.
    """

    programs: int
    warps: int
    steps: float
    loaded: float
    fresh: float
    depth: float = 0.0
    shared: int = 0
    registers: float = 0.0
    stored: float = 0.0
    matrix: float = 0.0
    dtype: str = "float32"
    rate: float = 1.0
    vector: float = 0.0
    lds: float = 0.0
    chain: float = 0.0
    ends: float = 0.0
    groups: float = 1.0
    atomics: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """A time in µs, and the µs that each of `TERMS` contributes."""

    us: float
    terms: Mapping[str, float]

    @property
    def shares(self) -> dict[str, float]:
        """The fraction of the time that each term takes."""
        return {name: us / self.us for name, us in self.terms.items()}


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration of a backend with its prediction; `default`: it is the backend's default."""

    backend: str
    config: Config
    default: bool
    prediction: Prediction = field(hash=False)


def peak(arch: Arch, dtype: str) -> float:
    """Operations per cycle and compute unit: of matrix instructions, or of plain float32 instructions."""
    # tf32 at half the rate of 16 bits
    rate = max(arch.peak_fp32, arch.peak_16bit / 2) if dtype == "tf32" else arch.peak(dtype)
    return rate * 1e3 / (arch.compute_units * arch.clock)


def _registers(work: Work, arch: Arch, constants: Constants) -> tuple[int, float]:
    """Registers per lane that the compiler can use, and the number of those that it must spill."""
    one = unit(arch, wgp=False)
    most = one.registers // math.ceil(work.warps / one.simds) // one.granule * one.granule
    most = min(most, MOST_REGISTERS[arch.vendor, arch.wave_size])
    wanted = work.registers + constants.registers
    return min(math.ceil(wanted), most), max(0.0, wanted - most)


def resident(work: Work, arch: Arch, constants: Constants | None = None) -> int:
    """Programs that are resident on a compute unit at a time; 0 where none fits."""
    constants = constants or constants_of(arch)
    one = unit(arch, wgp=False)
    vgpr, _ = _registers(work, arch, constants)
    found = occupancy(arch, vgpr=vgpr, sgpr=0, lds=work.shared, warps=work.warps, wgp=False)
    return round(found.waves * one.simds / work.warps)


def l2_bytes(arch: Arch) -> float:
    """Bytes of operands that the L2 of all dies holds from one use to the next."""
    return L2_KEPT * arch.l2_mib * arch.xcds * 2**20


def predict_launch(
    work: Work, arch: Arch, constants: Constants | None = None, *, following: bool = False
) -> Prediction | None:
    """The time of one launch; None where no program fits.

    Args:
        work: the launch.
        arch: what it runs on.
        constants: None: those of the architecture.
        following: another launch comes before it.
    """
    constants = constants or constants_of(arch)
    fit = resident(work, arch, constants)
    if fit == 0:
        return None
    units, clock = arch.compute_units, arch.clock * 1e3
    full, rest = divmod(work.programs, units * fit)
    rounds, busiest = full + (rest > 0), full * fit + math.ceil(rest / units)
    _, spilled = _registers(work, arch, constants)
    spills = spilled * work.warps * arch.wave_size * SPILLED_BYTES
    reached = constants.matrix_8bit if work.dtype.startswith(("int8", "float8")) else constants.matrix
    matrix = work.matrix / (peak(arch, work.dtype) * work.rate * reached)
    # a multiplication and an addition are two operations of the peak; a SIMD has a quarter of the lanes
    lanes = peak(arch, "float32") / 2 * constants.vector
    vector, own = work.vector / lanes, work.vector / (lanes * min(1.0, work.warps / 4))
    through, all_steps = work.loaded + spills, work.programs * work.steps
    miss = min(1.0, work.fresh / (all_steps * work.loaded)) if work.loaded else 0.0
    way = constants.l2_cycles + (constants.memory_cycles - constants.l2_cycles) * math.sqrt(miss)
    chain = (matrix + own) / work.groups + work.chain + constants.step_cycles + spills / L2_BYTES
    arrival = way + work.loaded / L2_BYTES
    step = max(chain, arrival / work.depth) if work.depth > 0 else chain + arrival
    # bytes written in all, and by the programs that run last, when no others hide the store
    written, last = (count * work.stored for count in (work.programs, min(work.programs, units * fit)))
    ends = way + constants.program_cycles + work.ends
    cycles = {
        "matrix": busiest * work.steps * matrix,
        "vector": busiest * work.steps * vector,
        "lds": busiest * work.steps * work.lds / LDS_BYTES,
        "l2": max(all_steps * through / (units * constants.l2), busiest * work.steps * through) / L2_BYTES
        + work.programs * work.atomics,
        "memory": (work.fresh + written - last) / _memory_bytes(arch, constants),
        "latency": rounds * work.steps * step + (rounds - 1) * ends,
    }
    slowest = max(cycles, key=lambda name: cycles[name])
    terms = {name: value if name == slowest else value * constants.overlap for name, value in cycles.items()}
    terms["ends"] = ends
    terms["store"] = last / _memory_bytes(arch, constants)
    terms = {name: value / clock for name, value in terms.items()}
    terms["launch"] = constants.following if following else constants.launch
    return Prediction(sum(terms.values()), terms)


def _memory_bytes(arch: Arch, constants: Constants) -> float:
    """Bytes per cycle that memory delivers."""
    return arch.bandwidth * constants.bandwidth / arch.clock


def predict(works: Sequence[Work], arch: Arch, constants: Constants | None = None) -> Prediction | None:
    """The time of consecutive launches; None where a program does not fit, or nothing is launched."""
    terms = dict.fromkeys(TERMS, 0.0)
    for place, work in enumerate(works):
        one = predict_launch(work, arch, constants, following=place > 0)
        if one is None:
            return None
        for name, us in one.terms.items():
            terms[name] += us
    return Prediction(sum(terms.values()), terms) if works else None


class Described(Protocol):
    """A kernel that says what its launches do (see `wavecrest.dispatch.study.KernelStudy`)."""

    @property
    def space(self) -> Callable[[tuple[Any, ...], Arch], Iterable[Config]] | None:
        """The configurations worth trying for a key, the default first."""

    @property
    def work(self) -> Callable[[tuple[Any, ...], Config, Arch], tuple[Work, ...]] | None:
        """The function that describes the launches of a key as `Work`."""


def rank(
    kernels: Mapping[str, Described],
    key: tuple[Any, ...],
    arch: Arch,
    backends: Iterable[str] | None = None,
    constants: Constants | None = None,
) -> list[Choice]:
    """The configurations of an op's kernels for a key, the fastest by the model first, in order of trial where equal.

    Args:
        kernels: by backend, the one of the highest priority first.
        key: the call's key; where it does not say how much work there is, nothing is ranked.
        arch: the architecture it would run on, which need not be that of this machine.
        backends: only these; None: all that describe their work.
        constants: None: those of the architecture.
    """
    found = []
    for name, kernel in kernels.items():
        if kernel.work is None or kernel.space is None or (backends is not None and name not in backends):
            continue
        for place, config in enumerate(dict.fromkeys(kernel.space(key, arch))):
            prediction = predict(kernel.work(key, config, arch), arch, constants)
            if prediction is not None:
                found.append(Choice(name, config, place == 0, prediction))
    return sorted(found, key=lambda choice: choice.prediction.us)


def propose(
    kernels: Mapping[str, Described], key: tuple[Any, ...], arch: Arch, _taking: Sequence[str], fallback: str
) -> Proposal | None:
    """The configuration to run in place of the fallback's default, or None to keep the default; see `Study.model`.

    Only the fallback's configurations are ranked: the model has no times of libraries, and wavecrest's other kernels
    run only where a measured row names them. The default stays on architectures without measurements to hold the model
    against.
    """
    if arch.name not in HELD_AGAINST:
        return None
    found = rank(kernels, key, arch, (fallback,))
    default = next((one for one in found if one.default), None)
    if default is None or default.prediction.us < LEAD * found[0].prediction.us:
        return None
    best, lead = found[0], default.prediction.us / found[0].prediction.us
    reason = f"no measured row: the cost model gives it {best.prediction.us:.1f} µs, the default {lead:.2f} times that"
    return Proposal(best.backend, best.config, "model", reason)
