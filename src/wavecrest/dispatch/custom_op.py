"""An op as one operation of a torch.compile graph, for calls that Dynamo cannot trace."""

from __future__ import annotations

import typing
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, TypeVar, Union

import torch
from torch import Tensor

from wavecrest.dispatch.call import fields_of
from wavecrest.dispatch.op import Op
from wavecrest.errors import InvalidArgument

C = TypeVar("C", bound=tuple[Any, ...])

# the types that a call's fields may have, as torch writes them in a schema
SCHEMA_TYPES = {Tensor: "Tensor", torch.dtype: "ScalarType", float: "float", int: "SymInt", bool: "bool", str: "str"}


def schema_of(call_type: type[tuple[Any, ...]]) -> str:
    """The torch schema of an operation that takes the fields of a call and returns a tensor.

    Raises:
        InvalidArgument: a field has a type that a schema cannot express; the message names it.
    """
    return f"({', '.join(f'{_type(kind)} {name}' for name, kind in fields_of(call_type).items())}) -> Tensor"


def _type(kind: Any) -> str:
    members = typing.get_args(kind) if typing.get_origin(kind) in (Union, UnionType) else (kind,)
    optional = NoneType in members
    types = [member for member in members if member is not NoneType]
    if len(types) != 1 or types[0] not in SCHEMA_TYPES:
        known = ", ".join(one.__name__ for one in SCHEMA_TYPES)
        raise InvalidArgument(f"a field of type {kind} has no torch schema; use one of {known}, or one of them | None")
    return SCHEMA_TYPES[types[0]] + ("?" if optional else "")


def custom_op_of(
    op: Op[C, Tensor], call_type: type[C], fake: Callable[[C], Tensor], without: tuple[str, ...] = ()
) -> Callable[[C], Tensor]:
    """A function that runs a call as the custom op `wavecrest::NAME`; the backend is chosen when the graph runs.

    Args:
        op: must not write to its arguments, except through the fields in `without`.
        call_type: the type of its calls.
        fake: an empty tensor of the result's shape, dtype and device, for calls of fake tensors.
        without: fields that have their defaults inside a graph.

    Raises:
        InvalidArgument: a field has a type that a schema cannot express.
    """
    defaults: dict[str, Any] = getattr(call_type, "_field_defaults", {})
    places = [list(fields_of(call_type)).index(name) for name in without]
    kept = {place: defaults[name] for place, name in zip(places, without, strict=True)}

    def run(*values: Any) -> Tensor:
        return op(call_type(*[kept.get(place, value) for place, value in enumerate(values)]))

    operation = torch.library.custom_op(
        f"wavecrest::{op.name}", run, mutates_args=(), schema=schema_of(call_type)
    )  # fmt: skip
    operation.register_fake(lambda *values: fake(call_type(*values)))

    def in_graph(call: C) -> Tensor:
        result: Tensor = operation(*call)
        return result

    return in_graph
