"""The GEMM kernels over tiles: with split-K, persistent, stream-K, and the sum of parts.

They share how operands are read (`_accumulated`), and with the GEMV kernels (`kernel_gemv.py`) what is done to a
finished tile (`epilogue`). Operands are walked by their strides; sizes are run-time integers.
"""

from __future__ import annotations

from wavecrest.ops.common.activation import activate
from wavecrest.ops.common.device import (
    SECTOR,
    pdl_launch_dependents,
    pdl_wait,
    prefetch_l2,
    remap_xcd,
    row_offsets,
    swizzle_tile,
)
from wavecrest.ops.common.mxfp4 import e2m1_values, e8m0_values, mxfp4_values
from wavecrest.ops.common.ptx import INT4_BF16, INT4_FP16, INT8_BF16, INT8_FP16, INT8_FP32, INT8_FP32_OFFSET
from wavecrest.ops.common.quantized import rounded
from wavecrest.ops.common.triton import tl, triton

# how b is stored: [K, N] by its strides; the (16, 16) shuffle of [N, K]; 4-bit values, two a byte (see `ops.packed`);
# 4-bit floats, whose scales multiply the values or, as float16 has not all of these, the sums of a group
PLAIN, SHUFFLED, INT4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
MXFP4, MXFP4_SUMS = tl.constexpr(3), tl.constexpr(4)
# what shares a scale: the tensor; a row of a or column of b; 1 × 128 of a or 128 × 128 of b; GROUP rows of a column
NO_SCALE, TENSOR, VECTOR = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BLOCK, GROUPED = tl.constexpr(3), tl.constexpr(4)
# of a alone: its rows are normalised (RMSNorm), and scale_a_ptr is the norm's weight, a number a column of K
NORMED = tl.constexpr(5)
# rows or columns of a block that shares a scale
SCALE_BLOCK = tl.constexpr(128)
NO_BIAS, BIAS_N, BIAS_M = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# which dimension of an operand is contiguous: neither; K; the other
ANY, BY_K, ACROSS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _shuffled_offsets(n, k, K, KV: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where column n, row k of b lies in the (16, 16) shuffle of [N, K], KV elements a 16-byte vector."""
    block = (n // 16) * (K // 32) + k // 32
    return ((block * (32 // KV) + (k % 32) // KV) * 16 + n % 16) * KV + k % KV


@triton.jit
def fetch_columns(columns, mask_n, first, last, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Have COUNT elements from `first` on, below `last`, of columns that are contiguous brought to the L2 cache.

    columns: where they start, [BLOCK_N, 1].
    """
    each: tl.constexpr = SECTOR // (columns.dtype.element_ty.primitive_bitwidth // 8)
    offs = first + tl.arange(0, COUNT // each if each <= COUNT else 1) * each
    prefetch_l2(columns + offs[None, :], mask_n & (offs < last)[None, :])


@triton.jit
def _widened(values, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whole numbers up to 8 bits, or 8-bit floats, in a wider type, which has all of them."""
    wide = values.to(tl.float32)
    if tl.bfloat16 == TYPE:
        # the lower half is 0: cut off rather than rounded, which takes 5 instructions an element on gfx942
        wide = (wide.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(TYPE, bitcast=True)
    else:
        wide = wide.to(TYPE)
    return wide


@triton.jit
def _loop_scale(  # type: ignore[no-untyped-def]
    scales, rows, n, k, M, N, K, SCALE_A: tl.constexpr, SCALE_B: tl.constexpr, GROUP: tl.constexpr
):
    """What the products of one step over K are multiplied by, [BLOCK_M or 1, BLOCK_N or 1]; the step begins at k.

    Nothing is read for a step beyond K.
    """
    scale_a_ptr, scale_b_ptr, _, stride_sam, stride_sak, stride_sbn, stride_sbk = scales
    scale = tl.full([1, 1], 1.0, tl.float32)
    # loaded as a column and a row, not as vectors that are made them: to change how they lie over threads, a kernel
    # would wait for them at once
    if SCALE_A == BLOCK:
        where = rows * stride_sam + (k // SCALE_BLOCK) * stride_sak
        scale = scale * tl.load(scale_a_ptr + where[:, None], mask=(rows < M)[:, None] & (k < K), other=0.0)
    if SCALE_B == BLOCK:
        where = (n // SCALE_BLOCK) * stride_sbn + (k // SCALE_BLOCK) * stride_sbk
        scale = scale * tl.load(scale_b_ptr + where[None, :], mask=(n < N)[None, :] & (k < K), other=0.0)
    elif SCALE_B == GROUPED:
        where = n * stride_sbn + (k // GROUP) * stride_sbk
        scale = scale * tl.load(scale_b_ptr + where[None, :], mask=(n < N)[None, :] & (k < K), other=0.0)
    return scale


@triton.jit
def _zero_points(scales, n, k, N, K, HAS_ZERO: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The zero points [1, BLOCK_N] of the group of column k, as whole numbers; 8 without them and beyond K."""
    zero = tl.full([1, 1], 8, tl.int16)
    if HAS_ZERO:
        _, _, zero_ptr, _, _, stride_sbn, stride_sbk = scales
        where = n * stride_sbn + (k // GROUP) * stride_sbk
        zero = tl.load(zero_ptr + where[None, :], mask=(n < N)[None, :] & (k < K), other=8).to(tl.int16)
    return zero


@triton.jit
def _int4_values(packed, zero, TYPE: tl.constexpr, HAS_ZERO: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """The low and the high 4-bit values of bytes [rows, BLOCK_N] less their zero points [1, BLOCK_N] or 8, in TYPE."""
    if PTX and not HAS_ZERO and tl.bfloat16 == TYPE:
        low, high = tl.inline_asm_elementwise(
            INT4_BF16, "=r,=r,=r,=r,r", [packed], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif PTX and not HAS_ZERO and tl.float16 == TYPE:
        low, high = tl.inline_asm_elementwise(
            INT4_FP16, "=r,=r,=r,=r,r", [packed], (tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        low = _widened((packed & 15).to(tl.int16) - zero, TYPE)
        high = _widened((packed >> 4).to(tl.int16) - zero, TYPE)
    return low, high


@triton.jit
def _unit_scales(scales, n, k, N, K, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bytes of e8m0 of the units of 64 columns from k on, for low and for high halves: each [units, BLOCK_N]."""
    _, scale_b_ptr, _, _, _, stride_sbn, stride_sbk = scales
    group = k // 32 + 2 * tl.arange(0, BLOCK_K // 64)[:, None]
    groups = tl.cdiv(K, 32)
    where = scale_b_ptr + (n * stride_sbn)[None, :] + group * stride_sbk
    mask = (n < N)[None, :]
    low = tl.load(where, mask=mask & (group < groups), other=0)
    high = tl.load(where + stride_sbk, mask=mask & (group + 1 < groups), other=0)
    return low, high


@triton.jit
def as_type(b, TYPE: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """b in a wider type, if it is stored in fewer bits."""
    if TYPE.primitive_bitwidth > b.dtype.primitive_bitwidth:
        if PTX and tl.int8 == b.dtype and tl.bfloat16 == TYPE:
            b = tl.inline_asm_elementwise(INT8_BF16, "=r,=r,r", [b], tl.bfloat16, is_pure=True, pack=4)
        elif PTX and tl.int8 == b.dtype and tl.float16 == TYPE:
            b = tl.inline_asm_elementwise(INT8_FP16, "=r,=r,r", [b], tl.float16, is_pure=True, pack=4)
        elif PTX and tl.int8 == b.dtype and tl.float32 == TYPE:
            b = tl.inline_asm_elementwise(INT8_FP32, "=r,=r,=r,=r,r", [b], tl.int32, is_pure=True, pack=4)
            b = b.to(tl.float32, bitcast=True) - INT8_FP32_OFFSET
        else:
            b = _widened(b, TYPE)
    return b


@triton.jit
def _dot(  # type: ignore[no-untyped-def]
    a, b, acc, PRECISION: tl.constexpr, PTX: tl.constexpr, UNIT_SUMS: tl.constexpr = 0
):
    """acc + a · b; a b that is stored in fewer bits than a is made a's type.

    UNIT_SUMS: products that the matrix unit of sm_90 adds by itself, in 14 bits for 8-bit floats, before their sum is
    added to acc in float32; 0: it adds to acc by itself.
    """
    b = as_type(b, a.dtype, PTX)
    most: tl.constexpr = (UNIT_SUMS if a.shape[1] > UNIT_SUMS else a.shape[1]) if UNIT_SUMS > 0 else None
    return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype, max_num_imprecise_acc=most)


@triton.jit
def _scaled_dot(  # type: ignore[no-untyped-def]
    a, b, acc, scale, ACC: tl.constexpr, PRECISION: tl.constexpr, PTX: tl.constexpr
):
    """acc + scale · (a · b), scale [BLOCK_M or 1, BLOCK_N or 1]; the product's own sums have the type ACC."""
    product = _dot(a, b, tl.zeros(acc.shape, ACC), PRECISION, PTX)
    return acc + product * scale


@triton.jit
def _rows_loaded(  # type: ignore[no-untyped-def]
    a, a_rows, k, K, mask, stride_ak, EVEN_K: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr
):
    """WIDTH columns of a's rows, from k on."""
    offs_k = tl.arange(0, WIDTH)
    if not EVEN_K:
        mask = mask & (k + offs_k < K)[None, :]
    if WIDE:
        offs_k = offs_k.to(tl.int64)
    start = tl.cast(k, tl.int64)
    return tl.load(a + start * stride_ak + (a_rows + (offs_k * stride_ak)[None, :]), mask=mask, other=0.0)


@triton.jit
def _columns_loaded(  # type: ignore[no-untyped-def]
    b, n, offs_n, k, K, mask, stride_bk, stride_bn,
    FORMAT: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """WIDTH rows of b's columns, from k on."""
    offs_k = tl.arange(0, WIDTH)
    if not EVEN_K:
        mask = mask & (k + offs_k < K)[:, None]
    if WIDE:
        offs_k = offs_k.to(tl.int64)
    start = tl.cast(k, tl.int64)
    if FORMAT == SHUFFLED:
        KV: tl.constexpr = 16 // (b.dtype.element_ty.primitive_bitwidth // 8)
        where = _shuffled_offsets(n.to(tl.int64)[None, :], (start + offs_k)[:, None], K, KV)
    else:
        where = start * stride_bk + ((offs_k * stride_bk)[:, None] + (offs_n * stride_bn)[None, :])
    return tl.load(b + where, mask=mask, other=0.0)


@triton.jit
def _accumulated(  # type: ignore[no-untyped-def]
    a, b, scales, sizes, a_strides, b_strides, batch, tile_m, tile_n, up, first, last,
    FORMAT: tl.constexpr, SCALE_A: tl.constexpr, SCALE_B: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP: tl.constexpr,
    LEADING: tl.constexpr, A_ORDER: tl.constexpr, B_ORDER: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr, PTX: tl.constexpr, UNIT_SUMS: tl.constexpr,
    CHAINS: tl.constexpr, BOTH: tl.constexpr, NORM_EPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sum of products [BLOCK_M, BLOCK_N] of one tile over the steps first to last of BLOCK_K each, twice; with
    BOTH that of b's columns `up` further on is the second: the halves of a packed [gate | up], in one loop.

    Else `up` is added to b's columns. A step is divided into CHAINS, each added to a sum of its own. Rows that are
    NORMED are multiplied by the norm's weight in float32 and rounded to a's type before their products, and the sums
    by what their squares say: steps are all there are then.
    """
    M, N, K, size1, size2 = sizes
    stride_az, stride_a0, stride_a1, stride_a2, stride_ak = a_strides
    stride_bz, stride_bk, stride_bn = b_strides
    SCALED_STEPS: tl.constexpr = SCALE_A == BLOCK or (SCALE_B >= BLOCK and FORMAT < MXFP4)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    row = tile_m * BLOCK_M
    col = tile_n * BLOCK_N
    rows = row + offs_m
    beyond = up
    if BOTH:
        up = 0
    n = col + up + offs_n
    # sums of integers too are float32 from the first scale on
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32 if SCALED_STEPS else ACC)
    acc_up = acc
    # scales are loaded a step ahead, where registers allow: a step is short beside the wait for them
    ahead = tl.full([1, 1], 1.0, tl.float32)
    if SCALED_STEPS and (TMA or FORMAT == INT4):
        ahead = _loop_scale(scales, rows, n, first * BLOCK_K, M, N + up, K, SCALE_A, SCALE_B, GROUP)
    if TMA:
        for step in range(first, last):
            k = step * BLOCK_K
            a_tile = a.load([row, k]) if A_ORDER == BY_K else a.load([k, row]).T
            b_tile = b.load([col + up, k]).T if B_ORDER == BY_K else b.load([k, col + up])
            if SCALED_STEPS:
                scale = ahead
                ahead = _loop_scale(scales, rows, n, k + BLOCK_K, M, N + up, K, SCALE_A, SCALE_B, GROUP)
                acc = _scaled_dot(a_tile, b_tile, acc, scale, ACC, PRECISION, PTX)
            else:
                acc = _dot(a_tile, b_tile, acc, PRECISION, PTX, UNIT_SUMS)
                if BOTH:
                    b_tile = b.load([col + beyond, k]).T if B_ORDER == BY_K else b.load([k, col + beyond])
                    acc_up = _dot(a_tile, b_tile, acc_up, PRECISION, PTX, UNIT_SUMS)
    else:
        mask_m = (rows < M)[:, None]
        mask_n = (col + offs_n < N)[None, :]
        # 64 bits up to the tile and its step, 32 inside them unless strides are huge: cheaper to add, and on AMD what
        # loads through buffers need
        if WIDE:
            offs_m = offs_m.to(tl.int64)
            offs_n = offs_n.to(tl.int64)
        a += batch.to(tl.int64) * stride_az
        b += batch.to(tl.int64) * stride_bz
        if LEADING == 1:
            a += row.to(tl.int64) * stride_a0
            a_rows = (offs_m * stride_a0)[:, None]
        else:
            a_rows = row_offsets(rows.to(tl.int64), stride_a0, stride_a1, stride_a2, size1, size2, LEADING)[:, None]
        b_up = b
        if FORMAT != SHUFFLED:
            b_up = b + (col + beyond).to(tl.int64) * stride_bn
            b += (col + up).to(tl.int64) * stride_bn
        zero = _zero_points(scales, n, first * BLOCK_K, N + up, K, HAS_ZERO, GROUP)
        # sums of their own, which do not wait for each other
        chains = ()
        for _ in tl.static_range(CHAINS - 1):
            chains = chains + (tl.zeros([BLOCK_M, BLOCK_N], ACC),)  # type: ignore[assignment]
        squares = tl.zeros([BLOCK_M, BLOCK_K] if SCALE_A == NORMED else [1, 1], tl.float32)
        gains = ahead
        scale_low, scale_high = ahead, ahead
        if FORMAT >= MXFP4:
            # a step ahead too, as bytes
            scale_low, scale_high = _unit_scales(scales, n, first * BLOCK_K, N + up, K, BLOCK_K)
        if SCALE_A == NORMED:
            # a step ahead too: there are too few of them for what copies tiles to shared memory
            columns = first * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
            gains = tl.load(scales[0] + columns, mask=columns < K, other=0.0).to(tl.float32)
        for step in range(first, last):
            k = step * BLOCK_K
            if FORMAT >= INT4:
                # units of 64 columns in 32 bytes: the low halves hold the first 32 of them, the high halves the others
                offs_j = tl.arange(0, BLOCK_K // 2)
                low = (offs_j // 32) * 64 + offs_j % 32
                b_start = b + tl.cast(step, tl.int64) * (BLOCK_K // 2) * stride_bk
                bytes_k = offs_j * stride_bk
                mask_b = mask_n
                if not EVEN_K:
                    # a step may be wider than the units that are left
                    mask_b = mask_b & (step * (BLOCK_K // 2) + offs_j < tl.cdiv(K, 64) * 32)[:, None]
                packed = tl.load(b_start + bytes_k[:, None] + (offs_n * stride_bn)[None, :], mask=mask_b, other=0)
                a_start = a + tl.cast(k, tl.int64) * stride_ak
                # beside each other: a of the low halves, and 32 columns on of the high ones
                k_low, k_high = low, low + 32
                a_low = tl.load(
                    a_start + (a_rows + (k_low * stride_ak)[None, :]), mask=mask_m & (k + k_low < K)[None, :], other=0.0
                )
                a_high = tl.load(
                    a_start + (a_rows + (k_high * stride_ak)[None, :]),
                    mask=mask_m & (k + k_high < K)[None, :],
                    other=0.0,
                )
                if FORMAT == INT4:
                    b_low, b_high = _int4_values(packed, zero, a_low.dtype, HAS_ZERO, PTX)
                    zero = _zero_points(scales, n, k + BLOCK_K, N + up, K, HAS_ZERO, GROUP)
                    scale = ahead
                    ahead = _loop_scale(scales, rows, n, k + BLOCK_K, M, N + up, K, SCALE_A, SCALE_B, GROUP)
                    if GROUP % 64 == 0:
                        product = _dot(a_low, b_low, tl.zeros(acc.shape, ACC), PRECISION, PTX)
                        # sums of their own, which do not wait for each other
                        product += _dot(a_high, b_high, tl.zeros(acc.shape, ACC), PRECISION, PTX)
                        acc += product * scale
                    else:
                        # each half is a group of its own; K has no group behind its end
                        at = tl.minimum(k + 32, K - 1)
                        acc = _scaled_dot(a_low, b_low, acc, scale, ACC, PRECISION, PTX)
                        if HAS_ZERO:
                            zero_high = _zero_points(scales, n, at, N + up, K, HAS_ZERO, GROUP)
                            _, b_high = _int4_values(packed, zero_high, a_low.dtype, HAS_ZERO, PTX)
                        scale = _loop_scale(scales, rows, n, at, M, N + up, K, SCALE_A, SCALE_B, GROUP)
                        acc = _scaled_dot(a_high, b_high, acc, scale, ACC, PRECISION, PTX)
                else:
                    of_low, of_high = scale_low, scale_high
                    scale_low, scale_high = _unit_scales(scales, n, k + BLOCK_K, N + up, K, BLOCK_K)
                    if FORMAT == MXFP4:
                        b_low, b_high = mxfp4_values(packed, of_low, of_high, a_low.dtype, PTX)
                        acc = _dot(a_low, b_low, acc, PRECISION, PTX)
                        acc = _dot(a_high, b_high, acc, PRECISION, PTX)
                    else:
                        wide = packed.to(tl.int32)
                        b_low, b_high = e2m1_values(wide << 28), e2m1_values(wide << 24)
                        b_low, b_high = b_low.to(a_low.dtype), b_high.to(a_low.dtype)
                        acc = _scaled_dot(a_low, b_low, acc, e8m0_values(of_low), ACC, PRECISION, PTX)
                        acc = _scaled_dot(a_high, b_high, acc, e8m0_values(of_high), ACC, PRECISION, PTX)
            elif SCALED_STEPS:
                a_tile = _rows_loaded(a, a_rows, k, K, mask_m, stride_ak, EVEN_K, WIDE, BLOCK_K)
                b_tile = _columns_loaded(
                    b, n, offs_n, k, K, mask_n, stride_bk, stride_bn, FORMAT, EVEN_K, WIDE, BLOCK_K
                )
                scale = _loop_scale(scales, rows, n, k, M, N + up, K, SCALE_A, SCALE_B, GROUP)
                acc = _scaled_dot(a_tile, b_tile, acc, scale, ACC, PRECISION, PTX)
            else:
                a_tile = _rows_loaded(a, a_rows, k, K, mask_m, stride_ak, EVEN_K, WIDE, BLOCK_K // CHAINS)
                b_tile = _columns_loaded(
                    b, n, offs_n, k, K, mask_n, stride_bk, stride_bn, FORMAT, EVEN_K, WIDE, BLOCK_K // CHAINS
                )
                up_tile = b_tile
                if BOTH:
                    up_tile = _columns_loaded(
                        b_up, n + beyond, offs_n, k, K, mask_n, stride_bk, stride_bn, FORMAT, EVEN_K, WIDE, BLOCK_K
                    )
                if SCALE_A == NORMED:
                    wide = a_tile.to(tl.float32)
                    squares += wide * wide
                    a_tile = (wide * gains).to(a_tile.dtype)
                    columns = k + BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
                    gains = tl.load(scales[0] + columns, mask=columns < K, other=0.0).to(tl.float32)
                acc = _dot(a_tile, b_tile, acc, PRECISION, PTX, UNIT_SUMS)
                if BOTH:
                    acc_up = _dot(a_tile, up_tile, acc_up, PRECISION, PTX, UNIT_SUMS)
                more = ()
                for chain in tl.static_range(CHAINS - 1):
                    at = k + (chain + 1) * (BLOCK_K // CHAINS)
                    a_tile = _rows_loaded(a, a_rows, at, K, mask_m, stride_ak, EVEN_K, WIDE, BLOCK_K // CHAINS)
                    b_tile = _columns_loaded(
                        b, n, offs_n, at, K, mask_n, stride_bk, stride_bn, FORMAT, EVEN_K, WIDE, BLOCK_K // CHAINS
                    )
                    one = _dot(a_tile, b_tile, chains[chain], PRECISION, PTX, UNIT_SUMS)
                    more = more + (one,)  # type: ignore[assignment]
                chains = more
        for chain in tl.static_range(CHAINS - 1):
            acc += chains[chain]
        if SCALE_A == NORMED:
            each = tl.rsqrt(tl.sum(squares, axis=1) / tl.cast(K, tl.float32) + NORM_EPS)[:, None]
            acc *= each
            acc_up *= each
    return acc, (acc_up if BOTH else acc)


@triton.jit
def _scaled(  # type: ignore[no-untyped-def]
    acc, scales, after, rows, cols, up, M, N, SCALE_A: tl.constexpr, SCALE_B: tl.constexpr, BIAS: tl.constexpr
):
    """alpha · scales · acc + bias in float32."""
    scale_a_ptr, scale_b_ptr, _, stride_sam, _, stride_sbn, _ = scales
    bias_ptr, _, _, stride_bias, _, _, _, alpha, _ = after
    y = acc.to(tl.float32)
    if SCALE_A == TENSOR:
        y *= tl.load(scale_a_ptr)
    elif SCALE_A == VECTOR:
        y *= tl.load(scale_a_ptr + rows * stride_sam, mask=rows < M, other=0.0)[:, None]
    if SCALE_B == TENSOR:
        y *= tl.load(scale_b_ptr)
    elif SCALE_B == VECTOR:
        y *= tl.load(scale_b_ptr + (cols + up) * stride_sbn, mask=cols < N, other=0.0)[None, :]
    # Inductor (torch 2.11) passes a Python float as float64, and all that it meets would become that
    y *= tl.cast(alpha, tl.float32)
    if BIAS == BIAS_N:
        y += tl.load(bias_ptr + (cols + up) * stride_bias, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    elif BIAS == BIAS_M:
        y += tl.load(bias_ptr + rows * stride_bias, mask=rows < M, other=0.0).to(tl.float32)[:, None]
    return y


@triton.jit
def epilogue(  # type: ignore[no-untyped-def]
    acc, acc_up, c_ptr, scales, after, batch, rows, cols, M, N,
    SCALE_A: tl.constexpr, SCALE_B: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    RESIDUAL: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Store act(alpha · scales · acc + bias) [· up] + residual, rounded once; sums of integers as they are."""
    _, residual_ptr, out_scale_ptr, _, stride_rz, stride_rm, stride_rn, _, slope = after
    # int64: rows · N passes 2³¹
    wide_rows = rows.to(tl.int64)[:, None]
    out = c_ptr + (tl.cast(batch, tl.int64) * M + wide_rows) * N + cols[None, :]
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    if c_ptr.dtype.element_ty == tl.int32:
        tl.store(out, acc, mask=mask)
    else:
        y = _scaled(acc, scales, after, rows, cols, 0, M, N, SCALE_A, SCALE_B, BIAS)
        y = activate(y, tl.cast(slope, tl.float32), ACTIVATION)
        if GATED:
            y *= _scaled(acc_up, scales, after, rows, cols, N, M, N, SCALE_A, SCALE_B, BIAS)
        if RESIDUAL:
            r = residual_ptr + tl.cast(batch, tl.int64) * stride_rz
            r += wide_rows * stride_rm + cols.to(tl.int64)[None, :] * stride_rn
            y += tl.load(r, mask=mask, other=0.0).to(tl.float32)
        if LARGEST > 0:
            y = rounded(y, tl.load(out_scale_ptr), c_ptr.dtype.element_ty, LARGEST, True)
        tl.store(out, y.to(c_ptr.dtype.element_ty), mask=mask)


# values that do not make a kernel anew when they change
SIZES = [
    "M", "n_units", "k_units", "tiles_m", "tiles_n", "steps", "splits", "size1", "size2",
    "stride_az", "stride_a0", "stride_a1", "stride_a2", "stride_ak", "stride_bz", "stride_bk", "stride_bn",
    "stride_sam", "stride_sak", "stride_sbn", "stride_sbk", "stride_bias", "stride_rz", "stride_rm", "stride_rn",
    "alpha", "slope",
]  # fmt: skip


@triton.jit
def _walks(  # type: ignore[no-untyped-def]
    stride_az, stride_a0, stride_a1, stride_a2, stride_ak, stride_bz, stride_bk, stride_bn,
    ALIGN: tl.constexpr, A_ORDER: tl.constexpr, B_ORDER: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The strides of a and b: 1 where an operand is contiguous, and multiples of ALIGN in its other dimensions."""
    if WIDE:
        # in units of ALIGN they fit 32 bits, in elements they need not
        stride_az, stride_bz = tl.cast(stride_az, tl.int64), tl.cast(stride_bz, tl.int64)
        stride_a0, stride_a1 = tl.cast(stride_a0, tl.int64), tl.cast(stride_a1, tl.int64)
        stride_a2, stride_ak = tl.cast(stride_a2, tl.int64), tl.cast(stride_ak, tl.int64)
        stride_bk, stride_bn = tl.cast(stride_bk, tl.int64), tl.cast(stride_bn, tl.int64)
    if A_ORDER == BY_K:
        a_strides = (stride_az * ALIGN, stride_a0 * ALIGN, stride_a1 * ALIGN, stride_a2 * ALIGN, 1)
    elif A_ORDER == ACROSS:
        a_strides = (stride_az * ALIGN, 1, 0, 0, stride_ak * ALIGN)
    else:
        a_strides = (stride_az, stride_a0, stride_a1, stride_a2, stride_ak)
    if B_ORDER == BY_K:
        b_strides = (stride_bz * ALIGN, 1, stride_bn * ALIGN)
    elif B_ORDER == ACROSS:
        b_strides = (stride_bz * ALIGN, stride_bk * ALIGN, 1)
    else:
        b_strides = (stride_bz, stride_bk, stride_bn)
    return a_strides, b_strides


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    index, operands, scales, after, sizes, walks, tiles_m, tiles_n, steps, batch,
    FORMAT: tl.constexpr, SCALE_A: tl.constexpr, SCALE_B: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP: tl.constexpr,
    LEADING: tl.constexpr, A_ORDER: tl.constexpr, B_ORDER: tl.constexpr,
    EVEN_K: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, LARGEST: tl.constexpr,
    GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr, TMA: tl.constexpr, PTX: tl.constexpr,
    UNIT_SUMS: tl.constexpr, CHAINS: tl.constexpr, BOTH: tl.constexpr, NEXT: tl.constexpr, NORM_EPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of one part of K: finished, or with SPLIT_K its sum to part_ptr [parts, batch, M, N].

    NEXT: the program's only tile, behind whose sums what comes behind the call may start.
    """
    a, b, c_ptr, part_ptr = operands
    a_strides, b_strides = walks
    M, N, K, _, _ = sizes
    tiles = tiles_m * tiles_n
    split = index // tiles if SPLIT_K > 1 else 0
    tile_m, tile_n = swizzle_tile(index - split * tiles, tiles_m, tiles_n, GROUP_M)
    first = split * steps
    last = tl.minimum(first + steps, tl.cdiv(K, BLOCK_K)) if SPLIT_K > 1 else steps
    acc, acc_up = _accumulated(
        a, b, scales, sizes, a_strides, b_strides, batch, tile_m, tile_n, N if BOTH else 0, first, last,
        FORMAT, SCALE_A, SCALE_B, HAS_ZERO, GROUP, LEADING, A_ORDER, B_ORDER, EVEN_K, WIDE, TMA,
        PRECISION, ACC, PTX, UNIT_SUMS, CHAINS, BOTH, NORM_EPS, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if GATED and not BOTH:
        acc_up, _ = _accumulated(
            a, b, scales, sizes, a_strides, b_strides, batch, tile_m, tile_n, N, first, last,
            FORMAT, SCALE_A, SCALE_B, HAS_ZERO, GROUP, LEADING, A_ORDER, B_ORDER, EVEN_K, WIDE, TMA,
            PRECISION, ACC, PTX, UNIT_SUMS, CHAINS, False, NORM_EPS, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    pdl_launch_dependents(NEXT)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if SPLIT_K > 1:
        width = 2 * N if GATED else N
        place = (tl.cast(split, tl.int64) * tl.num_programs(1) + batch) * M + rows
        part = part_ptr + place[:, None] * width + cols[None, :]
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        tl.store(part, acc, mask=mask)
        if GATED:
            tl.store(part + N, acc_up, mask=mask)
    else:
        epilogue(
            acc, acc_up, c_ptr, scales, after, batch, rows, cols, M, N,
            SCALE_A, SCALE_B, BIAS, ACTIVATION, GATED, RESIDUAL, LARGEST,
        )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def _tile_kernel(  # type: ignore[no-untyped-def]
    a, b, c_ptr, part_ptr, bias_ptr, residual_ptr, scale_a_ptr, scale_b_ptr, zero_ptr, out_scale_ptr,
    M, n_units, k_units, tiles_m, tiles_n, steps, size1, size2,
    stride_az, stride_a0, stride_a1, stride_a2, stride_ak, stride_bz, stride_bk, stride_bn,
    stride_sam, stride_sak, stride_sbn, stride_sbk, stride_bias, stride_rz, stride_rm, stride_rn, alpha, slope,
    FORMAT: tl.constexpr, SCALE_A: tl.constexpr, SCALE_B: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP: tl.constexpr,
    LEADING: tl.constexpr, ALIGN: tl.constexpr, ALIGN_N: tl.constexpr, A_ORDER: tl.constexpr, B_ORDER: tl.constexpr,
    EVEN_K: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, LARGEST: tl.constexpr,
    XCDS: tl.constexpr, GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr, TMA: tl.constexpr, PERSISTENT: tl.constexpr,
    PTX: tl.constexpr, UNIT_SUMS: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr, CHAINS: tl.constexpr,
    BOTH: tl.constexpr, NORM_EPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Tiles [BLOCK_M, BLOCK_N], one a program or, PERSISTENT, every `programs`-th; `steps` of BLOCK_K a part of K."""
    N = n_units * ALIGN_N
    K = k_units * ALIGN
    walks = _walks(
        stride_az, stride_a0, stride_a1, stride_a2, stride_ak, stride_bz, stride_bk, stride_bn,
        ALIGN, A_ORDER, B_ORDER, WIDE,
    )  # fmt: skip
    sizes = (M, N, K, size1, size2)
    operands = (a, b, c_ptr, part_ptr)
    scales = (scale_a_ptr, scale_b_ptr, zero_ptr, stride_sam, stride_sak, stride_sbn, stride_sbk)
    after = (bias_ptr, residual_ptr, out_scale_ptr, stride_bias, stride_rz, stride_rm, stride_rn, alpha, slope)
    begin = remap_xcd(tl.program_id(0), tl.num_programs(0), XCDS)
    batch = tl.program_id(1)
    # `_sum_kernel`
    pdl_launch_dependents(PDL and SPLIT_K > 1)
    if EARLY:
        if EARLY > 1 and not TMA and B_ORDER == BY_K and FORMAT != SHUFFLED:
            _, _, stride = walks[1]
            tiles = tiles_m * tiles_n
            split = begin // tiles if SPLIT_K > 1 else 0
            _, tile_n = swizzle_tile(begin - split * tiles, tiles_m, tiles_n, GROUP_M)
            cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            columns = b + batch.to(tl.int64) * walks[1][0] + cols.to(tl.int64)[:, None] * stride
            # 4-bit values are packed in units of 64, two a byte
            step: tl.constexpr = BLOCK_K // 2 if FORMAT >= INT4 else BLOCK_K
            last = tl.cdiv(K, 64) * 32 if FORMAT >= INT4 else K
            for ahead in tl.static_range(EARLY - 1):
                first = (split * steps + ahead) * step
                fetch_columns(columns, (cols < N)[:, None], first, last, step)
                if GATED:
                    up = tl.cast(N, tl.int64) * stride
                    fetch_columns(columns + up, (cols < N)[:, None], first, last, step)
        pdl_wait(True)
    if PERSISTENT:
        for index in range(begin, tiles_m * tiles_n * SPLIT_K, tl.num_programs(0)):
            _tile(
                index, operands, scales, after, sizes, walks, tiles_m, tiles_n, steps, batch,
                FORMAT, SCALE_A, SCALE_B, HAS_ZERO, GROUP, LEADING, A_ORDER, B_ORDER, EVEN_K, WIDE, PRECISION, ACC,
                BIAS, ACTIVATION, GATED, RESIDUAL, LARGEST, GROUP_M, SPLIT_K, TMA, PTX, UNIT_SUMS, CHAINS, BOTH, False,
                NORM_EPS, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        pdl_launch_dependents(PDL and SPLIT_K == 1)
    else:
        _tile(
            begin, operands, scales, after, sizes, walks, tiles_m, tiles_n, steps, batch,
            FORMAT, SCALE_A, SCALE_B, HAS_ZERO, GROUP, LEADING, A_ORDER, B_ORDER, EVEN_K, WIDE, PRECISION, ACC,
            BIAS, ACTIVATION, GATED, RESIDUAL, LARGEST, GROUP_M, SPLIT_K, TMA, PTX, UNIT_SUMS, CHAINS, BOTH,
            PDL and SPLIT_K == 1, NORM_EPS, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def _sum_kernel(  # type: ignore[no-untyped-def]
    part_ptr, c_ptr, bias_ptr, residual_ptr, scale_a_ptr, scale_b_ptr, out_scale_ptr, M, n_units, tiles_n, splits,
    stride_sam, stride_sbn, stride_bias, stride_rz, stride_rm, stride_rn, alpha, slope,
    SCALE_A: tl.constexpr, SCALE_B: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    RESIDUAL: tl.constexpr, LARGEST: tl.constexpr, PDL: tl.constexpr, ALIGN_N: tl.constexpr,
    SUM_M: tl.constexpr, SUM_N: tl.constexpr,
):  # fmt: skip
    """The parts [splits, batch, M, N] of a split product, added in their order, and finished."""
    pdl_wait(PDL)
    N = n_units * ALIGN_N
    batch = tl.program_id(1)
    rows = (tl.program_id(0) // tiles_n) * SUM_M + tl.arange(0, SUM_M)
    cols = (tl.program_id(0) % tiles_n) * SUM_N + tl.arange(0, SUM_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    width = 2 * N if GATED else N
    step = tl.num_programs(1).to(tl.int64) * M * width
    part = part_ptr + (batch.to(tl.int64) * M + rows)[:, None] * width + cols[None, :]
    acc = tl.zeros([SUM_M, SUM_N], part_ptr.dtype.element_ty)
    acc_up = acc
    for split in range(splits):
        acc += tl.load(part + split * step, mask=mask, other=0)
        if GATED:
            acc_up += tl.load(part + split * step + N, mask=mask, other=0)
    pdl_launch_dependents(PDL)
    scales = (scale_a_ptr, scale_b_ptr, scale_b_ptr, stride_sam, 0, stride_sbn, 0)
    after = (
        bias_ptr, residual_ptr, out_scale_ptr, stride_bias, stride_rz, stride_rm, stride_rn, alpha, slope,
    )  # fmt: skip
    epilogue(
        acc, acc_up, c_ptr, scales, after, batch, rows, cols, M, N,
        SCALE_A, SCALE_B, BIAS, ACTIVATION, GATED, RESIDUAL, LARGEST,
    )  # fmt: skip


@triton.jit
def share_of(program, programs, tiles, steps):  # type: ignore[no-untyped-def]
    """The first step of a program's share of tiles · steps, and the first after it (int64)."""
    work = tl.cast(tiles, tl.int64) * steps
    each = work // programs
    more = work % programs
    begin = program * each + tl.minimum(program, more)
    return begin, begin + each + (program < more).to(tl.int64)


@triton.jit(do_not_specialize=SIZES)
def _stream_k_kernel(  # type: ignore[no-untyped-def]
    a, b, c_ptr, part_ptr, bias_ptr, residual_ptr, scale_a_ptr, scale_b_ptr, zero_ptr, out_scale_ptr,
    M, n_units, k_units, tiles_m, tiles_n, steps, size1, size2,
    stride_az, stride_a0, stride_a1, stride_a2, stride_ak, stride_bz, stride_bk, stride_bn,
    stride_sam, stride_sak, stride_sbn, stride_sbk, stride_bias, stride_rz, stride_rm, stride_rn, alpha, slope,
    FORMAT: tl.constexpr, SCALE_A: tl.constexpr, SCALE_B: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP: tl.constexpr,
    LEADING: tl.constexpr, ALIGN: tl.constexpr, ALIGN_N: tl.constexpr, A_ORDER: tl.constexpr, B_ORDER: tl.constexpr,
    EVEN_K: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, LARGEST: tl.constexpr,
    XCDS: tl.constexpr, GROUP_M: tl.constexpr, TMA: tl.constexpr, PTX: tl.constexpr, UNIT_SUMS: tl.constexpr,
    PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """An equal share of all steps of all tiles a program (stream-K: Osama et al., 2023), for any number of programs.

    A tile that one program has all steps of is finished; of others each program stores its sum to part_ptr
    [programs, 2, BLOCK_M, BLOCK_N] (first and last tile of a program), for `_join_kernel`. Nothing waits, and no state
    is left between launches. `steps`: of BLOCK_K a tile.
    """
    N = n_units * ALIGN_N
    K = k_units * ALIGN
    a_strides, b_strides = _walks(
        stride_az, stride_a0, stride_a1, stride_a2, stride_ak, stride_bz, stride_bk, stride_bn,
        ALIGN, A_ORDER, B_ORDER, WIDE,
    )  # fmt: skip
    sizes = (M, N, K, size1, size2)
    scales = (scale_a_ptr, scale_b_ptr, zero_ptr, stride_sam, stride_sak, stride_sbn, stride_sbk)
    after = (bias_ptr, residual_ptr, out_scale_ptr, stride_bias, stride_rz, stride_rm, stride_rn, alpha, slope)
    program = remap_xcd(tl.program_id(0), tl.num_programs(0), XCDS)
    batch = tl.program_id(1)
    begin, end = share_of(program, tl.num_programs(0), tiles_m * tiles_n, steps)
    # `_join_kernel`
    pdl_launch_dependents(PDL)
    at = begin
    while at < end:
        index = (at // steps).to(tl.int32)
        first = (at % steps).to(tl.int32)
        last = tl.minimum(end - at + first, steps).to(tl.int32)
        tile_m, tile_n = swizzle_tile(index, tiles_m, tiles_n, GROUP_M)
        acc, _ = _accumulated(
            a, b, scales, sizes, a_strides, b_strides, batch, tile_m, tile_n, 0, first, last,
            FORMAT, SCALE_A, SCALE_B, HAS_ZERO, GROUP, LEADING, A_ORDER, B_ORDER, EVEN_K, WIDE, TMA,
            PRECISION, ACC, PTX, UNIT_SUMS, 1, False, 0.0, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if last - first == steps:
            rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
            cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            epilogue(
                acc, acc, c_ptr, scales, after, batch, rows, cols, M, N,
                SCALE_A, SCALE_B, BIAS, ACTIVATION, GATED, RESIDUAL, LARGEST,
            )  # fmt: skip
        else:
            place = (batch * tl.num_programs(0) + program).to(tl.int64) * 2 + (at != begin).to(tl.int64)
            offs = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            tl.store(part_ptr + place * (BLOCK_M * BLOCK_N) + offs, acc)
        at += last - first


@triton.jit(do_not_specialize=SIZES)
def _join_kernel(  # type: ignore[no-untyped-def]
    part_ptr, c_ptr, bias_ptr, residual_ptr, scale_a_ptr, scale_b_ptr, out_scale_ptr,
    M, n_units, tiles_m, tiles_n, steps, splits,
    stride_sam, stride_sbn, stride_bias, stride_rz, stride_rm, stride_rn, alpha, slope,
    SCALE_A: tl.constexpr, SCALE_B: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    RESIDUAL: tl.constexpr, LARGEST: tl.constexpr, PDL: tl.constexpr, ALIGN_N: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The tiles that several of the `splits` programs of `_stream_k_kernel` had steps of, added in their order.

    A program a boundary between shares; the first boundary inside a tile does the whole tile.
    """
    pdl_wait(PDL)
    N = n_units * ALIGN_N
    program = tl.program_id(0) + 1
    batch = tl.program_id(1)
    tiles = tiles_m * tiles_n
    begin, _ = share_of(program, splits, tiles, steps)
    before, _ = share_of(program - 1, splits, tiles, steps)
    index = begin // steps
    # a boundary between tiles splits none; a share inside one tile leaves that tile to the boundary before it
    if (begin % steps != 0) & ((before // steps != index) | (before % steps == 0)):
        offs = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], part_ptr.dtype.element_ty)
        other = program - 1
        start = before
        while (other < splits) & (start < (index + 1) * steps):
            # its first tile, unless it began in one before
            slot = (start // steps != index).to(tl.int64)
            place = (batch * splits + other).to(tl.int64) * 2 + slot
            acc += tl.load(part_ptr + place * (BLOCK_M * BLOCK_N) + offs)
            other += 1
            start, _ = share_of(other, splits, tiles, steps)
        tile_m, tile_n = swizzle_tile(index.to(tl.int32), tiles_m, tiles_n, GROUP_M)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        scales = (scale_a_ptr, scale_b_ptr, scale_b_ptr, stride_sam, 0, stride_sbn, 0)
        after = (bias_ptr, residual_ptr, out_scale_ptr, stride_bias, stride_rz, stride_rm, stride_rn, alpha, slope)
        epilogue(
            acc, acc, c_ptr, scales, after, batch, rows, cols, M, N,
            SCALE_A, SCALE_B, BIAS, ACTIVATION, GATED, RESIDUAL, LARGEST,
        )  # fmt: skip
