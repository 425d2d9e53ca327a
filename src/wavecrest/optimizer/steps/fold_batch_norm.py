"""Batch norms in evaluation mode folded into the convolution or linear layer before them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavecrest.errors import StepRefused
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, set_submodule
from wavecrest.optimizer.steps.params import Folded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from wavecrest.measure.workload import Inputs

# share of the norms' time that goes with them; share of it that the pass of a bias takes again, where a convolution had
# none and PyTorch adds it to the result of a GPU library. Of ResNet-50, whose norms take 33%, 7% and 9% went (H200,
# 2026-11-26, evidence/nvidia-h200/2026-11-26_zoo_encoders.jsonl.gz and 2026-11-26_zoo_resnet.jsonl.gz)
NORM_GAIN, BIAS_PASS = 0.9, 0.75


class FoldBatchNorm(Step):
    """Multiply the scale of a batch norm into the weight before it, and add its shift to the bias.

    Sites are found by data flow: the input of the norm is the very tensor that a layer returned, and both run once.
    """

    id = "fold_batch_norm"
    title = "batch norm → weights"
    level = 3
    params_type = Folded
    cures = ("norms",)

    def find(self, context: StepContext) -> Found:
        """Pairs of a Conv or Linear and the BatchNorm that alone takes its result, in every bucket."""
        assert context.model is not None
        if not any(_is_norm(one) for one in context.model.modules()):
            return Found((), note="no batch norm in the model")
        pairs = foldable(context.model, list(context.workload.buckets.values()))
        if not pairs:
            return Found((), note="no batch norm takes the result of a layer that it can be folded into")
        return Found(tuple(norm for _, norm in pairs), {"pairs": pairs})

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """The pass of each norm over the activations, less the pass of a bias that its layer had not before."""
        assert context.model is not None
        share = context.share("normalisation")
        pairs = found.params["pairs"]
        passes = sum(context.device.kind != "cpu" and _gets_bias(context.model, layer) for layer, _ in pairs)
        left = BIAS_PASS * passes / len(pairs)
        basis = f"normalisation is {share:.0%} of the time"
        if passes:
            basis += f"; {passes} of {len(pairs)} convolutions get a bias, which takes a pass of its own"
        return Prediction.of_saved(NORM_GAIN * share * (1 - left), basis)

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """New weights for the layers; the norms become Identity."""
        fold(model, params["pairs"])
        return model


def foldable(model: nn.Module, inputs: Sequence[Inputs]) -> list[list[str]]:
    """[layer, norm] that can be folded, by one forward of each example."""
    pairs: list[list[str]] | None = None
    for example in inputs:
        seen = _pairs(model, example)
        pairs = seen if pairs is None else [pair for pair in pairs if pair in seen]
    return [pair for pair in pairs or [] if not _refusal(model, *pair)]


def fold(model: nn.Module, pairs: Sequence[Sequence[str]]) -> None:
    """Fold norms into layers, in place: weights in float64 rounded once; the norms become Identity.

    Raises:
        StepRefused: a pair does not fit.
    """
    import torch

    for layer_path, norm_path in pairs:
        problem = _refusal(model, layer_path, norm_path)
        if problem:
            raise StepRefused(f"{norm_path} cannot be folded into {layer_path}: {problem}")
        layer: Any = model.get_submodule(layer_path)
        layer.weight, layer.bias = _folded(layer, model.get_submodule(norm_path))
        set_submodule(model, norm_path, torch.nn.Identity())


def _gets_bias(model: nn.Module, path: str) -> bool:
    """Whether a layer is a convolution that has no bias yet: a GEMM takes one in its epilogue."""
    import torch

    layer = model.get_submodule(path)
    return not isinstance(layer, torch.nn.Linear) and layer.bias is None


def _is_norm(module: nn.Module) -> bool:
    import torch

    return type(module) in (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


def _is_layer(module: nn.Module) -> bool:
    import torch

    return type(module) in (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.Linear)


def _refusal(model: nn.Module, layer_path: str, norm_path: str) -> str:
    layer, norm = model.get_submodule(layer_path), model.get_submodule(norm_path)
    if not _is_layer(layer) or not _is_norm(norm):
        return "they are not a Conv or Linear and a BatchNorm"
    if norm.training or norm.running_mean is None:
        return "the norm uses the statistics of the batch"
    outputs = getattr(layer, "out_channels", None) or getattr(layer, "out_features", None)
    if outputs != norm.num_features:
        return f"the norm has {norm.num_features} features, the layer {outputs} outputs"
    hooked = any(one._forward_hooks or one._forward_pre_hooks for one in (layer, norm))
    return "a hook sees what is between them" if hooked else ""


def _folded(layer: Any, norm: Any) -> tuple[nn.Parameter, nn.Parameter]:
    import torch

    def wide(value: Tensor | None, other: float) -> Tensor:
        return torch.full_like(norm.running_var, other).double() if value is None else value.detach().double()

    scale = wide(norm.weight, 1.0) * torch.rsqrt(norm.running_var.double() + norm.eps)
    shift = wide(norm.bias, 0.0) + (wide(layer.bias, 0.0) - norm.running_mean.double()) * scale
    weight = layer.weight.detach()
    scaled = weight.double() * scale.reshape(-1, *(1 for _ in weight.shape[1:]))
    made = torch.empty_like(weight, memory_format=torch.preserve_format).copy_(scaled)
    return torch.nn.Parameter(made, False), torch.nn.Parameter(shift.to(weight.dtype), False)


def _pairs(model: nn.Module, inputs: Inputs) -> list[list[str]]:
    """[layer, norm] where the norm's input is the layer's result, no other module takes it, and both run once."""
    import torch

    made: dict[int, str] = {}
    taken: dict[str, list[str]] = {}
    calls: dict[str, int] = {}
    # tensors stay alive, or another could get the same id
    alive: list[Any] = []
    handles = []

    def before(name: str, is_leaf: bool) -> Any:
        def hook(_module: Any, args: tuple[Any, ...]) -> None:
            calls[name] = calls.get(name, 0) + 1
            for value in args:
                if is_leaf and id(value) in made:
                    taken.setdefault(made[id(value)], []).append(name)

        return hook

    def after(name: str) -> Any:
        def hook(module: nn.Module, _args: Any, result: Any) -> None:
            alive.append(result)
            # a batch norm normalises a Linear's result [B, L, C] along L, not along its outputs
            if not isinstance(module, torch.nn.Linear) or result.dim() == 2:
                made[id(result)] = name

        return hook

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(before(name, not any(module.children()))))
        if _is_layer(module):
            handles.append(module.register_forward_hook(after(name)))
    try:
        with torch.no_grad():
            inputs.clone().call(model)
    finally:
        for handle in handles:
            handle.remove()
    return [
        [layer, users[0]]
        for layer, users in taken.items()
        if len(users) == 1 and _is_norm(model.get_submodule(users[0])) and calls[layer] == calls[users[0]] == 1
    ]
