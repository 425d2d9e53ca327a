"""Rotary embedding by PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.backends.torch.common import PRIORITY
from wavecrest.dispatch.keys import dtype_name
from wavecrest.ops._rope.backend import op
from wavecrest.ops._rope.call import RopeCall
from wavecrest.ops._rope.reference import table_rows


def _rope(call: RopeCall) -> Tensor:
    x = call.x
    rows_cos, rows_sin = table_rows(call)
    cos, sin = rows_cos.unsqueeze(-2), rows_sin.unsqueeze(-2)
    half = cos.shape[-1]
    if call.style == "neox":
        first, second = x[..., :half], x[..., half : 2 * half]
        parts = [first * cos - second * sin, second * cos + first * sin]
    else:
        first, second = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
        parts = [torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)]
    y = torch.cat((*parts, x[..., 2 * half :]), dim=-1).to(x.dtype)
    # in the order of x's strides, as the kernel writes it
    return y if x.is_contiguous() else torch.empty_like(x).copy_(y)


def _refuse(call: RopeCall) -> str | None:
    for tensor in (call.x, call.cos):
        if tensor.element_size() == 1:
            return f"does not multiply {dtype_name(tensor)}"
    return None


op.attach("torch", _rope, refuse=_refuse, priority=PRIORITY)
