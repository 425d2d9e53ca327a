"""Causal convolution of each channel over the tokens so far, as before the gates of xLSTM and of state space models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wavecrest.ops._causal_conv1d.backend import op as _op
from wavecrest.ops._causal_conv1d.call import CausalConv1dCall

__all__ = ["causal_conv1d"]

_run = _op.of_fields(CausalConv1dCall)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    initial: Tensor | None = None,
    return_last_inputs: bool = False,
    seq_lens: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """y[b, s, c] = activation(bias[c] + Σ_k weight[c, k] · x[b, s − K + 1 + k, c]), rounded once from float32.

    Args:
        x: [B, S, C], float32, float16, bfloat16 or float64, any strides; a tensor [B, C, S] is passed as `x.mT`.
        weight: [C, K], any float dtype, K from 1 to 16; the weight of an `nn.Conv1d` with C groups is
            `weight.squeeze(1)`.
        bias: [C], any float dtype.
        initial: [B, K − 1, C] in x's dtype, the inputs before the first token; None: zeros.
        return_last_inputs: also return the last K − 1 inputs, to go on from.
        seq_lens: int32 [B], the tokens of each row from its first place on, from 0 to S; None: S. At other places y is
            0 whatever x is, and the last inputs are those before them. It is not checked on the host.
        activation: None or "silu".

    Returns:
        y [B, S, C] in x's dtype, contiguous; with `return_last_inputs` (y, [B, K − 1, C] in x's dtype).

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this.
    """
    y = _run(x, weight, bias, initial, seq_lens, activation)
    if not return_last_inputs:
        return y
    kept = weight.shape[1] - 1
    if seq_lens is None and x.shape[1] >= kept:
        # a copy, which does not keep x
        return y, x[:, x.shape[1] - kept :].clone()
    before = x.new_zeros(x.shape[0], kept, x.shape[2]) if initial is None else initial
    if seq_lens is None:
        return y, torch.cat((before, x), 1)[:, x.shape[1] :]
    places = seq_lens.long().clamp(0, x.shape[1])[:, None] + torch.arange(kept, device=x.device)
    return y, torch.cat((before, x), 1).gather(1, places[:, :, None].expand(-1, -1, x.shape[2]))
