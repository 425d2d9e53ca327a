"""The definition of the row ops, in PyTorch's operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.quantized as _quantized
from wavecrest.ops.rows.call import RowCall

# columns from which PyTorch's softmax for CUDA fails with an internal assertion (H100, torch 2.11, 2026-11-26)
WIDE = 1 << 31


def _softmax(y: Tensor) -> Tensor:
    """Softmax over the last dimension, in operations that count in 64 bits where rows need that."""
    if y.shape[-1] < WIDE:
        return torch.softmax(y, -1)
    powers = torch.exp(y - y.amax(-1, keepdim=True))
    return powers / powers.sum(-1, keepdim=True)


def reference(call: RowCall) -> Any:
    """The results in float32 (float64 for float64) inside, rounded once."""
    x, how = call.x, call.quantization
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    # the norm is that of the rounded sum, as in a model that adds first
    h = x if call.residual is None else (x.to(wide) + call.residual.to(wide)).to(x.dtype)
    y = h.to(wide)
    if call.kind == "scaled":
        return _quantized.dequantized(y, how)
    if call.kind == "softmax":
        y = _softmax(y)
    if call.kind == "layer":
        y = y - y.mean(-1, keepdim=True)
    if call.kind in ("rms", "layer"):
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + call.eps)
    if call.weight is not None:
        y = y * call.weight.to(y.dtype)
    if call.bias is not None:
        y = y + call.bias.to(y.dtype)
    results = (y.to(x.dtype),) if how is None else _quantized.reference(y, how)
    if call.residual is not None and call.keeps_sum:
        results = (*results, h)
    return results[0] if len(results) == 1 else results
