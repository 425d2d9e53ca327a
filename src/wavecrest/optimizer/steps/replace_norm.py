"""Normalisation layers over to wavecrest's ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavecrest.errors import StepRefused
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, set_submodule
from wavecrest.optimizer.steps.params import Sites

if TYPE_CHECKING:
    from torch import nn


class ReplaceNorm(Step):
    """LayerNorm and RMSNorm modules become wavecrest.nn modules that share their parameters."""

    id = "replace_norm"
    title = "norms → wavecrest"
    level = 4
    params_type = Sites
    cures = ("norms",)

    def find(self, context: StepContext) -> Found:
        """Norm modules that prove, on a probe, to compute what our module computes."""
        from wavecrest.nn import norm_from_module

        assert context.model is not None
        sites, reasons = [], []
        for name, module in context.model.named_modules():
            if not type(module).__name__.endswith(("RMSNorm", "LayerNorm")):
                continue
            if context.device.kind == "cpu" and type(module).__module__.startswith("torch.nn"):
                reasons.append("on the CPU wavecrest runs PyTorch's own kernel for this module already")
                continue
            try:
                norm_from_module(module)
            except StepRefused as error:
                reasons.append(f"{name}: {error}")
            else:
                sites.append(name)
        distinct = "; ".join(dict.fromkeys(reasons))
        if not sites:
            return Found((), note=distinct or "no LayerNorm or RMSNorm in the model")
        return Found(tuple(sites), {"sites": sites}, f"left out: {distinct}" if distinct else "")

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """One pass over memory per norm instead of several."""
        share = context.share("normalisation")
        return Prediction(1 / (1 - 0.3 * share), f"normalisation is {share:.0%} of the time")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Swap each site."""
        from wavecrest.nn import norm_from_module

        for name in params["sites"]:
            set_submodule(model, name, norm_from_module(model.get_submodule(name)))
        return model
