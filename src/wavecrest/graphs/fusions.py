"""Backends for torch.compile that fuse what Inductor and eager do not, and then run Inductor or PyTorch's own kernels.

Four rewritings of the graph: attention that is written out is one call (`graphs.attention`), constants are taken out
(`graphs.constants`), linear layers end in their activation (`graphs.activations`), and, where PyTorch's own kernels
run, residual additions and norms are one kernel (`graphs.residual_norms`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from wavecrest.graphs import activations, attention, constants, residual_norms
from wavecrest.graphs.root import traceable
from wavecrest.measure.workload import Inputs
from wavecrest.ops._flash_attention.call import FlashAttentionCall
from wavecrest.ops._gemm.call import GemmCall


class Counts(NamedTuple):
    """Rewritings of the graphs of one call: constants, activations, additions with norms, attention written out."""

    constants: int = 0
    activations: int = 0
    norms: int = 0
    attention: int = 0

    def __add__(self, other: object) -> Counts:
        assert isinstance(other, Counts)
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))

    def __str__(self) -> str:
        words = (
            "calls whose results are constants",
            "linear layers that end in their activation",
            "residual additions with their norm",
            "calls of attention that are written out",
        )
        return ", ".join(f"{number} {what}" for number, what in zip(self, words, strict=True) if number)


class Rewritten(NamedTuple):
    """A graph, what was changed in it, and the constants that were taken out of it."""

    graph: fx.GraphModule
    counts: Counts
    parts: constants.Split | None

    def call(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the inputs that the graph had before; `run`: the graph as it is now, compiled or not."""
        return run if self.parts is None else constants.cached(run, self.parts)


def backend(
    module: nn.Module, choices: Mapping[str, str], *, inductor: bool, attentions: Mapping[str, str]
) -> Callable[..., Any]:
    """A backend for torch.compile of a call of `module`.

    Args:
        module: whose parameters and buffers constants are made from; it is not kept alive.
        choices: the backend of gemm for each linear layer with an activation, by `activations.name_of`.
        inductor: compile what is left by Inductor; else PyTorch's own kernels run, and wavecrest's between them.
        attentions: the backend of flash_attention for attention that is written out, by `attention.name_of`.
    """
    own = weakref.ref(module)

    def compile_graph(graph: fx.GraphModule, examples: list[Any]) -> Any:
        made = rewrite(graph, own(), choices, inductor=inductor, attentions=_by_name(attentions))
        if not inductor:
            return made.call(made.graph.forward)
        from torch._inductor.compile_fx import compile_fx

        more = [] if made.parts is None else last_inputs(made.graph, len(made.parts.values))
        compiled: Any = compile_fx(made.graph, [*examples, *more])
        return made.call(compiled)

    return compile_graph


def rewrite(
    graph: fx.GraphModule,
    module: nn.Module | None,
    choices: Mapping[str, str],
    *,
    inductor: bool,
    norms: residual_norms.Wanted = residual_norms.own_kernel,
    attentions: attention.Chosen,
) -> Rewritten:
    """A rewritten copy of a graph: Dynamo reads the inputs of its own once more.

    Args:
        graph: as Dynamo makes it.
        module, choices, inductor: as for `backend`.
        norms: which additions with norms are replaced.
        attentions: the backend of each call of attention.
    """
    graph = fx.GraphModule(graph, _copy(graph.graph))
    own = [] if module is None else constants.own_tensors(module)
    # first, as what a bias is made of may be constant
    attended = attention.rewrite(graph, own, attentions, as_ops=inductor)
    parts = None if module is None else constants.split(graph, own)
    linears = activations.rewrite(graph, choices, as_ops=inductor)
    # Inductor fuses these by itself
    added = 0 if inductor else residual_norms.rewrite(graph, norms)
    return Rewritten(graph, Counts(0 if parts is None else parts.calls, linears, added, attended), parts)


def _by_name(attentions: Mapping[str, str]) -> attention.Chosen:
    return lambda call: attentions.get(attention.name_of(call))


def _copy(graph: fx.Graph) -> fx.Graph:
    made = fx.Graph()
    result = made.graph_copy(graph, {})
    made.output(result)
    made.output_node().meta = dict(graph.output_node().meta)
    return made


class Traced(NamedTuple):
    """The graphs that Dynamo makes of one call, with the fake tensors of every node, and the inputs they refer to."""

    graphs: list[fx.GraphModule]
    inputs: Inputs


def trace(module: nn.Module, inputs: Inputs) -> Traced:
    """Trace one call, which runs eagerly."""
    found = Traced([], inputs.clone())

    def collecting(graph: fx.GraphModule, _examples: list[Tensor]) -> Any:
        # Dynamo takes the fake tensors out of its own graph in the end
        found.graphs.append(fx.GraphModule(graph, _copy(graph.graph)))
        return graph.forward

    with torch.no_grad():
        found.inputs.call(torch.compile(traceable(module), backend=collecting, dynamic=False))
    return found


def count(
    traced: Traced, module: nn.Module, choices: Mapping[str, str], *, inductor: bool, attentions: Mapping[str, str]
) -> Counts:
    """The number of changes that `rewrite` would make in the graphs of a call of `module`."""
    found = Counts()
    with torch.no_grad():
        for graph in traced.graphs:
            made = rewrite(graph, module, choices, inductor=inductor, attentions=_by_name(attentions))
            found += made.counts
    return found


def attention_calls(traced: Traced) -> list[FlashAttentionCall]:
    """Attention that is written out in graphs, one call of flash_attention each, with fake tensors."""
    with torch.no_grad():
        return [call for graph in traced.graphs for call in attention.calls_of(graph)]


def activation_calls(traced: Traced) -> list[GemmCall]:
    """The linear layers of graphs that end in an activation, one call of gemm each, with fake tensors."""
    with torch.no_grad():
        calls = [activations.call_of(site) for graph in traced.graphs for site in activations.sites(graph.graph)]
    return [call for call in calls if call is not None]


def last_inputs(graph: fx.GraphModule, number: int) -> list[Any]:
    """The example values of the last `number` inputs of a graph: where constants were taken out, these."""
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return [node.meta["example_value"] for node in placeholders[-number:]]
