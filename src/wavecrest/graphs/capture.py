"""CUDA/HIP graph capture of a whole model: static inputs, copy in, replay, read out.

Follows the procedure that survives ROCm's pitfalls: warm up and capture by `cuda_graph`, one memory pool for all
buckets, largest bucket first.
Replay can be wrong in a way that one check misses (ROCm/clr#279: some fresh processes replay garbage), so `verify`
repeats the numerics gate in several fresh processes.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from wavecrest.errors import StepRefused
from wavecrest.graphs.masks import Padding, without_full_mask
from wavecrest.measure import cuda_graph, timing
from wavecrest.measure.tree import is_object, iter_tensors


class CaptureWarning(UserWarning):
    """A captured model ran a call without its graph."""


# arguments whose structure is that of the call itself
PLAIN = frozenset({Tensor, nn.Parameter, type(None), bool, int, float, str})


@dataclass(slots=True)
class _Captured:
    graph: Any
    static: list[Tensor]
    output: list[Any]
    # of the leaves above; None where the output is one tensor
    structure: Any


class CapturedModule(nn.Module):
    """Replays a captured graph per input signature; a signature is captured at its first call.

    Tensors passed as arguments are copied into static buffers. Other objects (a key-value cache) are part of the
    signature by identity: their tensors are read and written in place at the addresses they had at capture. Calls
    that need gradients, and calls beyond `max_graphs` signatures, run without a graph; `eager_calls` counts them.
    With `padding`, calls whose padding mask hides nothing run without it (`graphs.masks`).
    """

    def __init__(self, inner: nn.Module, *, max_graphs: int = 16, padding: Padding | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.max_graphs = max_graphs
        self.padding = padding
        self.eager_calls = 0
        self._graphs: dict[Any, _Captured] = {}
        self._pool: Any = None
        # objects whose identity is in a signature must stay alive, or another could get the same id
        self._alive: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        """The state without the graphs, which are of this module's memory: a copy captures its own."""
        return {**super().__getstate__(), "_graphs": {}, "_pool": None, "_alive": []}  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Copy in, replay, read out; outputs are copies that the caller may keep."""
        if self.padding is not None:
            args, kwargs = without_full_mask(args, kwargs, self.padding)
        leaves, structure = _flatten(args, kwargs)
        signature = (structure, tuple([_leaf_key(leaf) for leaf in leaves]))
        captured = self._graphs.get(signature)
        if torch.is_grad_enabled():
            return self._eager("gradients are enabled (call it under torch.no_grad())", args, kwargs)
        if captured is None:
            if len(self._graphs) >= self.max_graphs:
                return self._eager(f"{self.max_graphs} input signatures are captured already", args, kwargs)
            captured = self._capture(args, kwargs)
            self._graphs[signature] = captured
            self._alive.append(leaves)
        static = iter(captured.static)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                next(static).copy_(leaf)
        captured.graph.replay()
        fresh = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in captured.output]
        return fresh[0] if captured.structure is None else pytree.tree_unflatten(fresh, captured.structure)

    def _eager(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run without a graph; the first time with a warning, since the user asked for a graph."""
        if not self.eager_calls:
            warnings.warn(f"a captured model runs without its graph: {reason}", CaptureWarning, stacklevel=3)
        self.eager_calls += 1
        return self.inner(*args, **kwargs)

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Captured:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        static = [tensor.clone() for tensor in tensors]
        fill: Iterator[Tensor] = iter(static)
        inner_leaves = [next(fill) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(inner_leaves, spec)
        # warm-up calls must not advance the state of these objects (a cache's write position)
        state = [tensor for leaf in leaves if is_object(leaf) for _, tensor in iter_tensors("", leaf, set())]
        before = [tensor.detach().clone() for tensor in state]
        cuda_graph.warm_up(lambda: self.inner(*args, **kwargs))
        for tensor, value in zip(state, before, strict=True):
            tensor.detach().copy_(value)
        written = [index for index, (a, b) in enumerate(zip(static, tensors, strict=True)) if not _same_bits(a, b)]
        if written:
            raise StepRefused(
                f"the model writes into its tensor argument number {written[0]}; a replay would write into a copy"
            )
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, output = cuda_graph.record(lambda: self.inner(*args, **kwargs), self._pool, "the model")
        if isinstance(output, Tensor):
            return _Captured(graph, static, [output], None)
        return _Captured(graph, static, *pytree.tree_flatten(output))


def device_time(work: Callable[[], Any], *, calls: int = 8, rounds: int = 20) -> float:
    """Median device time in ms of one call of `work`, without host time: from replays of a graph of `calls` calls.

    Caches are warm. It serves to choose among kernels before the whole model is measured, not for verdicts.

    Raises:
        StepRefused: the work cannot be captured.
    """
    cuda_graph.warm_up(work)

    def repeated() -> None:
        for _ in range(calls):
            work()

    graph, _ = cuda_graph.record(repeated, torch.cuda.graph_pool_handle(), "it")
    stopwatch = timing.Stopwatch(f"cuda:{torch.cuda.current_device()}")
    return statistics.median(stopwatch.time(graph.replay)[0] for _ in range(rounds)) / calls


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of a call in pytree's order, and its structure: without pytree where arguments are leaves themselves.

    A call of a small model is over in less time than pytree takes.
    """
    leaves = [*args, *kwargs.values()]
    for leaf in leaves:
        if type(leaf) not in PLAIN:
            return pytree.tree_flatten((args, kwargs))
    return leaves, (len(args), *kwargs)


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return ("tensor", leaf.shape, leaf.dtype, leaf.device)
    return ("object", id(leaf)) if is_object(leaf) else leaf
