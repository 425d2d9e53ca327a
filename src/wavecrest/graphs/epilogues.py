"""Rewrite a Dynamo graph so that convolutions add the bias, add the residual and end in ReLU in one kernel.

Inductor fuses what follows a convolution into a kernel of its own, which reads and writes the activations once more.
Rewritten is each such convolution that `conv2d`'s backend of this kind takes; the step that compiles the model measures
whether it pays.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from wavecrest.errors import InvalidArgument
from wavecrest.measure.workload import Inputs
from wavecrest.ops._conv2d.backend import op
from wavecrest.ops._conv2d.call import Conv2dCall, like_channels_last, with_pairs

# the backend of conv2d that does all of it in one kernel, as an operation of graphs
BACKEND = "cudnn_relu"
CONVOLUTIONS = (torch.conv2d, F.conv2d)
RELUS = (F.relu, torch.relu, torch.relu_, F.relu_, "relu", "relu_")
ADDS, IN_PLACE_ADDS = (operator.add, torch.add, "add"), (operator.iadd, "add_")
# the arguments of torch.conv2d after the weight, with their defaults
OPTIONS = (("bias", None), ("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1))

Wanted = Callable[[Conv2dCall], bool]


class _Site(NamedTuple):
    """conv, then perhaps an addition of `residual`, then `relu`; nothing else reads what is between them."""

    conv: fx.Node
    residual: fx.Node | None
    relu: fx.Node


def taken(call: Conv2dCall) -> bool:
    """True where the backend that does all of it in one kernel takes a call."""
    return op.backends[BACKEND].refuse(call) is None


def rewrite(graph: fx.GraphModule, wanted: Wanted = taken) -> int:
    """Replace convolutions with what follows them, in place; returns how many.

    Args:
        graph: as Dynamo makes it, with an example value for every node.
        wanted: which calls, with fake tensors, are replaced.
    """
    count = 0
    for node in list(graph.graph.nodes):
        site = _site(node)
        made = None if site is None else _call(site)
        # a call that needs gradients is refused by every backend that has none
        if site is None or made is None or not wanted(made):
            continue
        _replace(graph.graph, site, made)
        count += 1
    if count:
        graph.graph.lint()
        graph.recompile()
    return count


def backend(graph: fx.GraphModule, examples: list[Tensor]) -> Any:
    """A backend for torch.compile: `rewrite`, then Inductor."""
    from torch._inductor.compile_fx import compile_fx

    rewrite(graph)
    return compile_fx(graph, examples)


def count(call: Callable[..., Any], inputs: Inputs) -> int:
    """How many convolutions of one call `rewrite` would replace."""
    found = 0

    def counting(graph: fx.GraphModule, _examples: list[Tensor]) -> Any:
        nonlocal found
        found += rewrite(graph)
        return graph.forward

    with torch.no_grad():
        inputs.clone().call(torch.compile(call, backend=counting, dynamic=False))
    return found


def _site(relu: fx.Node) -> _Site | None:
    if relu.op not in ("call_function", "call_method") or relu.target not in RELUS:
        return None
    source = _alone(relu.args[0] if relu.args else None)
    if source is None:
        return None
    if _is_conv(source):
        return _Site(source, None, relu)
    if source.target not in (*ADDS, *IN_PLACE_ADDS) or source.kwargs or len(source.args) != 2:
        return None
    first, second = source.args
    # what is added to in place must be the convolution's own result: others may read the other operand
    pairs = [(first, second)] if source.target in IN_PLACE_ADDS else [(second, first), (first, second)]
    for conv, residual in pairs:
        if isinstance(residual, fx.Node) and _alone(conv) is not None and _is_conv(conv):
            return _Site(conv, residual, relu)  # type: ignore[arg-type]
    return None


def _alone(node: Any) -> fx.Node | None:
    """A node that one other reads, once."""
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return None
    user = next(iter(node.users))
    return node if user.all_input_nodes.count(node) == 1 and user.args.count(node) == 1 else None


def _is_conv(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in CONVOLUTIONS


def _options(conv: fx.Node) -> dict[str, Any]:
    given = {name: value for (name, _), value in zip(OPTIONS, conv.args[2:], strict=False)}
    return {**dict(OPTIONS), **given, **conv.kwargs}


def _call(site: _Site) -> Conv2dCall | None:
    """The call of conv2d that a site is, with the example values; None if conv2d does not take it."""

    def value(node: Any) -> Any:
        return node.meta.get("example_value") if isinstance(node, fx.Node) else node

    options = {name: value(option) for name, option in _options(site.conv).items()}
    for name in ("stride", "padding", "dilation"):
        if not isinstance(options[name], str | int):
            options[name] = tuple(options[name])
            options[name] = options[name] * 2 if len(options[name]) == 1 else options[name]
    x, weight = (value(node) for node in site.conv.args[:2])
    if _changes_layout(site.conv):
        x = x.contiguous(memory_format=torch.channels_last)
    call = Conv2dCall(x, weight, **options, activation="relu", residual=value(site.residual))
    try:
        op.check(call)
    except InvalidArgument:
        # one image without a batch, or a residual that is broadcast
        return None
    return call


def _changes_layout(conv: fx.Node) -> bool:
    """Whether the image is not channels_last and the weight is: PyTorch's library would copy the image too."""
    values = (node.meta.get("example_value") for node in conv.args[:2] if isinstance(node, fx.Node))
    images = [value for value in values if isinstance(value, Tensor) and value.dim() == 4]
    return len(images) == 2 and not like_channels_last(images[0]) and like_channels_last(images[1])


def _replace(graph: fx.Graph, site: _Site, call: Conv2dCall) -> None:
    x, weight = site.conv.args[:2]
    if _changes_layout(site.conv):
        with graph.inserting_before(site.relu):
            x = graph.call_method("contiguous", (x,), {"memory_format": torch.channels_last})
    bias = _options(site.conv)["bias"]
    nodes = {"x": x, "weight": weight, "bias": bias, "residual": site.residual}
    args = tuple(nodes.get(name, value) for name, value in with_pairs(call)._asdict().items())
    with graph.inserting_before(site.relu):
        made = graph.call_function(torch.ops.wavecrest.conv2d_relu.default, args)
    made.meta = dict(site.relu.meta)
    between = site.relu.args[0]
    site.relu.replace_all_uses_with(made)
    for node in (site.relu, between, site.conv):
        if isinstance(node, fx.Node) and not node.users and node in graph.nodes:
            graph.erase_node(node)
