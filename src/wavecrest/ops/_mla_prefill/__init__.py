"""Attention of a prompt, or of a chunk of one, over a cache of latents that all heads share (MLA)."""

from __future__ import annotations

from torch import Tensor

from wavecrest.ops._mla_decode.call import MlaResult
from wavecrest.ops._mla_prefill.backend import op as _op
from wavecrest.ops._mla_prefill.call import MlaPrefillCall

__all__ = ["mla_prefill"]

_run = _op.of_fields(MlaPrefillCall)


def mla_prefill(
    q_nope: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    *,
    seq_lens: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    logit_cap: float = 0.0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    rope_style: str = "neox",
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> MlaResult:
    """Causal attention of the last T tokens of sequences, a prompt or a chunk of it, over their cached latents.

    As `mla_decode` with both weights, for any number of queries. The function has two forms. Absorbed, keys and values
    are latents, and a pair of a query and a key takes 2 (2 R + Dr) FLOPs. Decompressed, keys and values of all heads
    are made first, with 2 R (Dn + Dv) FLOPs a key, and a pair takes 2 (Dn + Dr + Dv). With the sizes of DeepSeek-V3 a
    pair takes 3.4 times as many FLOPs absorbed, so that decompressed has fewer from about 170 queries on, and for a
    whole prompt. It runs on a GPU then, unless the keys and values of all heads would take more than 4 GiB.

    Args:
        q_nope: [B, T, H, Dn], float32, float16, bfloat16 or float64; T at least 1.
        q_rope: [B, T, H, Dr] in q_nope's dtype, Dr from 1 to 128, rotated, or with `cos` to be rotated.
        latent_cache: [B, S, R + Dr], or pages [P, page, R + Dr], in q_nope's dtype; the T tokens' rows are in it.
        seq_lens: int32 [B], the keys of each sequence, those of the T tokens included. Not checked on the host: the
            kernel reads them.
        w_uk: [H, Dn, R]. w_uv: [H, Dv, R]. Both parts of `kv_b_proj.weight.view(H, Dn + Dv, R)`.
        block_table: int32 [B, pages].
        softmax_scale: None: 1 / √(Dn + Dr).
        logit_cap, cos, sin, positions, rope_style, return_lse: as of `mla_decode`.
        batch_invariant: the absorbed form does not split keys, so that a sequence has the same bits in any batch.

    Returns:
        [B, T, H, Dv] in q_nope's dtype, contiguous; with `return_lse` also float32 (float64 for float64) [B, H, T]. A
        query before the first token (T more than seq_len) has 0 and −inf.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this.
    """
    return _run(
        q_nope, q_rope, latent_cache, seq_lens, block_table, w_uk, w_uv, softmax_scale, logit_cap, cos, sin,
        positions, rope_style, return_lse, batch_invariant,
    )  # fmt: skip
