"""Linear layers on the backend of gemm that is fastest for their calls, their activation in the same kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from wavecrest.backends.torch.common import rounds
from wavecrest.errors import StepRefused
from wavecrest.graphs.activations import name_of
from wavecrest.nn.activation import activation_name
from wavecrest.nn.fused_weights import FusedSlice
from wavecrest.nn.linear import Linear, LinearOn, is_conv1d, linear_of_conv1d, linear_on
from wavecrest.ops import PackedWeight
from wavecrest.ops._gemm.backend import op
from wavecrest.ops._gemm.call import GemmCall, linear_call
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, set_submodule
from wavecrest.optimizer.steps.gemm_choices import choices
from wavecrest.optimizer.steps.params import LinearBackends
from wavecrest.optimizer.steps.reads import Reads

if TYPE_CHECKING:
    from wavecrest.hardware import Device
    from wavecrest.measure.workload import Inputs


# share of the time of elementwise work that goes where GELU is most of it: 0.54 and 0.51 of it went from a BERT and a
# RoBERTa (H200, evidence/nvidia-h200/2026-11-27_zoo_sixteenth_gpu_0.jsonl.gz)
ACTIVATION_HOPE = 0.55
# share of the time of float32 GEMMs that three products of tf32 save on sm_90: cuBLAS takes 1.6 to 2.1 times as long
# where both were timed (one H200, 2026-11-27, no record)
THRICE_GAIN = 0.45


class Layer(NamedTuple):
    """A linear layer, the module of the activation that alone reads its result, if one does, and its calls."""

    linear: str
    module: str
    activation: str
    calls: tuple[GemmCall, ...]

    def in_three_products(self) -> Layer:
        """The layer with float32 calls that a backend may multiply in three products of tf32."""
        if any(call.a.dtype != torch.float32 for call in self.calls):
            return self
        return self._replace(calls=tuple(call._replace(precision="tf32x3") for call in self.calls))


class ChooseLinear(Step):
    """Linear layers whose calls another backend than PyTorch's runs faster, each timed alone.

    transformers' Conv1D is one, with a copy of its weight transposed. The activation goes along where a module of it
    alone reads the result, found by data flow. Layers whose activation is a function take it in where graphs are
    rewritten: compile:fusions. nn.TransformerEncoderLayer in eval mode is one operation of PyTorch, which
    `replace_encoder` opens. On a GPU a layer without an activation is for `route_linear`, which goes by measured rows;
    but for float32 on NVIDIA, where a product may be three of tf32 on matrix cores that have no float32: answers are
    as near to exact ones as cuBLAS' are (`precision="tf32x3"` of gemm).
    """

    id = "choose_linear"
    title = "linear → fastest backend"
    level = 4
    params_type = LinearBackends
    tried_after = ("fuse_qkv", "fuse_gate_up", "fuse_parallel")

    def looks_long(self, device: Device) -> bool:
        """On a GPU, where each distinct call is compiled for several backends: 10 to 12 s (H200, no record)."""
        return device.kind != "cpu"

    def hope(self, context: StepContext) -> Prediction:
        """As if all elementwise work were activations that a GEMM could end in."""
        share = context.share("elementwise")
        basis = f"at best, as its layers are not timed yet; elementwise work is {share:.0%} of the time"
        saved = ACTIVATION_HOPE * share
        if context.workload.dtype == "float32" and context.device.vendor == "nvidia":
            products = context.share("gemm")
            basis += f", float32 GEMM {products:.0%}"
            saved += THRICE_GAIN * products
        return Prediction.of_saved(saved, basis)

    def find(self, context: StepContext) -> Found:
        """The layers for whose calls another backend of gemm is faster than PyTorch's kernels."""
        assert context.model is not None
        return race(context.model, context)

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """The time that the calls saved alone, as a share of that of all buckets."""
        saved, whole = found.saved_ms or 0.0, sum(bucket.wall_ms for bucket in context.profile)
        basis = f"{found.note}; alone their calls took {saved:.3g} of {whole:.3g} ms less"
        return Prediction.of_saved(saved / whole if whole else 0.0, basis)

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Change the class of each layer; parameters stay. The modules of the activations become Identity."""
        for row in params["layers"]:
            linear, activation = model.get_submodule(row["linear"]), row["activation"] or None
            # plans of before 2026-11-27 have none
            precision = row.get("precision", "ieee")
            if row["backend"] not in op.backends:
                raise StepRefused(f"gemm has no backend {row['backend']}; it has {', '.join(sorted(op.backends))}")
            if isinstance(linear, FusedSlice) and linear.first and linear.is_linear and not activation:
                linear.fused.product_of = partial(
                    linear_on, activation=None, backend=row["backend"], precision=precision
                )
                continue
            if isinstance(linear, Linear) and not activation:
                linear.backend, linear.precision = row["backend"], precision
                continue
            if is_conv1d(linear):
                linear = linear_of_conv1d(linear)
                set_submodule(model, row["linear"], linear)
            if type(linear) is not nn.Linear:
                raise StepRefused(f"{row['linear']} is a {type(linear).__name__}, not a plain Linear")
            if bool(activation) != bool(row["module"]):
                raise StepRefused(f"{row['linear']}: an activation and its module go together")
            if activation:
                module = model.get_submodule(row["module"])
                if activation_of(module) != activation:
                    raise StepRefused(f"{row['module']} is a {type(module).__name__}, which is not {activation}")
                set_submodule(model, row["module"], nn.Identity())
            LinearOn.adopt(linear, activation, row["backend"], precision)
        return model


def race(model: nn.Module, context: StepContext, under: Sequence[str] = ("",)) -> Found:
    """The layers for whose calls another backend is faster, as parameters of `choose_linear`.

    Args:
        model: as the step finds it; the context has the workload and the device.
        under: paths of modules; layers elsewhere are left as they are.
    """
    inside = tuple(f"{path}." if path else "" for path in under)
    seen = [
        layer for layer in layers(model, list(context.workload.buckets.values())) if layer.linear.startswith(inside)
    ]
    # where the user lets PyTorch round float32 to tf32, its kernels are faster
    if context.device.vendor == "nvidia" and not rounds("cuda"):
        seen = [layer.in_three_products() for layer in seen]
    seen = [layer for layer in seen if _is_raced(model.get_submodule(layer.linear), layer, context.device.kind)]
    if not seen:
        return Found((), note="no linear layer that runs once, or with a module of an activation after it")
    raced = choices((call for layer in seen for call in layer.calls), context.workload.device)
    chosen = []
    refused: Counter[str] = Counter()
    for layer in seen:
        named = [raced.backends.get(name_of(call), "") for call in layer.calls]
        # one backend for all buckets: that of the most work which has one
        best = max(zip(layer.calls, named, strict=True), key=lambda pair: bool(pair[1]) * pair[0].M)[1]
        if best:
            names = {"linear": layer.linear, "module": layer.module, "activation": layer.activation}
            chosen.append({**names, "backend": best, "precision": layer.calls[0].precision})
            refused.update(_refusals(best, layer.calls))
    if not chosen:
        return Found((), note=f"PyTorch's kernels are the fastest for {len(seen)} layers{raced.note}")
    used = ", ".join(sorted({row["backend"] for row in chosen}))
    inner = sum(bool(row["activation"]) for row in chosen)
    thrice = sum(row["precision"] == "tf32x3" for row in chosen)
    note = f"{len(chosen)} of {len(seen)} layers on {used}, {inner} of them with their activation"
    if thrice:
        note += f", {thrice} in three products of tf32 for one of float32"
    note += raced.note
    for why, count in refused.items():
        note += f"; {count} of their calls run on dispatch's choice, as {why}"
    return Found(tuple(row["linear"] for row in chosen), {"layers": chosen}, note, saved_ms=raced.saved_ms)


def _is_raced(module: nn.Module, layer: Layer, device: str) -> bool:
    """Not wavecrest's layers, which dispatch decides on, nor on a GPU those without activation; but three products."""
    if layer.calls[0].precision != "ieee":
        return True
    return not isinstance(module, Linear) and (device == "cpu" or bool(layer.activation))


@torch.no_grad()
def _refusals(backend: str, calls: Sequence[GemmCall]) -> list[str]:
    """Why a backend does not take calls of a layer that runs on it, one reason for each such call."""
    reasons = [op.backends[backend].refuse(call) for call in calls]
    return [f"{backend} {reason}" for reason in reasons if reason is not None]


def layers(model: nn.Module, inputs: Sequence[Inputs]) -> list[Layer]:
    """The linear layers that run once in every example, with the activations that hold in every example."""
    found: dict[str, Layer] | None = None
    for example in inputs:
        seen = {layer.linear: layer for layer in _layers(model, example)}
        found = seen if found is None else {path: _both(found[path], seen[path]) for path in found if path in seen}
    return list((found or {}).values())


def _both(first: Layer, second: Layer) -> Layer:
    if (first.module, first.activation) == (second.module, second.activation):
        return first._replace(calls=first.calls + second.calls)
    calls = tuple(call._replace(activation=None) for call in first.calls + second.calls)
    return Layer(first.linear, "", "", calls)


def activation_of(module: nn.Module) -> str:
    """The activation that a module without parameters computes, or ""."""
    if any(True for _ in module.children()) or any(True for _ in module.parameters()) or module._forward_hooks:
        return ""
    try:
        return activation_name(module)
    except (TypeError, ValueError, RuntimeError, IndexError, AssertionError):
        # it takes no numbers of one dimension: it is no activation
        return ""


def _layers(model: nn.Module, example: Inputs) -> list[Layer]:
    """As `layers`, of one example."""
    inputs: dict[str, list[Any]] = {}
    made: dict[int, str] = {}
    taken: dict[str, list[tuple[str, int]]] = {}
    runs: dict[str, int] = {}
    # tensors stay alive, or another could get the same id
    alive: list[Any] = []
    before: dict[int, int] = {}
    replaced: dict[int, int] = {}
    reads, handles = Reads(), []

    def after_layer(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            alive.append(result)
            inputs.setdefault(path, []).append(_given(module, args, kwargs))
            made[id(result)] = path
            reads.count[id(result)] = 0

        return hook

    def before_activation(path: str) -> Any:
        def hook(_module: nn.Module, args: Any) -> None:
            runs[path] = runs.get(path, 0) + 1
            if args and id(args[0]) in made:
                taken.setdefault(made[id(args[0])], []).append((path, id(args[0])))
                before[id(args[0])] = reads.count[id(args[0])]

        return hook

    def after_activation(_module: nn.Module, args: Any, result: Any) -> None:
        if args and id(args[0]) in before:
            # what the activation itself reads is not counted
            reads.count[id(args[0])] = before.pop(id(args[0]))
            if result is args[0]:
                # in place: who reads it now reads the activation
                replaced[id(result)] = reads.count.pop(id(result))

    names: dict[str, str] = {}
    for path, module in model.named_modules():
        hooked = bool(module._forward_hooks or module._forward_pre_hooks)
        if _is_layer(module) and not hooked:
            handles.append(module.register_forward_hook(after_layer(path), with_kwargs=True))
        elif not hooked and (name := activation_of(module)):
            names[path] = name
            handles.append(module.register_forward_pre_hook(before_activation(path)))
            handles.append(module.register_forward_hook(after_activation))
    try:
        with torch.no_grad(), reads:
            example.clone().call(model)
    finally:
        for handle in handles:
            handle.remove()
    found = []
    for path, given in inputs.items():
        if len(given) != 1 or given[0] is None:
            continue
        users = taken.get(path, [])
        alone = len(users) == 1 and runs[users[0][0]] == 1 and (reads.count | replaced)[users[0][1]] == 0
        layer: Any = model.get_submodule(path)
        module = users[0][0] if alone and not isinstance(layer, FusedSlice | Linear) else ""
        activation = names[module] if module else ""
        layer = layer.fused if isinstance(layer, FusedSlice) else layer
        weight = layer.weight.mT if is_conv1d(layer) else layer.weight
        own = layer.activation if isinstance(layer, Linear) else None
        options = {name: one for name, one in given[0].items() if name != "x"}
        call = linear_call(given[0]["x"], weight, layer.bias, activation=activation or own, **options)
        found.append(Layer(path, module, activation, (call,)))
    return found


# parameters of `wavecrest.nn.Linear.forward`; nn.Linear has the first
_NAMES = ("x", "residual", "norm_weight", "norm_eps", "overwrite_residual")


def _given(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """The arguments of a linear layer, by the names of wavecrest's; None if the input had a name."""
    if not args or (kwargs and not isinstance(module, Linear)):
        return None
    return {**dict(zip(_NAMES, args, strict=False)), **kwargs}


def _is_layer(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        or (type(module) is Linear and not isinstance(module.weight, PackedWeight) and module.tail is None)
        or is_conv1d(module)
        or (isinstance(module, FusedSlice) and module.first and module.is_linear and not module.is_packed)
    )
