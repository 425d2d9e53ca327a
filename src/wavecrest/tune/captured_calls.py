"""Calls of one candidate in a row, as one graph: what a captured model makes of a call.

A call alone, between two events, has its launch in its time, and nothing runs beside its last programs. In a graph the
next kernel's programs take the place of those that have ended, or begin before (programmatic dependent launch), so
that another configuration may be the faster one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wavecrest import records
from wavecrest.bench import ops as bench
from wavecrest.dispatch.call import AnyCall, tensors_of
from wavecrest.dispatch.op import AnyOp
from wavecrest.errors import StepRefused
from wavecrest.measure import cuda_graph
from wavecrest.tune import admission
from wavecrest.tune.candidates import Candidate


def copies(call: AnyCall, count: int) -> list[AnyCall]:
    """Calls with the same values in memory of their own, so that none finds another's weight in a cache."""
    return [copy.deepcopy(call) for _ in range(count)]


def captured(
    op: AnyOp,
    candidate: Candidate,
    calls: Sequence[AnyCall],
    right: admission.Oracle,
    pool: Any,
    row: records.TuneCandidate,
) -> Callable[[], Any] | None:
    """A replay of all calls by an admitted candidate; or None, with status and reason in `row`.

    Args:
        calls: with the values that `right` is the oracle of.
        pool: of `torch.cuda.graph_pool_handle`.

    Raises:
        admission.DeviceLost: the device is unusable after it.
    """
    runs = [admission.call_of(op, candidate, call) for call in calls]

    def in_turn() -> list[Any]:
        return [run() for run in runs]

    try:
        cuda_graph.warm_up(in_turn)
        graph, returned = cuda_graph.record(in_turn, pool, "calls in a row")
        results = [bench.results_of(one) for one in returned]
        for call, own in zip(calls, results, strict=True):
            _poison(call, own)
        graph.replay()
        for call, own in zip(calls, results, strict=True):
            wrong = admission.wrong(op, candidate, call, own, right, row)
            if wrong:
                row.status, row.reason = "wrong", f"in a graph: {wrong}"
                return None
    except (StepRefused, RuntimeError) as error:
        row.status = "refused" if isinstance(error, StepRefused) else "failed"
        row.reason = admission.first_line(error)
        admission.require(right.results[0].device, f"a graph of {candidate.backend} {candidate.config!r}")
        return None
    replay: Callable[[], Any] = graph.replay
    return replay


def _poison(call: AnyCall, results: Sequence[Tensor]) -> None:
    """Fill results with NaN, or the largest integer: the graph before may have left the right values there."""
    given = {value.untyped_storage().data_ptr() for value in tensors_of(call)}
    for one in results:
        # an op that writes to its arguments returns them
        if one.untyped_storage().data_ptr() in given:
            continue
        if one.dtype.is_floating_point:
            one.fill_(math.nan)
        elif one.dtype != torch.bool:
            one.fill_(torch.iinfo(one.dtype).max)
