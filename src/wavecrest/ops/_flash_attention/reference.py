"""The definition of attention, dull: one head at a time, all scores at once, everything widened, rounded once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.checks as _checks
from wavecrest.ops._flash_attention.call import FlashAttentionCall
from wavecrest.ops.common.philox import philox


class _Pairs(NamedTuple):
    """Values of all pairs of a query and a key, shared by all heads: [B, Sq, Sk] (packed: [1, Tq, Tk]) or broadcast.

    `visible`: whether the query sees the key; `distance`: |i + Sk − Sq − j|. Only for packed sequences: `sequence`
    [Tq, 1], and the positions of both in it, `i` [Tq, 1] and `j` [1, Tk].
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
    # tokens after the last sequence belong to no sequence
    inside = sequence.clamp(max=starts.shape[0] - 2)
    return sequence, token - starts[inside], starts[inside + 1] - starts[inside]


def _pairs(call: FlashAttentionCall) -> _Pairs:
    device = call.q.device
    if call.packed:
        assert call.cu_seqlens_q is not None and call.cu_seqlens_k is not None
        sequence, i, seqlen_q = (one[:, None] for one in _places(call.cu_seqlens_q, call.q.shape[0]))
        other, j, seqlen_k = (one[None, :] for one in _places(call.cu_seqlens_k, call.k.shape[0]))
        visible = (sequence == other) & (sequence < call.batch)
        diagonal = i + seqlen_k - seqlen_q
    else:
        sequence = torch.zeros(1, 1, dtype=torch.int64, device=device)
        i, j = torch.arange(call.seqlen_q, device=device)[:, None], torch.arange(call.seqlen_k, device=device)[None, :]
        visible = torch.ones(call.seqlen_q, call.seqlen_k, dtype=torch.bool, device=device)
        diagonal = i + call.seqlen_k - call.seqlen_q
    if call.right >= 0:
        visible = visible & (j <= diagonal + call.right)
    if call.left >= 0:
        visible = visible & (j >= diagonal - call.left)
    return _Pairs(visible[None], (diagonal - j).abs()[None], sequence, i, j)


def _descaled(call: FlashAttentionCall, values: Tensor, descale: Tensor | None, starts: Tensor | None) -> Tensor:
    """q, k or v as [B, H, S, D], widened, times its descale: of the tensor, a head, or a sequence and head."""
    x = call.bhsd(_checks.widen(values))
    if descale is None:
        return x
    by_head = descale.expand(call.batch, x.shape[1])
    if starts is None:
        return x * by_head[:, :, None, None]
    sequence = _places(starts, x.shape[2])[0].clamp(max=call.batch - 1)
    return x * by_head[sequence].T[None, :, :, None]


def _added(call: FlashAttentionCall, pairs: _Pairs, head: int, dtype: torch.dtype) -> Tensor | None:
    """Bias and ALiBi of one head, of all pairs."""
    added = None
    bias = call.broadcast_bias()
    if bias is not None:
        added = bias[:, head].to(dtype)
        if call.packed:
            # pairs of two sequences are hidden: any element of the bias will do for them
            last_i, last_j = max(call.seqlen_q, 1) - 1, max(call.seqlen_k, 1) - 1
            added = added[pairs.sequence.clamp(max=call.batch - 1), pairs.i.clamp(max=last_i), pairs.j.clamp(0, last_j)]
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes.to(dtype).expand(call.batch, call.heads)[:, head]
        slopes = slopes[pairs.sequence.clamp(max=call.batch - 1)] if call.packed else slopes[:, None, None]
        falling = -slopes * pairs.distance
        added = falling if added is None else added + falling
    return added


def _kept(call: FlashAttentionCall, pairs: _Pairs, head: int) -> Tensor:
    """Which weights of one head dropout keeps, [B, Sq, Sk] (packed: [1, Tq, Tk]): one word of 32 bits a pair."""
    assert call.seed is not None
    if call.packed:
        sequence = pairs.sequence.clamp(min=0)[None]
    else:
        sequence = torch.arange(call.batch, device=call.q.device)[:, None, None]
    head_of = torch.full_like(sequence, head)
    words = philox(call.seed, (pairs.j[None] // 4, pairs.i[None], head_of, sequence))
    # each word depends on all four numbers of its counter
    which = (pairs.j % 4).expand(words[0].shape)
    word = torch.stack(words, -1).gather(-1, which[..., None]).squeeze(-1)
    return word >= call.least_kept


def _head(call: FlashAttentionCall, pairs: _Pairs, head: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The result [B, Sq, Dv] and its logarithms [B, Sq] of one head, from q [B, Sq, D], k and v [B, Sk, …]."""
    scores = q @ k.mT * call.scale
    if call.softcap > 0:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    added = _added(call, pairs, head, scores.dtype)
    if added is not None:
        scores = scores + added
    hidden = ~pairs.visible
    scores = scores.masked_fill(hidden, float("-inf"))
    sink = None if call.sinks is None else call.sinks[head].to(scores.dtype)
    # one more, so that there is a largest where there are no keys
    least = scores.new_full((*scores.shape[:-1], 1), float("-inf"))
    if sink is not None:
        least = torch.zeros_like(least) + sink
    m_i = torch.cat((scores, least), dim=-1).amax(-1, keepdim=True).detach()
    m_i = m_i.masked_fill(m_i == float("-inf"), 0.0)
    weights = torch.exp(scores - m_i)
    l_i = weights.sum(-1, keepdim=True)
    if sink is not None:
        l_i = l_i + torch.exp(sink - m_i)
    nothing = l_i == 0
    share = weights / l_i.masked_fill(nothing, 1.0)
    if call.dropout:
        share = share * _kept(call, pairs, head) / (1.0 - call.dropout_p)
    # 0 · NaN is NaN: a product alone would let values through that are hidden
    finite = v.isfinite()
    result = share @ v.masked_fill(~finite, 0.0)
    spoiled = (~hidden).to(v.dtype) @ (~finite).to(v.dtype) > 0
    lse = (m_i + torch.log(l_i.masked_fill(nothing, 1.0))).masked_fill(nothing, float("-inf"))
    return result.masked_fill(spoiled, float("nan")), lse.squeeze(-1)


def reference(call: FlashAttentionCall) -> Tensor | tuple[Tensor, Tensor]:
    """Σⱼ pᵢⱼ vⱼ with pᵢⱼ = exp(sᵢⱼ) / (exp(sink) + Σⱼ exp(sᵢⱼ)) over the keys j that query i sees.

    sᵢⱼ = cap(scale · qᵢ · kⱼ) + biasᵢⱼ − slope · |i + Sk − Sq − j|. A key that is hidden takes no part, whatever it
    holds; a value that is seen and not finite makes its column NaN. In float32, in float64 for float64. 8-bit q, k and
    v are taken times their descales; weights are not rounded to 8 bits. With dropout each pᵢⱼ is 0 or 1 / (1 − p) of
    itself; the logarithms do not know it.
    """
    q = _descaled(call, call.q, call.q_descale, call.cu_seqlens_q)
    k = _descaled(call, call.k, call.k_descale, call.cu_seqlens_k)
    v = _descaled(call, call.v, call.v_descale, call.cu_seqlens_k)
    pairs = _pairs(call)
    heads = [
        _head(call, pairs, head, q[:, head], k[:, head // call.group], v[:, head // call.group])
        for head in range(call.heads)
    ]
    result = torch.stack([one for one, _ in heads], dim=1 if call.layout == "bhsd" else 2)
    lse = torch.stack([one for _, one in heads], dim=1)
    if call.packed:
        result, lse = result.squeeze(0), lse.squeeze(0)
    result = result.to(call.dtype).contiguous()
    return (result, lse.contiguous()) if call.return_lse else result
