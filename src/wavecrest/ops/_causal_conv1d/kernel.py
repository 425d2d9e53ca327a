"""The causal convolution: a program has some tokens of some channels, and reads each input once a tap."""

from __future__ import annotations

from wavecrest.ops.common.device import column_mask, exp
from wavecrest.ops.common.triton import tl, triton


@triton.jit
def _columns(offs, stride, CONTIGUOUS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets of channels; in a row that is contiguous, no stride stands in the way of wide accesses."""
    if CONTIGUOUS:
        found = offs
    else:
        found = offs.to(tl.int64) * stride
    return found


@triton.jit(
    do_not_specialize=[
        "tokens", "tiles", "stride_xb", "stride_xs", "stride_xc", "stride_wc", "stride_wk", "stride_bias", "stride_ib",
        "stride_is", "stride_ic", "stride_lens",
    ]
)  # fmt: skip
def _causal_conv1d_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, bias_ptr, initial_ptr, lens_ptr, y_ptr, tokens, tiles, stride_xb, stride_xs, stride_xc,
    stride_wc, stride_wk, stride_bias, stride_ib, stride_is, stride_ic, stride_lens,
    C: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, INITIAL: tl.constexpr, LENS: tl.constexpr,
    SILU: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGN: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """BLOCK_S tokens and BLOCK_C channels of a row.

    Strides of x and `initial` between rows and tokens come in units of ALIGN; y is contiguous.
    """
    EVEN: tl.constexpr = C % BLOCK_C == 0
    columns_of = (C + BLOCK_C - 1) // BLOCK_C
    offs_c = (tl.program_id(0) % columns_of) * BLOCK_C + tl.arange(0, BLOCK_C)
    tile = (tl.program_id(0) // columns_of) % tiles
    row = (tl.program_id(0) // columns_of // tiles).to(tl.int64)
    offs_s = tile * BLOCK_S + tl.arange(0, BLOCK_S)
    mask_c = column_mask(offs_c, C, BLOCK_C, EVEN)[None, :]
    end = tokens
    if LENS:
        end = tl.minimum(tl.load(lens_ptr + row * stride_lens), tokens)
    inside = (offs_s < end)[:, None]
    x_at = x_ptr + ALIGN * row * stride_xb + _columns(offs_c, stride_xc, CONTIGUOUS)[None, :]
    first_at = initial_ptr + ALIGN * row * stride_ib + _columns(offs_c, stride_ic, CONTIGUOUS)[None, :]
    y = tl.zeros([BLOCK_S, BLOCK_C], tl.float32)
    for tap in tl.static_range(K):
        at = (offs_s + (tap - K + 1))[:, None]
        x = tl.load(x_at + ALIGN * (at.to(tl.int64) * stride_xs), mask=inside & (at >= 0) & mask_c, other=0.0)
        if INITIAL and tap < K - 1:
            first = first_at + ALIGN * ((at + K - 1).to(tl.int64) * stride_is)
            x += tl.load(first, mask=inside & (at < 0) & mask_c, other=0.0)
        weight_at = weight_ptr + offs_c.to(tl.int64) * stride_wc + tap * stride_wk
        weight = tl.load(weight_at[None, :], mask=mask_c, other=0.0).to(tl.float32)
        y += x.to(tl.float32) * weight
    if BIAS:
        y += tl.load((bias_ptr + offs_c.to(tl.int64) * stride_bias)[None, :], mask=mask_c, other=0.0).to(tl.float32)
    if SILU:
        y = y / (1.0 + exp(-y))
    if LENS:
        y = tl.where(inside, y, 0.0)
    y_at = y_ptr + (row * tokens + offs_s)[:, None] * C + offs_c[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=(offs_s < tokens)[:, None] & mask_c)
