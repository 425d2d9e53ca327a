"""The norm and the output gate of the mLSTM, where no program of the kernel before it has all of a head's h."""

from __future__ import annotations

from wavecrest.ops.common.device import SECTOR, pdl_launch_dependents, pdl_wait, prefetch_l2
from wavecrest.ops.common.triton import tl, triton
from wavecrest.ops.mlstm.device import PACKED, PADDED, dim_offsets, layer_norm, sigmoid

_SIZES = [
    "norm_eps", "tokens", "heads", "rows", "sequences",
    "stride_xb", "stride_xh", "stride_xs", "stride_yb", "stride_yh", "stride_ys", "stride_yd",
    "stride_gb", "stride_gh", "stride_gs", "stride_gd", "stride_w", "stride_cu", "stride_starts", "stride_lens",
    "stride_nb", "stride_nh", "stride_nk", "stride_mb", "stride_mh",
]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def _mlstm_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, gate_ptr, cu_ptr, starts_ptr, lens_ptr, n_ptr, m_ptr, y_ptr, n_new_ptr, m_new_ptr,
    norm_eps, tokens, heads, rows, sequences,
    stride_xb, stride_xh, stride_xs, stride_yb, stride_yh, stride_ys, stride_yd, stride_gb, stride_gh, stride_gs,
    stride_gd, stride_w, stride_cu, stride_starts, stride_lens, stride_nb, stride_nh, stride_nk, stride_mb, stride_mh,
    FORM: tl.constexpr, STARTS: tl.constexpr, LENS: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    STATES: tl.constexpr, M: tl.constexpr, PDL: tl.constexpr, CONTIGUOUS: tl.constexpr, W_CONTIGUOUS: tl.constexpr,
    ALIGN: tl.constexpr, WIDE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows (b, s, h), h fastest: y = σ(gate) · LayerNorm(x) · weight; with STATES n and m to where they belong.

    Strides of x, y and the gate come in units of ALIGN, but for the last dimension's. STATES: of one token,
    n [B, NH, DK] and m [B, NH] contiguous. NORM off: the states alone.
    """
    # divided in 32 bits where rows fit: in 64 a division is a hundred instructions
    first = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    offs_m = first * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < rows
    head = (offs_m % heads).to(tl.int64)
    token = ((offs_m // heads) % tokens).to(tl.int64)
    row = (offs_m // heads // tokens).to(tl.int64)
    offs_v = tl.arange(0, BLOCK_V)
    mask_v = (offs_v < DV)[None, :]
    if PDL:
        if NORM:
            # of all that is read this alone comes from far
            each: tl.constexpr = SECTOR // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
            offs_s = tl.arange(0, BLOCK_V // each if each <= BLOCK_V else 1) * each
            w_at = (head * DV)[:, None] + offs_s[None, :]
            # rows beyond the last one have heads too
            prefetch_l2(weight_ptr + dim_offsets(w_at, stride_w, W_CONTIGUOUS), (offs_s < DV)[None, :])
        pdl_wait(PDL)
        # not before: what waits beside programs that wait would crowd where the launch before both runs dry
        pdl_launch_dependents(PDL)
    # all loads first: none waits for a sum
    if STATES:
        offs_k = tl.arange(0, BLOCK_K)
        mask_n = mask_m[:, None] & (offs_k < DK)[None, :]
        n = tl.load(n_ptr + ((row * heads + head) * DK)[:, None] + offs_k[None, :], mask=mask_n)
        if M:
            m = tl.load(m_ptr + row * heads + head, mask=mask_m)
    inside = mask_m
    if FORM == PACKED:
        begin = tl.load(cu_ptr).to(tl.int64)
        end = tl.load(cu_ptr + sequences * stride_cu).to(tl.int64)
        inside = mask_m & (token >= begin) & (token < end)
    elif FORM == PADDED:
        begin = token * 0
        end = begin + tokens
        if STARTS:
            begin = tl.load(starts_ptr + row * stride_starts, mask=mask_m, other=0).to(tl.int64)
        if LENS:
            end = begin + tl.load(lens_ptr + row * stride_lens, mask=mask_m, other=0).to(tl.int64)
        inside = mask_m & (token >= begin) & (token < end)
    if NORM:
        # what is not a token's is not read: y is 0 there already
        mask = inside[:, None] & mask_v
        x_at = ALIGN * (row * stride_xb + head * stride_xh + token * stride_xs)
        y_at = ALIGN * (row * stride_yb + head * stride_yh + token * stride_ys)
        x = tl.load(x_ptr + x_at[:, None] + offs_v[None, :], mask=mask, other=0.0).to(tl.float32)
        w_at = (head * DV)[:, None] + offs_v[None, :]
        w = tl.load(weight_ptr + dim_offsets(w_at, stride_w, W_CONTIGUOUS), mask=mask, other=0.0)
        if GATE:
            g_at = ALIGN * (row * stride_gb + head * stride_gh + token * stride_gs)
            g_at = g_at[:, None] + dim_offsets(offs_v, stride_gd, CONTIGUOUS)[None, :]
            gate = tl.load(gate_ptr + g_at, mask=mask, other=0.0)
        x = layer_norm(x, mask, DV, tl.cast(norm_eps, tl.float32))
        x = x * w.to(tl.float32)
        if GATE:
            x = x * sigmoid(gate.to(tl.float32))
        y_at = y_at[:, None] + dim_offsets(offs_v, stride_yd, CONTIGUOUS)[None, :]
        tl.store(y_ptr + y_at, x.to(y_ptr.dtype.element_ty), mask=mask)
    if STATES:
        n_at = (row * stride_nb + head * stride_nh)[:, None] + offs_k.to(tl.int64)[None, :] * stride_nk
        tl.store(n_new_ptr + n_at, n, mask=mask_n)
        if M:
            tl.store(m_new_ptr + row * stride_mb + head * stride_mh, m, mask=mask_m)
