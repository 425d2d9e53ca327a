"""Channels-last memory format for convolutional models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavecrest.errors import StepRefused
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext
from wavecrest.optimizer.steps.params import Sites

if TYPE_CHECKING:
    from torch import nn


class ChannelsLast(Step):
    """Store 4-D convolution weights as NHWC; activations follow."""

    id = "channels_last"
    title = "channels_last"
    level = 3
    params_type = Sites
    cures = ("layout",)

    def find(self, context: StepContext) -> Found:
        """Every Conv2d whose weight is not channels-last yet."""
        import torch

        assert context.model is not None
        convs = {name: module for name, module in context.model.named_modules() if isinstance(module, torch.nn.Conv2d)}
        sites = tuple(
            name for name, module in convs.items() if not module.weight.is_contiguous(memory_format=torch.channels_last)
        )
        if not convs:
            return Found((), note="no 2-D convolution in the model")
        if not sites:
            return Found((), note="all convolution weights are channels-last already")
        return Found(sites, {"sites": list(sites)})

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """Convolutions gain about a quarter where the library prefers NHWC."""
        share = context.share("convolution")
        return Prediction(1 / (1 - 0.25 * share), f"convolution is {share:.0%} of the time")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """New parameters in the other layout; the original's tensors are shared and stay as they are."""
        import torch

        for name in params["sites"]:
            conv = model.get_submodule(name)
            if not isinstance(conv, torch.nn.Conv2d):
                raise StepRefused(f"{name} is a {type(conv).__name__}, not a Conv2d")
            set_channels_last(conv)
        return model


def set_channels_last(conv: nn.Conv2d) -> None:
    """Give a convolution a new weight in that layout."""
    import torch

    made = conv.weight.detach().clone(memory_format=torch.channels_last)
    conv.weight = torch.nn.Parameter(made, requires_grad=conv.weight.requires_grad)
