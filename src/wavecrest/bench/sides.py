"""A workload's model beside other forms of it, such as `torch.compile` of it, interleaved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wavecrest import records
from wavecrest.bench.baseline import _first_line
from wavecrest.measure import numerics, timing
from wavecrest.measure.rotation import Rotation
from wavecrest.measure.tree import iter_tensors
from wavecrest.measure.workload import Call, Workload

# makes another form of a workload's model: what is called with its inputs
Make = Callable[[Workload], Callable[..., Any]]


def compiled(workload: Workload) -> Callable[..., Any]:
    """`torch.compile` of the model with its default settings, for the sizes of each call."""
    torch._dynamo.reset()
    made: Callable[..., Any] = torch.compile(workload.model, dynamic=False)
    return made


def beside(
    workload: Workload, name: str, make: Make, *, seconds: float, now: timing.Clock = timing.HOST_CLOCK
) -> records.SideBench:
    """Another form of the model, timed in blocks of ABBA against the model as it is, bucket by bucket.

    What raises, or answers with other shapes, has the reason as `problem` and no time.
    """
    side = records.SideBench(name=name)
    begin = now()
    try:
        function = make(workload)
        answers = {bucket: _answers(workload, bucket, function) for bucket in workload.buckets}
        side.first_s = round(now() - begin, 3)
        for bucket, answer in answers.items():
            side.error = max(side.error or 0.0, _error(answer, _answers(workload, bucket, None)))
            side.buckets.append(_timed(workload, bucket, function, seconds, now))
    # whatever the other form does wrong is said of it, and the model as it is keeps its figures
    except Exception as error:
        side.problem, side.buckets = f"{type(error).__name__}: {_first_line(error)}", []
    return side


def _answers(workload: Workload, bucket: str, function: Callable[..., Any] | None) -> list[Tensor]:
    call = Call(workload, bucket, function)
    call.prepare()
    return [tensor.detach().clone() for _, tensor in iter_tensors("", call(), set()) if tensor.is_floating_point()]


def _error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest relative difference of an answer from the model's."""
    if [one.shape for one in found] != [one.shape for one in wanted]:
        raise ValueError("its answer has other shapes than the model's")
    return max((numerics.compare(a, b).relative for a, b in zip(found, wanted, strict=True)), default=0.0)


def _timed(
    workload: Workload, bucket: str, function: Callable[..., Any], seconds: float, now: timing.Clock
) -> records.BucketSpeed:
    rotation = Rotation(workload.buckets[bucket])
    base, new = (Call(workload, bucket, one, rotation) for one in (None, function))
    pair = timing.measure_pair(base, new, device=workload.device, seconds=seconds, rotation=rotation, now=now)
    return records.BucketSpeed.of(bucket, pair)
