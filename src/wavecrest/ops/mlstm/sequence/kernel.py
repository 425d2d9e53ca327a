"""The mLSTM token by token, states in registers: the kernel of mlstm_sequence."""

from __future__ import annotations

from wavecrest.ops.common.device import exp
from wavecrest.ops.common.triton import tl, triton
from wavecrest.ops.mlstm.device import (
    PACKED,
    denominator,
    dim_offsets,
    half_range,
    layer_norm,
    log_forget,
    log_input,
    sigmoid,
    within,
)

_SIZES = [
    "eps", "cap", "norm_eps", "scale", "tokens", "heads", "tiles",
    "stride_qb", "stride_qh", "stride_qs", "stride_qd", "stride_kb", "stride_kh", "stride_ks", "stride_kd",
    "stride_vb", "stride_vh", "stride_vs", "stride_vd", "stride_hb", "stride_hh", "stride_hs", "stride_hd",
    "stride_gb", "stride_gh", "stride_gs", "stride_gd", "stride_ib", "stride_ih", "stride_is",
    "stride_fb", "stride_fh", "stride_fs", "stride_cb", "stride_ch", "stride_ck", "stride_cd",
    "stride_nb", "stride_nh", "stride_nk", "stride_mb", "stride_mh", "stride_xb", "stride_xh", "stride_xk", "stride_xd",
    "stride_yb", "stride_yh", "stride_yk", "stride_zb", "stride_zh", "stride_rb", "stride_rs", "stride_w",
    "stride_cu", "stride_starts", "stride_lens",
]  # fmt: skip


@triton.jit(do_not_specialize=_SIZES)
def _mlstm_recurrent_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, i_ptr, f_ptr, c_ptr, n_ptr, m_ptr, cu_ptr, starts_ptr, lens_ptr, resets_ptr, weight_ptr,
    gate_ptr, h_ptr, c_new_ptr, n_new_ptr, m_new_ptr,
    eps, cap, norm_eps, scale, tokens, heads, tiles,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_hb, stride_hh, stride_hs, stride_hd,
    stride_gb, stride_gh, stride_gs, stride_gd, stride_ib, stride_ih, stride_is, stride_fb, stride_fh, stride_fs,
    stride_cb, stride_ch, stride_ck, stride_cd, stride_nb, stride_nh, stride_nk, stride_mb, stride_mh,
    stride_xb, stride_xh, stride_xk, stride_xd, stride_yb, stride_yh, stride_yk, stride_zb, stride_zh,
    stride_rb, stride_rs, stride_w, stride_cu, stride_starts, stride_lens,
    FORM: tl.constexpr, STARTS: tl.constexpr, LENS: tl.constexpr, RESETS: tl.constexpr, CAP: tl.constexpr,
    EXPONENTIAL: tl.constexpr, NORMALIZE: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    INITIAL: tl.constexpr, LAST: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGN: tl.constexpr,
    C_CONTIGUOUS: tl.constexpr, C_ALIGN: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """All tokens of one sequence and head, BLOCK_V columns of the state c [DK, DV] with all of its rows.

    Strides of q, k, v, h and the gate come in units of ALIGN, those of the states c (`c_new`: x) in units of C_ALIGN,
    but for the last dimension's. Every program of a head works out n and m, the first writes them (`n_new`: y, `m_new`:
    z). NORM: the program has all of DV.
    """
    tile = tl.program_id(0) % tiles
    head = ((tl.program_id(0) // tiles) % heads).to(tl.int64)
    sequence = (tl.program_id(0) // tiles // heads).to(tl.int64)
    row = sequence
    begin = tl.cast(0, tl.int64)
    end = tl.cast(tokens, tl.int64)
    if FORM == PACKED:
        row = sequence * 0
        begin = tl.load(cu_ptr + sequence * stride_cu).to(tl.int64)
        end = tl.load(cu_ptr + (sequence + 1) * stride_cu).to(tl.int64)
    if STARTS:
        begin = tl.load(starts_ptr + sequence * stride_starts).to(tl.int64)
    if LENS:
        end = begin + tl.load(lens_ptr + sequence * stride_lens).to(tl.int64)
    begin, end = within(begin, end, tokens, FORM)
    eps = tl.cast(eps, tl.float32)
    cap = tl.cast(cap, tl.float32)
    scale = tl.cast(scale, tl.float32)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_k = offs_k < DK
    mask_v = offs_v < DV
    mask_c = mask_k[:, None] & mask_v[None, :]
    wide_k = offs_k.to(tl.int64)
    c = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    n = tl.zeros([BLOCK_K], tl.float32)
    m = tl.cast(0.0, tl.float32)
    if INITIAL:
        c_at = C_ALIGN * (sequence * stride_cb + head * stride_ch + wide_k * stride_ck)
        c_at = c_at[:, None] + dim_offsets(offs_v, stride_cd, C_CONTIGUOUS)[None, :]
        c = tl.load(c_ptr + c_at, mask=mask_c, other=0.0).to(tl.float32)
        n = tl.load(n_ptr + sequence * stride_nb + head * stride_nh + wide_k * stride_nk, mask=mask_k, other=0.0)
        if EXPONENTIAL:
            m = tl.load(m_ptr + sequence * stride_mb + head * stride_mh)
    q_at = q_ptr + ALIGN * (row * stride_qb + head * stride_qh) + dim_offsets(offs_k, stride_qd, CONTIGUOUS)
    k_at = k_ptr + ALIGN * (row * stride_kb + head * stride_kh) + dim_offsets(offs_k, stride_kd, CONTIGUOUS)
    v_at = v_ptr + ALIGN * (row * stride_vb + head * stride_vh) + dim_offsets(offs_v, stride_vd, CONTIGUOUS)
    h_at = h_ptr + ALIGN * (row * stride_hb + head * stride_hh) + dim_offsets(offs_v, stride_hd, CONTIGUOUS)
    i_ptr += row * stride_ib + head * stride_ih
    f_ptr += row * stride_fb + head * stride_fh
    for token in range(begin, end):
        at = tl.cast(token, tl.int64)
        q = tl.load(q_at + ALIGN * at * stride_qs, mask=mask_k, other=0.0).to(tl.float32) * scale
        k = tl.load(k_at + ALIGN * at * stride_ks, mask=mask_k, other=0.0).to(tl.float32)
        v = tl.load(v_at + ALIGN * at * stride_vs, mask=mask_v, other=0.0).to(tl.float32)
        i = log_input(tl.load(i_ptr + at * stride_is), cap, CAP, EXPONENTIAL)
        lf = log_forget(tl.load(f_ptr + at * stride_fs), cap, CAP)
        if RESETS:
            # chosen, not multiplied: what came before may be NaN
            fresh = tl.load(resets_ptr + row * stride_rb + at * stride_rs)
            c = tl.where(fresh, 0.0, c)
            n = tl.where(fresh, 0.0, n)
            m = tl.where(fresh, 0.0, m)
        if EXPONENTIAL:
            m_new = tl.maximum(lf + m, i)
            forget = exp(lf + m - m_new)
            take = exp(i - m_new)
            m = m_new
        else:
            forget = exp(lf)
            take = exp(i)
        take_k = take * k
        c = forget * c + take_k[:, None] * v[None, :]
        n = forget * n + take_k
        # + 0: a product alone is merged into the first addition across lanes, which then have sums of different bits
        # (racecheck, H200, 2026-11-22)
        h = tl.sum(q[:, None] * c + 0.0, 0)
        if NORMALIZE:
            h = h / denominator(tl.sum(q * n + 0.0, 0), m, eps, EXPONENTIAL)
        if NORM:
            y = layer_norm(h[None, :], mask_v[None, :], DV, tl.cast(norm_eps, tl.float32))
            w_at = (head * DV + offs_v)[None, :] * stride_w
            y = y * tl.load(weight_ptr + w_at, mask=mask_v[None, :], other=0.0).to(tl.float32)
            if GATE:
                g_at = ALIGN * (row * stride_gb + head * stride_gh + at * stride_gs)
                g_at = g_at + dim_offsets(offs_v, stride_gd, CONTIGUOUS)[None, :]
                y = y * sigmoid(tl.load(gate_ptr + g_at, mask=mask_v[None, :], other=0.0).to(tl.float32))
            h = tl.sum(y, 0)
        tl.store(h_at + ALIGN * at * stride_hs, h.to(h_ptr.dtype.element_ty), mask=mask_v)
    if LAST:
        x_at = C_ALIGN * (sequence * stride_xb + head * stride_xh + wide_k * stride_xk)
        x_at = x_at[:, None] + dim_offsets(offs_v, stride_xd, C_CONTIGUOUS)[None, :]
        c = half_range(c, c_new_ptr.dtype.element_ty)
        tl.store(c_new_ptr + x_at, c.to(c_new_ptr.dtype.element_ty), mask=mask_c)
        if tile == 0:
            tl.store(n_new_ptr + sequence * stride_yb + head * stride_yh + wide_k * stride_yk, n, mask=mask_k)
            if EXPONENTIAL:
                tl.store(m_new_ptr + sequence * stride_zb + head * stride_zh, m)
