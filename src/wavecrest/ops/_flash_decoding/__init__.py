"""Attention of a few queries over a cache of keys and values, with and without pages."""

from __future__ import annotations

from torch import Tensor

from wavecrest.ops._flash_decoding.backend import op as _op
from wavecrest.ops._flash_decoding.call import FlashDecodingCall

__all__ = ["flash_decoding"]

_run = _op.of_fields(FlashDecodingCall)


def flash_decoding(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    seq_lens: Tensor,
    block_table: Tensor | None = None,
    window: int = -1,
    softmax_scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    k_shift: Tensor | None = None,
    v_shift: Tensor | None = None,
    seq_starts: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    rotary_style: str = "neox",
    append_lens: Tensor | None = None,
    advance: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of the last tokens of sequences over their cached keys, those tokens' own among them.

    Query t of T is the token at place seq_len − T + t of its sequence and sees the keys up to that place, as
    `flash_attention` with `causal`; the cache is read once for all queries and heads that share a head of it.

    Args:
        q: [B, T, Hq, D], T from 1 to 16 (more with speculative decoding); float32, float16, bfloat16 or float64; D from
            1 to 256; any strides.
        k_cache: [B, S, Hk, D], or pages [P, page, Hk, D] of any size; Hq is a multiple of Hk. In q's dtype; or int8 or
            an 8-bit float with scales; or uint8 with D / 2 bytes of two values, from 0 to 15, with scales and shifts of
            1, 2, 4 or 8 groups of columns, D a multiple of 2 · groups (`quantize_cache` makes them). Any strides,
            columns next to each other for the kernel.
        v_cache: the same with Dv columns, from 1 to 256.
        seq_lens: int32 [B], the keys of each sequence, at most S or page · pages. Not checked on the host: the
            kernel reads them.
        block_table: int32 [B, pages]: which page of the cache holds each page of a sequence.
        window: keys before its own that a query sees; −1: all.
        softmax_scale: the factor of q · kᵀ, at least 0; None: 1 / √D.
        alibi_slopes: float32 [Hq] or [B, Hq]: −slope · distance is added to the scaled scores.
        softcap: c > 0: scaled scores become c · tanh(s / c); 0: they do not.
        sinks: floating [Hq], a further score of each query that has no value.
        k_scale, v_scale: what the numbers of a cache of 8 or 4 bits are multiplied by. 8 bits: float32, one number or
            [Hk], or one for each token and head, [B, S, Hk, 1] or [P, page, Hk, 1] in float32, float16 or bfloat16. 4
            bits: [B, S, Hk, groups] or [P, page, Hk, groups] of these. Any strides; more groups than one next to each
            other for the kernel.
        return_lse: also return the natural logarithms of the sums of exponentials, with the sink in them.
        batch_invariant: split the keys of a sequence without a look at how many sequences there are, so that a
            sequence has the same bits in any batch.
        k_shift, v_shift: of a cache of 4 bits, what is added after that, in the shape and dtype of the scales.
        seq_starts: int32 [B], the place of each sequence's first key that is not hidden, as of a batch that is padded
            at the left; 0 and less: none is hidden. Not checked on the host: the kernel reads them.
        k, v: [B, T, Hk, D] and [B, T, Hk, Dv] in q's dtype, keys and values of the tokens of q: they are written to the
            caches, which are changed, at places seq_len − T + t from 0 on, before attention. Rounded as the cache asks
            for: with the scales given, or with scales and shifts of tokens that are written too. None: they are there.
        cos, sin: floating [positions, R / 2], R up to D: the first R columns of q and k are rotated by the angles of
            their places, as by `rope`. A place that the tables do not have makes NaN.
        rotary_style: which columns are a pair, "neox" (i, i + R/2) or "gptj" (2i, 2i + 1).
        append_lens: int32 [B], with k and v: they are written, and they and q are rotated, at places append_len − T + t
            in the place of seq_len − T + t. Not checked on the host: the kernel reads them.
        advance: `append_lens` are the tokens before those of q, which are written from there on, and T is added to them
            in place: to each once, where all sequences share one by a stride of 0. In other memory than `seq_lens`.

    Returns:
        [B, T, Hq, Dv] in q's dtype, contiguous; with `return_lse` also float32 (float64 for float64) [B, Hq, T]. A
        query that sees nothing has 0 and −inf; with a sink, 0 and the sink.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this, or k, v or what they are written to needs
            gradients.
    """
    return _run(
        q, k_cache, v_cache, seq_lens, block_table, window, softmax_scale, alibi_slopes, softcap, sinks, k_scale,
        v_scale, return_lse, batch_invariant, k_shift, v_shift, seq_starts, k, v, cos, sin, rotary_style,
        append_lens, advance,
    )  # fmt: skip
