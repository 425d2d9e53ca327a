"""The definition, dull: keys and values decompressed, all scores at once, everything widened, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

import wavecrest.ops.common.checks as _checks
from wavecrest.ops._mla_decode.call import Operands
from wavecrest.ops._rope import _reference as _rope


def rotated(given: Operands) -> Tensor:
    """The queries' rotary part, turned by the angles of their positions where tables are given."""
    if given.cos is None or given.sin is None:
        return given.q_rope
    places = given.positions
    if places is None:
        token = torch.arange(given.tokens, device=given.q_rope.device)
        places = given.seq_lens[:, None] - given.tokens + token
    return _rope(given.q_rope, given.cos, given.sin, places, given.rope_style)


def rows_of(given: Operands) -> Tensor:
    """What the cache holds for each sequence, [B, S, R + Dr], zeros beyond its keys."""
    cache = given.latent_cache
    if given.block_table is not None:
        place = torch.arange(given.capacity, device=cache.device)
        # the numbers of pages beyond a sequence's keys may be anything
        known = place[:: given.page] < given.seq_lens[:, None]
        cache = cache[given.block_table.where(known, 0).long()].flatten(1, 2)
    place = torch.arange(given.capacity, device=cache.device)
    return cache.masked_fill((place >= given.seq_lens[:, None])[..., None], 0.0)


def hidden(given: Operands) -> Tensor:
    """Whether query t of sequence b does not see key j, [B, T, S]."""
    token = torch.arange(given.tokens, device=given.seq_lens.device)
    own = given.seq_lens[:, None] - given.tokens + token
    return torch.arange(given.capacity, device=own.device) > own[..., None]


def weights_of(scores: Tensor, unseen: Tensor, given: Operands) -> tuple[Tensor, Tensor]:
    """(shares, logarithms of their denominators) of scores [..., S] without scale, 0 and −inf where nothing is seen."""
    scores = scores * given.scale
    if given.logit_cap > 0:
        scores = given.logit_cap * torch.tanh(scores / given.logit_cap)
    scores = scores.masked_fill(unseen, float("-inf"))
    # one more, so that there is a largest where there are no keys
    scores = torch.cat((scores, scores.new_full((*scores.shape[:-1], 1), float("-inf"))), dim=-1)
    nothing = scores.isneginf().all(-1, keepdim=True)
    share = torch.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)[..., :-1]
    return share, torch.logsumexp(scores, -1)


def _sequence(given: Operands, q_nope: Tensor, q_rope: Tensor, row: Tensor, unseen: Tensor) -> tuple[Tensor, Tensor]:
    """The result [T, H, …] and its logarithms [H, T] of one sequence with rows [S, R + Dr]."""
    latent, turned = row[:, : given.latent], row[:, given.latent :]
    # a latent is a key and a value of every head, or is expanded to them
    if given.w_uk is None:
        scores = torch.einsum("thr,sr->hts", q_nope, latent)
    else:
        k = torch.einsum("sr,hdr->shd", latent, _checks.widen(given.w_uk))
        scores = torch.einsum("thd,shd->hts", q_nope, k)
    scores = scores + torch.einsum("thd,sd->hts", q_rope, turned)
    share, lse = weights_of(scores, unseen, given)
    # 0 · NaN is NaN: a product alone would let values through that are hidden
    finite = latent.isfinite()
    kept = latent.masked_fill(~finite, 0.0)
    # a latent that is not finite spoils its column, and every column of a value that is made of it
    spoiled = ((~unseen).to(row.dtype) @ (~finite).to(row.dtype) > 0)[:, None]
    if given.w_uv is None:
        result = torch.einsum("hts,sr->thr", share, kept)
    else:
        v = torch.einsum("sr,hdr->shd", kept, _checks.widen(given.w_uv))
        result, spoiled = torch.einsum("hts,shd->thd", share, v), spoiled.any(-1, keepdim=True)
    return result.masked_fill(spoiled, float("nan")), lse


def reference(given: Operands) -> Tensor | tuple[Tensor, Tensor]:
    """Σⱼ pᵢⱼ vⱼ over the keys j that query i sees, pᵢⱼ the softmax of cap(scale · (q_nopeᵢ · kⱼ + q_ropeᵢ · k_ropeⱼ)).

    kⱼ = w_uk · cⱼ and vⱼ = w_uv · cⱼ, of each head, or the latent cⱼ itself where there is no such weight. In float32,
    in float64 for float64.
    """
    q_nope, q_rope, rows = (_checks.widen(one) for one in (given.q_nope, rotated(given), rows_of(given)))
    unseen = hidden(given)
    parts = [_sequence(given, q_nope[b], q_rope[b], rows[b], unseen[b]) for b in range(given.batch)]
    if not parts:
        result, lse = q_nope.new_empty(given.shape), q_nope.new_empty(given.lse_shape)
    else:
        result, lse = torch.stack([one for one, _ in parts]), torch.stack([one for _, one in parts])
    result = result.to(given.q_nope.dtype).contiguous()
    return (result, lse.contiguous()) if given.return_lse else result


def absorbed(given: Operands) -> Tensor | tuple[Tensor, Tensor]:
    """The same in the latent space: w_uk multiplied into the queries and w_uv into the result, the cache read as it is.

    Keys that a query does not see must be finite, as they are multiplied by 0.
    """
    q, q_rope, rows = (_checks.widen(one) for one in (given.q_nope, rotated(given), rows_of(given)))
    if given.w_uk is not None:
        q = torch.einsum("bthd,hdr->bthr", q, _checks.widen(given.w_uk))
    # where nothing is seen a position may be none, and NaN
    scores = torch.cat((q, q_rope), -1).flatten(1, 2) @ rows.mT
    unseen = hidden(given).repeat_interleave(given.heads, 1)
    share, lse = weights_of(scores, unseen, given)
    result = (share @ rows[..., : given.latent]).view(given.latent_shape)
    if given.w_uv is not None:
        result = torch.einsum("bthr,hdr->bthd", result, _checks.widen(given.w_uv))
    result = result.to(given.q_nope.dtype).contiguous()
    lse = lse.view(given.batch, given.tokens, given.heads).transpose(1, 2)
    return (result, lse.contiguous()) if given.return_lse else result
