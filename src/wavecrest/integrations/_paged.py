"""Attention of a batch of requests over a paged cache, for servers that mix decoding and prompts in one batch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import Tensor

from wavecrest import ops

# most queries of a request that flash_decoding takes
MOST_QUERIES = 16


@dataclass(frozen=True, slots=True)
class Prompts:
    """The requests behind the decoding ones: chunks of prompts, of any lengths.

    Attributes:
        cu_q, cu_k: int32 [requests + 1], where each one's queries and keys begin.
        longest_q, longest_k: the most queries and keys of one.
        pages, places: int64 [keys], the page of each key and its place there.
        alone: no request has keys of earlier batches, so that the keys of the batch are all there are.
    """

    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int
    pages: Tensor
    places: Tensor
    alone: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """The part that all layers share: the first `decodes` requests have `queries` queries each, then come the prompts.

    `seq_lens` int32 [requests], `block_table` int32 [requests, pages] and `slots` int64 [tokens], the place in the
    cache that a token's key is written to, counted over all pages. `tokens`: queries of all requests.
    """

    decodes: int
    queries: int
    tokens: int
    seq_lens: Tensor
    block_table: Tensor
    slots: Tensor
    prompts: Prompts | None

    @classmethod
    def of(
        cls,
        starts: Tensor,
        lengths: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slots: Tensor,
        page: int,
    ) -> Batch:
        """The batch of requests whose queries lie behind one another.

        Args:
            starts: int32 [requests + 1] on the host, where each request's queries begin.
            lengths: int32 [requests] on the host, keys of each request or more, at least its queries; read for prompts.
            seq_lens: int32 [requests] on the device, keys of each request.
            block_table: int32 [requests, pages] on the device.
            slots: int64 [tokens] on the device.
            page: tokens of a page.
        """
        begins: list[int] = starts.tolist()
        counts = [stop - begin for begin, stop in pairwise(begins)]
        queries = counts[0] if counts and 1 <= counts[0] <= MOST_QUERIES else 0
        decodes = len([*takewhile(lambda count: count == queries, counts)]) if queries else 0
        rest = counts[decodes:]
        prompts = None
        if sum(rest):
            prompts = _prompts(rest, lengths.tolist()[decodes:], seq_lens[decodes:], block_table[decodes:], page)
        return cls(decodes, max(queries, 1), begins[-1], seq_lens, block_table, slots, prompts)


def _prompts(queries: list[int], most: list[int], seq_lens: Tensor, table: Tensor, page: int) -> Prompts:
    """`most`: keys of each request on the host, at least; the device's lengths decide."""
    device = table.device
    asked = torch.tensor(queries).to(device, non_blocking=True)
    cu_q, cu_k = (
        torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        # requests without a query have no key to look at
        for counts in (asked, torch.where(asked > 0, seq_lens, 0))
    )
    numbers = torch.arange(sum(most), device=device)
    # keys behind the last request's are of no request, and nobody reads them
    rows = torch.searchsorted(cu_k[1:], numbers, right=True).clamp_(max=len(queries) - 1)
    positions = numbers - cu_k[rows]
    pages = table[rows, (positions // page).clamp_(max=table.shape[1] - 1)].long()
    return Prompts(cu_q, cu_k, max(queries), max(most), pages, positions % page, alone=most == queries)


def attend(
    batch: Batch,
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    softmax_scale: float,
    window: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write the batch's keys and values into the cache, and attend causally over the requests' keys.

    Decoding requests take one call of `flash_decoding`, which writes and attends. Prompts take `flash_attention` over
    their keys, which are gathered from the pages where a request has some from earlier batches.

    Args:
        batch: of `Batch.of`.
        q: [tokens, Hq, D].
        new: keys [tokens, Hk, D] and values [tokens, Hk, Dv], to be written; None: they are in the cache.
        k_cache, v_cache: [pages, page, Hk, D] and [pages, page, Hk, Dv] in q's dtype, changed.
        softmax_scale, softcap, alibi_slopes, sinks: as for `flash_decoding`.
        window: keys before its own that a query sees; −1: all.

    Returns:
        [tokens, Hq, Dv].
    """
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale, "softcap": softcap, "alibi_slopes": alibi_slopes, "sinks": sinks,
    }  # fmt: skip
    first, parts = batch.decodes * batch.queries, []
    if batch.decodes:
        shape = (batch.decodes, batch.queries)
        k, v = (None, None) if new is None else (one[:first].view(*shape, *one.shape[1:]) for one in new)
        parts.append(
            ops.flash_decoding(
                q[:first].view(*shape, *q.shape[1:]), k_cache, v_cache, seq_lens=batch.seq_lens[: batch.decodes],
                block_table=batch.block_table[: batch.decodes], window=window, k=k, v=v, **options,
            )
        )  # fmt: skip
    if batch.prompts is not None:
        rest = None if new is None else (new[0][first : batch.tokens], new[1][first : batch.tokens])
        if rest is not None:
            slots, page = batch.slots[first : batch.tokens], k_cache.shape[1]
            where = (slots // page, slots % page)
            k_cache[where], v_cache[where] = rest
        parts.append(_prompted(batch.prompts, q[first : batch.tokens], rest, k_cache, v_cache, window, options))
    flat = [one.reshape(-1, *one.shape[-2:]) for one in parts if isinstance(one, Tensor)]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _prompted(
    prompts: Prompts,
    q: Tensor,
    new: tuple[Tensor, Tensor] | None,
    k_cache: Tensor,
    v_cache: Tensor,
    window: int,
    options: dict[str, Any],
) -> Any:
    if new is not None and prompts.alone:
        k, v = new
    else:
        k, v = (cache[prompts.pages, prompts.places] for cache in (k_cache, v_cache))
    return ops.flash_attention(
        q, k, v, layout="thd", causal=True, window=(window, 0 if window >= 0 else -1), cu_seqlens_q=prompts.cu_q,
        cu_seqlens_k=prompts.cu_k, max_seqlen_q=prompts.longest_q, max_seqlen_k=prompts.longest_k, **options,
    )  # fmt: skip
