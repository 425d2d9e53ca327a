"""The models of the zoo: their sizes, what they are counted in, and how they are built.

A model is a function that takes a `Site` and returns the module with its inputs, registered by `@model`. Importing
this file imports no library of models.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from wavecrest.errors import InvalidArgument, MissingDependency
from wavecrest.measure.workload import Workload, from_example

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# modules that register models when they are imported
FAMILIES = ("vision", "encoders", "language", "audio", "recurrent", "diffusion")
# how the name of a tiny workload ends
TINY = "_tiny"

Unit = Literal["images", "sequences", "tokens", "clips", "pairs", "rows"]
T = TypeVar("T")


class Size(NamedTuple):
    """One call: `batch` items of `length` (tokens, pixels of a side, samples of sound, features), in a dtype."""

    batch: int
    length: int
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Site:
    """Where and how a model is built."""

    device: str
    size: Size
    tiny: bool

    @property
    def batch(self) -> int:
        """Items of one call."""
        return self.size.batch

    @property
    def length(self) -> int:
        """Tokens, pixels of a side, samples or features of an item."""
        return self.size.length

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and of inputs that are not whole numbers."""
        import torch

        return getattr(torch, self.size.dtype)  # type: ignore[no-any-return]

    def either(self, full: T, tiny: T) -> T:
        """The full value, or that of a variant for tests."""
        return tiny if self.tiny else full

    def tokens(self, vocabulary: int, *shape: int) -> Tensor:
        """Token ids of [batch, length], or of a shape; the same in every process."""
        import torch

        random = torch.Generator().manual_seed(1)
        # the lowest ids mark padding and ends
        found = torch.randint(4, vocabulary, shape or (self.batch, self.length), generator=random, device="cpu")
        return found.to(self.device)

    def noise(self, *shape: int) -> Tensor:
        """Normal values in the site's dtype; the same in every process."""
        import torch

        random = torch.Generator().manual_seed(2)
        return torch.randn(shape, generator=random, device="cpu").to(self.device, self.dtype)

    def images(self) -> Tensor:
        """[batch, 3, length, length]."""
        return self.noise(self.batch, 3, self.length, self.length)

    def text(self, vocabulary: int) -> dict[str, Tensor]:
        """Token ids and a mask without padding, as a tokenizer returns them for texts of one length."""
        import torch

        ids = self.tokens(vocabulary)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


# the module in float32, and its inputs; or a function that makes the workload once the weights are final, for inputs
# that hold what the model computes, such as a key-value cache
Build = Callable[[Site], "tuple[nn.Module, Any | Callable[[nn.Module], Workload]]"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A model of the zoo.

    Attributes:
        name: as `--models` takes it.
        library: the package whose code it is; not every machine has it.
        unit: what its rate is counted in; a call has `batch` of them, or `batch · length` where `each_token`.
        gpu, tiny: sizes on a GPU, and in tests.
        cpu: size on a CPU; None: it is too large for one.
        build: makes it.
    """

    name: str
    library: str
    unit: Unit
    gpu: Size
    tiny: Size
    cpu: Size | None
    each_token: bool
    build: Build

    @property
    def about(self) -> str:
        """The first line of the function's docstring."""
        return (self.build.__doc__ or "").strip().splitlines()[0].rstrip(".")

    @property
    def missing(self) -> str:
        """Why it cannot be built here, or an empty string."""
        return "" if importlib.util.find_spec(self.library) else f"{self.library} is not installed"

    def size(self, device: str, *, tiny: bool = False) -> Size:
        """The size on a device.

        Raises:
            InvalidArgument: it is too large for a CPU.
        """
        if tiny:
            return self.tiny
        if not device.startswith("cpu"):
            return self.gpu
        if self.cpu is None:
            raise InvalidArgument(f"{self.name} has no size for a CPU; it is too large for one")
        return self.cpu

    def count(self, size: Size) -> int:
        """How many of `unit` one call has."""
        return size.batch * (size.length if self.each_token else 1)

    def spec(self, *, tiny: bool = False) -> str:
        """The workload as the commands take it."""
        return f"{__package__}.workloads:{self.name.replace('-', '_')}{TINY if tiny else ''}"

    def workload(self, device: str, *, tiny: bool = False) -> Workload:
        """The model with random weights and its inputs; the same weights in every process on one machine.

        Raises:
            MissingDependency: the library is not installed.
            InvalidArgument: it has no size for this device.
        """
        if self.missing:
            raise MissingDependency(self.library, f"the model {self.name}", f"pip install {self.library}")
        module, finish = self.module(Site(device, self.size(device, tiny=tiny), tiny))
        workload = finish(module)
        workload.name = self.name
        return workload

    def module(self, site: Site) -> tuple[nn.Module, Callable[[nn.Module], Workload]]:
        """The model with random weights, and what makes its workload.

        That may be called for other models of the same arguments too, such as one divided over several GPUs, whose
        key-value caches then hold what that model computes.
        """
        import torch
        from benchmarks.zoo import weights

        torch.manual_seed(0)
        with torch.device(site.device):
            module, inputs = self.build(site)
        # a convolution with weight norm (wav2vec 2.0) has a part that is made on the CPU
        module.eval().to(site.device)
        weights.vary(module)
        if callable(inputs):
            return module.to(site.dtype), inputs
        weights.fit_statistics(from_example(module, inputs))
        return module.to(site.dtype), lambda model: from_example(model, inputs)


_ENTRIES: dict[str, Entry] = {}


def model(
    name: str,
    *,
    library: str,
    unit: Unit,
    gpu: Size,
    tiny: Size,
    cpu: Size | None = None,
    each_token: bool = False,
) -> Callable[[Build], Build]:
    """Register the function below it as a model of the zoo; the arguments are those of `Entry`."""

    def register(build: Build) -> Build:
        _ENTRIES[name] = Entry(name, library, unit, gpu, tiny, cpu, each_token, build)
        return build

    return register


def entries() -> dict[str, Entry]:
    """All models by name, in the order of their families."""
    for family in FAMILIES:
        importlib.import_module(f"{__package__}.{family}")
    return dict(_ENTRIES)
