"""Timing within a run: how long each bucket is sampled, the baseline, and pairs of models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from wavecrest.bench.baseline import bench_workload
from wavecrest.measure import timing
from wavecrest.measure.workload import Call, Workload
from wavecrest.records import BucketBench

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.optimizer.options import Progress

# sampling time a bucket, in seconds: on noisy machines less leaves every interval wide, more buys little
LEAST_SECONDS, MOST_SECONDS = 4.0, 10.0
# a run measures about this many times: each bucket may take this part of the budget
MEASUREMENTS = 75


@dataclass(frozen=True, slots=True)
class Measurer:
    """Times the buckets of a workload.

    Attributes:
        workload: whose buckets are timed.
        budget: seconds of the whole run; it sets how long a bucket is sampled.
        progress: is told of every sample.
        now: where time comes from.
    """

    workload: Workload
    budget: float
    progress: Progress
    now: timing.Clock = timing.HOST_CLOCK

    @property
    def seconds(self) -> float:
        """Sampling time a bucket, so that measuring takes a part of the budget that its steps can afford."""
        share = self.budget / MEASUREMENTS / len(self.workload.buckets)
        return min(MOST_SECONDS, max(LEAST_SECONDS, share))

    def baseline(self) -> list[BucketBench]:
        """The workload's own model by itself: every bucket's time, shapes and peak memory."""
        return bench_workload(
            self.workload,
            seconds_per_bucket=self.seconds,
            on_progress=lambda _bucket, done, planned: self.progress.update(done, planned),
            now=self.now,
        )

    def pairs(self, base: nn.Module, new: nn.Module) -> dict[str, timing.Paired]:
        """Two models interleaved, by bucket."""
        return {
            bucket: timing.measure_pair(
                Call(self.workload, bucket, base),
                Call(self.workload, bucket, new),
                device=self.workload.device,
                seconds=self.seconds,
                on_progress=self.progress.update,
                now=self.now,
            )
            for bucket in self.workload.buckets
        }

    def peak_memory(self, model: nn.Module) -> int | None:
        """Bytes allocated on the GPU at the peak of one call of every bucket, weights included.

        None on the CPU: the peak of a process says nothing about one of the two models in it.
        """
        if self.workload.device == "cpu":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for bucket in self.workload.buckets:
            self.workload.run(bucket, model)
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated())
