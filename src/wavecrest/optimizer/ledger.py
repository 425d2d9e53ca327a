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
from wavecrest.errors import OutputError, PlanMismatch
from wavecrest.measure import timing
from wavecrest.optimizer.plan import EnvironmentSetting, Plan
from wavecrest.optimizer.steps import AppliedSteps, step_by_id
from wavecrest.records import OptimizeRecord, Samples, StepOutcome, files, provenance

if TYPE_CHECKING:
    from wavecrest.hardware import Device
    from wavecrest.measure.timing import Paired
    from wavecrest.measure.workload import Workload
    from wavecrest.optimizer.alternate import Claim
    from wavecrest.optimizer.options import Options
    from wavecrest.optimizer.steps.applied import AppliedStep
    from wavecrest.records import Verdict

# samples of base and candidate, in ms
Times = tuple[Sequence[float], Sequence[float]]

RUN_FILE, PLAN_FILE, REPORT_FILE = "run.json", "plan.json", "report.html"
# names of samples that are of no step: a model against itself, and original against result
RESOLUTION, RESULT = "resolution", "result"
# in the reason of a step that was kept, before what is in force in its place
_DISPLACED = "; its place was taken by "


class Ledger:
    """Decisions of one run so far.

    Attributes:
        record: everything the report shows; `record.steps` are the outcomes, in the order in which they were decided.
        applied: the steps in force.
        environment: variables that proved to help.
        folder: where the files are written, or None to keep everything in memory.
        seconds_before: what the steps taken over from an interrupted run took.
        unwritten: why the files do not hold all of the run, or "".
    """

    def __init__(
        self, workload: Workload, device: Device, options: Options, *, folder: Path | None, command: str | None = None
    ) -> None:
        self.folder = folder
        self.applied = AppliedSteps()
        self.environment: list[EnvironmentSetting] = []
        self.seconds_before = 0.0
        self.unwritten = ""
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
            allowed=options.allowed,
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

        The plan alone says what was decided: it is written last, so that a kill between the two files repeats a step.

        Raises:
            PlanError, RecordError: the files of the interrupted run are damaged.
            PlanMismatch: it ran on another model, architecture or other versions, or was allowed something else.
        """
        assert self.folder is not None
        if not any((self.folder / name).exists() for name in (PLAN_FILE, RUN_FILE)):
            # killed while the workload was loaded
            return self.note("nothing to resume: the run had not begun")
        plan = Plan.load(self.folder / PLAN_FILE)
        before = records.load_as(self.folder / RUN_FILE, OptimizeRecord)
        differences = plan.match(workload, device)
        if differences:
            raise PlanMismatch(
                f"the interrupted run was made with other versions ({'; '.join(differences)}); start anew"
            )
        allowed = self.record.allowed or {}
        others = [f"{name} {was or 'none'}" for name, was in (before.allowed or {}).items() if allowed[name] != was]
        if others:
            raise PlanMismatch(f"the interrupted run had {', '.join(others)}: give the same options, or start anew")
        decided = {(step.id, step.attempt) for step in plan.steps}
        # samples of variables are named after them, "environment NAME=VALUE"
        kept = [
            row
            for row in before.samples
            if row.step == RESOLUTION or (row.step.partition(" ")[0], row.attempt) in decided
        ]
        self.record.steps, self.record.samples, self.record.baseline = plan.steps, kept, before.baseline
        self.record.notes = [*before.notes, f"resumed after {len(plan.steps)} steps"]
        self.environment = plan.environment
        self.seconds_before = sum(step.seconds for step in plan.steps)
        for row in plan.kept():
            step = step_by_id(row.id)
            step.check_params(row.params)
            self.applied = self.applied.plus(step, row.params)

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

    def add_resolution(self, pairs: Mapping[str, Paired]) -> None:
        """A model against itself; measured again, it is the next attempt."""
        attempt = 1 + max((row.attempt for row in self.record.samples if row.step == RESOLUTION), default=0)
        self.record.resolution = {bucket: timing.resolution(pair) for bucket, pair in pairs.items()}
        self.add_pairs(RESOLUTION, attempt, pairs)

    def add_claim(self, step: str, claim: Claim) -> None:
        """The raw times of processes or phases, in place of earlier ones; the attempt is the number of the pair."""
        self.record.samples = [row for row in self.record.samples if row.step != step]
        for number, (base, new) in enumerate(zip(claim.base, claim.new, strict=True), 1):
            self.add_samples(step, number, {bucket: (base[bucket], new[bucket]) for bucket in base})

    def say_displaced(self, before: AppliedSteps, by: StepOutcome) -> None:
        """Steps that were in force before a step was kept, and are not any more: their outcomes say why."""
        gone = {item.step_id for item in before.steps} - {item.step_id for item in self.applied.steps}
        for outcome in self.record.steps:
            if outcome.id in gone and outcome.verdict == "kept":
                outcome.reason = f"{outcome.reason}{_DISPLACED}{by.title}"

    def take_back(self, step_ids: Iterable[str], verdict: Verdict, reason: str) -> None:
        """Steps that were kept are out of force after all; their outcomes say why."""
        for step_id in list(step_ids):
            for outcome in self.record.steps:
                if outcome.id == step_id and outcome.verdict == "kept":
                    outcome.verdict, outcome.reason = verdict, reason
            self.applied = self.applied.without(step_id)

    def put_back(self, taken: AppliedStep) -> None:
        """Steps whose place was taken by one that was taken back are in force again."""
        for outcome in self.record.steps:
            if outcome.id in taken.params.get("instead_of", ()) and outcome.verdict == "kept":
                outcome.reason = outcome.reason.partition(_DISPLACED)[0]
                self.applied = self.applied.plus(step_by_id(outcome.id), outcome.params)

    def begin(self) -> None:
        """Write both files for the first time: an older run's plan in the folder must not be taken for this one's.

        Raises:
            OutputError: they cannot be written.
        """
        if self.folder is not None:
            files.sweep(self.folder, (RUN_FILE, PLAN_FILE, REPORT_FILE))
            self.plan.save(self.folder / PLAN_FILE)
            records.save(self.record, self.folder / RUN_FILE)

    def save(self) -> None:
        """Write run.json and plan.json; a disk that is full ends no run, and `unwritten` says what is missing."""
        if self.folder is None:
            return
        try:
            records.save(self.record, self.folder / RUN_FILE)
            self.plan.save(self.folder / PLAN_FILE)
            self.unwritten = ""
        except OutputError as error:
            self.unwritten = str(error)

    def save_report(self) -> None:
        """Write report.html; one that cannot be made is a note of the record, as the verdict does not depend on it."""
        if self.folder is None:
            return
        try:
            report.write(self.record, self.folder / REPORT_FILE)
        except OutputError as error:
            self.unwritten = self.unwritten or str(error)
        except Exception as error:
            self.note(f"no report: {type(error).__name__}: {error}")
            self.save()
            self.unwritten = self.unwritten or (
                f"the report cannot be made ({type(error).__name__}: {error}); {RUN_FILE} and {PLAN_FILE} are whole"
            )
