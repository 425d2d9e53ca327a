"""The end of a run: the result measured as the user will run it, and what happens if the measurement disagrees."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

import torch

from wavecrest.dispatch import registry
from wavecrest.measure.timing import Interval
from wavecrest.optimizer.gate import failures
from wavecrest.optimizer.steps import build
from wavecrest.optimizer.trial import OUT_OF_BUDGET
from wavecrest.optimizer.verdict import check_quality, claim
from wavecrest.records import DecisionRow, Result

if TYPE_CHECKING:
    from collections.abc import Iterable

    from wavecrest.optimizer.state import RunState
    from wavecrest.records import StepOutcome


def finish(run: RunState) -> None:
    """Measure the result with fresh compiler state and default limits, original against final; write everything."""
    run.progress.phase("final measurement")
    torch._dynamo.reset()
    # the coverage table is that of the result, not of candidates that were turned down
    registry.forget()
    record = run.ledger.record
    if not run.ledger.applied.steps:
        record.result = _unchanged(run)
    else:
        run.current = build(run.workload.model, run.ledger.applied)
        # as the user will run it, with one exception: a fall-back to eager raises
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            record.result = _final(run)
        record.profile_after = run.profile(run.current)
    record.coverage = _coverage()
    run.ledger.save()
    run.ledger.save_report()


def _final(run: RunState) -> Result:
    numerics = run.check(run.current, run.ledger.applied, final=True)
    problem = failures(numerics)
    quality = check_quality(run.workload, run.current)
    bad = [row for row in quality if not row.passed]
    if problem or bad:
        return _drop_last(run, problem or f"{bad[0].name} is {bad[0].value:g}, limit {bad[0].limit:g} {bad[0].detail}")
    pairs = run.measurer.pairs(run.workload.model, run.current)
    run.ledger.add_pairs("result", 1, pairs)
    found = claim(pairs, {bench.bucket: bench.measurement for bench in run.ledger.record.baseline})
    if found.ci.low <= 1:
        return _unconfirmed(run, found.ratio, found.ci)
    run.ledger.note(*(f"{row.bucket}: {row.note}" for row in found.speed if row.note))
    return Result(
        verdict="faster",
        ratio=found.ratio,
        ci=found.ci,
        speed=found.speed,
        numerics=numerics,
        quality=quality,
        peak_memory_before=run.measurer.peak_memory(run.workload.model),
        peak_memory_after=run.measurer.peak_memory(run.current),
    )


def _drop_last(run: RunState, reason: str) -> Result:
    """All steps together fail where each one passed: take the last step back and look again."""
    last = run.ledger.applied.ordered()[-1]
    run.ledger.take_back([last.step_id], "refused", f"the final check failed with it: {reason}")
    if not run.ledger.applied.steps:
        return _unchanged(run)
    run.current = build(run.workload.model, run.ledger.applied)
    return _final(run)


def _unconfirmed(run: RunState, ratio: float, ci: Interval) -> Result:
    """Each step was faster when it was tried, but the whole is not faster now: nothing stays."""
    reason = f"the final measurement does not confirm it: all steps together {ratio:.3f}× {ci}"
    run.ledger.take_back([item.step_id for item in run.ledger.applied.steps], "reverted", reason)
    unchanged = _unchanged(run)
    # an interval that contains 1 proves neither a gain nor its absence
    return unchanged.model_copy(update={"verdict": "undecided"}) if ci.high > 1 else unchanged


def withdraw(run: RunState, reason: str) -> None:
    """Take back all steps and the result, and write everything again."""
    run.ledger.take_back([item.step_id for item in run.ledger.applied.steps], "refused", reason)
    run.ledger.note(reason)
    run.ledger.record.result = _unchanged(run).model_copy(update={"verdict": "undecided"})
    run.ledger.save()
    run.ledger.save_report()


def _unchanged(run: RunState) -> Result:
    """No step is in force: the model is the user's own."""
    run.current = run.workload.model
    verdict = _no_gain(run.ledger.record.steps)
    return Result(verdict=verdict, ratio=1.0, ci=Interval(1.0, 1.0), speed=[], numerics=[], quality=[])


def _no_gain(steps: Iterable[StepOutcome]) -> Literal["already optimal", "undecided"]:
    """Optimal only if every applicable step was tried: a step without time, or no compiler, leaves it open."""
    for row in steps:
        if row.verdict == "skipped" and row.reason.startswith(OUT_OF_BUDGET):
            return "undecided"
        if row.id == "compile:default" and row.verdict == "refused":
            return "undecided"
    return "already optimal"


def _coverage() -> list[DecisionRow]:
    """The dispatch decisions of this process, for records."""
    return [
        DecisionRow(
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
