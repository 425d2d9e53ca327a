"""New keys and values, turned and rounded, to their places in a cache; queries, turned, to memory of their own."""

from __future__ import annotations

from wavecrest.ops.common.device import pdl_launch_dependents, pdl_wait
from wavecrest.ops.common.quantized import whole_numbers
from wavecrest.ops.common.triton import tl, triton

# which elements are a rotary pair
NONE, NEOX, GPTJ = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
STYLES = {"none": 0, "neox": 1, "gptj": 2}

# values that do not make a kernel anew when they change
SIZES = [
    "seqlen_q", "writers", "heads", "page", "capacity", "table_rows", "half", "size_q", "size_k", "size_v",
    "stride_qb", "stride_qt", "stride_qh", "stride_kb", "stride_kt", "stride_kh", "stride_vb", "stride_vt", "stride_vh",
    "stride_kcp", "stride_kct", "stride_kch", "stride_vcp", "stride_vct", "stride_vch",
    "stride_tb", "stride_len", "stride_cos", "stride_sin",
    "stride_ksp", "stride_kst", "stride_ksh", "stride_vsp", "stride_vst", "stride_vsh",
    "stride_kzp", "stride_kzt", "stride_kzh", "stride_vzp", "stride_vzt", "stride_vzh",
]  # fmt: skip


@triton.jit
def _turned(ptr, cols, mask, cos_ptr, sin_ptr, known, half, STYLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elements of a row in float32, turned and rounded as `rope` does; NaN for a place that the tables do not have."""
    x = tl.load(ptr + cols, mask=mask, other=0.0)
    y = x.to(tl.float32)
    if STYLE != NONE:
        if STYLE == NEOX:
            first = cols < half
            column = tl.where(first, cols, cols - half)
            other = tl.where(first, cols + half, cols - half)
        else:
            first = cols % 2 == 0
            column = cols // 2
            other = cols ^ 1
        turns = mask & (cols < 2 * half)
        partner = tl.load(ptr + other, mask=turns, other=0.0).to(tl.float32)
        cos = tl.load(cos_ptr + column, mask=turns & known, other=float("nan")).to(tl.float32)
        sin = tl.load(sin_ptr + column, mask=turns & known, other=0.0).to(tl.float32)
        turned = y * cos + tl.where(first, -partner, partner) * sin
        y = tl.where(turns, turned, y).to(x.dtype).to(tl.float32)
    return y


@triton.jit
def _not_zero(scale):  # type: ignore[no-untyped-def]
    """The divisor for a scale: 1 for a scale of 0, whose quantized values are 0."""
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _rounded_4_bits(x, shift, scale):  # type: ignore[no-untyped-def]
    """Values from 0 to 15, rounded as by `quantize_cache`; 0 for NaN."""
    steps = tl.div_rn(x - shift, tl.broadcast_to(_not_zero(scale), x.shape))
    steps = tl.where(steps == steps, tl.minimum(tl.maximum(steps, 0.0), 15.0), 0.0)
    return whole_numbers(steps, 1.0).to(tl.uint8, bitcast=True)


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    x_ptr, cache_ptr, scale_ptr, shift_ptr, cos_ptr, sin_ptr, known, half, size,
    STYLE: tl.constexpr, SCALED: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of one head to its place, in the cache's type; `size`: its elements or, in 4 bits, the bytes of a group."""
    TYPE: tl.constexpr = cache_ptr.dtype.element_ty
    if GROUPS > 0:
        group = tl.arange(0, GROUPS)
        byte = tl.arange(0, BLOCK // GROUPS)
        mask = (group >= 0)[:, None] & (byte < size)[None, :]
        cols = (group * 2 * size)[:, None] + byte[None, :]
        low = _turned(x_ptr, cols, mask, cos_ptr, sin_ptr, known, half, STYLE)
        high = _turned(x_ptr, cols + size, mask, cos_ptr, sin_ptr, known, half, STYLE)
        least = tl.min(tl.where(mask, tl.minimum(low, high), float("inf")), 1)
        most = tl.max(tl.where(mask, tl.maximum(low, high), float("-inf")), 1)
        # a minimum may lose a NaN; the difference with it is one too
        lost = tl.max(tl.where(mask & ((low != low) | (high != high)), 1, 0), 1) > 0
        least = tl.where(lost, float("nan"), least)
        scale = tl.div_rn(most - least, tl.full([GROUPS], 15.0, tl.float32)).to(scale_ptr.dtype.element_ty)
        shift = least.to(shift_ptr.dtype.element_ty)
        tl.store(scale_ptr + group, scale)
        tl.store(shift_ptr + group, shift)
        scale = scale.to(tl.float32)[:, None]
        shift = shift.to(tl.float32)[:, None]
        quantized = _rounded_4_bits(low, shift, scale) | (_rounded_4_bits(high, shift, scale) << 4)
        tl.store(cache_ptr + (group * size)[:, None] + byte[None, :], quantized, mask=mask)
    else:
        offs = tl.arange(0, BLOCK)
        mask = offs < size
        x = _turned(x_ptr, offs, mask, cos_ptr, sin_ptr, known, half, STYLE)
        if SCALED or TOKENS:
            if TOKENS:
                peak = tl.max(tl.where(mask, tl.abs(x), 0.0), 0)
                peak = tl.where(tl.max(tl.where(mask & (x != x), 1, 0), 0) > 0, float("nan"), peak)
                scale = tl.div_rn(peak, tl.cast(LARGEST, tl.float32)).to(scale_ptr.dtype.element_ty)
                tl.store(scale_ptr, scale)
                scale = _not_zero(scale.to(tl.float32))
            else:
                scale = tl.load(scale_ptr).to(tl.float32)
            x = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
            # comparisons keep a NaN, where minimum and maximum would lose it
            x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
        if tl.int8 == TYPE:
            tl.store(cache_ptr + offs, tl.where(x == x, whole_numbers(x, 1.0), 0), mask=mask)
        else:
            tl.store(cache_ptr + offs, x.to(TYPE), mask=mask)


@triton.jit(do_not_specialize=SIZES)
def _append_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, lens_ptr, table_ptr, cos_ptr, sin_ptr,
    k_scale_ptr, v_scale_ptr, k_shift_ptr, v_shift_ptr, turned_ptr,
    seqlen_q, writers, heads, page, capacity, table_rows, half, size_q, size_k, size_v,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_kcp, stride_kct, stride_kch, stride_vcp, stride_vct, stride_vch,
    stride_tb, stride_len, stride_cos, stride_sin,
    stride_ksp, stride_kst, stride_ksh, stride_vsp, stride_vst, stride_vsh,
    stride_kzp, stride_kzt, stride_kzh, stride_vzp, stride_vzt, stride_vzh,
    APPEND: tl.constexpr, STYLE: tl.constexpr, PAGED: tl.constexpr, SCALED: tl.constexpr, TOKENS: tl.constexpr,
    GROUPS: tl.constexpr, LARGEST: tl.constexpr, ADVANCE: tl.constexpr, EARLY: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One token and head: of the first `writers` heads a key and a value to the caches, of those after them a query.

    ADVANCE: lens are tokens before those of the call. EARLY: as in `common.pdl`.
    """
    if EARLY:
        pdl_wait(True)
        pdl_launch_dependents(True)
    row = tl.program_id(0)
    sequence = (row // seqlen_q).to(tl.int64)
    token = row % seqlen_q
    head = tl.program_id(1).to(tl.int64)
    place = tl.load(lens_ptr + sequence * stride_len) + token
    if not ADVANCE:
        place -= seqlen_q
    known = (place >= 0) & (place < table_rows)
    cos_ptr += place.to(tl.int64) * stride_cos
    sin_ptr += place.to(tl.int64) * stride_sin
    # a sequence with fewer keys than new tokens has no place for the first of them
    if APPEND and ((head < writers) & (place >= 0) & (place < capacity)):
        number = sequence
        at = place.to(tl.int64)
        if PAGED:
            number = tl.load(table_ptr + sequence * stride_tb + place // page).to(tl.int64)
            at = (place % page).to(tl.int64)
        _write(
            k_ptr + sequence * stride_kb + token * stride_kt + head * stride_kh,
            k_cache_ptr + number * stride_kcp + at * stride_kct + head * stride_kch,
            k_scale_ptr + number * stride_ksp + at * stride_kst + head * stride_ksh,
            k_shift_ptr + number * stride_kzp + at * stride_kzt + head * stride_kzh,
            cos_ptr, sin_ptr, known, half, size_k, STYLE, SCALED, TOKENS, GROUPS, LARGEST, BLOCK_K,
        )  # fmt: skip
        _write(
            v_ptr + sequence * stride_vb + token * stride_vt + head * stride_vh,
            v_cache_ptr + number * stride_vcp + at * stride_vct + head * stride_vch,
            v_scale_ptr + number * stride_vsp + at * stride_vst + head * stride_vsh,
            v_shift_ptr + number * stride_vzp + at * stride_vzt + head * stride_vzh,
            cos_ptr, sin_ptr, known, half, size_v, NONE, SCALED, TOKENS, GROUPS, LARGEST, BLOCK_V,
        )  # fmt: skip
    if STYLE != NONE and head >= writers:
        head -= writers
        offs = tl.arange(0, BLOCK_Q)
        mask = offs < size_q
        q_row = q_ptr + sequence * stride_qb + token * stride_qt + head * stride_qh
        q = _turned(q_row, offs, mask, cos_ptr, sin_ptr, known, half, STYLE)
        out = turned_ptr + (row.to(tl.int64) * heads + head) * size_q + offs
        tl.store(out, q.to(turned_ptr.dtype.element_ty), mask=mask)
