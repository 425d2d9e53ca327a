"""Analysis of a workload beside its speed: ceilings, profiles, graph breaks.

Steps predict from it and the report shows it, but no verdict depends on it. So an analysis that fails becomes a note.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wavecrest.errors import InvalidArgument
from wavecrest.graphs.breaks import find_breaks
from wavecrest.profile import measure_ceilings, profile_workload
from wavecrest.profile.least_time import LeastTimes, least_work
from wavecrest.profile.roofline import cache_bytes
from wavecrest.records import BucketProfile, Ceilings, GraphBreak

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.measure.workload import Workload


@dataclass(frozen=True, slots=True)
class Analysis:
    """Each method returns its result and a note for the record; the note is empty if there is nothing to say."""

    workload: Workload

    def ceilings(self) -> tuple[Ceilings | None, str]:
        """Bandwidth and FLOP/s that the device reaches in a large copy and a large GEMM; or None with a note."""
        try:
            return measure_ceilings(self.workload.device, self.workload.dtype), ""
        except InvalidArgument as error:
            return None, f"no measured ceilings: {error}"

    def least_times(self, ceilings: Ceilings | None, *, lower_precision: bool) -> tuple[LeastTimes | None, str]:
        """The time that no right result can be below; or None with a note."""
        if ceilings is None:
            return None, ""
        try:
            work = {bucket: least_work(self.workload, bucket) for bucket in self.workload.buckets}
        except Exception as error:
            return None, f"no least time: {type(error).__name__}: {error}"
        cache = cache_bytes(self.workload.device)
        return LeastTimes(work, lambda: self.ceilings()[0], ceilings, cache, lower_precision), ""

    def profile(self, model: nn.Module, ceilings: Ceilings | None) -> tuple[list[BucketProfile], str]:
        """Where the time of each bucket goes."""
        try:
            return profile_workload(self.workload, function=model, ceilings=ceilings), ""
        except Exception as error:
            return [], f"no profile: {type(error).__name__}: {error}"

    def breaks(self) -> tuple[list[GraphBreak], str]:
        """Where Dynamo splits the workload's own model; the note says into how many graphs."""
        try:
            graphs, breaks, note = find_breaks(self.workload.model, self.workload.buckets)
        except Exception as error:
            return [], f"no graph breaks known: {type(error).__name__}: {error}"
        text = f"Dynamo sees {graphs} graph{'s' if graphs != 1 else ''}"
        return breaks, f"{text}: {note}" if note else text
