"""The steps of the ladder: one file per step, each find → predict → apply; optimize.py measures and decides."""

from wavecrest.passes.base import Found, Prediction, Step, StepContext, structural_copy
from wavecrest.passes.ladder import step_by_id, steps_up_to
from wavecrest.passes.stack import Applied, Stack, build

__all__ = [
    "Applied",
    "Found",
    "Prediction",
    "Stack",
    "Step",
    "StepContext",
    "build",
    "step_by_id",
    "steps_up_to",
    "structural_copy",
]
