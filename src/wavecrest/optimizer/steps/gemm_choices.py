"""The backend of gemm for a linear layer with its activation: by a measured row, or timed on the call alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from wavecrest.dispatch.op import Op
from wavecrest.graphs.activations import name_of
from wavecrest.graphs.capture import device_time
from wavecrest.measure import timing
from wavecrest.ops._gemm.backend import op
from wavecrest.ops._gemm.call import GemmCall
from wavecrest.optimizer.steps.backend_times import MIN_ALONE, Timer, compile_together, times_of, told

# share of the time of elementwise work that activations inside their GEMMs typically save: a model for ordering
# expectations, not a measurement
ACTIVATION_GAIN = 0.4


class Choices(NamedTuple):
    """The backends by `name_of`, where another than PyTorch's is faster, and what they save over all calls, in ms.

    `left_out` has the backends that take a call and raised when it was timed, with the first error of each.
    """

    backends: dict[str, str]
    saved_ms: float
    left_out: dict[str, str]

    @property
    def note(self) -> str:
        """The backends that were left out, as a clause that goes after others; empty without one."""
        return told(self.left_out)


class _Timed(NamedTuple):
    """The fastest backend of a call ("": PyTorch's own), the times in ms of PyTorch's and of it, and what raised."""

    backend: str
    own: float
    best: float
    raised: dict[str, str]


# what was timed in this process: a step looks for its sites more than once in a run
_timed: dict[tuple[str, str, int], _Timed] = {}


def host_time(work: Callable[[], Any], rounds: int = 9) -> float:
    """Median time in ms of one call on the CPU; it serves to choose among kernels, not for verdicts."""
    work()
    stopwatch = timing.Stopwatch("cpu")
    return statistics.median(stopwatch.time(work)[0] for _ in range(rounds))


def choices(calls: Iterable[GemmCall], device: str, time: Timer | None = None) -> Choices:
    """The backend for each call where another than PyTorch's is faster.

    Args:
        calls: with fake tensors; each distinct one is timed with random numbers on `device`, once in a process.
        device: of the model.
        time: how a call is timed; None: by the device's clock.
    """
    backends: dict[str, str] = {}
    left_out: dict[str, str] = {}
    saved = 0.0
    calls = list(calls)
    if time is None:
        new = {name_of(call): call for call in calls if (device, name_of(call), Op.epoch) not in _timed}
        if new:
            compile_together(_first_calls(new.values(), device), device)
    for call in calls:
        name = name_of(call)
        # rows that were measured since decide anew
        key = (device, name, Op.epoch)
        timed = _timed.get(key) if time is None else None
        if timed is None:
            timed = _time(_with_numbers(call, device), time or (host_time if device == "cpu" else device_time))
            if time is None:
                _timed[key] = timed
        saved += timed.own - timed.best
        left_out = timed.raised | left_out
        if timed.backend:
            backends[name] = timed.backend
    return Choices(backends, saved, left_out)


def _with_numbers(call: GemmCall, device: str) -> GemmCall:
    def numbers(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, device=device).to(like.dtype)

    others = {name: getattr(call, name) for name in ("bias", "residual", "norm_weight")}
    made: dict[str, Any] = {name: None if given is None else numbers(given) for name, given in others.items()}
    # the weight of a linear layer is [N, K]
    return call._replace(a=numbers(call.a), b=numbers(call.b.mT).mT, **made)


def _names(call: GemmCall) -> list[str]:
    """The backends that take a call; of those that a measured row compares, its choice and PyTorch's."""
    decision = op.decide(call)
    names = [one.name for one in op.by_priority() if one.refuse(call) is None and one.name != "reference"]
    return [name for name in names if name in ("torch", decision.backend)] if decision.source == "exact" else names


def _first_calls(calls: Iterable[GemmCall], device: str) -> Iterator[Callable[[], Any]]:
    """Each call on each backend that takes it."""
    for call in calls:
        made = _with_numbers(call, device)
        for name in _names(made):
            yield partial(op.call_on, name, made)


def _time(call: GemmCall, time: Timer) -> _Timed:
    """Time a call on every backend that takes it."""
    times, raised = times_of(_names(call), lambda name: op.call_on(name, call), time)
    if "torch" not in times:
        return _Timed("", 0.0, 0.0, raised)
    own, best = times["torch"], min(times, key=lambda one: times[one])
    wins = best != "torch" and times[best] < own * (1 - MIN_ALONE)
    return _Timed(best, own, times[best], raised) if wins else _Timed("", own, own, raised)
