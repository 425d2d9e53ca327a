"""One token of the mLSTM: a kernel that streams the states through registers."""

from __future__ import annotations

from wavecrest.ops.common.device import SECTOR, exp, pdl_launch_dependents, pdl_wait, prefetch_l2
from wavecrest.ops.common.triton import tl, triton
from wavecrest.ops.mlstm.device import denominator, dim_offsets, half_range, layer_norm, log_forget, log_input, sigmoid

_SIZES = [
    "eps", "cap", "norm_eps", "scale", "heads", "tiles",
    "stride_qb", "stride_qh", "stride_qd", "stride_kb", "stride_kh", "stride_kd", "stride_vb", "stride_vh",
    "stride_vd", "stride_hb", "stride_hh", "stride_hd", "stride_gb", "stride_gh", "stride_gd", "stride_ib",
    "stride_ih", "stride_fb", "stride_fh", "stride_cb", "stride_ch", "stride_ck", "stride_cd", "stride_nb",
    "stride_nh", "stride_nk", "stride_mb", "stride_mh", "stride_xb", "stride_xh", "stride_xk", "stride_xd",
    "stride_yb", "stride_yh", "stride_yk", "stride_zb", "stride_zh", "stride_w",
]  # fmt: skip


@triton.jit
def _vector(ptr, offs, stride, CONTIGUOUS: tl.constexpr, COUNT: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers of q, k or v as float32, 0 beyond COUNT."""
    at = ptr + dim_offsets(offs, stride, CONTIGUOUS)
    if EVEN:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=offs < COUNT, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _strip(  # type: ignore[no-untyped-def]
    offs_k, offs_v, stride_k, stride_d, CONTIGUOUS: tl.constexpr, ALIGN: tl.constexpr
):
    """Offsets of rows and columns of a state."""
    at = ALIGN * (offs_k.to(tl.int64) * stride_k)
    return at[:, None] + dim_offsets(offs_v, stride_d, CONTIGUOUS)[None, :]


@triton.jit
def _normed(  # type: ignore[no-untyped-def]
    h, weight_ptr, gate_ptr, offs_v, mask_v, stride_w, stride_gd, norm_eps,
    GATE: tl.constexpr, CONTIGUOUS: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """σ(gate) · LayerNorm(h) · weight of a whole head [BLOCK], float32; pointers are to the head's first."""
    y = layer_norm(h[None, :], mask_v[None, :], DV, tl.cast(norm_eps, tl.float32))
    w_at = offs_v.to(tl.int64)[None, :] * stride_w
    y = y * tl.load(weight_ptr + w_at, mask=mask_v[None, :], other=0.0).to(tl.float32)
    if GATE:
        g_at = dim_offsets(offs_v, stride_gd, CONTIGUOUS)[None, :]
        y = y * sigmoid(tl.load(gate_ptr + g_at, mask=mask_v[None, :], other=0.0).to(tl.float32))
    return tl.sum(y, 0)


@triton.jit(do_not_specialize=_SIZES)
def _mlstm_step_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, i_ptr, f_ptr, c_ptr, n_ptr, m_ptr, weight_ptr, gate_ptr, h_ptr, c_new_ptr, n_new_ptr,
    m_new_ptr, scratch_ptr, arrivals_ptr, eps, cap, norm_eps, scale, heads, tiles,
    stride_qb, stride_qh, stride_qd, stride_kb, stride_kh, stride_kd, stride_vb, stride_vh, stride_vd,
    stride_hb, stride_hh, stride_hd, stride_gb, stride_gh, stride_gd, stride_ib, stride_ih, stride_fb, stride_fh,
    stride_cb, stride_ch, stride_ck, stride_cd, stride_nb, stride_nh, stride_nk, stride_mb, stride_mh,
    stride_xb, stride_xh, stride_xk, stride_xd, stride_yb, stride_yh, stride_yk, stride_zb, stride_zh, stride_w,
    CAP: tl.constexpr, EXPONENTIAL: tl.constexpr, NORMALIZE: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    IN_PLACE: tl.constexpr, COPIES: tl.constexpr, SECOND: tl.constexpr, LAST: tl.constexpr, DRAIN: tl.constexpr,
    BARRIER: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGN: tl.constexpr,
    C_CONTIGUOUS: tl.constexpr, C_ALIGN: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """BLOCK_V columns of the state c [DK, DV] of one row and head, BLOCK_K rows of it at a time, the next ones ahead.

    Strides of q, k, v, h and the gate come in units of ALIGN, those of the states c (`c_new`: x) in units of C_ALIGN,
    but for the last dimension's. Every program of a head works out n and m, the first writes them (`n_new`: y, `m_new`:
    z). IN_PLACE: c is c_new, and but with COPIES n and m are n_new and m_new. NORM: the program has all of DV, or
    gets them. LAST: the last program of a head to come to its end, as `arrivals` [B, NH] count them, has h of the
    others from scratch [B, NH, DV], writes n and m, which the others have read by then, and leaves 0 in `arrivals`.
    DRAIN: a barrier does not wait for stores, as on AMD, where it is `s_barrier` alone (gfx942, triton 3.6).

    In place no barrier is between loads and stores of c: each element is loaded by one lane, and what is stored there
    is made of what was loaded. BARRIER: there are fewer elements than lanes, so that several lanes load one. SECOND: a
    second launch of the call follows.
    """
    # the norm, or what moves n and m
    pdl_launch_dependents(PDL and SECOND)
    EVEN_K: tl.constexpr = DK % BLOCK_K == 0
    EVEN_V: tl.constexpr = DV % BLOCK_V == 0
    EVEN_D: tl.constexpr = DK == BLOCK_D
    PARTS: tl.constexpr = (DK + BLOCK_K - 1) // BLOCK_K
    tile = tl.program_id(0) % tiles
    head = ((tl.program_id(0) // tiles) % heads).to(tl.int64)
    row = (tl.program_id(0) // tiles // heads).to(tl.int64)
    eps = tl.cast(eps, tl.float32)
    cap = tl.cast(cap, tl.float32)
    scale = tl.cast(scale, tl.float32)
    if IN_PLACE:
        c_ptr = c_new_ptr
        if not COPIES:
            n_ptr = n_new_ptr
            m_ptr = m_new_ptr
    offs_d = tl.arange(0, BLOCK_D)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < DV
    q_ptr += ALIGN * (row * stride_qb + head * stride_qh)
    k_ptr += ALIGN * (row * stride_kb + head * stride_kh)
    v_ptr += ALIGN * (row * stride_vb + head * stride_vh)
    h_ptr += ALIGN * (row * stride_hb + head * stride_hh)
    c_ptr += C_ALIGN * (row * stride_cb + head * stride_ch)
    c_new_ptr += C_ALIGN * (row * stride_xb + head * stride_xh)
    if EARLY:
        each: tl.constexpr = SECTOR // (c_ptr.dtype.element_ty.primitive_bitwidth // 8)
        offs_s = tile * BLOCK_V + tl.arange(0, BLOCK_V // each if each <= BLOCK_V else 1) * each
        for part in tl.static_range(PARTS if EARLY > PARTS else EARLY - 1):
            here = part * BLOCK_K + offs_k
            at = _strip(here, offs_s, stride_ck, stride_cd, C_CONTIGUOUS, C_ALIGN)
            prefetch_l2(c_ptr + at, (here < DK)[:, None] & (offs_s < DV)[None, :])
        pdl_wait(True)
    # all loads first: what gates and sums need has come when the state has
    i = tl.load(i_ptr + row * stride_ib + head * stride_ih)
    f = tl.load(f_ptr + row * stride_fb + head * stride_fh)
    m = tl.cast(0.0, tl.float32)
    if EXPONENTIAL:
        m = tl.load(m_ptr + row * stride_mb + head * stride_mh)
    v = _vector(v_ptr, offs_v, stride_vd, CONTIGUOUS, DV, EVEN_V)
    k = _vector(k_ptr, offs_k, stride_kd, CONTIGUOUS, DK, EVEN_K)
    q = _vector(q_ptr, offs_k, stride_qd, CONTIGUOUS, DK, EVEN_K)
    c_at = c_ptr + _strip(offs_k, offs_v, stride_ck, stride_cd, C_CONTIGUOUS, C_ALIGN)
    if EVEN_K and EVEN_V:
        c = tl.load(c_at)
    else:
        c = tl.load(c_at, mask=(offs_k < DK)[:, None] & mask_v[None, :], other=0.0)
    n_at = n_ptr + row * stride_nb + head * stride_nh + offs_d.to(tl.int64) * stride_nk
    n = tl.load(n_at, mask=offs_d < DK, other=0.0)
    k_all = _vector(k_ptr, offs_d, stride_kd, CONTIGUOUS, DK, EVEN_D)
    q_all = _vector(q_ptr, offs_d, stride_qd, CONTIGUOUS, DK, EVEN_D)
    i = log_input(i, cap, CAP, EXPONENTIAL)
    lf = log_forget(f, cap, CAP)
    if EXPONENTIAL:
        m_new = tl.maximum(lf + m, i)
        forget = exp(lf + m - m_new)
        take = exp(i - m_new)
        m = m_new
    else:
        forget = exp(lf)
        take = exp(i)
    total = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    for part in tl.static_range(PARTS):
        here = part * BLOCK_K + offs_k
        if part + 1 < PARTS:
            ahead = here + BLOCK_K
            next_k = _vector(k_ptr, ahead, stride_kd, CONTIGUOUS, DK, EVEN_K)
            next_q = _vector(q_ptr, ahead, stride_qd, CONTIGUOUS, DK, EVEN_K)
            next_at = c_ptr + _strip(ahead, offs_v, stride_ck, stride_cd, C_CONTIGUOUS, C_ALIGN)
            if EVEN_K and EVEN_V:
                next_c = tl.load(next_at)
            else:
                next_c = tl.load(next_at, mask=(ahead < DK)[:, None] & mask_v[None, :], other=0.0)
        c = forget * c.to(tl.float32) + (take * k)[:, None] * v[None, :]
        total += (q * scale)[:, None] * c
        c = half_range(c, c_new_ptr.dtype.element_ty).to(c_new_ptr.dtype.element_ty)
        x_at = c_new_ptr + _strip(here, offs_v, stride_xk, stride_xd, C_CONTIGUOUS, C_ALIGN)
        if BARRIER:
            tl.debug_barrier()
        if EVEN_K and EVEN_V:
            tl.store(x_at, c)
        else:
            tl.store(x_at, c, mask=(here < DK)[:, None] & mask_v[None, :])
        if part + 1 < PARTS:
            c = next_c
            k = next_k
            q = next_q
    pdl_launch_dependents(PDL and not SECOND)
    h = tl.sum(total, 0)
    n = forget * n + take * k_all
    if NORMALIZE:
        # + 0: as in the kernel of sequences
        h = h / denominator(tl.sum(q_all * scale * n + 0.0, 0), m, eps, EXPONENTIAL)
    slot = row * heads + head
    weight_ptr += head * DV * stride_w
    gate_ptr += ALIGN * (row * stride_gb + head * stride_gh)
    n_new_ptr += row * stride_yb + head * stride_yh
    m_new_ptr += row * stride_zb + head * stride_zh
    if LAST:
        if NORM and DRAIN:
            # acquire: each wave goes on when what it wrote has arrived
            words = scratch_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + slot * DV + offs_v
            tl.atomic_xchg(words, h.to(tl.int32, bitcast=True), mask=mask_v, sem="acquire")
        elif NORM:
            tl.store(scratch_ptr + slot * DV + offs_v, h, mask=mask_v)
        else:
            tl.store(h_ptr + dim_offsets(offs_v, stride_hd, CONTIGUOUS), h.to(h_ptr.dtype.element_ty), mask=mask_v)
        # what every lane has stored comes before what one of them then says
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + slot, 1, sem="acq_rel") == tiles - 1:
            tl.store(arrivals_ptr + slot, 0)
            if NORM:
                offs_h = tl.arange(0, BLOCK_H)
                mask_h = offs_h < DV
                whole = tl.load(scratch_ptr + slot * DV + offs_h, mask=mask_h, other=0.0)
                whole = _normed(
                    whole, weight_ptr, gate_ptr, offs_h, mask_h, stride_w, stride_gd, norm_eps, GATE, CONTIGUOUS, DV
                )
                tl.store(
                    h_ptr + dim_offsets(offs_h, stride_hd, CONTIGUOUS), whole.to(h_ptr.dtype.element_ty), mask=mask_h
                )
            tl.store(n_new_ptr + offs_d.to(tl.int64) * stride_yk, n, mask=offs_d < DK)
            if EXPONENTIAL:
                tl.store(m_new_ptr, m)
    else:
        if NORM:
            h = _normed(h, weight_ptr, gate_ptr, offs_v, mask_v, stride_w, stride_gd, norm_eps, GATE, CONTIGUOUS, DV)
        tl.store(h_ptr + dim_offsets(offs_v, stride_hd, CONTIGUOUS), h.to(h_ptr.dtype.element_ty), mask=mask_v)
        if tile == 0:
            if IN_PLACE and not COPIES:
                # several lanes have read the same of n and m
                tl.debug_barrier()
            tl.store(n_new_ptr + offs_d.to(tl.int64) * stride_yk, n, mask=offs_d < DK)
            if EXPONENTIAL:
                tl.store(m_new_ptr, m)
