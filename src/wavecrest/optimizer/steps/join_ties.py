"""Steps whose gains were too small to be kept one by one, as one step: together they may be worth it.

Each gained less than what a step must gain, or less than could be told apart from nothing. Two of 1.7 and 2.1 % on a
decoding 8 B Llama (H200, 2026-11-26) are 3.8 %.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from wavecrest.errors import PlanError
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, apply_step, structural_copy
from wavecrest.optimizer.steps.params import Params

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn


class TiedStep(Params):
    """A step with its own parameters."""

    id: str
    params: dict[str, Any]


class TiedSteps(Params):
    """The steps in the order in which they are applied: each one's sites are those behind the ones before."""

    steps: Annotated[list[TiedStep], Field(min_length=2)]


class JoinTies(Step):
    """Surgery that tied by a gain is tried again, all of it at once.

    Args:
        step_by_id: finds a step by the id in a plan, or raises PlanError.
    """

    id = "join_ties"
    title = "small gains together"
    level = 3
    params_type = TiedSteps
    joins = True

    def __init__(self, step_by_id: Callable[[str], Step]) -> None:
        self._step = step_by_id

    def check_params(self, params: dict[str, Any]) -> list[str]:
        """No paths: those of a step may be made by the step before it, so that `apply` looks them up.

        Raises:
            PlanError: as `Step.check_params`; also a step that is not surgery, or parameters that it does not take.
        """
        super().check_params(params)
        for row in params["steps"]:
            step = self._step(row["id"])
            if not can_join(step):
                raise PlanError(
                    f"parameters of step {self.id}: {step.id} is no surgery on modules, and cannot be joined"
                )
            step.check_params(row["params"])
        return []

    def find(self, context: StepContext) -> Found:
        """The sites of each step that tied by a gain, on the model with those before it applied."""
        assert context.model is not None
        own, joined = context.model, list[dict[str, Any]]()
        titles: list[str] = []
        made = structural_copy(own)
        try:
            for step in _in_order([self._step(name) for name, _ in context.ties]):
                if any(step.excludes(self._step(row["id"])) for row in joined):
                    continue
                context.model = made
                # it is of another model
                context.shared.clear()
                found = step.find(context)
                if found.sites:
                    made = apply_step(made, step, found.params)
                    joined.append({"id": step.id, "params": found.params})
                    titles.append(f"{step.title} × {len(found.sites)}")
        finally:
            context.model = own
            context.shared.clear()
        if len(joined) < 2:
            return Found((), note="no two steps of this run have gained less than what is kept")
        return Found(tuple(titles), {"steps": joined})

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """The product of what each was measured at."""
        measured = dict(context.ties)
        ratios = [measured[row["id"]] for row in found.params["steps"]]
        return Prediction(math.prod(ratios), f"measured one by one: {' × '.join(f'{ratio:.3f}' for ratio in ratios)}")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """One after the other."""
        for row in params["steps"]:
            model = apply_step(model, self._step(row["id"]), row["params"])
        return model


def _in_order(steps: Sequence[Step]) -> Iterator[Step]:
    """The steps as given, each behind those that it is tried after: they make its sites."""
    left = list(steps)
    while left:
        names = {step.id for step in left}
        chosen = next((step for step in left if not names.intersection(step.tried_after)), left[0])
        left.remove(chosen)
        yield chosen


def can_join(step: Step) -> bool:
    """Whether a step is surgery on modules that is looked for without tracing the model."""
    return step.phase == "surgery" and not step.joins
