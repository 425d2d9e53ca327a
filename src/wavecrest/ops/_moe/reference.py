"""The definition of the mixture-of-experts layer: every expert over all tokens, of which those that chose it count."""

from __future__ import annotations

import torch
from torch import Tensor

import wavecrest.ops.common.checks as _checks
from wavecrest.ops._moe.call import BLOCK, SWIGLUOAI, MoeCall, halves, rows_of, scale_kind
from wavecrest.ops.common.activation import activated
from wavecrest.ops.packed.formats import INT4_ZERO, e2m1_values, e8m0_values, nibbles


def gated(call: MoeCall, gate: Tensor, up: Tensor) -> Tensor:
    """act(gate) · up."""
    if call.activation == SWIGLUOAI:
        gate, up = gate.clamp(max=call.limit), up.clamp(-call.limit, call.limit)
        return gate * torch.sigmoid(call.alpha * gate) * (up + 1)
    return activated(gate, call.activation) * up


def weight_of(call: MoeCall, second: bool, expert: int) -> Tensor:
    """One expert's w1, or w2, in float32 or float64, times its scales."""
    weight, scale, columns = call.w1, call.w1_scale, call.hidden
    if second:
        weight, scale, columns = call.w2, call.w2_scale, call.intermediate
    if scale is None:
        return _checks.widen(weight[expert])
    kind, group = scale_kind(call, second)
    if kind in ("expert", "row"):
        return _checks.widen(weight[expert]) * rows_of(scale, weight.shape[1])[expert, :, None]
    own = e8m0_values(scale[expert]) if kind == "e8m0" else scale[expert]
    own = own.repeat_interleave(group, 1)[:, :columns]
    if kind == "block":
        return _checks.widen(weight[expert]) * own.repeat_interleave(BLOCK, 0)[: weight.shape[1]]
    stored = nibbles(weight[expert].contiguous())[:, :columns]
    if kind == "e8m0":
        return e2m1_values(stored) * own
    zero = call.w2_zero if second else call.w1_zero
    if zero is None:
        return (stored.float() - INT4_ZERO) * own
    return (stored.float() - zero[expert].float().repeat_interleave(group, 1)[:, :columns]) * own


def reference(call: MoeCall) -> Tensor:
    """The layer in float32 (float64 for float64), rounded once."""
    x, weights = _checks.widen(call.x), _checks.widen(call.topk_weights)
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for expert in range(call.experts):
        both = weight_of(call, False, expert).to(x.dtype)[None]
        gate, up = (x @ half[0].mT for half in halves(both, call.interleaved))
        if call.b1 is not None:
            bias_gate, bias_up = halves(call.b1, call.interleaved)
            gate, up = gate + bias_gate[expert], up + bias_up[expert]
        row = gated(call, gate, up) @ weight_of(call, True, expert).to(x.dtype).mT
        if call.b2 is not None:
            row = row + call.b2[expert]
        for choice in range(call.k):
            chosen = (call.topk_ids[:, choice] == expert)[:, None]
            # not a product with 0: an expert's infinities and NaN stay with the tokens that chose it
            y = y + torch.where(chosen, row * weights[:, choice, None], torch.zeros_like(row))
    return y.to(call.x.dtype)
