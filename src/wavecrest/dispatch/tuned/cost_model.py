"""How long a kernel takes on an architecture, from what it does: an analytic model, for ranking configurations.

An op describes the launches of a call as `Work`: equal programs of equal steps. The time of a launch is that of its
slowest resource, and of each other one a part (`Constants.overlap`), as nothing overlaps wholly:

- *matrix*, *vector*, *lds*: what the programs of the busiest compute unit take of it. Programs run in rounds of as many
  as registers and LDS let be resident (`occupancy`): a last round that is not full costs a whole one (wave
  quantisation);
- *l2*: what all programs load, at the rate of the whole L2, or the busiest unit's, at that of its port;
- *memory*: the bytes that must come from memory, over its bandwidth;
- *latency*: the steps of a program one after another, each no shorter than its chain of dependent instructions, nor
  than the way of a load over the steps whose loads are under way.

Nothing hides the *ends* (the first load, and what a program does before and after its steps), the *store* of results
where programs end together, and the *launch*.

Peaks, bandwidth, clock, L2 size and compute units are those of `hardware.Arch`, registers and LDS of `occupancy`;
`Constants` is what no datasheet says. docs/cost_model.md has what the model is worth.
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
# of the L2, what holds operands from one use to the next
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
    """What no datasheet says; docs/cost_model.md says how each was obtained.

    Args:
        overlap: of what is not the slowest resource, the part that is not hidden behind it.
        launch, following: µs of the first launch of a call, and of each other one.
        memory_cycles, l2_cycles: until a load is there.
        matrix, bandwidth, l2, vector: of the peaks, what is reached.
        step_cycles: of a step beside its products: waiting for its loads, and for the other warps.
        program_cycles: of a program beside its steps.
        registers: a lane, beside operands and sums.
    """

    overlap: float = 0.2
    launch: float = 2.5
    following: float = 4.0
    memory_cycles: float = 1100.0
    l2_cycles: float = 350.0
    matrix: float = 0.7
    bandwidth: float = 0.94
    l2: float = 0.78
    vector: float = 0.85
    step_cycles: float = 70.0
    program_cycles: float = 600.0
    registers: float = 42.0


CONSTANTS = Constants()


@dataclass(frozen=True, slots=True)
class Work:
    """One launch: equal programs, each of equal steps.

    Args:
        programs, warps, steps: of the launch, of a program, of a program.
        loaded: bytes that a program loads in a step.
        fresh: bytes that the launch reads from memory: each of its operands once, or oftener where the L2 is too small.
        depth: steps whose loads are under way while one is worked on; 0: a step waits for its own.
        shared: bytes of LDS a program.
        registers: a lane, of operands and sums.
        stored: bytes that a program writes at its end.
        matrix: operations of matrix instructions in a step, with those of padding, in the type `dtype`.
        rate: of the peak of `dtype`, what these instructions reach.
        vector: other operations in a step, of 32 bits.
        lds: bytes through LDS in a step.
        chain: cycles that a step waits for its own results, beside its products and vector operations.
        ends: cycles before and after the steps that are not every program's.
        groups: of warps, that work at different places of a step.
        atomics: of a program, to one address of all programs.
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
    """A time in µs, and what each of `TERMS` has of it."""

    us: float
    terms: Mapping[str, float]

    @property
    def shares(self) -> dict[str, float]:
        """Of the time, the part of each term."""
        return {name: us / self.us for name, us in self.terms.items()}


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration of a backend, with what is predicted of it; `default`: the backend's own."""

    backend: str
    config: Config
    default: bool
    prediction: Prediction = field(hash=False)


def peak(arch: Arch, dtype: str) -> float:
    """Operations a cycle and compute unit: of matrix instructions, or of float32 as they are."""
    # tf32 at half the rate of 16 bits
    rate = max(arch.peak_fp32, arch.peak_16bit / 2) if dtype == "tf32" else arch.peak(dtype)
    return rate * 1e3 / (arch.compute_units * arch.clock)


def _registers(work: Work, arch: Arch, constants: Constants) -> tuple[int, float]:
    """Registers a lane that the compiler can take, and how many more are spilled."""
    one = unit(arch, wgp=False)
    most = one.registers // math.ceil(work.warps / one.simds) // one.granule * one.granule
    most = min(most, MOST_REGISTERS[arch.vendor, arch.wave_size])
    wanted = work.registers + constants.registers
    return min(math.ceil(wanted), most), max(0.0, wanted - most)


def resident(work: Work, arch: Arch, constants: Constants = CONSTANTS) -> int:
    """Programs that a compute unit holds at a time; 0 where not one fits."""
    one = unit(arch, wgp=False)
    vgpr, _ = _registers(work, arch, constants)
    found = occupancy(arch, vgpr=vgpr, sgpr=0, lds=work.shared, warps=work.warps, wgp=False)
    return round(found.waves * one.simds / work.warps)


def l2_bytes(arch: Arch) -> float:
    """Bytes of operands that the L2 of all dies holds from one use to the next."""
    return L2_KEPT * arch.l2_mib * arch.xcds * 2**20


def predict_launch(
    work: Work, arch: Arch, constants: Constants = CONSTANTS, *, following: bool = False
) -> Prediction | None:
    """The time of one launch; None where not one program fits. `following`: another one is in front of it."""
    fit = resident(work, arch, constants)
    if fit == 0:
        return None
    units, clock = arch.compute_units, arch.clock * 1e3
    full, rest = divmod(work.programs, units * fit)
    rounds, busiest = full + (rest > 0), full * fit + math.ceil(rest / units)
    _, spilled = _registers(work, arch, constants)
    spills = spilled * work.warps * arch.wave_size * SPILLED_BYTES
    matrix = work.matrix / (peak(arch, work.dtype) * work.rate * constants.matrix)
    # a multiplication and an addition are two operations of the peak; a SIMD has a quarter of the lanes
    lanes = peak(arch, "float32") / 2 * constants.vector
    vector, own = work.vector / lanes, work.vector / (lanes * min(1.0, work.warps / 4))
    through, all_steps = work.loaded + spills, work.programs * work.steps
    miss = min(1.0, work.fresh / (all_steps * work.loaded)) if work.loaded else 0.0
    way = constants.l2_cycles + (constants.memory_cycles - constants.l2_cycles) * math.sqrt(miss)
    chain = (matrix + own) / work.groups + work.chain + constants.step_cycles + spills / L2_BYTES
    arrival = way + work.loaded / L2_BYTES
    step = max(chain, arrival / work.depth) if work.depth > 0 else chain + arrival
    # what is written while other programs run, and by those that run last
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
    """Bytes a cycle that memory gives."""
    return arch.bandwidth * constants.bandwidth / arch.clock


def predict(works: Sequence[Work], arch: Arch, constants: Constants = CONSTANTS) -> Prediction | None:
    """The time of launches one after another; None where a program does not fit, or nothing is launched."""
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
        """What the launches of a key do."""


def rank(
    kernels: Mapping[str, Described],
    key: tuple[Any, ...],
    arch: Arch,
    backends: Iterable[str] | None = None,
    constants: Constants = CONSTANTS,
) -> list[Choice]:
    """The configurations of an op's kernels for a key, the fastest by the model first, in order of trial where equal.

    Args:
        kernels: by backend, the one of the highest priority first.
        key: the call's; of a key that does not say how much there is to do nothing is ranked.
        arch: where it would run, here or not.
        backends: only these; None: all that describe their work.
        constants: see `Constants`.
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
    """What to run in place of the fallback's default configuration, or None to keep it; see `Study.model`.

    Of the fallback alone: a library's time is not modelled, and other kernels of ours run where a measured row names
    them. On architectures that the model was not held against the default stays.
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
