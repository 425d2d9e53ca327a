"""The part of an op that tuning, benchmarking and evidence need and a call does not; loaded on request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

from wavecrest.dispatch.decision import Cost, Key
from wavecrest.dispatch.tuned import Cell, Config, Proposal, Work
from wavecrest.hardware import Arch

C = TypeVar("C", bound=tuple[Any, ...])

# dtypes that example calls of most ops can be made in
EXAMPLE_DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class KernelStudy(Generic[C]):
    """Search space, launches and work of one backend with configurations, for the tools.

    Attributes:
        space: `space(key, arch)` gives the configurations worth trying for a key, the default first, without those
            that cannot work.
        launches: `launches(call, config, arch)` gives the kernel launches of a call, so that they can be compiled
            before it; the tensors may be on the device "meta".
        work: `work(key, config, arch)` describes the launches for the cost model; empty where the key does not say
            how much work there is.
    """

    space: Callable[[Key, Arch], Iterable[Config]] | None = None
    launches: Callable[[C, Config, Arch], list[Any]] | None = None
    work: Callable[[Key, Config, Arch], tuple[Work, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Study(Generic[C]):
    """Examples, costs and bounds of one op. `sizes` names the arguments of `inputs` before dtype and device.

    Attributes:
        inputs: `inputs(*sizes, dtype, device)` makes an example call.
        cost: the least work of a call.
        sizes: the names of the sizes that `inputs` takes.
        example_dtypes: the names of the torch dtypes that `inputs` takes.
        compile_cases: `compile_cases(arch, config)` gives, by name, the launches that must compile for an architecture,
            made from meta tensors: with the shipped configurations, or with `config`.
        bench_cases: `bench_cases(suite, device)` gives, by name, functions that make the call of a case of
            `wavecrest bench`, for ops whose speed is not measured on the M × N tensors from `inputs`.
        emulate_cases: `emulate_cases(arch)` gives, by name, functions that make calls (on the CPU) that
            `wavecrest isa run` adds to those from `inputs`: options that `inputs` leaves at their defaults.
        unpacked: the same call with a packed weight unpacked, for peers that have no packed weights.
        bound: how far elements of a kernel's first result may be from the reference's, float64 of its shape, or a tuple
            with one for each result; or None where only the tolerance of the op's class is used.
        call_of_key: `call_of_key(parts, device)` makes a call with the key whose parts it is given by name, so that
            recorded untuned calls can be tuned; None where it cannot make one.
        model: `model(key, arch, taking, fallback)` gives what a cost model proposes for a key that has neither a row of
            its own nor a near one, among the backends `taking` the call, of which `fallback` would run it; or None.
        stores: the fields that a call may write to: what is written is rounded to their dtypes, which an oracle in
            float64 leaves as they are.
        kernels: the `KernelStudy` of each backend, by its name.
    """

    inputs: Callable[..., C]
    cost: Callable[[C], Cost]
    sizes: tuple[str, ...] = ("M", "N")
    example_dtypes: tuple[str, ...] = EXAMPLE_DTYPES
    compile_cases: Callable[[Arch, Config | None], dict[str, Any]] | None = None
    bench_cases: Callable[[str, str], dict[str, Callable[[], C]]] | None = None
    emulate_cases: Callable[[str], dict[str, Callable[[], C]]] | None = None
    unpacked: Callable[[C], C] | None = None
    bound: Callable[[C], Tensor | tuple[Tensor, ...] | None] | None = None
    call_of_key: Callable[[Mapping[str, Cell], str], C | None] | None = None
    model: Callable[[Key, Arch, tuple[str, ...], str], Proposal | None] | None = None
    stores: tuple[str, ...] = ()
    kernels: Mapping[str, KernelStudy[C]] = field(default_factory=dict)

    def kernel(self, backend: str) -> KernelStudy[C]:
        """The study of a backend; an empty one where the backend has no configurations."""
        return self.kernels.get(backend) or KernelStudy()
