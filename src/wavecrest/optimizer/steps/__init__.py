"""The steps of the ladder: one file per step, each find → predict → apply; optimize.py measures and decides."""

from wavecrest.optimizer.steps.applied import AppliedStep, AppliedSteps, build
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, structural_copy
from wavecrest.optimizer.steps.ladder import step_by_id, steps_up_to

__all__ = [
    "AppliedStep",
    "AppliedSteps",
    "Found",
    "Prediction",
    "Step",
    "StepContext",
    "build",
    "step_by_id",
    "steps_up_to",
    "structural_copy",
]
