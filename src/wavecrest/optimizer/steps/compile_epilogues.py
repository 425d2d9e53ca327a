"""torch.compile of a model whose convolutions end in ReLU in one kernel (`graphs.epilogues`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from wavecrest.graphs.inductor import PRESETS
from wavecrest.graphs.root import traceable
from wavecrest.optimizer.steps.base import Found, Prediction, StepContext, structural_copy
from wavecrest.optimizer.steps.channels_last import set_channels_last
from wavecrest.optimizer.steps.compile import Compile
from wavecrest.optimizer.steps.fold_batch_norm import fold, foldable
from wavecrest.optimizer.steps.params import FoldedPreset

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.hardware import Device


# share of convolutions in the time of kernels from which on a model is traced for those that end in ReLU, by guess
LEAST_CONVOLUTION = 0.05


class CompileEpilogues(Compile):
    """Convolutions that end in ReLU in one kernel: batch norms folded, weights channels_last, then compiled.

    One step, as the parts gain little alone: Inductor fuses batch norms and changes layouts by itself, and cuDNN's
    kernels with an epilogue need both done before.
    """

    level = 4
    params_type = FoldedPreset

    def __init__(self) -> None:
        super().__init__(PRESETS["epilogues"])

    def looks_long(self, device: Device) -> bool:
        """On the preset's devices, where the model is traced."""
        return device.vendor in self.preset.devices

    def hope(self, context: StepContext) -> Prediction:
        """As `predict`; nothing where convolutions take next to no time."""
        share = context.share("convolution")
        if context.profile and share < LEAST_CONVOLUTION * (1 - context.idle_share()):
            return Prediction(1.0, f"convolution is {share:.0%} of the time")
        return super().predict(Found(()), context)

    def find(self, context: StepContext) -> Found:
        """Models in which cuDNN has such a kernel for some convolution."""
        from wavecrest.graphs import epilogues

        model = structural_copy(context.workload.model if context.model is None else context.model)
        inputs = list(context.workload.buckets.values())
        found = super().find(context)
        if not found.sites or not any(_is_conv(module) for module in model.modules()):
            return found if not found.sites else Found((), note="no 2-D convolution in the model")
        pairs = foldable(model, inputs)
        _prepare(model, pairs)
        count = sum(epilogues.count(traceable(model), example) for example in inputs)
        if not count:
            return Found((), note="no convolution whose result goes into a ReLU alone runs in one kernel here")
        note = f"{count} convolutions end in ReLU, {len(pairs)} batch norms are folded; {found.note}"
        return Found(found.sites, {**found.params, "pairs": pairs}, note)

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Fold, change the layout, compile."""
        _prepare(model, params.get("pairs", []))
        return super().apply(model, params)


def _is_conv(module: nn.Module) -> bool:
    import torch

    return isinstance(module, torch.nn.Conv2d)


def _prepare(model: nn.Module, pairs: list[list[str]]) -> None:
    fold(model, pairs)
    for module in model.modules():
        if _is_conv(module):
            set_channels_last(cast("nn.Conv2d", module))
