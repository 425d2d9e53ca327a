"""The definition of what a call with new keys and values does before attention: turn them, round them, write them."""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.ops._flash_decoding.call import Operands
from wavecrest.ops._flash_decoding.quantized import quantize_cache
from wavecrest.ops._rope.call import RopeCall
from wavecrest.ops._rope.reference import reference as _rope
from wavecrest.ops.common.quantized import LARGEST

# integers as wide as an element of a cache: what is moved keeps its bits, and PyTorch has no `where` of 8-bit floats
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def appended(given: Operands) -> Operands:
    """The same call with q turned and, once its keys and values are in the caches, without them."""
    q, k, v = given.q, given.k, given.v
    token = torch.arange(given.tokens, device=q.device)
    places = given.seq_lens[:, None] - given.tokens + token
    if given.cos is not None and given.sin is not None:
        q = _rope(RopeCall(q, given.cos, given.sin, places, given.rotary_style))
        k = None if k is None else _rope(RopeCall(k, given.cos, given.sin, places, given.rotary_style))
    if k is not None and v is not None and given.batch * given.capacity > 0:
        owners = _owners(given, places)
        _write(given, owners, k, given.k_cache, given.k_scale, given.k_shift)
        _write(given, owners, v, given.v_cache, given.v_scale, given.v_shift)
    return given._replace(q=q, k=None, v=None, cos=None, sin=None)


def _owners(given: Operands, places: Tensor) -> Tensor:
    """Which new token of the batch each place of the caches gets, int64 [pages, page]; −1: it is kept."""
    inside = (places >= 0) & (places < given.capacity)
    place = places.clamp(0, given.capacity - 1).long()
    page = torch.arange(given.batch, device=place.device)[:, None]
    if given.block_table is not None:
        page = given.block_table.long().gather(1, place // given.page)
    slots = given.k_cache.shape[0] * given.page
    # tokens without a place meet behind the last
    slot = (page * given.page + place % given.page).where(inside, slots).flatten()
    owners = torch.full((slots + 1,), -1, dtype=torch.int64, device=slot.device)
    owners = owners.scatter(0, slot, torch.arange(slot.numel(), device=slot.device))
    return owners[:slots].view(-1, given.page)


def _write(
    given: Operands, owners: Tensor, x: Tensor, cache: Tensor, scale: Tensor | None, shift: Tensor | None
) -> None:
    if scale is None:
        _place(cache, x.to(cache.dtype), owners)
    elif shift is not None:
        codes, scales, shifts = quantize_cache(x, given.groups, dtype=scale.dtype)
        _place(cache, codes, owners)
        _place(scale, scales, owners)
        _place(shift, shifts, owners)
    elif given.by_token:
        wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        scales = (wide.abs().amax(-1, keepdim=True) / LARGEST[cache.dtype]).to(scale.dtype)
        _place(cache, _eight_bits(wide / scales.to(wide.dtype).where(scales != 0, 1.0), cache.dtype), owners)
        _place(scale, scales, owners)
    else:
        wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        _place(cache, _eight_bits(wide / scale.reshape(-1, 1).to(wide.dtype), cache.dtype), owners)


def _eight_bits(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to nearest even within the type; NaN stays one, and is 0 in int8."""
    scaled = scaled.clamp(-LARGEST[dtype], LARGEST[dtype])
    if dtype == torch.int8:
        scaled = scaled.round().nan_to_num(0.0)
    return scaled.float().to(dtype)


def _place(cache: Tensor, rows: Tensor, owners: Tensor) -> None:
    """Write rows [B, T, H, columns] to the places of a cache that they own; the rest keeps its bits."""
    width = _SAME_WIDTH[cache.element_size()]
    kept, new = cache.view(width), rows.flatten(0, 1).view(width)
    kept.copy_(new[owners.clamp(min=0)].where((owners >= 0)[..., None, None], kept))
