"""One token of a sequence of the sLSTM: programs share the columns of a head, whose weights none of them can keep."""

from __future__ import annotations

from wavecrest.ops.common.triton import tl, triton
from wavecrest.ops.mlstm.device import dim_offsets
from wavecrest.ops.slstm.device import gate_input, updated, weight_tile, weights

_SIZES = [
    "batch", "heads", "tiles", "stride_xb", "stride_xg", "stride_xh", "stride_xd", "stride_rg", "stride_rh",
    "stride_rk", "stride_rn", "stride_bg", "stride_bh", "stride_bd", "stride_yb",
]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def _slstm_steps_kernel(  # type: ignore[no-untyped-def]
    x_ptr, r_ptr, bias_ptr, h_ptr, places_ptr, y_ptr, h_new_ptr, c_ptr, n_ptr, m_ptr,
    batch, heads, tiles, stride_xb, stride_xg, stride_xh, stride_xd, stride_rg, stride_rh, stride_rk, stride_rn,
    stride_bg, stride_bh, stride_bd, stride_yb,
    PLACES: tl.constexpr, EXPONENTIAL: tl.constexpr, BIAS: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGN: tl.constexpr,
    UNITS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_B rows and BLOCK_N columns of one head; all of h, BLOCK_K elements at a time: as `_slstm_step_kernel`.

    States are contiguous: h comes from one place and goes to another, as all programs of a head read it; c, n and m
    stay where they are. Strides of x and r come in units of ALIGN, but for the last dimension's; y is by rows.

    PLACES: of padded rows or with resets; places_ptr has a number for each row: 0 where this is no token of the row's
    sequence, which leaves states as they are and makes y 0; 2 where states are zeroed before it.
    """
    EVEN: tl.constexpr = D % BLOCK_K == 0 and D % BLOCK_N == 0
    tile = tl.program_id(0) % tiles
    head = ((tl.program_id(0) // tiles) % heads).to(tl.int64)
    offs_b = (tl.program_id(0) // tiles // heads) * BLOCK_B + tl.arange(0, BLOCK_B)
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_b = (offs_b < batch)[:, None]
    mask_n = (offs_n < D)[None, :]
    mask = mask_b & mask_n
    rows = offs_b.to(tl.int64)
    columns = dim_offsets(offs_n, stride_xd, CONTIGUOUS)[None, :]
    x_at = x_ptr + (ALIGN * (rows * stride_xb + head * stride_xh))[:, None] + columns
    gate_x = ALIGN * tl.cast(stride_xg, tl.int64)
    i = gate_input(tl.load(x_at, mask=mask, other=0.0))
    f = gate_input(tl.load(x_at + gate_x, mask=mask, other=0.0))
    z = tl.load(x_at + 2 * gate_x, mask=mask, other=0.0).to(tl.float32)
    o = tl.load(x_at + 3 * gate_x, mask=mask, other=0.0).to(tl.float32)
    h_at = (rows * heads * D + head * D)[:, None]
    at = h_at + offs_n[None, :]
    c = tl.load(c_ptr + at, mask=mask, other=0.0)
    n = tl.load(n_ptr + at, mask=mask, other=0.0)
    m = tl.load(m_ptr + at, mask=mask, other=0.0)
    c_old = c
    n_old = n
    m_old = m
    fresh = mask_b
    inside = mask_b
    if PLACES:
        place = tl.load(places_ptr + offs_b, mask=offs_b < batch, other=0)[:, None]
        fresh = place == 2
        inside = place > 0
        # chosen, not multiplied: what came before may be NaN
        c = tl.where(fresh, 0.0, c)
        n = tl.where(fresh, 0.0, n)
        m = tl.where(fresh, 0.0, m)
    if BIAS:
        bias_at = bias_ptr + head * stride_bh + offs_n.to(tl.int64)[None, :] * stride_bd
        i += tl.load(bias_at, mask=mask_n, other=0.0).to(tl.float32)
        f += tl.load(bias_at + stride_bg, mask=mask_n, other=0.0).to(tl.float32)
        z += tl.load(bias_at + 2 * stride_bg, mask=mask_n, other=0.0).to(tl.float32)
        o += tl.load(bias_at + 3 * stride_bg, mask=mask_n, other=0.0).to(tl.float32)
    r_ptr += ALIGN * (head * stride_rh)
    for part in tl.range(0, (D + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
        first = part * BLOCK_K
        here = first + offs_k
        h = tl.load(h_ptr + h_at + here[None, :], mask=mask_b & (here < D)[None, :], other=0.0)
        if PLACES:
            h = tl.where(fresh, 0.0, h)
        h = h.to(r_ptr.dtype.element_ty)
        r = weight_tile(
            r_ptr, 0, first, offs_k, offs_n, stride_rg, stride_rk, stride_rn, CONTIGUOUS, ALIGN, UNITS, D, EVEN
        )
        i = tl.dot(h, r, i, input_precision=PRECISION, out_dtype=tl.float32)
        r = weight_tile(
            r_ptr, 1, first, offs_k, offs_n, stride_rg, stride_rk, stride_rn, CONTIGUOUS, ALIGN, UNITS, D, EVEN
        )
        f = tl.dot(h, r, f, input_precision=PRECISION, out_dtype=tl.float32)
        r = weight_tile(
            r_ptr, 2, first, offs_k, offs_n, stride_rg, stride_rk, stride_rn, CONTIGUOUS, ALIGN, UNITS, D, EVEN
        )
        z = tl.dot(h, r, z, input_precision=PRECISION, out_dtype=tl.float32)
        r = weight_tile(
            r_ptr, 3, first, offs_k, offs_n, stride_rg, stride_rk, stride_rn, CONTIGUOUS, ALIGN, UNITS, D, EVEN
        )
        o = tl.dot(h, r, o, input_precision=PRECISION, out_dtype=tl.float32)
    forget, take, m = weights(i, f, n, m, EXPONENTIAL)
    h, c, n = updated(forget, take, z, o, c, n)
    y = h
    if PLACES:
        y = tl.where(inside, h, 0.0)
        h = tl.where(inside, h, tl.load(h_ptr + at, mask=mask, other=0.0))
        c = tl.where(inside, c, c_old)
        n = tl.where(inside, n, n_old)
        m = tl.where(inside, m, m_old)
    y_at = y_ptr + (rows * stride_yb + head * D)[:, None] + offs_n[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(h_new_ptr + at, h, mask=mask)
    tl.store(c_ptr + at, c, mask=mask)
    tl.store(n_ptr + at, n, mask=mask)
    tl.store(m_ptr + at, m, mask=mask)
