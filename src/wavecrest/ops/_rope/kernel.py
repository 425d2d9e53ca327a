"""The kernel of the rotary embedding: a program turns heads of tokens, which share a row of cos and sin."""

from __future__ import annotations

from wavecrest.ops.common.device import column_mask, column_offsets
from wavecrest.ops.common.triton import tl, triton


@triton.jit(
    do_not_specialize=[
        "inner", "size1", "blocks_t", "blocks_h", "heads", "positions", "half", "rest",
        "stride_x0", "stride_x1", "stride_x2", "stride_xh", "stride_y0", "stride_y1", "stride_y2", "stride_yh",
        "stride_c0", "stride_c1", "stride_c2", "stride_p0", "stride_p1", "stride_p2",
    ]
)  # fmt: skip
def _rope_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    inner,
    size1,
    blocks_t,
    blocks_h,
    heads,
    positions,
    half,
    rest,
    stride_x0,
    stride_x1,
    stride_x2,
    stride_xh,
    stride_xd,
    stride_y0,
    stride_y1,
    stride_y2,
    stride_yh,
    stride_yd,
    stride_c0,
    stride_c1,
    stride_c2,
    stride_cd,
    stride_p0,
    stride_p1,
    stride_p2,
    INTERLEAVED: tl.constexpr,
    POSITIONS: tl.constexpr,
    LEADING: tl.constexpr,
    ALIGN: tl.constexpr,
    EVEN_H: tl.constexpr,
    EVEN_R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    # half, rest and the strides of x, y, cos and sin come in units of ALIGN, which tells how wide accesses may be;
    # half of a full block is known better still
    R2 = BLOCK_R if EVEN_R else half * ALIGN
    program = tl.program_id(0)
    block_h = program % blocks_h
    block = program // blocks_h
    x0 = tl.zeros([1, 1], tl.int64)
    y0, c0, p0 = x0, x0, tl.zeros([1], tl.int64)
    if LEADING != 1:
        # a program's tokens are of one innermost run, so that the divisions are once a program
        outer = (block // blocks_t).to(tl.int64)
        block = block % blocks_t
        x0 += (outer // size1) * stride_x0 + (outer % size1) * stride_x1
        y0 += (outer // size1) * stride_y0 + (outer % size1) * stride_y1
        c0 += (outer // size1) * stride_c0 + (outer % size1) * stride_c1
        p0 += (outer // size1) * stride_p0 + (outer % size1) * stride_p1
    rows = tl.arange(0, BLOCK_T * BLOCK_H)
    # int64: what strides make of them passes 2³¹ on large tensors
    tokens = block.to(tl.int64) * BLOCK_T + rows // BLOCK_H
    head = block_h.to(tl.int64) * BLOCK_H + rows % BLOCK_H
    mask_t = column_mask(tokens, inner, BLOCK_T * BLOCK_H, BLOCK_T == 1)
    mask_m = (mask_t & column_mask(head, heads, BLOCK_T * BLOCK_H, EVEN_H))[:, None]
    x_rows = x_ptr + ALIGN * (x0 + (tokens * stride_x2 + head * stride_xh)[:, None])
    y_rows = y_ptr + ALIGN * (y0 + (tokens * stride_y2 + head * stride_yh)[:, None])

    offs_r = tl.arange(0, BLOCK_R)
    mask_r = mask_m & column_mask(offs_r, R2, BLOCK_R, EVEN_R)[None, :]
    # x before the angles, which positions have to arrive for
    if BLOCK_REST > 0:
        offs_rest = tl.arange(0, BLOCK_REST)
        mask_rest = mask_m & (offs_rest < rest * ALIGN)[None, :]
        passed = tl.load(x_rows + column_offsets(2 * R2 + offs_rest, stride_xd)[None, :], mask=mask_rest)
    if INTERLEAVED:
        offs_x = tl.arange(0, 2 * BLOCK_R)
        mask_x = mask_m & column_mask(offs_x, 2 * R2, 2 * BLOCK_R, EVEN_R)[None, :]
        # a pair is in neighbouring columns: loaded together, as wide as rows allow, and taken apart in registers
        first = tl.load(x_rows + column_offsets(offs_x, stride_xd)[None, :], mask=mask_x, other=0.0)
        second = first
    else:
        first = tl.load(x_rows + column_offsets(offs_r, stride_xd)[None, :], mask=mask_r, other=0.0)
        second = tl.load(x_rows + column_offsets(R2 + offs_r, stride_xd)[None, :], mask=mask_r, other=0.0)

    # every row reads its token's angles: the same lines for all heads, from the nearest cache
    table = c0 + (tokens * stride_c2)[:, None]
    inside = mask_r
    if POSITIONS:
        position = tl.load(positions_ptr + p0 + tokens * stride_p2, mask=mask_t, other=0).to(tl.int64)
        table = (position * stride_c2)[:, None]
        # a position that the table does not have is not read: its token becomes NaN
        inside = mask_r & ((position >= 0) & (position < positions))[:, None]
    table = ALIGN * table + column_offsets(offs_r, stride_cd)[None, :]
    cos = tl.load(cos_ptr + table, mask=inside, other=float("nan")).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=inside, other=0.0).to(tl.float32)

    if INTERLEAVED:
        first, second = tl.split(tl.reshape(first.to(tl.float32), [BLOCK_T * BLOCK_H, BLOCK_R, 2]))
        y = tl.join(first * cos - second * sin, second * cos + first * sin)
        y = tl.reshape(y, [BLOCK_T * BLOCK_H, 2 * BLOCK_R])
        tl.store(y_rows + column_offsets(offs_x, stride_yd)[None, :], y, mask=mask_x)
    else:
        first, second = first.to(tl.float32), second.to(tl.float32)
        tl.store(y_rows + column_offsets(offs_r, stride_yd)[None, :], first * cos - second * sin, mask=mask_r)
        tl.store(y_rows + column_offsets(R2 + offs_r, stride_yd)[None, :], second * cos + first * sin, mask=mask_r)
    if BLOCK_REST > 0:
        tl.store(y_rows + column_offsets(2 * R2 + offs_rest, stride_yd)[None, :], passed, mask=mask_rest)
