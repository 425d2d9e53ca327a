"""A call of an op as one frozen, typed object: a NamedTuple whose fields are the op's arguments.

The public function makes it once; check, key, refuse, bind, run, cost and reference take it as it is.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

CallT = TypeVar("CallT", bound=tuple[Any, ...])

Signature = tuple[Any, ...]
# a call of any op, for tools
AnyCall = Any


@cache
def fields_of(kind: type[tuple[Any, ...]]) -> dict[str, Any]:
    """The names and types of a call's fields, in their order."""
    return typing.get_type_hints(kind)


def is_tensor(annotation: Any) -> bool:
    """True for a field of type Tensor or Tensor | None."""
    return annotation is Tensor or Tensor in typing.get_args(annotation)


@cache
def signature_function(kind: type[tuple[Any, ...]]) -> Callable[[tuple[Any, ...]], Signature]:
    """The function that gives a call's signature: all that check, key and bind may look at.

    Of a tensor that is shape, strides, dtype, device and whether autograd records it; any other value is itself. The
    function is written for the fields of one kind of call, as a loop over them took half of a small call's time.

    Raises (the function): AttributeError where a field that holds a tensor was given something else.
    """
    names = list(fields_of(kind))
    parts = []
    for name, annotation in fields_of(kind).items():
        if not is_tensor(annotation):
            parts.append(name)
            continue
        facts = f"({name}.shape, {name}.stride(), {name}.dtype, {name}.device, grad and {name}.requires_grad)"
        parts.append(facts if annotation is Tensor else f"None if {name} is None else {facts}")
    source = (
        "def signature(call):\n"
        f"    {', '.join(names)}, = call\n"
        "    grad = is_grad_enabled()\n"
        f"    return (grad, {', '.join(parts)})\n"
    )
    scope: dict[str, Any] = {"is_grad_enabled": torch.is_grad_enabled}
    exec(compile(source, f"<signature of {kind.__name__}>", "exec"), scope)
    made: Callable[[tuple[Any, ...]], Signature] = scope["signature"]
    return made


def mapped(call: CallT, change: Callable[[Tensor], Any]) -> CallT:
    """The same call with `change` applied to each of its tensors."""
    values = [change(value) if isinstance(value, Tensor) else value for value in call]
    return type(call)(*values)


def tensors_of(call: tuple[Any, ...]) -> list[Tensor]:
    """The tensors of a call, in the order of its fields."""
    return [value for value in call if isinstance(value, Tensor)]


def device_of(call: tuple[Any, ...]) -> str:
    """The type of device that a call's first tensor is on."""
    for value in call:
        if isinstance(value, Tensor):
            return value.device.type
    return "cpu"
