"""Time the candidates of a key: a quick round that halves the field, a final among the best, and the judgement.

Times are of interleaved calls with cold caches (`interleaved.measure`), so that drift hits all candidates
alike and a judgement can rest on pairs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from wavecrest import records
from wavecrest.measure import interleaved, timing
from wavecrest.measure.interleaved import Interleaved
from wavecrest.measure.timing import Clock, Interval

# interleaved rounds of the quick round; after each, candidates slower than DROP times the best are dropped
RUNGS = (4, 8, 16)
DROP = 1.25
# tuned candidates that reach the final, beside the default and PyTorch
FINALISTS = 3
FINAL_ROUNDS = 60
# a lead whose interval reaches below this counts as a tie
TIE = 0.01


class Timer(Protocol):
    """Times calls in turn, for `rounds` rounds and `seconds` seconds at least."""

    def __call__(self, works: Sequence[Callable[[], Any]], *, rounds: int, seconds: float) -> Interleaved:
        """Samples of each function, in ms."""


def timer_of(device: str, now: Clock = time.perf_counter, in_a_row: int = 1) -> Timer:
    """The timer of a torch device.

    Args:
        now: where the host's time comes from.
        in_a_row: calls that a work makes; a sample is the time of one.
    """

    def taken(works: Sequence[Callable[[], Any]], *, rounds: int, seconds: float) -> Interleaved:
        found = interleaved.measure(works, device=device, seconds=seconds, min_rounds=rounds, now=now)
        if in_a_row == 1:
            return found
        each = tuple(tuple(sample / in_a_row for sample in series) for series in found.samples)
        return Interleaved(each, f"{found.clock}, one of {in_a_row} calls in a graph")

    return taken


@dataclass(slots=True)
class Entrant:
    """An admitted candidate: its row in the record, its call, its times in the final in ms."""

    row: records.TuneCandidate
    call: Callable[[], Any]
    series: tuple[float, ...] = field(default=())

    @property
    def seeded(self) -> bool:
        """True for the default and PyTorch, which are in every final."""
        return self.row.role != "tried"


@dataclass(frozen=True, slots=True)
class Judgement:
    """Who won and why; None if nobody is left."""

    winner: Entrant | None
    reason: str


def quick(entrants: Sequence[Entrant], timer: Timer, least_ms: float | None) -> list[Entrant]:
    """The finalists: PyTorch, the default, and the best others; sets status and reason of those that are dropped."""
    alive = list(entrants)
    for rounds in RUNGS:
        # with seeded candidates alone there is nothing to select
        if all(entrant.seeded for entrant in alive):
            break
        taken = timer([entrant.call for entrant in alive], rounds=rounds, seconds=0.0)
        for entrant, series in zip(alive, taken.samples, strict=True):
            entrant.row.quick_ms = statistics.median(series)
        alive = [entrant for entrant in alive if not _impossible(entrant, entrant.row.quick_ms, least_ms)]
        best = min((entrant.row.quick_ms or math.inf for entrant in alive), default=math.inf)
        alive = [entrant for entrant in alive if entrant.seeded or not _slow(entrant, best)]
    # sorting keeps the order of trial where times are equal
    others = sorted((entrant for entrant in alive if not entrant.seeded), key=_quick_ms)
    for entrant in others[FINALISTS:]:
        entrant.row.status = "dropped"
        entrant.row.reason = f"{FINALISTS} others were faster in the quick round"
    kept = others[:FINALISTS]
    return [entrant for entrant in alive if entrant.seeded or entrant in kept]


def _quick_ms(entrant: Entrant) -> float:
    return entrant.row.quick_ms or math.inf


def _slow(entrant: Entrant, best: float) -> bool:
    times = _quick_ms(entrant) / best
    if times <= DROP:
        return False
    entrant.row.status, entrant.row.reason = "dropped", f"{times:.2f} times the best in the quick round"
    return True


def _impossible(entrant: Entrant, ms: float | None, least_ms: float | None) -> bool:
    if ms is None or least_ms is None or ms >= least_ms:
        return False
    entrant.row.status = "impossible"
    entrant.row.reason = (
        f"{ms * 1e3:.2f} µs is below the {least_ms * 1e3:.2f} µs that memory and arithmetic take at their peaks: "
        "an error of measurement"
    )
    return True


def final(
    entrants: Sequence[Entrant], timer: Timer, least_ms: float | None, *, seconds: float
) -> tuple[list[Entrant], Interleaved | None]:
    """Time the finalists; returns those with a plausible time, and all samples (None without a finalist)."""
    if not entrants:
        return [], None
    taken = timer([entrant.call for entrant in entrants], rounds=FINAL_ROUNDS, seconds=seconds)
    for entrant, exact in zip(entrants, taken.samples, strict=True):
        # nanoseconds, as the record has them, so that what is judged can be computed again from it
        series = tuple(round(sample, 6) for sample in exact)
        entrant.series = series
        entrant.row.status = "timed"
        entrant.row.ms = statistics.median(series)
        entrant.row.ci = timing.bootstrap_median(series)
        entrant.row.samples = list(series)
    return [entrant for entrant in entrants if not _impossible(entrant, entrant.row.ms, least_ms)], taken


def judge(entrants: Sequence[Entrant]) -> Judgement:
    """The winner of a final: the fastest, unless its lead over the default, or over PyTorch, is not proven.

    A lead counts if the lower end of the 95 % interval of the paired speed-up is above 1 + TIE. Where the fastest
    has no such lead, the faster of those it does not lead wins: a default that is slightly slower than PyTorch is not
    written as a measured row.
    """
    if not entrants:
        return Judgement(None, "no candidate was found right and could be timed")
    best = min(entrants, key=_median)
    tied = []
    for role in ("default", "native"):
        incumbent = next((entrant for entrant in entrants if entrant.row.role == role), None)
        if incumbent is None:
            continue
        if incumbent is best:
            tied.append(Judgement(best, f"{role}, and the fastest of {len(entrants)} in the final"))
            continue
        speedup, ci = timing.bootstrap_speedup([(incumbent.series, best.series)])
        if ci.low <= 1 + TIE:
            tied.append(Judgement(incumbent, f"a tie with the fastest ({speedup:.3f}× {ci}) goes to the {role}"))
    if tied:
        return min(tied, key=lambda judgement: _median(judgement.winner))
    return Judgement(best, f"the fastest of {len(entrants)} in the final")


def _median(entrant: Entrant | None) -> float:
    return math.inf if entrant is None else statistics.median(entrant.series)


def against(native: Entrant | None, winner: Entrant) -> tuple[float | None, Interval | None]:
    """Speed-up of the winner over PyTorch, with its paired interval."""
    if native is None or not native.series:
        return None, None
    return timing.bootstrap_speedup([(native.series, winner.series)])
