"""Checks for code that runs around a module's forward (hooks, a forward that replaces it), and a module recast."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import TypeGuard, TypeVar

from torch import nn
from torch.nn.modules import module as _module

_Module = TypeVar("_Module", bound=nn.Module)


def plain(module: nn.Module, kind: type[_Module]) -> TypeGuard[_Module]:
    """True if nothing but the forward of `kind` runs when a module is called, so that its work may be done without it.

    False for another class's forward, a module's own (as accelerate sets it), and hooks on it or on all modules.
    """
    return type(module).forward is kind.forward and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or "forward" in module.__dict__
    )


def forward_of(module: nn.Module) -> ast.FunctionDef | str:
    """The forward that runs when a module is called, without its docstring; or why it cannot be read."""
    kind = type(module)
    return source_of(kind) if plain(module, kind) else "it has hooks, or a forward of its own"


def source_of(kind: type[nn.Module]) -> ast.FunctionDef | str:
    """The forward of a class, without its docstring; or why it cannot be read."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward)))
    except (OSError, TypeError):
        return f"the source of the forward of {kind.__name__} is not at hand, as where a step has rewritten it"
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = [
        row for row in function.body if not (isinstance(row, ast.Expr) and isinstance(row.value, ast.Constant))
    ]
    return function


def recast(module: nn.Module, kind: type[_Module]) -> _Module:
    """A module of class `kind`, derived from `module`'s, in the same state, with the same parameters and children.

    It is made without a constructor, which would repeat the arguments of `module`'s.
    """
    made = kind.__new__(kind)
    # containers of its own: what is registered on one is not on the other
    made.__dict__.update(
        {name: value.copy() if isinstance(value, dict | set) else value for name, value in vars(module).items()}
    )
    # torch's hook of a load knows its module by a weak reference; with a dead one no copy can be made
    hooks = made._load_state_dict_pre_hooks
    for number, hook in hooks.items():
        if isinstance(hook, _module._WrappedHook) and hook.with_module and hook.module() is module:
            hooks[number] = _module._WrappedHook(hook.hook, made)
    return made


def watched(model: nn.Module) -> bool:
    """True if a hook may see, and keep, what modules of a model take and give."""
    if _module._global_forward_hooks or _module._global_forward_pre_hooks:
        return True
    return any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
