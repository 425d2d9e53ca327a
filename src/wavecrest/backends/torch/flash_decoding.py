"""Decoding attention by PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wavecrest.backends.torch.common import PRIORITY
from wavecrest.dispatch import registry
from wavecrest.ops._flash_decoding.call import Operands as Decoding
from wavecrest.ops._flash_decoding.launch_append import appended


def _flash_decoding_supports(*args: Any, **kwargs: Any) -> str | None:
    given = Decoding(*args, **kwargs)
    if given.block_table is not None or given.k_scale is not None:
        return "would copy a cache of pages, 8 or 4 bits on every call"
    for name, asked in (
        ("softcap", given.softcap > 0),
        ("sinks", given.sinks is not None),
        ("ALiBi slopes in float32", given.alibi_slopes is not None),
        ("logarithms to return", given.return_lse),
    ):
        if asked:
            return f"has no {name}"
    return None


def _flash_decoding(*args: Any, **kwargs: Any) -> Tensor:
    given = Decoding(*args, **kwargs)
    if given.prepares:
        given = appended(given)
    q, k, v = (one.transpose(1, 2) for one in (given.q, given.k_cache, given.v_cache))
    token = torch.arange(given.tokens, device=q.device)
    own = (given.seq_lens[:, None] - given.tokens + token)[:, None, :, None]
    j = torch.arange(given.page, device=q.device)
    visible = j <= own
    if given.window >= 0:
        visible = visible & (j >= own - given.window)
    taking_part = j < given.seq_lens[:, None]
    if given.seq_starts is not None:
        taking_part = taking_part & (j >= given.seq_starts[:, None])
        visible = visible & taking_part[:, None, None, :]
    options: dict[str, Any] = {"scale": given.scale} | ({"enable_gqa": True} if given.group > 1 else {})
    # what the cache holds where a sequence has no keys may be anything: 0 · NaN would be NaN
    v = v.where(taking_part[:, None, :, None], 0.0)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, **options)
    sees = own >= (0 if given.seq_starts is None else given.seq_starts.clamp(min=0)[:, None, None, None])
    return y.where(sees, 0.0).transpose(1, 2).contiguous()


registry.get("flash_decoding").attach("torch", _flash_decoding, supports=_flash_decoding_supports, priority=PRIORITY)
