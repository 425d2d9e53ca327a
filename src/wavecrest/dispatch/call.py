"""A call of an op as one frozen, typed object: a NamedTuple whose fields are the op's arguments.

The public function makes it once; check, key, refuse, bind, run, cost and reference take it as it is.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

CallT = TypeVar("CallT", bound=tuple[Any, ...])
P = ParamSpec("P")

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


# a tensor's device, by the cheapest of PyTorch's answers that tells all devices apart: to make, hash and compare a
# torch.device takes a fifth of the time of a signature
_ON_GPUS = torch.version.cuda is not None or torch.version.hip is not None
_DEVICE = "{0}.get_device() if {0}.is_cuda else {0}.device" if _ON_GPUS else "{0}.is_cpu or {0}.device"
# the facts of a tensor. Names here begin with an underscore, which no field of a NamedTuple does
_FACTS = f"{{0}}.shape, {{0}}.stride(), {{0}}.dtype, {_DEVICE}, _grad and {{0}}.requires_grad"
# torch.compiler.is_compiling() with one call of Python less. Dynamo takes the first for True and does not read the flag
_COMPILING = "_compiler.is_compiling()"
if hasattr(torch.compiler, "_is_compiling_flag"):
    _COMPILING = "_compiler.is_dynamo_compiling() or _compiler._is_compiling_flag"
_SIGNATURE = """\
def signature(_call):
    {names}, = _call
    _grad = _is_grad_enabled()
    return (_grad, {facts})
"""
# of a signature seen before: one look-up, and the call object without the type's constructor
_FUNCTION = f"""\
def run({{names}}):
    if {_COMPILING}:
        return _op(_kind({{names}}))
    _grad = _is_grad_enabled()
    try:
        _found = _op._bound.get((_grad, {{facts}}))
    except (AttributeError, TypeError, RuntimeError):
        _found = None
    if _found is None:
        return _op._first(_kind({{names}}))
    _found.entry.calls += 1
    return _found.run(_make(_kind, ({{names}},)))
"""


# fields whose default is None and that share one part of a signature: most calls leave most options out, and each part
# is made, hashed and compared
_GROUP = 5


def _parts(kind: type[tuple[Any, ...]]) -> str:
    """The parts of a signature, as Python writes them in a tuple."""
    defaults: dict[str, Any] = getattr(kind, "_field_defaults", {})
    parts, optional = [], {}
    for name, annotation in fields_of(kind).items():
        part = _FACTS.format(name) if is_tensor(annotation) else name
        if annotation is not Tensor and is_tensor(annotation):
            part = f"None if {name} is None else ({part})"
        if defaults.get(name, name) is None:
            optional[name] = part
        else:
            parts.append(part)
    names = list(optional)
    for group in (names[first : first + _GROUP] for first in range(0, len(names), _GROUP)):
        written = ", ".join(optional[name] for name in group)
        parts.append(f"None if {' is '.join(group)} is None else ({written},)")
    return ", ".join(parts)


def _written(template: str, kind: type[tuple[Any, ...]], scope: dict[str, Any]) -> Any:
    """The function that a template makes of the fields of a kind of call."""
    source = template.format(names=", ".join(fields_of(kind)), facts=_parts(kind))
    scope = {"_is_grad_enabled": torch.is_grad_enabled, **scope}
    exec(compile(source, f"<signature of {kind.__name__}>", "exec"), scope)
    return scope[source[len("def ") : source.index("(")]]


@cache
def signature_function(kind: type[tuple[Any, ...]]) -> Callable[[tuple[Any, ...]], Signature]:
    """The function that gives a call's signature: all that check, key and bind may look at.

    Of a tensor that is shape, strides, dtype, device and whether autograd records it; any other value is itself. The
    function is written for the fields of one kind of call, as a loop over them took half of a small call's time.

    Raises (the function): AttributeError where a field that holds a tensor was given something else.
    """
    made: Callable[[tuple[Any, ...]], Signature] = _written(_SIGNATURE, kind, {})
    return made


def function_of(op: Any, kind: Callable[P, Any]) -> Callable[P, Any]:
    """The function of a kind of call's fields that runs `op(kind(...))`: see `Op.of_fields`.

    It makes the signature of `signature_function` of its arguments.
    """
    call_type: Any = kind
    scope = {"_op": op, "_kind": kind, "_make": tuple.__new__, "_compiler": torch.compiler}
    written = _written(_FUNCTION, call_type, scope)
    written.__defaults__ = tuple(call_type._field_defaults.values())
    made: Callable[P, Any] = written
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
