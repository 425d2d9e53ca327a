"""A plan applied to a model: its steps built again, and verified again where versions differ from the plan's."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wavecrest import env, ops
from wavecrest.dispatch.lookup import misfit
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import PlanError, PlanMismatch, PlanWarning, StepRefused, WavecrestError
from wavecrest.optimizer.checking import check_applied
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, build, step_by_id
from wavecrest.optimizer.steps.params import MOST_SETTING
from wavecrest.records import decode
from wavecrest.records.renamed import current_backend

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.dispatch.op import AnyOp
    from wavecrest.measure.workload import Workload
    from wavecrest.records import DecisionRow, StepOutcome

# the least value of settings that may not be 0
LEAST = {"num_warps": 1, "num_ctas": 1}


@dataclass(frozen=True, slots=True)
class Replay:
    """A plan applied to a model: the model, the steps in force, and what was dropped, with reasons."""

    model: nn.Module
    applied: AppliedSteps
    dropped: list[str]


def replay(
    steps: Sequence[StepOutcome], workload: Workload, *, verify: bool, because: list[str], strict: bool
) -> Replay:
    """Apply the kept steps of a plan to the workload's model, which stays as it is.

    Args:
        steps: `Plan.kept()`, in the order of replay.
        workload: the model, and with `verify` the inputs to check it on.
        verify: every step must pass the accuracy gate again, or it is dropped with a PlanWarning.
        because: what differs from the plan's machine, for that warning.
        strict: raise instead of dropping a step.

    Raises:
        PlanMismatch: with `strict`, a step that no longer verifies.
        PlanError: the plan names a step that this version does not have, or parameters that a step does not take.
        StepRefused: without `verify`, a step does not fit the model.
    """
    check_plan(steps)
    applied = AppliedSteps()
    if not verify:
        for step in steps:
            applied = applied.plus(step_by_id(step.id), step.params)
        return Replay(_built(workload.model, applied), applied, [])
    gate = Gate.prepare(workload)
    dropped = []
    model = _built(workload.model, applied)
    for step in steps:
        trial = applied.plus(step_by_id(step.id), step.params)
        try:
            candidate = _built(workload.model, trial)
            problem = failures(check_applied(gate, candidate, trial, final=False))
        except StepRefused as error:
            problem = str(error)
        if problem:
            dropped.append(f"{step.id}: {problem}")
            _tell(f"step {step.id} no longer verifies ({'; '.join(because)}): {problem}", strict)
        else:
            applied, model = trial, candidate
    return Replay(model, applied, dropped)


def check_plan(steps: Iterable[StepOutcome], rows: Iterable[DecisionRow] = ()) -> None:
    """Look at everything that a plan names, before anything of it is done.

    Raises:
        PlanError: a step that this version does not have, parameters that a step does not take, a damaged row.
    """
    for step in steps:
        step_by_id(step.id).check_params(step.params)
    for row in rows:
        _key(row)


def check_environment(variables: Mapping[str, str], strict: bool) -> None:
    """Warn, or with `strict` raise PlanMismatch, if variables that a plan was measured with are not set."""
    missing = [f"{name}={value}" for name, value in variables.items() if env.get(name) != value]
    if missing:
        names = " ".join(missing)
        _tell(f"the plan was measured with {names} set before import, which is not so here", strict)


def check_ranges(workload: Workload, strict: bool) -> None:
    """Warn, or with `strict` raise PlanMismatch, if ranges of shapes are declared, which a plan does not hold."""
    if workload.ranges is not None:
        _tell("a plan holds no ranges of shapes: its model is for fixed shapes, and others compile anew", strict)


def _built(model: nn.Module, applied: AppliedSteps) -> nn.Module:
    """`build`; what a step raises for parameters that fit its schema and not the model is a refusal."""
    try:
        return build(model, applied)
    except WavecrestError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or ["(no message)"])[0]
        raise StepRefused(f"the steps do not fit this model: {type(error).__name__}: {first}") from error


def pin_dispatch(rows: Iterable[DecisionRow], strict: bool = False) -> None:
    """Pin the backends and configurations that a plan was measured with.

    Backends that are not present here are left out; so are, with a PlanWarning, rows that fit no call of this version
    (with `strict` they raise PlanMismatch).

    Raises:
        PlanError: a row names an unknown op, or its key or configuration is not one that `optimize` writes.
    """
    # all are read before the first is pinned
    for row, key in [(row, _key(row)) for row in rows]:
        op = ops.get(row.op)
        backend = current_backend(row.backend)
        if backend not in op.backends:
            continue
        config = Config(**row.config) if row.config else None
        problem = _misfit(op, key, backend, config)
        if problem:
            _tell(f"the plan's choice {backend} for {row.op} {row.key} is left out: {problem}", strict)
        else:
            op.pin(key, backend, config, "exact", "plan")


def _key(row: DecisionRow) -> tuple[Any, ...]:
    """The shape key of a row.

    Raises:
        PlanError: the row is damaged, or of an op that there is not.
    """
    place = f"the plan's dispatch row of {row.op}"
    try:
        ops.get(row.op)
        key = decode.json_of(row.key)
    except ValueError as problem:
        raise PlanError(f"{place} is damaged: {problem}") from None
    if not isinstance(key, list) or not all(part is None or isinstance(part, int | str) for part in key):
        raise PlanError(f"{place} is damaged: its key is no list of whole numbers, text, true, false and null")
    # LAUNCH_OPTIONS reach the compiler as they are; 0 means "not set" for some, and flags are 0 or 1
    beyond = {name: value for name, value in row.config.items() if not LEAST.get(name, 0) <= value <= MOST_SETTING}
    if beyond:
        raise PlanError(f"{place} is damaged: its configuration has {beyond}")
    return tuple(key)


def _misfit(op: AnyOp, key: tuple[Any, ...], backend: str, config: Config | None) -> str:
    """Why a pin would never match a call, or could not run it; or ""."""
    if op.key_fields and len(key) != len(op.key_fields):
        return f"its key has {len(key)} parts, those of this version have {len(op.key_fields)}"
    try:
        return misfit(op, key, backend, config)
    # a default configuration is computed from the parts of the key, which may be anything here
    except Exception as error:
        return f"no configuration can be made for such a key ({type(error).__name__}: {error})"


def _tell(message: str, strict: bool) -> None:
    if strict:
        raise PlanMismatch(message)
    warnings.warn(message, PlanWarning, stacklevel=4)
