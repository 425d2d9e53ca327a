"""The trial of one step: find → predict → apply on a copy → accuracy gate → interleaved measurement → verdict."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from wavecrest.errors import Refused
from wavecrest.optimizer.gate import failures
from wavecrest.optimizer.plan import EnvironmentSetting
from wavecrest.optimizer.steps import build
from wavecrest.optimizer.steps.attention import check_causal
from wavecrest.optimizer.steps.environment import try_candidates
from wavecrest.optimizer.verdict import judge, speeds
from wavecrest.records import StepOutcome

if TYPE_CHECKING:
    from wavecrest.optimizer.state import RunState
    from wavecrest.optimizer.steps import Found, Step
    from wavecrest.records import Verdict

OUT_OF_BUDGET = "no time left in the budget"
# share of the budget that trials of environment variables may take: each needs fresh processes, which load the model
ENVIRONMENT_SHARE = 0.3


def try_step(run: RunState, step: Step, attempt: int) -> StepOutcome:
    """Try a step on the model as optimized so far; a step that is kept is in force afterwards.

    Whatever a step or a compiler raises ends that step alone, as refused: the model it ran on was a copy.
    """
    outcome = StepOutcome(
        id=step.id, title=step.title, level=step.level, attempt=attempt, verdict="skipped", reason="nothing to change"
    )
    before = run.ledger.applied, run.current
    try:
        _try(run, step, outcome)
    except Refused as error:
        _close(outcome, "refused", str(error))
    except Exception as error:
        first = (str(error).strip().splitlines() or ["(no message)"])[0]
        _close(outcome, "refused", f"it raised {type(error).__name__}: {first}")
    finally:
        run.context.model = None
    changed = run.untouched.put_back()
    if changed:
        # whatever it gained: a step works on a copy
        run.ledger.applied, run.current = before
        _close(outcome, "refused", f"it changed {', '.join(changed[:5])} of the user's model; put back (rule: model)")
    return outcome


def _close(outcome: StepOutcome, verdict: Verdict, reason: str) -> None:
    outcome.verdict, outcome.reason = verdict, reason


def _try(run: RunState, step: Step, outcome: StepOutcome) -> None:
    applied = run.ledger.applied
    run.context.model = build(run.workload.model, applied.only("surgery"))
    run.context.compiled = bool(applied.only("compile").steps)
    found = step.find(run.context)
    if not found.sites:
        return _close(outcome, "skipped", found.note or "nothing to change")
    if run.context.seconds_left <= 0:
        outcome.sites = list(found.sites)
        return _close(outcome, "skipped", f"{OUT_OF_BUDGET} of {run.options.budget:.0f} s")
    prediction = step.predict(found, run.context)
    outcome.params, outcome.sites, outcome.prediction = found.params, list(found.sites), prediction.basis
    if prediction.ratio is not None and math.isfinite(prediction.ratio):
        outcome.predicted = prediction.ratio
    if step.phase == "environment":
        return _try_environment(run, found, outcome)
    return _try_on_copy(run, step, found, outcome)


def _try_on_copy(run: RunState, step: Step, found: Found, outcome: StepOutcome) -> None:
    trial = run.ledger.applied.plus(step, found.params)
    if step.phase == "surgery":
        surgery = build(run.workload.model, trial.only("surgery"))
        check_causal(run.workload.model, surgery, list(run.workload.buckets.values()))
    candidate = build(run.workload.model, trial)
    outcome.numerics = run.check(candidate, trial)
    problem = failures(outcome.numerics)
    if problem:
        return _close(outcome, "refused", f"wrong answers: {problem}")
    pairs = run.measurer.pairs(run.current, candidate, run.options.min_gain)
    run.ledger.add_pairs(step.id, outcome.attempt, pairs)
    verdict, reason, outcome.ratio, outcome.ci = judge(pairs, run.options.min_gain, run.measurer.resolution)
    outcome.speed = speeds(pairs)
    _close(outcome, verdict, reason)
    if verdict == "kept":
        run.ledger.applied, run.current = trial, candidate
        if step.phase in ("compile", "capture") and run.device.kind != "cpu":
            # later predictions go by what is left; on the CPU compiled code leaves no events to profile
            run.progress.phase("profile")
            run.context.profile = run.profile(candidate) or run.context.profile
    return None


def _try_environment(run: RunState, found: Found, outcome: StepOutcome) -> None:
    trials = try_candidates(
        run.context,
        found.params["candidates"],
        min_gain=run.options.min_gain,
        allowance=ENVIRONMENT_SHARE * run.options.budget,
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
