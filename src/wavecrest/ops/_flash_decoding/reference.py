"""The definition of decoding, dull: new keys and values are written first, then all scores made at once, widened."""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.ops._flash_decoding.call import FOUR_BITS, FlashDecodingCall
from wavecrest.ops._rope.call import RopeCall
from wavecrest.ops._rope.reference import reference as _rope
from wavecrest.ops.common.checks import widen
from wavecrest.ops.packed.cache import dequantize, quantize_cache, quantize_cache_8bit, round_to

# integers as wide as an element of a cache: what is moved keeps its bits, and PyTorch has no `where` of 8-bit floats
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def seen_by_any(call: FlashDecodingCall) -> Tensor:
    """bool [B, S]: the keys that take part, between the first that the first query sees and the last of a sequence."""
    place = torch.arange(call.capacity, device=call.seq_lens.device)
    length = call.seq_lens.long()[:, None]
    seen = place < length
    if call.window >= 0:
        seen = seen & (place >= length - call.seqlen_q - call.window)
    return seen if call.seq_starts is None else seen & (place >= call.seq_starts[:, None])


def stored(
    call: FlashDecodingCall, cache: Tensor, scale: Tensor | None, shift: Tensor | None, wide: torch.dtype
) -> Tensor:
    """The values of a cache, [B, S, Hk, D]: pages in order, quantized values times their scales.

    Another page stands for one that has no key which any query sees: its entry may be anything.
    """
    table = call.block_table
    if table is not None:
        table = table.long().where(seen_by_any(call).view(*table.shape, call.page).any(-1), 0)

    def in_order(stored: Tensor) -> Tensor:
        return stored if table is None else stored[table].flatten(1, 2)

    if cache.dtype == FOUR_BITS and scale is not None and shift is not None:
        return dequantize(in_order(cache), in_order(scale), in_order(shift), wide)
    rows = in_order(cache).to(wide)
    if scale is None:
        return rows
    return rows * (in_order(scale) if scale.ndim == 4 else scale.reshape(-1, 1)).to(wide)


def _cached(
    call: FlashDecodingCall, cache: Tensor, scale: Tensor | None, shift: Tensor | None, wide: torch.dtype
) -> Tensor:
    """The values of a cache for each query head, [B, Hq, S, D], 0 for keys that no query sees."""
    rows = stored(call, cache, scale, shift, wide).where(seen_by_any(call)[..., None, None], 0.0)
    return rows.transpose(1, 2).repeat_interleave(call.group, dim=1)


def reference(call: FlashDecodingCall) -> Tensor | tuple[Tensor, Tensor]:
    """Σⱼ pᵢⱼ vⱼ of the queries i over the cached keys j that they see, as in `flash_attention` with `causal`."""
    if call.prepares:
        call = appended(call)
    wide = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    k = _cached(call, call.k_cache, call.k_scale, call.k_shift, wide)
    v = _cached(call, call.v_cache, call.v_scale, call.v_shift, wide)
    scores = call.q.transpose(1, 2).to(wide) @ k.mT * call.scale
    if call.softcap > 0:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    # each query's place among the keys, [B, 1, T, 1]
    token = torch.arange(call.seqlen_q, device=k.device)
    own = (call.seq_lens[:, None] - call.seqlen_q + token)[:, None, :, None]
    j = torch.arange(call.capacity, device=k.device)
    hidden = j > own
    if call.window >= 0:
        hidden = hidden | (j < own - call.window)
    if call.seq_starts is not None:
        hidden = hidden | (j < call.seq_starts[:, None, None, None])
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes.to(wide).expand(call.batch, call.heads)
        scores = scores - slopes[..., None, None] * (own - j).abs()
    scores = scores.masked_fill(hidden, float("-inf"))
    if call.sinks is not None:
        sink = call.sinks.to(wide)[:, None, None].expand(call.batch, call.heads, call.seqlen_q, 1)
    else:
        # one more, so that there is a largest where there are no keys
        sink = scores.new_full((call.batch, call.heads, call.seqlen_q, 1), float("-inf"))
    scores = torch.cat((scores, sink), dim=-1)
    # a query that sees nothing has 0, not 0 / 0
    nothing = scores.isneginf().all(-1, keepdim=True)
    share = torch.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)[..., :-1]
    y = (share @ v).transpose(1, 2).to(call.q.dtype).contiguous()
    return (y, torch.logsumexp(scores, -1)) if call.return_lse else y


def appended(call: FlashDecodingCall) -> FlashDecodingCall:
    """The same call with q rotated and without k and v, which are rotated, rounded and written to the caches here."""
    q, k, v = call.q, call.k, call.v
    token = torch.arange(call.seqlen_q, device=q.device)
    places = call.new_lens[:, None] - (0 if call.advance else call.seqlen_q) + token
    if call.cos is not None and call.sin is not None:
        q = _rope(RopeCall(q, call.cos, call.sin, places, call.rotary_style))
        k = None if k is None else _rope(RopeCall(k, call.cos, call.sin, places, call.rotary_style))
    if k is not None and v is not None and call.batch * call.capacity > 0:
        owners = _owners(call, places)
        _write(call, owners, k, call.k_cache, call.k_scale, call.k_shift)
        _write(call, owners, v, call.v_cache, call.v_scale, call.v_shift)
    if call.advance and call.append_lens is not None and call.batch > 0:
        # one number for all sequences counts once
        lens = call.append_lens if call.append_lens.stride(0) else call.append_lens[:1]
        lens.add_(call.seqlen_q)
    return call._replace(q=q, k=None, v=None, cos=None, sin=None, append_lens=None, advance=False)


def _owners(call: FlashDecodingCall, places: Tensor) -> Tensor:
    """The new token of the batch that each place of the caches gets, int64 [pages, page]; −1: the place is kept."""
    inside = (places >= 0) & (places < call.capacity)
    place = places.clamp(0, call.capacity - 1).long()
    page = torch.arange(call.batch, device=place.device)[:, None]
    if call.block_table is not None:
        page = call.block_table.long().gather(1, place // call.page)
    slots = call.k_cache.shape[0] * call.page
    # tokens without a place meet behind the last
    slot = (page * call.page + place % call.page).where(inside, slots).flatten()
    owners = torch.full((slots + 1,), -1, dtype=torch.int64, device=slot.device)
    owners = owners.scatter(0, slot, torch.arange(slot.numel(), device=slot.device))
    return owners[:slots].view(-1, call.page)


def _write(
    call: FlashDecodingCall, owners: Tensor, x: Tensor, cache: Tensor, scale: Tensor | None, shift: Tensor | None
) -> None:
    if scale is None:
        _place(cache, x.to(cache.dtype), owners)
    elif shift is not None:
        quantized, scales, shifts = quantize_cache(x, call.groups, dtype=scale.dtype)
        _place(cache, quantized, owners)
        _place(scale, scales, owners)
        _place(shift, shifts, owners)
    elif call.by_token:
        quantized, scales = quantize_cache_8bit(x, cache.dtype, dtype=scale.dtype)
        _place(cache, quantized, owners)
        _place(scale, scales, owners)
    else:
        wide = widen(x)
        _place(cache, round_to(wide / scale.reshape(-1, 1).to(wide.dtype), cache.dtype), owners)


def _place(cache: Tensor, rows: Tensor, owners: Tensor) -> None:
    """Write rows [B, T, H, D] to the places of a cache that they own; other places keep their bits."""
    width = _SAME_WIDTH[cache.element_size()]
    kept, new = cache.view(width), rows.flatten(0, 1).view(width)
    kept.copy_(new[owners.clamp(min=0)].where((owners >= 0)[..., None, None], kept))
