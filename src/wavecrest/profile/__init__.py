"""Profile: where the time of each bucket goes, by category and by op, with idle time, launches and roofline.

`categories` names kernels, `trace` reads what torch.profiler exported, `roofline` knows the least work of an op; this
module runs the profiler and assembles the record.
"""

from __future__ import annotations

import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavecrest import env, hardware, records
from wavecrest.errors import InvalidArgument, WorkloadError
from wavecrest.measure import timing
from wavecrest.measure.workload import Call
from wavecrest.profile import trace
from wavecrest.profile.causes import causes_of_breaks, causes_of_buckets
from wavecrest.profile.roofline import datasheet, measure_ceilings
from wavecrest.records import provenance

if TYPE_CHECKING:
    from wavecrest.measure.workload import Workload

__all__ = ["datasheet", "measure_ceilings", "profile_workload", "record", "trace_name"]


# calls that are timed and traced by default. A call of 10 ms on a GPU has thousands of ops and kernels where it waits
# for the host, and their events took 5 to 10 s to read (an xLSTM in eager, H200, 2026-11-27, no record); kernels take
# the same time in each call
CALLS, CALLS_OF_LONG, LONG_MS = 5, 2, 10.0


def trace_name(bucket: str) -> str:
    """The file name of a bucket's Chrome trace."""
    return f"trace_{re.sub(r'[^A-Za-z0-9._-]+', '-', bucket)}.json"


def profile_workload(
    workload: Workload,
    *,
    function: Callable[..., Any] | None = None,
    calls: int | None = None,
    ceilings: records.Ceilings | None = None,
    traces: Path | None = None,
) -> list[records.BucketProfile]:
    """Profile every bucket of a workload.

    Args:
        function: called instead of the workload's model (a compiled or captured one).
        calls: steady calls, first timed without the profiler, then traced; wall time comes from the untraced ones,
            because tracing slows the host. None: CALLS, and of a long call on a GPU CALLS_OF_LONG are traced.
        ceilings: peaks that percentages of the roofline refer to; None takes the device's datasheet, if known.
        traces: folder that keeps the Chrome traces, one file a bucket (`trace_name`); None discards them.

    Raises:
        InvalidArgument: `calls` is below 1.
        WorkloadError: the model raised.
    """
    if calls is not None and calls < 1:
        raise InvalidArgument(f"profile_workload needs at least one call, not {calls}")
    device = workload.device
    known = ceilings if ceilings is not None else datasheet(hardware.detect(device))
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for bucket in workload.buckets:
            path = (traces if traces is not None else Path(scratch)) / trace_name(bucket)
            work = Call(workload, bucket, function)
            try:
                wall_ms = _wall(work, device, calls or CALLS)
                is_long = device != "cpu" and wall_ms >= LONG_MS
                _export(work, device, calls or (CALLS_OF_LONG if is_long else CALLS), path)
            except Exception as error:
                raise WorkloadError(f"bucket {bucket}: the model raised {type(error).__name__}: {error}") from error
            found.append(_profile(bucket, wall_ms, trace.summarize(trace.load(path, own=True), ceilings=known)))
    return found


def _wall(work: Call, device: str, calls: int) -> float:
    stopwatch = timing.Stopwatch(device)
    timing.warm_up(stopwatch, work, calls=3)
    return statistics.median(stopwatch.time(work)[1] for _ in range(calls))


def _export(work: Call, device: str, calls: int, path: Path) -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    on_gpu = torch.device(device).type != "cpu"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    # 99 is above every level of the profiler's log, which otherwise writes two lines to stderr at every use
    env.set_default("KINETO_LOG_LEVEL", "99")
    # the first traced call pays for the profiler's own start
    steps = schedule(wait=0, warmup=1, active=calls, repeat=1)
    with profile(activities=activities, record_shapes=True, schedule=steps) as profiler:
        for _ in range(calls + 1):
            work.prepare()
            with record_function(trace.MARK):
                work()
                if on_gpu:
                    torch.cuda.synchronize(device)
            profiler.step()
    profiler.export_chrome_trace(str(path))


def _profile(bucket: str, wall_ms: float, summary: trace.Summary) -> records.BucketProfile:
    return records.BucketProfile(
        bucket=bucket,
        wall_ms=wall_ms,
        kernel_ms=summary.kernel_ms,
        idle_ms=max(0.0, wall_ms - summary.kernel_ms) if summary.on_device else None,
        launches=summary.launches,
        categories=summary.categories,
        ops=summary.ops,
        uncategorized=summary.uncategorized,
    )


def record(
    workload: Workload,
    buckets: Sequence[records.BucketProfile],
    *,
    ceilings: records.Ceilings | None,
    graphs: int = 0,
    breaks: Sequence[records.GraphBreak] = (),
    breaks_note: str = "",
) -> records.ProfileRecord:
    """The record of `wavecrest profile`; graph breaks come from `wavecrest.graphs.breaks`."""
    return records.ProfileRecord(
        header=provenance.header(hardware.detect(workload.device)),
        workload=workload.name,
        buckets=list(buckets),
        graphs=graphs,
        breaks=list(breaks),
        breaks_note=breaks_note,
        ceilings=ceilings,
        causes=[*causes_of_buckets(buckets), *causes_of_breaks(breaks)],
    )
