"""Attention of a few queries over a long cache: keys are split over programs, whose sums are put together in order.

Split-KV as in Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023), with the softmax of `flash_attention`. The query
heads that share a head of keys are rows of one tile, so that the cache is read once.
"""

from __future__ import annotations

from wavecrest.ops.common.device import LOG2_E, pdl_launch_dependents, pdl_wait
from wavecrest.ops.common.ptx import (
    INT4_BF16,
    INT4_FP16,
    INT4_PAIRS_BF16,
    INT4_PAIRS_FP16,
    INT8_PAIRS_BF16,
    INT8_PAIRS_FP16,
)
from wavecrest.ops.common.triton import reciprocal, tl, triton
from wavecrest.ops.common.widen import narrowed, widened

LN_2 = tl.constexpr(0.6931471805599453)
# weights of float16 are 2¹⁵ times as large: none that counts beside 1, over any number of keys, is below its range
LIFT = tl.constexpr(15.0)

# e4m3 of two elements of two keys as 16-bit floats, an instruction for two of them
_E4M3_PAIRS = """{ .reg .b32 x0, x1; .reg .b16 h0, h1, l0, l1; .reg .f32 f0, f1;
prmt.b32 x0, $2, 0, 0x4420; prmt.b32 x1, $2, 0, 0x4431; cvt.u16.u32 h0, x0; cvt.u16.u32 h1, x1;
"""
_AS_FP16 = "cvt.rn.f16x2.e4m3x2 $0, h0; cvt.rn.f16x2.e4m3x2 $1, h1; }"
_AS_BF16 = "".join(
    f"cvt.rn.f16x2.e4m3x2 x{i}, h{i}; mov.b32 {{l0, l1}}, x{i}; cvt.f32.f16 f0, l0; cvt.f32.f16 f1, l1; "
    f"cvt.rn.bf16x2.f32 ${i}, f1, f0; "
    for i in range(2)
)
# in one line, as inductor (torch 2.11) writes the text into a file
E4M3_PAIRS_FP16 = tl.constexpr((_E4M3_PAIRS + _AS_FP16).replace("\n", " "))
E4M3_PAIRS_BF16 = tl.constexpr((_E4M3_PAIRS + _AS_BF16 + "}").replace("\n", " "))

# values that do not make a kernel anew when they change
SIZES = [
    "scale", "softcap", "left", "seqlen_q", "kv_heads", "group", "page", "splits", "d_units", "dv_units",
    "stride_qb", "stride_qt", "stride_qh", "stride_kp", "stride_kt", "stride_kh", "stride_vp", "stride_vt", "stride_vh",
    "stride_tb", "stride_len", "stride_start", "stride_ab", "stride_ah", "stride_sink", "stride_before",
    "stride_ksp", "stride_kst", "stride_ksh", "stride_vsp", "stride_vst", "stride_vsh",
    "stride_kzp", "stride_kzt", "stride_kzh", "stride_vzp", "stride_vzt", "stride_vzh", "CHUNK",
]  # fmt: skip


@triton.jit
def _halves(packed, TYPE: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """The low and the high 4 bits of bytes, minus 8: about as large as the values, and exact in any TYPE."""
    if PTX and tl.float16 == TYPE:
        low, high = tl.inline_asm_elementwise(
            INT4_FP16, "=r,=r,=r,=r,r", [packed], (tl.float16, tl.float16), is_pure=True, pack=4
        )
    elif PTX:
        low, high = tl.inline_asm_elementwise(
            INT4_BF16, "=r,=r,=r,=r,r", [packed], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        if tl.float32 == TYPE:
            low, high = low.to(tl.float32), high.to(tl.float32)
    else:
        low = narrowed((packed & 15).to(tl.float32) - 8.0, TYPE)
        high = narrowed((packed >> 4).to(tl.float32) - 8.0, TYPE)
    return low, high


@triton.jit
def _byte(pairs, SECOND: tl.constexpr, STORED: tl.constexpr, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first or the second bytes of pairs [rows, head_dim / 2] of int16, numbers of type STORED, in TYPE."""
    if tl.int8 == STORED:
        wide = pairs if SECOND else pairs << 8
        values = (wide >> 8).to(tl.float32)
    else:
        wide = pairs >> 8 if SECOND else pairs
        values = (wide & 0xFF).to(tl.uint8).to(STORED, bitcast=True).to(tl.float32)
    return values.to(TYPE)


@triton.jit
def _of_pairs(pairs, STORED: tl.constexpr, TYPE: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values of two elements in 16 bits, each in TYPE: (even elements, odd ones).

    In 4 bits: the low ones of both, then the high ones, all minus 8.

    Matrix units take an element of two keys side by side. There is an instruction that turns 16 bits that way on
    the way from shared memory (`ldmatrix`), and none for 8: int8 values of 64 keys with head_dim 128 took 128 loads of
    a byte a thread and as many instructions to put them together (sm_90, triton 3.6).
    """
    if tl.uint8 == STORED:
        if PTX and tl.bfloat16 == TYPE:
            values = tl.inline_asm_elementwise(
                INT4_PAIRS_BF16,
                "=r,=r,=r,=r,r",
                [pairs],
                (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
        elif PTX:
            values = tl.inline_asm_elementwise(
                INT4_PAIRS_FP16,
                "=r,=r,=r,=r,r",
                [pairs],
                (tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True,
                pack=2,
            )
        else:
            values = (
                ((pairs & 15).to(tl.float32) - 8.0).to(TYPE), (((pairs >> 8) & 15).to(tl.float32) - 8.0).to(TYPE),
                (((pairs >> 4) & 15).to(tl.float32) - 8.0).to(TYPE),
                (((pairs >> 12) & 15).to(tl.float32) - 8.0).to(TYPE),
            )  # fmt: skip
    elif PTX and tl.int8 == STORED and tl.bfloat16 == TYPE:
        values = tl.inline_asm_elementwise(
            INT8_PAIRS_BF16, "=r,=r,r", [pairs], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    elif PTX and tl.int8 == STORED:
        values = tl.inline_asm_elementwise(
            INT8_PAIRS_FP16, "=r,=r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif PTX and tl.float8e4nv == STORED and tl.float16 == TYPE:
        values = tl.inline_asm_elementwise(
            E4M3_PAIRS_FP16, "=r,=r,r", [pairs], (tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif PTX and tl.float8e4nv == STORED:
        values = tl.inline_asm_elementwise(
            E4M3_PAIRS_BF16, "=r,=r,r", [pairs], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        values = (_byte(pairs, False, STORED, TYPE), _byte(pairs, True, STORED, TYPE))
    return values


@triton.jit
def _exponents(q):  # type: ignore[no-untyped-def]
    """The exponent of the largest number of each row, as float32 has it."""
    return (tl.max(tl.abs(q.to(tl.float32)), 1).to(tl.int32, bitcast=True) >> 23) & 0xFF


@triton.jit
def _in_float16(q, exponents):  # type: ignore[no-untyped-def]
    """Rows over a power of two, which float16 holds in full down to 2⁻²⁴ of the row's largest."""
    return (q.to(tl.float32) * ((254 - exponents) << 23).to(tl.float32, bitcast=True)[:, None]).to(tl.float16)


@triton.jit
def _loaded(ptr, at, tile, mask, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of the cache; what is masked is 0."""
    if MASKED:
        values = tl.load(ptr + at + tile, mask=mask, other=0.0)
    else:
        values = tl.load(ptr + at + tile)
    return values


@triton.jit
def _numbers(  # type: ignore[no-untyped-def]
    of, number, place, seen, MASKED: tl.constexpr, PAGED: tl.constexpr, WHOLE: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scales or shifts of a tile's keys as stored, 0 for keys that are masked: [GROUPS, BLOCK_N], or [BLOCK_N]."""
    ptr, stride_p, stride_t = of
    at = place * stride_t
    if PAGED:
        at += number * stride_p
    if not PAGED or WHOLE:
        at += tl.arange(0, BLOCK_N).to(tl.int64) * stride_t
    if GROUPS > 1:
        at = tl.arange(0, GROUPS)[:, None] + at[None, :]
        seen = seen[None, :]
    return _loaded(ptr, at, 0, seen, MASKED)


@triton.jit
def _pair(  # type: ignore[no-untyped-def]
    scale, shift, number, place, seen, MASKED: tl.constexpr, PAGED: tl.constexpr, WHOLE: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(scales, shifts) of a tile's keys; of 8 bits, which have none, twice the scales."""
    scales = _numbers(scale, number, place, seen, MASKED, PAGED, WHOLE, GROUPS, BLOCK_N)
    shifts = scales
    if GROUPS > 0:
        shifts = _numbers(shift, number, place, seen, MASKED, PAGED, WHOLE, GROUPS, BLOCK_N)
    return scales, shifts


@triton.jit
def _next_pairs(  # type: ignore[no-untyped-def]
    k_scale, k_shift, v_scale, v_shift, table_ptr, page, start, first, last,
    PAGED: tl.constexpr, WHOLE: tl.constexpr, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scales and shifts of keys, and of values, of the tile that begins at `start`, if there is one."""
    cols = start + tl.arange(0, BLOCK_N)
    seen = (cols >= first) & (cols < last)
    number = tl.cast(0, tl.int64)
    if PAGED and not WHOLE:
        number = tl.load(table_ptr + cols // page, mask=seen, other=0).to(tl.int64)
        place = (cols % page).to(tl.int64)
    elif PAGED:
        number = tl.load(table_ptr + start // page, mask=start < last, other=0).to(tl.int64)
        place = tl.cast(start % page, tl.int64)
    else:
        place = tl.cast(start, tl.int64)
    return (
        _pair(k_scale, k_shift, number, place, seen, True, PAGED, WHOLE, GROUPS, BLOCK_N),
        _pair(v_scale, v_shift, number, place, seen, True, PAGED, WHOLE, GROUPS, BLOCK_N),
    )


@triton.jit
def _plain_nan(x):  # type: ignore[no-untyped-def]
    """x, with one NaN for all: one whose bits are all set would be rounded to -0 by `_by_groups`."""
    return tl.where(x == x, x, float("nan"))


@triton.jit
def _by_groups(half, scale, shift, TYPE: tl.constexpr, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Quantized values times scales plus shifts, rounded to TYPE. ROUNDS: by an instruction, to bfloat16 too."""
    wide = half * scale + shift
    if tl.bfloat16 == TYPE and not ROUNDS:
        # to nearest even; the compiler's own way asks each for NaN, which takes 2 instructions and scalar registers
        bits = wide.to(tl.int32, bitcast=True)
        values = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(TYPE, bitcast=True)
    else:
        values = wide.to(TYPE)
    return values


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    q, k, scale, scales, PTX: tl.constexpr, FOREIGN: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr,
    ROUNDS: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """scale · q · keys of a tile. A single scale of a key multiplies the sum of quantized values, which is exact."""
    TYPE: tl.constexpr = q[0].dtype
    if TOKENS:
        factor = scales[0].to(tl.float32)
    if GROUPS > 0:
        shift = scales[1].to(tl.float32) + 8.0 * factor
        if GROUPS > 1:
            low, high = _halves(k, tl.float32, PTX)
            if tl.bfloat16 == TYPE and not ROUNDS:
                factor, shift = _plain_nan(factor), _plain_nan(shift)
            low = _by_groups(low, factor[:, None, :], shift[:, None, :], TYPE, ROUNDS)
            high = _by_groups(high, factor[:, None, :], shift[:, None, :], TYPE, ROUNDS)
            BYTES: tl.constexpr = q[0].shape[1]
            low = tl.reshape(low, [BYTES, BLOCK_N])
            high = tl.reshape(high, [BYTES, BLOCK_N])
        else:
            low, high = _halves(k, TYPE, PTX)
        s = tl.dot(q[0], low, input_precision="ieee", out_dtype=tl.float32)
        s = tl.dot(q[1], high, s, input_precision="ieee", out_dtype=tl.float32)
        if GROUPS > 1:
            s = s * scale
        else:
            s = s * (factor * scale)[None, :] + q[2][:, None] * (shift * scale)[None, :]
    else:
        s = tl.dot(q[0], widened(k, TYPE, PTX, FOREIGN), input_precision="ieee", out_dtype=tl.float32)
        if TOKENS:
            s = s * (factor * scale)[None, :]
        else:
            s = s * scale
    if HALF:
        s = s * q[1 if GROUPS == 0 else 3][:, None]
    return s


@triton.jit
def _summed(  # type: ignore[no-untyped-def]
    acc, p, alpha, v, scales, TYPE: tl.constexpr, STORED: tl.constexpr, PTX: tl.constexpr, FOREIGN: tl.constexpr,
    TOKENS: tl.constexpr, GROUPS: tl.constexpr, ROUNDS: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """acc · alpha + weights p · values of a tile.

    Where a value has one scale it multiplies the weight, in float32 and before that is rounded, but not in float16:
    that has no room for a weight times a scale.
    """
    # values are multiplied before they are rounded
    BEFORE: tl.constexpr = TOKENS and (GROUPS > 1 or tl.float16 == TYPE)
    # of 4 bits those in float32 are exact in any type
    WIDE: tl.constexpr = tl.float32 if BEFORE and GROUPS > 0 and not PAIRS else TYPE
    if PAIRS:
        parts = _of_pairs(v, STORED, WIDE, PTX)
    elif GROUPS > 0:
        parts = _halves(v, WIDE, PTX)
    else:
        parts = (widened(v, WIDE, PTX, FOREIGN),)
    weight = p
    if TOKENS:
        factor = scales[0].to(tl.float32)
        shift = tl.zeros_like(factor)
        if GROUPS > 0:
            shift = scales[1].to(tl.float32) + 8.0 * factor
        if BEFORE:
            if tl.bfloat16 == TYPE and not ROUNDS:
                factor, shift = _plain_nan(factor), _plain_nan(shift)
            if GROUPS > 1:
                factor, shift = tl.trans(factor)[:, :, None], tl.trans(shift)[:, :, None]
            else:
                factor, shift = factor[:, None], shift[:, None]
            COLUMNS: tl.constexpr = acc[0].shape[1]
            scaled = ()
            for i in tl.static_range(len(parts)):
                one = _by_groups(parts[i].to(tl.float32), factor, shift, TYPE, ROUNDS)
                scaled = scaled + (tl.reshape(one, [BLOCK_N, COLUMNS]),)  # type: ignore[assignment]
            parts = scaled
        else:
            weight = p * factor[None, :]
    weight = weight.to(TYPE)
    sums = ()
    for i in tl.static_range(len(parts)):
        one = tl.dot(weight, parts[i], acc[i] * alpha[:, None], input_precision="ieee", out_dtype=tl.float32)
        sums = sums + (one,)  # type: ignore[assignment]
    if GROUPS > 0 and not BEFORE:
        sums = sums + (acc[len(parts)] * alpha + tl.sum(p * shift[None, :], 1),)  # type: ignore[assignment]
    return sums


@triton.jit
def _head_dim(units, ALIGN: tl.constexpr, EVEN: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """(elements, their mask, size): `size` is the count of elements or, in 4 bits, the bytes of a group.

    In 4 bits they are the elements in the low bits, a group's bytes beside the next group's.
    """
    offs = tl.arange(0, BLOCK)
    size = units * ALIGN
    if GROUPS > 0:
        EACH: tl.constexpr = BLOCK // GROUPS
        if EVEN:
            size = EACH
        cols = (offs // EACH) * (2 * size) + offs % EACH
        offs = offs % EACH
    else:
        if EVEN:
            size = BLOCK
        cols = offs
    mask = tl.full([BLOCK], True, tl.int1) if EVEN else offs < size
    return cols, mask, size


@triton.jit
def _q_tile(ptr, rows, cols, mask_m, mask):  # type: ignore[no-untyped-def]
    """Elements of queries; what is masked is 0."""
    return tl.load(ptr + rows[:, None] + cols[None, :], mask=mask_m[:, None] & mask[None, :], other=0.0)


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    acc, l_i, m_i, q, k_ptr, v_ptr, table_ptr, page, k_tile, v_tile, stride_kp, stride_kt, stride_vp, stride_vt,
    k_scale, k_shift, v_scale, v_shift,
    begin, end, first, last, lower, upper, mask_d, mask_dv, scale, softcap, slope,
    MASKED: tl.constexpr, PAGED: tl.constexpr, WHOLE: tl.constexpr, LEFT: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PTX: tl.constexpr, FOREIGN: tl.constexpr,
    TOKENS: tl.constexpr, GROUPS: tl.constexpr, ROUNDS: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr,
    AHEAD: tl.constexpr, STORED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention to keys from `begin` to `end`, in tiles: of each row (weighted values, sum of weights, largest score).

    `first`, `last`: the keys that any row sees lie between them; MASKED: tiles may have others, which are not read, and
    a row i sees those from lower[i] to upper[i], none where lower[i] is upper[i] + 1. WHOLE: a tile lies within one
    page. TOKENS: each key and value has a scale. GROUPS: groups of a row in 4 bits, else 0; q is then (elements of the
    low bits, of the high ones, their sum), and acc is (elements of the low bits, of the high ones, and the shifts' part
    where that is summed apart). PAIRS: values are read two elements at a time, and acc is apart for even and odd ones.
    HALF: q is in float16, over powers of two that are its last part. AHEAD: scales are loaded a step ahead. STORED: the
    dtype of values in the cache.
    """
    # float16 has no room for a weight times a scale
    TYPE: tl.constexpr = tl.bfloat16 if HALF and TOKENS else q[0].dtype
    offs_n = tl.arange(0, BLOCK_N)
    if AHEAD:
        # the compiler loads ahead what products take alone (triton 3.6), and each step would wait for these
        ahead = _next_pairs(
            k_scale, k_shift, v_scale, v_shift, table_ptr, page, begin, first, last, PAGED, WHOLE, GROUPS, BLOCK_N
        )
    for start in range(begin, end, BLOCK_N):
        cols = start + offs_n
        mask_k = mask_d[:, None]
        mask_v = mask_dv[None, :]
        seen = cols < last
        if GROUPS > 1:
            mask_k = mask_d[None, :, None]
            mask_v = mask_dv[None, None, :]
        if MASKED:
            if LEFT:
                seen = seen & (cols >= first)
            # zeros for what no row sees: 0 · NaN would be NaN
            if GROUPS > 1:
                mask_k = mask_k & seen[None, None, :]
                mask_v = mask_v & seen[:, None, None]
            else:
                mask_k = mask_k & seen[None, :]
                mask_v = mask_v & seen[:, None]
        number = tl.cast(0, tl.int64)
        # what moves with the tile is added to the pointer, in 64 bits
        if PAGED and not WHOLE:
            if MASKED:
                number = tl.load(table_ptr + cols // page, mask=seen, other=0).to(tl.int64)
            else:
                number = tl.load(table_ptr + cols // page).to(tl.int64)
            place = (cols % page).to(tl.int64)
            k_at = number * stride_kp + place * stride_kt
            v_at = number * stride_vp + place * stride_vt
            if GROUPS > 1:
                k_at = k_at[None, None, :]
                v_at = v_at[:, None, None]
            else:
                k_at = k_at[None, :]
                v_at = v_at[:, None]
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
        scales = ()
        if AHEAD:
            scales, v_scales = ahead
            ahead = _next_pairs(
                k_scale, k_shift, v_scale, v_shift, table_ptr, page, start + BLOCK_N, first, last,
                PAGED, WHOLE, GROUPS, BLOCK_N,
            )  # fmt: skip
        elif TOKENS:
            scales = _pair(k_scale, k_shift, number, place, seen, MASKED, PAGED, WHOLE, GROUPS, BLOCK_N)
        s = _scores(q, k, scale, scales, PTX, FOREIGN, TOKENS, GROUPS, ROUNDS, HALF, BLOCK_N)
        if SOFTCAP:
            # c · tanh(s / c) = c − 2c / (1 + e^(2s / c))
            s = softcap - 2.0 * softcap * reciprocal(1.0 + tl.exp2(s))
        if ALIBI:
            s -= slope[:, None] * tl.abs((upper[:, None] - cols[None, :]).to(tl.float32))
        if MASKED:
            if LEFT:
                # one comparison for both ends, unsigned: each that waits takes scalar registers
                visible = (cols[None, :] - lower[:, None]).to(tl.uint32, bitcast=True) < (upper + 1 - lower)[:, None]
            else:
                visible = cols[None, :] <= upper[:, None]
            s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        # a row that has seen nothing yet: −inf − −inf would be NaN
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - base)
        if HALF and not TOKENS:
            base -= LIFT
        p = tl.exp2(s - base[:, None])
        m_i = m_new
        l_i = l_i * alpha + tl.sum(p, 1)
        v = _loaded(v_ptr, v_at, v_tile, mask_v, MASKED or not EVEN_DV)
        if AHEAD:
            scales = v_scales
        elif TOKENS:
            scales = _pair(v_scale, v_shift, number, place, seen, MASKED, PAGED, WHOLE, GROUPS, BLOCK_N)
        acc = _summed(acc, p, alpha, v, scales, TYPE, STORED, PTX, FOREIGN, TOKENS, GROUPS, ROUNDS, PAIRS, BLOCK_N)
    return acc, l_i, m_i


@triton.jit
def _hidden(starts_ptr, at, seqlen_k, STARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many of a sequence's keys are hidden before the first that is not."""
    hidden = 0
    if STARTS:
        hidden = tl.minimum(tl.maximum(tl.load(starts_ptr + at), 0), seqlen_k)
    return hidden


@triton.jit(do_not_specialize=SIZES)
def _decoding_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, lens_ptr, starts_ptr, table_ptr, alibi_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, k_shift_ptr,
    v_shift_ptr, before_ptr, o_ptr, lse_ptr, part_ptr, meta_ptr,
    scale, softcap, left, seqlen_q, kv_heads, group, page, splits, d_units, dv_units,
    stride_qb, stride_qt, stride_qh, stride_kp, stride_kt, stride_kh, stride_vp, stride_vt, stride_vh,
    stride_tb, stride_len, stride_start, stride_ab, stride_ah, stride_sink, stride_before,
    stride_ksp, stride_kst, stride_ksh, stride_vsp, stride_vst, stride_vsh,
    stride_kzp, stride_kzt, stride_kzh, stride_vzp, stride_vzt, stride_vzh,
    PAGED: tl.constexpr, WHOLE: tl.constexpr, LEFT: tl.constexpr, STARTS: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, SINKS: tl.constexpr, SCALED: tl.constexpr, LSE: tl.constexpr, SPLIT: tl.constexpr,
    Q_ALIGN: tl.constexpr, KV_ALIGN: tl.constexpr, D_ALIGN: tl.constexpr, DV_ALIGN: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr, FOREIGN: tl.constexpr,
    PDL: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr, ROUNDS: tl.constexpr, PAIRS: tl.constexpr,
    HALF: tl.constexpr, AHEAD: tl.constexpr, ADVANCE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK,
):  # fmt: skip
    """CHUNK keys of one head of one sequence, for all queries that read them: rows t · group + g of query t, head g.

    Not SPLIT: the result. SPLIT: sums to part_ptr [B, Hk, splits, rows, Dv], their largest score and total to meta_ptr
    [B, Hk, splits, rows, 2]; a split beyond a sequence's keys writes nothing. GROUPS: a cache of 4 bits, where D and Dv
    (`d_units`, `dv_units`) are the bytes of one group, and BLOCK_D and BLOCK_DV hold those of all groups.
    PAIRS: values are read as 16 bits. HALF: GEMMs are of float16, where q is bfloat16 and quantized values are exact in
    both. ADVANCE: at `before_ptr` are the tokens before those of the call, which are added.
    """
    STORED: tl.constexpr = v_ptr.dtype.element_ty
    V_ALIGN: tl.constexpr = KV_ALIGN // 2 if PAIRS else KV_ALIGN
    if PAIRS:
        v_ptr = v_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    split = tl.program_id(0) % splits
    block_m = tl.program_id(0) // splits
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    # `_joining_kernel`
    pdl_launch_dependents(PDL and SPLIT)
    if ADVANCE and ((tl.program_id(0) == 0) & (kv_head == 0) & ((stride_before != 0) | (sequence == 0))):
        # by one program alone, and behind the append, whose programs have all read it
        before_ptr += sequence * stride_before
        tl.store(before_ptr, tl.load(before_ptr) + seqlen_q)
    seqlen_k = tl.load(lens_ptr + sequence * stride_len)
    begin = split * CHUNK
    end = tl.minimum(begin + CHUNK, seqlen_k)
    # the keys that any query sees
    first = 0
    hidden = _hidden(starts_ptr, sequence * stride_start, seqlen_k, STARTS)
    if LEFT:
        first = tl.maximum(seqlen_k - seqlen_q - left, hidden)
        begin = tl.maximum(begin, (first // BLOCK_N) * BLOCK_N)
    if SPLIT and begin >= end:
        return

    offs_m = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d, mask_d, size_d = _head_dim(d_units, D_ALIGN, EVEN_D, GROUPS, BLOCK_D)
    offs_dv, mask_dv, size_dv = _head_dim(dv_units, DV_ALIGN, EVEN_DV, GROUPS, BLOCK_DV)
    rows = seqlen_q * group
    mask_m = offs_m < rows
    token = offs_m // group
    head = kv_head * group + offs_m % group
    q_rows = (sequence * stride_qb + token.to(tl.int64) * stride_qt + head * stride_qh) * Q_ALIGN
    low = _q_tile(q_ptr, q_rows, offs_d, mask_m, mask_d)
    if GROUPS > 0:
        high = _q_tile(q_ptr, q_rows, offs_d + size_d, mask_m, mask_d)
    if HALF:
        exponents = _exponents(low)
        if GROUPS > 0:
            exponents = tl.maximum(exponents, _exponents(high))
        # 0 and 2¹²⁷ have no inverse
        exponents = tl.minimum(tl.maximum(exponents, 1), 253)
        low = _in_float16(low, exponents)
        if GROUPS > 0:
            high = _in_float16(high, exponents)
    if GROUPS > 0:
        q = (low, high, tl.sum(low.to(tl.float32), 1) + tl.sum(high.to(tl.float32), 1))
    else:
        q = (low,)  # type: ignore[assignment]
    if HALF:
        q = q + ((exponents << 23).to(tl.float32, bitcast=True),)  # type: ignore[assignment]
    # the last key that a query sees: the last query sees the last
    upper = seqlen_k - seqlen_q + token
    lower = upper
    if LEFT:
        lower = upper - left
    if STARTS:
        # a query whose own key is hidden sees none
        lower = tl.minimum(tl.maximum(lower, hidden), upper + 1)

    stride_kp = tl.cast(stride_kp, tl.int64) * KV_ALIGN
    stride_vp = tl.cast(stride_vp, tl.int64) * V_ALIGN
    stride_kt = tl.cast(stride_kt, tl.int64) * KV_ALIGN
    stride_vt = tl.cast(stride_vt, tl.int64) * V_ALIGN
    k_ptr += kv_head * stride_kh * KV_ALIGN
    v_ptr += kv_head * stride_vh * V_ALIGN
    k_scale_ptr += kv_head * stride_ksh
    v_scale_ptr += kv_head * stride_vsh
    k_shift_ptr += kv_head * stride_kzh
    v_shift_ptr += kv_head * stride_vzh
    if PAGED:
        table_ptr += sequence * stride_tb
    else:
        k_ptr += sequence * stride_kp
        v_ptr += sequence * stride_vp
        k_scale_ptr += sequence * stride_ksp
        v_scale_ptr += sequence * stride_vsp
        k_shift_ptr += sequence * stride_kzp
        v_shift_ptr += sequence * stride_vzp
    k_scale = (k_scale_ptr, stride_ksp, stride_kst)
    v_scale = (v_scale_ptr, stride_vsp, stride_vst)
    k_shift = (k_shift_ptr, stride_kzp, stride_kzt)
    v_shift = (v_shift_ptr, stride_vzp, stride_vzt)
    # offsets in a tile: in 32 bits where they fit
    offs_k = offs_n.to(tl.int64) if WIDE else offs_n
    if GROUPS > 1:
        # [groups, bytes of one], so that a group's scale is spread over its bytes without a move between lanes
        group_d = tl.arange(0, BLOCK_D // GROUPS)
        group_dv = tl.arange(0, BLOCK_DV // GROUPS)
        k_tile = (tl.arange(0, GROUPS) * size_d)[:, None, None] + group_d[None, :, None]
        v_tile = (tl.arange(0, GROUPS) * size_dv)[None, :, None] + group_dv[None, None, :]
        bytes_d = tl.full([BLOCK_D // GROUPS], True, tl.int1) if EVEN_D else group_d < size_d
        bytes_dv = tl.full([BLOCK_DV // GROUPS], True, tl.int1) if EVEN_DV else group_dv < size_dv
    elif GROUPS == 1:
        bytes_d, bytes_dv = mask_d, mask_dv
        k_tile = tl.arange(0, BLOCK_D)[:, None]
        v_tile = tl.arange(0, BLOCK_DV)[None, :]
    else:
        bytes_d, bytes_dv = mask_d, mask_dv
        k_tile = offs_d[:, None]
        v_tile = offs_dv[None, :]
    if PAIRS:
        pairs = tl.arange(0, BLOCK_DV // 2)
        bytes_dv = tl.full([BLOCK_DV // 2], True, tl.int1) if EVEN_DV else 2 * pairs < size_dv
        v_tile = pairs[None, :]
    if not PAGED or WHOLE:
        k_rows = offs_k * (stride_kt if WIDE else tl.cast(stride_kt, tl.int32))
        v_rows = offs_k * (stride_vt if WIDE else tl.cast(stride_vt, tl.int32))
        if GROUPS > 1:
            k_tile = k_tile + k_rows[None, None, :]
            v_tile = v_tile + v_rows[:, None, None]
        else:
            k_tile = k_tile + k_rows[None, :]
            v_tile = v_tile + v_rows[:, None]
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    if SCALED:
        scale *= tl.load(k_scale_ptr)
    if SOFTCAP:
        scale = 2.0 * LOG2_E * scale / softcap
        softcap = softcap * LOG2_E
    else:
        scale = scale * LOG2_E
    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI:
        slope = tl.load(alibi_ptr + sequence * stride_ab + head * stride_ah, mask=mask_m, other=0.0) * LOG2_E
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        # a key without a value, of the first split alone
        sink = tl.load(sinks_ptr + head * stride_sink, mask=mask_m, other=float("-inf")).to(tl.float32) * LOG2_E
        if not SPLIT:
            m_i = sink
            l_i = tl.where(sink == float("-inf"), 0.0, 2.0**LIFT if HALF and not TOKENS else 1.0)
    zeros = tl.zeros([BLOCK_M, BLOCK_DV // 2 if PAIRS else BLOCK_DV], tl.float32)
    acc = (zeros,)
    if GROUPS > 0:
        acc = (zeros, zeros)  # type: ignore[assignment]
    if PAIRS:
        acc = acc + acc  # type: ignore[assignment]
    # of one group shifts are summed apart, but where weights have no room for scales
    APART: tl.constexpr = GROUPS == 1 and (HALF or tl.float16 != q_ptr.dtype.element_ty)
    if APART:
        acc = acc + (tl.zeros([BLOCK_M], tl.float32),)  # type: ignore[assignment]
    # tiles that every query sees in full are [whole, rest)
    whole = begin
    if LEFT:
        whole = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(seqlen_k - 1 - left, hidden), BLOCK_N) * BLOCK_N, begin), end)
        acc, l_i, m_i = _attend(
            acc, l_i, m_i, q, k_ptr, v_ptr, table_ptr, page, k_tile, v_tile, stride_kp, stride_kt, stride_vp,
            stride_vt, k_scale, k_shift, v_scale, v_shift, begin, whole, first, end, lower, upper, bytes_d, bytes_dv,
            scale, softcap, slope, True, PAGED, WHOLE, LEFT, SOFTCAP, ALIBI, EVEN_D, EVEN_DV, PTX, FOREIGN, TOKENS,
            GROUPS, ROUNDS, PAIRS, HALF, AHEAD, STORED, BLOCK_N,
        )  # fmt: skip
    rest = whole + tl.maximum(tl.minimum(end, seqlen_k - seqlen_q + 1) - whole, 0) // BLOCK_N * BLOCK_N
    acc, l_i, m_i = _attend(
        acc, l_i, m_i, q, k_ptr, v_ptr, table_ptr, page, k_tile, v_tile, stride_kp, stride_kt, stride_vp, stride_vt,
        k_scale, k_shift, v_scale, v_shift, whole, rest, first, end, lower, upper, bytes_d, bytes_dv,
        scale, softcap, slope, False, PAGED, WHOLE, LEFT, SOFTCAP, ALIBI, EVEN_D, EVEN_DV, PTX, FOREIGN, TOKENS, GROUPS,
        ROUNDS, PAIRS, HALF, AHEAD, STORED, BLOCK_N,
    )  # fmt: skip
    acc, l_i, m_i = _attend(
        acc, l_i, m_i, q, k_ptr, v_ptr, table_ptr, page, k_tile, v_tile, stride_kp, stride_kt, stride_vp, stride_vt,
        k_scale, k_shift, v_scale, v_shift, rest, end, first, end, lower, upper, bytes_d, bytes_dv,
        scale, softcap, slope, True, PAGED, WHOLE, LEFT, SOFTCAP, ALIBI, EVEN_D, EVEN_DV, PTX, FOREIGN, TOKENS, GROUPS,
        ROUNDS, PAIRS, HALF, AHEAD, STORED, BLOCK_N,
    )  # fmt: skip
    low = acc[0]
    high = acc[0]
    Dv = dv_units * DV_ALIGN
    if PAIRS:
        low = tl.interleave(acc[0], acc[1])
        if GROUPS > 0:
            high = tl.interleave(acc[2], acc[3])
    elif GROUPS > 0:
        high = acc[1]
    if HALF and not TOKENS:
        low *= 2.0**-LIFT
        l_i *= 2.0**-LIFT
    if SCALED:
        low *= tl.load(v_scale_ptr)
    if GROUPS > 0:
        Dv = 2 * GROUPS * size_dv
        if APART:
            shifts = acc[4 if PAIRS else 2]
            low += shifts[:, None]
            high += shifts[:, None]
    mask = mask_m[:, None] & mask_dv[None, :]
    if SPLIT:
        at = ((sequence * kv_heads + kv_head) * splits + split) * rows + offs_m
        part = part_ptr + at[:, None] * Dv + offs_dv[None, :]
        tl.store(part, low, mask=mask)
        if GROUPS > 0:
            tl.store(part + size_dv, high, mask=mask)
        tl.store(meta_ptr + at * 2, m_i, mask=mask_m)
        tl.store(meta_ptr + at * 2 + 1, l_i, mask=mask_m)
    else:
        at = (sequence * seqlen_q + token) * (kv_heads * group) + head
        if LSE:
            lse_at = (sequence * (kv_heads * group) + head) * seqlen_q + token
            tl.store(lse_ptr + lse_at, (m_i + tl.log2(l_i)) * LN_2, mask=mask_m)
        share = (1.0 / tl.where(l_i == 0.0, 1.0, l_i))[:, None]
        out = o_ptr + at[:, None] * Dv + offs_dv[None, :]
        tl.store(out, (low * share).to(o_ptr.dtype.element_ty), mask=mask)
        if GROUPS > 0:
            tl.store(out + size_dv, (high * share).to(o_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _joining_kernel(  # type: ignore[no-untyped-def]
    part_ptr, meta_ptr, lens_ptr, starts_ptr, sinks_ptr, o_ptr, lse_ptr,
    left, seqlen_q, kv_heads, group, splits, dv_units, stride_len, stride_start, stride_sink,
    LEFT: tl.constexpr, STARTS: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, DV_ALIGN: tl.constexpr,
    PDL: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_S: tl.constexpr, CHUNK, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row of the result from those of its splits, BLOCK_S of them at a time, in their order."""
    pdl_wait(PDL)
    row = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    sequence = tl.program_id(2).to(tl.int64)
    rows = seqlen_q * group
    token = row // group
    head = kv_head * group + row % group
    seqlen_k = tl.load(lens_ptr + sequence * stride_len)
    first = 0
    if LEFT:
        hidden = _hidden(starts_ptr, sequence * stride_start, seqlen_k, STARTS)
        begin = tl.maximum(seqlen_k - seqlen_q - left, hidden) // BLOCK_N * BLOCK_N
        first = begin // CHUNK
    Dv = dv_units * DV_ALIGN
    offs_dv = tl.arange(0, BLOCK_DV)
    mask_dv = offs_dv < Dv
    offs_s = tl.arange(0, BLOCK_S)
    m_i = float("-inf")
    l_i = 0.0
    if SINKS:
        m_i = tl.load(sinks_ptr + head * stride_sink).to(tl.float32) * LOG2_E
        l_i = tl.where(m_i == float("-inf"), 0.0, 1.0)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    base_at = (sequence * kv_heads + kv_head) * splits
    last = tl.cdiv(seqlen_k, CHUNK)
    if LEFT:
        # a program that has no key has written nothing
        last = tl.where(begin < seqlen_k, last, 0)
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
        m_new = tl.maximum(m_i, tl.max(other, 0))
        # a row that has seen nothing yet: −inf − −inf would be NaN
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m_i - base)
        weight = tl.exp2(other - base)
        acc = acc * alpha + tl.sum(part * weight[:, None], 0)
        l_i = l_i * alpha + tl.sum(more * weight, 0)
        m_i = m_new
    if LSE:
        at_lse = (sequence * (kv_heads * group) + head) * seqlen_q + token
        tl.store(lse_ptr + at_lse, (m_i + tl.log2(l_i)) * LN_2)
    out = ((sequence * seqlen_q + token) * (kv_heads * group) + head) * Dv
    acc = acc * (1.0 / tl.where(l_i == 0.0, 1.0, l_i))
    tl.store(o_ptr + out + offs_dv, acc.to(o_ptr.dtype.element_ty), mask=mask_dv)
