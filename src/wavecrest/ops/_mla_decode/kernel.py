"""Attention in the latent space of MLA: every head of a sequence reads one row of R + Dr numbers a key.

The first R columns of a row are its latent, which is both the key of the absorbed query and the value, so that a tile
of latents is loaded once for both GEMMs; the last Dr are the key's rotary part (DeepSeek-V2, 2024, section 2.1). Heads
and queries of a sequence are the rows of one matrix. Keys are split over programs as in Flash-Decoding (Dao, Haziza,
Massa and Sizov, 2023), and the partial results are combined in the order of the splits.
"""

from __future__ import annotations

from wavecrest.ops.common.device import LOG2_E, pdl_launch_dependents, pdl_wait, remap_xcd
from wavecrest.ops.common.triton import reciprocal, tl, triton

LN_2 = tl.constexpr(0.6931471805599453)
# styles: which columns of the rotary part are a pair
NEOX, GPTJ = tl.constexpr(1), tl.constexpr(2)

# arguments whose values do not specialize a kernel
SIZES = [
    "scale", "cap", "seqlen_q", "heads", "page_size", "splits", "granularity", "blocks", "table_rows",
    "stride_qb", "stride_qt", "stride_qh", "stride_rb", "stride_rt", "stride_rh", "stride_cp", "stride_tb",
    "stride_len", "stride_cos", "stride_sin", "stride_pb", "stride_pt",
]  # fmt: skip


@triton.jit
def _rotated(  # type: ignore[no-untyped-def]
    x, x_ptr, x_at, mask, offs, place, table_rows, cos_ptr, sin_ptr, stride_cos, stride_sin, Dr,
    STYLE: tl.constexpr,
):  # fmt: skip
    """Rows of the rotary part turned by the angles of their positions; NaN where a position is not in the table."""
    if STYLE == NEOX:
        half = Dr // 2
        first = offs < half
        column = offs % half
        other = tl.where(first, offs + half, offs - half)
    else:
        first = offs % 2 == 0
        column = offs // 2
        other = offs ^ 1
    known = ((place >= 0) & (place < table_rows))[:, None] & mask
    rows = place.to(tl.int64)[:, None]
    cos = tl.load(cos_ptr + rows * stride_cos + column[None, :], mask=known, other=float("nan")).to(tl.float32)
    sin = tl.load(sin_ptr + rows * stride_sin + column[None, :], mask=known, other=float("nan")).to(tl.float32)
    partner = tl.load(x_ptr + x_at[:, None] + other[None, :], mask=mask, other=0.0).to(tl.float32)
    turned = x.to(tl.float32) * cos + tl.where(first[None, :], -partner, partner) * sin
    # 0 in padded columns, where 0 · NaN would be NaN
    return tl.where(mask, turned, 0.0).to(x.dtype)


@triton.jit
def _share(seqlen_k, splits, granularity):  # type: ignore[no-untyped-def]
    """Keys of a split: a multiple of `granularity`, so that all splits together have all keys."""
    return tl.maximum(tl.cdiv(tl.cdiv(seqlen_k, granularity), splits), 1) * granularity


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    acc, l_i, m_i, q, q_rope, q_ptr, q_at, mask_m, c_ptr, table_ptr, begin, end, upper, page_size, stride_cp, scale,
    cap, PAGED: tl.constexpr, WHOLE: tl.constexpr, CAP: tl.constexpr, TOKEN: tl.constexpr, R: tl.constexpr,
    DR: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_DR: tl.constexpr, PART: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attend to the keys from `begin` to `end`, a tile at a time: acc, l_i and m_i of the online softmax of each row.

    Row i sees keys up to upper[i]; no row sees a key from `end` on, and these are not read. PART < BLOCK_R: registers
    hold PART columns of the queries at a time, and a tile's latents are read twice, the second time from a cache.
    """
    offs_n = tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, BLOCK_R)
    offs_dr = tl.arange(0, BLOCK_DR)
    offs_part = tl.arange(0, PART)
    for start in range(begin, end, BLOCK_N):
        cols = start + offs_n
        # one loop with masks: a comparison for each score costs nothing beside GEMMs over R columns, and a second loop
        # takes registers (26 spilled on sm_90)
        inside = (cols < end)[:, None]
        # TOKEN is a constant, so that addresses in a tile are one register and constants
        if PAGED and not WHOLE:
            number = tl.load(table_ptr + cols // page_size, mask=cols < end, other=0)
            at = (number.to(tl.int64) * stride_cp + (cols % page_size) * TOKEN)[:, None]
            tile_ptr = c_ptr
        else:
            at = offs_n[:, None] * TOKEN
            if PAGED:
                # the tile lies within one page
                number = tl.load(table_ptr + start // page_size).to(tl.int64)
                tile_ptr = c_ptr + number * stride_cp + (start % page_size) * TOKEN
            else:
                tile_ptr = c_ptr + tl.cast(start, tl.int64) * TOKEN
        # zeros for what no row sees: 0 · NaN would be NaN
        k = tl.load(tile_ptr + R + at + offs_dr[None, :], mask=inside & (offs_dr < DR)[None, :], other=0.0)
        s = tl.dot(q_rope, tl.trans(k), input_precision="ieee", out_dtype=tl.float32)
        if PART < BLOCK_R:
            for first in range(0, BLOCK_R, PART):
                mask = (first + offs_part < R)[None, :]
                q_part = tl.load(
                    q_ptr + q_at[:, None] + (first + offs_part)[None, :], mask=mask_m[:, None] & mask, other=0.0
                )
                c_part = tl.load(tile_ptr + at + (first + offs_part)[None, :], mask=inside & mask, other=0.0)
                s = tl.dot(q_part, tl.trans(c_part), s, input_precision="ieee", out_dtype=tl.float32)
        c = tl.load(tile_ptr + at + offs_r[None, :], mask=inside & (offs_r < R)[None, :], other=0.0)
        if PART == BLOCK_R:
            s = tl.dot(q, tl.trans(c), s, input_precision="ieee", out_dtype=tl.float32)
        if CAP:
            # c · tanh(s / c) = c − 2c / (1 + e^(2s / c))
            s = cap - 2.0 * cap * reciprocal(1.0 + tl.exp2(s * scale))
        else:
            s = s * scale
        s = tl.where(cols[None, :] <= upper[:, None], s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        # a row that has seen nothing yet: −inf − −inf would be NaN
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(m_i - base)
        m_i = m_new
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(c.dtype), c, acc * alpha[:, None], input_precision="ieee", out_dtype=tl.float32)
    return acc, l_i, m_i


@triton.jit(do_not_specialize=SIZES)
def _mla_kernel(  # type: ignore[no-untyped-def]
    q_ptr, rope_ptr, c_ptr, lens_ptr, table_ptr, cos_ptr, sin_ptr, place_ptr, o_ptr, lse_ptr, part_ptr, meta_ptr,
    scale, cap, seqlen_q, heads, page_size, splits, granularity, blocks, table_rows,
    stride_qb, stride_qt, stride_qh, stride_rb, stride_rt, stride_rh, stride_cp, stride_tb, stride_len,
    stride_cos, stride_sin, stride_pb, stride_pt,
    PAGED: tl.constexpr, WHOLE: tl.constexpr, CAP: tl.constexpr, STYLE: tl.constexpr, PLACES: tl.constexpr,
    LSE: tl.constexpr, SPLIT: tl.constexpr, Q_ALIGN: tl.constexpr, C_ALIGN: tl.constexpr, TOKEN: tl.constexpr,
    R: tl.constexpr, DR: tl.constexpr, PDL: tl.constexpr, XCDS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_DR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of one sequence, row t · heads + h its query t of head h, over a share of its keys.

    Not SPLIT: all keys, and the result to o_ptr. SPLIT: acc to part_ptr [B, splits, rows, R], m_i and l_i to meta_ptr
    [B, splits, rows, 2]; a split beyond a sequence's keys writes nothing.
    """
    # programs of a sequence side by side, and so on one XCD: they read the same keys
    index = remap_xcd(tl.program_id(0), tl.num_programs(0), XCDS)
    # the last queries see the most keys: longest first
    block = blocks - 1 - index % blocks
    split = (index // blocks) % splits
    sequence = (index // blocks // splits).to(tl.int64)
    # the kernel behind this one is `_mla_join_kernel`
    pdl_launch_dependents(PDL and SPLIT)
    seqlen_k = tl.load(lens_ptr + sequence * stride_len)
    rows = seqlen_q * heads
    start_m = block * BLOCK_M
    # keys that the last query of this tile sees
    last_seen = seqlen_k - seqlen_q + (tl.minimum(start_m + BLOCK_M, rows) - 1) // heads + 1
    begin = 0
    end = last_seen
    if SPLIT:
        share = _share(seqlen_k, splits, granularity)
        begin = split * share
        end = tl.minimum(begin + share, last_seen)
        # a split past the sequence's keys is never read; one with keys is written also by rows that see none of them
        if begin >= seqlen_k:
            return

    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_r = tl.arange(0, BLOCK_R)
    offs_dr = tl.arange(0, BLOCK_DR)
    mask_m = offs_m < rows
    query = offs_m // heads
    head = (offs_m % heads).to(tl.int64)
    mask_r = offs_r < R
    mask_dr = offs_dr < DR
    wide = query.to(tl.int64)
    q_at = (sequence * stride_qb + wide * stride_qt + head * stride_qh) * Q_ALIGN
    rope_at = (sequence * stride_rb + wide * stride_rt + head * stride_rh) * Q_ALIGN
    mask = mask_m[:, None] & mask_dr[None, :]
    q = 0.0
    if PART == BLOCK_R:
        q = tl.load(q_ptr + q_at[:, None] + offs_r[None, :], mask=mask_m[:, None] & mask_r[None, :], other=0.0)
    q_rope = tl.load(rope_ptr + rope_at[:, None] + offs_dr[None, :], mask=mask, other=0.0)
    # the last key that a query sees is its own
    upper = seqlen_k - seqlen_q + query
    if STYLE != 0:
        place = upper
        if PLACES:
            place = tl.load(place_ptr + sequence * stride_pb + wide * stride_pt, mask=mask_m, other=0)
        q_rope = _rotated(
            q_rope, rope_ptr, rope_at, mask, offs_dr, place, table_rows, cos_ptr, sin_ptr, stride_cos, stride_sin,
            DR, STYLE,
        )  # fmt: skip
    stride_cp = tl.cast(stride_cp, tl.int64) * C_ALIGN
    if PAGED:
        table_ptr += sequence * stride_tb
    else:
        c_ptr += sequence * stride_cp
    scale = tl.cast(scale, tl.float32)
    cap = tl.cast(cap, tl.float32)
    if CAP:
        scale = 2.0 * LOG2_E * scale / cap
        cap = cap * LOG2_E
    else:
        scale = scale * LOG2_E

    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    acc, l_i, m_i = _attend(
        acc, l_i, m_i, q, q_rope, q_ptr, q_at, mask_m, c_ptr, table_ptr, begin, end, upper, page_size, stride_cp, scale,
        cap, PAGED, WHOLE, CAP, TOKEN, R, DR, BLOCK_R, BLOCK_DR, PART, BLOCK_N,
    )  # fmt: skip

    # computed again, by other expressions: else the compiler keeps rows and masks in registers all along, and spills
    below = tl.arange(0, BLOCK_M)
    mask_m = below < rows - start_m
    mask = mask_m[:, None] & (tl.arange(0, BLOCK_R) < R)[None, :]
    inner = below[:, None] * R + tl.arange(0, BLOCK_R)[None, :]
    if SPLIT:
        at = (sequence * splits + split) * rows + start_m
        tl.store(part_ptr + at * R + inner, acc, mask=mask)
        tl.store(meta_ptr + at * 2 + below * 2, m_i, mask=mask_m)
        tl.store(meta_ptr + at * 2 + below * 2 + 1, l_i, mask=mask_m)
    else:
        if LSE:
            query = (start_m + below) // heads
            head = (start_m + below) % heads
            tl.store(lse_ptr + (sequence * heads + head) * seqlen_q + query, (m_i + tl.log2(l_i)) * LN_2, mask=mask_m)
        acc = acc * (1.0 / tl.where(l_i == 0.0, 1.0, l_i))[:, None]
        tl.store(o_ptr + (sequence * rows + start_m) * R + inner, acc.to(o_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _mla_join_kernel(  # type: ignore[no-untyped-def]
    part_ptr, meta_ptr, lens_ptr, o_ptr, lse_ptr,
    seqlen_q, heads, splits, granularity, stride_len,
    LSE: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One row of the result from the partial results of its splits, in their order."""
    pdl_wait(PDL)
    rows = seqlen_q * heads
    row = tl.program_id(0) % rows
    sequence = (tl.program_id(0) // rows).to(tl.int64)
    seqlen_k = tl.load(lens_ptr + sequence * stride_len)
    offs_r = tl.arange(0, BLOCK_R)
    mask_r = offs_r < R
    m_i = tl.full([1], float("-inf"), tl.float32)
    l_i = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK_R], tl.float32)
    for split in range(tl.cdiv(seqlen_k, _share(seqlen_k, splits, granularity))):
        at = (sequence * splits + split) * rows + row
        other = tl.load(meta_ptr + at * 2)
        more = tl.load(meta_ptr + at * 2 + 1)
        part = tl.load(part_ptr + at * R + offs_r, mask=mask_r, other=0.0)
        m_new = tl.maximum(m_i, other)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        mine = tl.exp2(m_i - base)
        theirs = tl.exp2(other - base)
        acc = acc * mine + part * theirs
        l_i = l_i * mine + more * theirs
        m_i = m_new
    if LSE:
        at_lse = lse_ptr + (sequence * heads + row % heads) * seqlen_q + row // heads + tl.arange(0, 1)
        tl.store(at_lse, (m_i + tl.log2(l_i)) * LN_2)
    acc = acc * (1.0 / tl.where(l_i == 0.0, 1.0, l_i))
    tl.store(o_ptr + (sequence * rows + row) * R + offs_r, acc.to(o_ptr.dtype.element_ty), mask=mask_r)


@triton.jit(
    do_not_specialize=[
        "rows", "seqlen_q", "heads", "stride_xb", "stride_xt", "stride_xh", "stride_wh", "stride_wk", "stride_wn"
    ]
)  # fmt: skip
def _mla_product_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, y_ptr, rows, seqlen_q, heads,
    stride_xb, stride_xt, stride_xh, stride_wh, stride_wk, stride_wn,
    K: tl.constexpr, N: tl.constexpr, X_ALIGN: tl.constexpr, W_ALIGN: tl.constexpr, ACROSS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[row, h] = x[row, h] · w[h] over the rows of all queries; BLOCK_M rows and BLOCK_N columns of a head a program.

    ACROSS: the rows of w are contiguous; else its columns are.
    """
    blocks_m = tl.cdiv(rows, BLOCK_M)
    block_m = tl.program_id(0) % blocks_m
    block_n = (tl.program_id(0) // blocks_m) % tl.cdiv(N, BLOCK_N)
    head = (tl.program_id(0) // blocks_m // tl.cdiv(N, BLOCK_N)).to(tl.int64)
    offs_m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_m = (offs_m < rows)[:, None]
    mask_n = (offs_n < N)[None, :]
    wide = offs_m.to(tl.int64)
    x_at = ((wide // seqlen_q) * stride_xb + (wide % seqlen_q) * stride_xt + head * stride_xh) * X_ALIGN
    w_ptr += head * stride_wh * W_ALIGN
    step_k = tl.cast(stride_wk, tl.int64) * W_ALIGN
    step_n = tl.cast(stride_wn, tl.int64) * W_ALIGN
    if ACROSS:
        step_n = 1
    else:
        step_k = 1
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + offs_k < K
        x = tl.load(x_ptr + x_at[:, None] + (start + offs_k)[None, :], mask=mask_m & inside[None, :], other=0.0)
        w_at = (start + offs_k)[:, None] * step_k + offs_n[None, :] * step_n
        w = tl.load(w_ptr + w_at, mask=inside[:, None] & mask_n, other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee", out_dtype=tl.float32)
    at = (wide * heads + head)[:, None] * N + offs_n[None, :]
    tl.store(y_ptr + at, acc.to(y_ptr.dtype.element_ty), mask=mask_m & mask_n)
