"""The kept steps, and how they are assembled into one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wavecrest.optimizer.steps.base import PHASES, Step, structural_copy
from wavecrest.optimizer.steps.ladder import step_by_id

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Applied:
    """One step with the parameters that `apply` needs."""

    step_id: str
    params: dict[str, Any]

    @property
    def step(self) -> Step:
        """The step itself."""
        return step_by_id(self.step_id)


@dataclass(frozen=True, slots=True)
class Stack:
    """The steps kept so far, in the order in which they were kept."""

    applied: tuple[Applied, ...] = ()

    def plus(self, step: Step, params: dict[str, Any]) -> Stack:
        """This stack with one more step; steps that it excludes are taken out."""
        rest = tuple(item for item in self.applied if not step.excludes(item.step))
        return Stack((*rest, Applied(step.id, params)))

    def without(self, step_id: str) -> Stack:
        """This stack without a step."""
        return Stack(tuple(item for item in self.applied if item.step_id != step_id))

    def only(self, *phases: str) -> Stack:
        """The part of the stack in the given phases."""
        return Stack(tuple(item for item in self.applied if item.step.phase in phases))

    def ordered(self) -> list[Applied]:
        """The order of assembly: by phase, and inside a phase in the order kept."""
        return sorted(self.applied, key=lambda item: PHASES.index(item.step.phase))


def build(model: nn.Module, stack: Stack) -> nn.Module:
    """A new module with the steps of `stack` applied; `model` itself stays as it is.

    Raises:
        StepRefused: a step does not fit this model.
    """
    made = structural_copy(model)
    for item in stack.ordered():
        made = item.step.apply(made, item.params)
    return made
