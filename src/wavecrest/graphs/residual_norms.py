"""Additions of a Dynamo graph whose sum goes into a norm: both in one kernel, which returns the sum too if it is used.

In eager the sum is written and read again, twice where it is also the next residual. Inductor fuses the two by itself,
so this is for graphs that run PyTorch's own kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from wavecrest import ops
from wavecrest.errors import InvalidArgument
from wavecrest.graphs.nodes import argument, memories, tensors, value, writers
from wavecrest.ops.rows.call import RowCall

ADDITIONS = (operator.add, torch.add, "add", "__add__")
MULTIPLICATIONS = (operator.mul, torch.mul, "mul")
CASTS = ("to", "type_as", "float", "type")

Wanted = Callable[[RowCall], bool]


class Norm(NamedTuple):
    """A norm over the last dimension: the node with its result, and its parameters (nodes or None)."""

    kind: str
    source: fx.Node
    end: fx.Node
    weight: Any
    bias: Any
    eps: float


def own_kernel(call: RowCall) -> bool:
    """True where dispatch runs one kernel of wavecrest for a call by default: PyTorch has none that does both."""
    kernel = _ops(call.kind)[1].backends["triton"]
    return call.x.device.type != "cpu" and kernel.refuse(call) is None and kernel.opt_in(call) is None


def rewrite(graph: fx.GraphModule, wanted: Wanted = own_kernel) -> int:
    """Replace additions and the norms of their sums, in place; returns how many.

    Args:
        graph: as Dynamo makes it, with an example value for every node.
        wanted: which calls, with fake tensors, are replaced.
    """
    count, written = 0, set(writers(graph.graph))
    for norm in list(norms(graph.graph)):
        added = norm.source
        if added.op not in ("call_function", "call_method") or added.target not in ADDITIONS or added.kwargs:
            continue
        call = _call(norm)
        # a sum that is written to later is not the one that the norm is of
        if call is None or memories(added) & written or not wanted(call):
            continue
        _replace(graph.graph, norm)
        count += 1
    if count:
        graph.graph.lint()
        graph.recompile()
    return count


def norms(graph: fx.Graph) -> Iterator[Norm]:
    """The norms over the last dimension: by PyTorch's functions, and RMSNorm as models write it out."""
    for node in graph.nodes:
        found = _function(node) or _written_out(node)
        if found is not None and len(tensors(found.source)) == 1:
            yield found


def _function(node: fx.Node) -> Norm | None:
    if node.op != "call_function" or node.target not in (F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm):
        return None
    source, sizes = argument(node, 0, "input"), argument(node, 1, "normalized_shape")
    if not isinstance(source, fx.Node) or len(sizes) != 1:
        return None
    weight = argument(node, 2, "weight")
    if node.target in (F.layer_norm, torch.layer_norm):
        return Norm("layer", source, node, weight, argument(node, 3, "bias"), argument(node, 4, "eps", 1e-5))
    eps = argument(node, 3, "eps")
    return None if eps is None else Norm("rms", source, node, weight, None, eps)


def _written_out(node: fx.Node) -> Norm | None:
    """weight * (x * rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)).to(dtype) in float32, as in transformers."""
    for weight, scaled in _factors(node):
        inner = _before_cast(scaled)
        for factor, root in _factors(inner):
            found = _inverse_root(root)
            source = _before_cast(factor)
            if found is None or source is None:
                continue
            eps, squared, parts = found
            # T5 casts where it squares, others before both
            is_wide = all(tensors(one)[0].dtype in (torch.float32, torch.float64) for one in (inner, squared))
            if not is_wide or _before_cast(squared) is not source:
                continue
            inside = {node, scaled, inner, factor, squared, *parts} - {source}
            if all(user in inside for one in inside - {node} for user in one.users):
                return Norm("rms", source, node, weight, None, eps)
    return None


def _factors(node: Any) -> tuple[tuple[Any, Any], ...]:
    """The two orders of the factors of a product; none of anything else."""
    if not isinstance(node, fx.Node) or node.target not in MULTIPLICATIONS or len(node.args) != 2:
        return ()
    first, second = node.args
    return (first, second), (second, first)


def _before_cast(node: Any) -> fx.Node | None:
    """The argument of a cast to another floating dtype; a node that is not a cast itself."""
    if not isinstance(node, fx.Node) or len(tensors(node)) != 1:
        return None
    source = node.args[0] if node.args else None
    if node.op == "call_method" and node.target in CASTS and isinstance(source, fx.Node):
        return source if tensors(node)[0].is_floating_point() and tensors(source)[0].is_floating_point() else None
    return node


def _inverse_root(node: Any) -> tuple[float, fx.Node, tuple[Any, ...]] | None:
    """eps, x, and the calls it is made of, if a node is rsqrt(mean(x², -1, keepdim=True) + eps)."""
    shifted = _operand(node, (torch.rsqrt, "rsqrt"))
    if shifted is None or shifted.target not in ADDITIONS or len(shifted.args) != 2:
        return None
    mean, eps = shifted.args if isinstance(shifted.args[0], fx.Node) else shifted.args[::-1]
    square = _operand(mean, ("mean", torch.mean))
    if square is None or not isinstance(mean, fx.Node) or not isinstance(eps, float):
        return None
    if argument(mean, 1, "dim") not in (-1, (-1,), [-1]) or argument(mean, 2, "keepdim") is not True:
        return None
    x = square.args[0] if square.args else None
    if not isinstance(x, fx.Node) or len(tensors(x)) != 1:
        return None
    is_power = square.target in ("pow", torch.pow, operator.pow) and tuple(square.args) == (x, 2)
    is_product = square.target in MULTIPLICATIONS and tuple(square.args) == (x, x)
    return (eps, x, (node, shifted, mean, square)) if is_power or is_product else None


def _operand(node: Any, targets: tuple[Any, ...]) -> fx.Node | None:
    """The first argument of a call of one of these."""
    if not isinstance(node, fx.Node) or node.target not in targets or not isinstance(node.args[0], fx.Node):
        return None
    return node.args[0]


def _ops(kind: str) -> tuple[Callable[..., Any], Any]:
    if kind == "layer":
        return ops.add_layer_norm, ops.get("add_layer_norm")
    return ops.add_rms_norm, ops.get("add_rms_norm")


def _call(norm: Norm) -> RowCall | None:
    """The call that a sum and its norm are, with the example values; None if the op does not take it as it is."""
    # both run where the sum is, so the parameters must be there
    if any(isinstance(one, fx.Node) and one.op not in ("placeholder", "get_attr") for one in (norm.weight, norm.bias)):
        return None
    operands = [value(one) for one in norm.source.args]
    weight, bias, result = value(norm.weight), value(norm.bias), value(norm.end)
    if len(operands) != 2 or not all(isinstance(one, Tensor) for one in (*operands, result)):
        return None
    call = RowCall(norm.kind, operands[0], operands[1], weight, bias, norm.eps)
    try:
        _ops(norm.kind)[1].check(call)
    except InvalidArgument:
        # a residual that is broadcast or of another dtype
        return None
    if result.shape != operands[0].shape or result.dtype != operands[0].dtype:
        return None
    return None if torch.is_grad_enabled() and call.needs_grad else call


def _replace(graph: fx.Graph, norm: Norm) -> None:
    function, _ = _ops(norm.kind)
    x, residual = norm.source.args
    parameters = (norm.weight,) if norm.kind == "rms" else (norm.weight, norm.bias)
    if norm.kind == "layer" and set(norm.source.users) == {norm.end}:
        # as at the end of a post-norm layer: nothing else takes the sum
        with graph.inserting_before(norm.end):
            alone = graph.call_function(ops.post_layer_norm, (x, residual, *parameters, norm.eps))
        alone.meta = dict(norm.end.meta)
        norm.end.replace_all_uses_with(alone)
        graph.erase_node(norm.end)
        graph.erase_node(norm.source)
        return
    with graph.inserting_before(norm.source):
        both = graph.call_function(function, (x, residual, *parameters, norm.eps))
        normed = graph.call_function(operator.getitem, (both, 0))
        added = graph.call_function(operator.getitem, (both, 1))
    both.meta = {"example_value": (value(norm.end), value(norm.source))}
    normed.meta, added.meta = dict(norm.end.meta), dict(norm.source.meta)
    norm.end.replace_all_uses_with(normed)
    norm.source.replace_all_uses_with(added)
    # what is between the two
    node = norm.end
    while node is not added:
        node, last = node.prev, node
        if not last.users:
            graph.erase_node(last)
