"""The engine of the ladder: one measured step at a time, each kept, reverted, called a tie or refused, with its reason.

Per step: find → predict → apply on a copy → accuracy gate → interleaved paired measurement → verdict. The state is
written after every step, so that an interrupted run can be resumed; the user's model is never changed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from wavecrest import hardware, records, report
from wavecrest.dispatch import registry
from wavecrest.errors import InvalidArgument, PlanMismatch, Refused
from wavecrest.measure import timing
from wavecrest.measure.workload import Call, Workload
from wavecrest.optimizer.plan import EnvironmentSetting, Plan
from wavecrest.records import OptimizeRecord, Result, Samples, StepOutcome, provenance

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.optimizer.gate import Gate
    from wavecrest.optimizer.steps import Found, Prediction, Stack, Step, StepContext

RUN_FILE, PLAN_FILE, REPORT_FILE = "run.json", "plan.json", "report.html"
MAX_LEVEL = 5
OUT_OF_BUDGET = "no time left in the budget"
# share of the budget that trials of environment variables may take: each needs fresh processes, which load the model
ENVIRONMENT_SHARE = 0.3
# sampling time a bucket below which noisy machines leave every interval wide
LEAST_SECONDS = 4.0
PRECISIONS = ("tf32", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class Options:
    """How to run the ladder.

    Attributes:
        level: highest level tried: 1 environment, 2 compile, 3 surgery, 4 kernels, 5 graph capture.
        min_gain: a step is kept only if the lower end of its speed-up's 95 % interval is above 1 + min_gain.
        budget: seconds; steps that have not begun by then are skipped with that reason.
        precision: "tf32", "bf16" or "fp16" if the user wants that tried, else None.
        processes: fresh processes a side for environment variables.
        steps: restrict to these step ids (None: all of the level).
        skip: step ids that are not tried.
    """

    level: int = MAX_LEVEL
    min_gain: float = 0.02
    budget: float = 900.0
    precision: str | None = None
    processes: int = 3
    steps: tuple[str, ...] | None = None
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.level <= MAX_LEVEL:
            raise InvalidArgument(f"level must be 1 to {MAX_LEVEL}, not {self.level}")
        if not 0 <= self.min_gain < 1:
            raise InvalidArgument(f"min_gain must be at least 0 and below 1 (2% is 0.02), not {self.min_gain}")
        if self.budget <= 0:
            raise InvalidArgument(f"the budget must be positive, not {self.budget} s")
        if self.precision is not None and self.precision not in PRECISIONS:
            raise InvalidArgument(f"precision is one of {', '.join(PRECISIONS)}, not {self.precision!r}")
        if self.processes < 1:
            raise InvalidArgument(f"processes must be at least 1, not {self.processes}")


class Progress(Protocol):
    """What a progress display is told."""

    def phase(self, text: str) -> None:
        """A new piece of work has begun."""

    def update(self, done: int, planned: int) -> None:
        """How far the current piece is."""

    def outcome(self, step: StepOutcome) -> None:
        """A step has its verdict."""


@dataclass(slots=True)
class Engine:
    """One run of the ladder on one workload."""

    workload: Workload
    options: Options
    folder: Path | None
    progress: Progress
    command: str | None = None
    device: hardware.Device = field(init=False)
    record: OptimizeRecord = field(init=False)
    plan: Plan = field(init=False)
    gate: Gate = field(init=False)
    context: StepContext = field(init=False)
    stack: Stack = field(init=False)
    # the model as optimized so far; the workload's own model at the start
    current: nn.Module = field(init=False)
    began: float = field(init=False)
    spent_before: float = 0.0

    def __post_init__(self) -> None:
        from wavecrest.bench.baseline import shapes
        from wavecrest.optimizer.steps import Stack, StepContext

        self.began = time.perf_counter()
        self.device = hardware.detect(self.workload.device)
        self.stack = Stack()
        self.current = self.workload.model
        self.plan = Plan.start(
            self.workload, self.device, {name: shapes(inputs) for name, inputs in self.workload.buckets.items()}
        )
        self.plan.min_gain, self.plan.precision = self.options.min_gain, self.options.precision
        self.record = OptimizeRecord(
            header=provenance.header(self.device, command=self.command),
            workload=self.workload.name,
            spec=self.workload.spec,
            dtype=self.workload.dtype,
            parameters=self.plan.model.parameters,
            level=self.options.level,
            min_gain=self.options.min_gain,
            budget_seconds=self.options.budget,
            baseline=[],
        )
        self.context = StepContext(
            self.workload, self.device, precision=self.options.precision, processes=self.options.processes
        )

    def resume(self) -> None:
        """Take over the verdicts of an interrupted run in the same folder."""
        if self.folder is None:
            raise InvalidArgument("resume needs the folder of the interrupted run (out=)")
        plan = Plan.load(self.folder / PLAN_FILE)
        record = records.load_as(self.folder / RUN_FILE, OptimizeRecord)
        differences = plan.match(self.workload, self.device)
        if differences:
            raise PlanMismatch(
                f"the interrupted run was made with other versions ({'; '.join(differences)}); start anew"
            )
        self.record.steps, self.record.samples = record.steps, record.samples
        self.record.notes = [*record.notes, f"resumed after {len(record.steps)} steps"]
        self.plan.steps, self.plan.environment = list(record.steps), plan.environment
        self.spent_before = sum(step.seconds for step in record.steps)
        for step in plan.kept():
            from wavecrest.optimizer.steps import step_by_id

            self.stack = self.stack.plus(step_by_id(step.id), step.params)
        self.plan.stack = list(plan.stack)

    def run(self) -> None:
        """Prepare, climb, measure the result.

        Raises:
            KeyboardInterrupt: after the state has been written.
        """
        from wavecrest.graphs.inductor import strict_compilation

        try:
            with strict_compilation(graphs=128 * len(self.workload.buckets)):
                self._prepare()
                self._climb()
            self._finish()
        except KeyboardInterrupt:
            self.record.notes.append("interrupted by the user")
            self._save()
            self._save_report()
            raise

    # -- preparation ---------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        from wavecrest.bench.baseline import bench_workload
        from wavecrest.optimizer.gate import Gate
        from wavecrest.optimizer.steps import build

        self.progress.phase("baseline")
        self.record.baseline = bench_workload(
            self.workload,
            seconds_per_bucket=self._seconds(),
            on_progress=lambda _bucket, done, planned: self.progress.update(done, planned),
        )
        self.progress.phase("profile")
        self.record.ceilings = self._ceilings()
        self.record.profile_before = self._profile(self.workload.model)
        self.context.profile = self.record.profile_before
        if self.options.level >= 2:
            self.progress.phase("graph breaks")
            self._find_breaks()
        self.progress.phase("reference outputs")
        self.gate = Gate.prepare(self.workload)
        if self.gate.note:
            self.record.notes.append(f"accuracy gate: {self.gate.note}")
        if self.stack.applied:
            self.progress.phase("rebuilding the kept steps")
            self.current = build(self.workload.model, self.stack)

    def _ceilings(self) -> records.Ceilings | None:
        from wavecrest.profile import measure_ceilings

        try:
            return measure_ceilings(self.workload.device, self.workload.dtype)
        except InvalidArgument as error:
            self.record.notes.append(f"no measured ceilings: {error}")
            return None

    def _profile(self, model: nn.Module) -> list[records.BucketProfile]:
        from wavecrest.profile import profile_workload

        try:
            return profile_workload(self.workload, function=model, ceilings=self.record.ceilings)
        except Exception as error:
            self.record.notes.append(f"no profile: {type(error).__name__}: {error}")
            return []

    def _find_breaks(self) -> None:
        from wavecrest.graphs.breaks import find_breaks

        graphs, breaks, note = find_breaks(self.workload.model, self.workload.buckets)
        self.record.breaks = breaks
        self.record.notes.append(
            f"Dynamo sees {graphs} graph{'s' if graphs != 1 else ''}" + (f": {note}" if note else "")
        )

    # -- the ladder ----------------------------------------------------------------------------------------------

    def _climb(self) -> None:
        from wavecrest.optimizer.steps import steps_up_to

        steps = steps_up_to(self.options.level)
        unknown = {*(self.options.steps or ()), *self.options.skip} - {step.id for step in steps}
        if unknown:
            raise InvalidArgument(
                f"no step {', '.join(sorted(unknown))} at level {self.options.level}; "
                f"there are {', '.join(step.id for step in steps)}"
            )
        if self.options.steps is not None:
            steps = [step for step in steps if step.id in self.options.steps]
        if self.options.skip:
            steps = [step for step in steps if step.id not in self.options.skip]
            self.record.notes.append(f"not tried, as asked: {', '.join(self.options.skip)}")
        done = {(outcome.id, outcome.attempt) for outcome in self.record.steps}
        for step in steps:
            if (step.id, 1) not in done:
                self._take(step, attempt=1)
        for step in steps:
            if (step.id, 2) not in done and self._deserves_retry(step):
                self._take(step, attempt=2)

    def _deserves_retry(self, step: Step) -> bool:
        """A measured loss or tie, after which another step changed the ground."""
        index = next((i for i, row in enumerate(self.record.steps) if row.id == step.id), None)
        if index is None or self.record.steps[index].verdict not in ("reverted", "tie") or step.level == 1:
            return False
        rivals = any(step.excludes(row.step) for row in self.stack.applied)
        # a compile mode that lost to the one in force lost to it already
        return not rivals and any(row.verdict == "kept" for row in self.record.steps[index + 1 :])

    def _take(self, step: Step, *, attempt: int) -> None:
        self.progress.phase(f"{step.title}" + (" (again)" if attempt > 1 else ""))
        begin = time.perf_counter()
        spent = self.spent_before + begin - self.began
        self.context.seconds_left = self.options.budget - spent
        outcome = self._try(step, attempt)
        outcome.seconds = time.perf_counter() - begin
        if step.phase == "compile":
            self.context.compile_seconds = max(self.context.compile_seconds, outcome.seconds)
        self.record.steps.append(outcome)
        self.plan.steps.append(outcome)
        self.plan.stack = [item.step_id for item in self.stack.ordered()]
        self.progress.outcome(outcome)
        self._save()

    def _outcome(self, step: Step, attempt: int, verdict: records.Verdict, reason: str, **more: Any) -> StepOutcome:
        return StepOutcome(
            id=step.id, title=step.title, level=step.level, attempt=attempt, verdict=verdict, reason=reason, **more
        )

    def _try(self, step: Step, attempt: int) -> StepOutcome:
        from wavecrest.optimizer.steps import build

        known: dict[str, Any] = {}
        try:
            self.context.model = build(self.workload.model, self.stack.only("surgery"))
            self.context.compiled = bool(self.stack.only("compile").applied)
            found = step.find(self.context)
            if not found.sites:
                return self._outcome(step, attempt, "skipped", found.note or "nothing to change")
            if self.context.seconds_left <= 0:
                reason = f"{OUT_OF_BUDGET} of {self.options.budget:.0f} s"
                return self._outcome(step, attempt, "skipped", reason, sites=list(found.sites))
            prediction = step.predict(found, self.context)
            known = _known(found, prediction)
            if step.phase == "environment":
                return self._try_environment(step, attempt, found, known)
            return self._try_step(step, attempt, found, known)
        except Refused as error:
            return self._outcome(step, attempt, "refused", str(error), **known)
        except Exception as error:
            # whatever a step or a compiler raises ends that step alone; the model it ran on was a copy
            first = (str(error).strip().splitlines() or ["(no message)"])[0]
            return self._outcome(step, attempt, "refused", f"it raised {type(error).__name__}: {first}", **known)
        finally:
            self.context.model = None

    def _try_step(self, step: Step, attempt: int, found: Found, known: dict[str, Any]) -> StepOutcome:
        from wavecrest.optimizer.gate import failures
        from wavecrest.optimizer.steps import build
        from wavecrest.optimizer.steps.attention import check_causal
        from wavecrest.optimizer.verdict import judge, speeds

        trial = self.stack.plus(step, found.params)
        if step.phase == "surgery":
            surgery = build(self.workload.model, trial.only("surgery"))
            check_causal(self.workload.model, surgery, list(self.workload.buckets.values()))
        candidate = build(self.workload.model, trial)
        known["numerics"] = self._check(candidate, trial)
        problem = failures(known["numerics"])
        if problem:
            return self._outcome(step, attempt, "refused", f"wrong answers: {problem}", **known)
        pairs = self._measure(self.current, candidate)
        for bucket, pair in pairs.items():
            self.record.samples.append(
                Samples(step=step.id, attempt=attempt, bucket=bucket, base=list(pair.base), new=list(pair.new))
            )
        verdict, reason, ratio, ci = judge(pairs, self.options.min_gain)
        if verdict == "kept":
            self.stack, self.current = trial, candidate
            if step.phase in ("compile", "capture") and self.device.kind != "cpu":
                # later predictions go by what is left; on the CPU compiled code leaves no events to profile
                self.progress.phase("profile")
                self.context.profile = self._profile(candidate) or self.context.profile
        return self._outcome(step, attempt, verdict, reason, ratio=ratio, ci=ci, speed=speeds(pairs), **known)

    def _check(self, model: nn.Module, stack: Stack) -> list[records.BucketError]:
        """The accuracy gate, with the limits of a lower precision only where that precision is in the stack."""
        from wavecrest.optimizer.steps.precision import gate_dtype

        self.gate.dtype = gate_dtype(item.step_id for item in stack.applied) or self.workload.dtype
        return self.gate.check(model)

    def _try_environment(self, step: Step, attempt: int, found: Found, known: dict[str, Any]) -> StepOutcome:
        from wavecrest.optimizer.steps.environment import try_candidates

        trials = try_candidates(
            self.context,
            found.params["candidates"],
            min_gain=self.options.min_gain,
            allowance=ENVIRONMENT_SHARE * self.options.budget,
            say=self.progress.phase,
        )
        for trial in trials.done:
            for bucket in trial.base:
                self.record.samples.append(
                    Samples(
                        step=f"environment {trial.name}={trial.value}",
                        attempt=attempt,
                        bucket=bucket,
                        base=[sample for run in trial.base[bucket] for sample in run],
                        new=[sample for run in trial.new[bucket] for sample in run],
                    )
                )
        kept = trials.kept
        self.plan.environment = [EnvironmentSetting(name=row.name, value=row.value, ratio=row.ratio) for row in kept]
        known["params"] = {**known["params"], "set": {row.name: row.value for row in kept}}
        reason = "; ".join(trials.lines)
        if not kept:
            return self._outcome(step, attempt, "tie" if trials.done else "skipped", reason, **known)
        best = max(kept, key=lambda row: row.ratio)
        reason += "; set them before import (`wavecrest plan show` prints the exports)"
        return self._outcome(step, attempt, "kept", reason, ratio=best.ratio, ci=best.ci, **known)

    def _measure(self, base: nn.Module, new: nn.Module) -> dict[str, timing.Paired]:
        return {
            bucket: timing.measure_pair(
                Call(self.workload, bucket, base),
                Call(self.workload, bucket, new),
                device=self.workload.device,
                seconds=self._seconds(),
                on_progress=self.progress.update,
            )
            for bucket in self.workload.buckets
        }

    def _seconds(self) -> float:
        """Sampling time a bucket, so that measuring takes a part of the budget that its steps can afford."""
        return min(10.0, max(LEAST_SECONDS, self.options.budget / 75 / len(self.workload.buckets)))

    # -- the end -------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Measure the result as the user will run it: fresh compiler state, default limits, original against final."""
        import torch

        from wavecrest.optimizer.steps import build

        self.progress.phase("final measurement")
        torch._dynamo.reset()
        # the coverage table is that of the result, not of candidates that were turned down
        registry.forget()
        if not self.stack.applied:
            self.record.result = self._unchanged()
        else:
            self.current = build(self.workload.model, self.stack)
            with _default_limits():
                self.record.result = self._final()
            self.record.profile_after = self._profile(self.current)
        self.record.coverage = coverage_rows()
        self.plan.dispatch = self.record.coverage
        self.plan.result = self.record.result
        self._save()
        self._save_report()

    def _final(self) -> Result:
        from wavecrest.optimizer.gate import failures
        from wavecrest.optimizer.verdict import check_quality, claim

        numerics = self._check(self.current, self.stack)
        problem = failures(numerics)
        quality = check_quality(self.workload, self.current)
        bad = [row for row in quality if not row.passed]
        if problem or bad:
            reason = problem or f"{bad[0].name} is {bad[0].value:g}, limit {bad[0].limit:g} {bad[0].detail}"
            return self._drop_last(reason)
        pairs = self._measure(self.workload.model, self.current)
        for bucket, pair in pairs.items():
            self.record.samples.append(
                Samples(step="result", attempt=1, bucket=bucket, base=list(pair.base), new=list(pair.new))
            )
        found = claim(pairs, {bench.bucket: bench.measurement for bench in self.record.baseline})
        if found.ci.low <= 1:
            return self._unconfirmed(found.ratio, found.ci)
        self.record.notes += [f"{row.bucket}: {row.note}" for row in found.speed if row.note]
        return Result(
            verdict="faster",
            ratio=found.ratio,
            ci=found.ci,
            speed=found.speed,
            numerics=numerics,
            quality=quality,
            peak_memory_before=self._peak(self.workload.model),
            peak_memory_after=self._peak(self.current),
        )

    def _drop_last(self, reason: str) -> Result:
        """The whole stack fails where each step passed: take the last step back and look again."""
        from wavecrest.optimizer.steps import build

        last = self.stack.ordered()[-1]
        for outcome in self.record.steps:
            if outcome.id == last.step_id and outcome.verdict == "kept":
                outcome.verdict, outcome.reason = "refused", f"the final check failed with it: {reason}"
        self.stack = self.stack.without(last.step_id)
        self.plan.steps = list(self.record.steps)
        self.plan.stack = [item.step_id for item in self.stack.ordered()]
        if not self.stack.applied:
            return self._unchanged()
        self.current = build(self.workload.model, self.stack)
        return self._final()

    def _unconfirmed(self, ratio: float, ci: timing.Interval) -> Result:
        """Each step was faster when it was tried, but the whole is not faster now: nothing stays."""
        for outcome in self.record.steps:
            if outcome.verdict == "kept" and outcome.id in self.plan.stack:
                outcome.verdict = "reverted"
                outcome.reason = f"the final measurement does not confirm it: all steps together {ratio:.3f}× {ci}"
        self.stack = type(self.stack)()
        self.plan.steps, self.plan.stack = list(self.record.steps), []
        unchanged = self._unchanged()
        # an interval that holds 1 proves neither a gain nor that there is none
        return unchanged.model_copy(update={"verdict": "undecided"}) if ci.high > 1 else unchanged

    def _unchanged(self) -> Result:
        """No step in force: the model is the user's own."""
        self.current = self.workload.model
        return Result(
            verdict=self._no_gain(), ratio=1.0, ci=timing.Interval(1.0, 1.0), speed=[], numerics=[], quality=[]
        )

    def _no_gain(self) -> Literal["already optimal", "undecided"]:
        """Optimal is only what every applicable step was tried on: no time for one, or no compiler, leaves it open."""
        untried = any(row.verdict == "skipped" and row.reason.startswith(OUT_OF_BUDGET) for row in self.record.steps)
        broken = any(row.id == "compile:default" and row.verdict == "refused" for row in self.record.steps)
        return "undecided" if untried or broken else "already optimal"

    def _peak(self, model: nn.Module) -> int | None:
        import torch

        if self.device.kind == "cpu":
            # a process's peak says nothing about one of two models in it
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for bucket in self.workload.buckets:
            self.workload.run(bucket, model)
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated())

    def _save(self) -> None:
        if self.folder is None:
            return
        records.save(self.record, self.folder / RUN_FILE)
        self.plan.save(self.folder / PLAN_FILE)

    def _save_report(self) -> None:
        if self.folder is not None:
            report.write(self.record, self.folder / REPORT_FILE)


def coverage_rows() -> list[records.DecisionRow]:
    """The dispatch decisions of this process, for records."""
    import json

    return [
        records.DecisionRow(
            op=decision.op,
            key=json.dumps(list(decision.key)),
            backend=decision.backend,
            config=dict(decision.config or {}),
            source=decision.source,
            reason=decision.reason,
            calls=calls,
            refused={row.backend: row.reason for row in decision.refused},
        )
        for decision, calls in registry.coverage()
    ]


def _known(found: Found, prediction: Prediction) -> dict[str, Any]:
    predicted = prediction.ratio
    if predicted is not None and not math.isfinite(predicted):
        predicted = None
    return {
        "params": found.params,
        "sites": list(found.sites),
        "predicted": predicted,
        "prediction": prediction.basis,
    }


@contextmanager
def _default_limits() -> Iterator[None]:
    """The result is measured as the user will run it, with one exception: a fall-back to eager raises."""
    import torch

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
