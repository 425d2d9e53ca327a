"""A plan applied to a model: its steps built again, and verified again where versions differ from the plan's."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wavecrest import env, ops
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import PlanMismatch, PlanWarning, StepRefused
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps import AppliedSteps, build, step_by_id
from wavecrest.optimizer.steps.precision import gate_dtype
from wavecrest.records import decode
from wavecrest.records.renamed import current_backend

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.measure.workload import Workload
    from wavecrest.records import DecisionRow, StepOutcome


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
        PlanError: the plan names a step that this version does not have.
        StepRefused: without `verify`, a step does not fit the model.
    """
    applied = AppliedSteps()
    if not verify:
        for step in steps:
            applied = applied.plus(step_by_id(step.id), step.params)
        return Replay(build(workload.model, applied), applied, [])
    gate = Gate.prepare(workload)
    dropped = []
    model = build(workload.model, applied)
    for step in steps:
        trial = applied.plus(step_by_id(step.id), step.params)
        try:
            candidate = build(workload.model, trial)
            gate.dtype = gate_dtype(item.step_id for item in trial.steps) or workload.dtype
            problem = failures(gate.check(candidate))
        except StepRefused as error:
            problem = str(error)
        if problem:
            dropped.append(f"{step.id}: {problem}")
            _tell(f"step {step.id} no longer verifies ({'; '.join(because)}): {problem}", strict)
        else:
            applied, model = trial, candidate
    return Replay(model, applied, dropped)


def check_environment(variables: Mapping[str, str], strict: bool) -> None:
    """Warn, or with `strict` raise PlanMismatch, if variables that a plan was measured with are not set."""
    missing = [f"{name}={value}" for name, value in variables.items() if env.get(name) != value]
    if missing:
        names = " ".join(missing)
        _tell(f"the plan was measured with {names} set before import, which is not so here", strict)


def pin_dispatch(rows: Iterable[DecisionRow]) -> None:
    """Pin the backends and configurations that a plan was measured with; backends not present here are left out."""
    for row in rows:
        op = ops.get(row.op)
        if current_backend(row.backend) in op.backends:
            op.pin(
                tuple(decode.json_of(row.key)),
                row.backend,
                Config(**row.config) if row.config else None,
                "exact",
                "plan",
            )


def _tell(message: str, strict: bool) -> None:
    if strict:
        raise PlanMismatch(message)
    warnings.warn(message, PlanWarning, stacklevel=4)
