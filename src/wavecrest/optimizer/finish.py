"""The end of a run: original and result measured as their users run them, and what becomes of the steps."""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from wavecrest.dispatch import registry
from wavecrest.errors import EnvironmentProblem, StepRefused, WavecrestError
from wavecrest.graphs.inductor import strict_compilation
from wavecrest.measure import copies, timing
from wavecrest.measure.timing import Interval
from wavecrest.optimizer.alternate import LOOKS, Claim, Unit, alternate, in_turn
from wavecrest.optimizer.children import Job, Jobs, SideReport, Task, memory_of, pairs_together, run_pairs, timeout_of
from wavecrest.optimizer.gate import failures
from wavecrest.optimizer.ledger import RESULT
from wavecrest.optimizer.planner import LATE_SHARE, may_recompile
from wavecrest.optimizer.ranged import GRAPHS, seconds_to_serve, serving
from wavecrest.optimizer.side import time_buckets
from wavecrest.optimizer.steps import build
from wavecrest.optimizer.steps.base import TREE
from wavecrest.optimizer.steps.environment import rounds_of_loading, seconds_of_pairs
from wavecrest.optimizer.trial import OUT_OF_BUDGET
from wavecrest.optimizer.verdict import check_quality, no_gain_verdict, result_verdict
from wavecrest.records import DecisionRow, Result

if TYPE_CHECKING:
    from collections.abc import Callable

    from wavecrest.optimizer.state import RunState

# sampling time a bucket of one process or phase, in seconds, at most
MOST_SECONDS = 1.0
NOT_RECOMPILED = (
    "the result was not compiled anew for the final check of answers, which called the code of its trial, and not "
    "checked at other shapes and with arguments by name: no time was left (wavecrest verify does all of it, or give "
    "more --budget)"
)


def finish(run: RunState) -> None:
    """Measure the result with fresh compiler state and default limits, original against final; write everything.

    `run.current` is then the model to return. Where no time is left to compile it again it keeps the code of its trial:
    fresh processes, which are measured, compile with default limits in any case.
    """
    if run.ledger.applied.steps:
        run.progress.phase("final check of answers")
    recompiled = may_recompile(run)
    anew = recompiled or bool(run.workload.ranges)
    if anew:
        torch._dynamo.reset()
    # the coverage table is that of the result, not of candidates that were turned down
    registry.forget()
    record = run.ledger.record
    if not run.ledger.applied.steps:
        record.result = _unchanged(run)
    else:
        begin = run.seconds_spent
        if anew:
            run.current = build(run.workload.model, run.ledger.applied)
        # as the user will run it, with one exception: a fall-back to eager raises. Declared ranges are served with a
        # limit of their own, and code of trials is beside that of others
        default = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
        with default if anew and not run.workload.ranges else strict_compilation(graphs=GRAPHS):
            record.result = _final(run, recompiled=recompiled)
        record.final_seconds = run.seconds_spent - begin
        record.profile_after = run.profile(run.current)
    record.coverage = _coverage()
    run.ledger.save()
    run.current = serving(run)
    record.seconds = run.seconds_spent
    run.ledger.save()
    run.ledger.save_report()


def _final(run: RunState, *, recompiled: bool = True) -> Result:
    begin = run.now()
    try:
        numerics = run.check(run.current, run.ledger.applied, final=True, recompiled=recompiled)
        if not recompiled:
            run.ledger.note(NOT_RECOMPILED)
            # what compilation has no part in
            bare = run.ledger.applied.only(*TREE, "setting")
            without = run.check(build(run.workload.model, bare), bare, final=True) if bare.steps else []
            numerics = without if failures(without) else numerics
    except StepRefused as error:
        return _drop_last(run, str(error))
    problem = failures(numerics)
    quality = check_quality(run.workload, run.current)
    _add_part(run, "check of answers", run.now() - begin)
    bad = [row for row in quality if not row.passed]
    if problem or bad:
        return _drop_last(run, problem or f"{bad[0].name} is {bad[0].value:g}, limit {bad[0].limit:g} {bad[0].detail}")
    begin = run.now()
    claim = _measured(run)
    _add_part(run, "measurement", run.now() - begin)
    run.ledger.add_claim(RESULT, claim)
    try:
        run.measurer.check_possible({row.bucket: row.new_ms for row in claim.speed})
    except StepRefused as error:
        return _drop_last(run, str(error))
    verdict, reason = result_verdict(claim, run.options.min_gain)
    if verdict == "slower":
        return _slower(run, reason)
    assert claim.ci is not None
    return Result(
        verdict=verdict,
        reason=reason,
        ratio=claim.ratio,
        ci=claim.ci,
        unit=claim.unit,
        drift=claim.drift,
        speed=claim.speed,
        numerics=numerics,
        quality=quality,
        peak_memory_before=run.measurer.peak_memory(run.workload.model),
        peak_memory_after=run.measurer.peak_memory(run.current),
    )


def final_seconds(run: RunState) -> float:
    """Seconds for which each process of the final measurement samples a bucket."""
    return min(MOST_SECONDS, run.measurer.seconds)


def _add_part(run: RunState, name: str, seconds: float) -> None:
    """Add to the seconds of a part of the end; a result that loses a step is checked again."""
    parts = run.ledger.record.final_parts
    parts[name] = parts.get(name, 0.0) + seconds


def _measured(run: RunState) -> Claim:
    """Original against result in fresh processes, or in phases of this one where a process cannot load the model."""
    try:
        # for a model in memory, and for one that compiles, fresh processes are what the budget must hold
        if run.workload.spec is None:
            _check_time(run, run.seconds_left)
        elif run.ledger.applied.compiled:
            _check_time(run, run.seconds_left + LATE_SHARE * run.options.budget)
        source = copies.source(run.workload)
        claim = _in_processes(run, source)
    except WavecrestError as error:
        run.ledger.note(f"measured in one process: {error}")
        return _in_phases(run)
    if run.children.problem:
        run.ledger.note(f"the fresh processes were new interpreters, which import anew: {run.children.problem}")
    if source.copied:
        run.ledger.note("the fresh processes of the final measurement loaded a copy of the model's pickle")
    return claim


def _check_time(run: RunState, left: float) -> None:
    """Whether `left` seconds hold the fewest fresh processes.

    Raises:
        EnvironmentProblem: they do not.
    """
    pairs = min(LOOKS)
    needed = _seconds_of_processes(run, pairs)
    if needed > left:
        raise EnvironmentProblem(
            f"{2 * pairs} fresh processes take about {needed:.0f} s, and {max(0.0, run.seconds_left):.0f} s are left"
        )


def _seconds_of_processes(run: RunState, pairs: int) -> float:
    """Seconds that `pairs` of fresh processes should take."""
    compiling = run.costs.cached if run.ledger.applied.compiled else 0.0
    loading = seconds_of_pairs(run.context, pairs, run.children.saved_seconds, final_seconds(run))
    return loading + rounds_of_loading(run.context, pairs) * compiling


def loading(together: int, memory: int) -> str:
    """The note of a measurement whose first pairs are not all loaded together; `memory`: bytes that a pair takes."""
    count = f"{2 * together} at a time" if together else "one by one"
    return (
        f"the fresh processes were loaded {count}: a pair takes {memory / 1e9:.0f} GB and two processors, and no more "
        "were free"
    )


def _in_processes(run: RunState, source: copies.Source) -> Claim:
    seconds = final_seconds(run)
    variables: dict[str, str | None] = {row.name: row.value for row in run.ledger.environment}
    device, peak = run.workload.device, run.measurer.peak_memory(run.current)
    calls = peak - torch.cuda.memory_allocated() if peak is not None else 0
    # the original's process holds no weights that steps have made
    memory = memory_of(run.workload, calls=calls) + memory_of(run.workload, run.current, calls)
    together = pairs_together(device, memory)
    if device != "cpu" and together < min(LOOKS):
        run.ledger.note(loading(together, memory))
    spent: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        run.ledger.plan.save(plan)

        def jobs(pair: int) -> Jobs:
            task = Task(source.spec, device, seconds, copied=source.copied)
            original = Job(task, {}, f"original, process {pair + 1}")
            return {
                "base": original,
                "new": Job(replace(task, plan=str(plan)), variables, f"result, process {pair + 1}"),
            }

        def some(first: int, count: int) -> list[dict[timing.Side, SideReport]]:
            names = f"{first + 1} to {first + count}"
            run.progress.phase(f"final measurement: original and result in fresh processes, pairs {names}")
            timeout = timeout_of(_seconds_of_processes(run, count))
            found = run_pairs(
                [jobs(pair) for pair in range(first, first + count)],
                first,
                memory=memory,
                starter=run.children,
                timeout=timeout,
            )
            spent.extend(pair["new"].spent for pair in found)
            return found

        claim = _alternate(run, some, "processes")
    for part in spent[0]:
        _add_part(run, f"{part} of a process", statistics.fmean(one[part] for one in spent))
    return claim


def _in_phases(run: RunState) -> Claim:
    seconds = final_seconds(run)

    def one(side: timing.Side, pair: int) -> SideReport:
        run.progress.phase(f"final measurement: {_NAMES[side]}, phase {pair + 1}")
        model = run.workload.model if side == "base" else run.current
        found = time_buckets(run.workload, model, seconds, run.now)
        return SideReport(
            clock=next(iter(found.values())).clock,
            times={bucket: list(row.samples) for bucket, row in found.items()},
            numerics=[],
            quality=[],
            warnings=[],
        )

    return _alternate(run, in_turn(one), "phases")


_NAMES = {"base": "original", "new": "result"}


def _alternate(run: RunState, some: Callable[[int, int], list[dict[timing.Side, SideReport]]], unit: Unit) -> Claim:
    def left() -> float:
        return run.seconds_left - seconds_to_serve(run)

    return alternate(some, unit=unit, looks=LOOKS, min_gain=run.options.min_gain, seconds_left=left)


def _drop_last(run: RunState, reason: str) -> Result:
    """All steps together fail where each one passed: take the last step back and look again."""
    last = run.ledger.applied.ordered()[-1]
    run.ledger.take_back([last.step_id], "refused", f"the final check failed with it: {reason}")
    run.ledger.put_back(last)
    if not run.ledger.applied.steps:
        return _unchanged(run)
    run.current = build(run.workload.model, run.ledger.applied)
    return _final(run, recompiled=may_recompile(run))


def _slower(run: RunState, found: str) -> Result:
    """Each step was faster when it was tried, and the whole is slower as its user runs it: no step stays."""
    reason = f"the final measurement contradicts it: all steps together {found}"
    run.ledger.take_back([item.step_id for item in run.ledger.applied.steps], "reverted", reason)
    return _unchanged(run).model_copy(update={"verdict": "undecided", "reason": reason})


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
    verdict, reason = no_gain_verdict(run.ledger.record, OUT_OF_BUDGET)
    return Result(verdict=verdict, reason=reason, ratio=1.0, ci=Interval(1.0, 1.0), speed=[], numerics=[], quality=[])


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
