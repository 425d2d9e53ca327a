"""Projection fusion: Linear layers that read the same input become one GEMM (Q, K, V; gate and up).

The model's own forward stays. The first of the fused layers computes the wide GEMM and keeps the result for the others.
Those return their slice if they are called with the same tensor object, and compute their own slice otherwise. So a
forward that calls them in another order, or with another input, is still right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wavecrest.errors import StepRefused
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, set_submodule
from wavecrest.optimizer.steps.params import Groups

if TYPE_CHECKING:
    from wavecrest.measure.workload import Inputs

# attribute names of sibling projections, per known family of models
QKV_NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
    ("q_lin", "k_lin", "v_lin"),
)
GATE_UP_NAMES = (("gate_proj", "up_proj"), ("w1", "w3"), ("wi_0", "wi_1"))


class FusedWeights(nn.Module):
    """The stacked weight of several Linear layers, [sum of out_features, in_features], and its last result."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        first = linears[0]
        self.weight = nn.Parameter(
            torch.cat([linear.weight.detach() for linear in linears]), requires_grad=first.weight.requires_grad
        )
        if first.bias is not None:
            self.bias = nn.Parameter(
                torch.cat([linear.bias.detach() for linear in linears]), requires_grad=first.bias.requires_grad
            )
        else:
            self.register_parameter("bias", None)
        # the function that computes the wide GEMM: (x, weight, bias) -> [..., N]
        self.product_of: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
        # the input of the last wide GEMM, and its result; None between forwards
        self.source: Tensor | None = None
        self.product: Tensor | None = None


class FusedSlice(nn.Module):
    """Stands where one of the fused Linear layers stood: rows [start, stop) of the stacked weight."""

    def __init__(self, fused: FusedWeights, start: int, stop: int, *, first: bool, last: bool) -> None:
        super().__init__()
        self.fused = fused
        self.start, self.stop = start, stop
        self.first, self.last = first, last
        self.in_features = fused.weight.shape[1]
        self.out_features = stop - start

    @property
    def weight(self) -> Tensor:
        """This layer's rows, for code that reads them."""
        return self.fused.weight[self.start : self.stop]

    @property
    def bias(self) -> Tensor | None:
        """This layer's part of the bias, if there is one."""
        return None if self.fused.bias is None else self.fused.bias[self.start : self.stop]

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] to [..., out_features], a view of the wide result."""
        fused = self.fused
        if self.first:
            fused.source = x
            fused.product = fused.product_of(x, fused.weight, fused.bias)
        product = fused.product
        if product is None or fused.source is not x:
            return F.linear(x, self.weight, self.bias)
        if self.last:
            # nothing outlives the forward
            fused.source = fused.product = None
        return product[..., self.start : self.stop]


def same_input_groups(
    model: nn.Module, names: tuple[tuple[str, ...], ...], inputs: Inputs
) -> tuple[list[tuple[str, ...]], list[str]]:
    """Groups of sibling Linear layers that a forward calls once each, in order, with one and the same tensor.

    Returns:
        (groups of module paths, reasons why look-alikes were left out)
    """
    groups: list[tuple[str, ...]] = []
    for path, module in model.named_modules():
        for family in names:
            if all(isinstance(getattr(module, name, None), nn.Linear) for name in family):
                groups.append(tuple(f"{path}.{name}" if path else name for name in family))
    # per layer, (input, its version counter) of each call: an input that is changed in place between calls differs
    calls: dict[str, list[tuple[Tensor, int]]] = {}
    order: list[str] = []
    handles = []
    for member in {name for group in groups for name in group}:

        def watch(_module: nn.Module, args: tuple[Any, ...], name: str = member) -> None:
            calls.setdefault(name, []).append((args[0], args[0]._version))
            order.append(name)

        handles.append(model.get_submodule(member).register_forward_pre_hook(watch))
    try:
        with torch.no_grad():
            inputs.clone().call(model)
    finally:
        for handle in handles:
            handle.remove()
    fits, reasons = [], []
    for group in groups:
        reason = _refusal(model, group, calls, order)
        if reason is None:
            fits.append(group)
        else:
            reasons.append(f"{group[0]}: {reason}")
    return fits, reasons


def _refusal(
    model: nn.Module, group: tuple[str, ...], calls: dict[str, list[tuple[Tensor, int]]], order: list[str]
) -> str | None:
    try:
        linears = [_linear(model, name) for name in group]
    except StepRefused as error:
        return str(error)
    first = linears[0]
    for linear in linears:
        if linear.in_features != first.in_features or linear.weight.dtype != first.weight.dtype:
            return "the layers differ in input width or dtype"
        if (linear.bias is None) != (first.bias is None):
            return "some of the layers have a bias and some have none"
        if linear._forward_hooks or linear._forward_pre_hooks:
            return "a hook is registered on one of the layers"
    if any(len(calls.get(name, ())) != 1 for name in group):
        return "the layers are not called exactly once in a forward"
    if [name for name in order if name in group] != list(group):
        return "the layers are called in another order"
    source, version = calls[group[0]][0]
    if any(calls[name][0][0] is not source for name in group):
        return "the layers read different inputs"
    if any(calls[name][0][1] != version for name in group):
        return "the input is changed in place between the calls"
    return None


class FuseLinears(Step):
    """Replace groups of Linear layers that read one tensor by slices of one GEMM."""

    names: ClassVar[tuple[tuple[str, ...], ...]]
    level = 3
    params_type = Groups

    def find(self, context: StepContext) -> Found:
        """Groups found by name and proven by a traced forward of the first bucket."""
        assert context.model is not None
        inputs = next(iter(context.workload.buckets.values()))
        groups, reasons = same_input_groups(context.model, self.names, inputs)
        if not groups:
            return Found((), note="; ".join(reasons) or "no such group of Linear layers")
        sites = tuple(name.rpartition(".")[0] for name, *_ in groups)
        note = f"{len(groups)} groups" + (f"; left out: {'; '.join(reasons)}" if reasons else "")
        return Found(sites, {"groups": [list(group) for group in groups]}, note)

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """The input is read once instead of once a layer, and launches go: roofline bytes of the groups."""
        model = context.model
        assert model is not None
        rows = max((tensor.numel() for _, tensor in next(iter(context.workload.buckets.values())).tensors()), default=1)
        before = after = 0
        for group in found.params["groups"]:
            linears = [_linear(model, name) for name in group]
            weights = sum(linear.weight.numel() for linear in linears)
            width = linears[0].in_features
            outputs = sum(linear.out_features for linear in linears) * rows
            before += len(group) * rows * width + weights + outputs
            after += rows * width + weights + outputs
        share = context.share("gemm")
        gain = share * (1 - after / before) + 0.3 * context.idle_share()
        return Prediction(1 / (1 - gain), f"bytes of these layers ×{after / before:.2f}, GEMM {share:.0%} of the time")

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Stack the weights of each group and put slices in the layers' places."""
        for group in params["groups"]:
            linears = [_linear(model, name) for name in group]
            fused = FusedWeights(linears)
            start = 0
            for index, (name, linear) in enumerate(zip(group, linears, strict=True)):
                stop = start + linear.out_features
                piece = FusedSlice(fused, start, stop, first=index == 0, last=index == len(group) - 1)
                set_submodule(model, name, piece)
                start = stop
        return model


def _linear(model: nn.Module, path: str) -> nn.Linear:
    module = model.get_submodule(path)
    if type(module) is not nn.Linear:
        raise StepRefused(f"{path} is a {type(module).__name__}, not a plain Linear")
    return module


class FuseQKV(FuseLinears):
    """Q, K and V projections as one GEMM."""

    id = "fuse_qkv"
    title = "fuse QKV"
    names = QKV_NAMES


class FuseGateUp(FuseLinears):
    """Gate and up projections as one GEMM."""

    id = "fuse_gate_up"
    title = "fuse gate+up"
    names = GATE_UP_NAMES
