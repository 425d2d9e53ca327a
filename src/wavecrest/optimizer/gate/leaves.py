"""The leaves of an answer: every tensor, number, string and None in it, with its path, and the types around them."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from wavecrest.measure.tree import children
from wavecrest.optimizer.gate.rules import RuleBroken

# values that are compared with ==, and hold nothing that == does not see
_EXACT = (type(None), bool, int, str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout, range, slice)
_CONTAINERS = (Mapping, list, tuple)
# set in `tp_flags` of classes written in Python
_PYTHON_CLASS = 1 << 9


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value of an answer.

    Attributes:
        kind: "tensor" and "number" have errors and limits; "exact" is equal or wrong.
        value: the tensor (of a numpy array: a view of it), the number as a tensor without dimensions, or the value.
        type: class of the value, with the numpy dtype of an array.
    """

    kind: Literal["tensor", "number", "exact"]
    value: Any
    type: Any

    def copy(self) -> Leaf:
        """The same with memory of its own."""
        if self.kind == "exact":
            return self
        return Leaf(self.kind, self.value.detach().clone(), self.type)


@dataclass(slots=True)
class Answer:
    """The result of a call: leaves by path, and the types of the containers and objects that hold them."""

    leaves: dict[str, Leaf] = field(default_factory=dict)
    containers: dict[str, str] = field(default_factory=dict)

    def numeric(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors and numbers, as tensors."""
        for path, leaf in self.leaves.items():
            if leaf.kind != "exact":
                yield path, leaf.value

    def copy(self) -> Answer:
        """The same with memory of its own, so that later calls cannot change it."""
        return Answer({path: leaf.copy() for path, leaf in self.leaves.items()}, dict(self.containers))

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for _, tensor in self.numeric())


def collect(value: Any, known: dict[int, str] | None = None, *, strict: bool = True) -> Answer:
    """The leaves of a call's result; tensors are not copied.

    Args:
        value: the result.
        known: containers and objects that the caller handed in, by id: they are leaves by their name, since their
            tensors are compared as state.
        strict: refuse what cannot be compared; else it is left out.

    Raises:
        RuleBroken: "leaves", with the path of a value that cannot be compared.
    """
    answer = Answer()
    _collect("", value, known or {}, strict, (), answer)
    return answer


def _collect(path: str, value: Any, known: dict[int, str], strict: bool, above: tuple[int, ...], into: Answer) -> None:
    name = path.strip(".") or "output"
    if isinstance(value, Tensor):
        into.leaves[name] = Leaf("tensor", value.detach(), type(value))
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        array = np.atleast_1d(np.asarray(value))
        # a view, so that later writes show; PyTorch takes no read-only and no reversed arrays
        plain = array.flags.writeable and all(stride >= 0 for stride in array.strides)
        tensor = torch.from_numpy(array if plain else array.copy())
        into.leaves[name] = Leaf("tensor", tensor, (type(value), value.dtype, value.shape))
    elif isinstance(value, np.ndarray) and value.dtype.kind in "USMm":
        into.leaves[name] = Leaf("exact", value.tolist(), (type(value), value.dtype, value.shape))
    elif isinstance(value, _EXACT):
        into.leaves[name] = Leaf("exact", value, type(value))
    elif isinstance(value, float | complex):
        into.leaves[name] = Leaf("number", torch.tensor(value, dtype=torch.complex128 if isinstance(value, complex)
                                                        else torch.float64), type(value))  # fmt: skip
    elif isinstance(value, set | frozenset) and all(isinstance(item, _EXACT) for item in value):
        into.leaves[name] = Leaf("exact", value, type(value))
    elif id(value) in known:
        into.leaves[name] = Leaf("exact", f"the caller's {known[id(value)]}", "caller")
    elif id(value) in above:
        into.leaves[name] = Leaf("exact", len(above) - above.index(id(value)), "cycle")
    else:
        if isinstance(value, np.ndarray):
            parts: list[tuple[str, Any]] | None = [(f"[{i}]", item) for i, item in enumerate(value.ravel().tolist())]
        else:
            parts = None if _opaque(value) else children(value)
        if parts is None:
            if strict:
                raise RuleBroken("leaves", f"{name} is a {_name(type(value))}, which cannot be compared")
            return
        into.containers[name] = _name(type(value))
        for end, part in parts:
            _collect(path + end, part, known, strict, (*above, id(value)), into)


def _opaque(value: Any) -> bool:
    """True where a class written in C may hold what no attribute shows: a file, a lock, an iterator."""
    if isinstance(value, (*_CONTAINERS, np.ndarray)):
        return False
    return any(base is not object and not base.__flags__ & _PYTHON_CLASS for base in type(value).__mro__)


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def check_structure(got: Answer, expected: Answer, rules: frozenset[str], *, exact: bool = True) -> None:
    """Paths, containers, types of tensors, and the values of leaves that have no error.

    Args:
        got: of the candidate.
        expected: of the original, on the same values.
        rules: the rules in force.
        exact: compare exact leaves too; without it only their presence.

    Raises:
        RuleBroken: "structure", "type" or "leaves", with the path.
    """
    if "structure" in rules and got.leaves.keys() != expected.leaves.keys():
        raise RuleBroken(
            "structure", f"its outputs are {sorted(got.leaves)} where the original's are {sorted(expected.leaves)}"
        )
    if "structure" in rules and got.containers != expected.containers:
        paths = got.containers.keys() | expected.containers.keys()
        path = min(p for p in paths if got.containers.get(p) != expected.containers.get(p))
        have, want = got.containers.get(path, "nothing"), expected.containers.get(path, "nothing")
        raise RuleBroken("structure", f"{path} is a {have} where the original's is a {want}")
    for path in expected.leaves.keys() & got.leaves.keys():
        have_leaf, want_leaf = got.leaves[path], expected.leaves[path]
        if "type" in rules:
            _check_type(path, have_leaf, want_leaf)
        if exact and "leaves" in rules and want_leaf.kind == "exact":
            same = have_leaf.kind == "exact" and bool(have_leaf.value == want_leaf.value)
            if not same:
                raise RuleBroken("leaves", f"{path} is {_shown(have_leaf)} where the original's is {_shown(want_leaf)}")


def _check_type(path: str, got: Leaf, expected: Leaf) -> None:
    if got.type != expected.type:
        have, want = _type_name(got.type), _type_name(expected.type)
        raise RuleBroken("type", f"{path} is a {have} where the original's is a {want}")
    if expected.kind != "tensor":
        return
    for fact in ("dtype", "device", "layout"):
        have_fact, want_fact = getattr(got.value, fact), getattr(expected.value, fact)
        if have_fact != want_fact:
            raise RuleBroken("type", f"{path} has {fact} {have_fact} where the original's has {want_fact}")


def _type_name(kind: Any) -> str:
    return _name(kind) if isinstance(kind, type) else str(kind)


def _shown(leaf: Leaf) -> str:
    text = repr(leaf.value if leaf.kind == "exact" else tuple(leaf.value.shape))
    return text if len(text) <= 60 else text[:57] + "..."


def shared_memory(answer: Answer, owners: dict[int, str]) -> dict[str, set[str]]:
    """The tensors of others whose memory each output shares, and "itself" where its own elements overlap.

    Args:
        answer: its tensors are looked at, not copied.
        owners: storage address -> name, of inputs, parameters and buffers.
    """
    found: dict[str, set[str]] = {}
    first: dict[tuple[int, torch.Size], str] = {}
    for path, leaf in answer.leaves.items():
        if leaf.kind != "tensor" or leaf.value.layout != torch.strided or leaf.value.numel() == 0:
            continue
        with_whom = found.setdefault(path, set())
        tensor = leaf.value
        if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            with_whom.add("itself")
        address = _storage(tensor)
        if address in owners:
            with_whom.add(owners[address])
        # views of different parts of one tensor, such as a split projection, are outputs of their own
        whole = (tensor.data_ptr() if address > 0 else address, tensor.shape)
        if whole in first:
            with_whom.add(first[whole])
        first.setdefault(whole, path)
    return found


def storages(tensors: Iterator[tuple[str, Tensor]]) -> dict[int, str]:
    """Storage address -> name, for `shared_memory`."""
    return {_storage(tensor): name for name, tensor in tensors if tensor.layout == torch.strided and tensor.numel()}


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        # a subclass without memory of its own
        return -id(tensor)


def check_sharing(got: dict[str, set[str]], expected: dict[str, set[str]]) -> None:
    """No output shares memory where the original's does not.

    Raises:
        RuleBroken: "sharing", with the path.
    """
    for path, with_whom in got.items():
        more = with_whom - expected.get(path, set())
        if more:
            name = min(more)
            text = "has elements that share memory (an expanded tensor)" if name == "itself" else (
                f"shares memory with {name}")  # fmt: skip
            raise RuleBroken("sharing", f"{path} {text}, where the original's does not")
