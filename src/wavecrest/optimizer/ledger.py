"""The ledger of a run: every step's outcome and the applied steps, kept once.

The record (run.json) holds the outcomes; the plan (plan.json) is made from them each time it is asked for, so the two
cannot differ. Both are written after every step, so that an interrupted run can be resumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wavecrest import records, report
from wavecrest.bench.baseline import shapes
from wavecrest.errors import InvalidArgument, PlanMismatch
from wavecrest.optimizer.plan import EnvironmentSetting, Plan
from wavecrest.optimizer.steps import AppliedSteps, step_by_id
from wavecrest.records import OptimizeRecord, Samples, StepOutcome, provenance

if TYPE_CHECKING:
    from wavecrest.hardware import Device
    from wavecrest.measure.timing import Paired
    from wavecrest.measure.workload import Workload
    from wavecrest.optimizer.alternate import Claim
    from wavecrest.optimizer.options import Options
    from wavecrest.records import Verdict

# samples of base and candidate, in ms
Times = tuple[Sequence[float], Sequence[float]]

RUN_FILE, PLAN_FILE, REPORT_FILE = "run.json", "plan.json", "report.html"


class Ledger:
    """Decisions of one run so far.

    Attributes:
        record: everything the report shows; `record.steps` are the outcomes, in the order in which they were decided.
        applied: the steps in force.
        environment: variables that proved to help.
        folder: where the files are written, or None to keep everything in memory.
        seconds_before: what the steps taken over from an interrupted run took.
    """

    def __init__(
        self, workload: Workload, device: Device, options: Options, *, folder: Path | None, command: str | None = None
    ) -> None:
        self.folder = folder
        self.applied = AppliedSteps()
        self.environment: list[EnvironmentSetting] = []
        self.seconds_before = 0.0
        self._head = Plan.start(
            workload, device, {name: shapes(inputs) for name, inputs in workload.buckets.items()}
        ).model_copy(update={"min_gain": options.min_gain, "precision": options.precision})
        self.record = OptimizeRecord(
            header=provenance.header(device, command=command),
            workload=workload.name,
            spec=workload.spec,
            dtype=workload.dtype,
            parameters=self._head.model.parameters,
            level=options.level,
            min_gain=options.min_gain,
            budget_seconds=options.budget,
            baseline=[],
        )

    @property
    def plan(self) -> Plan:
        """The plan as it stands: the part of the run that can be replayed."""
        return self._head.model_copy(
            update={
                "environment": list(self.environment),
                "steps": list(self.record.steps),
                "stack": [item.step_id for item in self.applied.ordered()],
                "dispatch": self.record.coverage,
                "result": self.record.result,
            }
        )

    def resume(self, workload: Workload, device: Device) -> None:
        """Take over the outcomes of an interrupted run in the same folder.

        Raises:
            InvalidArgument: the run has no folder.
            PlanError: the files of the interrupted run are missing or damaged.
            PlanMismatch: it ran on another model, architecture or other versions.
        """
        if self.folder is None:
            raise InvalidArgument("resume needs the folder of the interrupted run (out=)")
        plan = Plan.load(self.folder / PLAN_FILE)
        before = records.load_as(self.folder / RUN_FILE, OptimizeRecord)
        differences = plan.match(workload, device)
        if differences:
            raise PlanMismatch(
                f"the interrupted run was made with other versions ({'; '.join(differences)}); start anew"
            )
        self.record.steps, self.record.samples = before.steps, before.samples
        self.record.notes = [*before.notes, f"resumed after {len(before.steps)} steps"]
        self.environment = plan.environment
        self.seconds_before = sum(step.seconds for step in before.steps)
        for step in plan.kept():
            self.applied = self.applied.plus(step_by_id(step.id), step.params)

    def note(self, *texts: str) -> None:
        """Add notes to the record; empty ones are left out."""
        self.record.notes += [text for text in texts if text]

    def add(self, outcome: StepOutcome) -> None:
        """A step has its outcome."""
        self.record.steps.append(outcome)

    def add_samples(
        self, step: str, attempt: int, times: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    ) -> None:
        """The raw times of a step, in ms: (base, new) by bucket."""
        for bucket, (base, new) in times.items():
            self.record.samples.append(
                Samples(step=step, attempt=attempt, bucket=bucket, base=list(base), new=list(new))
            )

    def add_pairs(self, step: str, attempt: int, pairs: Mapping[str, Paired]) -> None:
        """The raw times of a step that was measured interleaved."""
        self.add_samples(step, attempt, {bucket: (pair.base, pair.new) for bucket, pair in pairs.items()})

    def add_claim(self, step: str, claim: Claim) -> None:
        """The raw times of processes or phases; the attempt is the number of the pair."""
        for number, (base, new) in enumerate(zip(claim.base, claim.new, strict=True), 1):
            self.add_samples(step, number, {bucket: (base[bucket], new[bucket]) for bucket in base})

    def take_back(self, step_ids: Iterable[str], verdict: Verdict, reason: str) -> None:
        """Steps that were kept are out of force after all; their outcomes say why."""
        for step_id in list(step_ids):
            for outcome in self.record.steps:
                if outcome.id == step_id and outcome.verdict == "kept":
                    outcome.verdict, outcome.reason = verdict, reason
            self.applied = self.applied.without(step_id)

    def save(self) -> None:
        """Write run.json and plan.json."""
        if self.folder is not None:
            records.save(self.record, self.folder / RUN_FILE)
            self.plan.save(self.folder / PLAN_FILE)

    def save_report(self) -> None:
        """Write report.html."""
        if self.folder is not None:
            report.write(self.record, self.folder / REPORT_FILE)
