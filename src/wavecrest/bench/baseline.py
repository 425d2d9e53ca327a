"""The baseline of a workload: every bucket timed as it is, with its shapes and its peak memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wavecrest import env, hardware, records
from wavecrest.errors import EnvironmentProblem, WavecrestError, WorkloadError
from wavecrest.measure import timing
from wavecrest.measure.rotation import Rotation
from wavecrest.measure.workload import Call, Inputs, Workload
from wavecrest.records import decode, provenance

# (bucket, completed samples, planned samples), for progress displays
OnBucketProgress = Callable[[str, int, int], None]


def shapes(inputs: Inputs) -> dict[str, str]:
    """Every input tensor as {path: "1x32 int64"}; a scalar tensor is "scalar int64"."""
    found = {}
    for path, tensor in inputs.tensors():
        size = "x".join(str(extent) for extent in tensor.shape) or "scalar"
        found[path] = f"{size} {str(tensor.dtype).removeprefix('torch.')}"
    return found


def counted(inputs: Inputs) -> tuple[int | None, int | None]:
    """The samples and tokens of a call: the first size of its first tensor, and all elements where those are token ids.

    Token ids are whole numbers [batch, length]; None where a call has no such thing.
    """
    import torch

    first = next((tensor for _, tensor in inputs.tensors() if tensor.ndim > 0), None)
    if first is None:
        return None, None
    ids = first.ndim == 2 and first.dtype in (torch.int32, torch.int64)
    return first.shape[0], first.numel() if ids else None


def bench_bucket(
    workload: Workload,
    bucket: str,
    *,
    function: Callable[..., Any] | None = None,
    seconds: float = 5.0,
    min_samples: int = timing.MIN_SAMPLES,
    on_progress: timing.OnProgress | None = None,
    now: timing.Clock = timing.HOST_CLOCK,
) -> records.BucketBench:
    """Time one bucket under `torch.no_grad()`, cold start apart, then the memory of one more call.

    Args:
        function: called with the bucket's inputs; None takes the workload's model.
        min_samples: the fewest there are.
        seconds: longest sampling time; sampling ends earlier once the interval is within one percent either way.

    Raises:
        WorkloadError: no such bucket, the call raised, or it changed the shapes of its inputs (a cache that grows at
            every call); the message names the bucket and the reason.
        EnvironmentProblem: the device ran out of memory, or is of a kind that cannot be timed.
    """
    if bucket not in workload.buckets:
        raise WorkloadError(f"no bucket {bucket!r}; the workload has {', '.join(workload.buckets)}")
    kind = workload.device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise EnvironmentProblem(f"the workload is on device {workload.device}; only cpu and cuda devices can be timed")
    rotation = Rotation(workload.buckets[bucket])
    work = _NamedCall(workload, bucket, function, rotation)
    before = shapes(workload.buckets[bucket])
    measurement = timing.measure(
        work,
        device=workload.device,
        min_samples=min_samples,
        seconds=seconds,
        rotation=rotation,
        on_progress=on_progress,
        now=now,
    )
    work.prepare()
    after = shapes(workload.buckets[bucket])
    if before != after:
        path = next(iter(path for path in {**before, **after} if before.get(path) != after.get(path)))
        raise WorkloadError(
            f"bucket {bucket}: the calls changed their own input {path} from {before.get(path, 'absent')} to "
            f"{after.get(path, 'absent')}, so no two did the same work; give inputs that a call leaves alone, "
            "or Workload(reset=…)"
        )
    samples, tokens = counted(workload.buckets[bucket])
    return records.BucketBench(
        bucket=bucket,
        measurement=measurement,
        shapes=before,
        peak_memory_bytes=peak_memory(work, workload.device),
        samples=samples,
        tokens=tokens,
    )


def bench_workload(
    workload: Workload,
    *,
    seconds_per_bucket: float = 5.0,
    min_samples: int = timing.MIN_SAMPLES,
    function: Callable[..., Any] | None = None,
    on_progress: OnBucketProgress | None = None,
    now: timing.Clock = timing.HOST_CLOCK,
) -> list[records.BucketBench]:
    """`bench_bucket` for every bucket, in their order."""
    results = []
    for bucket in workload.buckets:
        progress = None if on_progress is None else _for_bucket(on_progress, bucket)
        results.append(
            bench_bucket(
                workload,
                bucket,
                function=function,
                seconds=seconds_per_bucket,
                min_samples=min_samples,
                on_progress=progress,
                now=now,
            )
        )
    return results


def record(
    workload: Workload,
    device: hardware.Device,
    *,
    seconds_per_bucket: float = 5.0,
    function: Callable[..., Any] | None = None,
    command: str | None = None,
    on_progress: OnBucketProgress | None = None,
) -> records.BenchRecord:
    """Measure a workload and put the result into a record; `device` is where the workload lives."""
    buckets = bench_workload(
        workload, seconds_per_bucket=seconds_per_bucket, function=function, on_progress=on_progress
    )
    return records.BenchRecord(
        header=provenance.header(device, command=command),
        workload=workload.name,
        dtype=workload.dtype,
        parameters=sum(parameter.numel() for parameter in workload.model.parameters()),
        buckets=buckets,
    )


def peak_memory(work: Call, device: str) -> int:
    """Bytes torch has allocated at the peak of one call, beyond what was allocated before it (weights, inputs).

    On a GPU from the caching allocator's counters; the pool of a captured graph was allocated before and does not
    count. On the CPU from torch.profiler's allocation events, which miss memory that libraries allocate themselves
    (oneDNN scratch). The process's resident size is no substitute, as the C allocator keeps freed memory.
    """
    import torch

    work.prepare()
    if device != "cpu":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return max(0, torch.cuda.max_memory_allocated(device) - before)
    # 99 is above every level of the profiler's log, which otherwise writes two lines to stderr at every use
    env.set_default("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = decode.json_of(path.read_text(encoding="utf-8"), finite=False)["traceEvents"]
    changes = [
        (event["ts"], event["args"]["Bytes"])
        for event in events
        # device type 0 is the CPU
        if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0
    ]
    held = peak = 0
    for _, change in sorted(changes, key=lambda entry: entry[0]):
        held += change
        peak = max(peak, held)
    return peak


def _for_bucket(on_progress: OnBucketProgress, bucket: str) -> timing.OnProgress:
    return lambda completed, planned: on_progress(bucket, completed, planned)


class _NamedCall(Call):
    """The call to time; an error it raises becomes one line that names the bucket."""

    def __call__(self) -> Any:
        import torch

        try:
            return super().__call__()
        except WavecrestError:
            raise
        except torch.OutOfMemoryError as error:
            raise EnvironmentProblem(
                f"bucket {self.bucket} does not fit into the memory of {self.workload.device}: {_first_line(error)}"
            ) from error
        except Exception as error:
            raise WorkloadError(
                f"bucket {self.bucket}: the model raised {type(error).__name__}: {_first_line(error)}"
            ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "(no message)"
