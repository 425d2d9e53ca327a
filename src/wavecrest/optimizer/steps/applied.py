"""The kept steps, and how they are assembled into one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wavecrest.errors import Refused
from wavecrest.optimizer.steps.base import PHASES, TREE, Step, apply_step, structural_copy
from wavecrest.optimizer.steps.ladder import step_by_id
from wavecrest.optimizer.steps.replace_norm import ReplaceNorm, own_norms

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class AppliedStep:
    """One step with the parameters that `apply` needs."""

    step_id: str
    params: dict[str, Any]

    @property
    def step(self) -> Step:
        """The step itself."""
        return step_by_id(self.step_id)


@dataclass(frozen=True, slots=True)
class AppliedSteps:
    """The steps kept so far, in the order in which they were kept."""

    steps: tuple[AppliedStep, ...] = ()

    def plus(self, step: Step, params: dict[str, Any]) -> AppliedSteps:
        """These steps with one more step; steps that it excludes, or whose place it takes, are taken out."""
        gone = params.get("instead_of", ())
        rest = tuple(item for item in self.steps if not step.excludes(item.step) and item.step_id not in gone)
        return AppliedSteps((*rest, AppliedStep(step.id, params)))

    def without(self, step_id: str) -> AppliedSteps:
        """These steps without one."""
        return AppliedSteps(tuple(item for item in self.steps if item.step_id != step_id))

    def only(self, *phases: str) -> AppliedSteps:
        """The steps of the given phases."""
        return AppliedSteps(tuple(item for item in self.steps if item.step.phase in phases))

    @property
    def compiled(self) -> bool:
        """Whether the model is compiled: by a step, or by a capture that compiles what it records."""
        return any(item.step.phase == "compile" or bool(item.params.get("compile")) for item in self.steps)

    @property
    def joined(self) -> set[str]:
        """The ids of steps that are in force as parts of a joined one."""
        return {row["id"] for item in self.steps if item.step.joins for row in item.params["steps"]}

    def ordered(self) -> list[AppliedStep]:
        """The order of assembly: by phase, and inside a phase in the order kept."""
        return sorted(self.steps, key=lambda item: PHASES.index(item.step.phase))


def build(model: nn.Module, applied: AppliedSteps) -> nn.Module:
    """A new module with these steps applied; `model` itself stays as it is.

    Raises:
        PlanError: a step does not take its parameters.
        StepRefused: a step does not fit this model.
    """
    made = structural_copy(model)
    for item in applied.ordered():
        made = apply_step(made, item.step, item.params)
    return made


def without_norms(model: nn.Module, applied: AppliedSteps) -> nn.Module | None:
    """The model with these steps but for the one that made its layer norms; None where no step alone made them all."""
    tree = applied.only(*TREE)
    if tree.without(ReplaceNorm.id) == tree:
        return None
    try:
        made = build(model, tree.without(ReplaceNorm.id))
    except Refused:
        # another step changes what it made
        return None
    return None if own_norms(made)[0] else made
