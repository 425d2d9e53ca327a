"""Copies by PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.backends.torch.common import PRIORITY
from wavecrest.dispatch import registry
from wavecrest.errors import InvalidArgument


def _memcpy(x: Tensor, mode: str = "copy", programs: int | None = None, value: int = 0) -> Tensor:
    if mode == "copy":
        return x.clone()
    # Dynamo does not trace the offset; there it is the view that refuses
    if not torch.compiler.is_compiling() and x.storage_offset() * x.element_size() % 4 != 0:
        raise InvalidArgument(f"memcpy: x starts at element {x.storage_offset()} of its storage, inside a 32-bit word")
    words = x.detach().view(-1).view(torch.int32)
    if mode == "read":
        # as int64, which is what PyTorch sums integers in
        return words.sum()
    signed = value - (1 << 32) if value >= 1 << 31 else value
    return torch.full_like(words, signed).view(x.dtype).view(x.shape)


def _memcpy_supports(x: Tensor, mode: str = "copy", programs: int | None = None, value: int = 0) -> str | None:
    return None if programs is None else "chooses the number of programs by itself"


registry.get("memcpy").attach("torch", _memcpy, supports=_memcpy_supports, priority=PRIORITY)
