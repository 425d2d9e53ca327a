"""The state of a run that the loop, the trial of a step and the end of the run share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wavecrest import hardware
from wavecrest.optimizer.gate import Gate
from wavecrest.optimizer.gate.untouched import Untouched
from wavecrest.optimizer.steps import StepContext
from wavecrest.optimizer.steps.precision import gate_dtype

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
        began: when this run began, by `now`.
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

    def __post_init__(self) -> None:
        self.began = self.now()
        self.current = self.workload.model
        self.untouched = Untouched(self.workload)
        self.context = StepContext(
            self.workload,
            self.device,
            precision=self.options.precision,
            processes=self.options.processes,
            now=self.now,
        )

    @property
    def seconds_left(self) -> float:
        """Seconds left of the budget."""
        return self.options.budget - self.ledger.seconds_before - (self.now() - self.began)

    def check(self, model: nn.Module, applied: AppliedSteps, *, final: bool = False) -> list[BucketError]:
        """The accuracy gate, with the limits of a lower precision only where that precision is applied.

        Args:
            model: with `applied`.
            applied: its steps.
            final: it is the result: all calls are made, however long they take, and a compiled model is called with
                other shapes and by keyword too, which compiles it again.
        """
        self.gate.dtype = gate_dtype(item.step_id for item in applied.steps) or self.workload.dtype
        skip: set[str] = set()
        if applied.only("compile", "capture").steps:
            # a compiled model with gradients is another compilation, and a graph replays for one thread at a time
            skip |= {"gradients", "concurrent"} if final else {"gradients", "concurrent", "keyword", "shapes"}
        graphs = bool(applied.only("capture").steps) or any("compile:" in item.step_id for item in applied.steps)
        return self.gate.check(model, thorough=final, skip=frozenset(skip), graphs=graphs)

    def profile(self, model: nn.Module) -> list[BucketProfile]:
        """Where the time of each bucket goes; empty, with a note, if that cannot be found out."""
        found, note = self.analysis.profile(model, self.ledger.record.ceilings)
        self.ledger.note(note)
        return found
