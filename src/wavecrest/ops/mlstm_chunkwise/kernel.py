"""The chunkwise mLSTM in two kernels: states from chunk to chunk, then everything else of all chunks at once.

The chunkwise form and its second level of tiles inside a chunk are those of Tiled Flash Linear Attention (Beck et al.,
2025). With b the sums of log forget gates since the chunk began, position t sees the state before the chunk by
e^(b_t + m) and position j ≤ t of the chunk by e^(b_t − b_j + i_j); a stabiliser that grows tile by tile is taken off
all exponents, as of an online softmax.
"""

from __future__ import annotations

from wavecrest.ops._lib import exp, magnitude
from wavecrest.ops._mlstm_lib import (
    PACKED,
    columns,
    denominator,
    half_range,
    layer_norm,
    log_forget,
    log_input,
    sigmoid,
    span,
)
from wavecrest.ops._triton import tl, triton

# what the first kernel leaves for each token and head, float32 [PLANES, B, NH, S]: the sums b as two numbers (their
# differences are needed, and large sums would lose what differs), the input gate's logarithm, the exponent by which
# the token sees the state before the chunk, and how many resets the chunk has up to it
SUMS, REST, INPUT, CARRY, DOCUMENT = (tl.constexpr(plane) for plane in range(5))
PLANES = 5

# values that do not make the kernels anew when they change
SIZES = [
    "eps", "cap", "norm_eps", "scale", "batch", "tokens", "heads", "chunks", "sequences",
    "stride_qb", "stride_qh", "stride_qs", "stride_qd", "stride_kb", "stride_kh", "stride_ks", "stride_kd",
    "stride_vb", "stride_vh", "stride_vs", "stride_vd", "stride_hb", "stride_hh", "stride_hs", "stride_hd",
    "stride_gb", "stride_gh", "stride_gs", "stride_gd", "stride_ib", "stride_ih", "stride_is",
    "stride_fb", "stride_fh", "stride_fs", "stride_cb", "stride_ch", "stride_ck", "stride_cd",
    "stride_nb", "stride_nh", "stride_nk", "stride_mb", "stride_mh", "stride_rb", "stride_rs", "stride_w",
    "stride_cu", "stride_starts", "stride_lens",
]  # fmt: skip


@triton.jit
def _first_slot(sequence, begin, chunks, CHUNK: tl.constexpr, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where the states of a sequence's chunks begin; of packed ones so that none needs to know how long others are."""
    if FORM == PACKED:
        slot = begin // CHUNK + sequence
    else:
        slot = sequence * chunks
    return slot


@triton.jit
def _owner(slot, chunks, sequences, tokens, cu_ptr, stride_cu, CHUNK: tl.constexpr, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sequence that a slot is of: of packed ones the last whose first slot is not behind it."""
    if FORM == PACKED:
        low = slot * 0
        high = low + sequences
        while high - low > 1:
            middle = (low + high) // 2
            begin = tl.load(cu_ptr + middle * stride_cu).to(tl.int64)
            begin = tl.minimum(tl.maximum(begin, 0), tl.cast(tokens, tl.int64))
            before = begin // CHUNK + middle <= slot
            low = tl.where(before, middle, low)
            high = tl.where(before, high, middle)
        found = low
    else:
        found = slot // chunks
    return found


@triton.jit
def _unit(c):  # type: ignore[no-untyped-def]
    """The power of two, from 2^−126 on, that the largest of |c| is 1 to 2 times of; 1 where that is 0 or not finite."""
    bits = tl.max(tl.max(magnitude(c), 1), 0) & 0x7F800000
    bits = tl.where((bits == 0) | (bits == 0x7F800000), 0x3F800000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _finite(x):  # type: ignore[no-untyped-def]
    """x, or 0 for −∞: what exponents may be taken relative to."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit(do_not_specialize=SIZES)
def _mlstm_states_kernel(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, i_ptr, f_ptr, c_ptr, n_ptr, m_ptr, cu_ptr, starts_ptr, lens_ptr, resets_ptr,
    states_ptr, scales_ptr, vectors_ptr, planes_ptr, c_new_ptr, n_new_ptr, m_new_ptr,
    cap, batch, tokens, heads, chunks,
    stride_kb, stride_kh, stride_ks, stride_kd, stride_vb, stride_vh, stride_vs, stride_vd,
    stride_ib, stride_ih, stride_is, stride_fb, stride_fh, stride_fs, stride_cb, stride_ch, stride_ck, stride_cd,
    stride_nb, stride_nh, stride_nk, stride_mb, stride_mh, stride_rb, stride_rs,
    stride_cu, stride_starts, stride_lens,
    FORM: tl.constexpr, STARTS: tl.constexpr, LENS: tl.constexpr, RESETS: tl.constexpr, CAP: tl.constexpr,
    EXPONENTIAL: tl.constexpr, INITIAL: tl.constexpr, LAST: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr,
    C_COLUMNS: tl.constexpr, C_ALIGN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_K, BLOCK_V] of the state of one sequence and head, BLOCK_T tokens at a time.

    Stores it in the dtype of k as it is before each chunk (the first only with INITIAL), n likewise in float32, and
    for a head's first tile what `PLANES` says; with LAST the state behind the last token. HALF: k is float16, whose
    range is too small for weights of e^−15 and for large states: weights are relative to the largest of a tile, and
    stored tiles to a power of two, which is in scales [slots, NH, tiles of DK, tiles of DV].
    """
    tiles_v = tl.cdiv(DV, BLOCK_V)
    tile_v = tl.program_id(0) % tiles_v
    tile_k = (tl.program_id(0) // tiles_v) % tl.cdiv(DK, BLOCK_K)
    index = tl.program_id(0) // tiles_v // tl.cdiv(DK, BLOCK_K)
    head = (index % heads).to(tl.int64)
    sequence = (index // heads).to(tl.int64)
    row, begin, end = span(
        sequence, tokens, cu_ptr, starts_ptr, lens_ptr, stride_cu, stride_starts, stride_lens, FORM, STARTS, LENS
    )
    cap = tl.cast(cap, tl.float32)
    offs_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    offs_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    offs_t = tl.arange(0, BLOCK_T)
    mask_k = offs_k < DK
    mask_v = offs_v < DV
    mask_c = mask_k[:, None] & mask_v[None, :]
    wide_k = offs_k.to(tl.int64)
    c = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    n = tl.zeros([BLOCK_K], tl.float32)
    m = tl.cast(0.0, tl.float32)
    if INITIAL:
        c_at = C_ALIGN * (sequence * stride_cb + head * stride_ch + wide_k * stride_ck)
        c_at = c_at[:, None] + columns(offs_v, stride_cd, C_COLUMNS)[None, :]
        c = tl.load(c_ptr + c_at, mask=mask_c, other=0.0).to(tl.float32)
        n = tl.load(n_ptr + sequence * stride_nb + head * stride_nh + wide_k * stride_nk, mask=mask_k, other=0.0)
        if EXPONENTIAL:
            m = tl.load(m_ptr + sequence * stride_mb + head * stride_mh)
    k_ptr += ALIGN * (row * stride_kb + head * stride_kh)
    v_ptr += ALIGN * (row * stride_vb + head * stride_vh)
    i_ptr += row * stride_ib + head * stride_ih
    f_ptr += row * stride_fb + head * stride_fh
    resets_ptr += row * stride_rb
    plane = tl.cast(batch, tl.int64) * heads * tokens
    planes_ptr += (row * heads + head) * tokens
    stride_ks = tl.cast(stride_ks, tl.int64) * ALIGN
    stride_vs = tl.cast(stride_vs, tl.int64) * ALIGN
    kd = columns(offs_k, stride_kd, COLUMNS)[None, :]
    vd = columns(offs_v, stride_vd, COLUMNS)[None, :]
    first = _first_slot(sequence, begin, chunks, CHUNK, FORM)
    # the sum since the chunk began in float64, as differences of it are what counts; its last exponent of the state
    # before the chunk, and resets in it
    total = tl.cast(0.0, tl.float64)
    carry = m
    document = 0
    for start in range(begin, end, BLOCK_T):
        at_chunk = (start - begin) % CHUNK == 0
        kept = at_chunk
        if not INITIAL:
            kept = at_chunk & (start > begin)
        slot = ((first + (start - begin) // CHUNK) * heads + head) * DK
        state_at = states_ptr + slot * DV + (wide_k * DV)[:, None] + offs_v[None, :]
        if HALF:
            if kept:
                unit = _unit(c)
                tl.store(state_at, (c / unit).to(tl.float16), mask=mask_c)
                scale_at = (slot // DK * tl.cdiv(DK, BLOCK_K) + tile_k) * tiles_v + tile_v
                tl.store(scales_ptr + scale_at, unit)
        else:
            tl.store(state_at, c.to(states_ptr.dtype.element_ty), mask=mask_c & kept)
        token = start + offs_t
        mask_t = token < end
        lf = log_forget(tl.load(f_ptr + token * stride_fs, mask=mask_t, other=0.0), cap, CAP)
        i = log_input(tl.load(i_ptr + token * stride_is, mask=mask_t, other=0.0), cap, CAP, EXPONENTIAL)
        # a token's own decay is no part of what comes after it: the next ones are summed from the end, not subtracted
        more = (token + 1 < end) & (offs_t < BLOCK_T - 1)
        after = log_forget(tl.load(f_ptr + (token + 1) * stride_fs, mask=more, other=0.0), cap, CAP)
        lf = tl.where(mask_t, lf, 0.0)
        i = tl.where(mask_t, i, float("-inf"))
        weight = tl.cumsum(tl.where(more, after, 0.0), 0, reverse=True) + i
        decay = tl.sum(lf, 0)
        taken = mask_t
        resets = 0
        if RESETS:
            fresh = (tl.load(resets_ptr + token * stride_rs, mask=mask_t, other=0) != 0).to(tl.int32)
            count = tl.cumsum(fresh, 0)
            resets = tl.sum(fresh, 0)
            # tokens before the last reset have no part in the state behind
            taken = mask_t & (count == resets)
            weight = tl.where(taken, weight, float("-inf"))
            decay = tl.sum(tl.where(taken, lf, 0.0), 0)
        if tile_v == 0:
            n_at = vectors_ptr + slot + offs_k
            tl.store(n_at, n, mask=mask_k & kept)
            if tile_k == 0:
                total = tl.where(at_chunk, 0.0, total)
                sums = tl.cumsum(lf.to(tl.float64), 0) + total
                total = tl.sum(lf.to(tl.float64), 0) + total
                high = sums.to(tl.float32)
                carry = tl.where(at_chunk, m, carry)
                document = tl.where(at_chunk, 0, document)
                if RESETS:
                    same = (count[:, None] == count[None, :]) & (offs_t[:, None] >= offs_t[None, :])
                    own = tl.sum(tl.where(same, lf[None, :], 0.0), 1)
                    own += tl.where(count == 0, carry, 0.0)
                    tl.store(planes_ptr + DOCUMENT * plane + token, (count + document).to(tl.float32), mask=mask_t)
                    carry = tl.where(resets > 0, decay, carry + decay)
                    document += resets
                else:
                    # since the chunk began, so that roundings of tiles do not add up
                    own = (sums + carry.to(tl.float64)).to(tl.float32)
                tl.store(planes_ptr + SUMS * plane + token, high, mask=mask_t)
                tl.store(planes_ptr + REST * plane + token, (sums - high.to(tl.float64)).to(tl.float32), mask=mask_t)
                tl.store(planes_ptr + INPUT * plane + token, i, mask=mask_t)
                tl.store(planes_ptr + CARRY * plane + token, own, mask=mask_t)
        if RESETS:
            # chosen, not multiplied: what came before may be NaN
            c = tl.where(resets > 0, 0.0, c)
            n = tl.where(resets > 0, 0.0, n)
            m = tl.where(resets > 0, 0.0, m)
        if EXPONENTIAL:
            top = tl.maximum(decay + m, tl.max(weight, 0))
            decay = decay + m - top
            weight = weight - top
            m = top
        decay = exp(decay)
        base = tl.cast(0.0, tl.float32)
        if HALF:
            base = _finite(tl.max(weight, 0))
        weight = exp(weight - base)
        k = tl.load(k_ptr + (token * stride_ks)[:, None] + kd, mask=taken[:, None] & mask_k[None, :], other=0.0)
        v = tl.load(v_ptr + (token * stride_vs)[:, None] + vd, mask=taken[:, None] & mask_v[None, :], other=0.0)
        weighted = k.to(tl.float32) * weight[:, None]
        if HALF:
            c = c * decay + exp(base) * tl.dot(tl.trans(weighted.to(v.dtype)), v, out_dtype=tl.float32)
            n = n * decay + exp(base) * tl.sum(weighted, 0)
        else:
            c = tl.dot(tl.trans(weighted.to(v.dtype)), v, c * decay, input_precision="ieee", out_dtype=tl.float32)
            n = n * decay + tl.sum(weighted, 0)
    if LAST:
        at = ((sequence * heads + head) * DK + wide_k) * DV
        c = half_range(c, c_new_ptr.dtype.element_ty)
        tl.store(c_new_ptr + at[:, None] + offs_v[None, :], c.to(c_new_ptr.dtype.element_ty), mask=mask_c)
        if tile_v == 0:
            tl.store(n_new_ptr + (sequence * heads + head) * DK + offs_k, n, mask=mask_k)
            if EXPONENTIAL and tile_k == 0:
                tl.store(m_new_ptr + sequence * heads + head, m)


@triton.jit(do_not_specialize=SIZES)
def _mlstm_chunks_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, states_ptr, scales_ptr, vectors_ptr, planes_ptr, cu_ptr, starts_ptr, lens_ptr, weight_ptr,
    gate_ptr, h_ptr,
    eps, norm_eps, scale, batch, tokens, heads, chunks, sequences,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_hb, stride_hh, stride_hs, stride_hd,
    stride_gb, stride_gh, stride_gs, stride_gd, stride_w, stride_cu, stride_starts, stride_lens,
    FORM: tl.constexpr, STARTS: tl.constexpr, LENS: tl.constexpr, RESETS: tl.constexpr, EXPONENTIAL: tl.constexpr,
    NORMALIZE: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, INITIAL: tl.constexpr, COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STATE_K: tl.constexpr, STATE_V: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """BLOCK_T tokens of one chunk and head, BLOCK_V columns of h; NORM: all of them, normalised and gated.

    HALF: as in the kernel of states, whose tiles are STATE_K by STATE_V; so are weights, relative to a row's largest.
    """
    tiles_v = tl.cdiv(DV, BLOCK_V)
    # tiles of a chunk side by side: they read the same state, keys and values
    tile_v = tl.program_id(0) % tiles_v
    tile_t = (tl.program_id(0) // tiles_v) % (CHUNK // BLOCK_T)
    index = tl.program_id(0) // tiles_v // (CHUNK // BLOCK_T)
    head = (index % heads).to(tl.int64)
    slot = (index // heads).to(tl.int64)
    sequence = _owner(slot, chunks, sequences, tokens, cu_ptr, stride_cu, CHUNK, FORM)
    row, begin, end = span(
        sequence, tokens, cu_ptr, starts_ptr, lens_ptr, stride_cu, stride_starts, stride_lens, FORM, STARTS, LENS
    )
    chunk = slot - _first_slot(sequence, begin, chunks, CHUNK, FORM)
    first = begin + chunk * CHUNK
    start = first + tile_t * BLOCK_T
    if start >= end:
        return

    eps = tl.cast(eps, tl.float32)
    scale = tl.cast(scale, tl.float32)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    offs_t = tl.arange(0, BLOCK_T)
    mask_v = offs_v < DV
    token = start + offs_t
    mask_t = token < end
    stride_ks = tl.cast(stride_ks, tl.int64) * ALIGN
    stride_vs = tl.cast(stride_vs, tl.int64) * ALIGN
    q_at = (
        q_ptr + ALIGN * (row * stride_qb + head * stride_qh) + (token * (tl.cast(stride_qs, tl.int64) * ALIGN))[:, None]
    )
    k_ptr += ALIGN * (row * stride_kb + head * stride_kh)
    v_ptr += ALIGN * (row * stride_vb + head * stride_vh)
    plane = tl.cast(batch, tl.int64) * heads * tokens
    planes_ptr += (row * heads + head) * tokens
    carry = tl.load(planes_ptr + CARRY * plane + token, mask=mask_t, other=0.0)
    high = tl.load(planes_ptr + SUMS * plane + token, mask=mask_t, other=0.0)
    rest = tl.load(planes_ptr + REST * plane + token, mask=mask_t, other=0.0)
    document = carry
    if RESETS:
        document = tl.load(planes_ptr + DOCUMENT * plane + token, mask=mask_t, other=0.0)

    ONE: tl.constexpr = BLOCK_K >= DK
    q = 0.0
    if ONE:
        q_mask = mask_t[:, None] & (offs_k < DK)[None, :]
        q = tl.load(q_at + columns(offs_k, stride_qd, COLUMNS)[None, :], mask=q_mask, other=0.0)
    acc = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    den = tl.zeros([BLOCK_T], tl.float32)
    # what the state before the chunk has for them; there is none before the first chunk of a sequence that begins
    until = DK
    if not INITIAL:
        until = tl.where(chunk > 0, DK, 0)
    state_at = (slot * heads + head) * DK
    for part in range(0, until, BLOCK_K):
        offs = part + offs_k
        mask_k = offs < DK
        if ONE:
            some = q
        else:
            some = tl.load(
                q_at + columns(offs, stride_qd, COLUMNS)[None, :], mask=mask_t[:, None] & mask_k[None, :], other=0.0
            )
        c_at = states_ptr + (state_at + offs)[:, None] * DV + offs_v[None, :]
        c = tl.load(c_at, mask=mask_k[:, None] & mask_v[None, :], other=0.0)
        n = tl.load(vectors_ptr + state_at + offs, mask=mask_k, other=0.0)
        if HALF:
            scale_at = ((slot * heads + head) * tl.cdiv(DK, STATE_K) + part // STATE_K) * tl.cdiv(DV, STATE_V)
            unit = tl.load(scales_ptr + scale_at + offs_v // STATE_V, mask=mask_v, other=0.0)
            acc += unit[None, :] * tl.dot(some, c, out_dtype=tl.float32)
        else:
            acc = tl.dot(some, c, acc, input_precision="ieee", out_dtype=tl.float32)
        den += tl.sum(some.to(tl.float32) * n[None, :], 1)
    kept = tl.full([BLOCK_T], 1.0, tl.float32) * scale
    if not EXPONENTIAL:
        kept = exp(carry) * scale
    acc = acc * kept[:, None]
    den = den * kept
    if RESETS:
        # chosen, not multiplied: what came before may be NaN
        acc = tl.where((document == 0.0)[:, None], acc, 0.0)
        den = tl.where(document == 0.0, den, 0.0)

    top = carry
    for other in range(first, start + 1, BLOCK_T):
        at = other + offs_t
        mask_j = at < end
        s = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
        for part in range(0, DK, BLOCK_K):
            offs = part + offs_k
            mask_k = offs < DK
            if ONE:
                some = q
            else:
                some = tl.load(
                    q_at + columns(offs, stride_qd, COLUMNS)[None, :], mask=mask_t[:, None] & mask_k[None, :], other=0.0
                )
            k_at = k_ptr + (at * stride_ks)[:, None] + columns(offs, stride_kd, COLUMNS)[None, :]
            k = tl.load(k_at, mask=mask_j[:, None] & mask_k[None, :], other=0.0)
            s = tl.dot(some, tl.trans(k), s, input_precision="ieee", out_dtype=tl.float32)
        high_j = tl.load(planes_ptr + SUMS * plane + at, mask=mask_j, other=0.0)
        rest_j = tl.load(planes_ptr + REST * plane + at, mask=mask_j, other=0.0)
        input_j = tl.load(planes_ptr + INPUT * plane + at, mask=mask_j, other=0.0)
        seen = (token[:, None] >= at[None, :]) & mask_j[None, :]
        if RESETS:
            document_j = tl.load(planes_ptr + DOCUMENT * plane + at, mask=mask_j, other=0.0)
            seen = seen & (document[:, None] == document_j[None, :])
        d = (high[:, None] - high_j[None, :]) + (rest[:, None] - rest_j[None, :]) + input_j[None, :]
        d = tl.where(seen, d, float("-inf"))
        if EXPONENTIAL:
            top_now = tl.maximum(top, tl.max(d, 1))
            shrink = exp(top - top_now)
            acc = acc * shrink[:, None]
            den = den * shrink
            d = d - top_now[:, None]
            top = top_now
        base = tl.zeros([BLOCK_T], tl.float32)
        if HALF:
            base = _finite(tl.max(d, 1))
        # what is not seen is chosen away: a product of it may be infinite
        p = tl.where(seen, s * scale * exp(d - base[:, None]), 0.0)
        v_at = v_ptr + (at * stride_vs)[:, None] + columns(offs_v, stride_vd, COLUMNS)[None, :]
        v = tl.load(v_at, mask=mask_j[:, None] & mask_v[None, :], other=0.0)
        if HALF:
            acc += exp(base)[:, None] * tl.dot(p.to(v.dtype), v, out_dtype=tl.float32)
            den += exp(base) * tl.sum(p, 1)
        else:
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee", out_dtype=tl.float32)
            den += tl.sum(p, 1)

    if NORMALIZE:
        acc = acc / denominator(den, top, eps, EXPONENTIAL)[:, None]
    mask = mask_t[:, None] & mask_v[None, :]
    if NORM:
        acc = layer_norm(acc, mask, DV, tl.cast(norm_eps, tl.float32))
        w = tl.load(weight_ptr + ((head * DV + offs_v) * stride_w)[None, :], mask=mask_v[None, :], other=0.0)
        acc = acc * w.to(tl.float32)
        if GATE:
            g_at = (
                ALIGN * (row * stride_gb + head * stride_gh) + (token * (tl.cast(stride_gs, tl.int64) * ALIGN))[:, None]
            )
            g_at = gate_ptr + g_at + columns(offs_v, stride_gd, COLUMNS)[None, :]
            acc = acc * sigmoid(tl.load(g_at, mask=mask, other=0.0).to(tl.float32))
    h_at = ALIGN * (row * stride_hb + head * stride_hh) + (token * (tl.cast(stride_hs, tl.int64) * ALIGN))[:, None]
    h_at = h_ptr + h_at + columns(offs_v, stride_hd, COLUMNS)[None, :]
    tl.store(h_at, acc.to(h_ptr.dtype.element_ty), mask=mask)
