"""Original and result measured like for like: in pairs of fresh processes, or in quiet phases of one process.

Each side runs as its user runs it, alone in its process. A pair of processes is one sample: what differs between
processes, such as the memory layout, does not average out within one. The interval is looked at after each number of
pairs in `LOOKS` and allows for all of these looks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from wavecrest.errors import WorkloadError
from wavecrest.measure import timing
from wavecrest.optimizer.children import SideReport, order_of
from wavecrest.records import BucketSpeed

# numbers of pairs after which the interval is looked at, and the probability beyond each of its ends then. Together
# they are wrong about equal sides in 2.5 % a side at most: the looks share their samples, so that what each of them
# may spend adds up to more (simulated, tests/optimizer/test_claim_nulls.py). Later looks spend more, since a few
# pairs tell little of their own spread
LOOKS = {4: 0.004, 6: 0.006, 8: 0.007, 10: 0.008, 12: 0.012}

Unit = Literal["processes", "phases"]


@dataclass(frozen=True, slots=True)
class Claim:
    """Original against result.

    Attributes:
        unit: "processes", or "phases" of one process.
        base, new: samples in ms by bucket, of each process or phase.
        ratio: speed-up over all pairs and buckets.
        ci: its interval, of 95 % over all looks; None for a single pair.
        speed: per bucket.
        clock: what times were taken with.
    """

    unit: Unit
    base: list[dict[str, list[float]]]
    new: list[dict[str, list[float]]]
    ratio: float
    ci: timing.Interval | None
    speed: list[BucketSpeed]
    clock: str

    @property
    def pairs(self) -> int:
        """Number of processes, or phases, a side."""
        return len(self.base)

    @property
    def ratios(self) -> list[float]:
        """The speed-up of each pair."""
        return [
            math.exp(statistics.fmean(math.log(before[bucket]) - math.log(after[bucket]) for bucket in before))
            for before, after in zip(map(medians, self.base), map(medians, self.new), strict=True)
        ]

    @property
    def drift(self) -> float:
        """How much longer the last original took than the first (0.05: five percent): the host, not the model."""
        first, last = medians(self.base[0]), medians(self.base[-1])
        return math.exp(statistics.fmean(math.log(last[bucket]) - math.log(first[bucket]) for bucket in first)) - 1

    def describe(self) -> str:
        """The speed-up with its interval; of one process, which has none, with the range of its phases."""
        if self.unit == "processes" and self.ci is not None:
            return f"{self.ratio:.3f}× {self.ci} over {self.pairs} fresh processes a side"
        if self.unit == "processes":
            return f"{self.ratio:.3f}× in one fresh process a side, which has no interval"
        low, high = min(self.ratios), max(self.ratios)
        return f"{self.ratio:.3f}× in one process, its {self.pairs} phases a side between {low:.3f}× and {high:.3f}×"


def medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median ms by bucket."""
    return {bucket: statistics.median(samples) for bucket, samples in times.items()}


def alternate(
    run: Callable[[int, int], Sequence[Mapping[timing.Side, SideReport]]],
    *,
    unit: Unit,
    looks: Mapping[int, float],
    min_gain: float,
    seconds_left: Callable[[], float],
) -> Claim:
    """Pairs of runs until the interval decides, the time ends, or the last look is over.

    Args:
        run: (number of the first pair, how many) → the reports of each pair's processes or phases.
        unit: what `run` is a pair of.
        looks: numbers of pairs after which the interval is computed, ascending, and its tails then (`LOOKS`).
        min_gain: the gain to decide on (0.02: two percent).
        seconds_left: pairs beyond the first look are taken only while this covers them.

    Raises:
        WorkloadError: two of them loaded different workloads, whose times say nothing about the model.
    """
    base: list[SideReport] = []
    new: list[SideReport] = []
    begin, numbers = seconds_left(), list(looks)
    for number, look in enumerate(numbers):
        pairs = run(len(base), look - len(base))
        base += [pair["base"] for pair in pairs]
        new += [pair["new"] for pair in pairs]
        _check_same_workload([*base, *new])
        claim = claim_of(base, new, unit=unit, tail=looks[look])
        left = seconds_left()
        more = numbers[min(number + 1, len(numbers) - 1)] - look
        if decides(claim, min_gain) or left < (begin - left) / look * more:
            break
    return claim


def _check_same_workload(reports: Sequence[SideReport]) -> None:
    """Hold what processes loaded to what the first one did.

    Raises:
        WorkloadError: shapes of inputs differ, or source files.
    """
    first, again = reports[0], "a workload must be the same in each process that loads it"
    for report in reports[1:]:
        edited = [name for name, digest in report.sources.items() if first.sources.get(name, digest) != digest]
        if edited:
            raise WorkloadError(f"{', '.join(edited[:3])} was changed while processes were compared: {again}")
        for bucket, shapes in report.shapes.items():
            one, other = (_text(row) for row in (first.shapes.get(bucket, shapes), shapes))
            if one != other:
                raise WorkloadError(f"bucket {bucket} is {one} in one process and {other} in another: {again}")


def _text(shapes: Mapping[str, str]) -> str:
    return ", ".join(f"{path} {shape}" for path, shape in shapes.items())


def in_turn(
    run: Callable[[timing.Side, int], SideReport],
) -> Callable[[int, int], list[dict[timing.Side, SideReport]]]:
    """Pairs of one side after the other, each side first in turn: (side, number of the pair) → its report."""
    return lambda first, count: [
        {side: run(side, pair) for side in order_of(pair)} for pair in range(first, first + count)
    ]


def claim_of(base: Sequence[SideReport], new: Sequence[SideReport], *, unit: Unit, tail: float) -> Claim:
    """The claim that reports of both sides support, with the probability `tail` beyond each end of its interval."""
    before, after = [medians(row.times) for row in base], [medians(row.times) for row in new]
    pairs = {bucket: ([row[bucket] for row in before], [row[bucket] for row in after]) for bucket in before[0]}
    clock = base[0].clock
    times = [row.times for row in base], [row.times for row in new]
    if len(base) == 1:
        logs = [math.log(a[0] / b[0]) for a, b in pairs.values()]
        return Claim(unit, *times, math.exp(statistics.fmean(logs)), None, [], clock)
    ratio, ci = timing.process_speedup(list(pairs.values()), tail=tail)
    speed = []
    for bucket, (a, b) in pairs.items():
        own, own_ci = timing.process_speedup([(a, b)], tail=tail)
        speed.append(
            BucketSpeed(
                bucket=bucket,
                base_ms=statistics.geometric_mean(a),
                new_ms=statistics.geometric_mean(b),
                ratio=own,
                ci=own_ci,
                blocks=len(base),
                clock=clock,
            )
        )
    return Claim(unit, *times, ratio, ci, speed, clock)


def decides(claim: Claim, min_gain: float) -> bool:
    """True if the interval lies on one side of 1 + min_gain."""
    return claim.ci is not None and not claim.ci.low <= 1 + min_gain <= claim.ci.high
