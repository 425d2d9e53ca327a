"""Questions about the nodes of a Dynamo graph: example values, memory that is shared, what writes."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch.utils import _pytree as pytree

# functions that write into their first argument
IN_PLACE = {
    getattr(operator, name)
    for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "setitem")
}
# functions whose names end in an underscore because Python has a word without it
NAMED_SO = (operator.and_, operator.or_, operator.not_, operator.is_)
CALLS = ("call_function", "call_method")


def value(node: Any) -> Any:
    """The example value (fake tensors) of a node; anything else is its own value."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def tensors(node: Any) -> list[Tensor]:
    """The tensors of a node's example value."""
    return [leaf for leaf in pytree.tree_leaves(value(node)) if isinstance(leaf, Tensor)]


def alone(node: Any) -> fx.Node | None:
    """A node that one other reads, once."""
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return None
    user = next(iter(node.users))
    return node if user.all_input_nodes.count(node) == 1 and user.args.count(node) == 1 else None


def memories(node: Any) -> set[int]:
    """Names of the memory that the tensors of a node lie in; views share it with what they are views of."""
    return {
        tensor.untyped_storage()._cdata for tensor in tensors(node) if tensor.layout is torch.strided
    }  # fmt: skip


def is_in_place(function: Any) -> bool:
    """Whether the name of a function or method says that it writes into its first argument."""
    if function in NAMED_SO:
        return False
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    return function in IN_PLACE or (name.endswith("_") and not name.startswith("_"))


def written(node: fx.Node) -> Iterator[Any]:
    """The arguments that a node writes into, as far as its target says; all of them where nothing is known of it."""
    if node.op not in CALLS:
        # a graph inside may do anything
        yield from node.all_input_nodes if node.op == "call_module" else ()
        return
    if "out" in node.kwargs:
        yield node.kwargs["out"]
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        yield from node.all_input_nodes
    elif isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        overloads = (
            [node.target]
            if isinstance(node.target, torch._ops.OpOverload)
            else [getattr(node.target, name) for name in node.target.overloads()]  # type: ignore[no-untyped-call]
        )
        if any(one._schema.is_mutable for one in overloads):
            yield from node.all_input_nodes
    elif node.args and (is_in_place(node.target) or _asks_in_place(node)):
        yield node.args[0]


def _asks_in_place(node: fx.Node) -> bool:
    """Whether a function of torch.nn.functional is told to work in place."""
    if isinstance(node.target, str) or not callable(node.target):
        return False
    # signatures take most of the time of a look at a graph
    if not any(given is True for given in (*node.args, *node.kwargs.values())):
        return False
    try:
        given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):
        # functions of C++ have no signature, and names of their own for what works in place
        return False
    return given.get("inplace") is True


def written_by(node: fx.Node) -> set[int]:
    """Names of the memory that a node writes into."""
    return {name for target in written(node) for name in memories(target)}


def writers(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """By the name of memory that is written, the nodes of a graph that write into it, in order."""
    found: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for name in written_by(node):
            found.setdefault(name, []).append(node)
    return found


def has_values(graph: fx.Graph) -> bool:
    """Whether every call that takes tensors has an example value, which alone says what shares memory.

    A call that makes nothing, and only writes, needs none.
    """
    return all(
        "example_value" in node.meta
        or sets_items(node)
        or is_kernel(node)
        or not any(tensors(one) for one in node.all_input_nodes)
        for node in graph.nodes
        if node.op in CALLS
    )


def is_kernel(node: fx.Node) -> bool:
    """Whether a node launches a Triton kernel, which writes into some of its arguments and has no value itself.

    All of them count as written (`written`).
    """
    return node.target is triton_kernel_wrapper_mutation


def sets_items(node: fx.Node) -> bool:
    """Whether a node is `x[…] = y`, which writes into x and has no value itself."""
    return node.op == "call_function" and node.target is operator.setitem


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, given by position or by name."""
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)
