"""The definition of attention, dull: one head at a time, all scores at once, everything widened, rounded once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.checks as _checks
from wavecrest.ops._flash_attention.call import Operands
from wavecrest.ops.common.philox import philox


class _Pairs(NamedTuple):
    """What every head shares, of all pairs of a query and a key, [B, Sq, Sk] (packed: [1, Tq, Tk]) or broadcast.

    `visible`: whether the query sees the key; `distance`: |i + Sk − Sq − j|. Packed alone: `sequence` [Tq, 1] and the
    positions `i` [Tq, 1] and `j` [1, Tk] of both in it.
    """

    visible: Tensor
    distance: Tensor
    sequence: Tensor
    i: Tensor
    j: Tensor


def _places(starts: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """The sequence of each packed token, its position there, and that sequence's length."""
    token = torch.arange(tokens, device=starts.device)
    sequence = torch.searchsorted(starts, token.to(starts.dtype), right=True) - 1
    # tokens after the last sequence are of none
    inside = sequence.clamp(max=starts.shape[0] - 2)
    return sequence, token - starts[inside], starts[inside + 1] - starts[inside]


def _pairs(given: Operands) -> _Pairs:
    device = given.q.device
    if given.packed:
        assert given.cu_seqlens_q is not None and given.cu_seqlens_k is not None
        sequence, i, queries = (one[:, None] for one in _places(given.cu_seqlens_q, given.q.shape[0]))
        other, j, keys = (one[None, :] for one in _places(given.cu_seqlens_k, given.k.shape[0]))
        visible = (sequence == other) & (sequence < given.batch)
        diagonal = i + keys - queries
    else:
        sequence = torch.zeros(1, 1, dtype=torch.int64, device=device)
        i, j = torch.arange(given.queries, device=device)[:, None], torch.arange(given.keys, device=device)[None, :]
        visible = torch.ones(given.queries, given.keys, dtype=torch.bool, device=device)
        diagonal = i + given.keys - given.queries
    if given.right >= 0:
        visible = visible & (j <= diagonal + given.right)
    if given.left >= 0:
        visible = visible & (j >= diagonal - given.left)
    return _Pairs(visible[None], (diagonal - j).abs()[None], sequence, i, j)


def _descaled(given: Operands, values: Tensor, descale: Tensor | None, starts: Tensor | None) -> Tensor:
    """q, k or v as [B, H, S, D], widened, times its descale: of the tensor, a head, or a sequence and head."""
    x = given.bhsd(_checks.widen(values))
    if descale is None:
        return x
    by_head = descale.expand(given.batch, x.shape[1])
    if starts is None:
        return x * by_head[:, :, None, None]
    sequence = _places(starts, x.shape[2])[0].clamp(max=given.batch - 1)
    return x * by_head[sequence].T[None, :, :, None]


def _added(given: Operands, pairs: _Pairs, head: int, dtype: torch.dtype) -> Tensor | None:
    """Bias and ALiBi of one head, of all pairs."""
    added = None
    bias = given.broadcast_bias()
    if bias is not None:
        added = bias[:, head].to(dtype)
        if given.packed:
            # pairs of two sequences are hidden: any element of the bias will do for them
            last_i, last_j = max(given.queries, 1) - 1, max(given.keys, 1) - 1
            added = added[
                pairs.sequence.clamp(max=given.batch - 1), pairs.i.clamp(max=last_i), pairs.j.clamp(0, last_j)
            ]
    if given.alibi_slopes is not None:
        slopes = given.alibi_slopes.to(dtype).expand(given.batch, given.heads)[:, head]
        slopes = slopes[pairs.sequence.clamp(max=given.batch - 1)] if given.packed else slopes[:, None, None]
        falling = -slopes * pairs.distance
        added = falling if added is None else added + falling
    return added


def _kept(given: Operands, pairs: _Pairs, head: int) -> Tensor:
    """Which weights of one head dropout keeps, [B, Sq, Sk] (packed: [1, Tq, Tk]): one word of 32 bits a pair."""
    assert given.seed is not None
    if given.packed:
        sequence = pairs.sequence.clamp(min=0)[None]
    else:
        sequence = torch.arange(given.batch, device=given.q.device)[:, None, None]
    head_of = torch.full_like(sequence, head)
    words = philox(given.seed, (pairs.j[None] // 4, pairs.i[None], head_of, sequence))
    # each word depends on all four numbers of its counter
    which = (pairs.j % 4).expand(words[0].shape)
    word = torch.stack(words, -1).gather(-1, which[..., None]).squeeze(-1)
    return word >= given.least_kept


def _head(given: Operands, pairs: _Pairs, head: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The result [B, Sq, Dv] and its logarithms [B, Sq] of one head, from q [B, Sq, D], k and v [B, Sk, …]."""
    scores = q @ k.mT * given.scale
    if given.softcap > 0:
        scores = given.softcap * torch.tanh(scores / given.softcap)
    added = _added(given, pairs, head, scores.dtype)
    if added is not None:
        scores = scores + added
    hidden = ~pairs.visible
    scores = scores.masked_fill(hidden, float("-inf"))
    sink = None if given.sinks is None else given.sinks[head].to(scores.dtype)
    # one more, so that there is a largest where there are no keys
    least = scores.new_full((*scores.shape[:-1], 1), float("-inf"))
    if sink is not None:
        least = torch.zeros_like(least) + sink
    top = torch.cat((scores, least), dim=-1).amax(-1, keepdim=True).detach()
    top = top.masked_fill(top == float("-inf"), 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    nothing = total == 0
    share = weights / total.masked_fill(nothing, 1.0)
    if given.dropout:
        share = share * _kept(given, pairs, head) / (1.0 - given.dropout_p)
    # 0 · NaN is NaN: a product alone would let values through that are hidden
    finite = v.isfinite()
    result = share @ v.masked_fill(~finite, 0.0)
    spoiled = (~hidden).to(v.dtype) @ (~finite).to(v.dtype) > 0
    lse = (top + torch.log(total.masked_fill(nothing, 1.0))).masked_fill(nothing, float("-inf"))
    return result.masked_fill(spoiled, float("nan")), lse.squeeze(-1)


def reference(given: Operands) -> Tensor | tuple[Tensor, Tensor]:
    """Σⱼ pᵢⱼ vⱼ with pᵢⱼ = exp(sᵢⱼ) / (exp(sink) + Σⱼ exp(sᵢⱼ)) over the keys j that query i sees.

    sᵢⱼ = cap(scale · qᵢ · kⱼ) + biasᵢⱼ − slope · |i + Sk − Sq − j|. A key that is hidden takes no part, whatever it
    holds; a value that is seen and not finite makes its column NaN. In float32, in float64 for float64. 8-bit q, k and
    v are taken times their descales; weights are not rounded to 8 bits. With dropout each pᵢⱼ is 0 or 1 / (1 − p) of
    itself; the logarithms do not know it.
    """
    q = _descaled(given, given.q, given.q_descale, given.cu_seqlens_q)
    k = _descaled(given, given.k, given.k_descale, given.cu_seqlens_k)
    v = _descaled(given, given.v, given.v_descale, given.cu_seqlens_k)
    pairs = _pairs(given)
    heads = [
        _head(given, pairs, head, q[:, head], k[:, head // given.group], v[:, head // given.group])
        for head in range(given.heads)
    ]
    result = torch.stack([one for one, _ in heads], dim=1 if given.layout == "bhsd" else 2)
    lse = torch.stack([one for _, one in heads], dim=1)
    if given.packed:
        result, lse = result.squeeze(0), lse.squeeze(0)
    result = result.to(given.dtype).contiguous()
    return (result, lse.contiguous()) if given.return_lse else result
