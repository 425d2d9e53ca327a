"""The state of a run that the loop, the trial of a step and the end of the run share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wavecrest import hardware
from wavecrest.optimizer.checking import check_applied
from wavecrest.optimizer.children import Starter
from wavecrest.optimizer.costs import Costs
from wavecrest.optimizer.gate import Gate
from wavecrest.optimizer.gate.untouched import Untouched
from wavecrest.optimizer.options import COMPILE_LEVEL
from wavecrest.optimizer.steps import StepContext

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.measure.timing import Clock
    from wavecrest.measure.workload import Workload
    from wavecrest.optimizer.analysis import Analysis
    from wavecrest.optimizer.ledger import Ledger
    from wavecrest.optimizer.measurer import Measurer
    from wavecrest.optimizer.options import Options, Progress
    from wavecrest.optimizer.steps import AppliedSteps
    from wavecrest.records import BucketError, BucketProfile


@dataclass(slots=True)
class RunState:
    """One run of the ladder on one workload.

    Attributes:
        device: where the workload lives.
        ledger: what was decided so far.
        context: what steps may look at.
        current: the model as optimized so far; the workload's own model at the start.
        gate: the accuracy gate; prepared once the baseline is measured.
        untouched: puts the user's model back as it was, after every step and at the end.
        costs: what trials took so far.
        children: starts the fresh processes of the final measurement and of trials of variables.
        began: when this run began, by `now`.
        longest_profile: seconds of the longest profile so far: one with the ops of a model that has no graph.
    """

    workload: Workload
    options: Options
    progress: Progress
    device: hardware.Device
    ledger: Ledger
    measurer: Measurer
    analysis: Analysis
    now: Clock
    context: StepContext = field(init=False)
    current: nn.Module = field(init=False)
    gate: Gate = field(init=False)
    untouched: Untouched = field(init=False)
    began: float = field(init=False)
    costs: Costs = field(default_factory=Costs)
    children: Starter = field(init=False)
    # see `Costs.imports`
    import_seconds: float = 0.0
    longest_profile: float = 0.0
    _profiled: tuple[nn.Module, list[BucketProfile]] | None = None

    def __post_init__(self) -> None:
        self.began = self.now()
        self.current = self.workload.model
        self.untouched = Untouched(self.workload)
        compiles = self.options.level >= COMPILE_LEVEL
        self.children = Starter(self.workload.model, self.workload.device, compiles=compiles)
        self.context = StepContext(
            self.workload,
            self.device,
            precision=self.options.precision,
            quantize=self.options.wish,
            processes=self.options.processes,
            starter=self.children,
            now=self.now,
        )

    @property
    def seconds_left(self) -> float:
        """Seconds left of the budget."""
        return self.options.budget - self.seconds_spent

    @property
    def seconds_spent(self) -> float:
        """Seconds that the run took so far, with those before it was interrupted."""
        return self.ledger.seconds_before + self.now() - self.began

    def check(
        self, model: nn.Module, applied: AppliedSteps, *, final: bool = False, recompiled: bool = True
    ) -> list[BucketError]:
        """The accuracy gate (`check_applied`); `final`: it is the result."""
        return check_applied(self.gate, model, applied, final=final, recompiled=recompiled)

    def profile(self, model: nn.Module) -> list[BucketProfile]:
        """Where the time of each bucket goes; empty, with a note, if that cannot be found out."""
        begin = self.now()
        found, note = self.analysis.profile(model, self.ledger.record.ceilings)
        self.longest_profile = max(self.longest_profile, self.now() - begin)
        self.ledger.note(note)
        return found

    def current_profile(self) -> list[BucketProfile]:
        """The profile of the model as optimized so far."""
        if self.current is self.workload.model:
            return self.ledger.record.profile_before
        if self._profiled is None or self._profiled[0] is not self.current:
            self._profiled = self.current, self.profile(self.current)
        return self._profiled[1]
