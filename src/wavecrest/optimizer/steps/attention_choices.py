"""The backend of flash_attention for attention that a model writes out, by times of the call and of what it replaces.

One call is not always the faster form. For windows of 49 tokens (a Swin-T, 64 images, H200, 2026-11-28) cuDNN, which is
PyTorch's choice there, takes 1.8 times as long as the two GEMMs and the softmax that Inductor makes of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.dispatch.op import Op
from wavecrest.graphs.attention import name_of
from wavecrest.graphs.capture import device_time
from wavecrest.ops._flash_attention.backend import op
from wavecrest.ops._flash_attention.call import FlashAttentionCall
from wavecrest.optimizer.steps.backend_times import MIN_ALONE, Timer, compile_together, times_of, told


class AttentionChoices(NamedTuple):
    """The backend of each call by `name_of`, where one is faster than the GEMMs and the softmax.

    `left` has the calls that stay written out, each with the reason; `left_out` the backends that take a call and
    raised when it was timed, with the first error of each.
    """

    backends: dict[str, str]
    left: dict[str, str]
    left_out: dict[str, str]

    @property
    def note(self) -> str:
        """The calls that stay written out, and those backends, as clauses that go after others; empty without one."""
        kept = "".join(f"; attention {name} stays written out: {reason}" for name, reason in self.left.items())
        return f"{kept}{told(self.left_out)}"


class _Timed(NamedTuple):
    """The fastest backend of a call and its ms (infinite without one), those of what it would replace, what raised."""

    backend: str
    best: float
    written: float
    raised: dict[str, str]


# what was timed in this process: a step looks for its sites more than once in a run
_timed: dict[tuple[str, str, int], _Timed] = {}


def attention_choices(calls: Iterable[FlashAttentionCall], device: str, time: Timer | None = None) -> AttentionChoices:
    """The backend for each call where one is faster than two GEMMs and a softmax, which compiled code is at best.

    Args:
        calls: with fake tensors; each distinct one is timed with random numbers on `device`, once in a process.
        device: of the model. On a CPU nothing is chosen: PyTorch's kernel gives 0 there where q holds NaN.
        time: how a call is timed; None: by the device's clock.
    """
    distinct = {name_of(call): call for call in calls}
    backends, left, left_out = dict[str, str](), dict[str, str](), dict[str, str]()
    if device == "cpu" and time is None:
        return AttentionChoices(backends, left, left_out)
    if time is None:
        new = [call for name, call in distinct.items() if (device, name, Op.epoch) not in _timed]
        if new:
            compile_together(_first_calls(new, device), device)
    for name, call in distinct.items():
        # rows that were measured since may give a backend another configuration
        key = (device, name, Op.epoch)
        timed = _timed.get(key) if time is None else None
        if timed is None:
            timed = _time(_with_numbers(call, device), time or device_time)
            if time is None:
                _timed[key] = timed
        left_out = timed.raised | left_out
        if timed.best < timed.written * (1 - MIN_ALONE):
            backends[name] = timed.backend
        elif timed.backend:
            left[name] = f"{timed.backend} takes {1e3 * timed.best:.1f} µs, its parts {1e3 * timed.written:.1f}"
        else:
            left[name] = "no backend runs it"
    return AttentionChoices(backends, left, left_out)


def _with_numbers(call: FlashAttentionCall, device: str) -> FlashAttentionCall:
    def numbers(like: Tensor) -> Tensor:
        return torch.randn(like.shape, device=device).to(like.dtype)

    bias = None if call.bias is None else numbers(call.bias)
    return call._replace(q=numbers(call.q), k=numbers(call.k), v=numbers(call.v), bias=bias)


def _as_made(call: FlashAttentionCall) -> FlashAttentionCall:
    """The call as a graph makes it (`graphs.attention.attend`): heads behind queries, in memory the other way round."""
    q, k, v = (one.transpose(1, 2) for one in (call.q, call.k, call.v))
    return call._replace(q=q, k=k, v=v, layout="bshd")


def _run(backend: str, call: FlashAttentionCall) -> Any:
    return op.call_on(backend, _as_made(call))


def _written(call: FlashAttentionCall) -> Tensor:
    """Two GEMMs and a softmax: what is left of attention where everything else is fused into these."""
    return torch.softmax(call.q @ call.k.mT, -1) @ call.v


def _names(call: FlashAttentionCall) -> list[str]:
    """The backends that take a call."""
    made = _as_made(call)
    return [one.name for one in op.by_priority() if one.name != "reference" and one.refuse(made) is None]


def _first_calls(calls: Iterable[FlashAttentionCall], device: str) -> Iterator[Callable[[], Any]]:
    """Each call on each backend that takes it."""
    for call in calls:
        made = _with_numbers(call, device)
        for name in _names(made):
            yield partial(_run, name, made)


def _time(call: FlashAttentionCall, time: Timer) -> _Timed:
    """Time a call on every backend that takes it, and what it would replace."""
    times, raised = times_of(_names(call), lambda name: _run(name, call), time)
    try:
        with torch.no_grad():
            written = time(partial(_written, call))
    except torch.OutOfMemoryError:
        # the scores of all heads at once
        written = math.inf
    best = min(times, key=lambda name: times[name], default="")
    return _Timed(best, times.get(best, math.inf), written, raised)
