"""The definition of the rotary embedding, in PyTorch's operations."""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.ops._rope.call import RopeCall


def reference(call: RopeCall) -> Tensor:
    """x with its first R columns turned, in float32 (float64 where x or the tables are), rounded once."""
    x = call.x
    wide = torch.float64 if torch.float64 in (x.dtype, call.cos.dtype) else torch.float32
    rows_cos, rows_sin = table_rows(call)
    cos, sin = rows_cos.to(wide).unsqueeze(-2), rows_sin.to(wide).unsqueeze(-2)
    half, x_wide, y = cos.shape[-1], x.to(wide), torch.empty_like(x)
    if call.style == "neox":
        first, second = x_wide[..., :half], x_wide[..., half : 2 * half]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    else:
        first, second = x_wide[..., : 2 * half : 2], x_wide[..., 1 : 2 * half : 2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    y[..., : 2 * half] = turned.to(x.dtype)
    y[..., 2 * half :] = x[..., 2 * half :]
    return y


def table_rows(call: RopeCall) -> tuple[Tensor, Tensor]:
    """The rows of cos and sin each token takes, [..., S, R/2], NaN where a position is not in the table."""
    cos, sin, positions = call.cos, call.sin, call.positions
    if positions is None:
        return (cos, sin) if cos.ndim > 2 else (cos[: call.x.shape[-3]], sin[: call.x.shape[-3]])
    # indexing with it would raise, end the GPU's context, or count from the end
    inside = positions.clamp(0, cos.shape[0] - 1)
    outside = (inside != positions).unsqueeze(-1)
    # a NaN in either of them makes the whole pair NaN
    return cos[inside].masked_fill(outside, float("nan")), sin[inside]
