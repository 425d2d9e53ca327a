"""Linear layers of a Dynamo graph that end in their activation in one kernel.

PyTorch runs the activation after a linear layer, and Inductor fuses it with what follows: both read and write the
widest activations of a model once more. An activation is recognised by what it computes, so one that a model writes out
(the tanh form of GELU in older code) is found too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from wavecrest.dispatch.keys import dtype_name, needs_grad
from wavecrest.errors import InvalidArgument
from wavecrest.graphs.nodes import CALLS, argument, tensors, value
from wavecrest.nn.activation import activation_name
from wavecrest.nn.linear import linear_on
from wavecrest.ops._gemm.backend import op
from wavecrest.ops._gemm.call import GemmCall, linear_call

# functions and methods that an activation may be made of, by name
PARTS = frozenset(
    ("gelu", "relu", "relu_", "silu", "silu_", "tanh", "erf", "sigmoid", "pow", "mul", "add", "truediv", "div", "neg")
)
# more calls than any activation is made of
MOST_PARTS = 12


class Site(NamedTuple):
    """A linear layer, and the calls that make its activation, of which the last alone is read from elsewhere."""

    linear: fx.Node
    parts: tuple[fx.Node, ...]
    activation: str | None


def sites(graph: fx.Graph) -> Iterator[Site]:
    """The linear layers whose result goes into an activation alone."""
    for node in graph.nodes:
        if is_linear(node) and len(tensors(node)) == 1:
            found = _activation(node)
            if found is not None:
                yield Site(node, *found)


def name_of(call: GemmCall) -> str:
    """The name under which a choice of backend is kept.

    Activation, sizes, dtype, the names of what else there is, and the precision where it is not "ieee".
    """
    others = {"bias": call.bias, "residual": call.residual, "norm": call.norm_weight}
    more = "".join(f" {name}" for name, given in others.items() if given is not None)
    more += "" if call.precision == "ieee" else f" {call.precision}"
    return f"{call.activation or 'linear'} {call.M}x{call.K}x{call.columns} {dtype_name(call.a)}{more}"


def call_of(site: Site) -> GemmCall | None:
    """The call of gemm that a site is, with the example values; None if it needs gradients or gemm does not take it."""
    x, weight, bias = (value(node) for node in _inputs_of(site.linear))
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return None
    try:
        call = linear_call(x, weight, bias, activation=site.activation)
        op.check(call)
    except InvalidArgument:
        return None
    grads = torch.is_grad_enabled() and needs_grad(x, weight, bias)
    return None if grads or call.dtype != x.dtype else call


def rewrite(graph: fx.GraphModule, backends: Mapping[str, str], *, as_ops: bool) -> int:
    """Replace linear layers and their activations by one call, in place; returns how many.

    Args:
        graph: as Dynamo makes it, with an example value for every node.
        backends: the backend of gemm by `name_of`; calls that are not in it stay.
        as_ops: as one operation of PyTorch a kernel, for Inductor; else as a plain function, which costs less.
    """
    count = 0
    for site in list(sites(graph.graph)):
        call = call_of(site)
        backend = backends.get(name_of(call)) if call is not None else None
        if backend is None:
            continue
        target: Callable[..., Any] = torch.ops.wavecrest.linear_on.default if as_ops else linear_on
        _replace(graph.graph, site, target, backend)
        count += 1
    if count:
        graph.graph.lint()
        graph.recompile()
    return count


def replace_linear(graph: fx.Graph, linear: fx.Node, backend: str) -> None:
    """Put a linear layer on a backend of gemm, as one operation, in place."""
    _replace(graph, Site(linear, (), None), torch.ops.wavecrest.linear_on.default, backend)


_in_graph = torch.library.custom_op("wavecrest::linear_on", linear_on, mutates_args=())


@_in_graph.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, backend: str, precision: str = "ieee"
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def is_linear(node: fx.Node) -> bool:
    """Whether a node is a call of `torch.nn.functional.linear`."""
    return node.op == "call_function" and node.target in (F.linear, torch._C._nn.linear)


def _inputs_of(linear: fx.Node) -> tuple[Any, Any, Any]:
    return argument(linear, 0, "input"), argument(linear, 1, "weight"), argument(linear, 2, "bias")


def _activation(linear: fx.Node) -> tuple[tuple[fx.Node, ...], str] | None:
    """The calls that make the activation of a linear layer's result, the last of which has it, and its name."""
    parts: tuple[fx.Node, ...] = ()
    for node in _after(linear):
        parts = (*parts, node)
        inside = {linear, *parts}
        # nothing but the end may be read from elsewhere
        if all(user in inside for one in inside - {node} for user in one.users):
            name = _name(linear, parts)
            if name:
                return parts, name
    return None


def _after(linear: fx.Node) -> Iterator[fx.Node]:
    """Calls that work on a linear layer's result alone and may be part of an activation, in their order."""
    inside, node, shape = {linear}, linear.next, tensors(linear)[0].shape
    while node.op != "output" and len(inside) <= MOST_PARTS:
        if any(one in inside for one in node.all_input_nodes):
            found = tensors(node)
            whole = len(found) == 1 and found[0].shape == shape and all(one in inside for one in node.all_input_nodes)
            if node.op not in CALLS or not _is_part(node) or not whole:
                return
            inside.add(node)
            yield node
        node = node.next


def _is_part(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in PARTS


def _name(linear: fx.Node, parts: tuple[fx.Node, ...]) -> str:
    """The activation that some calls compute, or ""."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    def run(x: Tensor) -> Any:
        values: dict[fx.Node, Any] = {linear: x}
        for node in parts:
            args = fx.node.map_arg(node.args, values.__getitem__)
            kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
            if node.op == "call_method":
                values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return values[parts[-1]]

    with unset_fake_temporarily():
        return activation_name(run)


def _replace(graph: fx.Graph, site: Site, target: Callable[..., Any], backend: str) -> None:
    args = (*_inputs_of(site.linear), site.activation, backend)
    end = site.parts[-1] if site.parts else site.linear
    with graph.inserting_before(end):
        made = graph.call_function(target, args)
    made.meta = dict(end.meta)
    end.replace_all_uses_with(made)
    for node in (*reversed(site.parts), site.linear):
        graph.erase_node(node)
