"""Steps whose gains were too small to be kept one by one, as one step: together they may be worth it.

Each gained less than what a step must gain, or less than could be told apart from nothing. Two of 1.7 and 2.1 % on a
decoding 8 B Llama (H200, 2026-11-26) are 3.8 %. A step that needs one which lost by a little is tried with it here. A
graph capture that tied is tried and kept with them: of a prompt of an 8 B Llama a gated MLP had gained 1.023 times and
the capture 1.015, and neither was kept (H200, 2026-11-28).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field, model_validator

from wavecrest.errors import PlanError
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, apply_step, structural_copy
from wavecrest.optimizer.steps.params import Params

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from wavecrest.optimizer.steps.base import Tie


class TiedStep(Params):
    """A step with its own parameters."""

    id: str
    params: dict[str, Any]


class TiedSteps(Params):
    """The steps in the order in which they are applied: each one's sites are those behind the ones before.

    `captured`: a graph capture was tried with them, which is a step of its own in the plan.
    """

    steps: Annotated[list[TiedStep], Field(min_length=1)]
    captured: bool = False

    @model_validator(mode="after")
    def _are_two(self) -> TiedSteps:
        if len(self.steps) + self.captured < 2:
            raise ValueError("there must be at least 2 steps, a graph capture among them")
        return self


class _Part(NamedTuple):
    """A step, and its sites behind the steps before it."""

    id: str
    found: Found


class JoinTies(Step):
    """Surgery that tied by a gain is tried again, all of it at once, with a graph capture that did.

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
        """The sites of each step that tied by a gain or could not be tried, behind those of the steps before it."""
        none = Found((), note="no two steps of this run have gained less than what is kept")
        if len(context.ties) < 2:
            return none
        ties = [tie for tie in context.ties if can_join(self._step(tie[0]))]
        found = self._found(context, ties)
        # what alone was no faster is joined for a step that needs it
        needed = {name for row in found for name in self._step(row.id).needs}
        useful = [(name, ratio) for name, ratio in ties if ratio is None or ratio > 1 or name in needed]
        if len(useful) < len(ties):
            found = self._found(context, useful)
        captures = [self._step(name) for name, _ in context.ties if self._step(name).phase == "capture"]
        if not found or len(found) + len(captures) < 2:
            return none
        return Found(
            (
                *(f"{self._step(row.id).title} × {len(row.found.sites)}" for row in found),
                *(step.title for step in captures),
            ),
            {
                "steps": [{"id": row.id, "params": row.found.params} for row in found],
                **({"captured": True} if captures else {}),
            },
            parts=tuple(row.found for row in found),
            captured=captures[0].find(context).params if captures else None,
        )

    def _found(self, context: StepContext, ties: Sequence[Tie]) -> list[_Part]:
        """The steps that find sites behind one another; of those that exclude each other the one that gained most."""
        assert context.model is not None
        own, parts = context.model, list[_Part]()
        made = structural_copy(own)
        try:
            for step in _in_order([self._step(name) for name, _ in ties]):
                if any(step.excludes(self._step(row.id)) for row in parts):
                    continue
                context.model = made
                # it is of another model
                context.shared.clear()
                found = step.find(context)
                if found.sites:
                    made = apply_step(made, step, found.params)
                    parts.append(_Part(step.id, found))
        finally:
            context.model = own
            context.shared.clear()
        return parts

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """The product of what each was measured at, and of what is predicted of a step that could not be tried."""
        known, measured, predicted = dict(context.ties), list[float](), list[Prediction]()
        for row, made in zip(found.params["steps"], found.parts, strict=True):
            ratio = known[row["id"]]
            if ratio is None:
                predicted.append(self._step(row["id"]).predict(made, context))
            else:
                measured.append(ratio)
        if found.captured is not None:
            measured += [ratio for name, ratio in context.ties if ratio and self._step(name).phase == "capture"]
        basis = f"measured one by one: {' × '.join(f'{ratio:.3f}' for ratio in measured)}"
        for one in predicted:
            basis += f"; {one.ratio or 1.0:.3f} by prediction: {one.basis}"
        return Prediction(math.prod(measured) * math.prod(one.ratio or 1.0 for one in predicted), basis)

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
