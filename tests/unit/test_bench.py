"""The baseline: what is timed, and the memory and shapes beside it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from wavecrest import env, hardware
from wavecrest.bench import baseline
from wavecrest.errors import EnvironmentProblem, WorkloadError
from wavecrest.measure import timing
from wavecrest.measure.workload import Buckets, Call, Inputs, Workload, from_example


class Widen(nn.Module):
    """Allocates 4 MiB, then 8 MiB, frees the first, and returns 1 MiB: a peak of 12 MiB."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.zeros(1 << 20)
        b = torch.zeros(2 << 20)
        del a
        c = torch.zeros(1 << 18)
        del b
        return c + x.sum()


def _call(function: Any, x: torch.Tensor) -> Call:
    return Call(from_example(nn.ReLU(), x), "default", function)


def test_peak_memory_counts_what_lives_at_once() -> None:
    mib = baseline.peak_memory(_call(Widen(), torch.ones(4)), "cpu") / 2**20
    # 4 + 8 MiB together; 8 + 1 + 1 MiB and all four in a row would be 13 MiB or more
    assert 12.0 <= mib < 12.5


def test_peak_memory_leaves_out_what_was_there_before() -> None:
    x = torch.ones(8 << 20)
    assert baseline.peak_memory(_call(lambda t: t.add_(1), x), "cpu") < 1024


USES = ("baseline.peak_memory(Call(workload, 'default'), 'cpu')", "profile_workload(workload)")
# the profiler reads its level once a process, which another test may have begun: a process for each use, forked from
# one that has only imported modules, those of Inductor too, which PyTorch's profiler (2.13) imports in a second
QUIET = """
import os, sys, torch, torch._inductor
from wavecrest.bench import baseline
from wavecrest.measure.workload import Call, from_example
from wavecrest.profile import profile_workload
workload = from_example(torch.nn.ReLU(), torch.ones(4))
for use in sys.argv[1:]:
    if not (child := os.fork()):
        exec(use)
        sys.exit()
    print(os.waitpid(child, 0)[1], flush=True)
"""


def test_the_profiler_stays_quiet() -> None:
    command = [sys.executable, "-c", QUIET, *USES]
    done = subprocess.run(command, env=env.python_child({"KINETO_LOG_LEVEL": None}), capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("0\n0\n", "", 0)


def test_bucket_is_timed_under_no_grad_with_its_own_inputs() -> None:
    seen: list[tuple[tuple[int, ...], bool]] = []

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((tuple(x.shape), torch.is_grad_enabled()))
            return super().forward(x)

    work = from_example(Model(8, 8), Buckets(small=torch.ones(1, 8), large=torch.ones(64, 8)))
    bench = baseline.bench_bucket(work, "large", seconds=0.0)
    assert set(seen) == {((64, 8), False)}
    assert bench.bucket == "large" and bench.shapes == {"args[0]": "64x8 float32"}
    assert bench.measurement.n >= timing.MIN_SAMPLES and bench.measurement.cold_start > 0
    assert bench.measurement.clock == "host wall"
    assert bench.peak_memory_bytes is not None and bench.peak_memory_bytes >= 64 * 8 * 4


def test_another_function_is_timed_instead_of_the_model() -> None:
    calls = []
    work = from_example(nn.Linear(8, 8), torch.ones(1, 8))
    baseline.bench_bucket(work, "default", function=lambda x: calls.append(x), seconds=0.0)
    assert len(calls) > timing.MIN_SAMPLES


def test_shapes_of_every_kind_of_input() -> None:
    inputs = Inputs((torch.ones(2, 3), torch.tensor(1)), {"ids": torch.ones(1, 32, dtype=torch.int64), "flag": True})
    assert baseline.shapes(inputs) == {"args[0]": "2x3 float32", "args[1]": "scalar int64", "ids": "1x32 int64"}


def test_workload_keeps_the_order_and_reports_each_bucket() -> None:
    progress: dict[str, list[tuple[int, int]]] = {}
    work = from_example(nn.Linear(8, 8), Buckets(z=torch.ones(1, 8), a=torch.ones(2, 8)))
    benches = baseline.bench_workload(
        work,
        seconds_per_bucket=0.0,
        on_progress=lambda bucket, done, planned: progress.setdefault(bucket, []).append((done, planned)),
    )
    assert [bench.bucket for bench in benches] == ["z", "a"] == list(progress)
    assert progress["a"][0] == (1, timing.MIN_SAMPLES)
    assert [done for done, _ in progress["z"]] == list(range(1, benches[0].measurement.n + 1))


def test_record_describes_the_model() -> None:
    work = from_example(nn.Linear(8, 8, dtype=torch.bfloat16), torch.ones(1, 8, dtype=torch.bfloat16), name="tiny")
    record = baseline.record(work, hardware.cpu(), seconds_per_bucket=0.0, command="wavecrest bench x")
    assert (record.workload, record.dtype, record.parameters) == ("tiny", "bfloat16", 72)
    assert record.header.command == "wavecrest bench x" and record.header.evidence == "measured"


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("mat1 and mat2\ncannot be multiplied")


class Hungry(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate 900 GiB\nmore text")


class Growing(nn.Module):
    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        cache[0] = torch.cat([cache[0], x])
        return cache[0]


def test_what_the_model_raises_names_the_bucket() -> None:
    with pytest.raises(WorkloadError, match=r"^bucket default: the model raised ValueError: mat1 and mat2$"):
        baseline.bench_bucket(from_example(Failing(), torch.ones(1)), "default", seconds=0.0)


def test_out_of_memory_is_a_problem_of_the_machine() -> None:
    with pytest.raises(EnvironmentProblem, match="bucket default does not fit into the memory of cpu"):
        baseline.bench_bucket(from_example(Hungry(), torch.ones(1)), "default", seconds=0.0)


def test_inputs_that_grow_with_every_call_are_refused() -> None:
    work = Workload(Growing(), {"b": Inputs((torch.ones(1),), {"cache": [torch.ones(1)]})})
    with pytest.raises(WorkloadError, match=r"bucket b: the calls changed their own input cache\[0\] from 1 float32"):
        baseline.bench_bucket(work, "b", seconds=0.0)


def test_inputs_that_the_workload_resets_are_fine() -> None:
    cache = [torch.ones(1)]
    lengths = []

    def reset(bucket: str) -> None:
        lengths.append((bucket, len(cache[0])))
        cache[0] = torch.ones(1)

    work = Workload(Growing(), {"b": Inputs((torch.ones(1),), {"cache": cache})}, reset=reset)
    bench = baseline.bench_bucket(work, "b", seconds=0.0)
    assert bench.shapes["cache[0]"] == "1 float32"
    assert {length for _, length in lengths} == {1, 2}, "never longer than one call makes it"


def test_unknown_bucket_and_device() -> None:
    work = from_example(nn.Linear(4, 4), torch.ones(1, 4))
    with pytest.raises(WorkloadError, match="no bucket 'b9'; the workload has default"):
        baseline.bench_bucket(work, "b9")
    meta = from_example(nn.Linear(4, 4, device="meta"), torch.ones(1, 4, device="meta"))
    with pytest.raises(EnvironmentProblem, match="on device meta"):
        baseline.bench_bucket(meta, "default")


@pytest.mark.gpu
def test_peak_memory_on_the_gpu() -> None:
    def hold(x: torch.Tensor) -> None:
        a = torch.zeros(16 << 20, device="cuda")
        b = torch.zeros(16 << 20, device="cuda")
        del a, b

    mib = baseline.peak_memory(_call(hold, torch.ones(1, device="cuda")), "cuda:0") / 2**20
    assert 128 <= mib < 132
