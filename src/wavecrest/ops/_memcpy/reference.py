"""The definition of the bandwidth test's modes, in PyTorch's operations."""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.ops._memcpy.call import MemcpyCall, words_of


def reference(call: MemcpyCall) -> Tensor:
    """The copy, the sum of all 32-bit words as int64, or a tensor filled with `value`."""
    if call.mode == "copy":
        return call.x.clone()
    words = words_of(call.x)
    if call.mode == "read":
        return words.sum(dtype=torch.int64)
    filled = torch.empty_like(call.x)
    words_of(filled).fill_(call.signed_value)
    return filled
