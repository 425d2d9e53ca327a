"""The attention kernel: tiles of keys pass a tile of queries, and a softmax that is corrected as its maximum grows.

The online softmax is Milakov and Gimelshein's (2018), over tiles as in FlashAttention-2 (Dao, 2023). Scores are kept in
powers of two: the scale takes log2 e with it.
"""

from __future__ import annotations

from wavecrest.ops.common.device import LOG2_E, remap_xcd
from wavecrest.ops.common.quantized import whole_numbers
from wavecrest.ops.common.triton import reciprocal, tl, triton
from wavecrest.ops.common.widen import rounded, widened

# what is contiguous in memory: nothing, the elements of a token, or the tokens of an element
ANY, COLUMNS, TOKENS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LN_2 = tl.constexpr(0.6931471805599453)
# weights of 8-bit values: in TYPE; in TYPE, but cut off at the largest 8-bit value; rounded to 8 bits
WEIGHTS, CAPPED, EIGHT_BITS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# how a program comes to its tiles: it has one, every n-th of n programs, or the next that no program has
ONE_TILE, FIXED, DYNAMIC = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# values that do not make the kernel anew when they change
SIZES = [
    "scale", "softcap", "seqlen_q", "seqlen_k", "heads", "group", "tiles", "d_units", "dv_units", "left", "right",
    "stride_qb", "stride_qh", "stride_qs", "stride_qd", "stride_kb", "stride_kh", "stride_ks", "stride_kd",
    "stride_vb", "stride_vh", "stride_vs", "stride_vd", "stride_ob", "stride_oh", "stride_os", "stride_lb", "stride_lh",
    "stride_bb", "stride_bh", "stride_bm", "stride_bn", "stride_ab", "stride_ah", "stride_sink", "stride_cq",
    "stride_ck", "p_descale", "stride_qdb", "stride_qdh", "stride_kdb", "stride_kdh", "stride_vdb", "stride_vdh",
    "seed_low", "seed_high", "least_kept", "kept_share", "section", "total",
]  # fmt: skip


@triton.jit
def place_of(program, programs, tiles, section, total, XCDS: tl.constexpr, RIGHT: tl.constexpr, SECTIONS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's tile of queries and its head, counted over the `total` heads of all sequences.

    Programs begin in their order on each XCD. Head after head, unless there are SECTIONS: then `section` heads of an
    XCD go together, whose k and v its L2 cache holds, the longest tiles of them all first. Heads that cannot be shared
    out evenly come before all others: their tiles are dealt to the XCDs in turn. A bijection for any numbers.
    """
    if SECTIONS:
        # unsigned, which is divided in fewer instructions
        program = tl.cast(program, tl.uint32)
        tiles = tl.cast(tiles, tl.uint32)
        section = tl.cast(section, tl.uint32)
        total = tl.cast(total, tl.uint32)
        # heads that an XCD has for itself, and programs of those that none has
        own = total // XCDS
        shared = total % XCDS * tiles
        alone = program >= shared
        rest = program - tl.minimum(program, shared)
        place = rest // XCDS
        part = place // (section * tiles)
        first = tl.where(alone, rest % XCDS * own + part * section, own * XCDS)
        width = tl.where(alone, tl.minimum(own - part * section, section), total % XCDS)
        inside = tl.where(alone, place - part * section * tiles, program)
        tile = tl.cast(inside // width, tl.int32)
        head = tl.cast(first + inside % width, tl.int32)
        tiles = tl.cast(tiles, tl.int32)
    else:
        # a head's tiles side by side, and so on one XCD: they read the same keys
        index = remap_xcd(program, programs, XCDS)
        tile = index % tiles
        head = index // tiles
    if RIGHT:
        # the last queries see the most keys: longest first, so that what runs at the end is short
        tile = tiles - 1 - tile
    return tile, head


@triton.jit
def _strides(stride_s, stride_d, ORDER: tl.constexpr, ALIGN: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The strides of tokens and of head_dim: the contiguous one as 1, the other as a multiple of ALIGN."""
    if WIDE:
        stride_s = tl.cast(stride_s, tl.int64)
        stride_d = tl.cast(stride_d, tl.int64)
    if ORDER == COLUMNS:
        strides = (stride_s * ALIGN, 1)
    elif ORDER == TOKENS:
        strides = (1, stride_d * ALIGN)
    else:
        strides = (stride_s * ALIGN, stride_d * ALIGN)
    return strides


@triton.jit
def _qk_8_bits(q, k, TYPE: tl.constexpr, WIDEN: tl.constexpr, PTX: tl.constexpr, FOREIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    """q · k in float32, of 8-bit q and k as they are, or with WIDEN both in TYPE, which q is then."""
    if WIDEN:
        s = tl.dot(q, widened(k, TYPE, PTX, FOREIGN), input_precision="ieee", out_dtype=tl.float32)
    elif tl.int8 == k.dtype:
        # up to 256 products of 2¹⁴ each: float32 has all such sums
        s = tl.dot(q, k, out_dtype=tl.int32).to(tl.float32)
    else:
        s = tl.dot(q, k, out_dtype=tl.float32)
    return s


@triton.jit
def _pv_8_bits(  # type: ignore[no-untyped-def]
    acc, p, alpha, v, p_descale, TYPE: tl.constexpr, ROUNDED: tl.constexpr, LARGEST: tl.constexpr, PTX: tl.constexpr,
    FOREIGN: tl.constexpr, TIES_UP: tl.constexpr,
):  # fmt: skip
    """acc · alpha + p · v for 8-bit v: p in TYPE, or where ROUNDED is EIGHT_BITS in v's type, in units of p_descale."""
    if ROUNDED == EIGHT_BITS:
        inverse = 1.0 / p_descale
        # a weight of NaN, which this may lose, is in the sum that results are divided by
        p = tl.minimum(p, LARGEST * p_descale)
        if tl.int8 == v.dtype:
            product = tl.dot(whole_numbers(p, inverse), v, out_dtype=tl.int32)
            acc = acc * alpha[:, None] + product.to(tl.float32)
        else:
            # on sm_90 sums of 8-bit floats keep 14 bits: one tile's at a time are added in float32
            TILE: tl.constexpr = v.shape[0]
            acc = acc * alpha[:, None]
            p = (p * inverse).to(v.dtype)
            acc = tl.dot(p, v, acc, out_dtype=tl.float32, max_num_imprecise_acc=TILE)
    else:
        if ROUNDED == CAPPED:
            p = tl.minimum(p, LARGEST * p_descale)
        acc = acc * alpha[:, None]
        v = widened(v, TYPE, PTX, FOREIGN)
        acc = tl.dot(rounded(p, TYPE, TIES_UP), v, acc, input_precision="ieee", out_dtype=tl.float32)
    return acc


@triton.jit
def _word(number):  # type: ignore[no-untyped-def]
    """A signed number of 32 bits as an unsigned one; Inductor passes it in 64."""
    return tl.cast(number, tl.int32).to(tl.uint32, bitcast=True)


@triton.jit
def _kept(dropout, start, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which weights of keys from `start` on dropout keeps: a word of Philox-4x32-10 a pair, four keys a counter."""
    seed_low, seed_high, least, rows, head, sequence = dropout
    seed = _word(seed_high).to(tl.uint64) << 32 | _word(seed_low).to(tl.uint64)
    least = _word(least)
    fours = (start // 4 + tl.arange(0, BLOCK_N // 4))[None, :]
    a, b, c, d = tl.philox(seed, fours, rows[:, None], head.to(tl.int32), sequence.to(tl.int32))
    # bytes, as these change hands between lanes
    first = tl.join((a >= least).to(tl.int8), (c >= least).to(tl.int8))
    second = tl.join((b >= least).to(tl.int8), (d >= least).to(tl.int8))
    return tl.reshape(tl.join(first, second), [ROWS, BLOCK_N]) != 0


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    acc, l_i, m_i, q, k_ptr, v_ptr, bias_ptr, k_tile, v_tile, bias_tile, stride_ks, stride_vs, stride_bn,
    begin, end, first, last, lower, upper, rows, mask_d, mask_dv, scale, softcap, slope, p_descale,
    dropout, MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    ALIBI: tl.constexpr, DROPOUT: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, QUANTIZED: tl.constexpr,
    TYPE: tl.constexpr, WIDEN: tl.constexpr, ROUNDED: tl.constexpr, LARGEST: tl.constexpr, PTX: tl.constexpr,
    FOREIGN: tl.constexpr, TIES_UP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention to keys from `begin` to `end`, in tiles: of each row (weighted values, sum of weights, largest score).

    `first`, `last`: the keys that any row sees lie between them; MASKED: tiles may have others, which are not read, and
    a row i sees keys up to upper[i] alone, or with LEFT those from lower[i] to upper[i] further on. `rows`: each row's
    place on the diagonal, i + keys − queries.
    """
    offs_n = tl.arange(0, BLOCK_N)
    for tile in range(begin, end):
        start = tile * BLOCK_N
        cols = start + offs_n
        mask_k = mask_d[:, None]
        mask_v = mask_dv[None, :]
        if MASKED:
            seen = cols < last
            if LEFT:
                seen = seen & (cols >= first)
            mask_k = mask_k & seen[None, :]
            # zeros for what no row sees: 0 · NaN would be NaN
            mask_v = mask_v & seen[:, None]
        # what moves with the tile is one number, added to the pointer, in 64 bits; offsets in the tile fit into 32
        at = tl.cast(start, tl.int64)
        k_at = k_ptr + at * stride_ks
        v_at = v_ptr + at * stride_vs
        if MASKED or not EVEN_D:
            k = tl.load(k_at + k_tile, mask=mask_k, other=0.0)
        else:
            k = tl.load(k_at + k_tile)
        if QUANTIZED:
            s = _qk_8_bits(q, k, TYPE, WIDEN, PTX, FOREIGN)
        else:
            s = tl.dot(q, k, input_precision="ieee", out_dtype=tl.float32)
        if SOFTCAP or BIAS or ALIBI or MASKED:
            if SOFTCAP:
                # c · tanh(s / c) = c − 2c / (1 + e^(2s / c))
                s = softcap - 2.0 * softcap * reciprocal(1.0 + tl.exp2(s * scale))
            else:
                s = s * scale
            if BIAS:
                if MASKED:
                    bias = tl.load(bias_ptr + at * stride_bn + bias_tile, mask=seen[None, :], other=0.0)
                else:
                    bias = tl.load(bias_ptr + at * stride_bn + bias_tile)
                s += bias.to(tl.float32) * LOG2_E
            if ALIBI:
                s -= slope * tl.abs((rows[:, None] - cols[None, :]).to(tl.float32))
            if MASKED:
                visible = seen[None, :]
                if LEFT:
                    # one comparison for both ends, unsigned: each that waits takes scalar registers
                    visible = (cols[None, :] - lower[:, None]).to(tl.uint32, bitcast=True) <= upper[:, None]
                elif RIGHT:
                    visible = cols[None, :] <= upper[:, None]
                s = tl.where(visible, s, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(s, 1))
            # a row that has seen nothing yet: −inf − −inf would be NaN
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s - base[:, None])
        else:
            # the scale is not negative: it is multiplied in with the subtraction
            m_new = tl.maximum(m_i, tl.max(s, 1) * scale)
            base = m_new
            p = tl.exp2(s * scale - base[:, None])
        alpha = tl.exp2(m_i - base)
        m_i = m_new
        l_i = l_i * alpha + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(_kept(dropout, start, p.shape[0], BLOCK_N), p, 0.0)
        if not QUANTIZED:
            acc = acc * alpha[:, None]
        if MASKED or not EVEN_DV:
            v = tl.load(v_at + v_tile, mask=mask_v, other=0.0)
        else:
            v = tl.load(v_at + v_tile)
        if QUANTIZED:
            acc = _pv_8_bits(acc, p, alpha, v, p_descale, TYPE, ROUNDED, LARGEST, PTX, FOREIGN, TIES_UP)
        else:
            acc = tl.dot(rounded(p, v.dtype, TIES_UP), v, acc, input_precision="ieee", out_dtype=tl.float32)
    return acc, l_i, m_i


@triton.jit
def _lengths(cu_q_ptr, cu_k_ptr, sequence, seqlen_q, seqlen_k, stride_cq, stride_ck, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Queries and keys of a sequence."""
    if PACKED:
        seqlen_q = tl.load(cu_q_ptr + (sequence + 1) * stride_cq) - tl.load(cu_q_ptr + sequence * stride_cq)
        seqlen_k = tl.load(cu_k_ptr + (sequence + 1) * stride_ck) - tl.load(cu_k_ptr + sequence * stride_ck)
    return seqlen_q, seqlen_k


@triton.jit
def _following(next_ptr, index, FIRST: tl.constexpr, XCDS: tl.constexpr, PERSISTENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tile that a program takes after tile `index`: as many tiles on as there are programs, or the next of its XCD.

    Tiles belong to the XCDs in turn, as programs begin on them: there are a multiple of XCDS, or as many as tiles.
    """
    if PERSISTENT == DYNAMIC:
        # fewer programs than XCDs leave none of the tiles out
        queues = tl.minimum(tl.num_programs(0), XCDS)
        queue = tl.program_id(0) % queues
        # no other memory hangs on it
        index = tl.atomic_add(next_ptr + queue, 1, sem="relaxed") * queues + queue
    elif FIRST:
        index = tl.program_id(0)
    else:
        index += tl.num_programs(0)
    return index


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    tile_m, head, sequence, q_ptr, k_ptr, v_ptr, bias_ptr, alibi_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, o_ptr, lse_ptr,
    q_descale_ptr, k_descale_ptr, v_descale_ptr,
    scale, softcap, seqlen_q, seqlen_k, group, d_units, dv_units, left, right,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_ob, stride_oh, stride_os, stride_lb, stride_lh,
    stride_bb, stride_bh, stride_bm, stride_bn, stride_ab, stride_ah, stride_sink, stride_cq, stride_ck,
    p_descale, stride_qdb, stride_qdh, stride_kdb, stride_kdh, stride_vdb, stride_vdh,
    seed_low, seed_high, least_kept, kept_share,
    PACKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    ALIBI: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, DROPOUT: tl.constexpr,
    Q_ORDER: tl.constexpr, K_ORDER: tl.constexpr, V_ORDER: tl.constexpr, BIAS_ORDER: tl.constexpr,
    Q_ALIGN: tl.constexpr, K_ALIGN: tl.constexpr, V_ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr,
    D_ALIGN: tl.constexpr, DV_ALIGN: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, WIDE: tl.constexpr,
    QUANTIZED: tl.constexpr, TYPE: tl.constexpr, WIDEN: tl.constexpr, ROUNDED: tl.constexpr, LARGEST: tl.constexpr,
    PTX: tl.constexpr, FOREIGN: tl.constexpr, TIES_UP: tl.constexpr, Q_DESCALE: tl.constexpr, K_DESCALE: tl.constexpr,
    V_DESCALE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tile `tile_m` of BLOCK_M queries of one head of one sequence; other arguments as of the kernel.

    `seqlen_q`, `seqlen_k`: of the sequence. Where it starts is loaded here: PyTorch's analysis of what a kernel writes
    takes a number that is given to a function, and moves a pointer there, for the memory that it came from.
    """
    kv_head = head // group
    start_m = tile_m * BLOCK_M

    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    p_descale = tl.cast(p_descale, tl.float32)
    if Q_DESCALE:
        scale *= tl.load(q_descale_ptr + sequence * stride_qdb + head * stride_qdh)
    if K_DESCALE:
        scale *= tl.load(k_descale_ptr + sequence * stride_kdb + kv_head * stride_kdh)
    if SOFTCAP:
        scale = 2.0 * LOG2_E * scale / softcap
        softcap = softcap * LOG2_E
    else:
        scale = scale * LOG2_E

    # the first element of each tensor that this tile has to do with, tokens of packed sequences counted in 64 bits
    q_ptr += (sequence * stride_qb + head * stride_qh) * Q_ALIGN
    k_ptr += (sequence * stride_kb + kv_head * stride_kh) * K_ALIGN
    v_ptr += (sequence * stride_vb + kv_head * stride_vh) * V_ALIGN
    o_ptr += (sequence * stride_ob + head * stride_oh) * DV_ALIGN
    lse_ptr += sequence * stride_lb + head * stride_lh
    stride_qs, stride_qd = _strides(stride_qs, stride_qd, Q_ORDER, Q_ALIGN, WIDE)
    stride_ks, stride_kd = _strides(stride_ks, stride_kd, K_ORDER, K_ALIGN, WIDE)
    stride_vs, stride_vd = _strides(stride_vs, stride_vd, V_ORDER, V_ALIGN, WIDE)
    stride_bm, stride_bn = _strides(stride_bm, stride_bn, BIAS_ORDER, BIAS_ALIGN, WIDE)
    at = tl.cast(start_m, tl.int64)
    q_at = at
    if PACKED:
        q_start = tl.load(cu_q_ptr + sequence * stride_cq)
        k_start = tl.load(cu_k_ptr + sequence * stride_ck)
        q_at = at + q_start
        k_ptr += tl.cast(k_start, tl.int64) * stride_ks
        v_ptr += tl.cast(k_start, tl.int64) * stride_vs
    q_ptr += q_at * stride_qs
    o_ptr += q_at * stride_os * DV_ALIGN
    lse_ptr += q_at
    bias_ptr += (sequence * stride_bb + head * stride_bh) * BIAS_ALIGN + at * stride_bm

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    mask_m = start_m + offs_m < seqlen_q
    mask_d = offs_d < d_units * D_ALIGN
    mask_dv = offs_dv < dv_units * DV_ALIGN
    if EVEN_D:
        mask_d = tl.full([BLOCK_D], True, tl.int1)
    if EVEN_DV:
        mask_dv = tl.full([BLOCK_DV], True, tl.int1)
    q = tl.load(
        q_ptr + offs_m[:, None] * stride_qs + offs_d[None, :] * stride_qd,
        mask=mask_m[:, None] & mask_d[None, :],
        other=0.0,
    )
    if WIDEN:
        q = widened(q, TYPE, PTX, FOREIGN)
    k_tile = offs_d[:, None] * stride_kd + offs_n[None, :] * stride_ks
    v_tile = offs_n[:, None] * stride_vs + offs_dv[None, :] * stride_vd
    # rows that are no queries take the last one's bias: without a mask, which would be kept in scalar registers
    bias_rows = tl.minimum(offs_m, seqlen_q - 1 - start_m)
    bias_tile = bias_rows[:, None] * stride_bm + offs_n[None, :] * stride_bn

    # keys that any row of this tile sees are [first, last); tiles of them, [begin, end); tiles that every row sees in
    # full, [whole, rest)
    rows = start_m + offs_m + seqlen_k - seqlen_q
    top_row = start_m + seqlen_k - seqlen_q
    bottom_row = tl.minimum(start_m + BLOCK_M, seqlen_q) - 1 + seqlen_k - seqlen_q
    first = 0
    begin = 0
    last = seqlen_k
    rest = seqlen_k
    lower = rows
    upper = tl.zeros([BLOCK_M], tl.int32) + (seqlen_k - 1)
    if RIGHT:
        last = tl.minimum(tl.maximum(bottom_row + right + 1, 0), seqlen_k)
        rest = tl.minimum(tl.maximum(top_row + right + 1, 0), seqlen_k)
        upper = tl.minimum(rows + right, upper)
    if LEFT:
        first = tl.maximum(top_row - left, 0)
        begin = first // BLOCK_N
        # not above `upper`, as a query's own key is among the keys or before them
        lower = rows - left
        upper = (upper - lower).to(tl.uint32, bitcast=True)
    end = tl.cdiv(last, BLOCK_N)
    whole = begin
    if LEFT:
        # not before `begin`, as no row's keys end before those of the row above
        whole = tl.minimum(tl.cdiv(tl.maximum(bottom_row - left, 0), BLOCK_N), end)
    rest = tl.maximum(rest // BLOCK_N, whole)

    slope = 0.0
    if ALIBI:
        slope = tl.load(alibi_ptr + sequence * stride_ab + head * stride_ah) * LOG2_E
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        # a key without a value, seen first
        sink = tl.load(sinks_ptr + head * stride_sink).to(tl.float32) * LOG2_E
        m_i = tl.zeros([BLOCK_M], tl.float32) + sink
        l_i = tl.where(m_i == float("-inf"), 0.0, 1.0)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    dropout = (seed_low, seed_high, least_kept, start_m + offs_m, head, sequence)

    if LEFT:
        acc, l_i, m_i = _attend(
            acc, l_i, m_i, q, k_ptr, v_ptr, bias_ptr, k_tile, v_tile, bias_tile, stride_ks, stride_vs, stride_bn,
            begin, whole, first, last, lower, upper, rows, mask_d, mask_dv, scale, softcap, slope,
            p_descale, dropout, True, LEFT, RIGHT, SOFTCAP, BIAS, ALIBI, DROPOUT, EVEN_D, EVEN_DV,
            QUANTIZED, TYPE, WIDEN, ROUNDED, LARGEST, PTX, FOREIGN, TIES_UP, BLOCK_N,
        )  # fmt: skip
    acc, l_i, m_i = _attend(
        acc, l_i, m_i, q, k_ptr, v_ptr, bias_ptr, k_tile, v_tile, bias_tile, stride_ks, stride_vs, stride_bn,
        whole, rest, first, last, lower, upper, rows, mask_d, mask_dv, scale, softcap, slope,
        p_descale, dropout, False, LEFT, RIGHT, SOFTCAP, BIAS, ALIBI, DROPOUT, EVEN_D, EVEN_DV,
        QUANTIZED, TYPE, WIDEN, ROUNDED, LARGEST, PTX, FOREIGN, TIES_UP, BLOCK_N,
    )  # fmt: skip
    acc, l_i, m_i = _attend(
        acc, l_i, m_i, q, k_ptr, v_ptr, bias_ptr, k_tile, v_tile, bias_tile, stride_ks, stride_vs, stride_bn,
        rest, end, first, last, lower, upper, rows, mask_d, mask_dv, scale, softcap, slope,
        p_descale, dropout, True, LEFT, RIGHT, SOFTCAP, BIAS, ALIBI, DROPOUT, EVEN_D, EVEN_DV,
        QUANTIZED, TYPE, WIDEN, ROUNDED, LARGEST, PTX, FOREIGN, TIES_UP, BLOCK_N,
    )  # fmt: skip

    # compared in another way than above: the compiler would keep those masks in scalar registers all along
    mask_m = offs_m < seqlen_q - start_m
    if LSE:
        # −inf for a row that has seen nothing
        tl.store(lse_ptr + offs_m, (m_i + tl.log2(l_i)) * LN_2, mask=mask_m)
    share = 1.0 / tl.where(l_i == 0.0, 1.0, l_i)
    if V_DESCALE:
        share *= tl.load(v_descale_ptr + sequence * stride_vdb + kv_head * stride_vdh)
    if ROUNDED == EIGHT_BITS:
        share *= p_descale
    if DROPOUT:
        share *= tl.cast(kept_share, tl.float32)
    acc = acc * share[:, None]
    o_tile = offs_m[:, None] * (stride_os * DV_ALIGN) + offs_dv[None, :]
    tl.store(o_ptr + o_tile, acc.to(o_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_dv[None, :])


@triton.jit(do_not_specialize=SIZES)
def _flash_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, bias_ptr, alibi_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, o_ptr, lse_ptr,
    q_descale_ptr, k_descale_ptr, v_descale_ptr, next_ptr,
    scale, softcap, seqlen_q, seqlen_k, heads, group, tiles, d_units, dv_units, left, right,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_ob, stride_oh, stride_os, stride_lb, stride_lh,
    stride_bb, stride_bh, stride_bm, stride_bn, stride_ab, stride_ah, stride_sink, stride_cq, stride_ck,
    p_descale, stride_qdb, stride_qdh, stride_kdb, stride_kdh, stride_vdb, stride_vdh,
    seed_low, seed_high, least_kept, kept_share, section, total,
    PACKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    ALIBI: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, DROPOUT: tl.constexpr,
    Q_ORDER: tl.constexpr, K_ORDER: tl.constexpr, V_ORDER: tl.constexpr, BIAS_ORDER: tl.constexpr,
    Q_ALIGN: tl.constexpr, K_ALIGN: tl.constexpr, V_ALIGN: tl.constexpr, BIAS_ALIGN: tl.constexpr,
    D_ALIGN: tl.constexpr, DV_ALIGN: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, WIDE: tl.constexpr,
    QUANTIZED: tl.constexpr, TYPE: tl.constexpr, WIDEN: tl.constexpr, ROUNDED: tl.constexpr, LARGEST: tl.constexpr,
    PTX: tl.constexpr, FOREIGN: tl.constexpr, TIES_UP: tl.constexpr, Q_DESCALE: tl.constexpr, K_DESCALE: tl.constexpr,
    V_DESCALE: tl.constexpr, XCDS: tl.constexpr, SECTIONS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries of one head of one sequence.

    Strides of q, k, v and bias come in units of their ALIGN, head_dim in units of D_ALIGN and DV_ALIGN, those of o in
    DV_ALIGN. `left`, `right`: of the window, where there is one (LEFT, RIGHT). QUANTIZED: k and v are 8-bit; what is
    multiplied in more bits has TYPE, q and k with WIDEN, weights unless they are ROUNDED to 8 bits. DROPOUT keeps
    a weight whose word is `least_kept` or more. TIES_UP: how weights are rounded, see `rounded`. `section`, `total`,
    SECTIONS: see `place_of`. PERSISTENT: a program takes tiles until there are no more, as `_following` says.
    """
    if PERSISTENT == ONE_TILE:
        tile_m, place = place_of(tl.program_id(0), tl.num_programs(0), tiles, section, total, XCDS, RIGHT, SECTIONS)
        head = (place % heads).to(tl.int64)
        sequence = (place // heads).to(tl.int64)
        length_q, length_k = _lengths(cu_q_ptr, cu_k_ptr, sequence, seqlen_q, seqlen_k, stride_cq, stride_ck, PACKED)
        if PACKED:
            start_m = tile_m * BLOCK_M
            if start_m >= length_q:
                return
        _tile(
            tile_m, head, sequence, q_ptr, k_ptr, v_ptr, bias_ptr, alibi_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, o_ptr,
            lse_ptr, q_descale_ptr, k_descale_ptr, v_descale_ptr, scale, softcap, length_q, length_k, group, d_units,
            dv_units, left, right, stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks,
            stride_kd, stride_vb, stride_vh, stride_vs, stride_vd, stride_ob, stride_oh, stride_os, stride_lb,
            stride_lh, stride_bb, stride_bh, stride_bm, stride_bn, stride_ab, stride_ah, stride_sink, stride_cq,
            stride_ck, p_descale, stride_qdb, stride_qdh, stride_kdb, stride_kdh, stride_vdb, stride_vdh, seed_low,
            seed_high, least_kept, kept_share, PACKED, LEFT, RIGHT, SOFTCAP, BIAS, ALIBI, SINKS, LSE, DROPOUT, Q_ORDER,
            K_ORDER, V_ORDER, BIAS_ORDER, Q_ALIGN, K_ALIGN, V_ALIGN, BIAS_ALIGN, D_ALIGN, DV_ALIGN, EVEN_D, EVEN_DV,
            WIDE, QUANTIZED, TYPE, WIDEN, ROUNDED, LARGEST, PTX, FOREIGN, TIES_UP, Q_DESCALE, K_DESCALE, V_DESCALE,
            BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    else:
        index = _following(next_ptr, 0, True, XCDS, PERSISTENT)
        while index < tiles * total:
            tile_m, place = place_of(index, tiles * total, tiles, section, total, XCDS, RIGHT, SECTIONS)
            head = (place % heads).to(tl.int64)
            sequence = (place // heads).to(tl.int64)
            length_q, length_k = _lengths(
                cu_q_ptr, cu_k_ptr, sequence, seqlen_q, seqlen_k, stride_cq, stride_ck, PACKED
            )
            if tile_m * BLOCK_M < length_q:
                _tile(
                    tile_m, head, sequence, q_ptr, k_ptr, v_ptr, bias_ptr, alibi_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr,
                    o_ptr, lse_ptr, q_descale_ptr, k_descale_ptr, v_descale_ptr, scale, softcap, length_q, length_k,
                    group, d_units, dv_units, left, right, stride_qb, stride_qh, stride_qs, stride_qd, stride_kb,
                    stride_kh, stride_ks, stride_kd, stride_vb, stride_vh, stride_vs, stride_vd, stride_ob, stride_oh,
                    stride_os, stride_lb, stride_lh, stride_bb, stride_bh, stride_bm, stride_bn, stride_ab, stride_ah,
                    stride_sink, stride_cq, stride_ck, p_descale, stride_qdb, stride_qdh, stride_kdb, stride_kdh,
                    stride_vdb, stride_vdh, seed_low, seed_high, least_kept, kept_share, PACKED, LEFT, RIGHT, SOFTCAP,
                    BIAS, ALIBI, SINKS, LSE, DROPOUT, Q_ORDER, K_ORDER, V_ORDER, BIAS_ORDER, Q_ALIGN, K_ALIGN, V_ALIGN,
                    BIAS_ALIGN, D_ALIGN, DV_ALIGN, EVEN_D, EVEN_DV, WIDE, QUANTIZED, TYPE, WIDEN, ROUNDED, LARGEST,
                    PTX, FOREIGN, TIES_UP, Q_DESCALE, K_DESCALE, V_DESCALE, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
                )  # fmt: skip
            index = _following(next_ptr, index, False, XCDS, PERSISTENT)
