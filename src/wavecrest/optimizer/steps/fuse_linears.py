"""Horizontal fusion: layers that read the same input become one (Q, K, V; gate and up; any by data flow).

The model's own forward stays: slices of the wide layer stand in the places of the layers (`nn.fused_weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from wavecrest.errors import StepRefused
from wavecrest.nn.fused_weights import FusedSlice, FusedWeights, Layer, can_join
from wavecrest.nn.linear import Linear
from wavecrest.ops import PackedWeight
from wavecrest.ops.packed.formats import ROWS_TOGETHER
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
# calls of other layers between two of one input, beyond which the wide result would be kept for too long
MOST_BETWEEN = 2
# ms of a GEMM that do not depend on its size: start, ramp-up, tail, a second kernel that adds the parts of split-K.
# With the gap before it, a GEMM that went saved 3 to 11 µs in ten trials, for one token and for 16,384 alike (H200,
# H100, 2026-11-20 and 2026-11-26: the records of optimize and zoo in evidence)
FIXED_MS = 0.005


class Grouped(NamedTuple):
    """Groups of module paths, the rows (of convolutions: pixels) that each reads, and why others are left out."""

    groups: list[tuple[str, ...]]
    rows: list[int]
    reasons: list[str]


class _Call(NamedTuple):
    """A call of a layer: which tensor it reads (by number), the tensor's version counter, its elements."""

    source: int
    version: int
    elements: int


class Watched(NamedTuple):
    """The calls of each layer that can be joined in one forward, and the layers in the order of calls."""

    calls: dict[str, list[_Call]]
    order: list[str]


def same_input_groups(model: nn.Module, names: tuple[tuple[str, ...], ...], watched: Callable[[], Watched]) -> Grouped:
    """Groups of sibling Linear layers that a forward calls once each, in order, with one and the same tensor."""
    groups: list[tuple[str, ...]] = []
    for path, module in model.named_modules():
        for family in names:
            if all(isinstance(getattr(module, name, None), nn.Linear | Linear) for name in family):
                groups.append(tuple(f"{path}.{name}" if path else name for name in family))
    # no forward where no names fit
    return _fitting(model, groups, watched()) if groups else Grouped([], [], [])


def groups_by_flow(model: nn.Module, watched: Watched) -> Grouped:
    """Groups of Linear or Conv2d layers that a forward calls once each, one after the other, with one tensor."""
    groups: list[list[str]] = []
    # by input, its version and what the layers must agree in: the group, and the place of its last call
    open_groups: dict[tuple[Any, ...], tuple[list[str], int]] = {}
    for place, path in enumerate(watched.order):
        if len(watched.calls[path]) != 1:
            continue
        call = watched.calls[path][0]
        key = (call.source, call.version, _kind(model.get_submodule(path)))
        group, last = open_groups.get(key, ([], place))
        if not group or place - last > MOST_BETWEEN + 1:
            group = []
            groups.append(group)
        group.append(path)
        open_groups[key] = group, place
    return _fitting(model, [tuple(group) for group in groups if len(group) > 1], watched)


def _kind(layer: Any) -> tuple[Any, ...]:
    """The properties that layers of one group have in common."""
    weight = layer.weight
    if isinstance(weight, PackedWeight):
        parts = (weight.format, weight.group, weight.stored.dtype, weight.zero is None)
        return (Linear, layer.in_features, weight.dtype, *parts)
    if isinstance(layer, nn.Linear):
        return (nn.Linear, layer.in_features, layer.weight.dtype)
    options = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups, layer.padding_mode)
    return (nn.Conv2d, layer.in_channels, layer.weight.dtype, *options)


def watch_layers(model: nn.Module, inputs: Inputs) -> Watched:
    """The calls of layers in one forward; no tensor of it is kept."""
    found = Watched({}, [])
    # a tensor that is let go may give its id to another
    numbers: dict[int, tuple[int, Tensor]] = {}
    handles = []
    for path, layer in model.named_modules():
        if not can_join(layer):
            continue

        def watch(_module: nn.Module, args: tuple[Any, ...], name: str = path) -> None:
            # a call by keyword has no input here, and is never one of a group
            source = args[0] if args else torch.empty(0)
            number, _ = numbers.setdefault(id(source), (len(numbers), source))
            # an input that is changed in place between calls differs; tensors of inference mode count no versions
            version = -1 if source.is_inference() else source._version
            found.calls.setdefault(name, []).append(_Call(number, version, source.numel()))
            found.order.append(name)

        handles.append(layer.register_forward_pre_hook(watch))
    try:
        with torch.no_grad():
            inputs.clone().call(model)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _fitting(model: nn.Module, groups: list[tuple[str, ...]], watched: Watched) -> Grouped:
    fits, rows, reasons = [], [], []
    for group in groups:
        reason = _refusal(model, group, watched)
        if reason is None:
            fits.append(group)
            rows.append(watched.calls[group[0]][0].elements // _layer(model, group[0]).weight.shape[1])
        else:
            reasons.append(f"{group[0]}: {reason}")
    return Grouped(fits, rows, reasons)


def _refusal(model: nn.Module, group: tuple[str, ...], watched: Watched) -> str | None:
    try:
        layers = [_layer(model, name) for name in group]
    except StepRefused as error:
        return str(error)
    problem = _differences(layers)
    if problem:
        return problem
    if any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers):
        return "a hook is registered on one of the layers"
    calls = [watched.calls.get(name, []) for name in group]
    if any(len(one) != 1 for one in calls):
        return "the layers are not called exactly once in a forward"
    if [name for name in watched.order if name in group] != list(group):
        return "the layers are called in another order"
    if len({one.source for (one,) in calls}) > 1:
        return "the layers read different inputs"
    if len({one.version for (one,) in calls}) > 1:
        return "the input is changed in place between the calls"
    return None


def _differences(layers: Sequence[Layer]) -> str:
    """Why layers cannot be one, or ""."""
    first = layers[0]
    if isinstance(first, nn.Conv2d) and (first.groups != 1 or first.padding_mode != "zeros"):
        return "a convolution in groups, or with another padding than zeros"
    if any(_kind(layer) != _kind(first) for layer in layers):
        return "the layers differ in input width, dtype or format"
    unit = ROWS_TOGETHER.get(first.weight.format, 1) if isinstance(first.weight, PackedWeight) else 1
    if any(len(layer.weight) % unit for layer in layers[:-1]):
        return f"{unit} rows of the weights have one scale, which another layer's rows would share"
    return ""


class FuseLinears(Step):
    """Replace groups of layers that read one tensor by slices of one wide layer."""

    names: ClassVar[tuple[tuple[str, ...], ...]]
    level = 3
    params_type = Groups
    # it takes layers as transformers made them
    tried_after = ("replace_xlstm",)

    def groups(self, model: nn.Module, watched: Callable[[], Watched]) -> Grouped:
        """Groups of layers, and reasons why look-alikes were left out; `watched` runs a forward where none was yet."""
        return same_input_groups(model, self.names, watched)

    def find(self, context: StepContext) -> Found:
        """Groups, proven by a traced forward of the first bucket."""
        model = context.model
        assert model is not None

        def watched() -> Watched:
            # one forward for all steps of this kind
            key = ("calls of layers", model)
            if key not in context.shared:
                context.shared[key] = watch_layers(model, next(iter(context.workload.buckets.values())))
            found: Watched = context.shared[key]
            return found

        groups, rows, reasons = self.groups(model, watched)
        if not groups:
            return Found((), note="; ".join(reasons) or "no such group of layers")
        sites = tuple(name.rpartition(".")[0] for name, *_ in groups)
        note = f"{len(groups)} groups" + (f"; left out: {'; '.join(reasons)}" if reasons else "")
        return Found(sites, {"groups": [list(group) for group in groups]}, note, rows=tuple(rows))

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """The fixed time of GEMMs that go, the gaps before them, and reads of the input where bytes set the time."""
        groups = found.params["groups"]
        removed = sum(len(group) - 1 for group in groups)
        reads_ms = sum(self._reads_ms(group, rows, context) for group, rows in zip(groups, found.rows, strict=True))
        saved = []
        for bucket in context.profile:
            matrix = [row for row in bucket.categories if row.category in ("gemm", "convolution")]
            matrix_ms, calls = sum(row.ms for row in matrix), sum(row.calls for row in matrix)
            gap = (bucket.idle_ms or 0.0) / max(1, sum(row.calls for row in bucket.categories))
            # no GEMM has more to give than its own time
            each = min(FIXED_MS, matrix_ms / max(1, calls))
            saved.append((min(removed * each + reads_ms, matrix_ms) + removed * gap) / bucket.wall_ms)
        share = sum(saved) / len(saved) if saved else 0.0
        reads = f", reads of the input {reads_ms * 1e3:.0f} µs" if reads_ms >= 1e-3 else ""
        return Prediction.of_saved(share, f"{removed} GEMMs fewer, with their gaps {share:.1%} of the time{reads}")

    def _reads_ms(self, group: Sequence[str], rows: int, context: StepContext) -> float:
        """The time that reading the input once saves: none where arithmetic sets the time of a GEMM."""
        assert context.model is not None
        layers = [_layer(context.model, name) for name in group]
        first, ceilings = layers[0].weight, context.ceilings
        peak = ceilings.peak.get(str(first.dtype).removeprefix("torch.")) if ceilings else None
        if ceilings is None or peak is None:
            return 0.0

        def least_ms(*joined: Layer) -> float:
            outputs, elements = sum(len(one.weight) for one in joined), sum(one.weight.numel() for one in joined)
            stored = sum(_bytes(one.weight) for one in joined)
            moved = rows * (first.shape[1] + outputs) * first.element_size() + stored
            return max(moved / ceilings.bandwidth / 1e6, 2 * rows * elements / peak / 1e9)

        return sum(least_ms(layer) for layer in layers) - least_ms(*layers)

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Stack the weights of each group and put slices in the layers' places."""
        for group in params["groups"]:
            layers = [_layer(model, name) for name in group]
            if problem := _differences(layers):
                raise StepRefused(f"{', '.join(group)} cannot be one layer: {problem}")
            fused = FusedWeights(layers)
            start = 0
            for index, (name, layer) in enumerate(zip(group, layers, strict=True)):
                stop = start + len(layer.weight)
                piece = FusedSlice(fused, start, stop, first=index == 0, last=index == len(group) - 1)
                set_submodule(model, name, piece)
                start = stop
        return model


def _bytes(weight: Tensor) -> int:
    return weight.bytes_ if isinstance(weight, PackedWeight) else weight.nbytes


def _layer(model: nn.Module, path: str) -> Layer:
    module = model.get_submodule(path)
    if not can_join(module):
        raise StepRefused(f"{path} is a {type(module).__name__}, not a plain Linear or Conv2d, nor a packed Linear")
    return module  # type: ignore[return-value]


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


class FuseParallel(FuseLinears):
    """Layers of one input that have no names of a family, or another parent: of T5, parallel blocks, Inception."""

    id = "fuse_parallel"
    title = "fuse parallel layers"

    def groups(self, model: nn.Module, watched: Callable[[], Watched]) -> Grouped:
        """Groups found by data flow, without those that the steps for named ones take."""
        found = groups_by_flow(model, watched())
        others = [row for row in zip(found.groups, found.rows, strict=True) if not _is_named(row[0])]
        return Grouped([group for group, _ in others], [rows for _, rows in others], found.reasons)


def _is_named(group: Sequence[str]) -> bool:
    parents, names = {path.rpartition(".")[0] for path in group}, tuple(path.rpartition(".")[2] for path in group)
    return len(parents) == 1 and names in (*QKV_NAMES, *GATE_UP_NAMES)
