"""The ways to run a model without wavecrest: eager, the modes of torch.compile, and what an expert writes by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from wavecrest.measure.workload import Workload

Call = Callable[..., Any]
# a network with at least this many convolutions is one of images, which channels_last suits
CONVOLUTIONS = 8
WARM_UP_CALLS = 3


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to run a model without wavecrest.

    Attributes:
        name: as records and tables call it.
        make: makes the callable of a workload; what compiles, compiles at its first call.
        on_cpu, on_gpu: where it means something.
        slow: compiles for minutes, so it runs on request.
    """

    name: str
    make: Callable[[Workload], Call]
    on_cpu: bool = True
    on_gpu: bool = True
    slow: bool = False


class ChannelsLast(nn.Module):
    """A copy of a network in channels_last, which takes images as its original does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner: nn.Module = copy.deepcopy(inner).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Convert images, then run."""

        def convert(value: Any) -> Any:
            images = isinstance(value, Tensor) and value.ndim == 4
            return value.contiguous(memory_format=torch.channels_last) if images else value

        return self.inner(*map(convert, args), **{name: convert(value) for name, value in kwargs.items()})


class Graphed:
    """A CUDA graph of a model for one set of shapes: copy in, replay; the answer is overwritten by the next call."""

    def __init__(self, model: nn.Module, workload: Workload) -> None:
        (inputs,) = workload.buckets.values()
        leaves, spec = pytree.tree_flatten((inputs.args, dict(inputs.kwargs)))
        self._static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(self._static, spec)
        reset = workload.reset or (lambda _bucket: None)
        (bucket,) = workload.buckets
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_CALLS):
                reset(bucket)
                model(*args, **kwargs)
            reset(bucket)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._answer = model(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay with these arguments; objects such as caches must be those of the capture."""
        for static, leaf in zip(self._static, pytree.tree_leaves((args, kwargs)), strict=True):
            if isinstance(leaf, Tensor):
                static.copy_(leaf)
        self._graph.replay()
        return self._answer


def is_convolutional(model: nn.Module) -> bool:
    """True for networks of images."""
    return sum(isinstance(module, nn.Conv2d) for module in model.modules()) >= CONVOLUTIONS


def by_hand(workload: Workload) -> Call:
    """The best known recipe.

    Networks of images: channels_last, cuDNN's search and reduce-overhead; others: a CUDA graph of the eager model. On a
    CPU: weights frozen by Inductor, in channels_last for images.
    """
    model = ChannelsLast(workload.model).eval() if is_convolutional(workload.model) else workload.model
    if workload.device == "cpu":
        return torch.compile(model, options={"freezing": True})
    if model is workload.model:
        with torch.no_grad():
            return Graphed(model, workload)
    compiled = torch.compile(model, mode="reduce-overhead")

    def run(*args: Any, **kwargs: Any) -> Any:
        # a setting of the process, so on for this model's calls alone
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True):
            return compiled(*args, **kwargs)

    return run


def _compiled(mode: str | None) -> Callable[[Workload], Call]:
    return lambda workload: torch.compile(workload.model, mode=mode)


PEERS = (
    Peer("eager", lambda workload: workload.model),
    Peer("compile", _compiled(None)),
    Peer("reduce-overhead", _compiled("reduce-overhead"), on_cpu=False),
    Peer("by hand", by_hand),
    # last: a search that is interrupted leaves its caches as they are
    Peer("max-autotune", _compiled("max-autotune"), slow=True),
)


def peers(device: str, *, slow: bool) -> list[Peer]:
    """The peers of a device, those that search for minutes if `slow`."""
    here = [peer for peer in PEERS if (peer.on_cpu if device == "cpu" else peer.on_gpu)]
    return [peer for peer in here if slow or not peer.slow]
