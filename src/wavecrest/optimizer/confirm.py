"""A proof bundle checked by somebody who does not trust its maker: `wavecrest verify --bundle`.

| at hand | checked |
|---|---|
| the bundle alone | figures and verdicts computed again from the samples; plan, record and manifest agree |
| the workload too | sources, weights and inputs against their hashes; the plan replayed and held to the gate |
| and the same kind of machine | the speed, measured again in fresh processes that alternate |

Samples that were made up agree with figures that were made of them: only measuring again finds those, and every check
says what it did not look at.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from wavecrest import hardware
from wavecrest.errors import PlanMismatch, StepRefused, WavecrestError
from wavecrest.measure import timing, workload
from wavecrest.optimizer import bundle as bundles
from wavecrest.optimizer import verify
from wavecrest.optimizer.alternate import LOOKS
from wavecrest.optimizer.bundle import Bundle
from wavecrest.optimizer.checking import check_applied
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.plan import Fingerprint, ModelIdentity
from wavecrest.optimizer.recompute import recompute
from wavecrest.optimizer.replay import replay
from wavecrest.optimizer.steps.precision import gate_dtype
from wavecrest.records import BundleRecord, Check, VerifyRecord, provenance

if TYPE_CHECKING:
    from wavecrest.measure.workload import Workload

Outcome = Literal["confirmed", "not confirmed", "other machine"]

NEEDS_WORKLOAD = "needs the workload; name it on the command line"


def run(
    path: Path,
    spec: str | None = None,
    *,
    processes: int | None = None,
    seconds: float = 5.0,
    device: str | None = None,
    on_phase: Callable[[str], None] | None = None,
    command: str | None = None,
) -> BundleRecord:
    """Check a bundle.

    Args:
        path: the bundle. Nothing in it is run, and the workload that it names is not loaded.
        spec: the checker's own copy of the workload, as `wavecrest.measure.workload.load` takes it; None checks what
            can be checked without.
        processes: fresh processes a side; None takes as many as a run does, until they decide (`alternate.LOOKS`).
        seconds: sampling time a bucket and process.
        device: torch device name; None takes the workload's own.
        on_phase: is told what is checked next.
        command: the command line, for the record.

    Raises:
        BundleError, RecordError, PlanError: the bundle is damaged, foreign or newer than this version.
        PlanMismatch: it is of another model.
        WorkloadError: the workload cannot be loaded.
        EnvironmentProblem: a process died.
    """
    say = on_phase or (lambda _: None)
    say("reading the bundle")
    held = bundles.read(path)
    say("computing the figures again")
    checks = [_check_manifest(held), *recompute(held.record, held.plan)]
    verified, foreign = None, ""
    if spec is None:
        found = hardware.detect(device)
        checks += [Check(what=what, passed=None, detail=NEEDS_WORKLOAD) for what in ("workload", "answers", "speed")]
    else:
        loaded = workload.load(spec, device=device)
        found = hardware.detect(loaded.device)
        foreign = _other_machine(held, found)
        say("hashing the workload, running the accuracy gate")
        checks += _check_workload(held, loaded, spec, found)
        row, verified = _check_speed(held, loaded, spec, foreign, checks, processes, seconds, say)
        checks.append(row)
    checks.append(Check(what="profile and memory", passed=None, detail="no claim rests on them"))
    outcome, reason = _outcome(checks, foreign)
    if outcome == "not confirmed" and held.manifest.source != provenance.source():
        reason += f"; it was made by other sources than these: check it with wavecrest {_made_by(held)} too"
    return BundleRecord(
        header=provenance.header(found, command=command),
        bundle=path.name,
        content=held.content,
        workload=held.record.workload,
        claim=_claim(held),
        outcome=outcome,
        reason=reason,
        checks=checks,
        verified=verified,
    )


def _outcome(checks: list[Check], foreign: str) -> tuple[Outcome, str]:
    failed = [row for row in checks if row.passed is False]
    if failed:
        more = f" ({len(failed)} parts fail)" if len(failed) > 1 else ""
        return "not confirmed", f"{failed[0].what}: {failed[0].detail}{more}"
    done = ", ".join(row.what for row in checks if row.passed)
    left = ", ".join(row.what for row in checks if row.passed is None)
    reason = f"checked: {done}; not checked: {left}"
    return ("other machine", f"{foreign}; {reason}") if foreign else ("confirmed", reason)


def _claim(held: Bundle) -> str:
    """The claim of a bundle, as a sentence."""
    result = held.record.result
    if result is None:
        return "nothing: the run was interrupted"
    return f"{result.verdict}: {result.reason}" if result.reason else result.verdict


def _check_manifest(held: Bundle) -> Check:
    """Manifest and record are of one run."""
    manifest, record, problems = held.manifest, held.record, []
    header, gate = record.header, record.gate
    if manifest.source != header.source:
        problems.append(f"it names source {manifest.source}, and its record {header.source}")
    if manifest.wavecrest != header.versions.wavecrest or manifest.created != header.created:
        problems.append("it is of another version or time than its record")
    if gate is not None and manifest.seed != gate.seed:
        problems.append(f"it names seed {manifest.seed}, and its record {gate.seed}")
    drawn = {row.bucket: [kind for kind, _ in row.drawn] for row in manifest.inputs}
    if gate is not None and drawn != {row.bucket: row.values for row in gate.buckets}:
        problems.append("its values are of other buckets or kinds than those of its record")
    same = manifest.source == provenance.source()
    code = "the same sources" if same else f"wavecrest {_made_by(held)}, not as here"
    return Check(what="manifest", passed=not problems, detail="; ".join(problems) or f"made by {code}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _made_by(held: Bundle) -> str:
    return f"{held.manifest.wavecrest} (source {held.manifest.source})"


def _other_machine(held: Bundle, found: hardware.Device) -> str:
    """How the machine differs from the bundle's in what speed depends on, or ""."""
    theirs, mine = held.plan.fingerprint, Fingerprint.of(found)
    if (theirs.arch, theirs.device, theirs.compute_units) == (mine.arch, mine.device, mine.compute_units):
        return ""
    return f"it was measured on {_machine(theirs)}, this is {_machine(mine)}"


def _machine(of: Fingerprint) -> str:
    return f"{of.arch} ({of.device}, {of.compute_units} units)"


def _check_workload(held: Bundle, loaded: Workload, spec: str, found: hardware.Device) -> list[Check]:
    """Sources, weights and inputs against their hashes, and the answers of the replayed plan.

    Raises:
        PlanMismatch: the bundle is of another model.
    """
    manifest, plan = held.manifest, held.plan
    model = ModelIdentity.of(loaded.model, loaded.dtype)
    if model.structure != plan.model.structure:
        raise PlanMismatch(
            f"the bundle is of {plan.model.cls} ({plan.model.parameters:,} parameters, {plan.model.dtype}), {spec} is "
            f"{model.cls} ({model.parameters:,} parameters, {model.dtype}) with other modules or shapes"
        )
    # numbers drawn at random are the same on one kind of device with one torch
    mine = Fingerprint.of(found)
    strict = (mine.arch, mine.torch) == (plan.fingerprint.arch, plan.fingerprint.torch)
    changed = bundles.compare_sources(manifest.sources, spec)
    sources = Check(what="sources", passed=None, detail="the model was given in memory")
    if manifest.sources:
        detail = f"other content: {', '.join(changed)}" if changed else ", ".join(manifest.sources)
        sources = Check(what="sources", passed=not changed, detail=detail)
    rows = [sources, _hashes("weights", manifest.weights == bundles.hash_weights(loaded.model), strict)]
    gate = Gate.prepare(loaded, dtype=gate_dtype(plan.stack), seed=manifest.seed)
    rows.append(_hashes("inputs", _same_inputs(manifest.inputs, bundles.hash_inputs(loaded, gate)), strict))
    rows.append(_check_answers(held, loaded, gate, bool(_other_machine(held, found))))
    return rows


def _same_inputs(claimed: Sequence[bundles.InputHashes], here: Sequence[bundles.InputHashes]) -> bool:
    """Whether examples and drawn values are the same; kinds that only one side had the time for are left out."""
    if [row.bucket for row in claimed] != [row.bucket for row in here]:
        return False
    for theirs, mine in zip(claimed, here, strict=True):
        both = {kind for kind, _ in theirs.drawn} & {kind for kind, _ in mine.drawn}
        drawn = [[row for row in side.drawn if row[0] in both] for side in (theirs, mine)]
        if theirs.example != mine.example or drawn[0] != drawn[1]:
            return False
    return True


def _hashes(what: str, same: bool, strict: bool) -> Check:
    if same:
        return Check(what=what, passed=True, detail="the same bits")
    if strict:
        return Check(what=what, passed=False, detail="other bits; a workload that draws numbers must set its seed")
    return Check(what=what, passed=None, detail="other bits, as another device or torch may draw other numbers")


def _check_answers(held: Bundle, loaded: Workload, gate: Gate, foreign: bool) -> Check:
    """The plan replayed, and held to the gate with the values of the bundle's seed."""
    try:
        made = replay(held.plan.kept(), loaded, verify=False, because=[], strict=False)
    except WavecrestError as problem:
        # a step for another device says so; here it must fit
        refused = foreign and isinstance(problem, StepRefused)
        return Check(what="answers", passed=None if refused else False, detail=f"the plan does not replay: {problem}")
    if not held.plan.stack:
        return Check(what="answers", passed=True, detail="no step is in force: they are the original's own")
    before = gate.summary.calls
    try:
        rows = check_applied(gate, made.model, made.applied, final=True)
    except StepRefused as problem:
        return Check(what="answers", passed=False, detail=str(problem))
    wrong = failures(rows)
    held_to = f"{_count(len(rows), 'output')} within the limits over {_count(gate.summary.calls - before, 'call')}"
    return Check(what="answers", passed=not wrong, detail=wrong or f"{held_to}, seed {gate.seed}")


def _check_speed(
    held: Bundle,
    loaded: Workload,
    spec: str,
    foreign: str,
    checks: list[Check],
    processes: int | None,
    seconds: float,
    say: Callable[[str], None],
) -> tuple[Check, VerifyRecord | None]:
    """The claim measured again, where this is the machine for it."""
    plan, result = held.plan, held.record.result
    reason = ""
    if foreign:
        reason = f"{foreign}; a speed-up is of one kind of machine"
    elif result is None or not (plan.stack or plan.environment):
        reason = "nothing is in force that could change it"
    elif any(row.passed is False for row in checks):
        reason = "not measured: something else is not confirmed"
    if reason or result is None:
        return Check(what="speed", passed=None, detail=reason), None
    say("measuring the speed in fresh processes")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / bundles.PLAN
        plan.save(copy)
        found = verify.run(
            spec,
            copy,
            processes=processes or max(LOOKS),
            looks=LOOKS if processes is None else None,
            min_gain=held.record.min_gain,
            seconds=seconds,
            device=loaded.device,
        )
    found = found.model_copy(update={"plan": bundles.PLAN})
    passed, detail = _judge(held, found)
    return Check(what="speed", passed=passed, detail=detail), found


def _judge(held: Bundle, found: VerifyRecord) -> tuple[bool, str]:
    """Whether a measurement here supports the claim, and why."""
    result, gain = held.record.result, held.record.min_gain
    if not found.passed:
        return False, found.reason
    if result is None or result.verdict != "faster":
        return True, f"nothing is claimed, and it is not slower here: {found.reason}"
    if found.ci is None:
        return False, f"{found.reason}; give at least two --processes"
    claimed = f"the claim is {result.ratio:.3f}× {result.ci}, measured here {found.ratio:.3f}× {found.ci}"
    if found.ci.high < result.ci.low:
        return False, f"{claimed}: less than claimed"
    if timing.keeps(found.ci, gain):
        # an interval may be as wide as its maker likes: within it, the number in front is not confirmed
        beyond = f"; {result.ratio:.3f}× is not" if result.ratio > found.ci.high else ""
        return True, f"{claimed}: faster by at least {gain:.0%} here too{beyond}"
    return False, f"{claimed}: no gain of {gain:.0%} is proven here; run again on a quiet machine, or --processes more"
