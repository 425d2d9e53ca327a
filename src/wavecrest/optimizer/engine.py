"""The ladder: one measured step at a time, each kept, reverted, called a tie, refused or skipped, with its reason.

The planner says which step is next. Files are written after every step, so that an interrupted run can be resumed; the
user's model is never changed.
"""

from __future__ import annotations

import importlib
import itertools
import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from wavecrest.errors import DeviceFailed, InvalidArgument
from wavecrest.graphs.inductor import COMPILERS, strict_compilation
from wavecrest.optimizer import compile_pace
from wavecrest.optimizer.alternate import LOOKS
from wavecrest.optimizer.costs import Costs, Kind, op_calls
from wavecrest.optimizer.finish import final_seconds, finish, withdraw
from wavecrest.optimizer.gate import Gate
from wavecrest.optimizer.options import COMPILE_LEVEL
from wavecrest.optimizer.planner import LATE_SHARE, MUCH, Planner
from wavecrest.optimizer.ranged import compilations
from wavecrest.optimizer.steps import build, steps_up_to
from wavecrest.optimizer.steps.environment import rounds_of_loading, seconds_of_pairs
from wavecrest.optimizer.trial import OUT_OF_BUDGET, captured_with, failed, set_aside, try_step
from wavecrest.profile.least_time import beaten_ceiling

if TYPE_CHECKING:
    from wavecrest.optimizer.candidate import Candidate
    from wavecrest.optimizer.options import Options
    from wavecrest.optimizer.state import RunState
    from wavecrest.optimizer.steps import Step
    from wavecrest.optimizer.steps.applied import AppliedSteps
    from wavecrest.records import StepOutcome

# seconds in which a process imports the compilers, where this one had them before the run: 3.8 on two cores, with the
# bytecode there (torch 2.13, 2026-11-28)
IMPORT_SECONDS = 4.0
# compiled variants of one function that a run may make for each bucket
GRAPHS_A_BUCKET = 128
# seconds of the final check of answers, as a part of those of the reference outputs, which a GPU makes in higher
# precision: without compilation it took 0.3 to 2.7 s (records of the zoo, H200, 2026-11-27), they 4 to 10 (no record)
CHECK_SHARE, CHECK_SHARE_CPU = 0.5, 1.0


def run_ladder(run: RunState) -> None:
    """Prepare, climb, measure the result.

    Raises:
        KeyboardInterrupt: after the state has been written.
        DeviceFailed: the GPU failed; what was written can be resumed by another process.
    """
    try:
        try:
            run.import_seconds = _import_compilers(run)
            with strict_compilation(graphs=GRAPHS_A_BUCKET * len(run.workload.buckets)):
                _prepare(run)
                _climb(run)
            finish(run)
        except RuntimeError as error:
            if not has_failed(run.workload.device):
                raise
            raise _device_failed(run, error) from error
        finally:
            changed = [] if has_failed(run.workload.device) else run.untouched.put_back()
            run.workload.restore_modes()
        _close(run, changed)
    except KeyboardInterrupt:
        run.ledger.note("interrupted by the user")
        run.ledger.save()
        run.ledger.save_report()
        raise


def _import_compilers(run: RunState) -> float:
    """Import the compilers if steps may compile; the seconds that this takes a process which has none of them."""
    if run.options.level < COMPILE_LEVEL:
        return 0.0
    if all(name in sys.modules for name in COMPILERS):
        return IMPORT_SECONDS
    run.progress.phase("importing torch.compile")
    begin = run.now()
    for name in COMPILERS:
        importlib.import_module(name)
    return run.now() - begin


def has_failed(device: str) -> bool:
    """Whether a GPU answers this process no more: an error of a kernel ends all later work of its process."""
    if device == "cpu":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _device_failed(run: RunState, error: Exception) -> DeviceFailed:
    """The error to raise; the run is written as far as it is."""
    what = (str(error).strip().splitlines() or [type(error).__name__])[0]
    run.ledger.note(f"the GPU failed: {what}")
    run.ledger.save()
    folder = run.ledger.folder
    more = f"`--resume {folder}` in a new process goes on" if folder else "give a folder (--out) to be able to go on"
    return DeviceFailed(f"the GPU failed ({what}), and this process cannot use it any more; {more}")


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
    # beside the work of this process
    run.children.begin()
    if run.workload.in_training:
        run.ledger.note("the model was given in training mode: it is measured in eval mode, and put back at the end")
    run.progress.phase("baseline")
    record.baseline = run.measurer.baseline()
    # what its calls have changed by now is the original's own doing; the gate may put it back, so it is seen here
    run.untouched.learn()
    run.ledger.save()
    run.progress.phase("resolution: the original against itself")
    run.ledger.add_resolution(run.measurer.resolve(run.workload.model))
    run.progress.phase("profile")
    record.ceilings, note = run.analysis.ceilings()
    run.ledger.note(note)
    record.profile_before = run.profile(run.workload.model)
    _bound_times(run)
    run.context.profile, run.context.ceilings = record.profile_before, record.ceilings
    run.progress.phase("reference outputs")
    run.gate = Gate.prepare(run.workload, now=run.now)
    record.gate = run.gate.summary
    _know_costs(run)
    # and what it changed since then, or wrote without a change
    run.untouched.learn(run.gate.writes)
    if run.gate.note:
        run.ledger.note(f"accuracy gate: {run.gate.note}")
    if run.ledger.applied.steps:
        run.progress.phase("rebuilding the kept steps")
        run.current = build(run.workload.model, run.ledger.applied)


def _know_costs(run: RunState) -> None:
    """Expect what is known of trials and of the end before the first one; say if the budget is short for them."""
    buckets, looks = len(run.workload.buckets), list(LOOKS)
    counts = [looks[0], *(after - before for before, after in itertools.pairwise(looks))]
    sampling = final_seconds(run)
    times = phases = [2 * count * sampling * buckets for count in counts]
    if run.workload.spec:
        times = [seconds_of_pairs(run.context, count, run.children.saved_seconds, sampling) for count in counts]
    share = CHECK_SHARE_CPU if run.context.device.kind == "cpu" else CHECK_SHARE
    pace, known = compile_pace.known(run.context.device)
    if pace > 1:
        run.ledger.note(
            f"compilations are expected to take {pace:.1f} times as long as by the number of ops, "
            f"after {known} on this machine"
        )
    run.costs = Costs(
        sampling=run.measurer.seconds * buckets,
        ops=op_calls(run.context.profile),
        least_final=times[0] + share * run.gate.summary.seconds,
        later_looks=tuple(times[1:]),
        phases=phases[0] + share * run.gate.summary.seconds,
        loads=rounds_of_loading(run.context, counts[0]) if run.workload.spec else 0,
        imports=run.import_seconds if run.workload.spec and not run.children.forks else 0.0,
        sizes=compilations(run.workload.ranges) if run.workload.ranges else 0,
        pace=pace,
    )
    kind: Kind = "first" if run.options.level >= COMPILE_LEVEL else "plain"
    proof = run.costs.final(run.options.budget, compiled=kind == "first", looks=1, recompiled=False)
    needed = run.seconds_spent + run.costs.expect(kind) + proof
    run.costs.short = needed > run.options.budget
    if run.costs.short:
        run.ledger.note(
            f"a budget of {run.options.budget:.0f} s is short for this workload: to try torch.compile and to prove "
            f"it takes about {needed:.0f} s; the best step is tried all the same, and its proof may "
            f"take longer than the budget"
        )
        run.progress.phase(run.ledger.record.notes[-1])


def _look_for_breaks(run: RunState) -> None:
    """Where Dynamo splits the original, for the report: after the steps, if the time of a compilation is left."""
    reserve = run.costs.final(run.options.budget, compiled=True) if run.ledger.applied.steps else 0.0
    if run.options.level < COMPILE_LEVEL:
        return
    if run.costs.compilation > run.seconds_left - reserve:
        run.ledger.note("graph breaks of the original are not looked for: no time is left (wavecrest profile does)")
        return
    run.progress.phase("graph breaks")
    run.ledger.record.breaks, note = run.analysis.breaks()
    run.ledger.note(note)
    # torch.compile of a model leaves an attribute on it
    run.untouched.put_back()


def _bound_times(run: RunState) -> None:
    """Find the times that no step can be below, unless the ceilings they rest on are beaten by the original."""
    record = run.ledger.record
    beaten = beaten_ceiling(record.profile_before)
    wish = run.options.wish
    lower = run.options.precision is not None or (wish is not None and wish.multiplies_in_8_bits)
    least, note = run.analysis.least_times(record.ceilings, lower_precision=lower)
    if least is not None and wish is not None:
        # as if all weights were in the fewest bits; a lower precision counts half of them by itself
        share = wish.least_bits / (8 * getattr(torch, run.workload.dtype).itemsize) * (2 if lower else 1)
        least.work = {name: replace(work, bytes=int(work.bytes * min(1.0, share))) for name, work in least.work.items()}
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
    """Try steps as long as the planner has one that fits; then say what became of the others."""
    planner = Planner(run, _chosen(run))
    while True:
        one = planner.next()
        run.progress.remaining(planner.seconds_to_come())
        if one is None:
            break
        _take(run, one)
    run.ledger.record.final_expected = planner.reserve
    for one in planner.rest():
        _end(run, set_aside(run, one))
    _look_for_breaks(run)


def _chosen(run: RunState) -> list[Step]:
    """The steps of the level that were asked for."""
    options, steps = run.options, steps_up_to(run.options.level)
    if options.skip:
        run.ledger.note(f"not tried, as asked: {', '.join(options.skip)}")
    wanted = [step for step in steps if options.steps is None or step.id in options.steps]
    return [step for step in wanted if step.id not in options.skip]


def check_steps(options: Options) -> None:
    """Look at the names of steps that were asked for, before anything is done.

    Raises:
        InvalidArgument: `steps` or `skip` names a step that the level does not have.
    """
    steps = steps_up_to(options.level)
    unknown = {*(options.steps or ()), *options.skip} - {step.id for step in steps}
    if unknown:
        raise InvalidArgument(
            f"no step {', '.join(sorted(unknown))} at level {options.level}; "
            f"there are {', '.join(step.id for step in steps)}"
        )


def _take(run: RunState, one: Candidate) -> None:
    run.progress.phase(one.title + (" (again)" if one.is_again else ""))
    begin, before = run.now(), (run.ledger.applied, run.current, run.context.profile, run.costs.ops)
    # by the ops of the model as it is: a compiled one has fewer
    prior = run.costs.prior
    # what was kept must be measured at the end, as its user runs it
    run.context.seconds_left = run.seconds_left - one.reserve
    try:
        outcome = try_step(run, one)
    except RuntimeError as error:
        if not has_failed(run.workload.device):
            raise
        # a run that goes on does not try it again
        outcome = failed(one, error)
        outcome.seconds = run.now() - begin
        _end(run, outcome)
        raise
    outcome.seconds = run.now() - begin
    # a capture that failed behind its compilation leaves that in the caches
    compiled = one.found is not None and one.found.compiles and outcome.compile_seconds > 0
    if one.kind == "first" and not one.step.searches and outcome.speed and outcome.compile_seconds > 0:
        run.ledger.note(compile_pace.learn(run.context.device, outcome.compile_seconds / prior))
    if one.kind is not None and (outcome.speed or compiled):
        run.costs.add(one.kind, outcome.seconds, outcome.compile_seconds, outcome.trace_seconds)
    late = _too_late(run, outcome, before[0])
    if late:
        outcome.verdict, outcome.reason = "reverted", late
        run.ledger.applied, run.current, run.context.profile, run.costs.ops = before
    run.ledger.say_displaced(before[0], outcome)
    # one write for both: a plan names what is in force, and each of these steps has its outcome
    _end(run, outcome, *captured_with(run, one, outcome))


def _too_late(run: RunState, outcome: StepOutcome, before: AppliedSteps) -> str:
    """Why a step that is faster is not kept: its compilation took so long that its proof ends after the budget; "".

    The proof compiles in fresh processes. Where a step gains MUCH, or more than all before it, the result is measured
    in this process instead.
    """
    applied, budget = run.ledger.applied, run.options.budget
    if outcome.verdict != "kept" or before.compiled or not applied.compiled:
        return ""
    proof = run.costs.final(budget, compiled=True, looks=1, recompiled=False)
    gain = math.prod(row.ratio or 1.0 for row in run.ledger.record.steps if row.verdict == "kept")
    if proof <= run.seconds_left + LATE_SHARE * budget or (outcome.ratio or 1.0) >= min(MUCH, gain):
        return ""
    return (
        f"faster, but {OUT_OF_BUDGET} of {budget:.0f} s to prove it: fresh processes that compile it take about "
        f"{proof:.0f} s, and {max(0.0, run.seconds_left):.0f} s are left"
    )


def _end(run: RunState, *outcomes: StepOutcome) -> None:
    for outcome in outcomes:
        run.ledger.add(outcome)
        run.progress.outcome(outcome)
    run.ledger.save()
