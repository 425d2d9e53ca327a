"""Multi-head latent attention by PyTorch, in the latent space: the cache is read as it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wavecrest.backends.torch.common import PRIORITY
from wavecrest.ops._mla_decode.backend import op as decode_op
from wavecrest.ops._mla_decode.call import MlaDecodeCall, MlaResult
from wavecrest.ops._mla_decode.reference import rows_of, softmax_of
from wavecrest.ops._mla_prefill.backend import op as prefill_op
from wavecrest.ops._rope.call import RopeCall
from wavecrest.ops._rope.reference import reference as rope_reference


def _bind(call: MlaDecodeCall) -> Callable[[MlaDecodeCall], MlaResult]:
    """w_uk is multiplied into the queries and w_uv into the result.

    Keys that a query does not see must be finite, as they are multiplied by 0.
    """
    wide = torch.float64 if call.q_nope.dtype == torch.float64 else torch.float32
    batch, seqlen_q, heads, latent_dim = call.latent_shape
    max_seqlen_k, scale, logit_cap, return_lse = call.max_seqlen_k, call.scale, call.logit_cap, call.return_lse

    def run(call: MlaDecodeCall) -> MlaResult:
        q, q_rope, rows = call.q_nope.to(wide), call.q_rope, rows_of(call).to(wide)
        # the place of each query in its sequence, [B, T]
        own = call.seq_lens[:, None] - seqlen_q + torch.arange(seqlen_q, device=q.device)
        if call.cos is not None and call.sin is not None:
            positions = own if call.positions is None else call.positions
            q_rope = rope_reference(RopeCall(q_rope, call.cos, call.sin, positions, call.rope_style))
        if call.w_uk is not None:
            q = torch.einsum("bthd,hdr->bthr", q, call.w_uk.to(wide))
        # a query that sees nothing may have a position outside the table, and then NaN scores
        scores = torch.cat((q, q_rope.to(wide)), -1).flatten(1, 2) @ rows.mT
        unseen = (torch.arange(max_seqlen_k, device=q.device) > own[..., None]).repeat_interleave(heads, 1)
        weights, lse = softmax_of(scores, unseen, scale, logit_cap)
        y: Tensor = (weights @ rows[..., :latent_dim]).view(batch, seqlen_q, heads, latent_dim)
        if call.w_uv is not None:
            y = torch.einsum("bthr,hdr->bthd", y, call.w_uv.to(wide))
        y = y.to(call.q_nope.dtype).contiguous()
        if not return_lse:
            return y
        return y, lse.view(batch, seqlen_q, heads).transpose(1, 2).contiguous()

    return run


def _run(call: MlaDecodeCall) -> MlaResult:
    return _bind(call)(call)


decode_op.attach("torch", _run, priority=PRIORITY, bind=_bind)
prefill_op.attach("torch", _run, priority=PRIORITY, bind=_bind)
