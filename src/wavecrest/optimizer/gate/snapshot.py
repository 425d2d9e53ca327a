"""Snapshots: the bits of tensors, and the containers and objects that lead to them, to compare with and to put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from wavecrest.measure.tree import attributes, children
from wavecrest.ops import PackedWeight


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one shape, one dtype and the same bits (NaN equals itself, 0 is not -0)."""
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout != torch.strided:
        return bool(torch.equal(a.to_dense(), b.to_dense()))
    # of quantized tensors the scales too
    one, two = (a, b.to(a.device)) if a.is_quantized else (bits(a), bits(b).to(a.device))
    return bool(torch.equal(one, two))


def in_parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Named tensors, packed weights as their parts: these hold the bits, and nothing reads those of the whole."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, PackedWeight):
            found[name] = tensor
            continue
        parts = {"stored": tensor.stored, "scale": tensor.scale, "zero": tensor.zero}
        found |= {f"{name}.{part}": value for part, value in parts.items() if value is not None}
    return found


def bits(tensor: Tensor) -> Tensor:
    """The bits of a tensor as whole numbers, in one dimension; of a quantized one its integers, without scales."""
    if tensor.is_quantized:
        # PyTorch ends the process that views one as another dtype, and reads it
        tensor = tensor.detach().int_repr()
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(kinds[flat.element_size()])


def write(tensor: Tensor, values: Tensor, *, counted: bool = True) -> None:
    """Write values at a tensor's own address.

    Args:
        tensor: may be expanded: each element in memory is written once.
        values: of the same shape.
        counted: let PyTorch's version counter see it.
    """
    target, source = (tensor.detach() if counted else tensor.data), values
    for dim, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    with torch.inference_mode(tensor.is_inference()):
        target.copy_(source)


class Snapshot:
    """Tensors and containers under some named roots, as they are now.

    Attributes:
        tensors: path -> (the tensor, a copy of its values).
    """

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        self.tensors: dict[str, tuple[Tensor, Tensor]] = {}
        self._leaves: list[Tensor] = []
        self._containers: list[tuple[Any, Any]] = []
        self.names: dict[int, str] = {}
        seen: set[int] = set()
        # what is looked at stays alive, so that no id is given to another object
        self._roots = list(roots)
        for name, root in self._roots:
            self._walk(name, root, seen)

    def _walk(self, path: str, value: Any, seen: set[int]) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.layout == torch.strided:
                self.tensors[path] = (value, value.detach().clone())
                if value.is_leaf:
                    self._leaves.append(value)
            return
        parts = children(value)
        if parts is None:
            return
        self.names[id(value)] = path
        if isinstance(value, list | deque):
            self._containers.append((value, list(value)))
        elif isinstance(value, MutableMapping):
            self._containers.append((value, dict(value)))
        elif not isinstance(value, Mapping | tuple):
            self._containers.append((value, dict(attributes(value))))
        for end, part in parts:
            self._walk(path + end, part, seen)

    def restore(self) -> None:
        """Put back containers, then values."""
        self.restore_containers()
        for tensor, copy in self.tensors.values():
            write(tensor, copy)

    def cut_history(self) -> None:
        """Take the gradient history out of tensors that had none: a write with gradients enabled leaves one.

        With a history left a key-value cache cannot be copied, and PyTorch picks other attention kernels for it. The
        history of a view cannot be taken out.
        """
        for tensor in self._leaves:
            if not tensor.is_leaf and not tensor._is_view():
                tensor.detach_()

    def restore_containers(self) -> None:
        """Put back lists, dicts and attributes that hold something else than before."""
        for value, before in self._containers:
            if isinstance(value, list | deque):
                if not _same_items(list(value), before):
                    value.clear()
                    value.extend(before)
            elif isinstance(value, MutableMapping):
                if list(value) != list(before) or not _same_items(list(value.values()), list(before.values())):
                    value.clear()
                    value.update(before)
            else:
                now = dict(attributes(value))
                for name in now.keys() - before.keys():
                    object.__delattr__(value, name)
                for name, part in before.items():
                    if name not in now or now[name] is not part:
                        object.__setattr__(value, name, part)

    def changed(self) -> list[str]:
        """Paths of tensors whose bits differ from the snapshot."""
        return [path for path, (tensor, copy) in self.tensors.items() if not same_bits(tensor, copy)]

    def current(self) -> dict[str, Tensor]:
        """Tensors that the roots lead to now, by path: a call may have put others in their place."""
        found: dict[str, Tensor] = {}
        seen: set[int] = set()

        def walk(path: str, value: Any) -> None:
            if id(value) in seen:
                return
            seen.add(id(value))
            if isinstance(value, Tensor):
                if value.layout == torch.strided:
                    found[path] = value
                return
            for end, part in children(value) or ():
                walk(path + end, part)

        for name, root in self._roots:
            walk(name, root)
        return found


def _same_items(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
