"""torch.compile, the default mode first and the other presets as measured candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavecrest.errors import PlanError
from wavecrest.graphs import masks
from wavecrest.graphs.inductor import PRESETS, Preset, compile_module
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext
from wavecrest.optimizer.steps.params import CompilePreset

if TYPE_CHECKING:
    from torch import nn

# shares of time that compilation removes: of elementwise work and copies by fusion, of norms and softmax, which are one
# kernel in eager already, and of launch gaps by taking Python out. From trials on an H200 and an H100 (2026-11-20 and
# 2026-11-26, the records of optimize and zoo in evidence): encoders in 16 bits came out at 0.76 to 1.15 (with
# 25 and 29 % of such work where a record says it), a Llama's prompt with 39 % and gaps of 15 % at 1.29, a MiniLM with
# gaps of 76 % at 2.0.
# Later presets are compared with compiled code: graphs take most of what is left of the gaps; packed weights, epilogues
# and a search of tile sizes gain a part of the matrix work, by guess.
FUSION_GAIN, NORM_GAIN, GAP_GAIN, GRAPH_GAIN = 0.3, 0.1, 0.7, 0.85
FREEZE_GAIN, SEARCH_GAIN, EPILOGUE_GAIN = 0.1, 0.05, 0.15
# share of SDPA's math path that fusing its softmax and copies removes: by guess, after a T5 encoder of 18 ms with a
# graph and 11 ms compiled (H200, 2026-11-27)
MATH_GAIN = 0.5


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
        self.searches = preset.thorough
        self.cures = ("launch_gaps", "norms", *(("layout",) if preset.epilogues else ()))

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
        return Found(("model",), {"preset": self.preset.name, **mask_params(context)}, self.preset.why)

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """Fusable share of the profile and launch gaps; of compiled code what this preset adds."""
        fusable, norms = context.share("elementwise", "memory"), context.share("normalisation")
        gaps = context.idle_share()
        matrix = context.share("gemm", "convolution")
        saved, basis = 0.0, "compiled already"
        if not context.compiled:
            saved = FUSION_GAIN * fusable + NORM_GAIN * norms + GAP_GAIN * gaps
            basis = f"fusable {fusable:.0%} of the time, norms {norms:.0%}, launch gaps {gaps:.0%}"
            math = context.math_share()
            if math:
                saved, basis = saved + MATH_GAIN * math, f"{basis}, SDPA's math path {math:.0%}"
        elif self.preset.mode == "reduce-overhead":
            saved, basis = GRAPH_GAIN * gaps, f"{basis}, launch gaps {gaps:.0%}"
        if self.preset.options.get("freezing"):
            saved, basis = saved + FREEZE_GAIN * matrix, f"{basis}, products with weights {matrix:.0%}"
        if self.preset.thorough:
            saved, basis = saved + SEARCH_GAIN * matrix, f"{basis}, matrix work {matrix:.0%}"
        if self.preset.epilogues:
            convolution = context.share("convolution")
            saved, basis = saved + EPILOGUE_GAIN * convolution, f"{basis}, convolution {convolution:.0%}"
        return Prediction.of_saved(saved, basis)

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Compile in place, without masks that eager does not write out."""
        masks.use(model, params.get("masks", []))
        compile_module(model, self.preset, masks.padding_argument(model) if params.get("padding") else None)
        return model


def mask_params(context: StepContext) -> dict[str, Any]:
    """The models whose masks tracing would write out, and the padding mask that the examples pass; empty if none."""
    model = context.workload.model if context.model is None else context.model
    found: dict[str, Any] = {}
    owners = masks.owners(model)
    if owners:
        found["masks"] = owners
    padding = masks.padding_argument(model)
    if padding and masks.is_given(padding, list(context.workload.buckets.values())):
        found["padding"] = padding.name
    return found


def compile_steps(*, thorough: bool) -> list[Step]:
    """One step per preset: those that compile in seconds, or those that search."""
    plain = [preset for preset in PRESETS.values() if not preset.epilogues and not preset.fusions]
    return [Compile(preset) for preset in plain if preset.thorough == thorough]
