"""Original and result measured like for like: in fresh processes that alternate, or in quiet phases of one process.

Each side runs as its user runs it, alone in its process, in the order original, result, result, original, and so on.
A pair of processes is one sample: what differs between processes, such as the memory layout, does not average out
within one. The interval is looked at after each number of pairs in `looks` and allows for all of these looks.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from wavecrest import env
from wavecrest.errors import EnvironmentProblem
from wavecrest.measure import timing
from wavecrest.measure.speedup import TAIL
from wavecrest.records import BucketError, BucketSpeed, QualityResult, decode, files

# pairs after which the interval is looked at; the last is the most there are
LOOKS = (3, 5, 8)
CHILD_TIMEOUT = 1800.0

Unit = Literal["processes", "phases"]


@dataclass(frozen=True, slots=True)
class Task:
    """The work of one child process.

    Attributes:
        spec: the workload.
        device: torch device name.
        seconds: sampling time a bucket.
        plan: the plan file to apply before timing; None times the workload's own model.
        check: after timing, also run the accuracy gate and the workload's quality check.
    """

    spec: str
    device: str
    seconds: float
    plan: str | None = None
    check: bool = False


class SideReport(files.Model):
    """Result of a child process: samples in ms by bucket, and the checks that were asked for."""

    clock: str
    times: dict[str, list[float]]
    numerics: list[BucketError]
    quality: list[QualityResult]
    warnings: list[str]


def run_child(task: Task, changes: Mapping[str, str | None], name: str) -> SideReport:
    """Run a task in a fresh process.

    Args:
        task: what it does.
        changes: environment variables to set, or to unset where None.
        name: what errors call it.

    Raises:
        EnvironmentProblem: it died, or took more than CHILD_TIMEOUT; with its last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "side.json"
        command = [*env.python_command("wavecrest.optimizer.side"), json.dumps(asdict(task)), str(target)]
        try:
            done = subprocess.run(
                command, env=env.python_child(changes), capture_output=True, text=True, timeout=CHILD_TIMEOUT
            )
        except subprocess.TimeoutExpired:
            raise EnvironmentProblem(f"{name} took more than {CHILD_TIMEOUT:.0f} s") from None
        if done.returncode != 0 or not target.exists():
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise EnvironmentProblem(f"{name} failed: {last}")
        return SideReport.model_validate(decode.json_of(target.read_text()))


@dataclass(frozen=True, slots=True)
class Claim:
    """Original against result.

    Attributes:
        unit: "processes", or "phases" of one process.
        base, new: samples in ms by bucket, of each process or phase.
        ratio: speed-up over all pairs and buckets.
        ci: its interval, of 95 % over all looks; None for a single pair, which has none.
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
    run: Callable[[timing.Side, int], SideReport],
    *,
    unit: Unit,
    looks: Sequence[int],
    min_gain: float,
    seconds_left: Callable[[], float],
) -> Claim:
    """Pairs of runs until the interval decides, the time ends, or the last look is over.

    Args:
        run: (side, number of the pair) → the report of one process or phase.
        unit: what `run` is one of.
        looks: numbers of pairs after which the interval is computed, ascending.
        min_gain: the gain to decide on (0.02: two percent).
        seconds_left: pairs beyond the first look are taken only while this covers them.
    """
    sides: dict[timing.Side, list[SideReport]] = {"base": [], "new": []}
    begin = seconds_left()
    for number, look in enumerate(looks):
        while len(sides["base"]) < look:
            pair = len(sides["base"])
            order: tuple[timing.Side, ...] = ("base", "new") if pair % 2 == 0 else ("new", "base")
            for side in order:
                sides[side].append(run(side, pair))
        claim = claim_of(sides["base"], sides["new"], unit=unit, looks=len(looks))
        left = seconds_left()
        more = looks[min(number + 1, len(looks) - 1)] - look
        if decides(claim, min_gain) or left < (begin - left) / look * more:
            break
    return claim


def claim_of(base: Sequence[SideReport], new: Sequence[SideReport], *, unit: Unit, looks: int = 1) -> Claim:
    """The claim that reports of both sides support, the interval widened for `looks` looks at it."""
    before, after = [medians(row.times) for row in base], [medians(row.times) for row in new]
    pairs = {bucket: ([row[bucket] for row in before], [row[bucket] for row in after]) for bucket in before[0]}
    clock = base[0].clock
    times = [row.times for row in base], [row.times for row in new]
    if len(base) == 1:
        logs = [math.log(a[0] / b[0]) for a, b in pairs.values()]
        return Claim(unit, *times, math.exp(statistics.fmean(logs)), None, [], clock)
    ratio, ci = timing.process_speedup(list(pairs.values()), tail=TAIL / looks)
    speed = []
    for bucket, (a, b) in pairs.items():
        own, own_ci = timing.process_speedup([(a, b)], tail=TAIL / looks)
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
