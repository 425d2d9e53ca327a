"""Nested values: the parts of containers and objects, and every tensor inside.

Containers are mappings, lists, tuples and deques; objects are dataclasses, key-value caches and whatever else keeps
its state in `__dict__` or `__slots__`.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# code and namespaces: they have a `__dict__`, but it is not their value
_NOT_DATA = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.GeneratorType,
)


def children(value: Any) -> list[tuple[str, Any]] | None:
    """The parts of a container or object, each with the end of its path (".key", "[0]", ".field").

    None for a value without parts: a number, a tensor, a function, a class. The attributes of a mapping (a
    transformers ModelOutput) are parts where they are not among its items.
    """
    if isinstance(value, _NOT_DATA):
        return None
    if isinstance(value, Mapping):
        items = [(f".{key}", item) for key, item in value.items()]
        held = {id(item) for item in value.values()}
        extra = [
            (f" attribute {name}", item)
            for name, item in attributes(value)
            if not name.startswith("_") and id(item) not in held and item is not None
        ]
        return items + extra
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", item) for name, item in zip(value._fields, value, strict=True)]
    if isinstance(value, list | tuple | deque):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if hasattr(value, "__dict__") or _slots(type(value)):
        return [(f".{name}", item) for name, item in attributes(value)]
    return None


def _slots(kind: type) -> list[str]:
    names = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def attributes(value: Any) -> list[tuple[str, Any]]:
    """The attributes that an object holds in `__slots__` and `__dict__`, by name."""
    found = [(name, getattr(value, name)) for name in _slots(type(value)) if hasattr(value, name)]
    return found + list(getattr(value, "__dict__", {}).items())


def is_object(leaf: Any) -> bool:
    """Whether a leaf of a call's arguments is neither a tensor nor a plain value: a key-value cache, for instance."""
    import torch

    return not (leaf is None or isinstance(leaf, torch.Tensor | bool | int | float | str | torch.dtype))


def iter_tensors(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside nested containers, dataclasses and cache objects, with its path; each once.

    Args:
        path: of `value`.
        value: what is looked through.
        seen: ids of what was met before and is not looked through again.
    """
    import torch

    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    # a callable object is code with settings: what it leads to is not the value's own
    for end, part in () if callable(value) else children(value) or ():
        yield from iter_tensors(path + end, part, seen)
