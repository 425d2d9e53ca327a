"""Copies by PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wavecrest.backends.torch.common import PRIORITY
from wavecrest.ops._memcpy.backend import op
from wavecrest.ops._memcpy.call import MemcpyCall, words_of


def _copy(call: MemcpyCall) -> Tensor:
    return call.x.clone()


def _read_or_write(call: MemcpyCall) -> Tensor:
    x, words = call.x, words_of(call.x)
    if call.mode == "read":
        # as int64: PyTorch sums integers in it
        return words.sum()
    return torch.full_like(words, call.signed_value).view(x.dtype).view(x.shape)


def _bind(call: MemcpyCall) -> Callable[[MemcpyCall], Tensor]:
    return _copy if call.mode == "copy" else _read_or_write


def _run(call: MemcpyCall) -> Tensor:
    return _bind(call)(call)


def _refuse(call: MemcpyCall) -> str | None:
    return None if call.programs is None else "chooses the number of programs by itself"


op.attach("torch", _run, refuse=_refuse, priority=PRIORITY, bind=_bind)
