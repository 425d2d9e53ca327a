"""The definition of the convolution, tap by tap, in PyTorch's operations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import wavecrest.ops.common.checks as _checks
from wavecrest.ops._conv2d.call import Conv2dCall
from wavecrest.ops.common.activation import activated


def reference(call: Conv2dCall) -> Tensor:
    """act(Σ over r, s, c of x[b, c, oh · stride + r · dilation − pad, …] · weight[o, c, r, s] + bias[o] + residual).

    In float32 (float64 for float64), rounded once.
    """
    x, weight = _checks.widen(call.x), _checks.widen(call.weight)
    above, below, left, right = call.pads
    (stride_h, stride_w), (dil_h, dil_w), (taps_r, taps_s) = call.strides, call.dilations, call.kernel
    batch, outputs, height, width = call.shape
    groups = call.groups
    padded = F.pad(x, (left, right, above, below))
    padded = padded.reshape(batch, groups, call.channels, *padded.shape[2:])
    filters = weight.reshape(groups, call.N, *weight.shape[1:])
    y = torch.zeros((batch, groups, call.N, height, width), dtype=x.dtype, device=x.device)
    for r in range(taps_r):
        for s in range(taps_s):
            top, start = r * dil_h, s * dil_w
            seen = padded[
                ...,
                top : top + (height - 1) * stride_h + 1 : stride_h,
                start : start + (width - 1) * stride_w + 1 : stride_w,
            ]
            y = y + torch.einsum("bgchw,gnc->bgnhw", seen, filters[..., r, s])
    y = y.flatten(1, 2)
    if call.bias is not None:
        y = y + call.bias.to(y.dtype).reshape(outputs, 1, 1)
    if call.residual is not None:
        y = y + _checks.widen(call.residual)
    return activated(y, call.activation).to(call.x.dtype).contiguous(memory_format=call.memory_format)
