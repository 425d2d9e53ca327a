"""The definition of decoding, dull: all scores of a cache at once, everything widened, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.ops._flash_decoding.call import FOUR_BITS, Operands
from wavecrest.ops._flash_decoding.launch_append import appended
from wavecrest.ops._flash_decoding.quantized import dequantize


def stored(given: Operands, cache: Tensor, scale: Tensor | None, shift: Tensor | None, wide: torch.dtype) -> Tensor:
    """What a cache holds, [B, S, Hk, D], its pages in order, its codes times their scales."""

    def in_order(stored: Tensor) -> Tensor:
        return stored if given.block_table is None else stored[given.block_table.long()].flatten(1, 2)

    if cache.dtype == FOUR_BITS and scale is not None and shift is not None:
        return dequantize(in_order(cache), in_order(scale), in_order(shift), wide)
    rows = in_order(cache).to(wide)
    if scale is None:
        return rows
    return rows * (in_order(scale) if scale.ndim == 4 else scale.reshape(-1, 1)).to(wide)


def _cached(given: Operands, cache: Tensor, scale: Tensor | None, shift: Tensor | None, wide: torch.dtype) -> Tensor:
    """What a cache holds for each query head, [B, Hq, S, D], zeros for keys that are no query's."""
    rows = stored(given, cache, scale, shift, wide)
    place = torch.arange(given.capacity, device=rows.device)
    taking_part = place < given.seq_lens[:, None]
    if given.seq_starts is not None:
        taking_part = taking_part & (place >= given.seq_starts[:, None])
    rows = rows.where(taking_part[..., None, None], 0.0)
    return rows.transpose(1, 2).repeat_interleave(given.group, dim=1)


def reference(given: Operands) -> Tensor | tuple[Tensor, Tensor]:
    """Σⱼ pᵢⱼ vⱼ of the queries i over the cached keys j that they see, as in `flash_attention` with `causal`."""
    if given.prepares:
        given = appended(given)
    wide = torch.float64 if given.q.dtype == torch.float64 else torch.float32
    k = _cached(given, given.k_cache, given.k_scale, given.k_shift, wide)
    v = _cached(given, given.v_cache, given.v_scale, given.v_shift, wide)
    scores = given.q.transpose(1, 2).to(wide) @ k.mT * given.scale
    if given.softcap > 0:
        scores = given.softcap * torch.tanh(scores / given.softcap)
    # each query's place among the keys, [B, 1, T, 1]
    token = torch.arange(given.tokens, device=k.device)
    own = (given.seq_lens[:, None] - given.tokens + token)[:, None, :, None]
    j = torch.arange(given.capacity, device=k.device)
    hidden = j > own
    if given.window >= 0:
        hidden = hidden | (j < own - given.window)
    if given.seq_starts is not None:
        hidden = hidden | (j < given.seq_starts[:, None, None, None])
    if given.alibi_slopes is not None:
        slopes = given.alibi_slopes.to(wide).expand(given.batch, given.heads)
        scores = scores - slopes[..., None, None] * (own - j).abs()
    scores = scores.masked_fill(hidden, float("-inf"))
    if given.sinks is not None:
        sink = given.sinks.to(wide)[:, None, None].expand(given.batch, given.heads, given.tokens, 1)
    else:
        # one more, so that there is a largest where there are no keys
        sink = scores.new_full((given.batch, given.heads, given.tokens, 1), float("-inf"))
    scores = torch.cat((scores, sink), dim=-1)
    # a query that sees nothing has 0, not 0 / 0
    nothing = scores.isneginf().all(-1, keepdim=True)
    share = torch.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)[..., :-1]
    y = (share @ v).transpose(1, 2).to(given.q.dtype).contiguous()
    return (y, torch.logsumexp(scores, -1)) if given.return_lse else y
