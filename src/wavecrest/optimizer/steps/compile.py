"""torch.compile, the default mode first and the other presets as measured candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavecrest.errors import PlanError
from wavecrest.graphs import masks
from wavecrest.graphs.inductor import PRESETS, Preset, compile_module
from wavecrest.optimizer.options import COMPILE_LEVEL
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext
from wavecrest.optimizer.steps.params import CompilePreset
from wavecrest.optimizer.steps.replace_norm import ReplaceNorm

if TYPE_CHECKING:
    from torch import nn

# shares of time that compilation removes: of elementwise work and copies by fusion, of norms and softmax, which are one
# kernel in eager already, and of launch gaps by taking Python out. A graph that is replayed has no Python in it: an MLP
# whose replays waited 49 to 59 % of the time gained 4 %. An activation or an addition that stands alone has nothing to
# be fused with, which is LONE_WORK of the time. From 35 trials of 26 models on H200s (2026-11-27, `python -m
# benchmarks.zoo --device cuda --models … --budget …`, evidence/nvidia-h200/2026-11-27_zoo_*.jsonl.gz), and 8 figures of
# six encoders without norms of wavecrest: two trials (a RoBERTa on an H200, a BERT on an H100, 2026-11-26) and six
# estimates from the times of peers in these records. The four constants of fusion, lone work, norms and own norms,
# fitted on half of the models, were off by 0.12 of the logarithm on the other half, those of before by 0.19; that the
# planner gets more out of a budget is not shown.
# Later presets are compared with compiled code: packed weights, epilogues and a search of tile sizes gain a part of the
# matrix work, by guess.
FUSION_GAIN, NORM_GAIN, GAP_GAIN = 0.8, 0.3, 0.7
LONE_WORK = 0.1
FREEZE_GAIN, SEARCH_GAIN, EPILOGUE_GAIN = 0.1, 0.05, 0.15
# of norms, where batch norms are folded into convolutions, which an activation alone joins too: three networks of
# images came out at 1.7 to 3.4 (the same records)
FOLDED_GAIN = 0.9
# share of time that compilation loses again where layer norms are kernels of wavecrest, which it cannot join to the
# additions beside them: six encoders came out at 0.82 to 0.97, and at 0.91 to 1.15 without (the same figures). RMS
# norms, which eager models write out as elementwise work, lost nothing: 1.05 to 1.16
OWN_NORM_LOSS = 0.15
# share of SDPA's math path that fusing its softmax and copies removes: by guess, after a T5 encoder of 18 ms with a
# graph and 11 ms compiled (H200, 2026-11-27). Kernels of that path are elementwise work and copies too: the larger of
# the two gains counts, as both together promised that encoder 3.5 times, of which 2.0 came
MATH_GAIN = 0.5


class Compile(Step):
    """Compile the whole model with one preset."""

    level = COMPILE_LEVEL
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

    def instead_of(self, context: StepContext) -> tuple[str, ...]:
        """Layer norms that are kernels of wavecrest, as Inductor joins PyTorch's to what is beside them.

        A Swin-T took 4.15 ms with them and 3.81 without, and 44 and 37 s to compile (one H200, 2026-11-28, no record).
        """
        goes = context.norms_can_go and not context.compiled and self.preset.fusions != "graph"
        return (ReplaceNorm.id,) if goes else ()

    def find(self, context: StepContext) -> Found:
        """Applies to every model on the preset's devices."""
        if context.device.vendor not in self.preset.devices:
            return Found((), note=f"not tried on {context.device.vendor}")
        if self.preset.mode == "reduce-overhead":
            # refused by the gate in 15 of 15 trials of 2026-11-26 and 2026-11-27, after up to 19 s each
            # (evidence/nvidia-h100/2026-11-26_*.jsonl.gz, evidence/nvidia-h200/2026-11-2[67]_*.jsonl.gz)
            return Found(
                (),
                note="an answer that the caller holds is overwritten by the next call (rule held); graph capture "
                "replays the compiled model too, and copies answers out",
            )
        if self.preset.name == "default" and context.compiled_by_capture:
            return Found((), note="the model is compiled so already, for its capture")
        params, why = {"preset": self.preset.name, **mask_params(context)}, self.preset.why
        if instead := self.instead_of(context):
            params["instead_of"] = list(instead)
            why = f"{why}; in place of {ReplaceNorm.title}, as Inductor joins layer norms to what is beside them"
        return Found(("model",), params, why)

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """Fusable share of the profile and launch gaps; of compiled code what this preset adds."""
        return Prediction.of_saved(*self._saved(context))

    def _saved(self, context: StepContext) -> tuple[float, str]:
        """The share of a call's time that is expected to go, below 0 where it gets longer, and what it rests on."""
        gaps = context.idle_share()
        matrix = context.share("gemm", "convolution")
        saved, basis = 0.0, "compiled already"
        if not context.compiled:
            saved, basis = fused_share(context, folds=self.preset.epilogues)
            saved += gap_gain(context) * gaps
            basis = f"{basis}, launch gaps {gaps:.0%}" + (" of a graph" if context.captured else "")
        if self.preset.options.get("freezing"):
            saved, basis = saved + FREEZE_GAIN * matrix, f"{basis}, products with weights {matrix:.0%}"
        if self.preset.thorough:
            saved, basis = saved + SEARCH_GAIN * matrix, f"{basis}, matrix work {matrix:.0%}"
        if self.preset.epilogues:
            convolution = context.share("convolution")
            saved, basis = saved + EPILOGUE_GAIN * convolution, f"{basis}, convolution {convolution:.0%}"
        return saved, basis

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Compile in place, without masks that eager does not write out."""
        masks.use(model, params.get("masks", []))
        compile_module(model, self.preset, masks.padding_argument(model) if params.get("padding") else None)
        return model


def fused_share(context: StepContext, *, folds: bool = False) -> tuple[float, str]:
    """The share of a call's time that fusion takes out, below 0 where it adds some, and what it rests on.

    Args:
        context: of the model, which is not compiled.
        folds: batch norms are folded into convolutions.
    """
    fusable, norms = context.share("elementwise", "memory"), context.share("normalisation")
    norm_gain, lone = (FOLDED_GAIN, 0.0) if folds else (NORM_GAIN, LONE_WORK)
    fused, math = FUSION_GAIN * max(0.0, fusable - lone), context.math_share()
    saved = max(fused, MATH_GAIN * math) + norm_gain * norms
    basis = f"fusable {fusable:.0%} of the time, norms {norms:.0%}"
    if context.own_layer_norms and not context.norms_can_go:
        saved, basis = saved - OWN_NORM_LOSS, f"{basis}, norms that are kernels of wavecrest cannot be fused"
    return saved, f"{basis}, SDPA's math path {math:.0%}" if math else basis


def gap_gain(context: StepContext) -> float:
    """The share of launch gaps that compilation removes: none of a graph that is replayed."""
    return 0.0 if context.captured else GAP_GAIN


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
