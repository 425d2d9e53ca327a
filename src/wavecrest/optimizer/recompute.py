"""The figures of a run computed again from its samples, by the code that made them, and held to what the record says.

Nothing is measured here: whoever has a record and its plan can do it, without the model and on any machine. It finds
figures, verdicts and plans that do not follow from the samples, and not samples that were made up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wavecrest.errors import InvalidArgument, PlanError
from wavecrest.measure import timing
from wavecrest.measure.speedup import TAIL
from wavecrest.measure.timing import Interval
from wavecrest.optimizer.alternate import LOOKS, Claim, Unit, claim_of, decides
from wavecrest.optimizer.children import SideReport
from wavecrest.optimizer.gate import ALL_RULES
from wavecrest.optimizer.ledger import RESOLUTION, RESULT
from wavecrest.optimizer.plan import Plan
from wavecrest.optimizer.steps import step_by_id
from wavecrest.optimizer.steps.base import PHASES
from wavecrest.optimizer.steps.environment import EnvironmentTrial
from wavecrest.optimizer.trial import OUT_OF_BUDGET
from wavecrest.optimizer.verdict import judge, no_gain_verdict, result_verdict
from wavecrest.records import BucketError, BucketSpeed, Check, OptimizeRecord, Samples, StepOutcome

# another numpy may add in another order; whatever somebody gains by more than this is found
RELATIVE = 1e-6
# verdicts that rest on pairs of the interleaved timer
TIMED = ("kept", "reverted", "tie")
# samples of a variable are named so, "environment NAME=VALUE"
ENVIRONMENT = "environment"

Key = tuple[str, int]


@dataclass(slots=True)
class Findings:
    """Figures compared so far, and those that disagree."""

    count: int = 0
    problems: list[str] = field(default_factory=list)

    def same(self, what: str, claimed: Any, found: Any) -> None:
        """Compare a figure of the record with the one found."""
        self.count += 1
        if not _agree(claimed, found):
            self.problems.append(f"{what}: the record says {_text(claimed)}, its samples say {_text(found)}")

    def holds(self, condition: bool, problem: str) -> None:
        """Compare something that is no figure."""
        self.count += 1
        if not condition:
            self.problems.append(problem)


def recompute(record: OptimizeRecord, plan: Plan) -> list[Check]:
    """Every figure that follows from samples or from another part of the run, by part.

    Args:
        record: the run.
        plan: the plan that is said to come from it.

    Returns:
        A row for each part: passed, or the first figures that disagree.
    """
    parts: dict[str, Callable[[_Run, Findings], None]] = {
        "baseline": _check_baseline,
        "resolution": _check_resolution,
        "steps": _check_steps,
        "variables": _check_variables,
        "answers in the record": _check_answers,
        "result": _check_result,
        "plan": _check_plan,
    }
    rows = []
    run = _Run(record, plan)
    for what, check in parts.items():
        found = Findings()
        try:
            check(run, found)
        # times below zero, sides of unequal length, too few blocks; a step that is not installed
        except (InvalidArgument, PlanError) as problem:
            found.problems.append(str(problem))
        # times whose ratio is beyond the range of float64
        except ArithmeticError as problem:
            found.problems.append(f"no statistics can be made of the samples: {problem}")
        more = f"; and {len(found.problems) - 2} more" if len(found.problems) > 2 else ""
        detail = "; ".join(found.problems[:2]) + more if found.problems else f"{found.count} figures agree"
        rows.append(Check(what=what, passed=not found.problems, detail=detail))
    return rows


class _Run:
    """A record and its plan, with the samples by what they are of."""

    def __init__(self, record: OptimizeRecord, plan: Plan) -> None:
        self.record, self.plan = record, plan
        self.buckets = [row.bucket for row in record.baseline]
        self.samples: dict[Key, dict[str, Samples]] = {}
        self.twice: list[str] = []
        for row in record.samples:
            held = self.samples.setdefault((row.step, row.attempt), {})
            if row.bucket in held:
                self.twice.append(f"{row.step}, {row.attempt}, {row.bucket}")
            held[row.bucket] = row

    def pairs(self, name: str, attempt: int) -> dict[str, Samples]:
        """The samples of one measurement, of all buckets.

        Raises:
            InvalidArgument: they are not those of the baseline's buckets, or the two sides of one differ in length.
        """
        found = self.samples.get((name, attempt), {})
        if list(found) != self.buckets:
            raise InvalidArgument(
                f"{name}: there are samples of {', '.join(found) or 'no bucket'}, the buckets are "
                f"{', '.join(self.buckets)}"
            )
        return found

    def claim(self, name: str, unit: Unit, looks: Mapping[int, float]) -> Claim:
        """The claim that the processes or phases of a measurement support.

        The tails of its interval are those of the look after that number of pairs.

        Raises:
            InvalidArgument: see `pairs`; or they are not numbered from one.
        """
        attempts = [attempt for step, attempt in self.samples if step == name]
        if attempts != list(range(1, len(attempts) + 1)):
            raise InvalidArgument(f"{name}: the pairs are numbered {attempts}")
        sides: tuple[list[SideReport], list[SideReport]] = ([], [])
        for attempt in attempts:
            pairs = self.pairs(name, attempt)
            for side, which in zip(sides, ("base", "new"), strict=True):
                times = {bucket: getattr(row, which) for bucket, row in pairs.items()}
                for held in times.values():
                    _check_times(name, held)
                side.append(SideReport(clock="", times=times, numerics=[], quality=[], warnings=[]))
        if not attempts:
            raise InvalidArgument(f"{name}: there are no samples")
        return claim_of(*sides, unit=unit, tail=looks.get(len(attempts), TAIL))


def _check_times(name: str, times: Sequence[float]) -> None:
    if not times or not all(0 < ms < math.inf for ms in times):
        raise InvalidArgument(f"{name}: every side needs times, all of them finite and above zero")


def _agree(claimed: Any, found: Any) -> bool:
    if isinstance(claimed, Interval) and isinstance(found, Interval):
        return _agree(claimed.low, found.low) and _agree(claimed.high, found.high)
    if isinstance(claimed, float) and isinstance(found, float):
        return math.isclose(claimed, found, rel_tol=RELATIVE, abs_tol=RELATIVE)
    return bool(claimed == found)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value) if isinstance(value, Interval) else repr(value)


def _check_baseline(run: _Run, found: Findings) -> None:
    found.holds(bool(run.buckets), "there is no baseline")
    found.holds(len(set(run.buckets)) == len(run.buckets), "a bucket of the baseline is there twice")
    for row in run.record.baseline:
        measured = row.measurement
        found.same(f"interval of {row.bucket}", measured.ci, timing.bootstrap_median(measured.samples))
        found.holds(
            len(measured.wall) == measured.n, f"{row.bucket}: {measured.n} samples, {len(measured.wall)} of wall"
        )


def _paired(run: _Run, name: str, attempt: int) -> dict[str, timing.Paired]:
    made = {}
    for bucket, row in run.pairs(name, attempt).items():
        base, new = row.base, row.new
        ratio, ci = timing.block_speedup([(base, new)])
        made[bucket] = timing.Paired(tuple(base), tuple(new), ratio, ci, "")
    return made


def _resolutions(run: _Run) -> dict[int, dict[str, float]]:
    """By attempt and bucket: a run may measure it again."""
    attempts = [attempt for name, attempt in run.samples if name == RESOLUTION]
    return {
        attempt: {bucket: timing.resolution(pair) for bucket, pair in _paired(run, RESOLUTION, attempt).items()}
        for attempt in attempts
    }


def _check_resolution(run: _Run, found: Findings) -> None:
    measured = _resolutions(run)
    found.holds(bool(measured), "there are no samples of a model against itself")
    last = measured[max(measured)] if measured else {}
    found.holds(list(run.record.resolution) == list(last), "the resolution is of other buckets than its samples")
    for bucket, share in last.items():
        found.same(f"resolution of {bucket}", run.record.resolution.get(bucket), share)


def _check_steps(run: _Run, found: Findings) -> None:
    record = run.record
    found.holds(not run.twice, f"samples are there twice: {', '.join(run.twice[:3])}")
    floors = [max(shares.values()) for shares in _resolutions(run).values()]
    known = {(row.id, row.attempt) for row in record.steps}
    strangers = [
        name
        for name, attempt in run.samples
        if name not in (RESOLUTION, RESULT) and not name.startswith(f"{ENVIRONMENT} ") and (name, attempt) not in known
    ]
    found.holds(not strangers, f"there are samples of {', '.join(strangers[:3])}, which is no step of the run")
    found.holds(len(known) == len(record.steps), "a step is there twice")
    for row in record.steps:
        if row.id == ENVIRONMENT:
            continue
        timed = (row.id, row.attempt) in run.samples
        found.holds(timed or row.verdict in ("refused", "skipped"), f"{row.id} is {row.verdict}, and has no samples")
        if timed:
            _check_step(run, row, floors, found)


def _check_step(run: _Run, row: StepOutcome, floors: list[float], found: Findings) -> None:
    pairs = _paired(run, row.id, row.attempt)
    floor = row.resolution
    if floor is None or not any(_agree(floor, measured) for measured in floors):
        found.problems.append(f"{row.id} was judged with a resolution of {floor}, which was not measured")
        return
    verdict, _, ratio, ci = judge(pairs, run.record.min_gain, floor)
    found.same(f"speed-up of {row.id}", row.ratio, ratio)
    found.same(f"interval of {row.id}", row.ci, ci)
    # what was kept may have been taken back since, which claims less
    less = (verdict == "kept" and row.verdict in ("reverted", "refused")) or row.verdict == "refused"
    found.holds(less or row.verdict == verdict, f"{row.id} is {row.verdict} in the record, {verdict} by its samples")
    _check_speeds(row.id, row.speed, pairs, found)


def _check_speeds(name: str, rows: list[BucketSpeed], pairs: dict[str, timing.Paired], found: Findings) -> None:
    found.same(f"buckets of {name}", [row.bucket for row in rows], list(pairs))
    for row in rows:
        pair = pairs.get(row.bucket)
        if pair is None:
            continue
        where = f"{name} on {row.bucket}"
        found.same(f"speed-up of {where}", row.ratio, pair.ratio)
        found.same(f"interval of {where}", row.ci, pair.ci)
        found.same(f"time of the base in {where}", row.base_ms, pair.base_ms)
        found.same(f"time of {where}", row.new_ms, pair.new_ms)
        found.same(f"blocks of {where}", row.blocks, pair.n)


def _check_variables(run: _Run, found: Findings) -> None:
    """Variables tried in fresh processes: those in the plan are those that their samples prove to help."""
    rows = [row for row in run.record.steps if row.id == ENVIRONMENT]
    names = dict.fromkeys(name for name, _ in run.samples if name.startswith(f"{ENVIRONMENT} "))
    claims = {name.removeprefix(f"{ENVIRONMENT} "): run.claim(name, "processes", {}) for name in names}
    helps = {}
    for setting, claim in claims.items():
        variable, _, value = setting.partition("=")
        unstable = EnvironmentTrial(variable, value, claim).unstable
        if claim.ci is not None and timing.keeps(claim.ci, run.record.min_gain) and not unstable:
            helps[setting] = claim
    in_plan = {f"{row.name}={row.value}": row.ratio for row in run.plan.environment}
    found.same("variables of the plan", sorted(in_plan), sorted(helps))
    for setting, ratio in in_plan.items():
        if setting in helps:
            found.same(f"speed-up of {setting}", ratio, helps[setting].ratio)
    for row in rows:
        found.same("verdict of the variables", row.verdict == "kept", bool(helps))
        if helps and row.verdict == "kept":
            best = max(helps.values(), key=lambda claim: claim.ratio)
            found.same("speed-up of the variables", row.ratio, best.ratio)
            found.same("interval of the variables", row.ci, best.ci)
    found.holds(bool(rows) or not claims, "variables were timed, and no step says so")


def _check_answers(run: _Run, found: Findings) -> None:
    """The accuracy gate: every rule in force, something compared, and every error within its limit."""
    record, gate = run.record, run.record.gate
    if gate is None:
        found.problems.append("there is no record of the accuracy gate")
        return
    found.holds(set(gate.rules) >= ALL_RULES, f"the gate ran without {', '.join(sorted(ALL_RULES - set(gate.rules)))}")
    found.same("buckets of the gate", [row.bucket for row in gate.buckets], run.buckets)
    for row in record.steps:
        if row.verdict == "kept" and row.id != ENVIRONMENT:
            _check_errors(row.id, row.numerics, run.buckets, found)
    result = record.result
    if result is None or not run.plan.stack:
        return
    found.holds(gate.checks > 0 and gate.leaves > 0 and gate.calls > 0, "the gate compared nothing")
    _check_errors("the result", result.numerics, run.buckets, found)
    for check in result.quality:
        found.holds(
            check.passed, f"the workload's own check {check.name} failed: {check.value:g}, limit {check.limit:g}"
        )


def _check_errors(name: str, rows: list[BucketError], buckets: list[str], found: Findings) -> None:
    found.holds(set(buckets) <= {row.bucket for row in rows}, f"{name}: not every bucket has an error")
    for row in rows:
        within = row.error <= row.limit
        found.holds(row.passed, f"{name}: {row.output} of {row.bucket} failed the gate")
        found.holds(within, f"{name}: {row.output} of {row.bucket} is off by {row.error:.2e}, allowed {row.limit:.2e}")


def _check_result(run: _Run, found: Findings) -> None:
    record, result = run.record, run.record.result
    if result is None:
        found.problems.append("the run was interrupted: there is no result")
        return
    if not run.plan.stack:
        own, _ = no_gain_verdict(record, OUT_OF_BUDGET)
        # what was taken back at the end is undecided, whatever its samples said
        found.holds(
            result.verdict in (own, "undecided"),
            f"no step is in force: the verdict is {result.verdict} in the record, {own} by its steps",
        )
        found.same("speed-up of the result", result.ratio, 1.0)
        found.same("interval of the result", result.ci, Interval(1.0, 1.0))
        found.holds(not result.speed, "no step is in force, and the result has times")
        return
    if result.unit == "blocks":
        found.problems.append("the result was measured in blocks of one process, as before 2026-11-25")
        return
    claim = run.claim(RESULT, result.unit, LOOKS)
    found.holds(claim.pairs in LOOKS, f"the result is of {claim.pairs} pairs; it is looked at after {list(LOOKS)}")
    for look in LOOKS:
        if look < claim.pairs:
            found.holds(not _decided(claim, look, record.min_gain), f"{look} pairs had decided, and more were taken")
    verdict, reason = result_verdict(claim, record.min_gain)
    found.same("verdict of the result", result.verdict, verdict)
    found.same("reason of the result", result.reason, reason)
    found.same("speed-up of the result", result.ratio, claim.ratio)
    found.same("interval of the result", result.ci, claim.ci)
    found.same("drift of the original", result.drift, claim.drift)
    found.same("buckets of the result", [row.bucket for row in result.speed], [row.bucket for row in claim.speed])
    for row, again in zip(result.speed, claim.speed, strict=False):
        for name in ("ratio", "ci", "base_ms", "new_ms", "blocks"):
            found.same(f"{name} of the result on {row.bucket}", getattr(row, name), getattr(again, name))


def _decided(claim: Claim, look: int, min_gain: float) -> bool:
    def reports(side: list[dict[str, list[float]]]) -> list[SideReport]:
        return [SideReport(clock="", times=times, numerics=[], quality=[], warnings=[]) for times in side[:look]]

    early = claim_of(reports(claim.base), reports(claim.new), unit=claim.unit, tail=LOOKS[look])
    return decides(early, min_gain)


def _check_plan(run: _Run, found: Findings) -> None:
    """The plan is the part of this record that can be replayed."""
    record, plan = run.record, run.plan
    for name in ("workload", "spec", "min_gain"):
        found.holds(getattr(plan, name) == getattr(record, name), f"plan and record have another {name}")
    found.holds(plan.steps == record.steps, "plan and record have other steps")
    found.holds(plan.dispatch == record.coverage, "plan and record have other dispatch decisions")
    found.holds(plan.result == record.result, "plan and record have another result")
    found.same("dtype of the model", plan.model.dtype, record.dtype)
    found.same("parameters of the model", plan.model.parameters, record.parameters)
    shapes = {row.bucket: row.shapes for row in record.baseline}
    found.holds({row.name: row.shapes for row in plan.buckets} == shapes, "plan and record have other buckets")
    device, versions, machine = record.header.device, record.header.versions, plan.fingerprint
    for name, value in (("arch", machine.arch), ("name", machine.device), ("compute_units", machine.compute_units)):
        found.holds(device.get(name) == value, f"plan and record are of another machine: {device.get(name)}, {value}")
    for name in ("torch", "triton", "transformers", "wavecrest"):
        mine, theirs = getattr(machine, name), getattr(versions, name)
        found.holds(mine == theirs, f"plan and record are of another {name}: {mine}, {theirs}")
    kept = plan.kept()
    for row in kept:
        step_by_id(row.id).check_params(row.params)
    phases = [PHASES.index(step_by_id(row.id).phase) for row in kept]
    found.holds(phases == sorted(phases), "the steps in force are not in the order of assembly")
    tried = [step_by_id(step_id) for step_id in {row.id for row in record.steps if row.ratio is not None}]
    displaced = {name for row in record.steps if row.verdict == "kept" for name in row.params.get("instead_of", ())}
    for row in record.steps:
        if row.verdict == "kept" and row.id not in (*plan.stack, ENVIRONMENT):
            # out of force only by a step that took its place
            step = step_by_id(row.id)
            replaced = any(other.excludes(step) for other in tried if other.id != row.id) or row.id in displaced
            found.holds(replaced, f"{row.id} is kept, and not in force")
    verdicts = {row.id: row.verdict for row in record.steps}
    taken_back = [row.id for row in kept if verdicts.get(row.id) != "kept"]
    found.holds(not taken_back, f"{', '.join(taken_back)} is in force, and was taken back")
