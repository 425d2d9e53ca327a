"""The timer: warm-up, cold start apart, single measurements and pairs, and when sampling ends.

No side of a pair has an advantage by its place:

- A block is ABBA or BAAB, drawn at random.
- Each timed run of a side follows an untimed call of that side, and nothing lies between the two: progress displays,
  statistics, other inputs and garbage collection have their time between blocks.
- A few untimed calls, their number drawn at random, go before a block, so that what disturbs every n-th call of the
  process does not meet the same place of every block.
- Inputs change their values and addresses from call to call (`rotation`), the same way for both sides.

`interleaved` times many works in turn. Where the spread is too wide a measurement says "unstable" instead of giving a
number. Time is read from `now`, the host's clock unless a test passes a simulated one (tests/unit/test_timing.py).
"""

from __future__ import annotations

import gc
import math
import secrets
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from wavecrest.measure.bootstrap import (
    Interval,
    bootstrap_median,
    bootstrap_speedup,
    bootstrap_unpaired,
    keeps,
    trimmed_spread,
)
from wavecrest.measure.clock import HOST_CLOCK, Clock, Stopwatch, Work
from wavecrest.measure.speedup import LEAST_BLOCKS, block_speedup, process_speedup

__all__ = [
    "FINEST_HALF_WIDTH",
    "HOST_CLOCK",
    "MAX_SAMPLES",
    "MIN_SAMPLES",
    "MIN_SECONDS",
    "SETTLED_MS",
    "TARGET_HALF_WIDTH",
    "UNSTABLE_SPREAD",
    "Clock",
    "Interval",
    "Measurement",
    "OnOutput",
    "OnProgress",
    "Paired",
    "Rotating",
    "Side",
    "Stopwatch",
    "Work",
    "block_speedup",
    "bootstrap_median",
    "bootstrap_speedup",
    "bootstrap_unpaired",
    "keeps",
    "measure",
    "measure_pair",
    "no_collection",
    "process_speedup",
    "quiet_heap",
    "resolution",
    "trimmed_spread",
    "warm_up",
]

MIN_SAMPLES = 30
# std / mean of the central 90 % of the samples above which no number is given
UNSTABLE_SPREAD = 0.10
# paired measurement stops early once the interval is this narrow, as a share of the ratio
TARGET_HALF_WIDTH = 0.01
# or, while the interval holds the gain that is to be decided on, this narrow
FINEST_HALF_WIDTH = 0.0025
# pairs of slow work end after this many times their `seconds`, with fewer blocks than wanted
OVERTIME = 3
# calls longer than this are hardly disturbed by what ran before them: it refills caches in a millisecond
SETTLED_MS = 100.0
# samples (or blocks) kept at most: the bootstrap's memory and the size of a record grow with them
MAX_SAMPLES = 1000
# a run of samples lasts at least this long, so that fast work is not judged by one lucky millisecond
MIN_SECONDS = 0.5
# a work is called for this long at least before it is timed
WARM_UP_SECONDS = 0.2
# up to this many calls more, drawn at random, go before a block: what disturbs every n-th call hits no fixed place
MOST_SHIFT = 2
# one block in about this many, and one at least, passes its outputs on (`OnOutput`), and its times do not count
OUTPUT_BLOCKS = 16

# (completed, planned) between blocks, for progress displays
OnProgress = Callable[[int, int], None]
Side = Literal["base", "new"]
# (side, output, number of the input set): what a call returned, right after it, in a block whose times do not count.
# Which blocks these are is drawn at random, so a candidate cannot know. The same number means the same inputs on both
# sides. Whoever keeps the output of a captured model past this call copies it
OnOutput = Callable[[Side, Any, int], None]


class Rotating(Protocol):
    """Input sets that calls go round; `rotation.Rotation`."""

    @property
    def sets(self) -> int:
        """Number of sets; 0 where nothing can rotate."""

    def start(self) -> None:
        """Make the sets, after warm-up calls with the example."""

    def use(self, slot: int) -> None:
        """The inputs of the next calls."""

    def refresh(self, random: np.random.Generator) -> None:
        """Other values and addresses."""

    def release(self) -> None:
        """The example again."""


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

    `base` and `new` hold one value a block, in ms: the mean of the two calls of that side in the block. `seed` is that
    of the generator that drew the order of each block.
    """

    base: tuple[float, ...]
    new: tuple[float, ...]
    ratio: float
    ci: Interval
    clock: str
    seed: int = 0

    @property
    def n(self) -> int:
        """Number of blocks."""
        return len(self.base)

    @property
    def base_ms(self) -> float:
        """Median of the base, in ms."""
        return statistics.median(self.base)

    @property
    def new_ms(self) -> float:
        """Median of the candidate, in ms."""
        return statistics.median(self.new)


@contextmanager
def quiet_heap() -> Iterator[None]:
    """Keep what this process has allocated so far out of the collector's sight while something is timed.

    Compilation leaves millions of objects; a collection that walks over them would be charged to whichever side
    allocates, which is the eager one.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection inside; what was left lying is collected at the end."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(1)
        if enabled:
            gc.enable()


def warm_up(stopwatch: Stopwatch, work: Work, *, calls: int = 3, seconds: float = WARM_UP_SECONDS) -> float:
    """Call until both limits are reached; returns the first call's wall time in ms (the cold start)."""
    begin = stopwatch.now()
    _, cold = stopwatch.time(work)
    done = 1
    # a work of seconds needs no further warm-up than the wanted calls; one of microseconds gets `seconds` of it
    while done < calls or stopwatch.now() - begin < seconds:
        stopwatch.time(work)
        done += 1
    return cold


def _begin(stopwatch: Stopwatch, works: Sequence[Work], rotation: Rotating | None) -> None:
    """Make the input sets, and call every work once with each: compilers meet the new addresses here."""
    if rotation is None:
        return
    rotation.start()
    for slot in range(rotation.sets):
        rotation.use(slot)
        for work in works:
            stopwatch.time(work)


def _stride(stopwatch: Stopwatch, work: Work, seconds: float) -> int:
    """How many calls to make for each one kept: MAX_SAMPLES last about MIN_SECONDS, and short calls settle first."""
    _, wall = stopwatch.time(work)
    wanted = min(MIN_SECONDS, seconds) * 1e3 / MAX_SAMPLES
    return max(2 if wall < SETTLED_MS else 1, math.ceil(wanted / wall)) if wall > 0 else 2


@dataclass(slots=True)
class _Stop:
    """When sampling ends: enough samples and time, and then a narrow interval, or the end of the time or the room.

    Looks only at sample counts that grow by half (each look costs statistics, and many looks at the same data would
    favour lucky intervals), and never at which side leads: only at the interval's width, and at whether it holds
    `threshold`, the speed-up that is to be decided on.
    """

    least: int
    seconds: float
    now: Clock
    begin: float
    threshold: float | None = None
    # samples that are enough once OVERTIME is over; None: `least`
    fewest: int | None = None
    _next: int = 0

    def due(self, count: int) -> bool:
        """True if the interval must be computed now."""
        elapsed = self.now() - self.begin
        if self.fewest is not None and count >= self.fewest and elapsed > OVERTIME * self.seconds:
            return True
        if count >= self.least and (elapsed > self.seconds or count >= MAX_SAMPLES):
            return True
        if count < max(self.least, self._next) or elapsed < min(MIN_SECONDS, self.seconds):
            return False
        self._next = math.ceil(count * 1.5)
        return True

    def done(self, count: int, center: float, ci: Interval) -> bool:
        """True if sampling ends with this interval."""
        half = (ci.high - ci.low) / 2
        narrow = half <= TARGET_HALF_WIDTH * center
        if self.threshold is not None and ci.low <= self.threshold <= ci.high:
            narrow = half <= FINEST_HALF_WIDTH * center
        return narrow or count >= MAX_SAMPLES or self.now() - self.begin > self.seconds


def measure(
    work: Work,
    *,
    device: str,
    min_samples: int = MIN_SAMPLES,
    seconds: float = 5.0,
    cold_cache: bool = False,
    rotation: Rotating | None = None,
    on_progress: OnProgress | None = None,
    pause: Callable[[], float] | None = None,
    now: Clock = HOST_CLOCK,
) -> Measurement:
    """Time `work` after warm-up: at least `min_samples` calls, more while `seconds` last and the interval is wide.

    Goes on for MIN_SECONDS even if the interval is narrow before; of very fast work only every n-th call is a sample,
    at most MAX_SAMPLES in all. An untimed call, or two at random, precedes each sample of a work below SETTLED_MS.
    `rotation` is of the inputs that `work` calls with. `on_progress` gets the samples so far and the least wanted.
    `pause` is called between samples, when something else may run; the seconds that it returns do not count.

    Raises:
        ClockError: clocks disagree, were replaced, or work goes on after the timed call.
    """
    stopwatch = Stopwatch(device, cold_cache, now)
    with quiet_heap(), stopwatch.watched():
        try:
            return _measure(work, stopwatch, min_samples, seconds, rotation, on_progress, pause)
        finally:
            if rotation is not None:
                rotation.release()


def _measure(
    work: Work,
    stopwatch: Stopwatch,
    min_samples: int,
    seconds: float,
    rotation: Rotating | None,
    on_progress: OnProgress | None,
    pause: Callable[[], float] | None,
) -> Measurement:
    cold = warm_up(stopwatch, work)
    _begin(stopwatch, [work], rotation)
    stride = _stride(stopwatch, work, seconds)
    random = np.random.default_rng(secrets.randbits(32))
    samples: list[float] = []
    wall: list[float] = []
    stop = _Stop(min_samples, seconds, stopwatch.now, stopwatch.now())
    while True:
        if rotation is not None:
            rotation.refresh(random)
        # what disturbs every n-th call hits no fixed place of the stride
        more = int(random.integers(2)) if stride > 1 else 0
        with no_collection():
            for call in range(stride + more):
                if rotation is not None:
                    rotation.use(call)
                sample, host = stopwatch.time(work)
        samples.append(sample)
        wall.append(host)
        if on_progress is not None:
            on_progress(len(samples), min_samples)
        if pause is not None:
            stop.begin += pause()
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
    threshold: float | None = None,
    rotation: Rotating | None = None,
    seed: int | None = None,
    on_progress: OnProgress | None = None,
    on_output: OnOutput | None = None,
    now: Clock = HOST_CLOCK,
) -> Paired:
    """Time `base` against `new` in blocks of ABBA or BAAB, drawn at random.

    Before each timed run of a side that side is called once untimed: right after anything else ran, the host's caches
    hold other code and data, which no server sees. Calls that take longer than SETTLED_MS settle by themselves.

    Runs at least `min_blocks` blocks (two timed calls of each side a block) and MIN_SECONDS, then goes on while
    `seconds` last and the interval of the speed-up is wider than one percent either way, to MAX_SAMPLES blocks at most.
    Of slow work LEAST_BLOCKS are enough once OVERTIME times `seconds` are over.

    Args:
        threshold: the speed-up that is to be decided on, such as 1.02: an interval that holds it goes on to
            FINEST_HALF_WIDTH. The stop never looks at which side leads, so it does not favour a verdict.
        rotation: of the inputs that both works call with; None: they call with their own.
        seed: of the generator that draws; None takes a fresh one. The result names it.
        on_progress: gets the blocks so far and the least number wanted, between blocks.
        on_output: gets outputs of some calls (see `OnOutput`).

    Raises:
        ClockError: clocks disagree, were replaced, or work goes on after the timed call.
    """
    stopwatch = Stopwatch(device, now=now)
    seed = secrets.randbits(32) if seed is None else seed
    pair = _Pair(stopwatch, base, new, rotation, np.random.default_rng(seed))
    stop_at = max(min_blocks, LEAST_BLOCKS)
    with quiet_heap(), stopwatch.watched():
        try:
            pair.warm_up(min(WARM_UP_SECONDS, seconds))
            stop = _Stop(stop_at, seconds, stopwatch.now, stopwatch.now(), threshold, LEAST_BLOCKS)
            return pair.run(stop, seed, on_progress, on_output)
        finally:
            if rotation is not None:
                rotation.release()


@dataclass(slots=True)
class _Pair:
    """Two works and what is known of them while they are timed."""

    stopwatch: Stopwatch
    base: Work
    new: Work
    rotation: Rotating | None
    random: np.random.Generator
    # ms of each side's last call: whether it settles by itself
    last: dict[Side, float] = field(default_factory=lambda: {"base": 0.0, "new": 0.0})

    def warm_up(self, seconds: float) -> None:
        """Both sides, and both with every input set."""
        for work in (self.base, self.new):
            warm_up(self.stopwatch, work, seconds=seconds)
        _begin(self.stopwatch, (self.base, self.new), self.rotation)

    def run(self, stop: _Stop, seed: int, on_progress: OnProgress | None, on_output: OnOutput | None) -> Paired:
        """Blocks until `stop` has enough."""
        a: list[float] = []
        b: list[float] = []
        shown = int(self.random.integers(LEAST_BLOCKS))
        while True:
            base_outside = bool(self.random.integers(2))
            if self.rotation is not None:
                self.rotation.refresh(self.random)
            if on_output is not None and (len(a) == shown or not self.random.integers(OUTPUT_BLOCKS)):
                shown = -1
                self._block(base_outside, on_output)
                continue
            with no_collection():
                base_ms, new_ms = self._block(base_outside, None)
            a.append(base_ms)
            b.append(new_ms)
            if on_progress is not None:
                on_progress(len(a), stop.least)
            if not stop.due(len(a)):
                continue
            ratio, ci = block_speedup([(a, b)])
            if stop.done(len(a), ratio, ci):
                return Paired(tuple(a), tuple(b), ratio, ci, self.stopwatch.clock, seed)

    def _block(self, base_outside: bool, on_output: OnOutput | None) -> tuple[float, float]:
        """Mean ms of the two timed calls of base and of new; the second and third timed call are the inner side's."""
        outer: tuple[Side, Work] = ("base", self.base) if base_outside else ("new", self.new)
        inner: tuple[Side, Work] = ("new", self.new) if base_outside else ("base", self.base)
        for _ in range(int(self.random.integers(MOST_SHIFT + 1)) if self.last[outer[0]] < SETTLED_MS else 0):
            self._untimed(outer[1])
        first = self._timed(outer, (1,), on_output)
        both = self._timed(inner, (1, 2), on_output)
        last = self._timed(outer, (2,), on_output)
        outside, inside = (first + last) / 2, both / 2
        return (outside, inside) if base_outside else (inside, outside)

    def _untimed(self, work: Work) -> None:
        if self.rotation is not None:
            self.rotation.use(0)
        self.stopwatch.time(work)

    def _timed(self, side: tuple[Side, Work], slots: tuple[int, ...], on_output: OnOutput | None) -> float:
        """Ms of one timed call for each slot, after a call that is not timed."""
        name, work = side
        if self.last[name] < SETTLED_MS:
            self._untimed(work)
        total = 0.0
        for slot in slots:
            if self.rotation is not None:
                self.rotation.use(slot)
            sample, _, output = self.stopwatch.run(work)
            total += sample
            if on_output is not None:
                on_output(name, output, slot)
            # an answer that is kept would hold memory that the next call would otherwise use again
            del output
        self.last[name] = total / len(slots)
        return total


def resolution(same: Paired) -> float:
    """The share below which a difference says nothing here, from one work timed against itself (0.01: one percent)."""
    return max(same.ci.high, 1 / same.ci.low) - 1
