"""The chunkwise mLSTM's last kernel: all chunks at once.

The chunkwise form and its second level of tiles inside a chunk are those of Tiled Flash Linear Attention (Beck et al.,
2025). With b the sums of log forget gates since the chunk began, position t sees the state before the chunk by
e^(b_t + m) and position j ≤ t of the chunk by e^(b_t − b_j + i_j). The largest of these exponents, which the kernel of
gates has found for every position, is taken off all of them.
"""

from __future__ import annotations

from wavecrest.ops.common.triton import tl, triton
from wavecrest.ops.mlstm.chunkwise.kernel_states import (
    BEFORE,
    DOCUMENT,
    LN_2,
    LOCAL,
    PLANES,
    REST,
    SEQUENCES,
    SIZES,
    SUMS,
    TOP,
    first_slot,
    tile_of,
)
from wavecrest.ops.mlstm.device import PACKED, denominator, layer_norm, sigmoid, within

# float16's weights of a row are relative to its largest, down to 2^−60 of what its state has: beyond that sums in
# float32 might not hold what the state adds
LEAST_UNIT = tl.constexpr(60.0)


@triton.jit
def _load(at, mask, COLS: tl.constexpr, rows=None):  # type: ignore[no-untyped-def]
    """A tile, 0 where there is no column; COLS: there may be none. `rows`: 0 where it is False."""
    if rows is not None:
        tile = tl.load(at, mask=rows[:, None] & mask[None, :], other=0.0)
    elif COLS:
        tile = tl.load(at, mask=mask[None, :], other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    acc, den, q, q_ptr, k_ptr, v_ptr, planes_ptr, other, offs_s, last_s, high, rest, document, tile_t, rows,
    q_tile, mask_v, offs_v, stride_k, stride_kd, stride_v, stride_vd, stride_ks, stride_vs, step_q, step_k, eps,
    LAST: tl.constexpr, RESETS: tl.constexpr, ONE: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGN: tl.constexpr,
    WIDE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Let the tokens from `other` on pass: (sums, total of weights) of each row. LAST: the sequence ends in them."""
    offs_k = tl.arange(0, BLOCK_K)
    # what is no token takes the last one's; no row sees it
    rows_s = offs_s
    if LAST:
        rows_s = tl.minimum(offs_s, last_s - other)
    k_tile = tile_of(rows_s, offs_k, stride_k, stride_kd, CONTIGUOUS, ALIGN, WIDE)
    k_at = k_ptr + tl.cast(other, tl.int64) * stride_ks
    s = tl.zeros([BLOCK_T, BLOCK_S], tl.float32)
    if ONE:
        k = _load(k_at + k_tile, offs_k < DK, DK % BLOCK_K != 0)
        s = tl.dot(q, tl.trans(k), s, input_precision=PRECISION, out_dtype=tl.float32)
    else:
        for part in range(0, DK, BLOCK_K):
            mask_k = part + offs_k < DK
            some = _load(q_ptr + part * step_q + q_tile, mask_k, DK % BLOCK_K != 0)
            k = _load(k_at + part * step_k + k_tile, mask_k, DK % BLOCK_K != 0)
            s = tl.dot(some, tl.trans(k), s, input_precision=PRECISION, out_dtype=tl.float32)
    at = planes_ptr + other + offs_s
    high_s = tl.load(at + SUMS * CHUNK)
    local_s = tl.load(at + LOCAL * CHUNK)
    d = (high[:, None] - high_s[None, :]) + (rest[:, None] + local_s[None, :])
    # never; it makes the compiler lay exponents out as scores are, a row in few lanes, instead of taking scores apart
    d = tl.where(eps < 0.0, s, d)
    seen = (tile_t * BLOCK_T + rows)[:, None] >= (other + offs_s)[None, :]
    if RESETS:
        document_s = tl.load(at + DOCUMENT * CHUNK)
        seen = seen & (document[:, None] == document_s[None, :])
    # what is not seen is chosen away: a product of it may be infinite
    p = tl.where(seen, s * tl.exp2(d), 0.0)
    v_tile = tile_of(rows_s, offs_v, stride_v, stride_vd, CONTIGUOUS, ALIGN, WIDE)
    v_at = v_ptr + tl.cast(other, tl.int64) * stride_vs + v_tile
    if RESETS:
        # values that are not finite would spoil rows of other documents; those of their own have NaN for a weight
        v = _load(v_at, mask_v, DV % BLOCK_V != 0, local_s == local_s)
    else:
        v = _load(v_at, mask_v, DV % BLOCK_V != 0)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION, out_dtype=tl.float32)
    return acc, den + tl.sum(p, 1)


@triton.jit(do_not_specialize=SIZES)
def _mlstm_chunks_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, states_ptr, scales_ptr, vectors_ptr, links_ptr, planes_ptr, cu_ptr, starts_ptr, lens_ptr,
    weight_ptr, gate_ptr, h_ptr,
    eps, norm_eps, log_scale, tokens, heads, chunks, sequences, slots,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_hb, stride_hh, stride_hs, stride_hd,
    stride_gb, stride_gh, stride_gs, stride_gd, stride_w, stride_cu, stride_starts, stride_lens,
    FORM: tl.constexpr, STARTS: tl.constexpr, LENS: tl.constexpr, RESETS: tl.constexpr, EXPONENTIAL: tl.constexpr,
    NORMALIZE: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, INITIAL: tl.constexpr, CONTIGUOUS: tl.constexpr,
    ALIGN: tl.constexpr, WIDE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr,
    STATE_K: tl.constexpr, STATE_V: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_T tokens of one chunk and head, BLOCK_V of DV of h; NORM: all of DV, normalised and gated.

    They meet the state BLOCK_C of its rows at a time, then BLOCK_S tokens of the chunk after the other, whose GEMMs
    of q and k take BLOCK_K of DK at a time. log_scale: the power of two that these are multiplied by. HALF: q is
    float16; tiles of the state, STATE_K by STATE_V, are relative to the unit in scales, and weights to a row's largest.
    """
    tiles_v = tl.cdiv(DV, BLOCK_V)
    # tiles of a chunk side by side: they read the same state, keys and values; the last of them, which see most, first
    tile_v = tl.program_id(0) % tiles_v
    tile_t = CHUNK // BLOCK_T - 1 - (tl.program_id(0) // tiles_v) % (CHUNK // BLOCK_T)
    index = tl.program_id(0) // tiles_v // (CHUNK // BLOCK_T)
    head = (index % heads).to(tl.int64)
    slot = (index // heads).to(tl.int64)
    if FORM == PACKED:
        # of packed ones the last whose first slot is not behind this one; −1 before all of them
        sequence = slot * 0 - 1
        for start_n in range(0, sequences, SEQUENCES):
            offs_n = start_n + tl.arange(0, SEQUENCES)
            first_token = tl.load(cu_ptr + offs_n * stride_cu, mask=offs_n < sequences, other=0).to(tl.int64)
            first_token = tl.minimum(tl.maximum(first_token, 0), tl.cast(tokens, tl.int64))
            before = (first_token // CHUNK + offs_n <= slot) & (offs_n < sequences)
            sequence += tl.sum(before.to(tl.int64), 0)
    else:
        sequence = slot // chunks
    row = sequence
    begin = tl.cast(0, tl.int64)
    end = tl.cast(tokens, tl.int64)
    if FORM == PACKED:
        row = sequence * 0
        begin = tl.load(cu_ptr + sequence * stride_cu, mask=sequence >= 0, other=0).to(tl.int64)
        end = tl.load(cu_ptr + (sequence + 1) * stride_cu, mask=sequence >= 0, other=0).to(tl.int64)
    if STARTS:
        begin = tl.load(starts_ptr + sequence * stride_starts).to(tl.int64)
    if LENS:
        end = begin + tl.load(lens_ptr + sequence * stride_lens).to(tl.int64)
    begin, end = within(begin, end, tokens, FORM)
    chunk = slot - first_slot(sequence, begin, chunks, CHUNK, FORM)
    first = begin + chunk * CHUNK
    start = first + tile_t * BLOCK_T
    if start >= end:
        return

    eps = tl.cast(eps, tl.float32)
    log_scale = tl.cast(log_scale, tl.float32)
    offs_k = tl.arange(0, BLOCK_K)
    offs_c = tl.arange(0, BLOCK_C)
    offs_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    offs_t = tl.arange(0, BLOCK_T)
    offs_s = tl.arange(0, BLOCK_S)
    mask_v = offs_v < DV
    # the last token, counted from the first of the tile, and of the chunk
    last_t = (end - 1 - start).to(tl.int32)
    last_s = last_t + tile_t * BLOCK_T
    # rows that are no tokens take the last one's: without masks, which would be kept in scalar registers; a token sees
    # none of them, and their own results are not stored
    rows = tl.minimum(offs_t, last_t)
    q_tile = tile_of(rows, offs_k, stride_qs, stride_qd, CONTIGUOUS, ALIGN, WIDE)
    q_part = tile_of(rows, offs_c, stride_qs, stride_qd, CONTIGUOUS, ALIGN, WIDE)
    stride_k = stride_ks
    stride_v = stride_vs
    stride_ks = tl.cast(stride_ks, tl.int64) * ALIGN
    stride_vs = tl.cast(stride_vs, tl.int64) * ALIGN
    step_q = tl.cast(stride_qd, tl.int64)
    step_k = tl.cast(stride_kd, tl.int64)
    if CONTIGUOUS:
        step_q = 1
        step_k = 1
    q_ptr += ALIGN * (row * stride_qb + head * stride_qh + start * stride_qs)
    k_ptr += ALIGN * (row * stride_kb + head * stride_kh) + first * stride_ks
    v_ptr += ALIGN * (row * stride_vb + head * stride_vh) + first * stride_vs
    slot = slot * heads + head
    planes_ptr += slot * (PLANES * CHUNK)
    at = planes_ptr + tile_t * BLOCK_T + rows
    high = tl.load(at + SUMS * CHUNK)
    rest = tl.load(at + REST * CHUNK)

    ONE: tl.constexpr = BLOCK_K >= DK
    q = 0.0
    if ONE:
        q = _load(q_ptr + q_tile, offs_k < DK, DK % BLOCK_K != 0)
    # what the state before the chunk has for them; there is none before the first chunk of a sequence that begins
    until = DK
    if INITIAL:
        m = tl.load(links_ptr + BEFORE * tl.cast(slots, tl.int64) * heads + slot)
    else:
        until = tl.where(chunk > 0, DK, 0)
        m = tl.load(links_ptr + BEFORE * tl.cast(slots, tl.int64) * heads + slot, mask=chunk > 0, other=0.0)
    base = (high + m) + rest
    document = high
    if RESETS:
        document = tl.load(at + DOCUMENT * CHUNK)
        # sums have begun anew, with m = 0
        base = tl.where(document == 0.0, base, high + rest)
    top = tl.zeros([BLOCK_T], tl.float32)
    if EXPONENTIAL:
        top = tl.maximum(base, tl.load(at + TOP * CHUNK))
    unit = tl.zeros([BLOCK_T], tl.float32)
    if HALF:
        unit = tl.minimum(top - tl.load(at + TOP * CHUNK), LEAST_UNIT)
    acc = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    den = tl.zeros([BLOCK_T], tl.float32)
    states_ptr += slot * (DK * DV)
    vectors_ptr += slot * DK
    if ONE:
        n = tl.load(vectors_ptr + offs_k, mask=offs_k < until, other=0.0)
        den = tl.sum(tl.cast(q, tl.float32) * n[None, :], 1)
    else:
        # in a loop of its own: a tile of q that a GEMM and a sum both read has no spare buffer in triton 3.6's
        # pipelines (see tests/compile/test_pipelines.py)
        for part in range(0, until, BLOCK_K):
            mask_k = part + offs_k < DK
            some = _load(q_ptr + part * step_q + q_tile, mask_k, DK % BLOCK_K != 0)
            n = tl.load(vectors_ptr + part + offs_k, mask=mask_k, other=0.0)
            den += tl.sum(tl.cast(some, tl.float32) * n[None, :], 1)
    c_tile = offs_c[:, None] * DV + offs_v[None, :]
    for part in range(0, until, BLOCK_C):
        mask_k = part + offs_c < DK
        some = _load(q_ptr + part * step_q + q_part, mask_k, DK % BLOCK_C != 0)
        if DK % BLOCK_C != 0 or DV % BLOCK_V != 0:
            c = tl.load(states_ptr + part * DV + c_tile, mask=mask_k[:, None] & mask_v[None, :], other=0.0)
        else:
            c = tl.load(states_ptr + part * DV + c_tile)
        if HALF:
            scale_at = (slot * tl.cdiv(DK, STATE_K) + part // STATE_K) * tl.cdiv(DV, STATE_V)
            c_unit = tl.load(scales_ptr + scale_at + offs_v // STATE_V, mask=mask_v, other=0.0)
            acc += c_unit[None, :] * tl.dot(some, c, out_dtype=tl.float32)
        else:
            acc = tl.dot(some, c, acc, input_precision=PRECISION, out_dtype=tl.float32)
    kept = tl.exp2((base - top) + (log_scale + unit))
    acc = acc * kept[:, None]
    den = den * kept
    if RESETS:
        # chosen, not multiplied: what came before may be NaN
        acc = tl.where((document == 0.0)[:, None], acc, 0.0)
        den = tl.where(document == 0.0, den, 0.0)

    rest = (rest - top) + (log_scale + unit)
    # whole tiles of tokens, and one in which the sequence ends
    until = tl.minimum((tile_t + 1) * BLOCK_T, last_s + 1)
    whole = (last_s + 1) // BLOCK_S * BLOCK_S
    for other in range(0, tl.minimum(until, whole), BLOCK_S):
        acc, den = _attend(
            acc, den, q, q_ptr, k_ptr, v_ptr, planes_ptr, other, offs_s, last_s, high, rest, document, tile_t, rows,
            q_tile, mask_v, offs_v, stride_k, stride_kd, stride_v, stride_vd, stride_ks, stride_vs, step_q, step_k, eps,
            False, RESETS, ONE, CONTIGUOUS, ALIGN, WIDE, DK, DV, CHUNK, BLOCK_T, BLOCK_S, BLOCK_K, BLOCK_V,
            PRECISION,
        )  # fmt: skip
    for other in range(whole, until, BLOCK_S):
        acc, den = _attend(
            acc, den, q, q_ptr, k_ptr, v_ptr, planes_ptr, other, offs_s, last_s, high, rest, document, tile_t, rows,
            q_tile, mask_v, offs_v, stride_k, stride_kd, stride_v, stride_vd, stride_ks, stride_vs, step_q, step_k, eps,
            True, RESETS, ONE, CONTIGUOUS, ALIGN, WIDE, DK, DV, CHUNK, BLOCK_T, BLOCK_S, BLOCK_K, BLOCK_V,
            PRECISION,
        )  # fmt: skip

    if HALF:
        unit = tl.exp2(-unit)
        acc = acc * unit[:, None]
        den = den * unit
    if NORMALIZE:
        acc = acc / denominator(den, top * LN_2, eps, EXPONENTIAL)[:, None]
    # made anew: the compiler would keep rows and masks in registers all along
    below = tl.arange(0, BLOCK_T)
    mask = (below < end - start)[:, None] & mask_v[None, :]
    if NORM:
        acc = layer_norm(acc, mask, DV, tl.cast(norm_eps, tl.float32))
        w = tl.load(weight_ptr + ((head * DV + offs_v) * stride_w)[None, :], mask=mask_v[None, :], other=0.0)
        acc = acc * w.to(tl.float32)
        if GATE:
            gate_ptr += ALIGN * (row * stride_gb + head * stride_gh + start * stride_gs)
            g = tl.load(gate_ptr + tile_of(below, offs_v, stride_gs, stride_gd, CONTIGUOUS, ALIGN, WIDE), mask=mask)
            acc = acc * sigmoid(g.to(tl.float32))
    h_ptr += ALIGN * (row * stride_hb + head * stride_hh + start * stride_hs)
    h_tile = tile_of(below, offs_v, stride_hs, stride_hd, CONTIGUOUS, ALIGN, WIDE)
    tl.store(h_ptr + h_tile, acc.to(h_ptr.dtype.element_ty), mask=mask)
