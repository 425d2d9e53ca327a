"""The decompressed form of mla_prefill: keys and values of every head are made, and flash_attention runs over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wavecrest.dispatch.keys import row_bucket
from wavecrest.ops._flash_attention import flash_attention
from wavecrest.ops._mla_decode.call import MlaResult
from wavecrest.ops._mla_prefill.call import MlaPrefillCall
from wavecrest.ops._rope import rope

# bytes of keys and values up to which the decompressed form is the default
MOST_BYTES = 4 << 30


def pairs(seqlen_q: int, seqlen_k: int) -> int:
    """Pairs of a query and a key that it sees, where the queries are the last of the tokens."""
    seqlen_q = min(seqlen_q, seqlen_k)
    return seqlen_q * seqlen_k - seqlen_q * (seqlen_q - 1) // 2


def flops(
    seqlen_q: int, seqlen_k: int, latent_dim: int, head_dim_rope: int, head_dim_nope: int, head_dim_v: int
) -> tuple[int, int]:
    """(absorbed, decompressed) FLOPs of one head of one sequence.

    Absorbed, a pair of a query and a key takes 2 (2 R + Dr), and absorbing a query and expanding its result 2 R (Dn +
    Dv). Decompressed, a pair takes 2 (Dn + Dr + Dv), and expanding a key 2 R (Dn + Dv).
    """
    seen, expand = pairs(seqlen_q, seqlen_k), 2 * latent_dim * (head_dim_nope + head_dim_v)
    absorbed = 2 * seen * (2 * latent_dim + head_dim_rope) + seqlen_q * expand
    return absorbed, 2 * seen * (head_dim_nope + head_dim_rope + head_dim_v) + seqlen_k * expand


def expanded_bytes(call: MlaPrefillCall) -> int:
    """Bytes of the keys and values of all heads, for as many tokens as the cache has room for."""
    columns = call.head_dim_nope + call.head_dim_rope + call.head_dim_v
    # buckets, as the decision is kept for them
    tokens = row_bucket(call.batch) * row_bucket(call.max_seqlen_k)
    return tokens * call.heads * columns * call.q_nope.element_size()


def _packed_rows(call: MlaPrefillCall, starts: Tensor) -> Tensor:
    """The cached rows of all sequences behind one another, [B · S, R + Dr]; the rows after the last may be any."""
    place = torch.arange(call.batch * call.max_seqlen_k, device=starts.device, dtype=torch.int32)
    sequence = torch.searchsorted(starts, place, right=True).sub(1).clamp(0, call.batch - 1)
    # places after the last token are filled with the first row
    j = torch.where(place < starts[-1], place - starts[sequence], 0)
    if call.block_table is None:
        return call.latent_cache[sequence, j]
    page = torch.where(place < starts[-1], call.block_table[sequence, j // call.page_size], 0)
    return call.latent_cache[page, j % call.page_size]


def run_decompressed(call: MlaPrefillCall) -> MlaResult:
    """The result of `mla_prefill`; nothing of it waits for the device."""
    assert call.w_uk is not None and call.w_uv is not None
    device, (b, t, h) = call.q_nope.device, call.q_nope.shape[:3]
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    starts = torch.cat((zero, call.seq_lens.cumsum(0, dtype=torch.int32)))
    rows = _packed_rows(call, starts)
    latents, k_rope = rows[:, : call.latent_dim], rows[:, call.latent_dim :]
    k = torch.einsum("nr,hdr->nhd", latents, call.w_uk)
    k = torch.cat((k, k_rope[:, None].expand(-1, h, -1)), -1)
    v = torch.einsum("nr,hdr->nhd", latents, call.w_uv)
    q_rope = call.q_rope
    if call.cos is not None and call.sin is not None:
        places = call.positions
        if places is None:
            places = call.seq_lens[:, None] - t + torch.arange(t, device=device)
        q_rope = rope(q_rope, call.cos, call.sin, places, call.rope_style)
    q = torch.cat((call.q_nope, q_rope), -1).flatten(0, 1)
    result: Any = flash_attention(
        q, k, v, layout="thd", causal=True, softmax_scale=call.scale, softcap=call.logit_cap,
        cu_seqlens_q=torch.arange(0, (b + 1) * t, t, dtype=torch.int32, device=device), cu_seqlens_k=starts,
        max_seqlen_q=t, max_seqlen_k=call.max_seqlen_k, return_lse=call.return_lse,
    )  # fmt: skip
    if not call.return_lse:
        return result.view(call.shape)  # type: ignore[no-any-return]
    y, lse = result
    return y.view(call.shape), lse.view(h, b, t).transpose(0, 1).contiguous()
