"""The definition of the causal convolution, in PyTorch's operations."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import wavecrest.ops.common.checks as _checks
from wavecrest.ops._causal_conv1d.call import CausalConv1dCall


def inputs_of(call: CausalConv1dCall) -> Tensor:
    """x behind the inputs before it, [B, K − 1 + S, C]."""
    x = call.x
    before = x.new_zeros(x.shape[0], call.taps - 1, x.shape[2]) if call.initial is None else call.initial
    return torch.cat((before, x), 1)


def finished(call: CausalConv1dCall, y: Tensor) -> Tensor:
    """The activation of y, 0 behind the end of each row, in x's dtype."""
    if call.activation == "silu":
        y = F.silu(y)
    if call.seq_lens is not None:
        places = torch.arange(call.tokens, device=y.device)
        y = torch.where((places < call.seq_lens[:, None])[:, :, None], y, torch.zeros_like(y))
    return y.to(call.x.dtype).contiguous()


def reference(call: CausalConv1dCall) -> Tensor:
    """The sum over taps in float32, or float64 where x has it; rounded once."""
    given = _checks.widen(inputs_of(call))
    weight, tokens = call.weight.to(given.dtype), call.tokens
    y = given[:, :tokens] * weight[:, 0]
    for tap in range(1, call.taps):
        y = y + given[:, tap : tap + tokens] * weight[:, tap]
    return finished(call, y if call.bias is None else y + call.bias.to(given.dtype))
