"""Modules that end attention or an MLP in a post-norm transformer, whose residual addition runs in the GEMM before it.

norm(dense(x) + residual)
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wavecrest.errors import StepRefused
from wavecrest.nn.derived import derive
from wavecrest.nn.hooks import forward_of, plain
from wavecrest.nn.linear import adding_linear_on
from wavecrest.ops._gemm.call import GemmCall, linear_call

# a forward that is taken over, as transformers writes it for BERT and its kin
ARGUMENTS = ["self", "hidden_states", "input_tensor"]
STATEMENTS = (
    "hidden_states = self.dense(hidden_states)",
    "hidden_states = self.dropout(hidden_states)",
    "hidden_states = self.LayerNorm(hidden_states + input_tensor)",
    "return hidden_states",
)


def refusal(module: nn.Module) -> str:
    """Why a module is not one of these; "" where it is."""
    kind, function = type(module), forward_of(module)
    if isinstance(function, str):
        return function
    given = [one.arg for one in function.args.args]
    if given != ARGUMENTS or [ast.unparse(row) for row in function.body] != list(STATEMENTS):
        return f"{kind.__name__} computes something else"
    dense: Any = module.dense
    if not _is_plain(dense):
        return f"the linear layer of {kind.__name__} is a {type(dense).__name__}, or has hooks"
    dropout: Any = module.dropout
    if not isinstance(dropout, nn.Module) or dropout._forward_hooks or dropout._forward_pre_hooks:
        return f"the dropout of {kind.__name__} has hooks"
    return ""


def _is_plain(dense: nn.Module) -> bool:
    return type(dense) is nn.Linear and plain(dense, nn.Linear)


def call_of(module: nn.Module, hidden_states: Tensor, input_tensor: Tensor) -> GemmCall:
    """The GEMM of a module that `refusal` has nothing against."""
    dense: Any = module.dense
    return linear_call(hidden_states, dense.weight, dense.bias, residual=input_tensor)


def adopt(module: nn.Module, backend: str) -> None:
    """Turn a module that `refusal` has nothing against into one whose GEMM adds the residual on a backend, in place.

    Raises:
        StepRefused: `refusal` has a reason.
    """
    reason = refusal(module)
    if reason:
        raise StepRefused(reason)
    derive(module, _adding, backend)


def _adding(kind: type[nn.Module], backend: str) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"forward": _forward(kind.forward, backend)})


def _forward(original: Callable[..., Tensor], backend: str) -> Callable[..., Tensor]:
    """The forward of STATEMENTS with the addition in the GEMM."""

    def forward(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        dense = self.dense
        # a compiler fuses the addition itself; in training there is dropout before it; later hooks see the layer alone
        if torch.compiler.is_compiling() or self.dropout.training or not _is_plain(dense):
            return original(self, hidden_states, input_tensor)
        weight = dense.weight
        alike = weight.dtype == hidden_states.dtype == input_tensor.dtype
        if not alike or torch.is_autocast_enabled(weight.device.type):
            return original(self, hidden_states, input_tensor)
        summed = adding_linear_on(hidden_states, weight, dense.bias, input_tensor, backend)
        normed: Tensor = self.LayerNorm(summed)
        return normed

    return forward
