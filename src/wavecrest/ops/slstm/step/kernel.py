"""One token of the sLSTM: a kernel whose programs share the columns of a head."""

from __future__ import annotations

from wavecrest.ops.common.triton import tl, triton
from wavecrest.ops.mlstm.device import dim_offsets
from wavecrest.ops.slstm.device import gate_input, updated, weight_tile, weights

_SIZES = [
    "batch", "heads", "tiles", "stride_xb", "stride_xg", "stride_xh", "stride_xd", "stride_rg", "stride_rh",
    "stride_rk", "stride_rn", "stride_bg", "stride_bh", "stride_bd", "stride_hb", "stride_hh", "stride_hd",
    "stride_cb", "stride_ch", "stride_cd", "stride_nb", "stride_nh", "stride_nd", "stride_mb", "stride_mh", "stride_md",
]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def _slstm_step_kernel(  # type: ignore[no-untyped-def]
    x_ptr, r_ptr, bias_ptr, h_ptr, c_ptr, n_ptr, m_ptr, y_ptr, h_new_ptr, c_new_ptr, n_new_ptr, m_new_ptr,
    batch, heads, tiles, stride_xb, stride_xg, stride_xh, stride_xd, stride_rg, stride_rh, stride_rk, stride_rn,
    stride_bg, stride_bh, stride_bd, stride_hb, stride_hh, stride_hd, stride_cb, stride_ch, stride_cd,
    stride_nb, stride_nh, stride_nd, stride_mb, stride_mh, stride_md,
    EXPONENTIAL: tl.constexpr, BIAS: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGN: tl.constexpr,
    UNITS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_B rows and BLOCK_N columns of one head; all of h, BLOCK_K elements at a time.

    Strides of x and r come in units of ALIGN, but for the last dimension's; y and new states are contiguous.
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
    wide = offs_n.to(tl.int64)[None, :]
    c = tl.load(c_ptr + (rows * stride_cb + head * stride_ch)[:, None] + wide * stride_cd, mask=mask, other=0.0)
    n = tl.load(n_ptr + (rows * stride_nb + head * stride_nh)[:, None] + wide * stride_nd, mask=mask, other=0.0)
    m = tl.load(m_ptr + (rows * stride_mb + head * stride_mh)[:, None] + wide * stride_md, mask=mask, other=0.0)
    if BIAS:
        bias_at = bias_ptr + head * stride_bh + wide * stride_bd
        i += tl.load(bias_at, mask=mask_n, other=0.0).to(tl.float32)
        f += tl.load(bias_at + stride_bg, mask=mask_n, other=0.0).to(tl.float32)
        z += tl.load(bias_at + 2 * stride_bg, mask=mask_n, other=0.0).to(tl.float32)
        o += tl.load(bias_at + 3 * stride_bg, mask=mask_n, other=0.0).to(tl.float32)
    r_ptr += ALIGN * (head * stride_rh)
    h_ptr += head * stride_hh
    for part in tl.range(0, (D + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
        first = part * BLOCK_K
        here = first + offs_k
        h_at = (rows * stride_hb)[:, None] + (here.to(tl.int64) * stride_hd)[None, :]
        h = tl.load(h_ptr + h_at, mask=mask_b & (here < D)[None, :], other=0.0).to(r_ptr.dtype.element_ty)
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
    at = (rows * heads * D + head * D)[:, None] + offs_n[None, :]
    tl.store(y_ptr + at, h.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(h_new_ptr + at, h, mask=mask)
    tl.store(c_new_ptr + at, c, mask=mask)
    tl.store(n_new_ptr + at, n, mask=mask)
    tl.store(m_new_ptr + at, m, mask=mask)
