"""Gated MLPs (activation(gate) · up) over to wavecrest's fused op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavecrest.errors import StepRefused
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, set_submodule
from wavecrest.optimizer.steps.params import Sites

if TYPE_CHECKING:
    from torch import nn


class ReplaceActivation(Step):
    """MLPs of the form down(act(gate(x)) · up(x)) call one kernel for act and product, or the GEMM before makes it.

    The GEMM does where gate and up are one, and its kernel with the activation is measured.
    """

    id = "replace_activation"
    title = "gated MLP → wavecrest"
    level = 4
    params_type = Sites
    # gate and up of one GEMM may have the activation in it
    tried_after = ("fuse_gate_up",)

    def find(self, context: StepContext) -> Found:
        """Modules with gate_proj, up_proj, down_proj and act_fn that prove it on a probe."""
        from wavecrest.nn import GatedMLP

        assert context.model is not None
        if context.device.kind == "cpu":
            return Found((), note="on the CPU the op runs PyTorch's own two kernels, so nothing would change")
        sites, reasons = [], []
        for name, module in context.model.named_modules():
            if not all(hasattr(module, part) for part in ("gate_proj", "up_proj", "down_proj", "act_fn")):
                continue
            try:
                GatedMLP.from_module(module)
            except StepRefused as error:
                reasons.append(f"{name}: {error}")
            else:
                sites.append(name)
        if not sites:
            return Found((), note="; ".join(reasons) or "no gated MLP in the model")
        return Found(tuple(sites), {"sites": sites}, f"left out: {'; '.join(reasons)}" if reasons else "")

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """One elementwise kernel instead of two."""
        share = context.share("elementwise")
        return Prediction(1 / (1 - 0.2 * share), f"elementwise work is {share:.0%} of the time")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Swap each site; the projections (fused or not) move over as they are."""
        from wavecrest.nn import GatedMLP

        for name in params["sites"]:
            set_submodule(model, name, GatedMLP.from_module(model.get_submodule(name)))
        return model
