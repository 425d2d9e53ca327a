"""The chunkwise mLSTM up to its states: gates, keys times their weights, then the state from chunk to chunk.

With b the sums of log forget gates since the chunk began (since a reset in it), token t has the weight e^(b_L − b_t +
i_t) in the state behind the chunk's last token L, and the state before it e^(b_L + m). What is left to the kernel that
goes through a sequence chunk by chunk is GEMMs of keys that are weighted already, with nothing between them.
"""

from __future__ import annotations

from wavecrest.ops.common.device import LOG2_E, magnitude
from wavecrest.ops.common.triton import tl, triton
from wavecrest.ops.mlstm.device import PACKED, dim_offsets, half_range, log_forget, log_input, within

# what the kernel of gates leaves for each token of a chunk and head, float32 [slots, NH, PLANES, CHUNK], exponents of
# two: the sums b as two numbers (their differences are needed, and large sums would lose what differs), the input
# gate's logarithm less the second of them, the largest of b_t − b_j + i_j over j ≤ t; how many resets are up to t
SUMS, REST, LOCAL, TOP, DOCUMENT = (tl.constexpr(plane) for plane in range(5))
PLANES = tl.constexpr(5)
# and the kernel of keys for each chunk and head, float32 [LINKS, slots, NH]: by what the state before it is multiplied
# (−1: a reset takes it away), by what float16's GEMMs of it are, m before and behind it, times log2 e
DECAY, SHARE, BEFORE, BEHIND = (tl.constexpr(link) for link in range(4))
LINKS = 4
# packed sequences, and chunks, that are looked at at a time
SEQUENCES, CHUNKS = tl.constexpr(128), tl.constexpr(32)
LN_2 = tl.constexpr(0.6931471805599453)

# values that do not make the kernels anew when they change
SIZES = [
    "eps", "cap", "norm_eps", "log_scale", "tokens", "heads", "chunks", "sequences", "slots",
    "stride_qb", "stride_qh", "stride_qs", "stride_qd", "stride_kb", "stride_kh", "stride_ks", "stride_kd",
    "stride_vb", "stride_vh", "stride_vs", "stride_vd", "stride_hb", "stride_hh", "stride_hs", "stride_hd",
    "stride_gb", "stride_gh", "stride_gs", "stride_gd", "stride_ib", "stride_ih", "stride_is",
    "stride_fb", "stride_fh", "stride_fs", "stride_cb", "stride_ch", "stride_ck", "stride_cd",
    "stride_nb", "stride_nh", "stride_nk", "stride_mb", "stride_mh", "stride_rb", "stride_rs", "stride_w",
    "stride_cu", "stride_starts", "stride_lens",
]  # fmt: skip


@triton.jit
def first_slot(sequence, begin, chunks, CHUNK: tl.constexpr, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a sequence's chunks begin among all; of packed ones so that none needs to know how long others are."""
    if FORM == PACKED:
        slot = begin // CHUNK + sequence
    else:
        slot = sequence * chunks
    return slot


@triton.jit
def tile_of(rows, cols, stride_s, stride_d, CONTIGUOUS: tl.constexpr, ALIGN: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets of a tile of rows and columns: in 32 bits, unless it is far from its first element to its last."""
    if WIDE:
        stride_s = tl.cast(stride_s, tl.int64)
        stride_d = tl.cast(stride_d, tl.int64)
    found = rows[:, None] * (stride_s * ALIGN)
    if CONTIGUOUS:
        found = found + cols[None, :]
    else:
        found = found + cols[None, :] * stride_d
    return found


@triton.jit
def finite(x):  # type: ignore[no-untyped-def]
    """x, or 0 for −∞: what exponents may be taken relative to."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def _unit(c):  # type: ignore[no-untyped-def]
    """The power of two, from 2^−126 on, that the largest of |c| is 1 to 2 times of; 1 where that is 0 or not finite."""
    bits = tl.max(tl.max(magnitude(c), 1), 0) & 0x7F800000
    bits = tl.where((bits == 0) | (bits == 0x7F800000), 0x3F800000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _decayed(x, decay, RESETS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A state as it is behind a chunk without the chunk's own tokens."""
    x = x * decay
    if RESETS:
        # chosen, not multiplied: what came before may be NaN
        x = tl.where(decay < 0.0, 0.0, x)
    return x


@triton.jit
def _later(decay, top, more, peak):  # type: ignore[no-untyped-def]
    """Two stretches of tokens after each other: their decay and largest exponent; −∞: a reset begins the second."""
    fresh = more == float("-inf")
    # chosen: what came before a reset may be NaN
    top = tl.where(fresh, peak, tl.maximum(top + more, peak))
    return tl.where(fresh, more, decay + more), top


@triton.jit
def _since(fresh, total, reset, more):  # type: ignore[no-untyped-def]
    """Sums that begin anew at resets."""
    return fresh | reset, tl.where(reset != 0, more, total + more)


@triton.jit(do_not_specialize=SIZES)
def _mlstm_gates_kernel(  # type: ignore[no-untyped-def]
    i_ptr, f_ptr, cu_ptr, starts_ptr, lens_ptr, resets_ptr, planes_ptr,
    cap, tokens, heads, chunks, sequences,
    stride_ib, stride_ih, stride_is, stride_fb, stride_fh, stride_fs, stride_rb, stride_rs,
    stride_cu, stride_starts, stride_lens,
    FORM: tl.constexpr, STARTS: tl.constexpr, LENS: tl.constexpr, RESETS: tl.constexpr, CAP: tl.constexpr,
    EXPONENTIAL: tl.constexpr, CHUNK: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """What `PLANES` say of one chunk and head, BLOCK_T tokens at a time."""
    head = (tl.program_id(0) % heads).to(tl.int64)
    slot = (tl.program_id(0) // heads).to(tl.int64)
    if FORM == PACKED:
        # of packed ones the last whose first slot is not behind this one; −1 before all of them. In each kernel, as
        # torch.compile takes pointers that a function gets, and returns what they have, for written
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
    first = begin + (slot - first_slot(sequence, begin, chunks, CHUNK, FORM)) * CHUNK
    cap = tl.cast(cap, tl.float32)
    offs_t = tl.arange(0, BLOCK_T)
    i_ptr += row * stride_ib + head * stride_ih
    f_ptr += row * stride_fb + head * stride_fh
    resets_ptr += row * stride_rb
    planes_ptr += (slot * heads + head) * (PLANES * CHUNK)
    # sums in float64, as differences of them are what counts
    total = tl.cast(0.0, tl.float64)
    peak = tl.cast(float("-inf"), tl.float32)
    document = 0
    behind = tl.minimum(first + CHUNK, end)
    for start in range(first, behind, BLOCK_T):
        token = start + offs_t
        mask_t = token < behind
        lf = log_forget(tl.load(f_ptr + token * stride_fs, mask=mask_t, other=0.0), cap, CAP)
        i = log_input(tl.load(i_ptr + token * stride_is, mask=mask_t, other=0.0), cap, CAP, EXPONENTIAL)
        lf = tl.where(mask_t, lf, 0.0)
        i = tl.where(mask_t, i, float("-inf"))
        wide = lf.to(tl.float64)
        place = (start - first).to(tl.int32) + offs_t
        at = planes_ptr + place
        # behind the last token too: tiles of tokens read what no row sees
        mask_p = place < CHUNK
        decay = lf
        if RESETS:
            fresh = (tl.load(resets_ptr + token * stride_rs, mask=mask_t, other=0) != 0).to(tl.int32)
            count = tl.cumsum(fresh, 0)
            tl.store(at + DOCUMENT * CHUNK, (count + document).to(tl.float32), mask=mask_p)
            document += tl.sum(fresh, 0)
            decay = tl.where(fresh != 0, float("-inf"), lf)
            _, sums = tl.associative_scan((fresh, wide), 0, _since)
            sums = tl.where(count == 0, sums + total, sums)
        else:
            sums = tl.cumsum(wide, 0) + total
        decay, top = tl.associative_scan((decay, i), 0, _later)
        _, top = _later(0.0, peak, decay, top)
        # the last token's, for the tokens after it
        last = offs_t == BLOCK_T - 1
        total = tl.sum(tl.where(last, sums, 0.0), 0)
        peak = tl.sum(tl.where(last, top, 0.0), 0)
        sums = sums * LOG2_E
        high = sums.to(tl.float32)
        rest = (sums - high.to(tl.float64)).to(tl.float32)
        tl.store(at + SUMS * CHUNK, high, mask=mask_p)
        tl.store(at + REST * CHUNK, rest, mask=mask_p)
        tl.store(at + LOCAL * CHUNK, i * LOG2_E - rest, mask=mask_p)
        tl.store(at + TOP * CHUNK, top * LOG2_E, mask=mask_p)


@triton.jit(do_not_specialize=SIZES)
def _mlstm_keys_kernel(  # type: ignore[no-untyped-def]
    k_ptr, m_ptr, cu_ptr, starts_ptr, lens_ptr, planes_ptr, keys_ptr, parts_ptr, links_ptr,
    tokens, heads, chunks, sequences, slots,
    stride_kb, stride_kh, stride_ks, stride_kd, stride_mb, stride_mh, stride_cu, stride_starts, stride_lens,
    FORM: tl.constexpr, STARTS: tl.constexpr, LENS: tl.constexpr, RESETS: tl.constexpr, EXPONENTIAL: tl.constexpr,
    INITIAL: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGN: tl.constexpr, WIDE: tl.constexpr, DK: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Keys times the weights of their tokens behind the chunk, BLOCK_T tokens of one chunk and head.

    Leaves them in keys [B, NH, S, DK] in the dtype of k, their sums in parts [slots, NH, tiles of a chunk, DK] in
    float32, and what `LINKS` say of the chunk. HALF: k is float16, whose range is too small for weights of e^−15: they
    are relative to the largest of the chunk.
    """
    tiles: tl.constexpr = CHUNK // BLOCK_T
    tile = tl.program_id(0) % tiles
    head = ((tl.program_id(0) // tiles) % heads).to(tl.int64)
    slot = (tl.program_id(0) // tiles // heads).to(tl.int64)
    if FORM == PACKED:
        # of packed ones the last whose first slot is not behind this one; −1 before all of them
        sequence = slot * 0 - 1
        for start_n in range(0, sequences, SEQUENCES):
            offs_n = start_n + tl.arange(0, SEQUENCES)
            first_token = tl.load(cu_ptr + offs_n * stride_cu, mask=offs_n < sequences, other=0).to(tl.int64)
            first_token = tl.minimum(tl.maximum(first_token, 0), tl.cast(tokens, tl.int64))
            before_n = (first_token // CHUNK + offs_n <= slot) & (offs_n < sequences)
            sequence += tl.sum(before_n.to(tl.int64), 0)
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
    chunk = (slot - first_slot(sequence, begin, chunks, CHUNK, FORM)).to(tl.int32)
    start = begin + chunk.to(tl.int64) * CHUNK + tile * BLOCK_T
    if start >= end:
        return

    length = (end - begin).to(tl.int32)
    offs_t = tl.arange(0, BLOCK_T)
    offs_k = tl.arange(0, BLOCK_K)
    k_ptr += ALIGN * (row * stride_kb + head * stride_kh + start * stride_ks)
    k_tile = tile_of(offs_t, offs_k, stride_ks, stride_kd, CONTIGUOUS, ALIGN, WIDE)
    stride_kd = tl.cast(stride_kd, tl.int64)
    if CONTIGUOUS:
        stride_kd = 1
    below = (start + offs_t < end)[:, None]
    # on its way while the weights are found, which takes as long
    k = tl.load(k_ptr + k_tile, mask=below & (offs_k < DK)[None, :], other=0.0)
    taken = start + offs_t < end
    at = planes_ptr + (slot * heads + head) * (PLANES * CHUNK)
    last = at + tl.minimum(CHUNK, length - chunk * CHUNK) - 1
    high = tl.load(last + SUMS * CHUNK)
    rest = tl.load(last + REST * CHUNK)
    peak = tl.load(last + TOP * CHUNK)
    at += tile * BLOCK_T + offs_t
    exponent = (high - tl.load(at + SUMS * CHUNK)) + (rest + tl.load(at + LOCAL * CHUNK))
    fresh = False
    if RESETS:
        document = tl.load(last + DOCUMENT * CHUNK)
        fresh = document > 0.0
        # tokens before the last reset have no part in the state behind
        taken = taken & (tl.load(at + DOCUMENT * CHUNK) == document)
    # m behind every chunk up to this one
    m = tl.cast(0.0, tl.float32)
    before = m
    if EXPONENTIAL:
        if INITIAL:
            m = tl.load(m_ptr + sequence * stride_mb + head * stride_mh) * LOG2_E
        planes_ptr += ((slot - chunk) * heads + head) * (PLANES * CHUNK)
        for start_c in range(0, chunk + 1, CHUNKS):
            offs_c = start_c + tl.arange(0, CHUNKS)
            mask_c = offs_c <= chunk
            lasts = planes_ptr + offs_c.to(tl.int64) * heads * (PLANES * CHUNK)
            lasts += tl.minimum(CHUNK, length - offs_c * CHUNK) - 1
            decay = tl.load(lasts + SUMS * CHUNK, mask=mask_c, other=0.0)
            decay += tl.load(lasts + REST * CHUNK, mask=mask_c, other=0.0)
            top = tl.load(lasts + TOP * CHUNK, mask=mask_c, other=float("-inf"))
            if RESETS:
                resets = tl.load(lasts + DOCUMENT * CHUNK, mask=mask_c, other=0.0) > 0.0
                # m of an empty state is 0
                top = tl.where(resets, tl.maximum(decay, top), top)
                decay = tl.where(resets, float("-inf"), decay)
            decay, top = tl.associative_scan((decay, top), 0, _later)
            _, top = _later(0.0, m, decay, top)
            before = tl.where(chunk > start_c, tl.sum(tl.where(offs_c == chunk - 1, top, 0.0), 0), m)
            m = tl.sum(tl.where(offs_c == tl.minimum(chunk, start_c + CHUNKS - 1), top, 0.0), 0)
    base = m
    share = tl.cast(1.0, tl.float32)
    if HALF:
        base = finite(peak)
        # where all input gates are closed there is nothing to take, and m may be as low as a power has no number for
        share = tl.where(peak == float("-inf"), 0.0, tl.exp2(base - m))
    weight = tl.exp2(exponent - base)
    slot = slot * heads + head
    if tile == 0:
        link = tl.cast(slots, tl.int64) * heads
        tl.store(links_ptr + DECAY * link + slot, tl.where(fresh, -1.0, tl.exp2((high + before - m) + rest)))
        tl.store(links_ptr + BEFORE * link + slot, before)
        tl.store(links_ptr + BEHIND * link + slot, m)
        if HALF:
            tl.store(links_ptr + SHARE * link + slot, share)
    keys_ptr += ((row * heads + head) * tokens + start) * DK
    parts_ptr += (slot * tiles + tile) * DK
    for part in tl.static_range(0, DK, BLOCK_K):
        mask_k = part + offs_k < DK
        if part > 0:
            k = tl.load(k_ptr + part * stride_kd + k_tile, mask=below & mask_k[None, :], other=0.0)
        # what is not taken is chosen away: its weight may be NaN
        weighted = tl.where(taken[:, None], tl.cast(k, tl.float32) * weight[:, None], 0.0)
        keys = weighted.to(keys_ptr.dtype.element_ty)
        tl.store(keys_ptr + offs_t[:, None] * DK + (part + offs_k)[None, :], keys, mask=below & mask_k[None, :])
        tl.store(parts_ptr + part + offs_k, tl.sum(weighted, 0) * share, mask=mask_k)


@triton.jit(do_not_specialize=SIZES)
def _mlstm_states_kernel(  # type: ignore[no-untyped-def]
    keys_ptr, v_ptr, c_ptr, n_ptr, m_ptr, cu_ptr, starts_ptr, lens_ptr, planes_ptr, parts_ptr, links_ptr,
    states_ptr, scales_ptr, vectors_ptr, c_new_ptr, n_new_ptr, m_new_ptr,
    tokens, heads, chunks, sequences, slots,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_cb, stride_ch, stride_ck, stride_cd,
    stride_nb, stride_nh, stride_nk, stride_mb, stride_mh, stride_cu, stride_starts, stride_lens,
    FORM: tl.constexpr, STARTS: tl.constexpr, LENS: tl.constexpr, RESETS: tl.constexpr,
    EXPONENTIAL: tl.constexpr, INITIAL: tl.constexpr, LAST: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGN: tl.constexpr,
    WIDE: tl.constexpr, C_CONTIGUOUS: tl.constexpr, C_ALIGN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_K, BLOCK_V] of the state of one sequence and head, BLOCK_T tokens at a time; or its n.

    Stores it in the dtype of k as it is before each chunk (the first only with INITIAL), n likewise in float32; with
    LAST the state behind the last token. PARTS: tiles of a chunk that the kernel of keys has summed. HALF: products
    have the unit of their chunk, and stored tiles are relative to a power of two, which is in scales [slots, NH, tiles
    of DK, tiles of DV].
    """
    # n of sequence after sequence first: one chunk waits for the other there all along
    vectors = sequences * heads
    tiles_v = tl.cdiv(DV, BLOCK_V)
    place = tl.program_id(0) - vectors
    tile_v = place % tiles_v
    tile_k = (place // tiles_v) % tl.cdiv(DK, BLOCK_K)
    index = tl.where(place < 0, tl.program_id(0), place // tiles_v // tl.cdiv(DK, BLOCK_K))
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
    length = (end - begin).to(tl.int32)
    count = tl.cdiv(length, CHUNK)
    slot = first_slot(sequence, begin, chunks, CHUNK, FORM) * heads + head
    link = tl.cast(slots, tl.int64) * heads
    links_ptr += slot
    if place < 0:
        offs_p = tl.arange(0, BLOCK_P)
        offs_n = tl.arange(0, BLOCK_N)
        for part in range(0, DK, BLOCK_N):
            mask_n = part + offs_n < DK
            n = tl.zeros([BLOCK_N], tl.float32)
            if INITIAL:
                n_at = sequence * stride_nb + head * stride_nh + (part + offs_n).to(tl.int64) * stride_nk
                n = tl.load(n_ptr + n_at, mask=mask_n, other=0.0)
            for chunk in range(count):
                at = slot + tl.cast(chunk, tl.int64) * heads
                written = (chunk * CHUNK + offs_p * (CHUNK // PARTS) < length) & (offs_p < PARTS)
                summed = parts_ptr + at * (PARTS * DK) + part + offs_p[:, None] * DK + offs_n[None, :]
                more = tl.load(summed, mask=written[:, None] & mask_n[None, :], other=0.0)
                decay = tl.load(links_ptr + DECAY * link + tl.cast(chunk, tl.int64) * heads)
                tl.store(vectors_ptr + at * DK + part + offs_n, n, mask=mask_n)
                n = _decayed(n, decay, RESETS) + tl.sum(more, 0)
            if LAST:
                tl.store(n_new_ptr + (sequence * heads + head) * DK + part + offs_n, n, mask=mask_n)
        if LAST and EXPONENTIAL:
            m = tl.cast(0.0, tl.float32)
            if INITIAL:
                m = tl.load(m_ptr + sequence * stride_mb + head * stride_mh)
            if count > 0:
                m = tl.load(links_ptr + BEHIND * link + tl.cast(count - 1, tl.int64) * heads) * LN_2
            tl.store(m_new_ptr + sequence * heads + head, m)
        return

    offs_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    offs_v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    offs_t = tl.arange(0, BLOCK_T)
    mask_k = offs_k < DK
    mask_v = offs_v < DV
    mask_c = mask_k[:, None] & mask_v[None, :]
    c = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if INITIAL:
        c_at = C_ALIGN * (sequence * stride_cb + head * stride_ch + offs_k.to(tl.int64) * stride_ck)
        c_at = c_at[:, None] + dim_offsets(offs_v, stride_cd, C_CONTIGUOUS)[None, :]
        c = tl.load(c_ptr + c_at, mask=mask_c, other=0.0).to(tl.float32)
    keys_ptr += ((row * heads + head) * tokens + begin) * DK
    v_ptr += ALIGN * (row * stride_vb + head * stride_vh + begin * stride_vs)
    k_tile = offs_t[:, None] * DK + offs_k[None, :]
    v_tile = tile_of(offs_t, offs_v, stride_vs, stride_vd, CONTIGUOUS, ALIGN, WIDE)
    stride_vs = tl.cast(stride_vs, tl.int64) * ALIGN
    planes_ptr += (slot * PLANES + DOCUMENT) * CHUNK
    c_tile = offs_k[:, None] * DV + offs_v[None, :]
    # GEMMs of the chunk at hand, where they have a unit of their own
    more = c
    share = tl.cast(1.0, tl.float32)
    decay = share
    if HALF:
        more = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if length > 0:
        # of the next chunk, before it is needed
        decay = tl.load(links_ptr + DECAY * link)
    for done in range(0, length, BLOCK_T):
        if done % CHUNK == 0:
            if HALF:
                if done > 0:
                    c = _decayed(c, decay, RESETS) + share * more
                    more = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
                decay = tl.load(links_ptr + DECAY * link + tl.cast(done // CHUNK, tl.int64) * heads)
                share = tl.load(links_ptr + SHARE * link + tl.cast(done // CHUNK, tl.int64) * heads)
            if INITIAL or done > 0:
                at = slot + tl.cast(done // CHUNK, tl.int64) * heads
                if HALF:
                    unit = _unit(c)
                    scale_at = (at * tl.cdiv(DK, BLOCK_K) + tile_k) * tiles_v + tile_v
                    tl.store(scales_ptr + scale_at, unit)
                    stored = c / unit
                else:
                    stored = c
                stored = stored.to(states_ptr.dtype.element_ty)
                if DK % BLOCK_K != 0 or DV % BLOCK_V != 0:
                    tl.store(states_ptr + at * (DK * DV) + c_tile, stored, mask=mask_c)
                else:
                    tl.store(states_ptr + at * (DK * DV) + c_tile, stored)
            if not HALF:
                c = _decayed(c, decay, RESETS)
                following = tl.minimum(done // CHUNK + 1, count - 1)
                decay = tl.load(links_ptr + DECAY * link + tl.cast(following, tl.int64) * heads)
        taken = offs_t < length - done
        at = tl.cast(done, tl.int64)
        mask = taken[:, None]
        if DK % BLOCK_K != 0:
            mask = mask & mask_k[None, :]
        k = tl.load(keys_ptr + at * DK + k_tile, mask=mask, other=0.0)
        if RESETS:
            # keys of what is not taken are 0, values may be NaN
            chunk = done // CHUNK
            planes = planes_ptr + tl.cast(chunk, tl.int64) * heads * (PLANES * CHUNK)
            document = tl.load(planes + done % CHUNK + offs_t)
            taken = taken & (document == tl.load(planes + tl.minimum(CHUNK, length - chunk * CHUNK) - 1))
        mask = taken[:, None]
        if DV % BLOCK_V != 0:
            mask = mask & mask_v[None, :]
        v = tl.load(v_ptr + at * stride_vs + v_tile, mask=mask, other=0.0)
        if HALF:
            more = tl.dot(tl.trans(k), v, more, out_dtype=tl.float32)
        else:
            c = tl.dot(tl.trans(k), v, c, input_precision=PRECISION, out_dtype=tl.float32)
    if HALF:
        c = tl.where(length > 0, _decayed(c, decay, RESETS) + share * more, c)
    if LAST:
        c = half_range(c, c_new_ptr.dtype.element_ty)
        at = sequence * heads + head
        tl.store(c_new_ptr + at * (DK * DV) + c_tile, c.to(c_new_ptr.dtype.element_ty), mask=mask_c)
