"""Batches of requests over a paged cache, and attention of each request in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Requests:
    """Requests with `context` keys in the cache and `queries` tokens in the batch; pages lie in a shuffled order."""

    context: list[int]
    queries: list[int]
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        totals = [past + new for past, new in zip(self.context, self.queries, strict=True)]
        widest = max(-(-total // self.page) for total in totals)
        count = len(totals) * widest
        order = torch.randperm(count + 3, generator=generator)[:count].int()
        self.block_table = order.reshape(len(totals), widest)
        # [pages, page, heads, keys beside values], written where tokens are; NaN elsewhere, which nobody may read
        self.cache = torch.full((count + 3, self.page, self.kv_heads, 2 * self.head_dim), math.nan, dtype=self.dtype)
        shape = (sum(self.queries), self.heads + 2 * self.kv_heads, self.head_dim)
        both = torch.randn(*shape, generator=generator).to(self.dtype)
        self.q, self.k, self.v = both.split([self.heads, self.kv_heads, self.kv_heads], 1)
        self.seq_lens = torch.tensor(totals, dtype=torch.int32)
        self.starts = torch.tensor([0, *self.queries]).cumsum(0).int()
        slots, self.keys = [], []
        for row, (past, new) in enumerate(zip(self.context, self.queries, strict=True)):
            places = torch.arange(past + new)
            where = self.block_table[row, places // self.page].long() * self.page + places % self.page
            old = torch.randn(past, self.kv_heads, 2 * self.head_dim, generator=generator).to(self.dtype)
            self.cache.view(-1, self.kv_heads, 2 * self.head_dim)[where[:past]] = old
            begin = int(self.starts[row])
            fresh = torch.cat([self.k[begin : begin + new], self.v[begin : begin + new]], -1)
            self.keys.append(torch.cat([old, fresh]).double())
            slots.append(where[past:])
        self.slots = torch.cat(slots)

    def attended(
        self, window: int = -1, softcap: float = 0.0, slopes: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """The answers [tokens, heads, head_dim] in float64."""
        answers = []
        for row, (past, new) in enumerate(zip(self.context, self.queries, strict=True)):
            begin = int(self.starts[row])
            k, v = self.keys[row].repeat_interleave(self.heads // self.kv_heads, 1).chunk(2, -1)
            q = self.q[begin : begin + new].double()
            scores = torch.einsum("qhd,khd->hqk", q, k) * self.head_dim**-0.5
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            behind = (past + torch.arange(new))[:, None] - torch.arange(past + new)[None, :]
            if slopes is not None:
                scores = scores - slopes.double()[:, None, None] * behind.abs()
            hidden = (behind < 0) | ((behind > window) if window >= 0 else torch.zeros_like(behind, dtype=torch.bool))
            scores = scores.masked_fill(hidden, -math.inf)
            if sinks is not None:
                further = sinks.double()[:, None, None].expand(-1, new, 1)
                weights = torch.cat([scores, further], -1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            answers.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(answers)

    def written(self) -> Tensor:
        """The cache's keys beside values of all requests, in order, [tokens, heads, 2 · head_dim]."""
        flat = self.cache.view(-1, self.kv_heads, 2 * self.head_dim)
        found = []
        for row, total in enumerate(self.seq_lens.tolist()):
            places = torch.arange(total)
            found.append(flat[self.block_table[row, places // self.page].long() * self.page + places % self.page])
        return torch.cat(found)


BATCHES = {
    "decode": ([5, 0, 31, 16], [1, 1, 1, 1]),
    "speculative": ([5, 9, 31], [3, 3, 3]),
    "prompts": ([0, 0, 0], [7, 40, 17]),
    "chunked": ([32, 5, 0], [20, 33, 18]),
    "mixed": ([12, 3, 0, 15, 8], [1, 1, 19, 6, 30]),
    # as graphs pad a batch: requests without a query
    "padded": ([12, 3, 0], [1, 1, 0]),
}
