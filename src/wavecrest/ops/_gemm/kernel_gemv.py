"""The GEMV kernels, for up to 8 rows of a: multiply and add, without matrix instructions.

One reads b as floats and bytes, the other 4-bit values as words. What is done to the sums (`epilogue`) they share
with the kernels over tiles.
"""

from __future__ import annotations

from wavecrest.ops._gemm.kernel import NO_SCALE, NORMED, SIZES, as_type, epilogue, fetch_columns
from wavecrest.ops.common.device import pdl_launch_dependents, pdl_wait
from wavecrest.ops.common.mxfp4 import e2m1_values, e8m0_values
from wavecrest.ops.common.triton import tl, triton


@triton.jit
def _gemv_columns(  # type: ignore[no-untyped-def]
    a, b, c_ptr, part_ptr, scales, after, batch, split, tile, N, K, width, steps, row_stride, column_stride,
    ROWS: tl.constexpr, SCALE_A: tl.constexpr, SCALE_B: tl.constexpr, EVEN_K: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, LARGEST: tl.constexpr,
    NORM_EPS: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr, ALIKE: tl.constexpr,
    PDL: tl.constexpr, EARLY: tl.constexpr, TAIL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Columns of `_multiply_kernel`: BLOCK_N of N from tile · BLOCK_N on; with a TAIL rows of c are `width` long."""
    scale_a_ptr = scales[0]
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = (cols < N)[:, None]
    offs_k = tl.arange(0, BLOCK_K)
    b_rows = b + cols.to(tl.int64)[:, None] * column_stride
    b_up = b_rows + tl.cast(N, tl.int64) * column_stride
    nothing = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    sums = (nothing,)
    sums_up = (nothing,)
    for _ in tl.static_range(1, ROWS):
        sums = sums + (nothing,)  # type: ignore[assignment]
        sums_up = sums_up + (nothing,)  # type: ignore[assignment]
    squares = ()
    if SCALE_A == NORMED:
        for _ in tl.static_range(ROWS):
            squares = squares + (tl.zeros([1, BLOCK_K], tl.float32),)  # type: ignore[assignment]
    first = split * steps
    last = tl.minimum(first + steps, tl.cdiv(K, BLOCK_K))
    # `_sum_kernel`
    pdl_launch_dependents(PDL and SPLIT_K > 1)
    if EARLY:
        for ahead in tl.static_range(EARLY - 1):
            fetch_columns(b_rows, mask_n, (first + ahead) * BLOCK_K, K, BLOCK_K)
            if GATED:
                fetch_columns(b_up, mask_n, (first + ahead) * BLOCK_K, K, BLOCK_K)
            if SCALE_A == NORMED:
                start = scale_a_ptr + tl.zeros([1, 1], tl.int32)
                fetch_columns(start, tl.full([1, 1], True, tl.int1), (first + ahead) * BLOCK_K, K, BLOCK_K)
        pdl_wait(True)
    # told so, as without matrix instructions it would load nothing ahead
    for step in tl.range(first, last, num_stages=STAGES):
        k = step * BLOCK_K + offs_k[None, :]
        inside = tl.full([1, BLOCK_K], True, tl.int1) if EVEN_K else k < K
        at = b_rows + k
        at_up = b_up + k
        if ALIKE > 0:
            at = tl.max_contiguous(at, (1, ALIKE))
            at_up = tl.max_contiguous(at_up, (1, ALIKE))
        weights = as_type(tl.load(at, mask=mask_n & inside, other=0.0), tl.float32, PTX)
        more_up = sums_up
        if GATED:
            weights_up = as_type(tl.load(at_up, mask=mask_n & inside, other=0.0), tl.float32, PTX)
        row = tl.load(a + k, mask=inside, other=0.0).to(tl.float32)
        more_squares = squares
        gain = row
        if SCALE_A == NORMED:
            gain = tl.load(scale_a_ptr + k, mask=inside, other=0.0).to(tl.float32)
            more_squares = (squares[0] + row * row,)  # type: ignore[assignment,misc]
            row *= gain
        more = (sums[0] + weights * row,)
        if GATED:
            more_up = (sums_up[0] + weights_up * row,)
        for m in tl.static_range(1, ROWS):
            row = tl.load(a + m * row_stride + k, mask=inside, other=0.0).to(tl.float32)
            if SCALE_A == NORMED:
                more_squares = more_squares + (squares[m] + row * row,)  # type: ignore[assignment]
                row *= gain
            more = more + (sums[m] + weights * row,)  # type: ignore[assignment]
            if GATED:
                more_up = more_up + (sums_up[m] + weights_up * row,)  # type: ignore[assignment]
        sums = more
        sums_up = more_up
        squares = more_squares
    pdl_launch_dependents(PDL and SPLIT_K == 1)
    for m in tl.static_range(ROWS):
        total = tl.sum(sums[m], axis=1)
        total_up = tl.sum(sums_up[m], axis=1) if GATED else total
        if SCALE_A == NORMED:
            norm = tl.rsqrt(tl.sum(squares[m], axis=1) / tl.cast(K, tl.float32) + NORM_EPS)
            total *= norm
            total_up *= norm
        if SPLIT_K > 1:
            both = 2 * N if GATED else N
            place = (tl.cast(split, tl.int64) * tl.num_programs(1) + batch) * ROWS + m
            tl.store(part_ptr + place * both + cols, total, mask=cols < N)
            if GATED:
                tl.store(part_ptr + place * both + N + cols, total_up, mask=cols < N)
        elif TAIL > 0:
            # no residual, and rows have no scales: a row by itself
            epilogue(
                total[None, :], total_up[None, :], c_ptr + m * width, scales, after, 0, tl.arange(0, 1), cols, 1, N,
                SCALE_A, SCALE_B, BIAS, ACTIVATION, GATED, RESIDUAL, LARGEST,
            )  # fmt: skip
        else:
            rows = m + tl.arange(0, 1)
            epilogue(
                total[None, :], total_up[None, :], c_ptr, scales, after, batch, rows, cols, ROWS, N,
                SCALE_A, SCALE_B, BIAS, ACTIVATION, GATED, RESIDUAL, LARGEST,
            )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def _multiply_kernel(  # type: ignore[no-untyped-def]
    a, b, c_ptr, part_ptr, bias_ptr, residual_ptr, scale_a_ptr, scale_b_ptr, tail_ptr, out_scale_ptr,
    n_units, k_units, steps, stride_az, stride_a0, stride_bz, stride_bn,
    stride_sam, stride_sbn, stride_bias, stride_rz, stride_rm, stride_rn, alpha, slope,
    ROWS: tl.constexpr, SCALE_A: tl.constexpr, SCALE_B: tl.constexpr, ALIGN: tl.constexpr, ALIGN_N: tl.constexpr,
    EVEN_K: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
    LARGEST: tl.constexpr, NORM_EPS: tl.constexpr, SPLIT_K: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr,
    ALIKE: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr, TAIL: tl.constexpr, TAIL_K: tl.constexpr,
    EVEN_TAIL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a times BLOCK_N columns of b, both contiguous along K, without matrix instructions.

    Products are kept apart for each of BLOCK_K columns and added across threads once, at the end. `steps` of BLOCK_K a
    part of K; SPLIT_K: sums go to part_ptr [parts, batch, ROWS, N]. Rows that are NORMED: squares are kept like
    products, and what a row's sums are multiplied by is known at the end. ALIKE: columns of K that a lane loads of b at
    a time, so that they lie over lanes as a's do; 0: as many as it can. TAIL: columns of another type behind those
    of b, one behind the other in memory; the first programs have one each, and TAIL_K of K a step.
    """
    N = n_units * ALIGN_N
    K = k_units * ALIGN
    batch = tl.program_id(1)
    split = tl.program_id(2)
    tile = tl.program_id(0)
    a += batch.to(tl.int64) * stride_az * ALIGN
    # 64 bits: in units of ALIGN strides fit 32, in elements they need not
    row_stride = tl.cast(stride_a0, tl.int64) * ALIGN
    column_stride = tl.cast(stride_bn, tl.int64) * ALIGN
    b += batch.to(tl.int64) * stride_bz * ALIGN
    scales = (scale_a_ptr, scale_b_ptr, scale_b_ptr, stride_sam, 0, stride_sbn, 0)
    after = (bias_ptr, residual_ptr, out_scale_ptr, stride_bias, stride_rz, stride_rm, stride_rn, alpha, slope)
    if TAIL > 0:
        width = tl.cast(N, tl.int64) + TAIL
        if tile < TAIL:
            bias_ptr += tl.cast(N, tl.int64) * stride_bias
            behind = (bias_ptr, residual_ptr, out_scale_ptr, stride_bias, stride_rz, stride_rm, stride_rn, alpha, slope)
            _gemv_columns(
                a, tail_ptr, c_ptr + N, part_ptr, scales, behind, batch, 0, tile, TAIL, K, width, tl.cdiv(K, TAIL_K),
                row_stride, tl.cast(K, tl.int64), ROWS, SCALE_A, NO_SCALE, EVEN_TAIL, BIAS, ACTIVATION, GATED,
                RESIDUAL, LARGEST, NORM_EPS, SPLIT_K, STAGES, PTX, 0, PDL, EARLY, TAIL, 1, TAIL_K,
            )  # fmt: skip
        else:
            _gemv_columns(
                a, b, c_ptr, part_ptr, scales, after, batch, split, tile - TAIL, N, K, width, steps, row_stride,
                column_stride, ROWS, SCALE_A, SCALE_B, EVEN_K, BIAS, ACTIVATION, GATED, RESIDUAL, LARGEST, NORM_EPS,
                SPLIT_K, STAGES, PTX, ALIKE, PDL, EARLY, TAIL, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    else:
        _gemv_columns(
            a, b, c_ptr, part_ptr, scales, after, batch, split, tile, N, K, N, steps, row_stride, column_stride,
            ROWS, SCALE_A, SCALE_B, EVEN_K, BIAS, ACTIVATION, GATED, RESIDUAL, LARGEST, NORM_EPS, SPLIT_K, STAGES, PTX,
            ALIKE, PDL, EARLY, TAIL, BLOCK_N, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _int4_value(half, PLACE: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """The 4-bit values at bit PLACE of words, less 8: set into the mantissa of a float whose unit is that bit."""
    MASK: tl.constexpr = 15 << PLACE
    MAGIC: tl.constexpr = (150 - PLACE) << 23
    if PTX:
        # one instruction, which the compiler makes two
        number = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,n,n", [half, MASK, MAGIC], tl.int32, is_pure=True, pack=1
        )
    else:
        number = (half & MASK) | MAGIC
    return number.to(tl.float32, bitcast=True) - ((1 << (23 - PLACE)) + 8.0)


@triton.jit
def _shared(products, SHARES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of SHARES neighbourhoods of columns."""
    rows: tl.constexpr = products.shape[0]
    each: tl.constexpr = products.shape[1] // SHARES
    return tl.sum(tl.reshape(products, [rows, SHARES, each]), axis=2)


@triton.jit(do_not_specialize=SIZES)
def _words_kernel(  # type: ignore[no-untyped-def]
    a, b, c_ptr, part_ptr, bias_ptr, residual_ptr, scale_a_ptr, scale_b_ptr, out_scale_ptr,
    n_units, k_units, steps, stride_a0, stride_bn,
    stride_sam, stride_sbn, stride_sbk, stride_bias, stride_rz, stride_rm, stride_rn, alpha, slope,
    ROWS: tl.constexpr, GROUP: tl.constexpr, SCALE_A: tl.constexpr, SCALE_B: tl.constexpr, ALIGN: tl.constexpr,
    ALIGN_N: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
    LARGEST: tl.constexpr, NORM_EPS: tl.constexpr, STAGES: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """ROWS rows of a times BLOCK_N columns of 4-bit values, read as words of 32 bits, without matrix instructions.

    BLOCK_K: columns of K a step, of whole groups that share a scale. Rows that are NORMED: as in `_multiply_kernel`.
    With scales in bytes (e8m0) the values are e2m1, and the low and the high halves of 32 bytes are groups of their
    own, one after the other.
    """
    MX: tl.constexpr = scale_b_ptr.dtype.element_ty == tl.uint8
    HALVES: tl.constexpr = 2 if MX else 1
    WORDS: tl.constexpr = BLOCK_K // 8
    # sums of a step that have a scale each
    GROUPS: tl.constexpr = BLOCK_K // (GROUP * HALVES)
    N = n_units * ALIGN_N
    K = k_units * ALIGN
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = (cols < N)[:, None]
    offs_w = tl.arange(0, WORDS)
    offs_g = tl.arange(0, GROUPS)
    row_stride = tl.cast(stride_a0, tl.int64) * ALIGN
    # from column to column in units of 16 bytes
    b_rows = b.to(tl.pointer_type(tl.int32), bitcast=True) + cols.to(tl.int64)[:, None] * stride_bn * 4
    # 4-bit values are packed in units of 64
    words = tl.cdiv(K, 64) * 8
    if EARLY:
        for ahead in tl.static_range(EARLY - 1):
            fetch_columns(b_rows, mask_n, ahead * WORDS, words, WORDS)
            if SCALE_A == NORMED:
                start = scale_a_ptr + tl.zeros([1, 1], tl.int32)
                fetch_columns(start, tl.full([1, 1], True, tl.int1), ahead * BLOCK_K, K, BLOCK_K)
        pdl_wait(True)
    sums = (tl.zeros([BLOCK_N, GROUPS], tl.float32),)
    for _ in tl.static_range(1, ROWS):
        sums = sums + (tl.zeros([BLOCK_N, GROUPS], tl.float32),)  # type: ignore[assignment]
    squares = ()
    if SCALE_A == NORMED:
        for _ in tl.static_range(ROWS):
            squares = squares + (tl.zeros([WORDS], tl.float32),)  # type: ignore[assignment]
    # told so, as without matrix instructions it would load nothing ahead
    for step in tl.range(0, steps, num_stages=STAGES):
        index = step * WORDS + offs_w
        packed = tl.load(b_rows + index[None, :], mask=mask_n & (index < words)[None, :], other=0)
        upper = packed >> 16
        first = (index // 8) * 64 + (index % 8) * 4
        for half in tl.static_range(HALVES):
            products = (tl.zeros([BLOCK_N, WORDS], tl.float32),)
            for _ in tl.static_range(1, ROWS):
                products = products + (tl.zeros([BLOCK_N, WORDS], tl.float32),)  # type: ignore[assignment]
            for i in tl.static_range(half, 8, HALVES):
                if MX:
                    value = e2m1_values(packed << (28 - 4 * i))
                else:
                    value = _int4_value(packed if i < 4 else upper, 4 * (i % 4), PTX)
                # the low halves of 32 bytes are 32 columns, the high halves the next 32
                k = first + i // 2 + 32 * (i % 2)
                row = tl.load(a + k, mask=k < K, other=0.0).to(tl.float32)
                more_squares = squares
                gain = row
                if SCALE_A == NORMED:
                    gain = tl.load(scale_a_ptr + k, mask=k < K, other=0.0).to(tl.float32)
                    more_squares = (squares[0] + row * row,)  # type: ignore[assignment,misc]
                    row *= gain
                more = (products[0] + value * row[None, :],)
                for m in tl.static_range(1, ROWS):
                    row = tl.load(a + m * row_stride + k, mask=k < K, other=0.0).to(tl.float32)
                    if SCALE_A == NORMED:
                        more_squares = more_squares + (squares[m] + row * row,)  # type: ignore[assignment]
                        row *= gain
                    more = more + (products[m] + value * row[None, :],)  # type: ignore[assignment]
                products = more
                squares = more_squares
            group = (step * GROUPS + offs_g) * HALVES + half
            where = scale_b_ptr + cols[:, None] * stride_sbn + group[None, :] * stride_sbk
            scale = tl.load(where, mask=mask_n & (group < tl.cdiv(K, GROUP))[None, :], other=0.0)
            if MX:
                scale = e8m0_values(scale)
            totals = (sums[0] + _shared(products[0], GROUPS) * scale,)
            for m in tl.static_range(1, ROWS):
                totals = totals + (sums[m] + _shared(products[m], GROUPS) * scale,)  # type: ignore[assignment]
            sums = totals
    pdl_launch_dependents(PDL)
    scales = (scale_a_ptr, scale_b_ptr, scale_b_ptr, stride_sam, 0, stride_sbn, 0)
    after = (bias_ptr, residual_ptr, out_scale_ptr, stride_bias, stride_rz, stride_rm, stride_rn, alpha, slope)
    for m in tl.static_range(ROWS):
        total = tl.sum(sums[m], axis=1)[None, :]
        if SCALE_A == NORMED:
            total *= tl.rsqrt(tl.sum(squares[m], axis=0) / tl.cast(K, tl.float32) + NORM_EPS)
        epilogue(
            total, total, c_ptr, scales, after, 0, m + tl.arange(0, 1), cols, ROWS, N,
            SCALE_A, NO_SCALE, BIAS, ACTIVATION, GATED, RESIDUAL, LARGEST,
        )  # fmt: skip
