"""The kernels of a mixture of experts: pairs sorted by expert, two grouped GEMMs, and the sum over a token's experts.

A pair is a token and one of its k experts, numbered t · k + j. The GEMMs work on blocks of BLOCK_M pairs of one expert,
which read the rows of their tokens where they lie and write the rows of their pairs: nothing is copied or padded in
memory. Blocks and pairs that stand for nothing have ids past the last expert and the last pair.
"""

from __future__ import annotations

from wavecrest.ops.common.activation import activate
from wavecrest.ops.common.device import (
    column_mask,
    exp,
    pdl_launch_dependents,
    pdl_wait,
    remap_xcd,
    swizzle_tile,
)
from wavecrest.ops.common.mxfp4 import e2m1_values, e8m0_values, mxfp4_values
from wavecrest.ops.common.triton import reciprocal, tl, triton
from wavecrest.ops.common.widen import int4_values, int4_values_from, widened

# what the gated activation is compiled for, beside those of `ops.common.activation`
SWIGLUOAI = tl.constexpr(16)
# which dimension of a weight's [N, K] or of x's [M, K] is contiguous: neither, K, or the other
ANY, BY_K, ACROSS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# what shares a scale of w: nothing has one; a row, or all of an expert; 128 × 128 values; GROUP columns of a row of
# int4; 32 columns of a row of mxfp4, whose scales multiply the values or, as float16 has not all of these, the sums
NO_SCALE, BY_ROW, BY_BLOCK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BY_GROUP, MXFP4, MXFP4_SUMS = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
SCALE_BLOCK = tl.constexpr(128)

# arguments whose values do not specialize a kernel
SIZES = [
    "num_pairs", "k", "num_experts", "num_blocks", "tiles_n", "n_units", "k_units", "up", "bias_up", "scale_up",
    "alpha", "limit", "stride_xm", "stride_xk", "stride_we", "stride_wn", "stride_wk", "stride_be", "stride_bn",
    "stride_se", "stride_sn", "stride_it", "stride_ij", "stride_tt", "stride_tj", "stride_sk", "stride_ze", "stride_zn",
    "stride_zk",
]  # fmt: skip


# loads whose values become addresses of stores are in the kernels themselves: torch.compile (2.13) takes every tensor
# that a device function was given for the address that it returns, and so for written


@triton.jit
def _pair_offsets(pairs, k, stride_t, stride_j):  # type: ignore[no-untyped-def]
    """Where pairs lie in topk_ids or topk_weights."""
    return (pairs // k).to(tl.int64) * stride_t + (pairs % k).to(tl.int64) * stride_j


@triton.jit
def _here(ids, num_experts):  # type: ignore[no-untyped-def]
    """Experts, num_experts in place of those that are not here."""
    return tl.where((ids >= 0) & (ids < num_experts), ids, num_experts).to(tl.int32)


@triton.jit(do_not_specialize=SIZES)
def _moe_align_kernel(  # type: ignore[no-untyped-def]
    ids_ptr, pairs_ptr, experts_ptr, num_pairs, k, num_experts, num_blocks, stride_it, stride_ij,
    PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Pairs sorted by their experts, each expert's filled up to whole blocks with num_pairs; the expert of each block.

    A program places the pairs of one expert, in their order. It counts those of all experts itself, so that none
    waits for another. The last program marks the blocks that are left.
    """
    pdl_launch_dependents(PDL)
    expert = tl.program_id(0)
    offs_e = tl.arange(0, BLOCK_E)
    offs_p = tl.arange(0, BLOCK_P)
    # pairs of no expert are counted in the last place
    counts = tl.zeros([BLOCK_E], tl.int32)
    for start in range(0, num_pairs, BLOCK_P):
        pairs = start + offs_p
        where = _pair_offsets(pairs, k, stride_it, stride_ij)
        ids = _here(tl.load(ids_ptr + where, mask=pairs < num_pairs, other=-1), num_experts)
        counts += tl.histogram(tl.where(ids < num_experts, ids, BLOCK_E - 1), BLOCK_E).to(tl.int32)
    blocks = (counts + (BLOCK_M - 1)) // BLOCK_M
    first = tl.sum(tl.where(offs_e < expert, blocks, 0), axis=0)
    if expert < num_experts:
        own = tl.sum(tl.where(offs_e == expert, counts, 0), axis=0)
        last = first + tl.cdiv(own, BLOCK_M)
        for block in range(first, last):
            tl.store(experts_ptr + block, expert)
        placed = first * BLOCK_M
        for start in range(0, num_pairs, BLOCK_P):
            pairs = start + offs_p
            where = _pair_offsets(pairs, k, stride_it, stride_ij)
            mine = tl.load(ids_ptr + where, mask=pairs < num_pairs, other=-1) == expert
            rank = tl.cumsum(mine.to(tl.int32), axis=0)
            tl.store(pairs_ptr + placed + rank - 1, pairs, mask=mine)
            placed += tl.sum(mine.to(tl.int32), axis=0)
        rest = placed + tl.arange(0, BLOCK_M)
        tl.store(pairs_ptr + rest, num_pairs + tl.zeros([BLOCK_M], tl.int32), mask=rest < last * BLOCK_M)
    else:
        for start in range(first, num_blocks, BLOCK_P):
            left = start + offs_p
            tl.store(experts_ptr + left, num_experts + tl.zeros([BLOCK_P], tl.int32), mask=left < num_blocks)


@triton.jit
def _strides(stride_n, stride_k, ORDER: tl.constexpr, ALIGN: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The strides of a matrix: 1 along what is contiguous, else multiples of ALIGN."""
    if WIDE:
        stride_n, stride_k = tl.cast(stride_n, tl.int64), tl.cast(stride_k, tl.int64)
    if ORDER == BY_K:
        strides = (stride_n * ALIGN, 1)
    elif ORDER == ACROSS:
        strides = (1, stride_k * ALIGN)
    else:
        strides = (stride_n * ALIGN, stride_k * ALIGN)
    return strides


@triton.jit
def _step_scales(  # type: ignore[no-untyped-def]
    scales, n, mask_n, k, K, SCALES: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The scales of the step that begins at column k, of w's rows n: for the low and for the high halves of 4 bits.

    [1, BLOCK_N]; of mxfp4 bytes, [units of 64 columns, BLOCK_N]. Nothing is read for a step beyond K.
    """
    scale_ptr, stride_sn, stride_sk = scales
    if SCALES == BY_BLOCK:
        where = scale_ptr + (n // SCALE_BLOCK * stride_sn)[None, :]
        low = tl.load(where + (k // SCALE_BLOCK) * stride_sk, mask=mask_n & (k < K), other=0.0)
        high = low
    elif SCALES == BY_GROUP:
        where = scale_ptr + (n * stride_sn)[None, :]
        low = tl.load(where + (k // GROUP) * stride_sk, mask=mask_n & (k < K), other=0.0)
        high = low
        if GROUP == 32:
            # a step is one unit, and its halves are groups of their own
            high = tl.load(where + (k // GROUP + 1) * stride_sk, mask=mask_n & (k + GROUP < K), other=0.0)
    else:
        group = k // 32 + 2 * tl.arange(0, BLOCK_K // 64)[:, None]
        where = scale_ptr + (n * stride_sn)[None, :] + group * stride_sk
        low = tl.load(where, mask=mask_n & (group * 32 < K), other=0)
        high = tl.load(where + stride_sk, mask=mask_n & (group * 32 + 32 < K), other=0)
    return low, high


@triton.jit
def _step_zeros(zeros, n, mask_n, k, K, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The zero points of the step that begins at column k, int16 [1, BLOCK_N], as `_step_scales`."""
    zero_ptr, stride_zn, stride_zk = zeros
    where = zero_ptr + (n * stride_zn)[None, :]
    low = tl.load(where + (k // GROUP) * stride_zk, mask=mask_n & (k < K), other=0).to(tl.int16)
    high = low
    if GROUP == 32:
        # a step is one unit, and its halves are groups of their own
        high = tl.load(where + (k // GROUP + 1) * stride_zk, mask=mask_n & (k + GROUP < K), other=0).to(tl.int16)
    return low, high


@triton.jit
def _with_4_bits(  # type: ignore[no-untyped-def]
    x_low, x_high, packed, low, high, low_zero, high_zero, acc, SCALES: tl.constexpr, HAS_ZERO: tl.constexpr,
    GROUP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """acc + the products of x's columns with the low and the high values of bytes, times their scales."""
    if SCALES == MXFP4:
        w_low, w_high = mxfp4_values(packed, low, high, x_low.dtype, PTX)
        acc = tl.dot(x_low, w_low, acc, input_precision="ieee", out_dtype=tl.float32)
        acc = tl.dot(x_high, w_high, acc, input_precision="ieee", out_dtype=tl.float32)
    else:
        if SCALES == MXFP4_SUMS:
            wide = packed.to(tl.int32)
            w_low, w_high = e2m1_values(wide << 28).to(x_low.dtype), e2m1_values(wide << 24).to(x_low.dtype)
            low, high = e8m0_values(low), e8m0_values(high)
        elif HAS_ZERO:
            w_low, w_high = int4_values_from(packed, low_zero, high_zero, x_low.dtype)
        else:
            w_low, w_high = int4_values(packed, x_low.dtype, PTX)
        product = tl.dot(x_low, w_low, input_precision="ieee", out_dtype=tl.float32)
        if SCALES == BY_GROUP and GROUP > 32:
            product = tl.dot(x_high, w_high, product, input_precision="ieee", out_dtype=tl.float32)
            acc += product * low
        else:
            acc += product * low
            acc += tl.dot(x_high, w_high, input_precision="ieee", out_dtype=tl.float32) * high
    return acc


@triton.jit
def _accumulated_4_bits(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, scales, zeros, rows, mask_m, first_n, up, N, K, x_strides, w_strides,
    BOTH: tl.constexpr, SCALES: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP: tl.constexpr, PTX: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As `_accumulated`, of w in 4 bits: units of 64 columns in 32 bytes, whose low halves hold the first 32."""
    stride_xm, stride_xk = x_strides
    stride_wn, stride_wk = w_strides
    n = first_n + tl.arange(0, BLOCK_N)
    mask_n = column_mask(n, N, BLOCK_N, EVEN_N)[None, :]
    offs_n = tl.arange(0, BLOCK_N)
    offs_j = tl.arange(0, BLOCK_K // 2)
    offs_k = (offs_j // 32) * 64 + offs_j % 32
    mask_x = mask_m[:, None]
    if WIDE:
        rows, offs_n, offs_j, offs_k = rows.to(tl.int64), offs_n.to(tl.int64), offs_j.to(tl.int64), offs_k.to(tl.int64)
    x_tile = (rows * stride_xm)[:, None] + (offs_k * stride_xk)[None, :]
    w_tile = (offs_j * stride_wk)[:, None] + (offs_n * stride_wn)[None, :]
    w_ptr += tl.cast(first_n, tl.int64) * stride_wn
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = acc
    # a step ahead: a step is short beside the wait for them
    next_low, next_high = _step_scales(scales, n, mask_n, 0, K, SCALES, GROUP, BLOCK_K)
    up_low, up_high = next_low, next_high
    if BOTH:
        up_low, up_high = _step_scales(scales, N + n, mask_n, 0, K, SCALES, GROUP, BLOCK_K)
    if HAS_ZERO:
        next_low_zero, next_high_zero = _step_zeros(zeros, n, mask_n, 0, K, GROUP)
        up_low_zero, up_high_zero = next_low_zero, next_high_zero
        if BOTH:
            up_low_zero, up_high_zero = _step_zeros(zeros, N + n, mask_n, 0, K, GROUP)
    for step in range(tl.cdiv(K, BLOCK_K)):
        k = step * BLOCK_K
        mask_low, mask_high, mask_w = mask_x, mask_x, mask_n
        if not EVEN_K:
            mask_low = mask_x & (k + offs_k < K)[None, :]
            mask_high = mask_x & (k + 32 + offs_k < K)[None, :]
            mask_w = mask_n & (step * (BLOCK_K // 2) + offs_j < tl.cdiv(K, 64) * 32)[:, None]
        x_start = x_ptr + tl.cast(k, tl.int64) * stride_xk
        w_start = tl.cast(step * (BLOCK_K // 2), tl.int64) * stride_wk
        x_low = tl.load(x_start + x_tile, mask=mask_low, other=0.0)
        x_high = tl.load(x_start + 32 * stride_xk + x_tile, mask=mask_high, other=0.0)
        packed = tl.load(w_ptr + w_start + w_tile, mask=mask_w, other=0)
        low, high, low_zero, high_zero = next_low, next_high, 8, 8
        next_low, next_high = _step_scales(scales, n, mask_n, k + BLOCK_K, K, SCALES, GROUP, BLOCK_K)
        if HAS_ZERO:
            low_zero, high_zero = next_low_zero, next_high_zero
            next_low_zero, next_high_zero = _step_zeros(zeros, n, mask_n, k + BLOCK_K, K, GROUP)
        acc = _with_4_bits(x_low, x_high, packed, low, high, low_zero, high_zero, acc, SCALES, HAS_ZERO, GROUP, PTX)
        if BOTH:
            packed = tl.load(w_ptr + up + w_start + w_tile, mask=mask_w, other=0)
            low, high = up_low, up_high
            up_low, up_high = _step_scales(scales, N + n, mask_n, k + BLOCK_K, K, SCALES, GROUP, BLOCK_K)
            if HAS_ZERO:
                low_zero, high_zero = up_low_zero, up_high_zero
                up_low_zero, up_high_zero = _step_zeros(zeros, N + n, mask_n, k + BLOCK_K, K, GROUP)
            acc_up = _with_4_bits(
                x_low, x_high, packed, low, high, low_zero, high_zero, acc_up, SCALES, HAS_ZERO, GROUP, PTX
            )
    return acc, acc_up


@triton.jit
def _accumulated(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, scales, rows, mask_m, first_n, up, N, K, x_strides, w_strides,
    BOTH: tl.constexpr, SCALES: tl.constexpr, PTX: tl.constexpr, FOREIGN: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x's rows [BLOCK_M] times the rows first_n to first_n + BLOCK_N of w [N, K]; with BOTH those `up` elements
    further on too, in the same loop."""
    stride_xm, stride_xk = x_strides
    stride_wn, stride_wk = w_strides
    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    if WIDE:
        rows, offs_n, offs_k = rows.to(tl.int64), offs_n.to(tl.int64), offs_k.to(tl.int64)
    x_tile = (rows * stride_xm)[:, None] + (offs_k * stride_xk)[None, :]
    w_tile = (offs_k * stride_wk)[:, None] + (offs_n * stride_wn)[None, :]
    mask_n = column_mask(first_n + tl.arange(0, BLOCK_N), N, BLOCK_N, EVEN_N)[None, :]
    w_ptr += tl.cast(first_n, tl.int64) * stride_wn
    up_ptr = w_ptr + up
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = acc
    for step in range(tl.cdiv(K, BLOCK_K)):
        start = tl.cast(step * BLOCK_K, tl.int64)
        mask_x, mask_w = mask_m[:, None], mask_n
        if not EVEN_K:
            mask_k = step * BLOCK_K + tl.arange(0, BLOCK_K) < K
            mask_x, mask_w = mask_x & mask_k[None, :], mask_w & mask_k[:, None]
        x = tl.load(x_ptr + start * stride_xk + x_tile, mask=mask_x, other=0.0)
        w = tl.load(w_ptr + start * stride_wk + w_tile, mask=mask_w, other=0.0)
        w = widened(w, x.dtype, PTX, FOREIGN)
        if SCALES == BY_BLOCK:
            n = first_n + tl.arange(0, BLOCK_N)
            scale, _ = _step_scales(scales, n, mask_n, step * BLOCK_K, K, SCALES, 1, BLOCK_K)
            acc += tl.dot(x, w, input_precision="ieee", out_dtype=tl.float32) * scale
        else:
            acc = tl.dot(x, w, acc, input_precision="ieee", out_dtype=tl.float32)
        if BOTH:
            w = tl.load(up_ptr + start * stride_wk + w_tile, mask=mask_w, other=0.0)
            w = widened(w, x.dtype, PTX, FOREIGN)
            if SCALES == BY_BLOCK:
                scale, _ = _step_scales(scales, N + n, mask_n, step * BLOCK_K, K, SCALES, 1, BLOCK_K)
                acc_up += tl.dot(x, w, input_precision="ieee", out_dtype=tl.float32) * scale
            else:
                acc_up = tl.dot(x, w, acc_up, input_precision="ieee", out_dtype=tl.float32)
    return acc, acc_up


@triton.jit(do_not_specialize=SIZES)
def _moe_gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, h_ptr, ids_ptr, pairs_ptr, experts_ptr,
    num_pairs, k, num_experts, num_blocks, tiles_n, n_units, k_units, up, bias_up, scale_up, alpha, limit,
    stride_xm, stride_xk, stride_we, stride_wn, stride_wk, stride_be, stride_bn, stride_se, stride_sn,
    stride_it, stride_ij, stride_sk, stride_ze, stride_zn, stride_zk,
    SCALES: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP: tl.constexpr, PTX: tl.constexpr, FOREIGN: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr, X_ORDER: tl.constexpr, W_ORDER: tl.constexpr, X_ALIGN: tl.constexpr,
    W_ALIGN: tl.constexpr, N_ALIGN: tl.constexpr, K_ALIGN: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    WIDE: tl.constexpr, XCDS: tl.constexpr, PDL: tl.constexpr, DIRECT: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """h[pair] = act(gate) · up of a block of pairs and BLOCK_N columns; `up`: from gate's rows of w to up's."""
    if not DIRECT:
        pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    N = n_units * N_ALIGN
    index = remap_xcd(tl.program_id(0), tl.num_programs(0), XCDS)
    block, tile_n = swizzle_tile(index, num_blocks, tiles_n, GROUP_M)
    if DIRECT:
        # a block is one pair
        expert = _here(tl.load(ids_ptr + _pair_offsets(block, k, stride_it, stride_ij)), num_experts)
    else:
        expert = tl.load(experts_ptr + block)
    if expert >= num_experts:
        return
    if DIRECT:
        pairs = tl.where(tl.arange(0, BLOCK_M) == 0, block, num_pairs)
    else:
        pairs = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    mask_m = pairs < num_pairs
    first_n = tile_n * BLOCK_N
    w_ptr += expert.to(tl.int64) * stride_we * W_ALIGN
    x_strides = _strides(stride_xm, stride_xk, X_ORDER, X_ALIGN, WIDE)
    w_strides = _strides(stride_wn, stride_wk, W_ORDER, W_ALIGN, WIDE)
    K = k_units * K_ALIGN
    scales = (scale_ptr, stride_sn, stride_sk)
    if SCALES >= BY_BLOCK:
        scales = (scale_ptr + expert.to(tl.int64) * stride_se, stride_sn, stride_sk)
    zeros = (zero_ptr, stride_zn, stride_zk)
    if HAS_ZERO:
        zeros = (zero_ptr + expert.to(tl.int64) * stride_ze, stride_zn, stride_zk)
    if INTERLEAVED:
        # columns of gate and up in turn, in one tile: accesses are as wide as those of other weights
        if SCALES >= BY_GROUP:
            acc, _ = _accumulated_4_bits(
                x_ptr, w_ptr, scales, zeros, pairs // k, mask_m, 2 * first_n, 0, 2 * N, K, x_strides, w_strides,
                False, SCALES, HAS_ZERO, GROUP, PTX, EVEN_N, EVEN_K, WIDE, BLOCK_M, 2 * BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            acc, _ = _accumulated(
                x_ptr, w_ptr, scales, pairs // k, mask_m, 2 * first_n, 0, 2 * N, K, x_strides, w_strides,
                False, SCALES, PTX, FOREIGN, EVEN_N, EVEN_K, WIDE, BLOCK_M, 2 * BLOCK_N, BLOCK_K,
            )  # fmt: skip
        gate, other = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N, 2]))
    elif SCALES >= BY_GROUP:
        gate, other = _accumulated_4_bits(
            x_ptr, w_ptr, scales, zeros, pairs // k, mask_m, first_n, up * W_ALIGN, N, K, x_strides, w_strides,
            True, SCALES, HAS_ZERO, GROUP, PTX, EVEN_N, EVEN_K, WIDE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        gate, other = _accumulated(
            x_ptr, w_ptr, scales, pairs // k, mask_m, first_n, up * W_ALIGN, N, K, x_strides, w_strides,
            True, SCALES, PTX, FOREIGN, EVEN_N, EVEN_K, WIDE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    cols = first_n + tl.arange(0, BLOCK_N)
    mask_n = column_mask(cols, N, BLOCK_N, EVEN_N)
    if SCALES == BY_ROW:
        scale = scale_ptr + expert.to(tl.int64) * stride_se + (cols.to(tl.int64) * stride_sn)[None, :]
        gate *= tl.load(scale, mask=mask_n[None, :], other=0.0)
        other *= tl.load(scale + scale_up, mask=mask_n[None, :], other=0.0)
    if BIAS:
        bias = bias_ptr + expert.to(tl.int64) * stride_be + (cols.to(tl.int64) * stride_bn)[None, :]
        gate += tl.load(bias, mask=mask_n[None, :], other=0.0).to(tl.float32)
        other += tl.load(bias + bias_up, mask=mask_n[None, :], other=0.0).to(tl.float32)
    if ACTIVATION == SWIGLUOAI:
        # comparisons, which keep NaN; numbers as float32, as Inductor (torch 2.11) passes a Python float as float64
        most = tl.cast(limit, tl.float32)
        gate = tl.where(gate > most, most, gate)
        other = tl.where(other > most, most, tl.where(other < -most, -most, other))
        h = gate * reciprocal(1.0 + exp(-tl.cast(alpha, tl.float32) * gate)) * (other + 1.0)
    else:
        h = activate(gate, 0.0, ACTIVATION) * other
    out = h_ptr + pairs.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(out, h.to(h_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit(do_not_specialize=SIZES)
def _moe_down_kernel(  # type: ignore[no-untyped-def]
    h_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, weights_ptr, parts_ptr, ids_ptr, pairs_ptr, experts_ptr,
    num_pairs, k, num_experts, num_blocks, tiles_n, n_units, k_units,
    stride_we, stride_wn, stride_wk, stride_be, stride_bn, stride_se, stride_sn, stride_it, stride_ij, stride_tt,
    stride_tj, stride_sk, stride_ze, stride_zn, stride_zk,
    SCALES: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP: tl.constexpr, PTX: tl.constexpr, FOREIGN: tl.constexpr,
    BIAS: tl.constexpr, W_ORDER: tl.constexpr, W_ALIGN: tl.constexpr, N_ALIGN: tl.constexpr, K_ALIGN: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, XCDS: tl.constexpr, PDL: tl.constexpr,
    DIRECT: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """parts[pair] = topk_weights[pair] · (w2 · h[pair] + bias) of a block of pairs and BLOCK_N columns."""
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    N = n_units * N_ALIGN
    K = k_units * K_ALIGN
    index = remap_xcd(tl.program_id(0), tl.num_programs(0), XCDS)
    block, tile_n = swizzle_tile(index, num_blocks, tiles_n, GROUP_M)
    if DIRECT:
        # a block is one pair
        expert = _here(tl.load(ids_ptr + _pair_offsets(block, k, stride_it, stride_ij)), num_experts)
    else:
        expert = tl.load(experts_ptr + block)
    if expert >= num_experts:
        return
    if DIRECT:
        pairs = tl.where(tl.arange(0, BLOCK_M) == 0, block, num_pairs)
    else:
        pairs = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    mask_m = pairs < num_pairs
    first_n = tile_n * BLOCK_N
    scales = (scale_ptr, stride_sn, stride_sk)
    if SCALES >= BY_BLOCK:
        scales = (scale_ptr + expert.to(tl.int64) * stride_se, stride_sn, stride_sk)
    zeros = (zero_ptr, stride_zn, stride_zk)
    if HAS_ZERO:
        zeros = (zero_ptr + expert.to(tl.int64) * stride_ze, stride_zn, stride_zk)
    if SCALES >= BY_GROUP:
        acc, _ = _accumulated_4_bits(
            h_ptr, w_ptr + expert.to(tl.int64) * stride_we * W_ALIGN, scales, zeros, pairs, mask_m, first_n, 0, N, K,
            (K, 1), _strides(stride_wn, stride_wk, W_ORDER, W_ALIGN, WIDE),
            False, SCALES, HAS_ZERO, GROUP, PTX, EVEN_N, EVEN_K, WIDE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        acc, _ = _accumulated(
            h_ptr, w_ptr + expert.to(tl.int64) * stride_we * W_ALIGN, scales, pairs, mask_m, first_n, 0, N, K, (K, 1),
            _strides(stride_wn, stride_wk, W_ORDER, W_ALIGN, WIDE),
            False, SCALES, PTX, FOREIGN, EVEN_N, EVEN_K, WIDE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    cols = first_n + tl.arange(0, BLOCK_N)
    mask_n = column_mask(cols, N, BLOCK_N, EVEN_N)
    if SCALES == BY_ROW:
        scale = scale_ptr + expert.to(tl.int64) * stride_se + (cols.to(tl.int64) * stride_sn)[None, :]
        acc *= tl.load(scale, mask=mask_n[None, :], other=0.0)
    if BIAS:
        bias = bias_ptr + expert.to(tl.int64) * stride_be + (cols.to(tl.int64) * stride_bn)[None, :]
        acc += tl.load(bias, mask=mask_n[None, :], other=0.0).to(tl.float32)
    where = _pair_offsets(pairs, k, stride_tt, stride_tj)[:, None]
    acc *= tl.load(weights_ptr + where, mask=mask_m[:, None], other=0.0).to(tl.float32)
    out = parts_ptr + pairs.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(out, acc.to(parts_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit(do_not_specialize=SIZES)
def _moe_combine_kernel(  # type: ignore[no-untyped-def]
    parts_ptr, ids_ptr, y_ptr, k, num_experts, tiles_n, n_units, stride_it, stride_ij,
    N_ALIGN: tl.constexpr, EVEN_N: tl.constexpr, PDL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[token] = the sum of its pairs' parts, in their order; those of no expert are not read."""
    pdl_wait(PDL)
    N = n_units * N_ALIGN
    token = tl.program_id(0) // tiles_n
    cols = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = column_mask(cols, N, BLOCK_N, EVEN_N)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for choice in range(k):
        pair = token * k + choice
        expert = _here(tl.load(ids_ptr + _pair_offsets(pair, k, stride_it, stride_ij)), num_experts)
        part = parts_ptr + tl.cast(pair, tl.int64) * N + cols
        acc += tl.load(part, mask=mask_n & (expert < num_experts), other=0.0).to(tl.float32)
    tl.store(y_ptr + tl.cast(token, tl.int64) * N + cols, acc.to(y_ptr.dtype.element_ty), mask=mask_n)
