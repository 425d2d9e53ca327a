"""Rotary embedding by PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.backends.torch.common import PRIORITY
from wavecrest.dispatch import registry
from wavecrest.dispatch.keys import dtype_name


def _rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, style: str = "neox") -> Tensor:
    if positions is not None:
        # as the op defines it: indexing itself would raise, end the GPU's context, or count from the end
        inside = positions.clamp(0, cos.shape[0] - 1)
        cos, sin = cos[inside].masked_fill((inside != positions).unsqueeze(-1), float("nan")), sin[inside]
    elif cos.ndim == 2:
        cos, sin = cos[: x.shape[-3]], sin[: x.shape[-3]]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    half = cos.shape[-1]
    if style == "neox":
        first, second = x[..., :half], x[..., half : 2 * half]
        parts = [first * cos - second * sin, second * cos + first * sin]
    else:
        first, second = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
        parts = [torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)]
    y = torch.cat((*parts, x[..., 2 * half :]), dim=-1).to(x.dtype)
    # in the order of x's strides, as the kernel writes it
    return y if x.is_contiguous() else torch.empty_like(x).copy_(y)


def _rope_supports(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, style: str = "neox"
) -> str | None:
    for tensor in (x, cos):
        if tensor.element_size() == 1:
            return f"does not multiply {dtype_name(tensor)}"
    return None


registry.get("rope").attach("torch", _rope, supports=_rope_supports, priority=PRIORITY)
