"""Which bytes of tensors nothing has written: those of `torch.empty` that neither PyTorch nor a kernel wrote since."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

_EMPTY = frozenset(
    "aten::" + name
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)


def elements(tensor: Tensor) -> Bytes:
    """1 for each byte of a tensor's storage that an element lies in, 0 for the gaps."""
    size = tensor.element_size()
    marks = torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.uint8)
    strides = [stride * size for stride in tensor.stride()]
    marks.as_strided((*tensor.size(), size), (*strides, 1), tensor.storage_offset() * size).fill_(1)
    found: Bytes = marks.numpy()
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


class Uninitialised(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, keeps for each tensor that PyTorch made without a value which of its bytes have one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, tuple[StorageWeakRef, Bytes]] = {}

    def written(self, tensor: Tensor) -> Bytes | None:
        """1 for each byte of the tensor's storage that has a value; None if all have."""
        address = tensor.untyped_storage().data_ptr()
        reference, marks = self._known.get(address, (None, None))
        if reference is not None and reference.expired():  # type: ignore[no-untyped-call]
            # other memory has the address now
            del self._known[address]
            return None
        return marks

    def set_written(self, tensor: Tensor, marks: Bytes) -> None:
        """Take over what a kernel wrote."""
        known = self.written(tensor)
        if known is not None:
            known |= marks

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        if schema.name in _EMPTY:
            for tensor in _tensors(result):
                storage = tensor.untyped_storage()
                if tensor.device.type == "cpu" and storage.nbytes():
                    marks = np.zeros(storage.nbytes(), np.uint8)
                    reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                    self._known[storage.data_ptr()] = reference, marks
            return result
        if not self._known:
            return result
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else (kwargs or {}).get(argument.name)
                for tensor in _tensors(value):
                    if self.written(tensor) is not None:
                        self.set_written(tensor, elements(tensor))
        results = result if isinstance(result, tuple) else (result,)
        for declared, value in zip(schema.returns, results, strict=False):
            # a view has the memory of an argument; anything else is new and has values
            if declared.alias_info is None:
                for tensor in _tensors(value):
                    self._known.pop(tensor.untyped_storage().data_ptr(), None)
        return result
