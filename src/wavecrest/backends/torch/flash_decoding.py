"""Decoding attention by PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wavecrest.backends.torch.common import PRIORITY
from wavecrest.backends.torch.flash_attention import fitting, needs_copy
from wavecrest.ops._flash_decoding.backend import op as _op
from wavecrest.ops._flash_decoding.call import FlashDecodingCall
from wavecrest.ops._flash_decoding.reference import appended


def _refuse(call: FlashDecodingCall) -> str | None:
    if call.block_table is not None or call.k_scale is not None:
        return "would copy a cache of pages, 8 or 4 bits on every call"
    for name, asked in (
        ("softcap", call.softcap > 0),
        ("sinks", call.sinks is not None),
        ("ALiBi slopes in float32", call.alibi_slopes is not None),
        ("logarithms to return", call.return_lse),
    ):
        if asked:
            return f"has no {name}"
    return None


def bind(call: FlashDecodingCall) -> Callable[[FlashDecodingCall], Tensor]:
    """The function that calls scaled_dot_product_attention for calls with the signature of this one.

    Fixed here: scale, shared heads, window, sizes, and whether keys are written first. The mask depends on the lengths,
    and is made by each call.
    """
    options: dict[str, Any] = {"scale": call.scale} | ({"enable_gqa": True} if call.group > 1 else {})
    # SDPA's memory-efficient kernel refuses strides that are no multiples of 16 bytes (H200, 2026-11-24, torch 2.11)
    copies, on_gpu = tuple([needs_copy(one) for one in (call.q, call.k_cache, call.v_cache)]), call.q.is_cuda
    unit = 16 // call.q.element_size()
    prepares, window, seqlen_q, capacity, device = call.prepares, call.window, call.seqlen_q, call.page, call.q.device

    def run(call: FlashDecodingCall) -> Tensor:
        if prepares:
            call = appended(call)
        tensors = (call.q, call.k_cache, call.v_cache)
        q, k, v = (one.transpose(1, 2) for one in (fitting(copies, unit, *tensors) if on_gpu else tensors))
        token = torch.arange(seqlen_q, device=device)
        own = (call.seq_lens[:, None] - seqlen_q + token)[:, None, :, None]
        j = torch.arange(capacity, device=device)
        visible = j <= own
        if window >= 0:
            visible = visible & (j >= own - window)
        if call.seq_starts is not None:
            visible = visible & (j >= call.seq_starts[:, None, None, None])
        # the cache may hold anything where no query sees a key: 0 · NaN and NaN − ∞ would be NaN
        seen = visible.any(2)[..., None]
        k, v = k.where(seen, 0.0), v.where(seen, 0.0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, **options)
        sees = own >= (0 if call.seq_starts is None else call.seq_starts.clamp(min=0)[:, None, None, None])
        return y.where(sees, 0.0).transpose(1, 2).contiguous()

    return run


def _run(call: FlashDecodingCall) -> Tensor:
    return bind(call)(call)


_op.attach("torch", _run, refuse=_refuse, priority=PRIORITY, bind=bind)
