"""The experts of sparse layers (mixtures of experts) over to wavecrest's grouped GEMMs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavecrest.errors import StepRefused
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, set_submodule
from wavecrest.optimizer.steps.params import Sites

if TYPE_CHECKING:
    from torch import nn

# parts of the time of GEMMs, and of the passes over tokens between and around them, that go, by guess
GEMM_GAIN, PASSES_GAIN = 0.1, 0.4


class ReplaceMoe(Step):
    """Experts with stacked weights become wavecrest.nn.Experts; the router and shared experts stay as they are.

    Two grouped GEMMs read tokens where they lie: no sorted copy of them, no pass for the activation, no product with
    the routing weights, and nothing that is read on the host.
    """

    id = "replace_moe"
    title = "experts → wavecrest"
    level = 4
    params_type = Sites

    def find(self, context: StepContext) -> Found:
        """Experts with stacked weights that prove, on a probe, to compute what our module computes."""
        from wavecrest.nn.experts import Experts, stacks_experts

        assert context.model is not None
        sites, reasons, ours = [], [], False
        for name, module in context.model.named_modules():
            if isinstance(module, Experts):
                ours = True
                continue
            if not stacks_experts(module):
                continue
            if context.device.kind == "cpu":
                return Found((), note="on the CPU the op runs PyTorch's GEMMs for each expert, as the model does")
            try:
                Experts.from_module(module)
            except StepRefused as error:
                reasons.append(f"{name}: {error}")
            else:
                sites.append(name)
        if not sites:
            none = "its experts are wavecrest's already" if ours else "no experts with stacked weights in the model"
            return Found((), note="; ".join(reasons) or none)
        return Found(tuple(sites), {"sites": sites}, f"left out: {'; '.join(reasons)}" if reasons else "")

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """Passes over memory that fall away, and a part of the GEMMs."""
        gemm, passes = context.share("gemm"), context.share("elementwise", "memory")
        basis = f"GEMM is {gemm:.0%} of the time, elementwise work and copies {passes:.0%}"
        return Prediction.of_saved(GEMM_GAIN * gemm + PASSES_GAIN * passes, basis)

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Swap each site; the parameters keep their names."""
        from wavecrest.nn.experts import Experts

        for name in params["sites"]:
            set_submodule(model, name, Experts.from_module(model.get_submodule(name)))
        return model
