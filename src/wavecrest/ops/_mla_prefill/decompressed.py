"""The decompressed form: keys and values of every head made from the latents, and ordinary attention over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wavecrest.dispatch.keys import row_bucket
from wavecrest.ops._flash_attention import flash_attention
from wavecrest.ops._mla_decode.call import Operands
from wavecrest.ops._rope import rope

# of keys and values: beyond it memory is better spent otherwise
MOST_BYTES = 4 << 30


def pairs(tokens: int, keys: int) -> int:
    """Pairs of a query and a key that it sees, where T queries are the last of S tokens."""
    tokens = min(tokens, keys)
    return tokens * keys - tokens * (tokens - 1) // 2


def flops(tokens: int, keys: int, latent: int, rotary: int, nope: int, values: int) -> tuple[int, int]:
    """(absorbed, decompressed) FLOPs of one head of one sequence.

    A pair of a query and a key takes 2 (2 R + Dr) in the latent space and 2 (Dn + Dr + Dv) outside of it; there every
    key is expanded first, here every query is absorbed and its result expanded, 2 R (Dn + Dv) each.
    """
    seen, expand = pairs(tokens, keys), 2 * latent * (nope + values)
    absorbed = 2 * seen * (2 * latent + rotary) + tokens * expand
    return absorbed, 2 * seen * (nope + rotary + values) + keys * expand


def expanded_bytes(given: Operands) -> int:
    """Bytes of the keys and values of all heads, for as many tokens as the cache has room for."""
    columns = given.nope + given.rotary + given.values
    # buckets, as the decision is kept for them
    tokens = row_bucket(given.batch) * row_bucket(given.capacity)
    return tokens * given.heads * columns * given.q_nope.element_size()


def _packed_rows(given: Operands, starts: Tensor) -> Tensor:
    """The cached rows of all sequences behind one another, [B · S, R + Dr]; after the last of them, any."""
    place = torch.arange(given.batch * given.capacity, device=starts.device, dtype=torch.int32)
    sequence = torch.searchsorted(starts, place, right=True).sub(1).clamp(0, given.batch - 1)
    # those after the last are of none: the first row stands for them
    j = torch.where(place < starts[-1], place - starts[sequence], 0)
    if given.block_table is None:
        return given.latent_cache[sequence, j]
    page = torch.where(place < starts[-1], given.block_table[sequence, j // given.page], 0)
    return given.latent_cache[page, j % given.page]


def run(given: Operands) -> Tensor | tuple[Tensor, Tensor]:
    """What `mla_prefill` computes; nothing of it waits for the device."""
    assert given.w_uk is not None and given.w_uv is not None
    device, (b, t, h) = given.q_nope.device, given.q_nope.shape[:3]
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    starts = torch.cat((zero, given.seq_lens.cumsum(0, dtype=torch.int32)))
    rows = _packed_rows(given, starts)
    latents, turned = rows[:, : given.latent], rows[:, given.latent :]
    k = torch.einsum("nr,hdr->nhd", latents, given.w_uk)
    k = torch.cat((k, turned[:, None].expand(-1, h, -1)), -1)
    v = torch.einsum("nr,hdr->nhd", latents, given.w_uv)
    q_rope = given.q_rope
    if given.cos is not None and given.sin is not None:
        places = given.positions
        if places is None:
            places = given.seq_lens[:, None] - t + torch.arange(t, device=device)
        q_rope = rope(q_rope, given.cos, given.sin, places, given.rope_style)
    q = torch.cat((given.q_nope, q_rope), -1).flatten(0, 1)
    result: Any = flash_attention(
        q, k, v, layout="thd", causal=True, softmax_scale=given.scale, softcap=given.logit_cap,
        cu_seqlens_q=torch.arange(0, (b + 1) * t, t, dtype=torch.int32, device=device), cu_seqlens_k=starts,
        max_seqlen_q=t, max_seqlen_k=given.capacity, return_lse=given.return_lse,
    )  # fmt: skip
    if not given.return_lse:
        return result.view(given.shape)  # type: ignore[no-any-return]
    y, lse = result
    return y.view(given.shape), lse.view(h, b, t).transpose(0, 1).contiguous()
