"""Whole-model graph capture: one replay instead of hundreds of launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavecrest.graphs.capture import CapturedModule
from wavecrest.passes.base import Found, Prediction, Step, StepContext

if TYPE_CHECKING:
    from torch import nn


class CaptureGraph(Step):
    """Capture every bucket in a graph and replay it; outputs are copied out."""

    id = "capture"
    title = "graph capture"
    level = 5
    phase = "capture"
    group = "capture"

    def find(self, context: StepContext) -> Found:
        """On a GPU; the model must have no data-dependent control flow, which capture itself finds out."""
        if context.device.kind == "cpu":
            return Found((), note="graphs exist on GPUs only")
        return Found(tuple(context.workload.buckets), {"buckets": list(context.workload.buckets)})

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """Launch gaps go."""
        idle = context.idle_share()
        return Prediction(1 / (1 - 0.9 * min(idle, 0.9)), f"launch gaps are {idle:.0%} of the wall time")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Wrap; capture happens at the first call of each bucket."""
        return CapturedModule(model, max_graphs=max(16, 2 * len(params["buckets"])))
