"""Attention of a few queries over a cache of latents that all heads share (MLA)."""

from __future__ import annotations

from torch import Tensor

from wavecrest.ops._mla_decode.backend import op as _op
from wavecrest.ops._mla_decode.call import MlaDecodeCall, MlaResult

__all__ = ["mla_decode"]

_run = _op.of_fields(MlaDecodeCall)


def mla_decode(
    q_nope: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    *,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    w_uk: Tensor | None = None,
    w_uv: Tensor | None = None,
    softmax_scale: float | None = None,
    logit_cap: float = 0.0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    rope_style: str = "neox",
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> MlaResult:
    """Causal attention of the last tokens of sequences over their cached latents, which all heads share.

    Multi-head latent attention (DeepSeek-V2, 2024, section 2.1) in its absorbed form: with latent c and rotary part k
    of each cached token, head h of query t weighs c by softmax(cap(scale · (q_nope · c + q_rope · k))). Query t of T is
    the token at position seq_len − T + t of its sequence and sees the keys up to that position.

    Args:
        q_nope: [B, T, H, R], absorbed (q · w_uk of each head), or [B, T, H, Dn] with `w_uk`; T from 1 to 16; float32,
            float16, bfloat16 or float64; any strides. The kernel needs the columns of this and all other tensors next
            to each other.
        q_rope: [B, T, H, Dr] in q_nope's dtype, Dr from 1 to 128, rotated by its position; not yet with `cos`.
        latent_cache: [B, S, R + Dr], or pages [P, page, R + Dr] of any size, in q_nope's dtype: for each token its
            latent of R columns, 1 to 512, and its rotary part, rotated. Any strides between tokens and pages.
        seq_lens: int32 [B], the keys of each sequence, at most S or page · pages. Not checked on the host: the
            kernel reads them.
        block_table: int32 [B, pages]: which page of the cache holds each page of a sequence. Entries beyond a
            sequence's keys may be anything.
        w_uk: [H, Dn, R], the weight that expands a latent to the keys of each head. The queries are multiplied by it
            first and rounded to their dtype. Rows or columns next to each other.
        w_uv: [H, Dv, R], the weight that expands a latent to the values of each head. The weighted latents are rounded
            and multiplied by it. Both are parts of `kv_b_proj.weight.view(H, Dn + Dv, R)`.
        softmax_scale: the factor of the scores, at least 0. None: 1 / √(Dn + Dr), which needs `w_uk`, as absorbed
            queries do not tell Dn.
        logit_cap: c > 0: scaled scores s become c · tanh(s / c). 0: no cap.
        cos, sin: [positions, Dr / 2], any floating dtype: q_rope is rotated by them as by `rope`, in float32, and
            rounded once. The cache's keys are not rotated here: they are stored rotated.
        positions: int32 or int64 [B, T] with tables; None: seq_len − T + t. A position outside the table gives NaN.
        rope_style: which columns are a pair, "neox" (i, i + Dr/2) or "gptj" (2i, 2i + 1).
        return_lse: also return the log-sum-exp of the scores (natural logarithm).
        batch_invariant: split the keys of a sequence the same way for any number of sequences and any cache length, so
            that a sequence has the same bits in any batch and cache.

    Returns:
        [B, T, H, R], with `w_uv` [B, T, H, Dv], in q_nope's dtype, contiguous; with `return_lse` also float32 (float64
        for float64) [B, H, T]. A query that sees nothing has 0 and −inf.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this.
    """
    return _run(
        q_nope, q_rope, latent_cache, seq_lens, block_table, w_uk, w_uv, softmax_scale, logit_cap, cos, sin,
        positions, rope_style, return_lse, batch_invariant,
    )  # fmt: skip
