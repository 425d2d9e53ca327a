"""torch.compile of a model whose graph is rewritten first (`graphs.fusions`), with Inductor or without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavecrest.graphs import fusions, masks
from wavecrest.graphs.inductor import PRESETS, Preset, compile_module
from wavecrest.optimizer.steps.attention_choices import attention_choices
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, structural_copy
from wavecrest.optimizer.steps.compile import Compile, gap_gain
from wavecrest.optimizer.steps.gemm_choices import ACTIVATION_GAIN, choices
from wavecrest.optimizer.steps.params import FusedPreset

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.hardware import Device

# shares of the time of norms that the residual addition inside the norm typically saves, and of norms and elementwise
# work that one call saves where attention is written out, whose softmax counts as a norm: a model for ordering
# expectations, not a measurement
NORM_GAIN, ATTENTION_GAIN = 0.3, 0.4


class CompileFusions(Compile):
    """Attention that is written out as one call, constants computed once, activations inside GEMMs, and without
    Inductor also additions inside norms.
    """

    level = 4
    params_type = FusedPreset

    def __init__(self, preset: Preset) -> None:
        super().__init__(preset)
        self._inductor = preset.fusions == "inductor"

    def looks_long(self, device: Device) -> bool:
        """On the preset's devices."""
        return device.vendor in self.preset.devices

    def find(self, context: StepContext) -> Found:
        """Models in whose graphs something can be fused, with a faster backend for each activation and attention."""
        found = super().find(context)
        if not found.sites:
            return found
        model, traced = self._traced(context, found.params.get("masks", []))
        calls = [call for one in traced for call in fusions.activation_calls(one)]
        raced = choices(calls, context.workload.device)
        backends = raced.backends
        attended = attention_choices(
            [call for one in traced for call in fusions.attention_calls(one)], context.workload.device
        )
        counts = fusions.Counts()
        for one in traced:
            counts += fusions.count(one, model, backends, inductor=self._inductor, attentions=attended.backends)
        note = f"{raced.note}{attended.note}"
        if not any(counts):
            more = f"; PyTorch's kernels are the fastest for {len(calls)} activations" if calls else ""
            return Found((), note=f"nothing in the graphs of the model can be fused{more}{note}")
        params = {**found.params, "backends": backends}
        params |= {"attentions": attended.backends} if attended.backends else {}
        return Found(found.sites, params, f"{counts}{note}")

    def _traced(self, context: StepContext, wanted: list[str]) -> tuple[nn.Module, list[fusions.Traced]]:
        """A copy of the model that is compiled, and its graphs by bucket: presets look at the same ones."""
        own = context.workload.model if context.model is None else context.model
        if self.instead_of(context) and context.without_norms is not None:
            own = context.without_norms
        key = ("graphs", own, *wanted)
        if key not in context.shared:
            model = structural_copy(own)
            masks.use(model, wanted)
            context.shared[key] = model, [fusions.trace(model, one) for one in context.workload.buckets.values()]
        found: tuple[nn.Module, list[fusions.Traced]] = context.shared[key]
        return found

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """Activations lose a pass, scores every pass; without Inductor, which fuses them by itself, additions before
        norms lose one too. With it, compilation gains beside that.
        """
        ratio, basis = self._gain(context, bool(found.params["backends"]), bool(found.params.get("attentions")))
        if context.compiled and not self._inductor:
            return Prediction(None, f"{basis}; against a compiled model it is measured, not modelled")
        return Prediction(ratio, f"{found.note}; {basis}")

    def hope(self, context: StepContext) -> Prediction:
        """As if an activation could be fused, and attention were written out where no kernel of it is in the profile.

        Not above 1 where a compile step is in force and this one does without Inductor.
        """
        ratio, basis = self._gain(context, activations=True, attend=not context.share("attention"))
        if context.compiled and not self._inductor:
            ratio = 1.0
        return Prediction(ratio, f"at best, as its sites are not known; {basis}")

    def _gain(self, context: StepContext, activations: bool, attend: bool) -> tuple[float, str]:
        """The expected speed-up, and what it rests on."""
        elementwise, norms = context.share("elementwise"), context.share("normalisation")
        saved = ACTIVATION_GAIN * elementwise if activations else 0.0
        basis, compiled = f"elementwise work is {elementwise:.0%} of the time", 0.0
        if attend:
            saved += ATTENTION_GAIN * (elementwise + norms)
            basis += f", softmax and norms {norms:.0%}"
        if self._inductor:
            compiled, plain = self._saved(context)
            basis = f"{plain}; {basis}"
        else:
            # the additions before norms that are calls of ops stay
            saved += 0.0 if context.own_layer_norms else NORM_GAIN * norms
            saved += gap_gain(context) * context.idle_share()
            basis += f", norms are {norms:.0%}, launch gaps {context.idle_share():.0%}"
        # of what compilation leaves, also where that is more than before
        ratio = Prediction.of_saved(1 - (1 - compiled) * (1 - saved), basis).ratio
        assert ratio is not None
        return ratio, basis

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Compile in place."""
        masks.use(model, params.get("masks", []))
        padding = masks.padding_argument(model) if params.get("padding") else None
        attentions = params.get("attentions", {})
        compile_module(model, self.preset, padding, params.get("backends", {}), attentions=attentions)
        return model


def fusion_steps() -> list[Step]:
    """One step per preset with fusions."""
    return [CompileFusions(preset) for preset in PRESETS.values() if preset.fusions]
