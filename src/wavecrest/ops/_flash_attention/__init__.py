"""Attention of queries over keys in one kernel, without the matrix of scores in memory."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from wavecrest.errors import LayoutWarning
from wavecrest.ops._flash_attention.backend import op as _op
from wavecrest.ops._flash_attention.call import MANY_HEADS, FlashAttentionCall, Window

__all__ = ["flash_attention"]

_run = _op.of_fields(FlashAttentionCall)


def _doubt_layout(q: Tensor, k: Tensor) -> None:
    """Warn of q and k that were read as [B, S, H, D] with more heads than tokens, and than any model has."""
    if torch.compiler.is_compiling() or k.ndim != 4 or k.shape[2] <= MANY_HEADS or q.shape[1] >= q.shape[2]:
        return
    warnings.warn(
        f"flash_attention: q {list(q.shape)} is read as {q.shape[1]} tokens of {q.shape[2]} heads, [B, S, H, D]; pass "
        'layout="bhsd" if it is [B, H, S, D], as wavecrest.attention takes it, or layout="bshd" if it is meant so',
        LayoutWarning,
        stacklevel=3,
    )


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str | None = None,
    causal: bool = False,
    window: Window = (-1, -1),
    softmax_scale: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    p_descale: float | None = None,
    out_dtype: torch.dtype | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(s) · v over the keys a query sees, sᵢⱼ = softcap(scale · qᵢ · kⱼ) + biasᵢⱼ − slope · |i + Sk − Sq − j|.

    8-bit q, k and v stand for the values times their descales: q and k are multiplied as they are (int8 with sums in
    int32), q_descale · k_descale is a part of the scale, v_descale a factor of the result. Where q is a float, k and v
    are widened to its dtype, which has all of their values.

    Query i is aligned with key i + Sk − Sq: the last query with the last key (bottom right), in each sequence.

    Args:
        q: [B, Sq, Hq, D] of layout "bshd", [B, Hq, Sq, D] of "bhsd", [Tq, Hq, D] of "thd"; any strides, which are read
            in place; float32 (IEEE products), float16, bfloat16, float64, int8 or an 8-bit float (float8_e4m3fn,
            float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz). D from 1 to 256. Sq may be 0.
        k: the same with Sk and Hk, of which Hq is a multiple: query head h reads head h // (Hq / Hk). q's dtype, or an
            8-bit one with a q that is a float.
        v: the same as k with Dv columns, from 1 to 256. Stored transposed ([B, H, Dv, S]) it is passed as a view.
        layout: "bshd", "bhsd", or "thd": sequences of several lengths behind one another. None: "bshd", with a
            `LayoutWarning` for q and k of more than 256 heads and fewer tokens than heads: they are likely "bhsd".
        causal: a query sees no key after its own: j ≤ i + Sk − Sq.
        window: (left, right), keys that a query sees before and after its own, which it sees too; −1: all. With
            `causal` right is 0.
        softmax_scale: the factor of q · kᵀ, at least 0; None: 1 / √D.
        bias: any floating dtype and strides, [B, Hq, Sq, Sk] or broadcast to it ("thd": the two maxima for Sq and Sk).
            Added to the scaled and capped scores. −inf hides a key.
        alibi_slopes: float32 [Hq] or [B, Hq] (Press et al., 2022).
        softcap: c > 0: scaled scores become c · tanh(s / c), before bias and slopes (Gemma 2); 0: they do not.
        sinks: floating [Hq], a further score of each query that has no value: it takes part in the sum that weights are
            divided by (as in gpt-oss).
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1] with "thd": where sequences begin, from 0 up to Tq or Tk, not falling.
            Not checked on the host: the kernel reads them; results of tokens after the last sequence are not written.
        max_seqlen_q, max_seqlen_k: with "thd": at least the length of the longest sequence. Queries beyond
            max_seqlen_q are not computed.
        return_lse: also return log(Σⱼ exp(sᵢⱼ)), with the sink in it.
        q_descale, k_descale, v_descale: float32 with 8-bit q, k and v: one number ([] or [1]), [H], or [B, H] ("thd":
            of sequences), with Hq for q and Hk for k and v; those of q and k at least 0, which is not checked. int8
            needs them, 8-bit floats have 1 without.
        p_descale: with 8-bit q, k and v: probabilities are quantized to v's dtype too, p / p_descale rounded to
            nearest even and saturating. p is relative to the running maximum and at most 1, so that 1 / 127 is natural
            for int8, 1 / 448 for float8_e4m3fn, 1 / 240 for float8_e4m3fnuz and 1 / 57344 for the others. Denominator
            and logsumexp use unquantized probabilities. None: the second GEMM runs in q's dtype or, for 8-bit q, in
            the result's 16-bit dtype (float16 for a float32 result).
        out_dtype: of the result with 8-bit k and v: float32, float16 or bfloat16. None: q's, or bfloat16 for 8-bit q.
        dropout_p: in [0, 1): the share of weights that is dropped, after the softmax; the others are
            multiplied by 1 / (1 − dropout_p). The weights' sum and the logarithms are those without. The mask is the
            same for any backend, layout and size of tiles: of query i and key j of sequence b, counted in it from 0,
            and query head h, the weight is kept if a word of 32 bits is at least ⌊dropout_p · 2³²⌋. The word is
            number j mod 4 of those that Philox-4x32-10 (Salmon et al., 2011; as in `triton.language.philox`) has for
            the counter (⌊j / 4⌋, i, h, b) and the key `seed`, low word first.
        seed: an integer in [0, 2⁶⁴), needed with `dropout_p` above 0. A CUDA graph replays with the seed that
            it was captured with.

    Returns:
        The result in q's layout and dtype (or `out_dtype`) with Dv columns, contiguous; with `return_lse` also the
        natural logarithms, float32 (float64 for float64) [B, Hq, Sq], or [Hq, Tq] of "thd". A query that sees nothing
        has a result of 0 and −inf; with a sink, 0 and the sink.

        What lies beyond a sequence's keys never takes part. Of keys that causality or the window hide, a NaN or an
        infinity in v may make queries of the same tile NaN (0 · NaN), depending on the backend; the reference masks
        them.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this.
    """
    if layout is None:
        layout = "bshd"
        if isinstance(q, Tensor) and q.ndim == 4 and q.shape[2] > MANY_HEADS and isinstance(k, Tensor):
            _doubt_layout(q, k)
    if isinstance(window, list):
        # calls are looked up by their arguments
        window = tuple(window)
    return _run(
        q, k, v, layout, causal, window, softmax_scale, bias, alibi_slopes, softcap, sinks, cu_seqlens_q,
        cu_seqlens_k, max_seqlen_q, max_seqlen_k, return_lse, q_descale, k_descale, v_descale, p_descale, out_dtype,
        dropout_p, seed,
    )  # fmt: skip
