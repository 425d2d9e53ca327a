"""Convolutions of patches, as in front of vision transformers, as one GEMM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavecrest.errors import StepRefused
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext
from wavecrest.optimizer.steps.params import Sites

if TYPE_CHECKING:
    from torch import nn


class PatchConvolution(Step):
    """Conv2d modules whose stride is their kernel become a GEMM over patches."""

    id = "patch_conv"
    title = "patch convolution → GEMM"
    level = 3
    params_type = Sites

    def find(self, context: StepContext) -> Found:
        """Every plain Conv2d with equal kernel and stride, larger than 1, without padding, dilation and groups."""
        import torch

        from wavecrest.nn.patch_conv import patch_refusal

        assert context.model is not None
        convs = [(name, one) for name, one in context.model.named_modules() if type(one) is torch.nn.Conv2d]
        sites = [name for name, conv in convs if not patch_refusal(conv)]
        if not sites:
            return Found((), note="no convolution of patches" if convs else "no 2-D convolution in the model")
        return Found(tuple(sites), {"sites": sites})

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """Libraries change the layout around such a convolution; how long it takes by itself is not known here."""
        share = context.share("convolution")
        return Prediction(1 / (1 - 0.5 * share), f"convolution is {share:.0%} of the time")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Change the class of each site; parameters stay."""
        import torch

        from wavecrest.nn.patch_conv import PatchConv2d, patch_refusal

        for name in params["sites"]:
            conv = model.get_submodule(name)
            if type(conv) is not torch.nn.Conv2d or patch_refusal(conv):
                raise StepRefused(f"{name} is no Conv2d of patches")
            PatchConv2d.adopt(conv)
        return model
