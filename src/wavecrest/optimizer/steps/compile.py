"""torch.compile, the default mode first and the other presets as measured candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavecrest.errors import PlanError
from wavecrest.graphs.inductor import PRESETS, Preset, compile_module
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext
from wavecrest.optimizer.steps.params import CompilePreset

if TYPE_CHECKING:
    from torch import nn

# shares of time that compilation typically removes: of elementwise and normalisation work by fusion, of launch gaps by
# taking Python out. A model for ordering expectations, not a measurement.
FUSION_GAIN = 0.6
GAP_GAIN = 0.7
# a search at compile time against a plain compilation: 2 to 5 times as long for a 16-layer Llama, over 6 times for a
# float32 BERT with two buckets (H200, 2026-11-20)
SEARCH_FACTOR = 6.0


class Compile(Step):
    """Compile the whole model with one preset."""

    level = 2
    phase = "compile"
    group = "compile"
    params_type = CompilePreset

    def __init__(self, preset: Preset) -> None:
        self.preset = preset
        self.id = f"compile:{preset.name}"
        self.title = preset.title

    def check_params(self, params: dict[str, Any]) -> list[str]:
        """The preset must be this step's own."""
        found = super().check_params(params)
        if params["preset"] != self.preset.name:
            raise PlanError(f"parameters of step {self.id}: preset is {params['preset']!r}")
        return found

    def excludes(self, other: Step) -> bool:
        """Another preset; and whole-model capture, where the preset captures by itself."""
        return super().excludes(other) or (self.preset.mode == "reduce-overhead" and other.group == "capture")

    def find(self, context: StepContext) -> Found:
        """Applies to every model on the preset's devices."""
        if context.device.vendor not in self.preset.devices:
            return Found((), note=f"not tried on {context.device.vendor}")
        needed = SEARCH_FACTOR * context.compile_seconds if self.preset.thorough else 0.0
        if needed > context.seconds_left:
            return Found(
                (),
                note=f"no time left in the budget: this preset searches at compile time, about {needed:.0f} s after a "
                f"plain compilation of {context.compile_seconds:.0f} s, and {context.seconds_left:.0f} s are left",
            )
        return Found(("model",), {"preset": self.preset.name}, self.preset.why)

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """Fusable share of the profile and launch gaps."""
        if context.compiled:
            return Prediction(None, "compiled already: what this preset adds is measured, not modelled")
        fusable = context.share("elementwise", "normalisation", "memory")
        saved = FUSION_GAIN * fusable + GAP_GAIN * context.idle_share()
        return Prediction(
            1 / (1 - min(saved, 0.8)), f"fusable {fusable:.0%} of the time, launch gaps {context.idle_share():.0%}"
        )

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Compile in place."""
        compile_module(model, self.preset)
        return model


def compile_steps(*, thorough: bool) -> list[Step]:
    """One step per preset: those that compile in seconds, or those that search."""
    return [Compile(preset) for preset in PRESETS.values() if preset.thorough == thorough]
