"""The ladder: one measured step at a time, each kept, reverted, called a tie, refused or skipped, with its reason.

Files are written after every step, so that an interrupted run can be resumed; the user's model is never changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavecrest.errors import InvalidArgument
from wavecrest.graphs.inductor import strict_compilation
from wavecrest.optimizer.finish import finish, withdraw
from wavecrest.optimizer.gate import Gate
from wavecrest.optimizer.steps import build, steps_up_to
from wavecrest.optimizer.trial import try_step
from wavecrest.profile.least_time import beaten_ceiling

if TYPE_CHECKING:
    from wavecrest.optimizer.state import RunState
    from wavecrest.optimizer.steps import Step

# compiled variants of one function that a run may make for each bucket
GRAPHS_A_BUCKET = 128
# part of the budget that is left for the final measurement once a step is kept
FINAL_SHARE = 0.25


def run_ladder(run: RunState) -> None:
    """Prepare, climb, measure the result.

    Raises:
        KeyboardInterrupt: after the state has been written.
    """
    try:
        try:
            with strict_compilation(graphs=GRAPHS_A_BUCKET * len(run.workload.buckets)):
                _prepare(run)
                _climb(run)
            finish(run)
        finally:
            changed = run.untouched.put_back()
            run.workload.restore_modes()
        _close(run, changed)
    except KeyboardInterrupt:
        run.ledger.note("interrupted by the user")
        run.ledger.save()
        run.ledger.save_report()
        raise


def _close(run: RunState, changed: list[str]) -> None:
    """Say what the model's own calls wrote; refuse a result that changed the user's model."""
    gate, before = run.gate.summary, len(run.ledger.record.notes)
    own = run.untouched.own_writes
    if own:
        run.ledger.note(f"the model's own calls change {', '.join(own[:5])}: put back as before the run")
    run.ledger.note(*(f"accuracy gate: {text}" for text in gate.notes))
    if changed:
        withdraw(run, f"it changed {', '.join(changed[:5])} of the user's model while it was timed; put back")
    elif len(run.ledger.record.notes) > before:
        run.ledger.save()
        run.ledger.save_report()


def _prepare(run: RunState) -> None:
    """Everything that steps and verdicts refer to: baseline, profile, graph breaks, reference outputs."""
    record = run.ledger.record
    if run.workload.in_training:
        run.ledger.note("the model was given in training mode: it is measured in eval mode, and put back at the end")
    run.progress.phase("baseline")
    record.baseline = run.measurer.baseline()
    run.ledger.save()
    run.progress.phase("resolution: the original against itself")
    record.resolution = run.measurer.resolve()
    run.progress.phase("profile")
    record.ceilings, note = run.analysis.ceilings()
    run.ledger.note(note)
    record.profile_before = run.profile(run.workload.model)
    _bound_times(run)
    run.context.profile = record.profile_before
    if run.options.level >= 2:
        run.progress.phase("graph breaks")
        record.breaks, note = run.analysis.breaks()
        run.ledger.note(note)
    run.progress.phase("reference outputs")
    run.gate = Gate.prepare(run.workload, now=run.now)
    record.gate = run.gate.summary
    # what the original changed so far is its own doing
    run.untouched.learn()
    if run.gate.note:
        run.ledger.note(f"accuracy gate: {run.gate.note}")
    if run.ledger.applied.steps:
        run.progress.phase("rebuilding the kept steps")
        run.current = build(run.workload.model, run.ledger.applied)


def _bound_times(run: RunState) -> None:
    """Find the times that no step can be below, unless the ceilings they rest on are beaten by the original."""
    record = run.ledger.record
    beaten = beaten_ceiling(record.profile_before)
    least, note = run.analysis.least_times(record.ceilings, lower_precision=run.options.precision is not None)
    run.ledger.note(note)
    own = {row.bucket: row.measurement.median for row in record.baseline}
    if least is not None and not beaten:
        beaten = "the original is faster than it allows" if least.impossible(own) else ""
        record.ceilings = least.ceilings
    if beaten and record.ceilings is not None:
        # a busy machine: percentages of it mean nothing, and nothing is refused by it
        source = f"{record.ceilings.source}; ceiling not valid: {beaten}"
        record.ceilings = record.ceilings.model_copy(update={"source": source})
        run.ledger.note(f"ceiling not valid: {beaten}; the machine was busy when it was measured")
    run.measurer.least = None if beaten else least


def _climb(run: RunState) -> None:
    """Try every step once, and steps that lost a second time where another step has changed the ground since."""
    steps = _chosen(run)
    done = {(outcome.id, outcome.attempt) for outcome in run.ledger.record.steps}
    for step in steps:
        if (step.id, 1) not in done:
            _take(run, step, attempt=1)
    for step in steps:
        if (step.id, 2) not in done and _deserves_retry(run, step):
            _take(run, step, attempt=2)


def _chosen(run: RunState) -> list[Step]:
    """The steps of the level that were asked for.

    Raises:
        InvalidArgument: `steps` or `skip` names a step that the level does not have.
    """
    options, steps = run.options, steps_up_to(run.options.level)
    unknown = {*(options.steps or ()), *options.skip} - {step.id for step in steps}
    if unknown:
        raise InvalidArgument(
            f"no step {', '.join(sorted(unknown))} at level {options.level}; "
            f"there are {', '.join(step.id for step in steps)}"
        )
    if options.skip:
        run.ledger.note(f"not tried, as asked: {', '.join(options.skip)}")
    wanted = [step for step in steps if options.steps is None or step.id in options.steps]
    return [step for step in wanted if step.id not in options.skip]


def _deserves_retry(run: RunState, step: Step) -> bool:
    """True for a measured loss or tie after which another step was kept."""
    rows = run.ledger.record.steps
    index = next((i for i, row in enumerate(rows) if row.id == step.id), None)
    if index is None or rows[index].verdict not in ("reverted", "tie") or step.level == 1:
        return False
    # a compile mode that lost to the one in force lost to it already
    rivals = any(step.excludes(item.step) for item in run.ledger.applied.steps)
    return not rivals and any(row.verdict == "kept" for row in rows[index + 1 :])


def _take(run: RunState, step: Step, *, attempt: int) -> None:
    run.progress.phase(step.title + (" (again)" if attempt > 1 else ""))
    begin = run.now()
    # what was kept must be measured at the end, as its user runs it
    reserve = FINAL_SHARE * run.options.budget if run.ledger.applied.steps else 0.0
    run.context.seconds_left = run.seconds_left - reserve
    outcome = try_step(run, step, attempt)
    outcome.seconds = run.now() - begin
    if step.phase == "compile":
        run.context.compile_seconds = max(run.context.compile_seconds, outcome.seconds)
    run.ledger.add(outcome)
    run.progress.outcome(outcome)
    run.ledger.save()
