"""The convolution's kernel: an implicit GEMM whose left matrix is read from the image, tap by tap.

Rows are pixels of the result, columns the outputs of a group. The left matrix is never gathered into memory: a row
knows its pixel, a step over K its taps and channels, and pixels outside the image are not read.
"""

from __future__ import annotations

from wavecrest.ops.common.activation import activate
from wavecrest.ops.common.device import remap_xcd, swizzle_tile
from wavecrest.ops.common.triton import tl, triton

# orders, by what is contiguous. In x: nothing, the channels of a pixel, or the pixels of a line. In weight: nothing,
# the channels of a tap and then the taps, or the taps of a channel and then the channels
ANY, CHANNELS, LINES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# the slope of leaky_relu below 0
SLOPE = tl.constexpr(0.01)
# the image line of rows that have no pixel: above the image for every tap
NOWHERE = tl.constexpr(-(1 << 31))

# arguments whose values do not specialize the kernel
SIZES = [
    "M", "n_units", "k_units", "tiles_m", "tiles_n", "groups", "steps", "out_w", "pixels", "H", "W", "taps_r", "taps_s",
    "stride_h", "stride_w", "pad_h", "pad_w", "dil_h", "dil_w", "next_outer", "next_middle", "next_inner",
    "stride_xb", "stride_xc", "stride_xh", "stride_xw", "stride_wo", "stride_wc", "stride_wr", "stride_ws",
    "stride_bias",
]  # fmt: skip


@triton.jit
def _strides(stride_0, stride_1, stride_2, stride_3, ORDER: tl.constexpr, ALIGN: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The strides of [B, C, H, W] or [O, C, R, S]: 1 along what is contiguous, the others multiples of ALIGN."""
    if WIDE:
        stride_0 = tl.cast(stride_0, tl.int64)
        stride_1 = tl.cast(stride_1, tl.int64)
        stride_2 = tl.cast(stride_2, tl.int64)
        stride_3 = tl.cast(stride_3, tl.int64)
    if ORDER == CHANNELS:
        strides = (stride_0 * ALIGN, 1, stride_2 * ALIGN, stride_3 * ALIGN)
    elif ORDER == LINES:
        strides = (stride_0 * ALIGN, stride_1 * ALIGN, stride_2 * ALIGN, 1)
    else:
        strides = (stride_0 * ALIGN, stride_1 * ALIGN, stride_2 * ALIGN, stride_3 * ALIGN)
    return strides


@triton.jit
def _inside(line, column, H, W):  # type: ignore[no-untyped-def]
    """True for pixels in the image."""
    return (line >= 0) & (line < H) & (column >= 0) & (column < W)


@triton.jit
def _by_taps(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, x_rows, lines, columns, valid, offs_n, mask_n, x_strides, w_strides, image, kernel, channels, steps,
    POINT: tl.constexpr, PADDED: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The accumulator of a tile; a step takes BLOCK_K channels of one tap, with one bounds check a row."""
    _, stride_xc, stride_xh, stride_xw = x_strides
    stride_wo, stride_wc, stride_wr, stride_ws = w_strides
    H, W = image
    taps_s, dil_h, dil_w, pad_h, pad_w = kernel
    offs_k = tl.arange(0, BLOCK_K)
    x_tile = x_rows[:, None] + (offs_k * stride_xc)[None, :]
    w_tile = (offs_k * stride_wc)[:, None] + (offs_n * stride_wo)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    r = 0
    s = 0
    c = 0
    for _ in range(steps):
        if PADDED:
            mask_m = _inside(lines + r * dil_h, columns + s * dil_w, H, W)
        else:
            mask_m = valid
        mask_x = mask_m[:, None]
        mask_w = mask_n[None, :]
        if not EVEN_K:
            mask_k = c + offs_k < channels
            mask_x = mask_x & mask_k[None, :]
            mask_w = mask_w & mask_k[:, None]
        # the step's offset is one number, added to the pointer, as it may be negative and the offsets of buffer
        # instructions must not be
        x_step = (r * dil_h - pad_h) * stride_xh + (s * dil_w - pad_w) * stride_xw + c * stride_xc
        w_step = r * stride_wr + s * stride_ws + c * stride_wc
        a = tl.load(x_ptr + x_step + x_tile, mask=mask_x, other=0.0)
        b = tl.load(w_ptr + w_step + w_tile, mask=mask_w, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=tl.float32)
        c += BLOCK_K
        if not POINT:
            new_tap = c >= channels
            c = tl.where(new_tap, 0, c)
            s = tl.where(new_tap, s + 1, s)
            new_line = s >= taps_s
            s = tl.where(new_line, 0, s)
            r = tl.where(new_line, r + 1, r)
    return acc


@triton.jit
def _flat(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, x_rows, lines, columns, valid, offs_n, mask_n, x_strides, w_strides, image, kernel, order, K, steps,
    W_ORDER: tl.constexpr, CHANNELS_INNER: tl.constexpr, PADDED: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The accumulator of a tile; a step takes BLOCK_K of all taps and channels, each from its own pixel.

    For few channels, where a step of one tap would be mostly zeros. K runs over (r, s, c), or (c, r, s) without
    CHANNELS_INNER; the next step's indices come from additions with carries, so that divisions are made once.
    """
    _, stride_xc, stride_xh, stride_xw = x_strides
    stride_wo, stride_wc, stride_wr, stride_ws = w_strides
    H, W = image
    _, dil_h, dil_w, pad_h, pad_w = kernel
    middles, inners, next_outer, next_middle, next_inner = order
    offs_k = tl.arange(0, BLOCK_K)
    inner = offs_k % inners
    middle = (offs_k // inners) % middles
    outer = offs_k // inners // middles
    x_ptr -= pad_h * stride_xh + pad_w * stride_xw
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(steps):
        if CHANNELS_INNER:
            r, s, c = outer, middle, inner
        else:
            r, s, c = middle, inner, outer
        down = r * dil_h
        across = s * dil_w
        mask_x = valid[:, None]
        mask_w = mask_n[None, :]
        if PADDED:
            mask_x = _inside(lines[:, None] + down[None, :], columns[:, None] + across[None, :], H, W)
        if not EVEN_K:
            mask_k = step * BLOCK_K + offs_k < K
            mask_x = mask_x & mask_k[None, :]
            mask_w = mask_w & mask_k[:, None]
        x_tile = x_rows[:, None] + (c * stride_xc + down * stride_xh + across * stride_xw)[None, :]
        a = tl.load(x_ptr + x_tile, mask=mask_x, other=0.0)
        if W_ORDER == ANY:
            w_tile = (c * stride_wc + r * stride_wr + s * stride_ws)[:, None] + (offs_n * stride_wo)[None, :]
        else:
            w_tile = (step * BLOCK_K + offs_k)[:, None] + (offs_n * stride_wo)[None, :]
        b = tl.load(w_ptr + w_tile, mask=mask_w, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=tl.float32)
        inner += next_inner
        carry = inner >= inners
        inner = tl.where(carry, inner - inners, inner)
        middle += next_middle + carry.to(tl.int32)
        carry = middle >= middles
        middle = tl.where(carry, middle - middles, middle)
        outer += next_outer + carry.to(tl.int32)
    return acc


@triton.jit(do_not_specialize=SIZES)
def _conv2d_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, bias_ptr, y_ptr,
    M, n_units, k_units, tiles_m, tiles_n, groups, steps, out_w, pixels, H, W, taps_r, taps_s,
    stride_h, stride_w, pad_h, pad_w, dil_h, dil_w, next_outer, next_middle, next_inner,
    stride_xb, stride_xc, stride_xh, stride_xw, stride_wo, stride_wc, stride_wr, stride_ws, stride_bias,
    X_ORDER: tl.constexpr, W_ORDER: tl.constexpr, X_ALIGN: tl.constexpr, W_ALIGN: tl.constexpr, K_ALIGN: tl.constexpr,
    N_ALIGN: tl.constexpr, CHANNELS_INNER: tl.constexpr, CHANNELS_LAST: tl.constexpr, POINT: tl.constexpr,
    PADDED: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    XCDS: tl.constexpr, FLAT: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_M, BLOCK_N] of one group. `k_units`: channels of a group, or with FLAT all of K, over K_ALIGN."""
    N = n_units * N_ALIGN
    K = k_units * K_ALIGN
    x_strides = _strides(stride_xb, stride_xc, stride_xh, stride_xw, X_ORDER, X_ALIGN, WIDE)
    w_strides = _strides(stride_wo, stride_wc, stride_wr, stride_ws, W_ORDER, W_ALIGN, WIDE)
    index = remap_xcd(tl.program_id(0), tl.num_programs(0), XCDS)
    # groups side by side: where channels are contiguous, they read the same lines of memory
    group = index % groups
    tile_m, tile_n = swizzle_tile(index // groups, tiles_m, tiles_n, GROUP_M)
    if WIDE:
        # with the 64-bit strides this makes all offsets 64 bits
        tile_m = tile_m.to(tl.int64)
        group = group.to(tl.int64)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    first_n = group * N + tile_n * BLOCK_N
    mask_n = tile_n * BLOCK_N + offs_n < N
    valid = rows < M
    batch = rows // pixels
    pixel = rows % pixels
    oh = pixel // out_w
    ow = pixel % out_w
    x_rows = batch * x_strides[0] + oh * (stride_h * x_strides[2]) + ow * (stride_w * x_strides[3])
    if X_ORDER == LINES:
        # true but at the ends of lines; without an alignment no access gets wider by it, but threads go along the line
        x_rows = tl.max_contiguous(x_rows, [BLOCK_M])
    lines = tl.where(valid, oh * stride_h - pad_h, NOWHERE)
    columns = ow * stride_w - pad_w
    image = (H, W)
    kernel = (taps_s, dil_h, dil_w, pad_h, pad_w)
    w_ptr += first_n * w_strides[0]
    if FLAT:
        channels = K // (taps_r * taps_s)
        middles = taps_s if CHANNELS_INNER else taps_r
        inners = channels if CHANNELS_INNER else taps_s
        order = (middles, inners, next_outer, next_middle, next_inner)
        x_ptr += group * channels * x_strides[1]
        acc = _flat(
            x_ptr, w_ptr, x_rows, lines, columns, valid, offs_n, mask_n, x_strides, w_strides, image, kernel, order, K,
            steps, W_ORDER, CHANNELS_INNER, PADDED, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        x_ptr += group * K * x_strides[1]
        acc = _by_taps(
            x_ptr, w_ptr, x_rows, lines, columns, valid, offs_n, mask_n, x_strides, w_strides, image, kernel, K, steps,
            POINT, PADDED, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    n = first_n + offs_n
    if BIAS:
        acc += tl.load(bias_ptr + n * stride_bias, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    acc = activate(acc, SLOPE, ACTIVATION)
    outputs = groups * N
    if CHANNELS_LAST:
        y_tile = (rows * outputs)[:, None] + n[None, :]
    else:
        # as for x_rows
        y_rows = tl.max_contiguous(batch * outputs * pixels + pixel, [BLOCK_M])
        y_tile = y_rows[:, None] + (n * pixels)[None, :]
    tl.store(y_ptr + y_tile, acc.to(y_ptr.dtype.element_ty), mask=valid[:, None] & mask_n[None, :])
