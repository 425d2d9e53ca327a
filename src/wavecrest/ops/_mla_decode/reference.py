"""The definition of attention over a latent cache: keys and values of all heads, then a softmax of all scores."""

from __future__ import annotations

import torch
from torch import Tensor

import wavecrest.ops.common.checks as _checks
from wavecrest.ops._mla_decode.call import MlaDecodeCall, MlaResult
from wavecrest.ops._rope.call import RopeCall
from wavecrest.ops._rope.reference import reference as rope_reference


def rotated(call: MlaDecodeCall) -> Tensor:
    """The queries' rotary part, rotated by the angles of their positions where tables are given."""
    if call.cos is None or call.sin is None:
        return call.q_rope
    positions = call.positions
    if positions is None:
        tokens = torch.arange(call.q_rope.shape[1], device=call.q_rope.device)
        positions = call.seq_lens[:, None] - call.q_rope.shape[1] + tokens
    return rope_reference(RopeCall(call.q_rope, call.cos, call.sin, positions, call.rope_style))


def rows_of(call: MlaDecodeCall) -> Tensor:
    """The cached rows of each sequence, [B, S, R + Dr], zeros beyond its keys."""
    cache, table, seq_lens = call.latent_cache, call.block_table, call.seq_lens[:, None]
    page_size = cache.shape[1]
    if table is not None:
        # entries for pages beyond a sequence's keys may be anything
        known = torch.arange(table.shape[1], device=cache.device) * page_size < seq_lens
        cache = cache[table.where(known, 0).long()].flatten(1, 2)
    position = torch.arange(cache.shape[1], device=cache.device)
    return cache.masked_fill((position >= seq_lens)[..., None], 0.0)


def hidden(seq_lens: Tensor, seqlen_q: int, max_seqlen_k: int) -> Tensor:
    """True where query t of sequence b does not see key j, [B, T, S]."""
    own = seq_lens[:, None] - seqlen_q + torch.arange(seqlen_q, device=seq_lens.device)
    return torch.arange(max_seqlen_k, device=own.device) > own[..., None]


def softmax_of(scores: Tensor, unseen: Tensor, scale: float, logit_cap: float) -> tuple[Tensor, Tensor]:
    """Softmax and log-sum-exp of unscaled scores [..., S]; 0 and −inf for a query that sees nothing."""
    scores = scores * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    scores = scores.masked_fill(unseen, float("-inf"))
    # one score more, so that there is a largest where there are no keys
    scores = torch.cat((scores, scores.new_full((*scores.shape[:-1], 1), float("-inf"))), dim=-1)
    nothing = scores.isneginf().all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)[..., :-1]
    return weights, torch.logsumexp(scores, -1)


def _sequence(
    call: MlaDecodeCall, q_nope: Tensor, q_rope: Tensor, row: Tensor, unseen: Tensor
) -> tuple[Tensor, Tensor]:
    """The result [T, H, …] and the log-sum-exp [H, T] of one sequence with rows [S, R + Dr]."""
    latent, k_rope = row[:, : call.latent_dim], row[:, call.latent_dim :]
    # a latent is a key and a value of every head, or is expanded to them
    if call.w_uk is None:
        scores = torch.einsum("thr,sr->hts", q_nope, latent)
    else:
        k = torch.einsum("sr,hdr->shd", latent, _checks.widen(call.w_uk))
        scores = torch.einsum("thd,shd->hts", q_nope, k)
    scores = scores + torch.einsum("thd,sd->hts", q_rope, k_rope)
    weights, lse = softmax_of(scores, unseen, call.scale, call.logit_cap)
    # 0 · NaN is NaN: a plain GEMM would let hidden values through
    finite = latent.isfinite()
    kept = latent.masked_fill(~finite, 0.0)
    # a latent that is not finite makes its column NaN, and every column of a value that is made of it
    not_finite = ((~unseen).to(row.dtype) @ (~finite).to(row.dtype) > 0)[:, None]
    if call.w_uv is None:
        result = torch.einsum("hts,sr->thr", weights, kept)
    else:
        v = torch.einsum("sr,hdr->shd", kept, _checks.widen(call.w_uv))
        result, not_finite = torch.einsum("hts,shd->thd", weights, v), not_finite.any(-1, keepdim=True)
    return result.masked_fill(not_finite, float("nan")), lse


def reference(call: MlaDecodeCall) -> MlaResult:
    """Σⱼ pᵢⱼ vⱼ over the keys j that query i sees, pᵢⱼ the softmax of cap(scale · (q_nopeᵢ · kⱼ + q_ropeᵢ · k_ropeⱼ)).

    kⱼ = w_uk · cⱼ and vⱼ = w_uv · cⱼ for each head, or the latent cⱼ itself where there is no such weight. In float32
    (float64 for float64), rounded once.
    """
    q_nope, q_rope, rows = (_checks.widen(one) for one in (call.q_nope, rotated(call), rows_of(call)))
    unseen = hidden(call.seq_lens, call.seqlen_q, call.max_seqlen_k)
    parts = [_sequence(call, q_nope[b], q_rope[b], rows[b], unseen[b]) for b in range(call.batch)]
    if not parts:
        result, lse = q_nope.new_empty(call.shape), q_nope.new_empty(call.lse_shape)
    else:
        result, lse = torch.stack([one for one, _ in parts]), torch.stack([one for _, one in parts])
    result = result.to(call.q_nope.dtype).contiguous()
    return (result, lse.contiguous()) if call.return_lse else result
