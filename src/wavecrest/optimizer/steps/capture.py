"""Whole-model graph capture: one replay instead of hundreds of launches.

On top of compilation this does what mode="reduce-overhead" does, without its cost on every call (Dynamo's guards, the
graph trees' bookkeeping): a replay compares only the shapes of the arguments. 1.14 times as fast on the decode step of
a 1.2 B Llama (one H200, 2026-11-20, torch 2.11; evidence/nvidia-h200/2026-11-20_optimize_llama_decode.jsonl.gz).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavecrest.errors import StepRefused
from wavecrest.graphs import masks
from wavecrest.graphs.capture import CapturedModule
from wavecrest.graphs.inductor import PRESETS, compile_module
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext
from wavecrest.optimizer.steps.compile import fused_share, mask_params
from wavecrest.optimizer.steps.params import CaptureBuckets

if TYPE_CHECKING:
    from torch import nn


class CaptureGraph(Step):
    """Capture every bucket in a graph and replay it; outputs are copied out."""

    id = "capture"
    title = "graph capture"
    level = 5
    phase = "capture"
    group = "capture"
    params_type = CaptureBuckets
    cures = ("launch_gaps",)

    def find(self, context: StepContext) -> Found:
        """On a GPU; the model must have no data-dependent control flow, which capture itself finds out."""
        if context.device.kind == "cpu":
            return Found((), note="graphs exist on GPUs only")
        # what eager does may be what no graph records (a constant that a DeBERTa makes on the host in each call), and
        # gone from compiled code: compiled for its own sake first, that model had no time left of 90 s for a graph
        compiles = context.uncapturable
        params = {
            "buckets": list(context.workload.buckets), "compile": "default" if context.compiled or compiles else ""
        }  # fmt: skip
        params |= mask_params(context)
        title = "compile default + graph capture" if compiles else ""
        return Found(tuple(context.workload.buckets), params, compiles=compiles, title=title)

    def excludes(self, other: Step) -> bool:
        """Takes the place of inductor's own capture: code that is captured already cannot be captured again."""
        return other.id == "compile:reduce-overhead" or super().excludes(other)

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """Launch gaps go; and what compilation fuses, where it is compiled for the capture."""
        idle = context.idle_share()
        saved, basis = 0.9 * idle, f"launch gaps are {idle:.0%} of the wall time"
        if found.compiles:
            fused, told = fused_share(context)
            saved, basis = saved + fused, f"{basis}, {told}"
        return Prediction.of_saved(saved, basis)

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Wrap; capture happens at the first call of each bucket. What is not compiled yet is compiled by default.

        Raises:
            StepRefused: the model is on the CPU, where a capture would hold nothing, and replays old answers.
        """
        if any(tensor.device.type == "cpu" for tensor in model.parameters()):
            raise StepRefused("graphs exist on GPUs only, and the model has parameters on the CPU")
        masks.use(model, params.get("masks", []))
        if model._compiled_call_impl is None and params.get("compile"):
            compile_module(model, PRESETS[params["compile"]])
        padding = masks.padding_argument(model) if params.get("padding") else None
        return CapturedModule(model, max_graphs=max(16, 2 * len(params["buckets"])), padding=padding)
