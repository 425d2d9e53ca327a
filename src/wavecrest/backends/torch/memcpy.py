"""Copies by PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.backends.torch.common import PRIORITY
from wavecrest.ops._memcpy.backend import op
from wavecrest.ops._memcpy.call import MemcpyCall, words_of


def _memcpy(call: MemcpyCall) -> Tensor:
    x = call.x
    if call.mode == "copy":
        return x.clone()
    words = words_of(x)
    if call.mode == "read":
        # as int64: PyTorch sums integers in it
        return words.sum()
    return torch.full_like(words, call.signed_value).view(x.dtype).view(x.shape)


def _refuse(call: MemcpyCall) -> str | None:
    return None if call.programs is None else "chooses the number of programs by itself"


op.attach("torch", _memcpy, refuse=_refuse, priority=PRIORITY)
