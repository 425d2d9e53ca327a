"""Attention of a few queries over a long cache: keys are split over programs, whose sums are put together in order.

Split-KV as in Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023), with the softmax of `flash_attention`. The query
heads that share a head of keys are rows of one tile, so that the cache is read once.
"""

from __future__ import annotations

from wavecrest.ops._lib import LOG2_E, allow_next, await_previous
from wavecrest.ops._triton import reciprocal, tl, triton
from wavecrest.ops.gemm.kernel import BYTES_BF16, BYTES_FP16

LN_2 = tl.constexpr(0.6931471805599453)

# values that do not make a kernel anew when they change
SIZES = [
    "scale", "softcap", "left", "tokens", "kv_heads", "group", "page", "splits", "d_units", "dv_units",
    "stride_qb", "stride_qt", "stride_qh", "stride_kp", "stride_kt", "stride_kh", "stride_vp", "stride_vt", "stride_vh",
    "stride_tb", "stride_len", "stride_ab", "stride_ah", "stride_sink", "stride_ks", "stride_vs",
]  # fmt: skip


@triton.jit
def _widened(values, TYPE: tl.constexpr, PTX: tl.constexpr, FOREIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys or values in the queries' type, which has all that 8 bits hold.

    FOREIGN: e4m3fn where no instruction takes it; the compiler's own way is 60 instructions an element.
    """
    if TYPE.primitive_bitwidth > values.dtype.primitive_bitwidth:
        if PTX and tl.int8 == values.dtype and tl.bfloat16 == TYPE:
            values = tl.inline_asm_elementwise(BYTES_BF16, "=r,=r,r", [values], tl.bfloat16, is_pure=True, pack=4)
        elif PTX and tl.int8 == values.dtype and tl.float16 == TYPE:
            values = tl.inline_asm_elementwise(BYTES_FP16, "=r,=r,r", [values], tl.float16, is_pure=True, pack=4)
        else:
            if FOREIGN:
                # as float16 of 2⁻⁸ times the value, subnormal ones too, and NaN added where it is one: without a mask,
                # which takes scalar registers
                bits = values.to(tl.uint8, bitcast=True).to(tl.int16)
                half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
                nan = (-(((bits & 0x7F) + 1) >> 7) & 0x7E00).to(tl.float16, bitcast=True)
                wide = (half * 256.0 + nan).to(tl.float32)
            else:
                wide = values.to(tl.float32)
            if tl.bfloat16 == TYPE:
                # the lower half is 0: cut off rather than rounded, which takes 5 instructions an element on gfx942
                values = (wide.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(TYPE, bitcast=True)
            else:
                values = wide.to(TYPE)
    return values


@triton.jit
def _loaded(ptr, at, tile, mask, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of the cache; what is masked is 0."""
    if MASKED:
        values = tl.load(ptr + at + tile, mask=mask, other=0.0)
    else:
        values = tl.load(ptr + at + tile)
    return values


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    acc, total, top, q, k_ptr, v_ptr, table_ptr, page, k_tile, v_tile, stride_kp, stride_kt, stride_vp, stride_vt,
    begin, end, first, last, lower, upper, mask_d, mask_dv, scale, softcap, slope,
    MASKED: tl.constexpr, PAGED: tl.constexpr, WHOLE: tl.constexpr, LEFT: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PTX: tl.constexpr, FOREIGN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Let tiles of keys from `begin` to `end` pass: (sums, their weights' total, the largest score so far) of each row.

    `first`, `last`: the keys that any row sees lie between them; MASKED: tiles may have others, which are not read, and
    a row i sees those from lower[i] to upper[i]. WHOLE: a tile lies within one page.
    """
    offs_n = tl.arange(0, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
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
        # what moves with the tile is added to the pointer, in 64 bits
        if PAGED and not WHOLE:
            if MASKED:
                number = tl.load(table_ptr + cols // page, mask=seen, other=0).to(tl.int64)
            else:
                number = tl.load(table_ptr + cols // page).to(tl.int64)
            place = (cols % page).to(tl.int64)
            k_at = (number * stride_kp + place * stride_kt)[None, :]
            v_at = (number * stride_vp + place * stride_vt)[:, None]
        elif PAGED:
            number = tl.load(table_ptr + start // page).to(tl.int64)
            place = tl.cast(start % page, tl.int64)
            k_at = number * stride_kp + place * stride_kt
            v_at = number * stride_vp + place * stride_vt
        else:
            place = tl.cast(start, tl.int64)
            k_at = place * stride_kt
            v_at = place * stride_vt
        k = _loaded(k_ptr, k_at, k_tile, mask_k, MASKED or not EVEN_D)
        s = tl.dot(q, _widened(k, q.dtype, PTX, FOREIGN), input_precision="ieee", out_dtype=tl.float32)
        if SOFTCAP:
            # c · tanh(s / c) = c − 2c / (1 + e^(2s / c))
            s = softcap - 2.0 * softcap * reciprocal(1.0 + tl.exp2(s * scale))
        else:
            s = s * scale
        if ALIBI:
            s -= slope[:, None] * tl.abs((upper[:, None] - cols[None, :]).to(tl.float32))
        if MASKED:
            if LEFT:
                # one comparison for both ends, unsigned: each that waits takes scalar registers
                visible = (cols[None, :] - lower[:, None]).to(tl.uint32, bitcast=True) <= (upper - lower)[:, None]
            else:
                visible = cols[None, :] <= upper[:, None]
            s = tl.where(visible, s, float("-inf"))
        top_now = tl.maximum(top, tl.max(s, 1))
        # a row that has seen nothing yet: −inf − −inf would be NaN
        base = tl.where(top_now == float("-inf"), 0.0, top_now)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        top = top_now
        total = total * shrink + tl.sum(p, 1)
        v = _loaded(v_ptr, v_at, v_tile, mask_v, MASKED or not EVEN_DV)
        acc = tl.dot(
            p.to(q.dtype), _widened(v, q.dtype, PTX, FOREIGN), acc * shrink[:, None], input_precision="ieee",
            out_dtype=tl.float32,
        )  # fmt: skip
    return acc, total, top


@triton.jit(do_not_specialize=SIZES)
def _decoding_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, lens_ptr, table_ptr, alibi_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr,
    o_ptr, lse_ptr, part_ptr, meta_ptr,
    scale, softcap, left, tokens, kv_heads, group, page, splits, d_units, dv_units,
    stride_qb, stride_qt, stride_qh, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh,
    stride_tb, stride_len, stride_ab, stride_ah, stride_sink, stride_ks, stride_vs,
    PAGED: tl.constexpr, WHOLE: tl.constexpr, LEFT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    SINKS: tl.constexpr, SCALED: tl.constexpr, LSE: tl.constexpr, SPLIT: tl.constexpr,
    Q_ALIGN: tl.constexpr, KV_ALIGN: tl.constexpr, D_ALIGN: tl.constexpr, DV_ALIGN: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr, FOREIGN: tl.constexpr,
    PDL: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """CHUNK keys of one head of one sequence, for all queries that read them: rows t · group + g of query t, head g.

    Not SPLIT: the result. SPLIT: sums to part_ptr [B, Hk, splits, rows, Dv], their largest score and total to meta_ptr
    [B, Hk, splits, rows, 2]; a split beyond a sequence's keys writes nothing.
    """
    split = tl.program_id(0) % splits
    block_m = tl.program_id(0) // splits
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    # `_joining_kernel`
    allow_next(PDL and SPLIT)
    keys = tl.load(lens_ptr + sequence * stride_len)
    begin = split * CHUNK
    end = tl.minimum(begin + CHUNK, keys)
    # the keys that any query sees
    first = 0
    if LEFT:
        first = tl.maximum(keys - tokens - left, 0)
        begin = tl.maximum(begin, (first // BLOCK_N) * BLOCK_N)
    if SPLIT and begin >= end:
        return

    offs_m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    rows = tokens * group
    mask_m = offs_m < rows
    token = offs_m // group
    head = kv_head * group + offs_m % group
    mask_d = tl.full([BLOCK_D], True, tl.int1) if EVEN_D else offs_d < d_units * D_ALIGN
    mask_dv = tl.full([BLOCK_DV], True, tl.int1) if EVEN_DV else offs_dv < dv_units * DV_ALIGN
    q_rows = sequence * stride_qb + token.to(tl.int64) * stride_qt + head * stride_qh
    q = tl.load(
        q_ptr + (q_rows * Q_ALIGN)[:, None] + offs_d[None, :], mask=mask_m[:, None] & mask_d[None, :], other=0.0
    )
    # the last key that a query sees: the last query sees the last
    upper = keys - tokens + token
    lower = upper
    if LEFT:
        lower = upper - left

    stride_kp = stride_kp.to(tl.int64) * KV_ALIGN
    stride_vp = stride_vp.to(tl.int64) * KV_ALIGN
    stride_kt = stride_kt.to(tl.int64) * KV_ALIGN
    stride_vt = stride_vt.to(tl.int64) * KV_ALIGN
    k_ptr += kv_head * stride_kh * KV_ALIGN
    v_ptr += kv_head * stride_vh * KV_ALIGN
    if PAGED:
        table_ptr += sequence * stride_tb
    else:
        k_ptr += sequence * stride_kp
        v_ptr += sequence * stride_vp
    # offsets in a tile: in 32 bits where they fit
    offs_k = offs_n.to(tl.int64) if WIDE else offs_n
    k_tile = offs_d[:, None]
    v_tile = offs_dv[None, :]
    if not PAGED or WHOLE:
        k_tile = k_tile + (offs_k * (stride_kt if WIDE else stride_kt.to(tl.int32)))[None, :]
        v_tile = v_tile + (offs_k * (stride_vt if WIDE else stride_vt.to(tl.int32)))[:, None]
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    if SCALED:
        scale *= tl.load(k_scale_ptr + kv_head * stride_ks)
    if SOFTCAP:
        scale = 2.0 * LOG2_E * scale / softcap
        softcap = softcap * LOG2_E
    else:
        scale = scale * LOG2_E
    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slope = tl.load(alibi_ptr + sequence * stride_ab + head * stride_ah, mask=mask_m, other=0.0) * LOG2_E
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        # a key without a value, of the first split alone
        sink = tl.load(sinks_ptr + head * stride_sink, mask=mask_m, other=float("-inf")).to(tl.float32) * LOG2_E
        if not SPLIT:
            top = sink
            total = tl.where(sink == float("-inf"), 0.0, 1.0)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # tiles that every query sees in full are [whole, rest)
    whole = begin
    if LEFT:
        whole = tl.minimum(tl.maximum(tl.cdiv(keys - 1 - left, BLOCK_N) * BLOCK_N, begin), end)
        acc, total, top = _attend(
            acc, total, top, q, k_ptr, v_ptr, table_ptr, page, k_tile, v_tile, stride_kp, stride_kt, stride_vp,
            stride_vt, begin, whole, first, end, lower, upper, mask_d, mask_dv, scale, softcap, slope,
            True, PAGED, WHOLE, LEFT, SOFTCAP, ALIBI, EVEN_D, EVEN_DV, PTX, FOREIGN, BLOCK_N,
        )  # fmt: skip
    rest = whole + tl.maximum(tl.minimum(end, keys - tokens + 1) - whole, 0) // BLOCK_N * BLOCK_N
    acc, total, top = _attend(
        acc, total, top, q, k_ptr, v_ptr, table_ptr, page, k_tile, v_tile, stride_kp, stride_kt, stride_vp, stride_vt,
        whole, rest, first, end, lower, upper, mask_d, mask_dv, scale, softcap, slope,
        False, PAGED, WHOLE, LEFT, SOFTCAP, ALIBI, EVEN_D, EVEN_DV, PTX, FOREIGN, BLOCK_N,
    )  # fmt: skip
    acc, total, top = _attend(
        acc, total, top, q, k_ptr, v_ptr, table_ptr, page, k_tile, v_tile, stride_kp, stride_kt, stride_vp, stride_vt,
        rest, end, first, end, lower, upper, mask_d, mask_dv, scale, softcap, slope,
        True, PAGED, WHOLE, LEFT, SOFTCAP, ALIBI, EVEN_D, EVEN_DV, PTX, FOREIGN, BLOCK_N,
    )  # fmt: skip
    if SCALED:
        acc *= tl.load(v_scale_ptr + kv_head * stride_vs)
    Dv = dv_units * DV_ALIGN
    if SPLIT:
        at = ((sequence * kv_heads + kv_head) * splits + split) * rows + offs_m
        tl.store(part_ptr + at[:, None] * Dv + offs_dv[None, :], acc, mask=mask_m[:, None] & mask_dv[None, :])
        tl.store(meta_ptr + at * 2, top, mask=mask_m)
        tl.store(meta_ptr + at * 2 + 1, total, mask=mask_m)
    else:
        at = (sequence * tokens + token) * (kv_heads * group) + head
        if LSE:
            lse_at = (sequence * (kv_heads * group) + head) * tokens + token
            tl.store(lse_ptr + lse_at, (top + tl.log2(total)) * LN_2, mask=mask_m)
        acc = acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
        out = o_ptr + at[:, None] * Dv + offs_dv[None, :]
        tl.store(out, acc.to(o_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_dv[None, :])


@triton.jit(do_not_specialize=SIZES)
def _joining_kernel(  # type: ignore[no-untyped-def]
    part_ptr, meta_ptr, lens_ptr, sinks_ptr, o_ptr, lse_ptr,
    left, tokens, kv_heads, group, splits, dv_units, stride_len, stride_sink,
    LEFT: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, DV_ALIGN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row of the result from those of its splits, BLOCK_S of them at a time, in their order."""
    await_previous(PDL)
    row = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    rows = tokens * group
    token = row // group
    head = kv_head * group + row % group
    keys = tl.load(lens_ptr + sequence * stride_len)
    first = 0
    if LEFT:
        first = tl.maximum(((keys - tokens - left) // BLOCK_N) * BLOCK_N, 0) // CHUNK
    Dv = dv_units * DV_ALIGN
    offs_dv = tl.arange(0, BLOCK_DV)
    mask_dv = offs_dv < Dv
    offs_s = tl.arange(0, BLOCK_S)
    top = float("-inf")
    total = 0.0
    if SINKS:
        top = tl.load(sinks_ptr + head * stride_sink).to(tl.float32) * LOG2_E
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    base_at = (sequence * kv_heads + kv_head) * splits
    last = tl.cdiv(keys, CHUNK)
    # from multiples of BLOCK_S on, so that what is added to what does not depend on how many there are
    for start in range(first // BLOCK_S * BLOCK_S, last, BLOCK_S):
        split = start + offs_s
        inside = (split >= first) & (split < last)
        at = (base_at + split) * rows + row
        other = tl.load(meta_ptr + at * 2, mask=inside, other=float("-inf"))
        more = tl.load(meta_ptr + at * 2 + 1, mask=inside, other=0.0)
        part = tl.load(
            part_ptr + at[:, None] * Dv + offs_dv[None, :], mask=inside[:, None] & mask_dv[None, :], other=0.0
        )
        top_now = tl.maximum(top, tl.max(other, 0))
        # a row that has seen nothing yet: −inf − −inf would be NaN
        base = tl.where(top_now == float("-inf"), 0.0, top_now)
        shrink = tl.exp2(top - base)
        weight = tl.exp2(other - base)
        acc = acc * shrink + tl.sum(part * weight[:, None], 0)
        total = total * shrink + tl.sum(more * weight, 0)
        top = top_now
    if LSE:
        at_lse = (sequence * (kv_heads * group) + head) * tokens + token
        tl.store(lse_ptr + at_lse, (top + tl.log2(total)) * LN_2)
    out = ((sequence * tokens + token) * (kv_heads * group) + head) * Dv
    acc = acc * (1.0 / tl.where(total == 0.0, 1.0, total))
    tl.store(o_ptr + out + offs_dv, acc.to(o_ptr.dtype.element_ty), mask=mask_dv)
