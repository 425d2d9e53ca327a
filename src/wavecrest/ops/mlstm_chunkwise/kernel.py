"""The chunkwise mLSTM in three kernels: gates, states from chunk to chunk, then all chunks at once.

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
    within,
)
from wavecrest.ops._triton import tl, triton

# what the kernel of gates leaves for each token and head, float32 [PLANES, B, NH, S]: the sums b as two numbers (their
# differences are needed, and large sums would lose what differs), the input gate's logarithm less the second of them,
# the weight of the token in the state behind its tile, relative to the tile's largest (−1: a reset behind it takes it
# away); with resets how many of them the chunk has up to the token, and the sum of log forget gates since the last
SUMS, REST, LOCAL, WEIGHT, DOCUMENT, SINCE = (tl.constexpr(plane) for plane in range(6))
PLANES, RESET_PLANES = 4, 6
# and for each tile of tokens, [TILES, slots, tiles of a chunk, NH]: by what exponent the state before it decays, the
# largest exponent of its weights, whether it has a reset
DECAY, PEAK, FRESH = (tl.constexpr(plane) for plane in range(3))
TILES = 3
# packed sequences that are looked at at a time
SEQUENCES = tl.constexpr(128)

# values that do not make the kernels anew when they change
SIZES = [
    "eps", "cap", "norm_eps", "scale", "batch", "tokens", "heads", "chunks", "sequences", "slots",
    "stride_qb", "stride_qh", "stride_qs", "stride_qd", "stride_kb", "stride_kh", "stride_ks", "stride_kd",
    "stride_vb", "stride_vh", "stride_vs", "stride_vd", "stride_hb", "stride_hh", "stride_hs", "stride_hd",
    "stride_gb", "stride_gh", "stride_gs", "stride_gd", "stride_ib", "stride_ih", "stride_is",
    "stride_fb", "stride_fh", "stride_fs", "stride_cb", "stride_ch", "stride_ck", "stride_cd",
    "stride_nb", "stride_nh", "stride_nk", "stride_mb", "stride_mh", "stride_rb", "stride_rs", "stride_w",
    "stride_cu", "stride_starts", "stride_lens",
]  # fmt: skip


@triton.jit
def _first_slot(sequence, begin, chunks, CHUNK: tl.constexpr, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a sequence's chunks begin among all; of packed ones so that none needs to know how long others are."""
    if FORM == PACKED:
        slot = begin // CHUNK + sequence
    else:
        slot = sequence * chunks
    return slot


@triton.jit
def _tile(rows, cols, stride_s, stride_d, COLUMNS: tl.constexpr, ALIGN: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets of a tile of rows and columns: in 32 bits, unless it is far from its first element to its last."""
    if WIDE:
        stride_s = tl.cast(stride_s, tl.int64)
        stride_d = tl.cast(stride_d, tl.int64)
    found = rows[:, None] * (stride_s * ALIGN)
    if COLUMNS:
        found = found + cols[None, :]
    else:
        found = found + cols[None, :] * stride_d
    return found


@triton.jit
def _load(at, mask, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile, 0 where there is no column; COLS: there may be none."""
    if COLS:
        tile = tl.load(at, mask=mask[None, :], other=0.0)
    else:
        tile = tl.load(at)
    return tile


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
def _mlstm_gates_kernel(  # type: ignore[no-untyped-def]
    i_ptr, f_ptr, cu_ptr, starts_ptr, lens_ptr, resets_ptr, planes_ptr, tiles_ptr,
    cap, batch, tokens, heads, chunks, sequences, slots,
    stride_ib, stride_ih, stride_is, stride_fb, stride_fh, stride_fs, stride_rb, stride_rs,
    stride_cu, stride_starts, stride_lens,
    FORM: tl.constexpr, STARTS: tl.constexpr, LENS: tl.constexpr, RESETS: tl.constexpr, CAP: tl.constexpr,
    EXPONENTIAL: tl.constexpr, CHUNK: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """What `PLANES` and `TILES` say of one chunk and head."""
    head = (tl.program_id(0) % heads).to(tl.int64)
    slot = (tl.program_id(0) // heads).to(tl.int64)
    if FORM == PACKED:
        # of packed ones the last whose first slot is not behind this one
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
        begin = tl.load(cu_ptr + sequence * stride_cu).to(tl.int64)
        end = tl.load(cu_ptr + (sequence + 1) * stride_cu).to(tl.int64)
    if STARTS:
        begin = tl.load(starts_ptr + sequence * stride_starts).to(tl.int64)
    if LENS:
        end = begin + tl.load(lens_ptr + sequence * stride_lens).to(tl.int64)
    begin, end = within(begin, end, tokens, FORM)
    first = begin + (slot - _first_slot(sequence, begin, chunks, CHUNK, FORM)) * CHUNK
    cap = tl.cast(cap, tl.float32)
    offs_t = tl.arange(0, BLOCK_T)
    i_ptr += row * stride_ib + head * stride_ih
    f_ptr += row * stride_fb + head * stride_fh
    resets_ptr += row * stride_rb
    plane = tl.cast(batch, tl.int64) * heads * tokens
    planes_ptr += (row * heads + head) * tokens
    tiles_ptr += slot * (CHUNK // BLOCK_T) * heads + head
    tiles_plane = tl.cast(slots, tl.int64) * (CHUNK // BLOCK_T) * heads
    # the sum since the chunk began in float64, as differences of it are what counts; that since the last reset
    total = tl.cast(0.0, tl.float64)
    since = tl.cast(0.0, tl.float32)
    document = 0
    for start in range(first, tl.minimum(first + CHUNK, end), BLOCK_T):
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
        sums = tl.cumsum(lf.to(tl.float64), 0) + total
        total += tl.sum(lf.to(tl.float64), 0)
        high = sums.to(tl.float32)
        at = planes_ptr + token
        rest = (sums - high.to(tl.float64)).to(tl.float32)
        tl.store(at + SUMS * plane, high, mask=mask_t)
        tl.store(at + REST * plane, rest, mask=mask_t)
        tl.store(at + LOCAL * plane, i - rest, mask=mask_t)
        tile_at = tiles_ptr + (start - first) // BLOCK_T * heads
        if RESETS:
            fresh = (tl.load(resets_ptr + token * stride_rs, mask=mask_t, other=0) != 0).to(tl.int32)
            count = tl.cumsum(fresh, 0)
            resets = tl.sum(fresh, 0)
            same = (count[:, None] == count[None, :]) & (offs_t[:, None] >= offs_t[None, :])
            own = tl.sum(tl.where(same, lf[None, :], 0.0), 1) + tl.where(count == 0, since, 0.0)
            tl.store(at + DOCUMENT * plane, (count + document).to(tl.float32), mask=mask_t)
            tl.store(at + SINCE * plane, own, mask=mask_t)
            tl.store(tile_at + FRESH * tiles_plane, (resets > 0).to(tl.float32))
            # tokens before the last reset have no part in the state behind
            taken = count == resets
            decay = tl.sum(tl.where(taken, lf, 0.0), 0)
            since = tl.where(resets > 0, decay, since + decay)
            document += resets
            weight = tl.where(taken, weight, float("-inf"))
        peak = tl.max(weight, 0)
        weight = exp(weight - _finite(peak))
        if RESETS:
            weight = tl.where(taken, weight, -1.0)
        tl.store(at + WEIGHT * plane, weight, mask=mask_t)
        tl.store(tile_at + DECAY * tiles_plane, decay)
        tl.store(tile_at + PEAK * tiles_plane, peak)


@triton.jit(do_not_specialize=SIZES)
def _mlstm_states_kernel(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, c_ptr, n_ptr, m_ptr, cu_ptr, starts_ptr, lens_ptr, planes_ptr, tiles_ptr,
    states_ptr, scales_ptr, vectors_ptr, tops_ptr, c_new_ptr, n_new_ptr, m_new_ptr,
    batch, tokens, heads, chunks, slots,
    stride_kb, stride_kh, stride_ks, stride_kd, stride_vb, stride_vh, stride_vs, stride_vd,
    stride_cb, stride_ch, stride_ck, stride_cd, stride_nb, stride_nh, stride_nk, stride_mb, stride_mh,
    stride_cu, stride_starts, stride_lens,
    FORM: tl.constexpr, STARTS: tl.constexpr, LENS: tl.constexpr, RESETS: tl.constexpr,
    EXPONENTIAL: tl.constexpr, INITIAL: tl.constexpr, LAST: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr,
    WIDE: tl.constexpr, C_COLUMNS: tl.constexpr, C_ALIGN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_K, BLOCK_V] of the state of one sequence and head, BLOCK_T tokens at a time.

    Stores it in the dtype of k as it is before each chunk (the first only with INITIAL), n and m likewise in float32;
    with LAST the state behind the last token. HALF: k is float16, whose range is too small for weights of e^−15 and for
    large states: weights are multiplied relative to the largest of a tile, and stored tiles are relative to a power of
    two, which is in scales [slots, NH, tiles of DK, tiles of DV].
    """
    tiles_v = tl.cdiv(DV, BLOCK_V)
    tile_v = tl.program_id(0) % tiles_v
    tile_k = (tl.program_id(0) // tiles_v) % tl.cdiv(DK, BLOCK_K)
    index = tl.program_id(0) // tiles_v // tl.cdiv(DK, BLOCK_K)
    head = (index % heads).to(tl.int64)
    sequence = (index // heads).to(tl.int64)
    row = sequence
    begin = tl.cast(0, tl.int64)
    end = tl.cast(tokens, tl.int64)
    if FORM == PACKED:
        row = sequence * 0
        begin = tl.load(cu_ptr + sequence * stride_cu).to(tl.int64)
        end = tl.load(cu_ptr + (sequence + 1) * stride_cu).to(tl.int64)
    if STARTS:
        begin = tl.load(starts_ptr + sequence * stride_starts).to(tl.int64)
    if LENS:
        end = begin + tl.load(lens_ptr + sequence * stride_lens).to(tl.int64)
    begin, end = within(begin, end, tokens, FORM)
    offs_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    offs_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    offs_t = tl.arange(0, BLOCK_T)
    mask_k = offs_k < DK
    mask_v = offs_v < DV
    mask_c = mask_k[:, None] & mask_v[None, :]
    c = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    n = tl.zeros([BLOCK_K], tl.float32)
    m = tl.cast(0.0, tl.float32)
    if INITIAL:
        wide_k = offs_k.to(tl.int64)
        c_at = C_ALIGN * (sequence * stride_cb + head * stride_ch + wide_k * stride_ck)
        c_at = c_at[:, None] + columns(offs_v, stride_cd, C_COLUMNS)[None, :]
        c = tl.load(c_ptr + c_at, mask=mask_c, other=0.0).to(tl.float32)
        n = tl.load(n_ptr + sequence * stride_nb + head * stride_nh + wide_k * stride_nk, mask=mask_k, other=0.0)
        if EXPONENTIAL:
            m = tl.load(m_ptr + sequence * stride_mb + head * stride_mh)
    k_ptr += ALIGN * (row * stride_kb + head * stride_kh)
    v_ptr += ALIGN * (row * stride_vb + head * stride_vh)
    k_tile = _tile(offs_t, offs_k, stride_ks, stride_kd, COLUMNS, ALIGN, WIDE)
    v_tile = _tile(offs_t, offs_v, stride_vs, stride_vd, COLUMNS, ALIGN, WIDE)
    stride_ks = tl.cast(stride_ks, tl.int64) * ALIGN
    stride_vs = tl.cast(stride_vs, tl.int64) * ALIGN
    plane = tl.cast(batch, tl.int64) * heads * tokens
    planes_ptr += (row * heads + head) * tokens
    tiles_plane = tl.cast(slots, tl.int64) * (CHUNK // BLOCK_T) * heads
    first = _first_slot(sequence, begin, chunks, CHUNK, FORM)
    c_tile = offs_k[:, None] * DV + offs_v[None, :]
    for start in range(begin, end, BLOCK_T):
        at = tl.cast(start, tl.int64)
        done = at - begin
        kept = done % CHUNK == 0
        if not INITIAL:
            kept = kept & (done > 0)
        slot = (first + done // CHUNK) * heads + head
        if HALF:
            if kept:
                unit = _unit(c)
                tl.store(states_ptr + slot * (DK * DV) + c_tile, (c / unit).to(tl.float16), mask=mask_c)
                scale_at = (slot * tl.cdiv(DK, BLOCK_K) + tile_k) * tiles_v + tile_v
                tl.store(scales_ptr + scale_at, unit)
        else:
            tl.store(states_ptr + slot * (DK * DV) + c_tile, c.to(states_ptr.dtype.element_ty), mask=mask_c & kept)
        if tile_v == 0:
            tl.store(vectors_ptr + slot * DK + offs_k, n, mask=mask_k & kept)
            if tile_k == 0:
                tl.store(tops_ptr + slot, m, mask=kept)
        tile_at = tiles_ptr + (first * (CHUNK // BLOCK_T) + done // BLOCK_T) * heads + head
        decay = tl.load(tile_at + DECAY * tiles_plane)
        peak = tl.load(tile_at + PEAK * tiles_plane)
        taken = offs_t < end - start
        weight = tl.load(planes_ptr + WEIGHT * plane + at + offs_t, mask=taken, other=0.0)
        if RESETS:
            # NaN is taken; what is not may be NaN, so that it is not read
            taken = taken & ((weight < 0.0) == 0)
            weight = tl.where(taken, weight, 0.0)
            # chosen, not multiplied: what came before may be NaN
            fresh = tl.load(tile_at + FRESH * tiles_plane) > 0.0
            c = tl.where(fresh, 0.0, c)
            n = tl.where(fresh, 0.0, n)
            m = tl.where(fresh, 0.0, m)
        base = _finite(peak)
        if EXPONENTIAL:
            top = tl.maximum(decay + m, peak)
            decay = decay + m - top
            base = base - top
            m = top
        decay = exp(decay)
        share = exp(base)
        k = tl.load(k_ptr + at * stride_ks + k_tile, mask=taken[:, None] & mask_k[None, :], other=0.0)
        v = tl.load(v_ptr + at * stride_vs + v_tile, mask=taken[:, None] & mask_v[None, :], other=0.0)
        if HALF:
            weighted = k.to(tl.float32) * weight[:, None]
            c = c * decay + share * tl.dot(tl.trans(weighted.to(v.dtype)), v, out_dtype=tl.float32)
            n = n * decay + share * tl.sum(weighted, 0)
        else:
            weighted = k.to(tl.float32) * (weight * share)[:, None]
            c = tl.dot(tl.trans(weighted.to(v.dtype)), v, c * decay, input_precision="ieee", out_dtype=tl.float32)
            n = n * decay + tl.sum(weighted, 0)
    if LAST:
        at = sequence * heads + head
        c = half_range(c, c_new_ptr.dtype.element_ty)
        tl.store(c_new_ptr + at * (DK * DV) + c_tile, c.to(c_new_ptr.dtype.element_ty), mask=mask_c)
        if tile_v == 0:
            tl.store(n_new_ptr + at * DK + offs_k, n, mask=mask_k)
            if EXPONENTIAL and tile_k == 0:
                tl.store(m_new_ptr + at, m)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    acc, den, top, q, q_ptr, k_ptr, v_ptr, planes_ptr, place, rows, plane, high, rest, document, q_tile, k_tile, v_tile,
    mask_v, stride_qd, stride_kd, stride_ks, stride_vs, scale,
    OWN: tl.constexpr, RESETS: tl.constexpr, EXPONENTIAL: tl.constexpr, HALF: tl.constexpr, ONE: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Let the tile of tokens at `place` pass: (sums, their weights' total, the largest exponent so far) of each token.

    OWN: it is the tokens' own tile, where each sees those up to itself; `rows` of it are those that there are.
    """
    offs_k = tl.arange(0, BLOCK_K)
    offs_t = tl.arange(0, BLOCK_T)
    s = tl.zeros([BLOCK_T, BLOCK_T], tl.float32)
    for part in range(0, DK, BLOCK_K):
        mask_k = part + offs_k < DK
        if ONE:
            some = q
        else:
            some = _load(q_ptr + part * stride_qd + q_tile, mask_k, DK % BLOCK_K != 0)
        k_at = k_ptr + (place * stride_ks + part * stride_kd) + k_tile
        k = _load(k_at, mask_k, DK % BLOCK_K != 0)
        s = tl.dot(some, tl.trans(k), s, input_precision="ieee", out_dtype=tl.float32)
    at = planes_ptr + place + rows
    high_j = tl.load(at + SUMS * plane)
    local_j = tl.load(at + LOCAL * plane)
    d = (high[:, None] - high_j[None, :]) + (rest[:, None] + local_j[None, :])
    # never; it makes the compiler lay exponents out as scores are, a row in few lanes, instead of taking scores apart
    d = tl.where(scale < 0.0, s, d)
    if OWN or RESETS:
        if OWN:
            seen = offs_t[:, None] >= offs_t[None, :]
        if RESETS:
            document_j = tl.load(at + DOCUMENT * plane)
            same = document[:, None] == document_j[None, :]
            if OWN:
                seen = seen & same
            else:
                seen = same
        d = tl.where(seen, d, float("-inf"))
    if EXPONENTIAL:
        top_now = tl.maximum(top, tl.max(d, 1))
        shrink = exp(top - top_now)
        acc = acc * shrink[:, None]
        den = den * shrink
        d = d - top_now[:, None]
        top = top_now
    if HALF:
        base = _finite(tl.max(d, 1))
        d = d - base[:, None]
    p = s * scale * exp(d)
    if OWN or RESETS:
        # what is not seen is chosen away: a product of it may be infinite. Asked of d again, as masks that wait take
        # scalar registers
        p = tl.where(d == float("-inf"), 0.0, p)
    v = _load(v_ptr + place * stride_vs + v_tile, mask_v, DV % BLOCK_V != 0)
    if HALF:
        acc += exp(base)[:, None] * tl.dot(p.to(v.dtype), v, out_dtype=tl.float32)
        den += exp(base) * tl.sum(p, 1)
    else:
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee", out_dtype=tl.float32)
        den += tl.sum(p, 1)
    return acc, den, top


@triton.jit(do_not_specialize=SIZES)
def _mlstm_chunks_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, states_ptr, scales_ptr, vectors_ptr, tops_ptr, planes_ptr, cu_ptr, starts_ptr, lens_ptr,
    weight_ptr, gate_ptr, h_ptr,
    eps, norm_eps, scale, batch, tokens, heads, chunks, sequences,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_hb, stride_hh, stride_hs, stride_hd,
    stride_gb, stride_gh, stride_gs, stride_gd, stride_w, stride_cu, stride_starts, stride_lens,
    FORM: tl.constexpr, STARTS: tl.constexpr, LENS: tl.constexpr, RESETS: tl.constexpr, EXPONENTIAL: tl.constexpr,
    NORMALIZE: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, INITIAL: tl.constexpr, COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr, WIDE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, STATE_K: tl.constexpr, STATE_V: tl.constexpr,
    HALF: tl.constexpr,
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
    if FORM == PACKED:
        # of packed ones the last whose first slot is not behind this one
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
        begin = tl.load(cu_ptr + sequence * stride_cu).to(tl.int64)
        end = tl.load(cu_ptr + (sequence + 1) * stride_cu).to(tl.int64)
    if STARTS:
        begin = tl.load(starts_ptr + sequence * stride_starts).to(tl.int64)
    if LENS:
        end = begin + tl.load(lens_ptr + sequence * stride_lens).to(tl.int64)
    begin, end = within(begin, end, tokens, FORM)
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
    # rows that are no tokens take the last one's: without masks, which would be kept in scalar registers; a token sees
    # none of them, and their own results are not stored
    rows = tl.minimum(offs_t, (end - 1 - start).to(tl.int32))
    q_tile = _tile(rows, offs_k, stride_qs, stride_qd, COLUMNS, ALIGN, WIDE)
    k_tile = _tile(offs_t, offs_k, stride_ks, stride_kd, COLUMNS, ALIGN, WIDE)
    v_tile = _tile(offs_t, offs_v, stride_vs, stride_vd, COLUMNS, ALIGN, WIDE)
    stride_k = stride_ks
    stride_v = stride_vs
    stride_ks = tl.cast(stride_ks, tl.int64) * ALIGN
    stride_vs = tl.cast(stride_vs, tl.int64) * ALIGN
    stride_qd = tl.cast(stride_qd, tl.int64)
    stride_kd = tl.cast(stride_kd, tl.int64)
    if COLUMNS:
        stride_qd = 1
        stride_kd = 1
    q_ptr += ALIGN * (row * stride_qb + head * stride_qh + start * stride_qs)
    k_ptr += ALIGN * (row * stride_kb + head * stride_kh)
    v_ptr += ALIGN * (row * stride_vb + head * stride_vh)
    plane = tl.cast(batch, tl.int64) * heads * tokens
    planes_ptr += (row * heads + head) * tokens
    at = planes_ptr + start + rows
    high = tl.load(at + SUMS * plane)
    rest = tl.load(at + REST * plane)
    slot = slot * heads + head

    ONE: tl.constexpr = BLOCK_K >= DK
    q = 0.0
    if ONE:
        q = _load(q_ptr + q_tile, offs_k < DK, DK % BLOCK_K != 0)
    acc = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    den = tl.zeros([BLOCK_T], tl.float32)
    # what the state before the chunk has for them; there is none before the first chunk of a sequence that begins
    top = high + rest
    until = DK
    if not INITIAL:
        until = tl.where(chunk > 0, DK, 0)
    if EXPONENTIAL:
        if INITIAL:
            m = tl.load(tops_ptr + slot)
        else:
            m = tl.load(tops_ptr + slot, mask=chunk > 0, other=0.0)
        top = (high + m) + rest
    states_ptr += slot * (DK * DV)
    c_tile = offs_k[:, None] * DV + offs_v[None, :]
    for part in range(0, until, BLOCK_K):
        mask_k = part + offs_k < DK
        if ONE:
            some = q
        else:
            some = _load(q_ptr + part * stride_qd + q_tile, mask_k, DK % BLOCK_K != 0)
        mask_c = mask_k[:, None] & mask_v[None, :]
        if DK % BLOCK_K != 0 or DV % BLOCK_V != 0:
            c = tl.load(states_ptr + part * DV + c_tile, mask=mask_c, other=0.0)
        else:
            c = tl.load(states_ptr + part * DV + c_tile)
        n = tl.load(vectors_ptr + slot * DK + part + offs_k, mask=mask_k, other=0.0)
        if HALF:
            scale_at = (slot * tl.cdiv(DK, STATE_K) + part // STATE_K) * tl.cdiv(DV, STATE_V)
            unit = tl.load(scales_ptr + scale_at + offs_v // STATE_V, mask=mask_v, other=0.0)
            acc += unit[None, :] * tl.dot(some, c, out_dtype=tl.float32)
        else:
            acc = tl.dot(some, c, acc, input_precision="ieee", out_dtype=tl.float32)
        den += tl.sum(tl.cast(some, tl.float32) * n[None, :], 1)
    kept = tl.full([BLOCK_T], 1.0, tl.float32) * scale
    if not EXPONENTIAL:
        kept = exp(top) * scale
    acc = acc * kept[:, None]
    den = den * kept
    document = high
    if RESETS:
        document = tl.load(at + DOCUMENT * plane)
        # chosen, not multiplied: what came before may be NaN
        acc = tl.where((document == 0.0)[:, None], acc, 0.0)
        den = tl.where(document == 0.0, den, 0.0)
        top = tl.where(document == 0.0, top, tl.load(at + SINCE * plane))

    k_own = _tile(rows, offs_k, stride_k, stride_kd, COLUMNS, ALIGN, WIDE)
    v_own = _tile(rows, offs_v, stride_v, stride_vd, COLUMNS, ALIGN, WIDE)
    for other in range(first, start, BLOCK_T):
        acc, den, top = _attend(
            acc, den, top, q, q_ptr, k_ptr, v_ptr, planes_ptr, tl.cast(other, tl.int64), offs_t, plane, high, rest,
            document, q_tile, k_tile, v_tile, mask_v, stride_qd, stride_kd, stride_ks, stride_vs, scale,
            False, RESETS, EXPONENTIAL, HALF, ONE, DK, DV, BLOCK_T, BLOCK_K, BLOCK_V,
        )  # fmt: skip
    acc, den, top = _attend(
        acc, den, top, q, q_ptr, k_ptr, v_ptr, planes_ptr, start, rows, plane, high, rest,
        document, q_tile, k_own, v_own, mask_v, stride_qd, stride_kd, stride_ks, stride_vs, scale,
        True, RESETS, EXPONENTIAL, HALF, ONE, DK, DV, BLOCK_T, BLOCK_K, BLOCK_V,
    )  # fmt: skip

    if NORMALIZE:
        acc = acc / denominator(den, top, eps, EXPONENTIAL)[:, None]
    # made anew: the compiler would keep rows and masks in registers all along
    below = tl.arange(0, BLOCK_T)
    mask = (below < end - start)[:, None] & mask_v[None, :]
    if NORM:
        acc = layer_norm(acc, mask, DV, tl.cast(norm_eps, tl.float32))
        w = tl.load(weight_ptr + ((head * DV + offs_v) * stride_w)[None, :], mask=mask_v[None, :], other=0.0)
        acc = acc * w.to(tl.float32)
        if GATE:
            gate_ptr += ALIGN * (row * stride_gb + head * stride_gh + start * stride_gs)
            g = tl.load(gate_ptr + _tile(below, offs_v, stride_gs, stride_gd, COLUMNS, ALIGN, WIDE), mask=mask)
            acc = acc * sigmoid(g.to(tl.float32))
    h_ptr += ALIGN * (row * stride_hb + head * stride_hh + start * stride_hs)
    h_tile = _tile(below, offs_v, stride_hs, stride_hd, COLUMNS, ALIGN, WIDE)
    tl.store(h_ptr + h_tile, acc.to(h_ptr.dtype.element_ty), mask=mask)
