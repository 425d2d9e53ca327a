"""A plan applied to a model: its steps built again, and verified again where versions differ from the plan's."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wavecrest import env
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import PlanMismatch, StepRefused
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.plan import Plan, PlanWarning
from wavecrest.optimizer.steps import Stack, build, step_by_id
from wavecrest.optimizer.steps.precision import gate_dtype

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.measure.workload import Workload


@dataclass(frozen=True, slots=True)
class Replay:
    """A plan applied to a model: the model, the stack in force, and what was dropped, with reasons."""

    model: nn.Module
    stack: Stack
    dropped: list[str]


def replay(plan: Plan, workload: Workload, *, verify: bool, because: list[str], strict: bool) -> Replay:
    """Apply the plan's kept steps to the workload's model, which stays as it is.

    Args:
        plan: whose steps.
        workload: the model, and with `verify` the inputs to check it on.
        verify: every step must pass the accuracy gate again, or it is dropped with a PlanWarning.
        because: what differs from the plan's machine, for that warning.
        strict: raise instead of dropping a step.

    Raises:
        PlanMismatch: with `strict`, a step that no longer verifies.
        PlanError: the plan names a step that this version does not have.
        StepRefused: without `verify`, a step does not fit the model.
    """
    stack = Stack()
    kept = plan.kept()
    if not verify:
        for step in kept:
            stack = stack.plus(step_by_id(step.id), step.params)
        return Replay(build(workload.model, stack), stack, [])
    gate = Gate.prepare(workload)
    dropped = []
    model = build(workload.model, stack)
    for step in kept:
        trial = stack.plus(step_by_id(step.id), step.params)
        try:
            candidate = build(workload.model, trial)
            gate.dtype = gate_dtype(item.step_id for item in trial.applied) or workload.dtype
            problem = failures(gate.check(candidate))
        except StepRefused as error:
            problem = str(error)
        if problem:
            dropped.append(f"{step.id}: {problem}")
            _tell(f"step {step.id} no longer verifies ({'; '.join(because)}): {problem}", strict)
        else:
            stack, model = trial, candidate
    return Replay(model, stack, dropped)


def check_environment(plan: Plan, strict: bool) -> None:
    """Warn, or with `strict` raise PlanMismatch, if variables that the plan was measured with are not set."""
    missing = [row for row in plan.environment if env.get(row.name) != row.value]
    if missing:
        names = " ".join(f"{row.name}={row.value}" for row in missing)
        _tell(f"the plan was measured with {names} set before import, which is not so here", strict)


def pin_dispatch(plan: Plan) -> None:
    """Pin the backends and configurations that the plan was measured with; backends not present here are left out."""
    for row in plan.dispatch:
        op = registry.get(row.op)
        if row.backend in op.backends:
            op.pin(
                tuple(json.loads(row.key)), row.backend, Config(**row.config) if row.config else None, "exact", "plan"
            )


def _tell(message: str, strict: bool) -> None:
    if strict:
        raise PlanMismatch(message)
    warnings.warn(message, PlanWarning, stacklevel=4)
