"""The one timer: warm-up, device events, cold start apart, interleaved pairs, bootstrap intervals, "unstable".

Rules, with where they come from (simulated here in tests/unit/test_timing.py):
- "Mean of ten, keep if better" accepts noise: 46 % of null changes at 5 % noise. The rule here is: keep only if the
  lower end of the 95 % bootstrap interval of the speed-up is above 1 + min_gain.
- Base and candidate run interleaved in ABBA blocks, so that clock drift and neighbours hit both alike; the block is
  the unit that the bootstrap resamples.
- Where the spread is too wide a measurement says "unstable" instead of giving a number.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wavecrest.errors import InvalidArgument

MIN_SAMPLES = 30
# std / mean of the central 90 % of the samples above which no number is given
UNSTABLE_SPREAD = 0.10
# paired measurement stops early once the interval is this narrow, as a share of the ratio
TARGET_HALF_WIDTH = 0.01
BOOTSTRAP_ROUNDS = 2000
# calls longer than this are not disturbed by what ran before them
SETTLED_MS = 200.0
# samples (or blocks) kept at most: the bootstrap's memory and the size of a record grow with them
MAX_SAMPLES = 1000
# a run of samples lasts at least this long, so that fast work is not judged by one lucky millisecond
MIN_SECONDS = 0.5

# twice the largest last-level cache there is (256 MiB on MI300X, MI355X), and long enough to hide the host behind it
FLUSH_BYTES = 512 << 20
# flushes before one sample at most
MAX_FLUSHES = 8
# rounds that are not kept go before an interleaved measurement on a GPU for this long
CLOCK_SECONDS = 0.05
# rounds of an interleaved measurement at most
MAX_ROUNDS = 400

# the work under test: a call without arguments
Work = Callable[[], Any]
# (completed, planned) after each block, for progress displays
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % bootstrap confidence interval."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"[{self.low:.3f}, {self.high:.3f}]"


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


def trimmed_spread(samples: Sequence[float]) -> float:
    """std / mean after dropping the smallest and the largest 5 % of the samples."""
    if len(samples) < 3:
        return 0.0
    ordered = sorted(samples)
    cut = int(len(ordered) * 0.05)
    kept = ordered[cut : len(ordered) - cut]
    mean = statistics.fmean(kept)
    return statistics.stdev(kept) / mean if mean > 0 and len(kept) > 1 else 0.0


def bootstrap_median(samples: Sequence[float], *, seed: int = 0) -> Interval:
    """95 % percentile bootstrap interval of the median."""
    values = _times(samples)
    picks = np.random.default_rng(seed).integers(0, values.size, (BOOTSTRAP_ROUNDS, values.size))
    low, high = np.quantile(np.median(values[picks], axis=1), (0.025, 0.975))
    return Interval(float(low), float(high))


def keeps(ci: Interval, min_gain: float) -> bool:
    """The keep rule: the lower end of the speed-up's interval is above 1 + min_gain (0.02 is two percent)."""
    return ci.low > 1 + min_gain


def bootstrap_unpaired(base: Sequence[float], new: Sequence[float], *, seed: int = 0) -> tuple[float, Interval]:
    """Speed-up and its 95 % interval from two independent runs: median(base) / median(new), each side resampled alone.

    The interval covers the noise inside both runs, not what differs between them (another process, machine or clock).
    """
    a, b = _times(base), _times(new)
    rng = np.random.default_rng(seed)
    rounds = np.median(a[rng.integers(0, a.size, (BOOTSTRAP_ROUNDS, a.size))], axis=1)
    rounds /= np.median(b[rng.integers(0, b.size, (BOOTSTRAP_ROUNDS, b.size))], axis=1)
    low, high = np.quantile(rounds, (0.025, 0.975))
    return float(np.median(a) / np.median(b)), Interval(float(low), float(high))


def _times(samples: Sequence[float]) -> np.ndarray:
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0 or not (values > 0).all() or not np.isfinite(values).all():
        raise InvalidArgument("a bootstrap needs at least one time, and every time finite and above zero")
    return values


def bootstrap_speedup(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]], *, seed: int = 0
) -> tuple[float, Interval]:
    """Speed-up and its 95 % interval over one or more buckets.

    Args:
        pairs: per bucket, (base, candidate) times by block; element i of both comes from the same block. A bucket's
            speed-up is the ratio of medians; several buckets combine as a geometric mean.

    Returns:
        (speed-up, interval); blocks are resampled together, so what hit both sides of a block stays paired.
    """
    if not pairs or any(len(base) != len(new) or not base for base, new in pairs):
        raise InvalidArgument("bootstrap_speedup needs pairs of equal, non-zero length")
    rng = np.random.default_rng(seed)
    log_rounds = np.zeros(BOOTSTRAP_ROUNDS)
    log_point = 0.0
    for base, new in pairs:
        a, b = _times(base), _times(new)
        picks = rng.integers(0, a.size, (BOOTSTRAP_ROUNDS, a.size))
        log_rounds += np.log(np.median(a[picks], axis=1) / np.median(b[picks], axis=1))
        log_point += math.log(float(np.median(a)) / float(np.median(b)))
    low, high = np.quantile(log_rounds / len(pairs), (0.025, 0.975))
    return math.exp(log_point / len(pairs)), Interval(math.exp(float(low)), math.exp(float(high)))


@dataclass(slots=True)
class Stopwatch:
    """Times single calls on one device: events on a GPU, the host clock on the CPU.

    Args:
        device: a torch device name, "cpu" or "cuda:N".
        cold_cache: before each timed call read a buffer larger than any last-level cache (GPU only).
    """

    device: str
    cold_cache: bool = False
    _flush: Any = field(default=None, repr=False)

    @property
    def clock(self) -> str:
        """What the samples are: "device events" or "host wall"."""
        return "host wall" if self.device == "cpu" else "device events"

    def flush(self) -> None:
        """Enqueue a read of FLUSH_BYTES, which leaves nothing of what ran before in a GPU's caches.

        Not a write: it would leave them full of lines that go back to memory while the timed call runs. Behind one,
        reading 64 MiB reached 61 % of the bandwidth of reading 1 GiB (H200,
        evidence/nvidia-h200/2026-11-20_bench_memcpy.jsonl.gz).
        """
        import torch

        if self._flush is None:
            self._flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=self.device)
        self._flush.sum()

    def time(self, work: Work) -> tuple[float, float]:
        """Run once; returns (sample, wall) in ms, both ended by a synchronize.

        A work with a `prepare` method has it called first, outside the timed region.
        """
        prepare = getattr(work, "prepare", None)
        if prepare is not None:
            prepare()
        if self.device == "cpu":
            start = time.perf_counter()
            work()
            wall = (time.perf_counter() - start) * 1e3
            return wall, wall
        import torch

        if self.cold_cache:
            self.flush()
        stream = torch.cuda.current_stream(self.device)
        event: Any = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        stream.synchronize()
        start = time.perf_counter()
        begin.record(stream)
        work()
        end.record(stream)
        end.synchronize()
        wall = (time.perf_counter() - start) * 1e3
        return begin.elapsed_time(end), wall


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
    begin = time.perf_counter()
    _, cold = stopwatch.time(work)
    done = 1
    # a work of seconds needs no further warm-up than the wanted calls; one of microseconds gets `seconds` of it
    while done < calls or time.perf_counter() - begin < seconds:
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
    begin: float
    _next: int = 0

    def due(self, count: int) -> bool:
        """True if the interval must be computed now."""
        elapsed = time.perf_counter() - self.begin
        if count >= self.least and (elapsed > self.seconds or count >= MAX_SAMPLES):
            return True
        if count < max(self.least, self._next) or elapsed < min(MIN_SECONDS, self.seconds):
            return False
        self._next = math.ceil(count * 1.5)
        return True

    def done(self, count: int, center: float, ci: Interval) -> bool:
        """True if sampling ends with this interval."""
        narrow = (ci.high - ci.low) / 2 <= TARGET_HALF_WIDTH * center
        return narrow or count >= MAX_SAMPLES or time.perf_counter() - self.begin > self.seconds


def measure(
    work: Work,
    *,
    device: str,
    min_samples: int = MIN_SAMPLES,
    seconds: float = 5.0,
    cold_cache: bool = False,
    on_progress: OnProgress | None = None,
) -> Measurement:
    """Time `work` after warm-up: at least `min_samples` calls, more while `seconds` last and the interval is wide.

    Goes on for MIN_SECONDS even if the interval is narrow before; of very fast work only every n-th call is a sample,
    at most MAX_SAMPLES in all. `on_progress` gets the samples so far and the least number wanted.
    """
    with _quiet_heap():
        return _measure(work, Stopwatch(device, cold_cache), min_samples, seconds, on_progress)


def _measure(
    work: Work, stopwatch: Stopwatch, min_samples: int, seconds: float, on_progress: OnProgress | None
) -> Measurement:
    cold = warm_up(stopwatch, work)
    stride = _stride(stopwatch, work, seconds)
    samples: list[float] = []
    wall: list[float] = []
    stop = _Stop(min_samples, seconds, time.perf_counter())
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
) -> Paired:
    """Time `base` against `new` in interleaved ABBA blocks.

    After each change of side one call is not timed: right after the other side ran, the host's caches hold that
    side's code and data, which no server sees. Calls that take longer than SETTLED_MS settle by themselves.

    Runs at least `min_blocks` blocks (two calls of each side a block) and MIN_SECONDS, then goes on while `seconds`
    last and the interval of the speed-up is wider than one percent either way, to MAX_SAMPLES blocks at most. The stop
    looks at the width alone, never at which side leads, so it does not favour a verdict.
    """
    with _quiet_heap():
        return _measure_pair(base, new, Stopwatch(device), min_blocks, seconds, on_progress)


def _measure_pair(
    base: Work, new: Work, stopwatch: Stopwatch, min_blocks: int, seconds: float, on_progress: OnProgress | None
) -> Paired:
    warm_up(stopwatch, base)
    warm_up(stopwatch, new)
    a: list[float] = []
    b: list[float] = []
    stop = _Stop(min_blocks, seconds, time.perf_counter())
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
        return _measure_interleaved(works, Stopwatch(device), seconds, min_rounds, on_progress)


def _measure_interleaved(
    works: Sequence[Work], stopwatch: Stopwatch, seconds: float, min_rounds: int, on_progress: OnProgress | None
) -> Interleaved:
    on_cpu = stopwatch.device == "cpu"
    for work in works:
        warm_up(stopwatch, work, seconds=0.0)
    flushes = 0 if on_cpu else _flushes(stopwatch, works)
    samples: list[list[float]] = [[] for _ in works]
    begin = time.perf_counter()
    # a GPU that was idle while something compiled takes a while to come back to its clock
    while not on_cpu and time.perf_counter() - begin < CLOCK_SECONDS:
        _device_round(stopwatch, works, flushes)
    begin = time.perf_counter()
    rounds = 0
    while rounds < min_rounds or (rounds < MAX_ROUNDS and time.perf_counter() - begin < seconds):
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
            start = time.perf_counter()
            work()
            calls.append((time.perf_counter() - start) * 1e3)
            stream.synchronize()
        host = max(host, min(calls))
    # the events around the call cost the host some microseconds too
    return min(MAX_FLUSHES, max(1, math.ceil(1.5 * (host + 0.02) / device)))


def bootstrap_processes(
    buckets: Sequence[tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]]], *, seed: int = 0
) -> tuple[float, Interval]:
    """Speed-up and 95 % interval where each side ran in several fresh processes.

    Args:
        buckets: per bucket, (samples of each base process, samples of each candidate process), in ms. Processes are
            the unit that is resampled: samples of one process share its memory layout and are not independent.
    """
    rng = np.random.default_rng(seed)
    log_rounds = np.zeros(BOOTSTRAP_ROUNDS)
    log_point = 0.0
    for base, new in buckets:
        if not base or not new:
            raise InvalidArgument("bootstrap_processes needs at least one process a side")
        sides = [np.log([statistics.median(run) for run in side]) for side in (base, new)]
        drawn = [np.median(side[rng.integers(0, side.size, (BOOTSTRAP_ROUNDS, side.size))], axis=1) for side in sides]
        log_rounds += drawn[0] - drawn[1]
        log_point += float(np.median(sides[0]) - np.median(sides[1]))
    low, high = np.quantile(log_rounds / len(buckets), (0.025, 0.975))
    return math.exp(log_point / len(buckets)), Interval(math.exp(float(low)), math.exp(float(high)))
