"""Calibration: the inputs that the layers of a model get, and the norms that feed linear layers and nothing else."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from wavecrest.errors import InvalidArgument
from wavecrest.measure.tree import iter_tensors
from wavecrest.measure.workload import Buckets, Inputs, Workload, from_example
from wavecrest.nn import Linear
from wavecrest.ops import rms_norm
from wavecrest.quantizer.layers import Site

# rows of a layer's inputs that its error is measured on
ROWS = 128
# rows of a norm's input that a migration of scales is tried on
PROBE_ROWS = 4


def workload_of(model: nn.Module, inputs: Any, name: str) -> Workload:
    """A workload of example inputs: one example, or a list of several. The model is in eval mode until `restore_modes`.

    Raises:
        InvalidArgument: the list is empty.
        WorkloadError: these are no inputs, or they are not where the model is.
    """
    if isinstance(inputs, Buckets):
        return from_example(model, inputs)
    examples = inputs if isinstance(inputs, list) else [inputs]
    if not examples:
        raise InvalidArgument(f"quantize: {name} has no inputs")
    return from_example(model, Buckets({f"{name} {index}": one for index, one in enumerate(examples)}))


@torch.no_grad()
def outputs(workload: Workload) -> Iterator[tuple[Inputs, Any]]:
    """Each input with the model's answer; a call that writes into its inputs writes into copies."""
    for inputs in workload.buckets.values():
        yield inputs, inputs.clone().call(workload.model)


@dataclass(slots=True)
class Seen:
    """Inputs of a layer in calibration.

    Attributes:
        rows: [R, K] of them, at most ROWS.
        peaks: float32 [K], the largest magnitude of each column.
        most_rows: of one call.
    """

    rows: Tensor
    peaks: Tensor
    most_rows: int


@dataclass(slots=True)
class Norm:
    """A module that feeds linear layers.

    Attributes:
        path: its place.
        module: the norm, with a weight [K] and maybe a bias.
        sites: the layers that take its output.
        probe: rows of its input.
        spoilt: why its scales cannot be moved, or an empty string.
    """

    path: str
    module: nn.Module
    sites: list[Site]
    probe: Tensor
    spoilt: str = ""


@dataclass(slots=True)
class Observed:
    """Inputs by the path of a site, norms that feed sites, and by path the reader of a site's weight outside of it."""

    seen: dict[str, Seen] = field(default_factory=dict)
    norms: list[Norm] = field(default_factory=list)
    readers: dict[str, str] = field(default_factory=dict)


def observe(workload: Workload, sites: Iterable[Site], *, flow: bool) -> Observed:
    """Run the model on its inputs and hold those of its layers.

    Args:
        workload: from `workload_of`.
        sites: the layers.
        flow: follow the outputs of norms too.

    Returns:
        Inputs, norms, and the sites whose weights are read by more than the layer itself.
    """
    sites = list(sites)
    watch = _Watch(workload.model, sites, flow)
    with watch.installed():
        for inputs in workload.buckets.values():
            # before the mode, which would see the copies
            own = inputs.clone()
            with torch.no_grad(), watch:
                result = own.call(workload.model)
            watch.end_of_call(result)
    for norm in watch.norms.values():
        if any(site.path in watch.readers for site in norm.sites):
            norm.spoilt = norm.spoilt or "the weight of one of its layers is read outside of it"
    return Observed(watch.seen, [norm for norm in watch.norms.values() if norm.sites], watch.readers)


def _is_norm(module: nn.Module) -> bool:
    """Whether a module may be a norm: a vector as its weight, maybe one as its bias, and no more."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 1 or any(True for _ in module.children()):
        return False
    own = {name for name, value in module._parameters.items() if value is not None}
    # of a batch norm the weight is of channels
    return own <= {"weight", "bias"} and not list(module.buffers(recurse=False))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hooks on layers and norms, and a look at every operation between them."""

    def __init__(self, model: nn.Module, sites: list[Site], flow: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._sites, self._flow = model, sites, flow
        self.seen: dict[str, Seen] = {}
        self.norms: dict[int, Norm] = {}
        self.readers: dict[str, str] = {}
        users = Counter(id(one) for module in model.modules() for one in module._parameters.values())
        # an embedding that is tied to a layer keeps the weight when the layer has a packed one
        self._weights = {_memory(site.parameter): site.path for site in sites if users[id(site.parameter)] == 1}
        # outputs of norms in this call by their memory; the tensors are held so that no other gets that memory
        self._held: dict[int, tuple[Tensor, Norm]] = {}
        # layers and norms that run now: what they do with their inputs is known
        self._inside = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        handles = []
        try:
            for site in self._sites:
                handles.append(site.module.register_forward_pre_hook(self._before(site), with_kwargs=True))
                handles.append(site.module.register_forward_hook(self._after, always_call=True))
            if self._flow:
                for path, module in self._model.named_modules():
                    if _is_norm(module):
                        handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                        handles.append(module.register_forward_hook(self._out_of(path, module)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def end_of_call(self, result: Any) -> None:
        """A norm's output that the model returns has another reader."""
        for _, tensor in iter_tensors("", result, set()):
            self._spoil(tensor, "the model returns its output")
        self._held.clear()
        self._inside = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._inside and not _is_view(func):
            name = f"{func.namespace}.{func.overloadpacket.__name__}"
            for leaf in pytree.tree_leaves((args, kwargs or {})):
                if isinstance(leaf, Tensor):
                    self._spoil(leaf, f"{name} reads its output too")
                    layer = self._weights.get(_memory(leaf))
                    if layer is not None:
                        self.readers.setdefault(layer, name)
        return func(*args, **(kwargs or {}))

    def _spoil(self, tensor: Any, reason: str) -> None:
        found = self._held.get(_memory(tensor))
        if found is not None and not found[1].spoilt:
            found[1].spoilt = reason

    def _before(self, site: Site) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inside += 1
            x, normed = _argument(module, args, kwargs)
            if self._flow:
                self._reads(site, x)
                for other in pytree.tree_leaves((args, kwargs)):
                    if other is not x:
                        self._spoil(other, f"{site.path} adds its output")
            self._take(site, normed)

        return hook

    def _after(self, *_args: Any) -> None:
        self._inside -= 1

    def _enter(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in pytree.tree_leaves((args, kwargs)):
            self._spoil(tensor, "another norm reads its output")
        self._inside += 1

    def _out_of(self, path: str, module: nn.Module) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._inside -= 1
            norm = self.norms.get(id(module))
            if norm is None:
                x = args[0] if args and isinstance(args[0], Tensor) else None
                probe = torch.empty(0) if x is None else x.detach().reshape(-1, x.shape[-1])[:PROBE_ROWS].clone()
                norm = self.norms[id(module)] = Norm(path, module, [], probe)
                if x is None or len(args) != 1:
                    norm.spoilt = "it takes more than one tensor"
            if type(output) is not Tensor:
                norm.spoilt = norm.spoilt or f"it returns a {type(output).__name__}"
            else:
                self._held[_memory(output)] = (output, norm)

        return hook

    def _reads(self, site: Site, x: Tensor) -> None:
        """A layer reads a tensor: of which norm, if of one."""
        found = self._held.get(_memory(x))
        whole = found is not None and x.data_ptr() == found[0].data_ptr() and x.numel() == found[0].numel()
        for norm in self.norms.values():
            feeds = found is not None and found[1] is norm
            if feeds and not (whole and x.shape[-1] == found[0].shape[-1]):  # type: ignore[index]
                norm.spoilt = norm.spoilt or f"{site.path} reads a part of its output"
            elif feeds and site not in norm.sites:
                if site.path in self.seen:
                    norm.spoilt = norm.spoilt or f"{site.path} also has other inputs"
                norm.sites.append(site)
            elif not feeds and site in norm.sites:
                norm.spoilt = norm.spoilt or f"{site.path} also has other inputs"

    def _take(self, site: Site, x: Tensor) -> None:
        x = x.detach().reshape(-1, x.shape[-1])
        count = x.shape[0]
        if count == 0:
            return
        peaks = x.abs().amax(0).float()
        # a part of each call, evenly spaced
        share = max(1, ROWS // 4)
        picks = x[torch.linspace(0, count - 1, min(count, share), device="cpu").long().to(x.device)].clone()
        old = self.seen.get(site.path)
        if old is None:
            self.seen[site.path] = Seen(picks, peaks, count)
            return
        rows = torch.cat([old.rows, picks])[:ROWS] if old.rows.shape[0] < ROWS else old.rows
        self.seen[site.path] = Seen(rows, torch.maximum(old.peaks, peaks), max(old.most_rows, count))


def _argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """x of a layer's call as it was given, and as its weight meets it: after the norm that wavecrest's Linear takes."""
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    x: Tensor = list(given.values())[1]
    weight = given.get("norm_weight") if isinstance(module, Linear) else None
    return x, x if weight is None else rms_norm(x, weight, given.get("norm_eps", 1e-6))


def _memory(tensor: Any) -> int:
    """The address of a plain tensor's memory; −1 for any other value."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return -1
    return int(tensor.untyped_storage().data_ptr())


def _is_view(func: Any) -> bool:
    """Whether an operation returns a view of what it gets, and reads nothing."""
    infos = [argument.alias_info for argument in func._schema.arguments]
    return any(info is not None and not info.is_write for info in infos)
