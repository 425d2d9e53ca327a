"""Timing within a run: seconds a bucket, the baseline, what the machine resolves, and pairs of models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from wavecrest.bench.baseline import bench_workload
from wavecrest.errors import StepRefused
from wavecrest.measure import timing
from wavecrest.measure.rotation import Rotation
from wavecrest.measure.workload import Call, Workload
from wavecrest.records import BucketBench

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from wavecrest.optimizer.options import Progress
    from wavecrest.profile.least_time import LeastTimes

# sampling time a bucket, in seconds: on noisy machines less leaves every interval wide, more buys little
LEAST_SECONDS, MOST_SECONDS = 4.0, 10.0
# a run measures about this many times: each bucket may take this part of the budget
MEASUREMENTS = 75
# a model against itself: sampling time, and the blocks that slow work is given beyond it
RESOLUTION_SECONDS, RESOLUTION_BLOCKS = 2.0, 10
# samples of the baseline at least
BASELINE_SAMPLES = 15


@dataclass(slots=True)
class Measurer:
    """Times the buckets of a workload.

    Attributes:
        workload: whose buckets are timed.
        budget: seconds of the whole run; it sets how long a bucket is sampled.
        progress: is told of every sample.
        now: where time comes from.
        resolution: the share below which a difference says nothing here; 0 until `resolve` has measured it.
        least: times that no right result is below; None where they are not known.
    """

    workload: Workload
    budget: float
    progress: Progress
    now: timing.Clock = timing.HOST_CLOCK
    resolution: float = 0.0
    least: LeastTimes | None = None
    _threads: int = field(default_factory=torch.get_num_threads)

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
            min_samples=BASELINE_SAMPLES,
            on_progress=lambda _bucket, done, planned: self.progress.update(done, planned),
            now=self.now,
        )

    def resolve(self, model: nn.Module, *, as_long: bool = False) -> dict[str, timing.Paired]:
        """Time a model against itself, by bucket: `resolution` is the share that a difference must exceed.

        Args:
            model: what candidates are compared with. An eager model that waits for a busy host may differ from itself
                by more than what a step gains over a captured graph (a decode step by 22.7 %; H100, 2026-11-26).
            as_long: for as long as a step is timed, which resolves more.
        """
        seconds = self.seconds if as_long else min(RESOLUTION_SECONDS, self.seconds)
        found = {
            bucket: self._pair(bucket, model, model, seconds, min_blocks=RESOLUTION_BLOCKS)
            for bucket in self.workload.buckets
        }
        self.resolution = max(map(timing.resolution, found.values()))
        return found

    def pairs(
        self, base: nn.Module, new: nn.Module, min_gain: float, on_output: Mapping[str, timing.OnOutput]
    ) -> dict[str, timing.Paired]:
        """Two models interleaved, by bucket.

        Args:
            base: the model so far.
            new: the candidate.
            min_gain: the gain that is to be decided on (0.02: two percent).
            on_output: by bucket, gets outputs of both while they are timed.

        Raises:
            StepRefused: the candidate changed the number of threads, for everything else in the process too, or is
                faster than the hardware allows.
            ClockError: the times cannot be trusted.
        """
        self._check_threads()
        found = {
            bucket: self._pair(bucket, base, new, self.seconds, 1 + min_gain, on_output.get(bucket))
            for bucket in self.workload.buckets
        }
        self._check_threads()
        self.check_possible({bucket: pair.new_ms for bucket, pair in found.items()})
        return found

    def check_possible(self, times: dict[str, float]) -> None:
        """Hold times of a candidate, in ms by bucket, to the least that this device allows.

        Raises:
            StepRefused: one is below it.
        """
        problem = self.least.impossible(times) if self.least is not None else ""
        if problem:
            raise StepRefused(problem)

    def _pair(
        self,
        bucket: str,
        base: nn.Module,
        new: nn.Module,
        seconds: float,
        threshold: float | None = None,
        on_output: timing.OnOutput | None = None,
        min_blocks: int = timing.MIN_SAMPLES // 2,
    ) -> timing.Paired:
        rotation = Rotation(self.workload.buckets[bucket])
        return timing.measure_pair(
            Call(self.workload, bucket, base, rotation),
            Call(self.workload, bucket, new, rotation),
            device=self.workload.device,
            min_blocks=min_blocks,
            seconds=seconds,
            threshold=threshold,
            rotation=rotation,
            on_progress=self.progress.update,
            on_output=on_output,
            now=self.now,
        )

    def _check_threads(self) -> None:
        threads = torch.get_num_threads()
        if threads != self._threads:
            torch.set_num_threads(self._threads)
            raise StepRefused(
                f"it changes the number of threads from {self._threads} to {threads}, for the original too; it is put "
                "back (to run with another number, set OMP_NUM_THREADS)"
            )

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
