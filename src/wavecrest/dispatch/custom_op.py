"""An op as one operation of a torch.compile graph, for calls that Dynamo cannot trace."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
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
# a number for both of two dimensions, or one each
PAIR = frozenset((int, tuple[int, int]))


def schema_of(call_type: type[tuple[Any, ...]], narrowed: Mapping[str, Any] | None = None) -> str:
    """The torch schema of an operation that takes the fields of a call and returns a tensor.

    Args:
        call_type: the type of the calls.
        narrowed: types that replace those of some fields, such as int for int | str.

    Raises:
        InvalidArgument: a field has a type that a schema cannot express; the message names it.
    """
    fields = {**fields_of(call_type), **(narrowed or {})}
    return f"({', '.join(f'{_type(kind)} {name}' for name, kind in fields.items())}) -> Tensor"


def _type(kind: Any) -> str:
    members = typing.get_args(kind) if typing.get_origin(kind) in (Union, UnionType) else (kind,)
    types = [member for member in members if member is not NoneType]
    optional = "?" if len(types) < len(members) else ""
    if frozenset(types) == PAIR:
        return f"SymInt[2]{optional}"
    if len(types) != 1 or types[0] not in SCHEMA_TYPES:
        known = ", ".join(one.__name__ for one in SCHEMA_TYPES)
        raise InvalidArgument(
            f"a field of type {kind} has no torch schema; use one of {known}, int | tuple[int, int], or one of them "
            "| None"
        )
    return SCHEMA_TYPES[types[0]] + optional


def operation_of(
    name: str,
    call_type: type[C],
    run: Callable[[C], Tensor],
    fake: Callable[[C], Tensor],
    *,
    on_cpu: Callable[[C], Tensor] | None = None,
    narrowed: Mapping[str, Any] | None = None,
) -> Callable[[C], Tensor]:
    """A function that runs a call as the custom op `wavecrest::NAME`, one operation of a graph.

    Args:
        name: of the operation.
        call_type: the type of its calls, whose fields are its arguments.
        run: runs a call; must not write to its tensors.
        fake: an empty tensor of the result's shape, strides, dtype and device, for calls of fake tensors.
        on_cpu: runs calls of tensors on the CPU in place of `run`.
        narrowed: see `schema_of`; the fields of the calls must have these types.

    Raises:
        InvalidArgument: a field has a type that a schema cannot express.
    """

    def taking_fields(work: Callable[[C], Tensor]) -> Callable[..., Tensor]:
        return lambda *values: work(call_type(*values))

    operation = torch.library.custom_op(
        f"wavecrest::{name}", taking_fields(run), mutates_args=(), schema=schema_of(call_type, narrowed)
    )
    operation.register_fake(taking_fields(fake))
    if on_cpu is not None:
        operation.register_kernel("cpu")(taking_fields(on_cpu))

    def in_graph(call: C) -> Tensor:
        result: Tensor = operation(*call)
        return result

    return in_graph


def configured_operation_of(
    name: str,
    call_type: type[C],
    run: Callable[[C, list[int]], list[Tensor]],
    fake: Callable[[C], list[Tensor]],
) -> Callable[[C, list[int]], list[Tensor]]:
    """A function that runs a call, with the values of a configuration, as the custom op `wavecrest::NAME`.

    Args:
        name: of the operation, which no other has.
        call_type: the type of its calls, whose fields are its arguments.
        run: runs a call; must not write to its tensors, nor return one of them.
        fake: empty tensors as the results, for calls of fake tensors.

    Raises:
        InvalidArgument: a field has a type that a schema cannot express.
    """
    schema = f"{schema_of(call_type).removesuffix(') -> Tensor')}, int[] config) -> Tensor[]"
    operation = torch.library.custom_op(
        f"wavecrest::{name}",
        lambda *values: run(call_type(*values[:-1]), list(values[-1])),
        mutates_args=(),
        schema=schema,
    )
    operation.register_fake(lambda *values: fake(call_type(*values[:-1])))

    def in_graph(call: C, config: list[int]) -> list[Tensor]:
        results: list[Tensor] = operation(*call, config)
        return results

    return in_graph


def named_operation_of(
    name: str,
    call_type: type[C],
    run: Callable[[C, str], Tensor],
    fake: Callable[[C], Tensor],
    without: tuple[str, ...] = (),
) -> Callable[[C, str], Tensor]:
    """A function that runs a call on a backend that is named, as the custom op `wavecrest::NAME`.

    Args:
        name: of the operation, which no other has.
        call_type: the type of its calls, whose fields are its arguments.
        run: runs a call on a backend; must not write to its tensors, except through the fields in `without`.
        fake: an empty tensor of the result's shape, dtype and device, for calls of fake tensors.
        without: fields that have their defaults inside a graph.

    Raises:
        InvalidArgument: a field has a type that a schema cannot express.
    """
    schema = f"{schema_of(call_type).removesuffix(') -> Tensor')}, str backend) -> Tensor"
    restored = _with_defaults(call_type, without)
    operation = torch.library.custom_op(
        f"wavecrest::{name}", lambda *values: run(restored(values[:-1]), values[-1]), mutates_args=(), schema=schema
    )
    operation.register_fake(lambda *values: fake(call_type(*values[:-1])))

    def in_graph(call: C, backend: str) -> Tensor:
        result: Tensor = operation(*call, backend)
        return result

    return in_graph


def _with_defaults(call_type: type[C], without: tuple[str, ...]) -> Callable[[tuple[Any, ...]], C]:
    """A function that makes a call of its values; some fields get their defaults."""
    defaults: dict[str, Any] = getattr(call_type, "_field_defaults", {})
    kept = {list(fields_of(call_type)).index(name): defaults[name] for name in without}
    return lambda values: call_type(*[kept.get(place, value) for place, value in enumerate(values)])


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
    restored = _with_defaults(call_type, without)
    return operation_of(op.name, call_type, lambda call: op(restored(call)), fake)
