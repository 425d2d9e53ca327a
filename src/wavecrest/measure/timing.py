"""The timer: warm-up, cold start apart, single measurements, interleaved pairs and rounds, and when sampling ends.

- Base and candidate run interleaved in ABBA blocks, so that clock drift and neighbours hit both alike; the block is
  the unit that the bootstrap resamples.
- Where the spread is too wide a measurement says "unstable" instead of giving a number.
- Time is read from `now`, the host's clock unless a test passes a simulated one (tests/unit/test_timing.py).
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from wavecrest.errors import InvalidArgument
from wavecrest.measure.bootstrap import (
    Interval,
    bootstrap_median,
    bootstrap_processes,
    bootstrap_speedup,
    bootstrap_unpaired,
    keeps,
    trimmed_spread,
)
from wavecrest.measure.clock import FLUSH_BYTES, Clock, Stopwatch, Work

__all__ = [
    "CLOCK_SECONDS",
    "FLUSH_BYTES",
    "MAX_FLUSHES",
    "MAX_ROUNDS",
    "MAX_SAMPLES",
    "MIN_SAMPLES",
    "MIN_SECONDS",
    "SETTLED_MS",
    "TARGET_HALF_WIDTH",
    "UNSTABLE_SPREAD",
    "Clock",
    "Interleaved",
    "Interval",
    "Measurement",
    "OnProgress",
    "Paired",
    "Stopwatch",
    "Work",
    "bootstrap_median",
    "bootstrap_processes",
    "bootstrap_speedup",
    "bootstrap_unpaired",
    "keeps",
    "measure",
    "measure_interleaved",
    "measure_pair",
    "trimmed_spread",
    "warm_up",
]

MIN_SAMPLES = 30
# std / mean of the central 90 % of the samples above which no number is given
UNSTABLE_SPREAD = 0.10
# paired measurement stops early once the interval is this narrow, as a share of the ratio
TARGET_HALF_WIDTH = 0.01
# calls longer than this are not disturbed by what ran before them
SETTLED_MS = 200.0
# samples (or blocks) kept at most: the bootstrap's memory and the size of a record grow with them
MAX_SAMPLES = 1000
# a run of samples lasts at least this long, so that fast work is not judged by one lucky millisecond
MIN_SECONDS = 0.5

# flushes before one sample at most
MAX_FLUSHES = 8
# rounds that are not kept go before an interleaved measurement on a GPU for this long
CLOCK_SECONDS = 0.05
# rounds of an interleaved measurement at most
MAX_ROUNDS = 400

# (completed, planned) after each block, for progress displays
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Repeated timings of one piece of work, in milliseconds.

    `samples` are device spans on a GPU (event to event, idle gaps included) and host wall time on the CPU; `wall` is
    host wall time in both cases, ended by a synchronize. `cold_start` is the first call, kept out of the samples.
    """

    samples: tuple[float, ...]
    wall: tuple[float, ...]
    cold_start: float
    clock: str
    ci: Interval

    @property
    def n(self) -> int:
        """Number of samples."""
        return len(self.samples)

    @property
    def median(self) -> float:
        """Median in ms."""
        return statistics.median(self.samples)

    @property
    def mean(self) -> float:
        """Mean in ms."""
        return statistics.fmean(self.samples)

    @property
    def std(self) -> float:
        """Standard deviation in ms (0 for one sample)."""
        return statistics.stdev(self.samples) if len(self.samples) > 1 else 0.0

    @property
    def spread(self) -> float:
        """std / mean of the central 90 % of the samples: one interrupt does not make a run unstable."""
        return trimmed_spread(self.samples)

    @property
    def unstable(self) -> bool:
        """True if the spread is too wide for the median to be quoted."""
        return self.spread > UNSTABLE_SPREAD

    def describe(self) -> str:
        """The median with its interval, or the word unstable with the reason."""
        if self.unstable:
            return f"unstable (spread {self.spread:.0%} of the mean over {self.n} samples)"
        return f"{self.median:.3f} ms [{self.ci.low:.3f}, {self.ci.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Paired:
    """Base against candidate, measured interleaved; `ratio` is base time over candidate time (above 1: faster).

    `base` and `new` hold one value a block, in ms: the mean of the two calls of that side in the block.
    """

    base: tuple[float, ...]
    new: tuple[float, ...]
    ratio: float
    ci: Interval
    clock: str

    @property
    def n(self) -> int:
        """Number of ABBA blocks."""
        return len(self.base)

    @property
    def base_ms(self) -> float:
        """Median of the base, in ms."""
        return statistics.median(self.base)

    @property
    def new_ms(self) -> float:
        """Median of the candidate, in ms."""
        return statistics.median(self.new)


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Several pieces of work timed in turn: `samples[i][r]` is work i in round r, in ms."""

    samples: tuple[tuple[float, ...], ...]
    clock: str

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.samples[0])


@contextmanager
def _quiet_heap() -> Iterator[None]:
    """Keep what this process has allocated so far out of the collector's sight while something is timed.

    Compilation leaves millions of objects; a collection that walks over them would be charged to whichever side
    allocates, which is the eager one.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def warm_up(stopwatch: Stopwatch, work: Work, *, calls: int = 3, seconds: float = 0.2) -> float:
    """Call until both limits are reached; returns the first call's wall time in ms (the cold start)."""
    begin = stopwatch.now()
    _, cold = stopwatch.time(work)
    done = 1
    # a work of seconds needs no further warm-up than the wanted calls; one of microseconds gets `seconds` of it
    while done < calls or stopwatch.now() - begin < seconds:
        stopwatch.time(work)
        done += 1
    return cold


def _stride(stopwatch: Stopwatch, work: Work, seconds: float) -> int:
    """How many calls to make for each one kept, so that MAX_SAMPLES kept ones last about MIN_SECONDS."""
    _, wall = stopwatch.time(work)
    wanted = min(MIN_SECONDS, seconds) * 1e3 / MAX_SAMPLES
    return max(1, math.ceil(wanted / wall)) if wall > 0 else 1


@dataclass(slots=True)
class _Stop:
    """When sampling ends: enough samples and time, and then a narrow interval, or the end of the time or the room.

    Looks only at sample counts that grow by half (each look costs a bootstrap, and many looks at the same data would
    favour lucky intervals), and only at the interval's width, never at which side leads.
    """

    least: int
    seconds: float
    now: Clock
    begin: float
    _next: int = 0

    def due(self, count: int) -> bool:
        """True if the interval must be computed now."""
        elapsed = self.now() - self.begin
        if count >= self.least and (elapsed > self.seconds or count >= MAX_SAMPLES):
            return True
        if count < max(self.least, self._next) or elapsed < min(MIN_SECONDS, self.seconds):
            return False
        self._next = math.ceil(count * 1.5)
        return True

    def done(self, count: int, center: float, ci: Interval) -> bool:
        """True if sampling ends with this interval."""
        narrow = (ci.high - ci.low) / 2 <= TARGET_HALF_WIDTH * center
        return narrow or count >= MAX_SAMPLES or self.now() - self.begin > self.seconds


def measure(
    work: Work,
    *,
    device: str,
    min_samples: int = MIN_SAMPLES,
    seconds: float = 5.0,
    cold_cache: bool = False,
    on_progress: OnProgress | None = None,
    now: Clock = time.perf_counter,
) -> Measurement:
    """Time `work` after warm-up: at least `min_samples` calls, more while `seconds` last and the interval is wide.

    Goes on for MIN_SECONDS even if the interval is narrow before; of very fast work only every n-th call is a sample,
    at most MAX_SAMPLES in all. `on_progress` gets the samples so far and the least number wanted.
    """
    with _quiet_heap():
        return _measure(work, Stopwatch(device, cold_cache, now), min_samples, seconds, on_progress)


def _measure(
    work: Work, stopwatch: Stopwatch, min_samples: int, seconds: float, on_progress: OnProgress | None
) -> Measurement:
    cold = warm_up(stopwatch, work)
    stride = _stride(stopwatch, work, seconds)
    samples: list[float] = []
    wall: list[float] = []
    stop = _Stop(min_samples, seconds, stopwatch.now, stopwatch.now())
    while True:
        for _ in range(stride):
            sample, host = stopwatch.time(work)
        samples.append(sample)
        wall.append(host)
        if on_progress is not None:
            on_progress(len(samples), min_samples)
        if not stop.due(len(samples)):
            continue
        ci = bootstrap_median(samples)
        if stop.done(len(samples), statistics.median(samples), ci):
            return Measurement(tuple(samples), tuple(wall), cold, stopwatch.clock, ci)


def measure_pair(
    base: Work,
    new: Work,
    *,
    device: str,
    min_blocks: int = MIN_SAMPLES // 2,
    seconds: float = 10.0,
    on_progress: OnProgress | None = None,
    now: Clock = time.perf_counter,
) -> Paired:
    """Time `base` against `new` in interleaved ABBA blocks.

    After each change of side one call is not timed: right after the other side ran, the host's caches hold that
    side's code and data, which no server sees. Calls that take longer than SETTLED_MS settle by themselves.

    Runs at least `min_blocks` blocks (two calls of each side a block) and MIN_SECONDS, then goes on while `seconds`
    last and the interval of the speed-up is wider than one percent either way, to MAX_SAMPLES blocks at most. The stop
    looks at the width alone, never at which side leads, so it does not favour a verdict.
    """
    with _quiet_heap():
        return _measure_pair(base, new, Stopwatch(device, now=now), min_blocks, seconds, on_progress)


def _measure_pair(
    base: Work, new: Work, stopwatch: Stopwatch, min_blocks: int, seconds: float, on_progress: OnProgress | None
) -> Paired:
    warm_up(stopwatch, base)
    warm_up(stopwatch, new)
    a: list[float] = []
    b: list[float] = []
    stop = _Stop(min_blocks, seconds, stopwatch.now, stopwatch.now())
    while True:
        first, _ = stopwatch.time(base)
        if not b or b[-1] < SETTLED_MS:
            stopwatch.time(new)
        second, _ = stopwatch.time(new)
        third, _ = stopwatch.time(new)
        if first < SETTLED_MS:
            stopwatch.time(base)
        fourth, _ = stopwatch.time(base)
        a.append((first + fourth) / 2)
        b.append((second + third) / 2)
        if on_progress is not None:
            on_progress(len(a), min_blocks)
        if not stop.due(len(a)):
            continue
        ratio, ci = bootstrap_speedup([(a, b)])
        if stop.done(len(a), ratio, ci):
            return Paired(tuple(a), tuple(b), ratio, ci, stopwatch.clock)


def measure_interleaved(
    works: Sequence[Work],
    *,
    device: str,
    seconds: float = 0.25,
    min_rounds: int = MIN_SAMPLES,
    on_progress: OnProgress | None = None,
    now: Clock = time.perf_counter,
) -> Interleaved:
    """Time several pieces of work of microseconds in turn (ABCABC…), so that drift hits all alike.

    On a GPU every sample is the device's span of one call behind a read of FLUSH_BYTES: caches are cold and clean, and
    the host enqueues the call while that read runs, so its cost is not in the span. On the CPU a sample is host wall
    time. Nothing is tuned by the result: rounds go on until `min_rounds` are done and `seconds` are over, to
    MAX_ROUNDS.

    Raises:
        InvalidArgument: there is no work.
    """
    if not works:
        raise InvalidArgument("measure_interleaved needs at least one work")
    with _quiet_heap():
        return _measure_interleaved(works, Stopwatch(device, now=now), seconds, min_rounds, on_progress)


def _measure_interleaved(
    works: Sequence[Work], stopwatch: Stopwatch, seconds: float, min_rounds: int, on_progress: OnProgress | None
) -> Interleaved:
    on_cpu = stopwatch.device == "cpu"
    for work in works:
        warm_up(stopwatch, work, seconds=0.0)
    flushes = 0 if on_cpu else _flushes(stopwatch, works)
    samples: list[list[float]] = [[] for _ in works]
    begin = stopwatch.now()
    # a GPU that was idle while something compiled takes a while to come back to its clock
    while not on_cpu and stopwatch.now() - begin < CLOCK_SECONDS:
        _device_round(stopwatch, works, flushes)
    begin = stopwatch.now()
    rounds = 0
    while rounds < min_rounds or (rounds < MAX_ROUNDS and stopwatch.now() - begin < seconds):
        taken = [stopwatch.time(work)[0] for work in works] if on_cpu else _device_round(stopwatch, works, flushes)
        for series, sample in zip(samples, taken, strict=True):
            series.append(sample)
        rounds += 1
        if on_progress is not None:
            on_progress(rounds, min_rounds)
    clock = stopwatch.clock if on_cpu else f"{stopwatch.clock}, caches cold and clean"
    return Interleaved(tuple(tuple(series) for series in samples), clock)


def _device_round(stopwatch: Stopwatch, works: Sequence[Work], flushes: int) -> list[float]:
    """One call of each work between device events; waits only at the end, so that the device never waits for us."""
    import torch

    stream = torch.cuda.current_stream(stopwatch.device)
    event: Any = torch.cuda.Event
    spans = [(event(enable_timing=True), event(enable_timing=True)) for _ in works]
    for work, (begin, end) in zip(works, spans, strict=True):
        for _ in range(flushes):
            stopwatch.flush()
        begin.record(stream)
        work()
        end.record(stream)
    stream.synchronize()
    return [begin.elapsed_time(end) for begin, end in spans]


def _flushes(stopwatch: Stopwatch, works: Sequence[Work]) -> int:
    """How many flushes go before each sample, so that the slowest host call is over before the device gets to it."""
    import torch

    stream = torch.cuda.current_stream(stopwatch.device)
    device = min(stopwatch.time(stopwatch.flush)[0] for _ in range(3))
    host = 0.0
    for work in works:
        calls = []
        for _ in range(3):
            start = stopwatch.now()
            work()
            calls.append((stopwatch.now() - start) * 1e3)
            stream.synchronize()
        host = max(host, min(calls))
    # the events around the call cost the host some microseconds too
    return min(MAX_FLUSHES, max(1, math.ceil(1.5 * (host + 0.02) / device)))
