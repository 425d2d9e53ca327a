"""A Triton driver that runs kernels in the emulator, and the switch that makes it and the ops use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.triton as _triton
from wavecrest import hardware
from wavecrest.dispatch import registry
from wavecrest.errors import (
    EnvironmentProblem,
    HazardFound,
    InvalidArgument,
    MissingDependency,
    OutOfBounds,
    Unsupported,
)
from wavecrest.isa.emulate import decode, machine, opcodes, program
from wavecrest.isa.emulate.memory import Guard
from wavecrest.isa.emulate.program import Program, Stats
from wavecrest.isa.emulate.uninitialised import Uninitialised
from wavecrest.isa.emulate.watch import BESIDE, Finding

ARCHS = tuple(arch.name for arch in hardware.ARCHS.values() if arch.vendor == "amd")
# device numbers that no GPU has: Triton keeps compiled kernels by them
_FIRST_DEVICE = 100
# findings of a launch that the error names
SHOWN = 6


class Launched(NamedTuple):
    """One kernel launch in the emulator."""

    kernel: str
    num_warps: int
    shared: int
    stats: Stats


class _Utils:
    """Device properties that Triton reads, and its way to load a kernel."""

    def __init__(self, arch: hardware.Arch) -> None:
        self._arch = arch

    def get_device_properties(self, _device: int) -> dict[str, Any]:
        return {
            "max_shared_mem": self._arch.lds_kib << 10,
            "multiprocessor_count": self._arch.compute_units,
            "warpSize": self._arch.wave_size,
            "arch": self._arch.name,
            "max_num_regs": 65536,
            # clock rates are unknown: nothing is timed
            **dict.fromkeys(("sm_clock_rate", "mem_clock_rate", "mem_bus_width"), 1),
        }

    def load_binary(self, name: str, kernel: bytes, _shared: int, _device: int) -> tuple[Any, Program, int, int, int]:
        # module, function, registers and spills (not read here), most threads of a workgroup
        return kernel, Program(kernel, name), 0, 0, 1024


def _leaves(name: str, kind: Any, value: Any) -> Iterator[tuple[str, Any, Any]]:
    """The (name, type, value) parts of an argument: tuples are flattened, constexprs are left out."""
    if isinstance(kind, tuple):
        for index, (inner, part) in enumerate(zip(kind, value, strict=True)):
            yield from _leaves(f"{name}[{index}]", inner, part)
    elif kind != "constexpr":
        yield name, kind, value


def _active() -> Any:
    from triton.runtime import driver

    return driver.active


class _Launcher:
    """The launcher that Triton calls; the driver active at the call runs the kernel, as kernels outlive drivers."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._metadata = metadata
        self._signature = list(source.signature.items())

    def __call__(
        self,
        gx: int,
        gy: int,
        gz: int,
        _stream: int,
        function: Program,
        _packed: Any,
        launch_metadata: Any,
        enter: Any,
        leave: Any,
        *args: Any,
    ) -> None:
        driver = _active()
        if not isinstance(driver, EmulatedDriver):
            raise Unsupported(f"{self._metadata.name} was compiled for the emulator, which is not active any more")
        if enter is not None:
            enter(launch_metadata)
        arguments = [
            leaf
            for (name, kind), value in zip(self._signature, args, strict=False)
            for leaf in _leaves(name, kind, value)
        ]
        driver.launch(function, (gx, gy, gz), arguments, self._metadata)
        if leave is not None:
            leave(launch_metadata)


class EmulatedDriver:
    """Triton's driver for one architecture: kernels with CPU tensors run as its machine code.

    Attributes:
        runs: every launch so far.
    """

    def __init__(self, arch: str, *, guard: bool = True, check: bool = False, **options: Any) -> None:
        from triton.backends.compiler import GPUTarget

        if arch not in ARCHS:
            raise InvalidArgument(f"the emulator runs {', '.join(ARCHS)}, not {arch!r}")
        if check and not guard:
            raise InvalidArgument("check=True needs guard=True, which knows the memory of each argument")
        if check:
            program.check_watched(arch)
        self.arch, self.guard, self.options = arch, guard, options
        self.uninitialised = Uninitialised() if check else None
        self.runs: list[Launched] = []
        self.utils = _Utils(hardware.ARCHS[arch])
        self.launcher_cls = _Launcher
        self._target = GPUTarget("hip", arch, decode.wave_size(arch))

    def launch(self, code: Program, grid: Sequence[int], args: Sequence[tuple[str, Any, Any]], metadata: Any) -> None:
        """Launch a kernel with its (name, type, value) arguments, constexprs left out."""
        tensors = []
        for name, _, value in args:
            base = getattr(value, "base", value) if _is_descriptor(value) else value
            if isinstance(base, Tensor):
                if base.device.type != "cpu":
                    raise InvalidArgument(
                        f"argument {name} of {metadata.name} is on {base.device}; emulated kernels take CPU tensors"
                    )
                tensors.append((name, base))
        guard = Guard(tensors) if self.guard else None
        values: list[Any] = []
        for _, kind, value in args:
            values += _values(kind, value, guard)
        stats = code.launch(
            grid,
            values,
            num_warps=metadata.num_warps,
            shared=metadata.shared,
            describe=hex if guard is None else guard.describe,
            regions=None if self.uninitialised is None or guard is None else guard.watched(self.uninitialised),
            **self.options,
        )
        self.runs.append(Launched(metadata.name, metadata.num_warps, metadata.shared, stats))
        if guard is not None:
            if stats.findings:
                only_bounds = all(finding.kind == BESIDE for finding in stats.findings)
                raise (OutOfBounds if only_bounds else HazardFound)(_listed(metadata.name, stats.findings))
            guard.finish()
            stats.unguarded = guard.unguarded
            if self.uninitialised is not None:
                guard.take_states(self.uninitialised)

    @classmethod
    def is_active(cls) -> bool:
        """False: Triton never finds this driver itself; it is set."""
        return False

    def map_python_to_cpp_type(self, kind: str) -> str:
        """No launcher is compiled here."""
        raise Unsupported(f"the emulator has no C++ launcher, and so no C++ type for {kind}")

    def get_current_target(self) -> Any:
        """The target that kernels are compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """A number that differs by architecture."""
        return _FIRST_DEVICE + ARCHS.index(self.arch)

    def set_current_device(self, _device: int) -> None:
        """Do nothing: there is one device."""

    def get_current_stream(self, _device: int | None = None) -> int:
        """Launches are synchronous."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """The device of the tensors."""
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Refuse: timing asks for what torch.cuda is to a GPU."""
        raise Unsupported("the emulator has no clock and no device interface: triton.testing cannot time a kernel here")

    def get_benchmarker(self) -> Callable[..., list[float]]:
        """For autotuning: ranks by executed wave instructions, an order and not a time."""

        def bench(call: Callable[[], Any], *, quantiles: Sequence[float] | None = None, **_: Any) -> list[float]:
            before = len(self.runs)
            call()
            cost = float(sum(launched.stats.instructions for launched in self.runs[before:]))
            return [cost] * len(quantiles or (0.5,))

        return bench

    def get_empty_cache_for_benchmark(self) -> None:
        """Caches are not modelled."""

    def clear_cache(self, _cache: Any) -> None:
        """Caches are not modelled."""


def _listed(kernel: str, findings: Sequence[Finding]) -> str:
    """The findings of a launch, those of one sort after the other."""
    ordered = sorted(findings, key=lambda finding: finding.kind)
    more = [f"and {len(ordered) - SHOWN} more"] if len(ordered) > SHOWN else []
    return f"{kernel}: " + "; ".join([*(finding.text for finding in ordered[:SHOWN]), *more])


def _is_descriptor(value: Any) -> bool:
    """True for Triton's host-side tensor descriptors."""
    return hasattr(value, "base") and hasattr(value, "block_shape")


def _values(kind: Any, value: Any, guard: Guard | None) -> list[Any]:
    """The kernel arguments that a Triton argument becomes."""
    if isinstance(value, Tensor):
        return [value.data_ptr() if guard is None else guard.pointer(value)]
    if _is_descriptor(value):
        base = value.base.data_ptr() if guard is None else guard.pointer(value.base)
        nan = int(getattr(value, "padding", "zero") == "nan")
        return [base, *value.shape, *value.strides, nan, *value.shape, *value.strides]
    if hasattr(value, "data_ptr"):
        return [value.data_ptr()]
    if kind == "bf16":
        return [torch.tensor(value, dtype=torch.bfloat16).view(torch.int16).item()]
    return [float(value) if kind in ("fp16", "fp32", "fp64") else value]


def check_available() -> None:
    """Check that kernels can be emulated in this process.

    Raises:
        MissingDependency: no Triton, no tinygrad, or no C compiler; the message says how to get it.
        EnvironmentProblem: kernels are defined for Triton's interpreter, or the platform or tinygrad does not fit.
    """
    if _triton.unavailable is not None:
        raise MissingDependency("triton", "the emulator", "pip install triton")
    if _triton.interpreted:
        raise EnvironmentProblem(
            "TRITON_INTERPRET=1 is set: kernels are defined for Triton's interpreter and cannot be compiled for a GPU; "
            "unset it"
        )
    opcodes.tables("cdna")
    machine.load()


@contextmanager
def emulated(
    arch: str,
    *,
    guard: bool = True,
    check: bool = False,
    workers: int = 1,
    resident: int = program.RESIDENT,
    quantum: int = program.QUANTUM,
    limit: int = program.LIMIT,
) -> Iterator[EmulatedDriver]:
    """Run Triton kernels, those of the ops too, as machine code of an AMD architecture on the CPU.

    Inside, `kernel[grid](...)` takes CPU tensors and `ops.get(name).run("triton", ...)` launches with the
    configuration that is shipped for `arch`. On leaving, everything is restored.

    Args:
        arch: gfx90a, gfx942, gfx950, gfx1100 or gfx1201.
        guard: find accesses outside of the tensors of a launch; `memory.Guard` says how.
        check: find missing waits and barriers, accesses beside the elements of a tensor and values that nothing wrote
            (machine/watch.h), on CDNA; a launch with findings raises HazardFound, or
            OutOfBounds if all are such accesses. Needs `guard`.
        workers, resident, quantum, limit: as for `Program.launch`.

    Raises:
        InvalidArgument: another architecture, or `check` without `guard`.
        Unsupported: `check` on an architecture that is not CDNA.
        MissingDependency, EnvironmentProblem: as for `check_available`.
    """
    check_available()
    from triton.runtime import driver as config

    options = {"workers": workers, "resident": resident, "quantum": quantum, "limit": limit}
    driver = EmulatedDriver(arch, guard=guard, check=check, **options)
    # not `config.active`, which looks for a GPU and fails without one
    before = config._active, _triton.emulated, _triton.resident
    config._active, _triton.emulated, _triton.resident = driver, arch, resident
    registry.forget()
    try:
        with driver.uninitialised or nullcontext():
            yield driver
    finally:
        config._active, _triton.emulated, _triton.resident = before
        registry.forget()
