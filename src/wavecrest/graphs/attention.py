"""Attention that a Dynamo graph computes step by step, as one call: softmax(q · kᵀ · scale + bias) · v.

Models write it out where they add a bias of their own to the scores (Swin, DeBERTa), or because they are older than
PyTorch's function. Eager then writes the matrix of scores and reads it again for each step. It is recognised by what is
between the two GEMMs, not by names.

The answers stay, also of a query that sees no key: NaN where its scores are −inf, the mean of all values where they are
one large negative number. A kernel gives 0 for the one and has no room for the other, so such rows are put right in the
graph. That is left out where the mask depends on the model's own tensors alone and hides no row, which is seen from
their values when the graph is made.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from wavecrest.dispatch.keys import dtype_name, needs_grad
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.graphs import constants
from wavecrest.graphs.nodes import CALLS, alone, argument, has_values, memories, tensors, value, written_by
from wavecrest.nn.attention import warn_fallback
from wavecrest.ops._flash_attention.backend import op
from wavecrest.ops._flash_attention.call import FlashAttentionCall

GEMMS = (torch.matmul, torch.bmm, operator.matmul, "matmul", "bmm", "__matmul__")
ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_", "__add__")
MULTIPLICATIONS = (operator.mul, operator.imul, torch.mul, "mul", "mul_", "__mul__")
DIVISIONS = (operator.truediv, operator.itruediv, torch.div, "div", "div_")
FILLS = (torch.masked_fill, "masked_fill", "masked_fill_")
SOFTMAXES = (F.softmax, torch.softmax, "softmax")
DROPOUTS = (F.dropout, torch.dropout)
CASTS = ("to", "type", "type_as", "float", "half", "bfloat16")
# calls that give the same rows of scores another leading shape
SHAPES = ("view", "reshape", "contiguous", "unsqueeze", "squeeze", "flatten", "unflatten", torch.reshape)
# calls that work on any strides; others get a result that lies as that of a GEMM
ANY_STRIDES = ("transpose", "permute", "swapaxes", torch.transpose, torch.permute)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# a finite number that hides a key: its weight is exactly 0 beside a score above it by 104
LEAST_FILL = -1e4
# for windows of 49 keys cuDNN takes 1.8 times as long as the GEMMs and the softmax of Inductor (a Swin-T, one
# H200, 2026-11-28): its tiles have 128 keys
SHORT = 128

# the backend of a call, with fake tensors; "": dispatch's choice; None: it stays written out
Chosen = Callable[[FlashAttentionCall], str | None]


class Term(NamedTuple):
    """A step between the GEMMs that adds to the scores, or fills in a number.

    `node` is what is added, or the bool mask of a fill; `kept`: the mask is True where the scores stay. `lead` is the
    shape that the scores had then, without queries and keys.
    """

    node: fx.Node
    lead: tuple[int, ...]
    fill: float | None = None
    kept: bool = False


class Site(NamedTuple):
    """Attention that is written out.

    Attributes:
        parts: its calls, from the GEMM that makes the scores to the one that makes the result.
        scale: of the scores.
        factors: tensors that scale the scores of each query: by multiplication (True) or division.
        terms: what is added or filled in, in this order.
        leads: the shapes that the scores go through, without queries and keys.
    """

    parts: tuple[fx.Node, ...]
    scale: float
    factors: tuple[tuple[fx.Node, bool], ...]
    terms: tuple[Term, ...]
    leads: tuple[tuple[int, ...], ...]

    @property
    def first(self) -> fx.Node:
        """The GEMM of q and kᵀ."""
        return self.parts[0]

    @property
    def last(self) -> fx.Node:
        """The GEMM of weights and v."""
        return self.parts[-1]


class _Split(NamedTuple):
    """How leading dimensions become batch and heads, and the shape of each term in the dimensions `parts`."""

    parts: tuple[int, ...]
    batch: int
    heads: int
    shapes: tuple[tuple[int, ...], ...]


def by_dispatch(call: FlashAttentionCall) -> str | None:
    """Dispatch's choice on a GPU, where nothing was timed; PyTorch's kernels for SHORT keys or more alone.

    On a CPU nothing is chosen: PyTorch's kernel gives 0 there where q holds NaN.
    """
    return None if call.q.device.type == "cpu" or is_short(call) else ""


def is_short(call: FlashAttentionCall) -> bool:
    """Whether a call on a GPU has fewer than SHORT keys, and dispatch PyTorch's kernel for it."""
    if call.q.device.type == "cpu" or call.seqlen_k >= SHORT:
        return False
    return op.decide(call).backend.startswith("torch")


def name_of(call: FlashAttentionCall) -> str:
    """The name under which a choice of backend is kept.

    Sequences, heads, queries, keys, the sizes of a key and of a value, the dtype, and the shape of the bias.
    """
    sizes = (call.batch, call.heads, call.seqlen_q, call.seqlen_k, call.head_dim, call.head_dim_v)
    bias = "" if call.bias is None else f" bias {'x'.join(map(str, call.bias.shape))}"
    return f"{'x'.join(map(str, sizes))} {dtype_name(call.q)}{bias}"


def calls_of(graph: fx.GraphModule) -> list[FlashAttentionCall]:
    """The calls, with fake tensors, that attention written out in a graph may become."""
    return [call for _, _, call in _replaceable(graph)]


def rewrite(graph: fx.GraphModule, own: Iterable[Tensor], chosen: Chosen, *, as_ops: bool) -> int:
    """Replace attention that is written out, in place; returns how many.

    Args:
        graph: as Dynamo makes it, with an example value for every node.
        own: parameters and buffers of the model.
        chosen: the backend of a call, which stays as it is with None.
        as_ops: as one operation of PyTorch, for Inductor; else as a plain function, which costs less.
    """
    count, own = 0, list(own)
    known: Mapping[fx.Node, Any] | None = None
    gone: set[fx.Node] = set()
    for site, split, call in list(_replaceable(graph)):
        # the two terms of a sum may both be scores
        backend = None if gone.intersection(site.parts) else chosen(call)
        if backend is None:
            continue
        if known is None:
            known = constants.values(graph, own)
        _Writer(graph.graph, site, split, backend, as_ops).write(_hides_rows(site, split, known))
        gone.update(site.parts)
        count += 1
    if count:
        graph.graph.lint()
        graph.recompile()
    return count


def _replaceable(graph: fx.GraphModule) -> Iterator[tuple[Site, _Split, FlashAttentionCall]]:
    """Attention that is written out and that the op takes."""
    if not has_values(graph.graph) or constants.in_autocast(graph.graph):
        return
    for site in list(sites(graph.graph)):
        split = _split(site)
        call = None if split is None or _is_written(site) else _call(site, split)
        if split is not None and call is not None:
            yield site, split, call


# --- what is recognised


def sites(graph: fx.Graph) -> Iterator[Site]:
    """Attention that is written out, of which nothing between the two GEMMs is read from elsewhere."""
    for node in graph.nodes:
        if node.op in CALLS and node.target in GEMMS and len(node.args) == 2 and not node.kwargs:
            found = _site(node)
            if found is not None:
                yield found


def _site(first: fx.Node) -> Site | None:
    """The attention whose scores a GEMM makes."""
    if not all(isinstance(one, fx.Node) and len(tensors(one)) == 1 for one in (first, *first.args)):
        return None
    found = Site((first,), 1.0, (), (), (_lead(first),))
    is_weights = False
    while alone(found.last) is not None:
        scores = found.last
        node = next(iter(scores.users))
        if node.op not in CALLS or len(tensors(node)) != 1 or tensors(node)[0].dtype not in DTYPES:
            return None
        if is_weights and node.target in GEMMS:
            is_end = node.args[0] is scores and len(node.args) == 2 and not node.kwargs
            return found._replace(parts=(*found.parts, node)) if is_end else None
        if not _keeps_rows(scores, node):
            return None
        if node.target in SOFTMAXES and not is_weights:
            is_weights = argument(node, 1, "dim") in (-1, len(tensors(node)[0].shape) - 1)
            step = found if is_weights else None
        elif is_weights:
            step = _after_softmax(found, node)
        else:
            step = _before_softmax(found, node)
        if step is None:
            return None
        found = step._replace(parts=(*step.parts, node))
    return None


def _after_softmax(found: Site, node: fx.Node) -> Site | None:
    """The site with a call that leaves the weights as they are; None if it does not."""
    if node.target in SHAPES:
        return found._replace(leads=(*found.leads, _lead(node)))
    return found if node.target in CASTS or (node.target in DROPOUTS and not _drops(node)) else None


def _before_softmax(found: Site, node: fx.Node) -> Site | None:
    """The site with a call that scales the scores, adds to them or gives them another shape; None for any other."""
    scores = found.last
    if node.target in SHAPES:
        return found._replace(leads=(*found.leads, _lead(node)))
    if node.target in CASTS:
        # softmax in float32, as the op has it
        return found if tensors(node)[0].dtype in (torch.float32, tensors(scores)[0].dtype) else None
    if node.target not in (*MULTIPLICATIONS, *DIVISIONS):
        term = _term(node, scores)
        return None if term is None else found._replace(terms=(*found.terms, term))
    factor, multiplies = _factor(node, scores), node.target in MULTIPLICATIONS
    # what was added would be scaled too
    if factor is None or factor == 0 or found.terms:
        return None
    if isinstance(factor, float):
        return found._replace(scale=found.scale * (factor if multiplies else 1 / factor))
    is_of_queries = found.leads[-1] == found.leads[0] and tensors(factor)[0].shape[-1:] in ((), (1,))
    return found._replace(factors=(*found.factors, (factor, multiplies))) if is_of_queries else None


def _lead(node: fx.Node) -> tuple[int, ...]:
    return tuple(tensors(node)[0].shape[:-2])


def _keeps_rows(scores: fx.Node, node: fx.Node) -> bool:
    """Whether each row of scores is one of the call's result: nothing is broadcast, or cut in another way."""
    before, after = tensors(scores)[0].shape, tensors(node)[0].shape
    return before == after or (node.target in SHAPES and len(after) >= 2 and before[-2:] == after[-2:])


def _drops(dropout: fx.Node) -> bool:
    name = "train" if dropout.target is torch.dropout else "training"
    return argument(dropout, 1, "p", 0.5) != 0 and argument(dropout, 2, name, True) is not False


def _factor(node: fx.Node, scores: fx.Node) -> float | fx.Node | None:
    """The other factor of a product with the scores, or their divisor."""
    if len(node.args) != 2 or node.kwargs:
        return None
    a, b = node.args
    other = b if a is scores else a if node.target in MULTIPLICATIONS else None
    if isinstance(other, fx.Node):
        return other if len(tensors(other)) == 1 else None
    return float(other) if isinstance(other, int | float) and math.isfinite(other) else None


def _term(node: fx.Node, scores: fx.Node) -> Term | None:
    lead, args = _lead(scores), node.args
    if node.target in ADDITIONS and len(args) == 2 and not node.kwargs:
        other: Any = args[1] if args[0] is scores else args[0]
        return Term(other, lead) if _is(other, torch.float32, *DTYPES) else None
    if node.target in FILLS and args[0] is scores:
        mask, fill, kept = argument(node, 1, "mask"), argument(node, 2, "value"), False
    elif node.target is torch.where and len(args) == 3:
        mask, kept = args[0], args[1] is scores
        fill = args[2] if kept else args[1]
    else:
        return None
    if not _is(mask, torch.bool) or not isinstance(fill, int | float) or not fill <= LEAST_FILL:
        return None
    return Term(mask, lead, float(fill), kept)


def _is(node: Any, *dtypes: torch.dtype) -> bool:
    return isinstance(node, fx.Node) and len(tensors(node)) == 1 and tensors(node)[0].dtype in dtypes


# --- what it becomes


def _split(site: Site) -> _Split | None:
    """Batch and heads of a site; None where a term does not fit."""
    parts = _parts(site.leads)
    shapes = None if parts is None else [_shape(term, parts) for term in site.terms]
    if parts is None or shapes is None or any(one is None for one in shapes):
        return None
    fitting = tuple(one for one in shapes if one is not None)
    # of the sum of all terms
    full = [any(one[place] > 1 for one in fitting) for place in range(len(parts))]

    def is_broadcast(cut: int) -> bool:
        """Whether the bias lies as it is under this cut, without a copy for each sequence or head."""
        return all(len(set(half)) <= 1 for half in (full[:cut], full[cut:]))

    usual = len(parts) - 1 if len(parts) > 1 else len(parts)
    cuts = [usual, *(one for one in range(len(parts) + 1) if one != usual)]
    cut = next((one for one in cuts if is_broadcast(one)), usual)
    return _Split(parts, math.prod(parts[:cut]), math.prod(parts[cut:]), fitting)


def _parts(leads: Iterable[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The coarsest dimensions of which all of these shapes can be put together, without those of size 1."""
    cuts = {1}
    for lead in leads:
        if not all(type(size) is int for size in lead):
            return None
        cuts.update(math.prod(lead[:place]) for place in range(1, len(lead) + 1))
    ordered = sorted(cuts)
    if any(size == 0 for size in ordered) or any(b % a for a, b in pairwise(ordered)):
        return None
    return tuple(b // a for a, b in pairwise(ordered))


def _shape(term: Term, parts: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of a term over `parts`, queries and keys, with 1 where it is broadcast."""
    given = tuple(tensors(term.node)[0].shape)
    missing = len(term.lead) + 2 - len(given)
    if missing < 0:
        return None
    own = (1,) * missing + given
    made: list[int] = []
    for size, has in zip(term.lead, own[:-2], strict=True):
        if has not in (1, size):
            return None
        rest = size
        while rest > 1:
            part = parts[len(made)]
            made.append(part if has > 1 else 1)
            rest //= part
    return (*made, *own[-2:])


def _is_written(site: Site) -> bool:
    """Whether something is written to between its old reader and the end, where the call reads it."""
    read: set[int] = set()
    node = site.first
    while node is not site.last:
        if written_by(node) & read:
            return True
        if node in site.parts:
            read |= {name for one in node.all_input_nodes if one not in site.parts for name in memories(one)}
        node = node.next
    return False


def _call(site: Site, split: _Split) -> FlashAttentionCall | None:
    """The call that a site is, with the example values; None if the op does not take it as it is."""
    (q, kt), v, result = map(value, site.first.args), value(site.last.args[1]), value(site.last)
    leads = (site.leads[0], site.leads[0], site.leads[-1], site.leads[-1])
    if any(tuple(one.shape[:-2]) != lead for one, lead in zip((q, kt, v, result), leads, strict=True)):
        # heads that are broadcast
        return None
    if not q.dtype == kt.dtype == v.dtype == result.dtype:
        return None
    biases = [value(one.node) for one in site.terms]
    if result.numel() == 0 or any(torch.result_type(q, value(one)) != q.dtype for one, _ in site.factors):
        return None
    if torch.is_grad_enabled() and needs_grad(q, kt, v, *biases, *(value(one) for one, _ in site.factors)):
        return None

    def rows(x: Tensor) -> Tensor:
        return x.reshape(split.batch, split.heads, *x.shape[-2:])

    total = None if not site.terms else _total(q.dtype, _forms(site, split), *biases)
    bias = None if total is None else _fitted(total, split.parts, split.batch, split.heads)
    call = FlashAttentionCall(rows(q), rows(kt.mT), rows(v), "bhsd", softmax_scale=site.scale, bias=bias)
    try:
        op.check(call)
    except InvalidArgument:
        # a head_dim above the op's, or a negative scale
        return None
    return call


# of each term: its shape, the number that is filled in, whether its mask shows what stays
_Forms = tuple[tuple[tuple[int, ...], float | None, bool], ...]


def _forms(site: Site, split: _Split) -> _Forms:
    return tuple((shape, term.fill, term.kept) for shape, term in zip(split.shapes, site.terms, strict=True))


def _total(dtype: torch.dtype, forms: _Forms, *terms: Tensor) -> Tensor:
    """The sum of what is added to scores of a dtype, with fills, in their order."""
    total: Tensor | None = None
    for (shape, fill, kept), given in zip(forms, terms, strict=True):
        term = given.reshape(shape)
        if fill is None:
            total = term if total is None else total + term
            continue
        base = term.new_zeros((), dtype=dtype) if total is None else total
        least = base.new_full((), fill if math.isinf(fill) else max(fill, torch.finfo(base.dtype).min))
        total = torch.where(term, base, least) if kept else torch.where(term, least, base)
    assert total is not None
    return total


def _fitted(total: Tensor, parts: tuple[int, ...], batch: int, heads: int) -> Tensor:
    """A bias over `parts` as [batch or 1, heads or 1, queries or 1, keys or 1]."""
    ends, lead = total.shape[-2:], [*total.shape[:-2]]
    cut = next(place for place in range(len(parts) + 1) if math.prod(parts[:place]) == batch)
    for half in (slice(0, cut), slice(cut, len(parts))):
        if any(size > 1 for size in lead[half]):
            lead[half] = parts[half]
    return total.expand(*lead, *ends).reshape(math.prod(lead[:cut]), math.prod(lead[cut:]), *ends)


def _limit(dtype: torch.dtype, forms: _Forms) -> float:
    """The number at which a row's largest bias hides the row: it leaves no room for scores beside it."""
    fills = [fill for _, fill, _ in forms if fill is not None and not math.isinf(fill)]
    return max([torch.finfo(dtype).min / 2, *fills])


def _hides_rows(site: Site, split: _Split, known: Mapping[fx.Node, Any]) -> bool:
    """Whether some query may see no key: no, where the values of the bias are known and show it."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    if not site.terms:
        return False
    if not all(term.node in known for term in site.terms):
        return True
    forms = _forms(site, split)
    with unset_fake_temporarily(), torch.no_grad():
        total = _total(value(site.first).dtype, forms, *(known[term.node] for term in site.terms))
        return bool((total.amax(-1) <= _limit(total.dtype, forms)).any())


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, backend: str = "") -> Tensor:
    """softmax(q · kᵀ · scale + bias) · v, [B, H, S, D], on a backend; the result lies as [B, S, H, D].

    By dispatch's choice with "", and where the backend refuses the call, with an `AttentionFallback`.
    """
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    call = FlashAttentionCall(q, k, v, softmax_scale=scale, bias=bias)
    result = _run_on(call, backend) if backend else op(call)
    assert isinstance(result, Tensor)
    return result.transpose(1, 2)


def _run_on(call: FlashAttentionCall, backend: str) -> Any:
    try:
        return op.call_on(backend, call)
    except Unsupported as error:
        warn_fallback(error.reason, "runs on dispatch's choice")
    return op(call)


_in_graph = torch.library.custom_op("wavecrest::attention", attend, mutates_args=())


@_in_graph.register_fake
def _empty(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, backend: str = "") -> Tensor:
    batch, heads, queries, _ = q.shape
    return q.new_empty((batch, queries, heads, v.shape[-1])).transpose(1, 2)


def _shown(bias: Tensor, top: Tensor, limit: float) -> Tensor:
    """A bias whose hidden rows have room for a softmax: relative to their largest, where that is a number."""
    return torch.where((top <= limit) & (top > -math.inf), bias - top, bias)


def _without_rows(q: Tensor, top: Tensor, limit: float) -> Tensor:
    """q with zeros where all keys are hidden, so that their weights are those of the bias alone."""
    return torch.where(top <= limit, q.new_zeros(()), q)


def _with_nan(result: Tensor, top: Tensor) -> Tensor:
    """A result with NaN where all scores are −inf, as in a softmax."""
    return torch.where(top == -math.inf, result.new_full((), math.nan), result)


def _packed(result: Tensor) -> Tensor:
    """A result without strides of its own."""
    return result.contiguous()


def _largest(bias: Tensor) -> Tensor:
    """The largest bias of each query [B, H, S, 1]."""
    return bias.amax(-1, keepdim=True)


class _Writer:
    """Writes the call of one site into a graph."""

    def __init__(self, graph: fx.Graph, site: Site, split: _Split, backend: str, as_ops: bool) -> None:
        self._graph, self._site, self._split, self._backend = graph, site, split, backend
        self._target: Callable[..., Tensor] = torch.ops.wavecrest.attention.default if as_ops else attend

    def write(self, hides_rows: bool) -> None:
        """Put the call before the second GEMM, and take out all that is read by nothing then.

        Args:
            hides_rows: some query may see no key.
        """
        site, split = self._site, self._split
        q, kt = site.first.args
        with self._graph.inserting_before(site.last):
            for factor, multiplies in site.factors:
                q = self._add(torch.mul if multiplies else torch.div, q, factor)
            k, v = self._rows(self._add(torch.transpose, kt, -2, -1)), self._rows(site.last.args[1])
            q, bias, top = self._rows(q), None, None
            if site.terms:
                forms, dtype = _forms(site, split), value(site.first).dtype
                bias = self._add(_total, dtype, forms, *(term.node for term in site.terms))
                bias = self._add(_fitted, bias, split.parts, split.batch, split.heads)
                if hides_rows:
                    limit, top = _limit(value(bias).dtype, forms), self._add(_largest, bias)
                    q, bias = self._add(_without_rows, q, top, limit), self._add(_shown, bias, top, limit)
            made = self._add(self._target, q, k, v, bias, site.scale, self._backend, example=_empty)
            if top is not None:
                made = self._add(_with_nan, made, top)
            if not all(user.target in ANY_STRIDES for user in site.last.users):
                made = self._add(_packed, made)
            made = self._add(torch.reshape, made, tuple(value(site.last).shape))
        site.last.replace_all_uses_with(made)
        for node in reversed(site.parts):
            self._graph.erase_node(node)

    def _rows(self, node: Any) -> fx.Node:
        """[batch, heads, rows, columns] of a tensor."""
        split = self._split
        return self._add(torch.reshape, node, (split.batch, split.heads, *value(node).shape[-2:]))

    def _add(
        self, function: Callable[..., Tensor], *args: Any, example: Callable[..., Tensor] | None = None
    ) -> fx.Node:
        """A call of a function; `example` makes its example value, where the function itself cannot."""
        node = self._graph.call_function(function, args)
        node.meta["example_value"] = (example or function)(*fx.node.map_arg(args, value))
        return node
