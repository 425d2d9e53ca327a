"""torch.nn.TransformerEncoder and its layers, which PyTorch runs as one operation a layer, by their parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import nn

from wavecrest.errors import StepRefused
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, structural_copy
from wavecrest.optimizer.steps.choose_linear import ChooseLinear, race
from wavecrest.optimizer.steps.params import EncoderSites

if TYPE_CHECKING:
    from collections.abc import Iterable

# parts of the time of attention, and of elementwise work and norms, that go on a GPU, by guess
ATTENTION_GAIN, EPILOGUE_GAIN = 0.3, 0.3


class ReplaceEncoder(Step):
    """nn.TransformerEncoderLayer modules become wavecrest.nn's, and their encoders take no nested tensors.

    What PyTorch runs for a layer in eval mode is one operation, so that no other step reaches its linear layers: their
    backends are raced here, in the layer as it will be. Alone, without another backend, the layer of parts is as fast
    as PyTorch's operation (within 8 % either way, on one thread of a CPU), so that on a CPU nothing is tried then.
    """

    id = "replace_encoder"
    title = "TransformerEncoder → wavecrest"
    level = 4
    params_type = EncoderSites

    def find(self, context: StepContext) -> Found:
        """The layers and encoders that have PyTorch's own forward, and no hooks."""
        from wavecrest.nn.encoder_layer import TransformerEncoderLayer, encoder_refusal

        assert context.model is not None
        encoders = {path: one for path, one in context.model.named_modules() if isinstance(one, nn.TransformerEncoder)}
        layers = {
            path: one for path, one in context.model.named_modules() if isinstance(one, nn.TransformerEncoderLayer)
        }
        if not layers:
            return Found((), note="no torch.nn.TransformerEncoderLayer in the model")
        reasons = {path: encoder_refusal(module) for path, module in {**encoders, **layers}.items()}
        # nested tensors of an encoder that stays reach the layers of parts no more than those of PyTorch
        out = {path for path, module in encoders.items() if reasons[path] and module.use_nested_tensor}
        sites = [path for path, why in reasons.items() if not why and not _inside(path, out)]
        told = "; ".join(dict.fromkeys(f"{path or 'the model'}: {why}" for path, why in reasons.items() if why))
        if not any(path in layers for path in sites):
            return Found((), note=told)
        model = structural_copy(context.model)
        _adopt(model, sites)
        for path in sites:
            if path in layers:
                cast(TransformerEncoderLayer, model.get_submodule(path)).by_modules = True
        raced = race(model, context, [path for path in sites if path in layers])
        if context.device.kind == "cpu" and not raced.sites:
            return Found((), note=f"on the CPU the layers gain by their linear layers' backends alone: {raced.note}")
        note = "; ".join(filter(None, (raced.note, told and f"left out: {told}")))
        return Found(tuple(sites), {"sites": sites, **raced.params}, note, saved=raced.saved)

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """The part of GEMMs that the linear layers saved alone; on a GPU passes over activations go too."""
        gemm, attention = context.share("gemm"), context.share("attention")
        saved, basis = (found.saved or 0.0) * gemm, f"GEMM is {gemm:.0%} of the time"
        if context.device.kind != "cpu":
            passes = context.share("elementwise", "normalisation")
            saved += ATTENTION_GAIN * attention + EPILOGUE_GAIN * passes
            basis += f", attention {attention:.0%}, elementwise work and norms {passes:.0%}"
        return Prediction.of_saved(saved, f"{found.note}; {basis}" if found.note else basis)

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Change the class of each site, then put the linear layers on their backends; parameters stay."""
        _adopt(model, params["sites"])
        return ChooseLinear().apply(model, params) if params.get("layers") else model


def _inside(path: str, owners: Iterable[str]) -> bool:
    return any(owner in ("", path) or path.startswith(f"{owner}.") for owner in owners)


def _adopt(model: nn.Module, sites: Iterable[str]) -> None:
    from wavecrest.nn.encoder_layer import TransformerEncoder, TransformerEncoderLayer, encoder_refusal

    modules = [(path, model.get_submodule(path)) for path in sites]
    for path, module in modules:
        # all before any is changed: an encoder is looked at with the layers that it has
        if reason := encoder_refusal(module):
            raise StepRefused(f"{path or 'the model'}: {reason}")
    for _, module in modules:
        if isinstance(module, nn.TransformerEncoder):
            TransformerEncoder.adopt(module)
        elif isinstance(module, nn.TransformerEncoderLayer):
            TransformerEncoderLayer.adopt(module)
