"""The trial of one step: apply on a copy → accuracy gate → interleaved measurement → verdict, with its causes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from wavecrest.errors import Refused
from wavecrest.optimizer.checking import gate_for
from wavecrest.optimizer.costs import op_calls
from wavecrest.optimizer.diagnosis import PROFILE_SHARE, Traced, diagnose, seconds_of_profile
from wavecrest.optimizer.gate import failures
from wavecrest.optimizer.plan import EnvironmentSetting
from wavecrest.optimizer.planner import ENVIRONMENT_SHARE
from wavecrest.optimizer.steps import build, step_by_id
from wavecrest.optimizer.steps.attention import check_causal
from wavecrest.optimizer.steps.base import TREE
from wavecrest.optimizer.steps.capture import CaptureGraph
from wavecrest.optimizer.steps.environment import try_candidates
from wavecrest.optimizer.verdict import is_hidden_by_resolution, judge, speeds
from wavecrest.records import BucketProfile, StepOutcome

if TYPE_CHECKING:
    from wavecrest.optimizer.candidate import Candidate
    from wavecrest.optimizer.state import RunState
    from wavecrest.optimizer.steps import Found, Step
    from wavecrest.records import Verdict

OUT_OF_BUDGET = "no time left in the budget"
# PyTorch's ops take more of the device's time than this where a profile shows them: of a replayed graph it shows the
# copies of its inputs alone
LEAST_OPS = 0.05


def try_step(run: RunState, one: Candidate) -> StepOutcome:
    """Try a step on the model as optimized so far; a step that is kept is in force afterwards.

    Whatever a step or a compiler raises ends that step alone, as refused: the model it ran on was a copy.
    """
    outcome = _outcome(one)
    before, begun = (run.ledger.applied, run.current), Traced.so_far()
    try:
        assert one.found is not None
        if one.step.phase == "environment":
            _try_environment(run, one.found, outcome)
        else:
            _try_on_copy(run, one.step, one.found, outcome)
    except Exception as error:
        _refuse(outcome, error)
    outcome.compile_seconds, outcome.trace_seconds = begun.seconds_since()
    changed = run.untouched.put_back()
    if changed:
        # whatever it gained: a step works on a copy
        run.ledger.applied, run.current = before
        _close(outcome, "refused", f"it changed {', '.join(changed[:5])} of the user's model; put back (rule: model)")
    return outcome


def set_aside(run: RunState, one: Candidate) -> StepOutcome:
    """The outcome of a step that is not tried: it cannot be, there is nothing to change, or the time has run out."""
    outcome = _outcome(one)
    if not one.is_able:
        outcome.predicted, outcome.prediction = None, ""
    if one.error is not None:
        _refuse(outcome, one.error)
    elif one.is_hopeless:
        _close(outcome, "skipped", f"its sites were not looked for: {one.ratio:.2f}× {one.prediction.basis}")
    elif one.is_able or one.unseen:
        takes = f"it takes about {one.seconds:.0f} s and its proof {one.reserve:.0f} s"
        if one.unseen:
            takes = f"looking for its sites takes about {one.unseen:.0f} s; then {takes}"
        left = f"{max(0.0, run.seconds_left):.0f} s are left"
        _close(outcome, "skipped", f"{OUT_OF_BUDGET} of {run.options.budget:.0f} s: {takes}, and {left}")
    elif one.found is not None and one.found.note:
        _close(outcome, "skipped", one.found.note)
    return outcome


def captured_with(run: RunState, one: Candidate, outcome: StepOutcome) -> list[StepOutcome]:
    """The outcome of the graph capture that was tried with a step: kept with it; none where it was not."""
    found = one.found
    if found is None or found.captured is None or outcome.verdict != "kept":
        return []
    step = step_by_id(CaptureGraph.id)
    before = [row.attempt for row in run.ledger.record.steps if row.id == step.id]
    return [
        StepOutcome(
            id=step.id,
            title=step.title,
            level=step.level,
            attempt=1 + max(before, default=0),
            params=found.captured,
            sites=list(found.captured["buckets"]),
            verdict="kept",
            reason=f"tried together with the step before it, {outcome.title}, which has the ratio of both",
            chosen=outcome.chosen,
        )
    ]


def failed(one: Candidate, error: Exception) -> StepOutcome:
    """The outcome of a step whose trial ended with an error that its process does not survive."""
    outcome = _outcome(one)
    _refuse(outcome, error)
    return outcome


def _outcome(one: Candidate) -> StepOutcome:
    step, found, ratio = one.step, one.found, one.prediction.ratio
    return StepOutcome(
        id=step.id,
        title=one.title,
        level=step.level,
        attempt=one.attempt,
        params=found.params if found is not None and found.sites else {},
        sites=list(found.sites) if found is not None else [],
        predicted=ratio if ratio is not None and math.isfinite(ratio) else None,
        prediction=one.prediction.basis,
        verdict="skipped",
        reason="nothing to change",
        chosen=one.why,
        expected_seconds=one.seconds if one.why else None,
    )


def _refuse(outcome: StepOutcome, error: Exception) -> None:
    first = (str(error).strip().splitlines() or ["(no message)"])[0]
    reason = str(error) if isinstance(error, Refused) else f"it raised {type(error).__name__}: {first}"
    _close(outcome, "refused", reason)


def _close(outcome: StepOutcome, verdict: Verdict, reason: str) -> None:
    outcome.verdict, outcome.reason = verdict, reason


def _try_on_copy(run: RunState, step: Step, found: Found, outcome: StepOutcome) -> None:
    trial = run.ledger.applied.plus(step, found.params)
    if found.captured is not None:
        trial = trial.plus(step_by_id(CaptureGraph.id), found.captured)
    begun = Traced.so_far()
    if step.phase == "surgery":
        surgery = build(run.workload.model, trial.only(*TREE))
        check_causal(run.workload.model, surgery, list(run.workload.buckets.values()))
    candidate = build(run.workload.model, trial)
    outcome.numerics = run.check(candidate, trial)
    problem = failures(outcome.numerics)
    if problem:
        return _close(outcome, "refused", f"wrong answers: {problem}")
    timed = Traced.so_far()
    # other weights give other answers than the model before: those of timed calls are not compared
    watched = [] if step.phase == "weights" else list(run.workload.buckets)
    watches = {bucket: gate_for(run.gate, trial).watch(bucket) for bucket in watched}
    takers = {bucket: watch.on_output for bucket, watch in watches.items()}
    pairs = run.measurer.pairs(run.current, candidate, run.options.min_gain, takers)
    for watch in watches.values():
        run.gate.summary.timed += watch.check()
    run.ledger.add_pairs(step.id, outcome.attempt, pairs)
    if is_hidden_by_resolution(pairs, run.options.min_gain, run.measurer.resolution):
        # what was measured before may be of another model and a busier moment, and was measured for less time
        run.progress.phase("resolution: the model before the step against itself")
        run.ledger.add_resolution(run.measurer.resolve(run.current, as_long=True))
    outcome.resolution = run.measurer.resolution
    verdict, reason, outcome.ratio, outcome.ci = judge(pairs, run.options.min_gain, run.measurer.resolution)
    outcome.speed = speeds(pairs)
    if verdict != "kept":
        outcome.causes = diagnose(run, candidate, outcome.speed, begun.causes_since(timed))
        reason = "; ".join([reason, *(cause.text for cause in outcome.causes[:1])])
    _close(outcome, verdict, reason)
    if verdict == "kept":
        run.ledger.applied, run.current = trial, candidate
        # later predictions go by what is left
        _profile_again(run, outcome)
    return None


def _profile_again(run: RunState, outcome: StepOutcome) -> None:
    """Profile the model as optimized so far, where that takes little and shows its ops."""
    if run.device.kind == "cpu" and run.ledger.applied.compiled:
        # compiled code leaves no events there
        return
    if seconds_of_profile(row.new_ms for row in outcome.speed) <= PROFILE_SHARE * run.seconds_left:
        run.progress.phase("profile")
        run.context.profile = _with_ops(run, run.current_profile()) or run.context.profile
        # layers that have become one op each are less to compile
        run.costs.ops = op_calls(run.context.profile) or run.costs.ops


def _with_ops(run: RunState, replayed: list[BucketProfile]) -> list[BucketProfile]:
    """A profile of replayed graphs, which show kernels alone, with the ops and launches of the model without them.

    A step that changes the graph changes these. The times of kernels that run behind one another without a gap are some
    percent shorter, so that they tell nothing of whether the ops are the same. Where no time is left for a profile of
    that model, they are those of the last one.
    """
    applied = run.ledger.applied
    bare = applied.without("capture")
    if bare == applied or applied.compiled or all(map(_has_ops, replayed)):
        return replayed
    plain = run.ledger.record.profile_before
    if bare.steps:
        # reading the events of a Gemma 2 2B took 4 to 5 s after each kept step (H200, 2026-11-27, no record)
        affordable = run.longest_profile <= PROFILE_SHARE * run.seconds_left
        plain = run.profile(build(run.workload.model, bare)) if affordable else run.context.profile
    ops = {profile.bucket: {"ops": profile.ops, "launches": profile.launches} for profile in plain}
    return [
        profile if _has_ops(profile) else profile.model_copy(update=ops.get(profile.bucket, {})) for profile in replayed
    ]


def _has_ops(profile: BucketProfile) -> bool:
    return sum(op.share for op in profile.ops if op.name.startswith("aten::")) > LEAST_OPS


def _try_environment(run: RunState, found: Found, outcome: StepOutcome) -> None:
    trials = try_candidates(
        run.context,
        found.params["candidates"],
        min_gain=run.options.min_gain,
        allowance=min(ENVIRONMENT_SHARE * run.options.budget, run.context.seconds_left),
        say=run.progress.phase,
    )
    for trial in trials.done:
        run.ledger.add_claim(f"environment {trial.name}={trial.value}", trial.claim)
    kept = trials.kept
    run.ledger.environment = [EnvironmentSetting(name=row.name, value=row.value, ratio=row.claim.ratio) for row in kept]
    outcome.params = {**outcome.params, "set": {row.name: row.value for row in kept}}
    reason = "; ".join(trials.lines)
    if not kept:
        return _close(outcome, "tie" if trials.done else "skipped", reason)
    best = max(kept, key=lambda row: row.claim.ratio)
    outcome.ratio, outcome.ci = best.claim.ratio, best.claim.ci
    return _close(outcome, "kept", f"{reason}; set them before import (`wavecrest plan show` prints the exports)")
