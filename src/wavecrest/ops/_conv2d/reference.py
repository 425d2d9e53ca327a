"""The definition of the convolution, dull: tap by tap, everything widened, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import wavecrest.ops.common.checks as _checks
from wavecrest.ops._conv2d.call import Operands
from wavecrest.ops.common.activation import activated


def reference(given: Operands) -> Tensor:
    """act(Σ over r, s, c of x[b, c, oh · stride + r · dilation − pad, …] · weight[o, c, r, s] + bias[o]).

    Sums in float32, in float64 for float64.
    """
    x, weight = _checks.widen(given.x), _checks.widen(given.weight)
    above, below, left, right = given.pads
    (stride_h, stride_w), (dil_h, dil_w), (taps_r, taps_s) = given.strides, given.dilations, given.kernel
    batch, outputs, height, width = given.shape
    groups = given.groups
    padded = F.pad(x, (left, right, above, below))
    padded = padded.reshape(batch, groups, given.channels, *padded.shape[2:])
    filters = weight.reshape(groups, given.N, *weight.shape[1:])
    y = torch.zeros((batch, groups, given.N, height, width), dtype=x.dtype, device=x.device)
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
    if given.bias is not None:
        y = y + given.bias.to(y.dtype).reshape(outputs, 1, 1)
    return activated(y, given.activation).to(given.x.dtype).contiguous(memory_format=given.memory_format)
