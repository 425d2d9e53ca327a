"""Why a step gained nothing: the profiles of base and candidate compared, and what Dynamo did with the candidate.

It costs about twenty calls of the candidate, so it runs for steps that were measured and not kept alone.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wavecrest.graphs.breaks import of_metrics
from wavecrest.hardware import clocks
from wavecrest.profile.compare import causes
from wavecrest.records import Cause

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.optimizer.state import RunState
    from wavecrest.records import BucketProfile, BucketSpeed

# calls that a profile makes, and the share of the time left that they may take
PROFILE_CALLS = 20
PROFILE_SHARE = 0.05
# causes named for each bucket, and of each kind of what Dynamo did
NAMED = 3


@dataclass(frozen=True, slots=True)
class Traced:
    """Dynamo's work in this process so far: graph breaks by reason, and its metrics of each compilation."""

    breaks: Counter[str] = field(default_factory=Counter)
    metrics: tuple[Any, ...] = ()

    @classmethod
    def so_far(cls) -> Traced:
        """As it is now; nothing where Dynamo is not loaded."""
        utils = sys.modules.get("torch._dynamo.utils")
        if utils is None:
            return cls()
        return cls(Counter(utils.counters["graph_break"]), tuple(utils.get_compilation_metrics()))

    def seconds_since(self) -> tuple[float, float]:
        """Seconds that Dynamo and the compiler behind it have taken since then, and of these without Inductor's own.

        What is not Inductor's is done again where its caches have the code.
        """
        old = {id(entry) for entry in self.metrics}
        new = [entry for entry in Traced.so_far().metrics if id(entry) not in old]
        whole = sum(entry.entire_frame_compile_time_s or 0.0 for entry in new)
        return whole, max(0.0, whole - sum(entry.inductor_compile_time_s or 0.0 for entry in new))

    def causes_since(self, timed: Traced) -> list[Cause]:
        """Name the graph breaks and functions in eager since then, and the recompiles since `timed`.

        Args:
            timed: from before the candidate was timed; until then other shapes were called on purpose, each of which
                compiles.
        """
        now = Traced.so_far()
        found = [
            Cause(kind="graph_breaks", text=f"graph break: {reason.splitlines()[0]}")
            for reason in now.breaks - self.breaks
            if reason
        ][:NAMED]
        for before, of, kind in ((self, "break", "eager"), (timed, "recompile", "recompiles")):
            # the entries are alive, so an id names one
            old = {id(entry) for entry in before.metrics}
            rows = of_metrics([entry for entry in now.metrics if id(entry) not in old])
            found += [
                Cause(kind=kind, text=f"{row.reason} ({row.file}:{row.line})")  # type: ignore[arg-type]
                for row in rows
                if row.kind == of
            ][:NAMED]
        return found


def seconds_of_profile(times: Iterable[float]) -> float:
    """Seconds that a profile takes, from the ms of a call of each bucket."""
    return PROFILE_CALLS * sum(times) / 1e3


def diagnose(run: RunState, candidate: nn.Module, speed: list[BucketSpeed], traced: list[Cause]) -> list[Cause]:
    """Name what made a candidate slower than the model as optimized so far, or kept it from being faster.

    Args:
        candidate: measured, with a verdict of "reverted" or "tie".
        speed: its times.
        traced: what Dynamo did with it (`Traced.causes_since`).

    Returns:
        The causes, the largest cost of each bucket first.
    """
    needed = seconds_of_profile(row.new_ms for row in speed)
    if needed > PROFILE_SHARE * run.seconds_left:
        left = max(run.seconds_left, 0.0)
        text = f"no time to profile why: it takes about {math.ceil(needed)} s, and {left:.0f} s of the budget are left"
        return [*traced, Cause(kind="unknown", text=text)]
    run.progress.phase("profile of what was lost")
    found = list(traced)
    base = {profile.bucket: profile for profile in run.current_profile()}
    with clocks.watching(clocks.reader(run.device)) as seen:
        profiles = run.profile(candidate)
    for profile in profiles:
        if profile.bucket in base:
            found += _of_bucket(base[profile.bucket], profile, named=len(base) > 1)
    held = clocks.held_down(seen)
    # both sides were timed under it; which of them it hit harder, a profile of one does not show
    return [*found, Cause(kind="clocks", text=f"{held} while it was profiled")] if held else found


def _of_bucket(base: BucketProfile, new: BucketProfile, *, named: bool) -> list[Cause]:
    prefix = f"{base.bucket}: " if named else ""
    found = causes(base, new) or [
        Cause(kind="unknown", text="no category of kernels takes 2 % of a call more than before")
    ]
    return [cause.model_copy(update={"text": f"{prefix}{cause.text}"}) for cause in found[:NAMED]]
