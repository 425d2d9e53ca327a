"""`torch.compile(model, backend="wavecrest")`: a plan applied, or dispatch's choices and then Inductor.

PyTorch finds the backend by the entry point group `torch_dynamo_backends`. What was done with each graph is logged to
`wavecrest.compile` and kept: `last_report()`, `reports()`.
"""

from __future__ import annotations

import inspect
import logging
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from wavecrest.dispatch.decision import Decision
from wavecrest.errors import InvalidArgument, PlanMismatch, PlanWarning, WavecrestError
from wavecrest.graphs import activations, attention, constants, fusions
from wavecrest.graphs.inductor import PRESETS
from wavecrest.graphs.nodes import memories, tensors, value, writers
from wavecrest.measure.workload import Inputs
from wavecrest.nn.attention import sdpa, sdpa_call
from wavecrest.ops._flash_attention.backend import op as flash_attention
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall
from wavecrest.optimizer.plan import Plan

__all__ = ["Report", "last_report", "reports", "wavecrest"]

# what torch.compile's `options` may hold, and the presets that say what runs a rewritten graph
OPTIONS = ("plan", "preset")
ENDS = {"fusions": "Inductor", "graph": "PyTorch's own kernels"}
# backends that calls run on already
NATIVE = ("torch", "reference")
APPLY = "wavecrest.Plan.load(FILE).apply(model, inputs) needs no such thing"
# values of arguments that Dynamo guards, so that they are constants of a compiled call
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
MOST_REPORTS = 64
NONE = fusions.Counts()

_logger = logging.getLogger("wavecrest.compile")
_reports: deque[Report] = deque(maxlen=MOST_REPORTS)


@dataclass(frozen=True, slots=True)
class Report:
    """The changes to one graph, and what runs it.

    Attributes:
        model: class of the model, or "a function".
        plan: the file of the plan that was applied, or None.
        steps: the titles of the plan's steps in force.
        routed: calls that run on another backend than PyTorch's, one line each with the number of such calls.
        counts: rewritings of the graph.
        end: what runs the graph in the end.
        notes: what was left undone or differs, and why.
    """

    model: str
    plan: str | None = None
    steps: tuple[str, ...] = ()
    routed: tuple[str, ...] = ()
    counts: fusions.Counts = NONE
    end: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line for people."""
        done = (*self.steps, *self.routed, *filter(None, [str(self.counts)]))
        what = f"plan {self.plan}: " if self.plan else ""
        more = "".join(f" ({note})" for note in self.notes)
        return f"{self.model}: {what}{', '.join(done) or 'nothing changed'}; then {self.end}{more}"


def reports() -> list[Report]:
    """The reports of the latest graphs of this process, at most 64, in their order."""
    return list(_reports)


def last_report() -> Report | None:
    """The report of the latest graph; None before the first one."""
    return _reports[-1] if _reports else None


def _tell(report: Report) -> None:
    _reports.append(report)
    _logger.info("%s", report)


def wavecrest(
    graph: fx.GraphModule, examples: list[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend. Its options are those of `torch.compile(…, options={…})`.

    Args:
        graph, examples: as Dynamo makes them.
        mode: handed to Inductor.
        options: "plan": the file of a plan, which the whole model then runs by; or "preset": "fusions" (Inductor
            compiles what dispatch leaves; the default) or "graph" (PyTorch's own kernels run it).

    Errors are raised when the model is called, as they are: Dynamo would wrap them, or drop them for eager code.

    Raises:
        InvalidArgument: an option is unknown, or one that does not go with another.
        PlanError: the plan's file is damaged or foreign.
        PlanMismatch: the plan is for another model or another architecture, or cannot be applied inside torch.compile.
    """
    try:
        plan, preset = _options(options or {}, mode)
        if plan is not None:
            return _Planned(graph, plan)
    except WavecrestError as error:
        return _raising(error)
    return _compiled(graph, examples, preset, mode)


def _options(options: Mapping[str, Any], mode: str | None) -> tuple[Path | None, str]:
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise InvalidArgument(f"backend wavecrest: options take {', '.join(OPTIONS)}, not {', '.join(unknown)}")
    preset = options.get("preset", "fusions")
    if preset not in ENDS:
        raise InvalidArgument(f"backend wavecrest: preset takes {', '.join(ENDS)}, not {preset!r}")
    plan = options.get("plan")
    if plan is None:
        if mode is not None and preset != "fusions":
            raise InvalidArgument("backend wavecrest: a mode is Inductor's, which does not run with preset graph")
        return None, preset
    if not isinstance(plan, str | Path):
        raise InvalidArgument(f"backend wavecrest: plan takes the name of a file, not {type(plan).__name__}")
    if mode is not None or "preset" in options:
        raise InvalidArgument("backend wavecrest: a plan says how the model is compiled; leave mode and preset out")
    return Path(plan), preset


def _raising(error: WavecrestError) -> Callable[..., Any]:
    def run(*_inputs: Any) -> Any:
        raise error

    return run


# --- without a plan: dispatch's choices, then the preset ---


def _compiled(graph: fx.GraphModule, examples: list[Any], preset: str, mode: str | None) -> Callable[..., Any]:
    frame = _frame()
    model = None if frame is None else frame.model
    name = "a function" if model is None else type(model).__name__
    inductor = PRESETS[preset].fusions == "inductor"
    notes: list[str] = []
    if any(isinstance(one, torch.SymInt) for one in examples):
        notes.append("sizes are not known, so nothing was rewritten: dynamic=False compiles each shape anew")
    elif constants.in_autocast(graph.graph):
        notes.append("autocast decides on dtypes call by call, so nothing was rewritten: convert the model instead")
    if notes:
        made, routed = fusions.Rewritten(graph, NONE, None), Counter[str]()
    else:
        routed = Counter()
        choices = _choices(graph.graph, routed)
        made = fusions.rewrite(graph, model, choices, inductor=inductor, attentions=attention.by_dispatch)
        short = Counter(attention.name_of(call) for call in attention.calls_of(graph) if attention.is_short(call))
        notes += [
            f"{count} × attention {name} stays written out: it has fewer than {attention.SHORT} keys, and dispatch has "
            "PyTorch's kernel for it"
            for name, count in short.items()
        ]
        _route_linears(made.graph, routed)
        _route_attention(made.graph, routed)
        made.graph.graph.lint()
        made.graph.recompile()
    lines = tuple(f"{count} × {line}" for line, count in routed.items())
    _tell(Report(name, routed=lines, counts=made.counts, end=ENDS[preset], notes=tuple(notes)))
    if not inductor:
        return made.call(made.graph.forward)
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    # the inputs of a graph whose constants were taken out are followed by these
    more = [] if made.parts is None else fusions.last_inputs(made.graph, len(made.parts.values))
    patches = None if mode is None else list_mode_options(mode)
    compiled: Any = compile_fx(made.graph, [*examples, *more], config_patches=patches)
    return made.call(compiled)


def _choices(graph: fx.Graph, routed: Counter[str]) -> dict[str, str]:
    """The backends that dispatch chooses for linear layers with their activation, where it is not PyTorch's."""
    found: dict[str, str] = {}
    for site in activations.sites(graph):
        call = activations.call_of(site)
        decision = None if call is None else _other(gemm.decide(call))
        if call is not None and decision is not None:
            found[activations.name_of(call)] = decision.backend
            routed[_line(decision)] += 1
    return found


def _route_linears(graph: fx.GraphModule, routed: Counter[str]) -> None:
    """Put linear layers on the backend that dispatch chooses, in place."""
    for node in list(graph.graph.nodes):
        call = _linear_call(node)
        decision = None if call is None else _other(gemm.decide(call))
        if decision is not None:
            activations.replace_linear(graph.graph, node, decision.backend)
            routed[_line(decision)] += 1


def _linear_call(node: fx.Node) -> GemmCall | None:
    if not activations.is_linear(node) or len(tensors(node)) != 1:
        return None
    return activations.call_of(activations.Site(node, (), None))


def _route_attention(graph: fx.GraphModule, routed: Counter[str]) -> None:
    """Put calls of scaled_dot_product_attention on the backend that dispatch chooses, in place."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target is not F.scaled_dot_product_attention:
            continue
        given = inspect.signature(sdpa_call).bind(*node.args, **node.kwargs)
        given.apply_defaults()
        values = [value(one) for one in given.args]
        if torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in values):
            continue
        call = sdpa_call(*values)
        decision = None if isinstance(call, str) else _other(flash_attention.decide(call))
        if decision is None:
            continue
        with graph.graph.inserting_before(node):
            made = graph.graph.call_function(torch.ops.wavecrest.sdpa.default, tuple(given.args))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.graph.erase_node(node)
        routed[_line(decision)] += 1


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    made = sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    # no copy where the op ran, whose result lies so
    return made.transpose(1, 2).contiguous().transpose(1, 2)


_in_graph = torch.library.custom_op("wavecrest::sdpa", _attend, mutates_args=())


@_in_graph.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_more: Any) -> Tensor:
    batch, heads, queries, _ = query.shape
    return query.new_empty((batch, queries, heads, value.shape[-1])).transpose(1, 2)


def _other(decision: Decision) -> Decision | None:
    """A decision for another backend than PyTorch's."""
    return None if decision.backend in NATIVE else decision


def _line(decision: Decision) -> str:
    return f"{decision.op} on {decision.backend} ({decision.source})"


# --- with a plan: the compiled call runs the plan's model ---


class _Frame(NamedTuple):
    """The call of a model that Dynamo compiles."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _frame() -> _Frame | None:
    """The model's call that Dynamo is compiling; None if it is something else."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tx = InstructionTranslator.current_tx()
    except AttributeError:
        return None
    code, values = tx.f_code, tx.f_locals
    names = code.co_varnames
    count, only = code.co_argcount, code.co_kwonlyargcount
    if any(name not in values for name in names[: count + only]):
        return None
    args = [values[name] for name in names[:count]]
    kwargs = {name: values[name] for name in names[count : count + only]}
    rest = count + only
    if code.co_flags & inspect.CO_VARARGS:
        args += values.get(names[rest], ())
        rest += 1
    if code.co_flags & inspect.CO_VARKEYWORDS:
        kwargs |= values.get(names[rest], {})
    if args and isinstance(args[0], nn.Module):
        return _Frame(args[0], tuple(args[1:]), kwargs)
    # Dynamo's own function around a model whose forward lies in PyTorch's files
    model = getattr(values.get("fn"), "__self__", values.get("fn"))
    return _Frame(model, tuple(args), kwargs) if isinstance(model, nn.Module) else None


class _Planned:
    """A compiled call that runs the plan's model on the inputs of a graph, which is the whole of the original's call.

    The plan is read and applied at the first call, outside of Dynamo's compilation, and again where a parameter or a
    buffer was replaced or written to.
    """

    def __init__(self, graph: fx.GraphModule, plan: Path) -> None:
        frame = _frame()
        reason = getattr(graph, "compile_subgraph_reason", None)
        if frame is None:
            raise PlanMismatch(f"a plan is for a model: torch.compile takes the model itself here; {APPLY}")
        model = frame.model
        if reason is not None and reason.graph_break:
            raise PlanMismatch(
                f"a plan is for the whole of {type(model).__name__}, and Dynamo breaks its graph "
                f"({_first_line(reason.reason)}); {APPLY}"
            )
        if model._forward_hooks or model._forward_pre_hooks:
            raise PlanMismatch(f"{type(model).__name__} has hooks, which would run twice; {APPLY}")
        self._model, self._plan = weakref.ref(model), plan
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        places = {id(one): index for index, one in enumerate(map(_real, placeholders)) if isinstance(one, Tensor)}
        leaves, self._spec = pytree.tree_flatten((frame.args, frame.kwargs))
        own = {id(one) for one in constants.own_tensors(model)}
        self._own = [index for index, node in enumerate(placeholders) if id(_real(node)) in own]
        self._leaves = [_leaf(leaf, places) for leaf in leaves]
        self._check_inputs(graph, placeholders)
        outputs = graph.graph.output_node().args[0]
        assert isinstance(outputs, Sequence)
        self._outputs = [_form(tensors(node)) for node in outputs]
        # what the model itself answers says which of its plan's answers is which
        self._original = graph
        self._made: nn.Module | None = None
        self._seen: list[tuple[int, int]] = []

    def _check_inputs(self, graph: fx.GraphModule, placeholders: list[fx.Node]) -> None:
        known = {*self._own, *(leaf.place for leaf in self._leaves if isinstance(leaf, _Place))}
        sizes = [node for node in placeholders if isinstance(value(node), torch.SymInt)]
        if any(type(getattr(node.meta.get("grapharg"), "source", None)).__name__ != _SIZE for node in sizes):
            raise PlanMismatch(
                f"a plan takes no numbers that change from call to call; compile with dynamic=False, or {APPLY}"
            )
        others = [node.name for index, node in enumerate(placeholders) if index not in known and node not in sizes]
        if others:
            raise PlanMismatch(f"the graph reads {', '.join(others)}, which is no argument of the model; {APPLY}")
        written = set(writers(graph.graph))
        if any(memories(node) & written for node in placeholders):
            raise PlanMismatch(f"the model writes into its arguments or buffers; {APPLY}")

    def __call__(self, *flat: Any) -> list[Any]:
        seen = [(id(flat[index]), -1 if flat[index].is_inference() else flat[index]._version) for index in self._own]
        if self._made is None or seen != self._seen:
            self._made = self._apply(flat)
            self._seen = seen
        return self._run(self._made, flat)

    def _arguments(self, flat: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = [flat[leaf.place] if isinstance(leaf, _Place) else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs

    def _run(self, model: nn.Module, flat: Sequence[Any]) -> list[Any]:
        args, kwargs = self._arguments(flat)
        found = {id(leaf): leaf for leaf in pytree.tree_leaves(model(*args, **kwargs)) if isinstance(leaf, Tensor)}
        return list(found.values())

    def _apply(self, flat: Sequence[Any]) -> nn.Module:
        model = self._model()
        assert model is not None
        plan = Plan.load(self._plan)
        args, kwargs = self._arguments(flat)
        with _noted() as notes:
            made = plan.apply(model, Inputs(args, kwargs))
        with torch.no_grad():
            answers, expected = self._run(made, flat), self._original.forward(*flat)
        forms = [_form([answer]) for answer in answers]
        if forms != self._outputs:
            raise PlanMismatch(
                f"Dynamo's graph of {type(model).__name__} gives {_shown(self._outputs)}, and the plan's model "
                f"{_shown(forms)}; {APPLY}"
            )
        if any(_nearest(answer, expected) != index for index, answer in enumerate(answers)):
            raise PlanMismatch(f"the plan's model gives its answers in another order than Dynamo's graph; {APPLY}")
        titles = tuple(step.title for step in plan.kept())
        _tell(Report(type(model).__name__, str(self._plan), titles, end="the plan's model", notes=tuple(notes)))
        return made


class _Place(NamedTuple):
    """An argument that is an input of the graph."""

    place: int


# the class of Dynamo's sources of sizes of tensors, which are inputs of graphs beside the tensors
_SIZE = "TensorPropertySource"


def _real(node: fx.Node) -> Any:
    """The value behind an input of a graph while Dynamo compiles it."""
    held = node.meta.get("grapharg")
    return None if held is None else held.example


def _leaf(leaf: Any, places: Mapping[int, int]) -> Any:
    if isinstance(leaf, Tensor):
        # an argument that the graph does not read decides nothing
        return _Place(places[id(leaf)]) if id(leaf) in places else leaf
    if not isinstance(leaf, PLAIN):
        raise PlanMismatch(f"a plan takes no argument of class {type(leaf).__name__} inside torch.compile; {APPLY}")
    return leaf


def _form(found: Sequence[Tensor]) -> tuple[tuple[int, ...], torch.dtype] | None:
    return (tuple(found[0].shape), found[0].dtype) if len(found) == 1 else None


def _shown(forms: Sequence[Any]) -> str:
    return ", ".join("no tensor" if form is None else f"{form[1]} {list(form[0])}" for form in forms) or "nothing"


def _nearest(answer: Tensor, expected: Sequence[Any]) -> int:
    """The place of the answer that is nearest to this one, among those of its shape."""
    same = [index for index, one in enumerate(expected) if _form([one]) == _form([answer])]
    if len(same) == 1:
        return same[0]
    return min(same, key=lambda index: float((expected[index].double() - answer.double()).nan_to_num().norm()))


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[0]


@contextmanager
def _noted() -> Iterator[list[str]]:
    """The texts of the warnings of plans given inside, which are given again after it."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield notes
    for one in found:
        if issubclass(one.category, PlanWarning):
            notes.append(str(one.message))
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
