"""Pre-norm transformer layers whose residual additions run in the GEMMs before them.

    x = x + attention(norm(x))
    x = x + mlp(norm(x))

The GEMM that ends attention, and the one that ends the MLP, adds x to its result: two kernels less in a layer. The
modules inside stay what they are and are called as before.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import StepRefused, Unsupported
from wavecrest.nn.derived import derive
from wavecrest.nn.hooks import forward_of, plain, recast
from wavecrest.nn.linear import Linear

# the statements of a forward that is taken over; None: the call of attention
STATEMENTS = (
    "residual = hidden_states",
    "hidden_states = self.input_layernorm(hidden_states)",
    None,
    "hidden_states = residual + hidden_states",
    "residual = hidden_states",
    "hidden_states = self.post_attention_layernorm(hidden_states)",
    "hidden_states = self.mlp(hidden_states)",
    "hidden_states = residual + hidden_states",
    "return hidden_states",
)
# modules that may end attention and the MLP
ENDS = {"self_attn": ("o_proj", "dense", "out_proj"), "mlp": ("down_proj", "dense_4h_to_h", "fc2")}


@dataclass(slots=True)
class _Held:
    """The residual that a layer holds out to the module that ends its attention or MLP, and the sum."""

    end: nn.Module
    residual: Tensor
    total: Tensor | None = None


# of this thread: two may run one model
_HELD: ContextVar[_Held | None] = ContextVar("residual", default=None)


class AddingLinear(Linear):
    """A linear layer that adds the residual that the layer around it holds out."""

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
        overwrite_residual: bool = False,
    ) -> Tensor:
        """As `Linear.forward`; with the residual that is held out for it, if there is one."""
        # a compiler fuses the addition itself
        held = None if torch.compiler.is_compiling() else _HELD.get()
        if held is None or held.end is not self or held.total is not None:
            return super().forward(x, residual, norm_weight, norm_eps, overwrite_residual)
        held.total = super().forward(x, held.residual)
        return held.total


def refusal(layer: nn.Module) -> str:
    """Why a layer is not one of these; "" where it is."""
    kind, function = type(layer), forward_of(layer)
    if isinstance(function, str):
        return function
    body = function.body
    if len(body) != len(STATEMENTS):
        return f"{kind.__name__} is no attention and MLP with a norm before, and an addition behind, each"
    for row, wanted in zip(body, STATEMENTS, strict=True):
        if not (_is_attention(row, function.args) if wanted is None else ast.unparse(row) == wanted):
            return f"{kind.__name__} computes something else: {ast.unparse(row).splitlines()[0]}"
    if not ends(layer):
        return f"neither attention nor MLP of {kind.__name__} ends with a plain linear layer"
    return ""


def _is_attention(row: ast.stmt, arguments: ast.arguments) -> bool:
    """True for `hidden_states, … = self.self_attn(hidden_states=hidden_states, …)` with the forward's own arguments."""
    if not (isinstance(row, ast.Assign) and len(row.targets) == 1 and isinstance(row.value, ast.Call)):
        return False
    target, call = row.targets[0], row.value
    if not (isinstance(target, ast.Tuple) and len(target.elts) == 2 and ast.unparse(target.elts[0]) == "hidden_states"):
        return False
    if ast.unparse(call.func) != "self.self_attn" or call.args:
        return False
    more = None if arguments.kwarg is None else arguments.kwarg.arg
    if any(ast.unparse(word.value) != (word.arg or more) for word in call.keywords):
        return False
    given = {word.arg for word in call.keywords if word.arg}
    takes = {one.arg for one in (*arguments.args, *arguments.kwonlyargs)} - {"self"}
    # what attention does not get would not be passed on
    return given == takes and any(word.arg is None for word in call.keywords) == (more is not None)


def ends(layer: nn.Module) -> list[str]:
    """The paths in a layer of the modules that end its attention and MLP, where those are plain linear layers."""
    found = []
    for part, names in ENDS.items():
        module = getattr(layer, part, None)
        for name in names:
            end = getattr(module, name, None)
            if isinstance(end, nn.Module) and _is_plain(end):
                found.append(f"{part}.{name}")
    return found


def _is_plain(end: nn.Module) -> bool:
    if plain(end, Linear):
        return end.activation is None and end.tail is None
    return type(end) is nn.Linear and plain(end, nn.Linear)


def adopt(layer: nn.Module) -> None:
    """Turn a layer that `refusal` has nothing against into one whose GEMMs add the residual, in place.

    Raises:
        StepRefused: `refusal` has a reason.
    """
    reason = refusal(layer)
    if reason:
        raise StepRefused(reason)
    for path in ends(layer):
        part, _, name = path.partition(".")
        end = layer.get_submodule(path)
        linear = end if isinstance(end, Linear) else Linear.from_module(end)
        setattr(layer.get_submodule(part), name, recast(linear, AddingLinear))
    derive(layer, _adding)


def _adding(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"forward": _forward(kind.forward)})


def _forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of STATEMENTS with the additions in the GEMMs."""
    signature = inspect.signature(original)
    more = next((one.name for one in signature.parameters.values() if one.kind is one.VAR_KEYWORD), "")

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return original(self, hidden_states, *args, **kwargs)
        given = kwargs
        if args:
            # by name, as attention gets them
            bound = signature.bind(self, hidden_states, *args, **kwargs)
            given = dict(list(bound.arguments.items())[2:])
            given.update(given.pop(more, {}))
        normed = self.input_layernorm(hidden_states)
        middle = _added(_end(self.self_attn), hidden_states, lambda: self.self_attn(hidden_states=normed, **given)[0])
        normed = self.post_attention_layernorm(middle)
        return _added(_end(self.mlp), middle, lambda: self.mlp(normed))

    return forward


def _end(part: nn.Module) -> AddingLinear | None:
    """The module of an attention or MLP that adds."""
    return next((child for child in part._modules.values() if isinstance(child, AddingLinear)), None)


def _added(end: AddingLinear | None, residual: Tensor, run: Callable[[], Tensor]) -> Tensor:
    """residual + run(), added by `end` where that makes the result of `run`.

    Raises:
        Unsupported: the result is not the one that it made, as of a hook.
    """
    if end is None or residual.dtype != end.weight.dtype:
        return residual + run()
    held = _Held(end, residual)
    token = _HELD.set(held)
    try:
        result = run()
    finally:
        _HELD.reset(token)
    if held.total is None:
        return residual + result
    if result is not held.total:
        raise Unsupported(
            "the residual is added in a GEMM whose result something else changed, such as a hook; leave the step "
            "fuse_residual out"
        )
    return result
