"""Parts of a Dynamo graph that do not depend on the inputs of the call, computed once instead of in every call.

Position ids, tables of relative positions, causal masks, projections of embeddings: with static shapes they depend on
the model's own parameters and buffers alone. Their values are kept, and computed again when one of the tensors they
were made from is another one or was written to (PyTorch's version counter).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from wavecrest.graphs.nodes import (
    CALLS,
    argument,
    has_values,
    memories,
    sets_items,
    tensors,
    value,
    writers,
    written_by,
)

# bytes that the constants of one graph may take
MOST_BYTES = 1 << 30
# calls that take shape, dtype and device from a tensor and make one full of a number: which number, or its argument
FULL = {
    "new_zeros": 0, "new_ones": 1, "new_full": (2, "fill_value"), torch.zeros_like: 0, torch.ones_like: 1,
    torch.full_like: (1, "fill_value"),
}  # fmt: skip


class _NotConstant(Exception):
    """A function whose result is not fixed by its arguments, or that writes."""


class _Pure(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets through only operations that read their arguments and make the same of them every time.

    With `writes` also those that write into them.
    """

    def __init__(self, *, writes: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._writes = writes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        random = torch.Tag.nondeterministic_seeded in func.tags
        # memory without values
        empty = "empty" in func._schema.name
        if random or empty or (func._schema.is_mutable and not self._writes):
            raise _NotConstant(str(func))
        return func(*args, **(kwargs or {}))


class Split(NamedTuple):
    """A graph in two parts.

    Attributes:
        constants: makes the constants of the model's tensors, in the order of `places`.
        places: where these tensors are among the inputs of the graph.
        sources: the tensors themselves.
        values: the constants.
        calls: how many the graph made for them.
    """

    constants: fx.GraphModule
    places: list[int]
    sources: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    calls: int


def split(graph: fx.GraphModule, own: Iterable[Tensor]) -> Split | None:
    """Take the constants out of a graph, in place: they become inputs after its own. None if nothing is constant.

    Args:
        graph: as Dynamo makes it, with static shapes.
        own: parameters and buffers of the model. A parameter is no constant while gradients are recorded.
    """
    if not has_values(graph.graph) or in_autocast(graph.graph):
        return None
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    known, private, found = _look(graph, own, placeholders)
    if any(node not in found for node in graph.graph.nodes if (memories(node) | written_by(node)) & private):
        # a part of what is written in place could not be computed
        return None
    kept = _kept(graph.graph, found, known)
    if not kept:
        return None
    module, used = _constants_graph(graph, placeholders, kept)
    places = [index for index, node in enumerate(placeholders) if node in used]
    sources = tuple(known[placeholders[index]] for index in places)
    count = sum(node.op in CALLS for node in module.graph.nodes)
    _replace(graph, placeholders, kept, found)
    return Split(module, places, sources, tuple(found[node] for node in kept), count)


def values(graph: fx.GraphModule, own: Iterable[Tensor]) -> dict[fx.Node, Any]:
    """The present values of the nodes that depend on the model's own tensors alone; arguments as of `split`."""
    if not has_values(graph.graph) or in_autocast(graph.graph):
        return {}
    return _look(graph, own, [node for node in graph.graph.nodes if node.op == "placeholder"])[2]


def _look(
    graph: fx.GraphModule, own: Iterable[Tensor], placeholders: list[fx.Node]
) -> tuple[dict[fx.Node, Tensor], set[int], dict[fx.Node, Any]]:
    """The inputs that are the model's own, the memory that their nodes alone write into, and all values known."""
    _fill_by_shape(graph.graph)
    written = writers(graph.graph)
    known = _own_inputs(placeholders, {id(tensor) for tensor in own}, set(written))
    private = _private(graph.graph, known, written)
    return known, private, _evaluate(graph, known, (set(written) - private) | _returned(graph.graph), private)


def _fill_by_shape(graph: fx.Graph) -> None:
    """Make tensors full of a number of their shapes alone, in place: sizes are fixed, so no input decides on them."""
    for node in list(graph.nodes):
        known = FULL.get(node.target) if node.op in CALLS else None
        number = argument(node, *known) if isinstance(known, tuple) else known
        made = value(node)
        if not isinstance(number, int | float) or not isinstance(made, Tensor) or not made.is_contiguous():
            continue
        if made.layout is not torch.strided or not all(type(size) is int for size in made.shape):
            continue
        with graph.inserting_before(node):
            plain = graph.call_function(
                torch.full, (tuple(made.shape), number), {"dtype": made.dtype, "device": made.device}
            )
        plain.meta = dict(node.meta)
        node.replace_all_uses_with(plain)
        graph.erase_node(node)


def cached(run: Callable[..., Any], parts: Split) -> Callable[..., Any]:
    """A function of the whole graph's inputs; `run`, the graph without its constants, takes these after its own."""
    # one name for all that belongs together: two threads may call at the same time
    state = _State(parts.sources, tuple(_version(one) for one in parts.sources), parts.values)

    def call(*args: Any) -> Any:
        nonlocal state
        now = state
        for place, source, version in zip(parts.places, now.sources, now.versions, strict=True):
            given = args[place]
            if given is not source or _version(given) != version:
                now = state = _again(parts, args)
                break
        return run(*args, *now.values)

    return call


class _State(NamedTuple):
    sources: tuple[Tensor, ...]
    versions: tuple[int, ...]
    values: tuple[Tensor, ...]


def _again(parts: Split, args: Sequence[Any]) -> _State:
    sources = tuple(args[place] for place in parts.places)
    with torch.inference_mode(False), torch.no_grad():
        return _State(sources, tuple(_version(one) for one in sources), tuple(parts.constants(*sources)))


def _version(tensor: Tensor) -> int:
    # tensors of inference mode count no versions, and outside of it cannot be written to
    return -1 if tensor.is_inference() else tensor._version


def _real(node: fx.Node) -> Any:
    """The tensor behind an input of a graph while Dynamo compiles it."""
    held = node.meta.get("grapharg")
    return None if held is None else held.example


def _own_inputs(placeholders: list[fx.Node], own: set[int], written: set[int]) -> dict[fx.Node, Tensor]:
    found: dict[fx.Node, Tensor] = {}
    for node in placeholders:
        real = _real(node)
        if not isinstance(real, Tensor) or id(real) not in own or memories(node) & written:
            continue
        if not (torch.is_grad_enabled() and real.requires_grad):
            found[node] = real
    return found


def in_autocast(graph: fx.Graph) -> bool:
    """Whether types may be changed around a call; regions that switch this off are no matter where it is not on."""
    devices = {tensor.device.type for node in graph.nodes for tensor in tensors(node)}
    if any(torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) for device in devices):
        return True
    enters = [node for node in graph.nodes if getattr(node.target, "__name__", "") == "_enter_autocast"]
    # (device, dtype, enabled, cache_enabled)
    return any(len(node.args) < 3 or node.args[2] for node in enters)


def _returned(graph: fx.Graph) -> set[int]:
    """Memory that a graph gives to its caller, who may write into it."""
    return {name for node in graph.output_node().all_input_nodes for name in memories(node)}


def _private(graph: fx.Graph, known: Iterable[fx.Node], written: Mapping[int, list[fx.Node]]) -> set[int]:
    """Written memory of which every tensor depends on `known` alone, and nothing else reads before the last write.

    `written`: the nodes that write, by memory.
    """
    fixed = set(known)
    for node in graph.nodes:
        if node.op in CALLS and _has_result(node) and all(one in fixed for one in node.all_input_nodes):
            fixed.add(node)
    place = {node: index for index, node in enumerate(graph.nodes)}
    found, holders = set(written), dict[int, list[fx.Node]]()
    for node in graph.nodes:
        lies_in = memories(node) & written.keys()
        if node not in fixed or node.op == "placeholder":
            found -= lies_in
        for name in lies_in:
            holders.setdefault(name, []).append(node)
    for name in set(found):
        last = max(place[node] for node in written[name])
        readers = [user for node in holders.get(name, ()) for user in node.users if user not in fixed]
        if any(node not in fixed for node in written[name]) or any(place[user] < last for user in readers):
            found.discard(name)
    return found


def _evaluate(
    graph: fx.GraphModule, known: Mapping[fx.Node, Tensor], shared: set[int], private: set[int]
) -> dict[fx.Node, Any]:
    """The values of all nodes that depend on `known` alone, and are neither returned nor, but `private`, written to."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    found: dict[fx.Node, Any] = dict(known)
    with unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
        for node in graph.graph.nodes:
            if node.op not in CALLS or not all(one in found for one in node.all_input_nodes):
                continue
            if not _has_result(node) or memories(node) & shared:
                continue
            try:
                found[node] = _run(node, found, writes=bool(written_by(node) & private))
            # whatever a function raises outside of Dynamo: it is computed in every call, as before
            except Exception as error:
                node.meta["not_constant"] = f"{type(error).__name__}: {error}"
    return found


def _has_result(node: fx.Node) -> bool:
    """Whether a call makes a tensor, or writes into one and makes nothing."""
    return bool(tensors(node)) or sets_items(node)


def _run(node: fx.Node, found: Mapping[fx.Node, Any], *, writes: bool) -> Any:
    def of(one: fx.Node) -> Any:
        return found[one]

    args, kwargs = fx.node.map_arg(node.args, of), fx.node.map_arg(node.kwargs, of)
    with _Pure(writes=writes):
        if node.op == "call_method":
            made = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        else:
            made = node.target(*args, **kwargs)  # type: ignore[operator]
    for real, fake in zip(pytree.tree_leaves(made), pytree.tree_leaves(value(node)), strict=True):
        if isinstance(fake, Tensor) and (real.shape != fake.shape or real.dtype != fake.dtype):
            raise _NotConstant(f"{node} is {list(real.shape)} {real.dtype} outside of the graph")
    return made


def _kept(graph: fx.Graph, found: Mapping[fx.Node, Any], known: Mapping[fx.Node, Tensor]) -> list[fx.Node]:
    """The constants that something else reads, without views of the model's own tensors, which cost nothing."""
    own = {tensor.untyped_storage().data_ptr() for tensor in known.values()}
    kept, size = [], 0
    for node in graph.nodes:
        real = found.get(node)
        if node in known or not isinstance(real, Tensor) or all(user in found for user in node.users):
            continue
        if real.layout is not torch.strided or real.untyped_storage().data_ptr() in own:
            continue
        if size + real.nbytes <= MOST_BYTES:
            kept.append(node)
            size += real.nbytes
    return kept


def _constants_graph(
    graph: fx.GraphModule, placeholders: list[fx.Node], kept: list[fx.Node]
) -> tuple[fx.GraphModule, set[fx.Node]]:
    """The graph of the constants alone, and the inputs of the whole graph that are its inputs."""
    needed: set[fx.Node] = set()
    open_nodes, written = list(kept), writers(graph.graph)
    while open_nodes:
        node = open_nodes.pop()
        if node not in needed:
            needed.add(node)
            open_nodes.extend(node.all_input_nodes)
            # and what writes into it
            open_nodes.extend(one for name in memories(node) for one in written.get(name, ()))
    made = fx.Graph()
    places: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        if node in needed:
            places[node] = made.node_copy(node, lambda one: places[one])
    made.output(tuple(places[node] for node in kept))
    return fx.GraphModule(graph, made), {node for node in placeholders if node in needed}


def _replace(
    graph: fx.GraphModule, placeholders: list[fx.Node], kept: list[fx.Node], found: Mapping[fx.Node, Any]
) -> None:
    """Inputs, after the graph's own, in the place of constants."""
    last = placeholders[-1] if placeholders else None
    for number, node in enumerate(kept):
        with graph.graph.inserting_after(last) if last else graph.graph.inserting_before():
            made = graph.graph.placeholder(f"wavecrest_constant_{number}")
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        last = made
    for node in reversed(graph.graph.nodes):
        if node.op in CALLS and node in found and not node.users:
            graph.graph.erase_node(node)
    graph.graph.lint()
    graph.recompile()


def own_tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers of a model."""
    return [*module.parameters(), *module.buffers()]
