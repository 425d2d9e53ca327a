"""Norms of sums in a module's forward, each with its addition in one kernel: the forward is rewritten from its source.

    h = residual + h
    h = self.norm(h)

becomes `post_layer_norm`; where the sum is used again, `add_layer_norm` or `add_rms_norm`. Models add before a norm at
the end of attention and MLP where these are post-norm (BERT and its kin, BART, DETR, wav2vec2), and between the two
where they are pre-norm. All other statements stay as they are.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from wavecrest.errors import StepRefused
from wavecrest.nn.derived import derive
from wavecrest.nn.hooks import plain, source_of
from wavecrest.nn.norm import LayerNorm, RMSNorm, default_eps
from wavecrest.nn.precision import in_autocast
from wavecrest.ops import add_layer_norm, add_rms_norm, post_layer_norm

# norms whose sums ops take
KINDS = (LayerNorm, RMSNorm, nn.LayerNorm)
# modules of the wrappers that a subclass has again: transformers wraps the forward of each class of a layer, for
# checkpoints of gradients, and decorators are in the source
AGAIN = ("transformers.modeling_layers", "transformers.utils.deprecation")
# names in a rewritten forward: functions of its class, and what a norm gives until it is assigned
ALONE, BOTH, NORMED = "_norm_of_sum", "_norm_and_sum", "_normed"


def norm_of_sum(norm: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
    """norm(x + residual), all [..., size]; in one kernel where the norm is of `KINDS`, over the last dimension."""
    if not _takes(norm, x, residual):
        normed: Tensor = norm(x + residual)
        return normed
    own: Any = norm
    if isinstance(norm, RMSNorm):
        return _both(own, x, residual)[0]
    return post_layer_norm(x, residual, own.weight, own.bias, own.eps)


def norm_and_sum(norm: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), as `norm_of_sum`."""
    if not _takes(norm, x, residual):
        total = x + residual
        return norm(total), total
    return _both(norm, x, residual)


def _both(norm: Any, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(norm, RMSNorm):
        return add_rms_norm(x, residual, norm.weight, default_eps(x) if norm.eps is None else norm.eps)
    return add_layer_norm(x, residual, norm.weight, norm.bias, norm.eps)


def _takes(norm: Any, x: Any, residual: Any) -> bool:
    """Whether an op computes the norm of this sum: of two tensors that are alike."""
    # a compiler fuses the addition itself
    if torch.compiler.is_compiling() or not is_norm(norm):
        return False
    if not isinstance(x, Tensor) or not isinstance(residual, Tensor) or x.shape != residual.shape or not x.ndim:
        return False
    alike = x.dtype == residual.dtype and x.device == residual.device and x.is_floating_point()
    size = norm.normalized_shape if isinstance(norm, nn.LayerNorm) else (norm.size,)
    return alike and tuple(size) == (x.shape[-1],) and not in_autocast(x)


def is_norm(norm: Any) -> bool:
    """Whether a module is of `KINDS`, and nothing but its own forward runs."""
    return isinstance(norm, nn.Module) and any(plain(norm, kind) for kind in KINDS)


class Sums(NamedTuple):
    """The names of the norms of sums in a forward; `kept`: of those whose sum is used again."""

    alone: tuple[str, ...]
    kept: tuple[str, ...]


def sums_of(module: nn.Module) -> Sums | str:
    """The norms of sums in a module's forward; or why it stays as it is, "" where it has none.

    A norm of another kind, or with hooks, does not count.
    """
    kind = type(module)
    names = {name for name, child in module.named_children() if is_norm(child)}
    if not names:
        return ""
    if not plain(module, kind):
        return f"{kind.__name__} has hooks, or a forward of its own"
    function = source_of(kind)
    if isinstance(function, str):
        return function
    rewriter = _Rewriter(function, names)
    rewriter.visit(function)
    if not rewriter.alone and not rewriter.kept:
        return ""
    if _innermost(kind) is None:
        return f"the forward of {kind.__name__} is decorated, or takes names from a function around it"
    return Sums(tuple(rewriter.alone), tuple(rewriter.kept))


def _innermost(kind: type[nn.Module]) -> FunctionType | None:
    """The forward that a class's source has, without the wrappers of `AGAIN`; None if there are others around it."""
    forward: Any = kind.forward
    while hasattr(forward, "__wrapped__") and getattr(forward, "__globals__", {}).get("__name__") in AGAIN:
        forward = forward.__wrapped__
    is_plain = isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__") and not forward.__closure__
    return forward if is_plain else None


def adopt(module: nn.Module) -> None:
    """Give a module a forward with its additions in its norms, in place.

    Raises:
        StepRefused: `sums_of` finds none.
    """
    sums = sums_of(module)
    if isinstance(sums, str):
        raise StepRefused(sums or f"{type(module).__name__} normalises no sum")
    derive(module, _adding, *sums.alone, *sums.kept)


def _adding(kind: type[nn.Module], *names: str) -> type[nn.Module]:
    function, original = source_of(kind), _innermost(kind)
    if isinstance(function, str) or original is None:
        raise StepRefused(f"{kind.__name__} has another forward than where this was found")
    function = _Rewriter(function, set(names)).visit(function)
    return type(
        kind.__name__,
        (kind,),
        {
            "forward": _compiled(function, original, kind.__name__),
            ALONE: staticmethod(norm_of_sum),
            BOTH: staticmethod(norm_and_sum),
        },
    )


def _compiled(function: ast.FunctionDef, original: FunctionType, name: str) -> Callable[..., Any]:
    """The function of a tree with the defaults, annotations and global names of the one that it was made from."""
    arguments = function.args
    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if one is not None:
            one.annotation = None
    function.returns = None
    # how many there are counts, their values are put in below
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [None if one is None else ast.Constant(None) for one in arguments.kw_defaults]
    tree = ast.fix_missing_locations(ast.Module([function], []))
    scope: dict[str, Any] = {}
    exec(compile(tree, f"<{name}.forward with additions in its norms>", "exec"), original.__globals__, scope)
    made = outermost = scope[function.name]
    while hasattr(made, "__wrapped__"):
        made = made.__wrapped__
    for attribute in ("__defaults__", "__kwdefaults__", "__annotations__", "__doc__", "__module__", "__qualname__"):
        setattr(made, attribute, getattr(original, attribute))
    return cast(Callable[..., Any], outermost)


class _Rewriter(ast.NodeTransformer):
    """Norms of these names of sums, as calls of ALONE and BOTH; which it has met, each once."""

    def __init__(self, function: ast.FunctionDef, names: set[str]) -> None:
        self.me = function.args.args[0].arg if function.args.args else ""
        self.names = names
        self.alone: dict[str, None] = {}
        self.kept: dict[str, None] = {}

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Statements that follow each other are looked at together, all else by itself."""
        for field, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                setattr(node, field, self._statements(value))
        return super().generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """self.norm(a + b)"""
        self.generic_visit(node)
        name = self._norm(node)
        if name and isinstance(node.args[0], ast.BinOp) and isinstance(node.args[0].op, ast.Add):
            self.alone[name] = None
            return self._call(ALONE, node, node.args[0])
        return node

    def _statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        while body:
            found = self._sequence(body)
            rows, body = found if found else ([body[0]], body[1:])
            made += rows
        return made

    def _sequence(self, body: list[ast.stmt]) -> tuple[list[ast.stmt], list[ast.stmt]] | None:
        """h = a + b; maybe residual = h; y = self.norm(h): as one or two calls, and the statements behind."""
        total, added = _assigned(body[0])
        if not total or not isinstance(added, ast.BinOp) or not isinstance(added.op, ast.Add):
            return None
        rest = body[1:]
        again = [row for row in rest[:1] if isinstance(_assigned(row)[1], ast.Name) and _names(row) == total]
        rest = rest[len(again) :]
        result, call = _assigned(rest[0]) if rest else ("", None)
        if not result or not isinstance(call, ast.Call):
            return None
        name = self._norm(call)
        if not name or not isinstance(call.args[0], ast.Name) or call.args[0].id != total:
            return None
        if result == total and not again:
            self.alone[name] = None
            return [_assign(result, self._call(ALONE, call, added))], rest[1:]
        self.kept[name] = None
        both = ast.Tuple([ast.Name(NORMED, ast.Store()), ast.Name(total, ast.Store())], ast.Store())
        first = ast.Assign([both], self._call(BOTH, call, added))
        return [first, *again, _assign(result, ast.Name(NORMED, ast.Load()))], rest[1:]

    def _norm(self, call: ast.Call) -> str:
        """The name of the norm that a call is of, with one argument; "" for another call."""
        function = call.func
        if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
            return ""
        is_one = function.value.id == self.me and function.attr in self.names and len(call.args) == 1
        return function.attr if is_one and not call.keywords else ""

    def _call(self, function: str, norm: ast.Call, added: ast.BinOp) -> ast.Call:
        called = ast.Attribute(ast.Name(self.me, ast.Load()), function, ast.Load())
        return ast.Call(called, [norm.func, added.left, added.right], [])


def _assigned(row: ast.stmt) -> tuple[str, ast.expr | None]:
    """The name and the value of a statement that assigns one name."""
    if isinstance(row, ast.Assign) and len(row.targets) == 1 and isinstance(row.targets[0], ast.Name):
        return row.targets[0].id, row.value
    if isinstance(row, ast.AnnAssign) and isinstance(row.target, ast.Name):
        return row.target.id, row.value
    return "", None


def _names(row: ast.stmt) -> str:
    """The name that a statement assigns to another."""
    _, value = _assigned(row)
    return value.id if isinstance(value, ast.Name) else ""


def _assign(name: str, value: ast.expr) -> ast.stmt:
    return ast.Assign([ast.Name(name, ast.Store())], value)
