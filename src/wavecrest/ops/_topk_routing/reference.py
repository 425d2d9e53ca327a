"""The definition of the router, in PyTorch's operations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import wavecrest.ops.common.checks as _checks
from wavecrest.ops._topk_routing.call import Routing, TopkRoutingCall

# added to the sum that weights are divided by
LEAST_SUM = 1e-20


def chosen_by(call: TopkRoutingCall, logits: Tensor, scores: Tensor) -> Tensor:
    """The numbers by which experts are chosen, the largest first; NaN as the largest."""
    # scores grow with logits, which lose no order to rounding
    choice = logits if call.bias is None and call.num_groups == 1 else scores
    if call.bias is not None:
        choice = choice + call.bias.to(choice.dtype)
    choice = torch.where(choice.isnan(), math.inf, choice)
    if call.num_groups == 1:
        return choice
    groups = choice.reshape(-1, call.num_groups, call.experts // call.num_groups)
    of_group = groups.sort(dim=-1, descending=True).values[..., :2].sum(-1)
    # of infinities of both signs
    of_group = torch.where(of_group.isnan(), math.inf, of_group)
    kept = of_group.sort(dim=-1, descending=True, stable=True).indices[:, : call.topk_groups]
    mask = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, kept, True)
    return torch.where(mask[..., None], groups, -math.inf).flatten(1)


def reference(call: TopkRoutingCall) -> Routing:
    """Weights in float32 (float64 for float64) and experts."""
    logits = _checks.widen(call.logits)
    scores = logits.softmax(-1) if call.scores == "softmax" else logits.sigmoid()
    choice = chosen_by(call, logits, scores)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : call.k]
    weights = scores.gather(1, ids)
    if call.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    return weights * call.scale, ids.to(torch.int32)
