"""A mixture of experts by PyTorch: two linear layers for each expert that has tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from wavecrest.backends.torch.common import PRIORITY, activated
from wavecrest.dispatch.custom_op import operation_of
from wavecrest.ops._moe.backend import op
from wavecrest.ops._moe.call import SWIGLUOAI, MoeCall, halves
from wavecrest.ops._moe.reference import gated, weight_of


def _by_expert(call: MoeCall) -> Tensor:
    """The experts one after the other, each over its tokens; the number of these is read on the host, once."""
    x, ids = call.x, call.topk_ids.reshape(-1)
    here = (ids >= 0) & (ids < call.experts)
    ids = torch.where(here, ids, call.experts)
    order = ids.argsort(stable=True)
    counts = torch.bincount(ids, minlength=call.experts + 1).tolist()
    tokens, weights = order // call.k, call.topk_weights.reshape(-1)[order]
    rows, first = [], 0
    for expert, count in enumerate(counts[: call.experts]):
        if count == 0:
            continue
        own = slice(first, first + count)
        rows.append(_expert(call, expert, x[tokens[own]]) * weights[own, None])
        first += count
    if not rows:
        # every id is that of an expert of another device
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    # in the order of pairs again, so that the sum of a token does not depend on the other tokens
    done = torch.cat(rows)
    parts = torch.zeros((call.num_pairs, call.hidden), dtype=done.dtype, device=x.device)
    parts = parts.index_copy(0, order[: done.shape[0]], done)
    wide = torch.promote_types(done.dtype, torch.float32)
    return parts.view(call.num_tokens, call.k, call.hidden).sum(1, dtype=wide).to(x.dtype)


def _expert(call: MoeCall, expert: int, x: Tensor) -> Tensor:
    """One expert over its tokens."""
    b1 = None if call.b1 is None else call.b1[expert].to(x.dtype)
    b2 = None if call.b2 is None else call.b2[expert].to(x.dtype)
    both = F.linear(x, _weight(call, False, expert), b1)
    gate, up = halves(both, call.interleaved)
    h = gated(call, gate, up) if call.activation == SWIGLUOAI else activated(gate, call.activation, 0.0) * up
    return F.linear(h, _weight(call, True, expert), b2)


def _weight(call: MoeCall, second: bool, expert: int) -> Tensor:
    """One expert's w1, or w2, in x's dtype; sums of unscaled ones could pass what float16 holds."""
    if call.w1_scale is None:
        return (call.w2 if second else call.w1)[expert]
    return weight_of(call, second, expert).to(call.x.dtype)


def _fake(call: MoeCall) -> Tensor:
    return torch.empty((call.num_tokens, call.hidden), dtype=call.x.dtype, device=call.x.device)


# the number of an expert's tokens is no size that Dynamo could trace
_in_graph = operation_of("moe_by_expert", MoeCall, _by_expert, _fake)


def _run(call: MoeCall) -> Tensor:
    return _in_graph(call) if torch.compiler.is_compiling() else _by_expert(call)


def _refuse(call: MoeCall) -> str | None:
    if torch.compiler.is_compiling() and call.needs_grad:
        return "reads the number of each expert's tokens on the host, so that a graph has no gradients of it"
    return None


op.attach("torch", _run, refuse=_refuse, priority=PRIORITY)
