"""The timer of kernels: several works of microseconds in turn, round by round, with cold caches on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wavecrest.errors import InvalidArgument
from wavecrest.measure.clock import HOST_CLOCK, Clock, Stopwatch, Work
from wavecrest.measure.timing import MIN_SAMPLES, OnProgress, no_collection, quiet_heap, warm_up

# flushes before one sample at most
MAX_FLUSHES = 8
# rounds that are not kept go before an interleaved measurement on a GPU for this long
CLOCK_SECONDS = 0.05
# rounds of an interleaved measurement at most
MAX_ROUNDS = 400
# rounds that a limit leaves at least: fewer have no median that one disturbed call could not move
LEAST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Interleaved:
    """Several pieces of work timed in turn: `samples[i][r]` is work i in round r, in ms."""

    samples: tuple[tuple[float, ...], ...]
    clock: str

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.samples[0])


def measure(
    works: Sequence[Work],
    *,
    device: str,
    seconds: float = 0.25,
    min_rounds: int = MIN_SAMPLES,
    limit: float = math.inf,
    on_progress: OnProgress | None = None,
    now: Clock = HOST_CLOCK,
) -> Interleaved:
    """Time several pieces of work of microseconds in turn, in an order drawn anew each round, so that drift hits all
    alike.

    On a GPU every sample is the device's span of one call behind a read of FLUSH_BYTES: caches are cold and clean, and
    the host enqueues the call while that read runs, so its cost is not in the span. On the CPU a sample is host wall
    time, after a call of the same work that is not timed. Nothing is tuned by the result: rounds go on until
    `min_rounds` are done and `seconds` are over, to MAX_ROUNDS. After `limit` seconds, the warm-up among them, no round
    is begun once LEAST_ROUNDS are done: the result has fewer than `min_rounds`.

    Raises:
        InvalidArgument: there is no work.
        ClockError: clocks disagree or were replaced.
    """
    if not works:
        raise InvalidArgument("interleaved.measure needs at least one work")
    stopwatch = Stopwatch(device, now=now)
    with quiet_heap(), stopwatch.watched():
        return _measure(works, stopwatch, seconds, min_rounds, limit, on_progress)


def _measure(
    works: Sequence[Work],
    stopwatch: Stopwatch,
    seconds: float,
    min_rounds: int,
    limit: float,
    on_progress: OnProgress | None,
) -> Interleaved:
    on_cpu = stopwatch.device == "cpu"
    end = stopwatch.now() + limit
    for work in works:
        warm_up(stopwatch, work, seconds=0.0)
    flushes = 0 if on_cpu else _flushes(stopwatch, works)
    samples: list[list[float]] = [[] for _ in works]
    begin = stopwatch.now()
    # a GPU that was idle while something compiled takes a while to come back to its clock
    while not on_cpu and stopwatch.now() - begin < CLOCK_SECONDS:
        _device_round(stopwatch, works, flushes)
    random = np.random.default_rng(0)
    begin = stopwatch.now()
    rounds = 0
    while rounds < min_rounds or (rounds < MAX_ROUNDS and stopwatch.now() - begin < seconds):
        if rounds >= LEAST_ROUNDS and stopwatch.now() > end:
            break
        order = [int(index) for index in random.permutation(len(works))]
        turns = [works[index] for index in order]
        with no_collection():
            taken = _host_round(stopwatch, turns) if on_cpu else _device_round(stopwatch, turns, flushes)
        for index, sample in zip(order, taken, strict=True):
            samples[index].append(sample)
        rounds += 1
        if on_progress is not None:
            on_progress(rounds, min_rounds)
    clock = stopwatch.clock if on_cpu else f"{stopwatch.clock}, caches cold and clean"
    return Interleaved(tuple(tuple(series) for series in samples), clock)


def _host_round(stopwatch: Stopwatch, works: Sequence[Work]) -> list[float]:
    """One timed call of each work, each after a call of its own that is not timed."""
    taken = []
    for work in works:
        stopwatch.time(work)
        taken.append(stopwatch.time(work)[0])
    return taken


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
    torch.cuda.synchronize(stopwatch.device)
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
