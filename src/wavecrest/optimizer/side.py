"""The child process of an alternating measurement: one side alone, as its user runs it.

Run as `python -m wavecrest.optimizer.side TASK OUT.json`, with a `Task` as JSON.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from wavecrest import hardware
from wavecrest.measure import timing, workload
from wavecrest.measure.rotation import Rotation
from wavecrest.optimizer.alternate import SideReport, Task
from wavecrest.optimizer.gate import Gate
from wavecrest.optimizer.plan import Plan
from wavecrest.optimizer.replay import replay
from wavecrest.optimizer.steps.precision import gate_dtype
from wavecrest.optimizer.verdict import check_quality
from wavecrest.records import decode

if TYPE_CHECKING:
    from torch import nn


def time_buckets(
    loaded: workload.Workload, model: nn.Module, seconds: float, now: timing.Clock = timing.HOST_CLOCK
) -> dict[str, timing.Measurement]:
    """Every bucket of a model, alone, for `seconds` at most each."""
    found = {}
    # a fall-back to eager is an error, not a slow result
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for bucket, inputs in loaded.buckets.items():
            rotation = Rotation(inputs)
            work = workload.Call(loaded, bucket, model, rotation)
            found[bucket] = timing.measure(work, device=loaded.device, seconds=seconds, rotation=rotation, now=now)
    return found


def measure_side(task: Task, *, now: timing.Clock = timing.HOST_CLOCK) -> SideReport:
    """Load the workload, apply the plan, time every bucket, and check the answers if asked to.

    Raises:
        PlanError, PlanMismatch, WorkloadError: the plan or the workload cannot be used here.
        ClockError: the times cannot be trusted.
    """
    loaded = workload.load(task.spec, device=task.device)
    model, texts, dtype = loaded.model, [], None
    if task.plan is not None:
        plan = Plan.load(task.plan)
        differences = plan.match(loaded, hardware.detect(loaded.device))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            model = replay(plan.kept(), loaded, verify=bool(differences), because=differences, strict=False).model
            texts = [str(row.message) for row in caught if row.category.__module__.startswith("wavecrest")]
        dtype = gate_dtype(plan.stack)
    measured = time_buckets(loaded, model, task.seconds, now)
    return SideReport(
        clock=next(iter(measured.values())).clock,
        times={bucket: list(found.samples) for bucket, found in measured.items()},
        numerics=Gate.prepare(loaded, dtype=dtype).check(model) if task.check else [],
        quality=check_quality(loaded, model) if task.check else [],
        warnings=texts,
    )


if __name__ == "__main__":
    _task, _target = sys.argv[1:]
    Path(_target).write_text(measure_side(Task(**decode.json_of(_task))).model_dump_json())
