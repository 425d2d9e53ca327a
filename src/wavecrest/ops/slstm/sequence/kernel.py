"""The sLSTM over sequences: all tokens in one launch, recurrent weights and states in registers."""

from __future__ import annotations

from wavecrest.ops.common.device import column_mask
from wavecrest.ops.common.triton import tl, triton
from wavecrest.ops.mlstm.device import dim_offsets, sigmoid
from wavecrest.ops.slstm.device import gate_input, tanh, weight_tile, weights

_SIZES = [
    "zero", "batch", "tokens", "heads", "stride_xb", "stride_xs", "stride_xg", "stride_xh", "stride_xd", "stride_rg",
    "stride_rh", "stride_rk", "stride_rn", "stride_bg", "stride_bh", "stride_bd", "stride_hb", "stride_hh", "stride_hd",
    "stride_cb", "stride_ch", "stride_cd", "stride_nb", "stride_nh", "stride_nd", "stride_mb", "stride_mh", "stride_md",
    "stride_starts", "stride_lens", "stride_zb", "stride_zs",
]  # fmt: skip


@triton.jit
def _state(ptr, at, offs_d, stride, mask):  # type: ignore[no-untyped-def]
    """A first state of a block of rows and one head."""
    return tl.load(ptr + at[:, None] + dim_offsets(offs_d, stride, False)[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _bias(ptr, gate, offs_d, stride_g, stride_d, mask_d, BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bias of a gate as a row, 0 without one."""
    if BIAS:
        at = gate * stride_g + dim_offsets(offs_d, stride_d, False)[None, :]
        found = tl.load(ptr + at, mask=mask_d[None, :], other=0.0).to(tl.float32)
    else:
        found = 0.0
    return found


@triton.jit
def _added(  # type: ignore[no-untyped-def]
    a, h, r_ptr, r, gate, offs_k, offs_d, stride_g, stride_k, stride_n, CONTIGUOUS: tl.constexpr, ALIGN: tl.constexpr,
    UNITS: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """a + h r of a gate, for r in registers (PARTS 1), or read from r_ptr BLOCK_K rows at a time."""
    if PARTS == 1:
        a = tl.dot(h.to(r.dtype), r, a, input_precision=PRECISION, out_dtype=tl.float32)
    else:
        parts = tl.reshape(h, [h.shape[0], PARTS, BLOCK_K])
        index = tl.arange(0, PARTS)[None, :, None]
        for part in tl.range(0, PARTS, num_stages=STAGES):
            # one part and zeros: no product of a matrix unit meets the other parts, which may be NaN
            taken = tl.sum(tl.where(index == part, parts, 0.0), 1).to(r_ptr.dtype.element_ty)
            tile = weight_tile(
                r_ptr, gate, part * BLOCK_K, offs_k, offs_d, stride_g, stride_k, stride_n, CONTIGUOUS, ALIGN, UNITS, D,
                EVEN,
            )  # fmt: skip
            a = tl.dot(taken, tile, a, input_precision=PRECISION, out_dtype=tl.float32)
    return a


@triton.jit(do_not_specialize=_SIZES)
def _slstm_sequence_kernel(  # type: ignore[no-untyped-def]
    x_ptr, r_ptr, bias_ptr, h_ptr, c_ptr, n_ptr, m_ptr, starts_ptr, lens_ptr, resets_ptr, y_ptr, h_new_ptr, c_new_ptr,
    n_new_ptr, m_new_ptr, zero, batch, tokens, heads,
    stride_xb, stride_xs, stride_xg, stride_xh, stride_xd, stride_rg, stride_rh, stride_rk, stride_rn,
    stride_bg, stride_bh, stride_bd, stride_hb, stride_hh, stride_hd, stride_cb, stride_ch, stride_cd,
    stride_nb, stride_nh, stride_nd, stride_mb, stride_mh, stride_md, stride_starts, stride_lens, stride_zb, stride_zs,
    PADDED: tl.constexpr, STARTS: tl.constexpr, LENS: tl.constexpr, RESETS: tl.constexpr, EXPONENTIAL: tl.constexpr,
    BIAS: tl.constexpr, INITIAL: tl.constexpr, LAST: tl.constexpr, CONTIGUOUS: tl.constexpr, ALIGN: tl.constexpr,
    UNITS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_B rows of one head from their first token to the last.

    Strides of x and r come in units of ALIGN, but for the last dimension's; y and new states are contiguous. The
    weights [4, D, D] of the head stay in registers where BLOCK_K = BLOCK_D; else each token reads them again, BLOCK_K
    rows at a time, from the cache that the first one brought them to, and its inputs and bias when a gate's turn comes.
    `zero`: 0, unknown to the compiler, which would take those loads out of the loop, to registers that there are not.
    """
    PARTS: tl.constexpr = BLOCK_D // BLOCK_K
    EVEN: tl.constexpr = D == BLOCK_D
    head = (tl.program_id(0) % heads).to(tl.int64)
    offs_b = (tl.program_id(0) // heads) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask_b = offs_b < batch
    rows = offs_b.to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    offs_k = tl.arange(0, BLOCK_K)
    mask_d = column_mask(offs_d, D, BLOCK_D, EVEN)
    mask = mask_b[:, None] & mask_d[None, :]
    first = tl.cast(0, tl.int32)
    last = tl.cast(tokens, tl.int32)
    if PADDED:
        begin = tl.zeros([BLOCK_B], tl.int32)
        end = tl.zeros([BLOCK_B], tl.int32) + tokens
        if STARTS:
            begin = tl.load(starts_ptr + rows * stride_starts, mask=mask_b, other=0)
            begin = tl.minimum(tl.maximum(begin, 0), tokens)
        if LENS:
            length = tl.load(lens_ptr + rows * stride_lens, mask=mask_b, other=0)
            # against what is left of the row: the sum may not be a number of 32 bits
            end = begin + tl.minimum(tl.maximum(length, 0), tokens - begin)
        first = tl.min(tl.where(mask_b, begin, tokens), 0)
        last = tl.max(tl.where(mask_b, end, 0), 0)
    h = tl.zeros([BLOCK_B, BLOCK_D], tl.float32)
    c = tl.zeros([BLOCK_B, BLOCK_D], tl.float32)
    n = tl.zeros([BLOCK_B, BLOCK_D], tl.float32)
    m = tl.zeros([BLOCK_B, BLOCK_D], tl.float32)
    if INITIAL:
        h = _state(h_ptr, rows * stride_hb + head * stride_hh, offs_d, stride_hd, mask)
        c = _state(c_ptr, rows * stride_cb + head * stride_ch, offs_d, stride_cd, mask)
        n = _state(n_ptr, rows * stride_nb + head * stride_nh, offs_d, stride_nd, mask)
        m = _state(m_ptr, rows * stride_mb + head * stride_mh, offs_d, stride_md, mask)
    bias_ptr += head * stride_bh
    r_ptr += ALIGN * (head * stride_rh)
    r_i = r_ptr
    r_f = r_ptr
    r_z = r_ptr
    r_o = r_ptr
    if PARTS == 1:
        r_i = weight_tile(
            r_ptr, 0, 0, offs_d, offs_d, stride_rg, stride_rk, stride_rn, CONTIGUOUS, ALIGN, UNITS, D, EVEN
        )
        r_f = weight_tile(
            r_ptr, 1, 0, offs_d, offs_d, stride_rg, stride_rk, stride_rn, CONTIGUOUS, ALIGN, UNITS, D, EVEN
        )
        r_z = weight_tile(
            r_ptr, 2, 0, offs_d, offs_d, stride_rg, stride_rk, stride_rn, CONTIGUOUS, ALIGN, UNITS, D, EVEN
        )
        r_o = weight_tile(
            r_ptr, 3, 0, offs_d, offs_d, stride_rg, stride_rk, stride_rn, CONTIGUOUS, ALIGN, UNITS, D, EVEN
        )
        bias_i = _bias(bias_ptr, 0, offs_d, stride_bg, stride_bd, mask_d, BIAS)
        bias_f = _bias(bias_ptr, 1, offs_d, stride_bg, stride_bd, mask_d, BIAS)
        bias_z = _bias(bias_ptr, 2, offs_d, stride_bg, stride_bd, mask_d, BIAS)
        bias_o = _bias(bias_ptr, 3, offs_d, stride_bg, stride_bd, mask_d, BIAS)
    columns = dim_offsets(offs_d, stride_xd, CONTIGUOUS)[None, :]
    x_at = x_ptr + (ALIGN * (rows * stride_xb + head * stride_xh))[:, None] + columns
    gate_x = ALIGN * tl.cast(stride_xg, tl.int64)
    y_at = y_ptr + (rows * tokens * heads * D + head * D)[:, None] + offs_d[None, :]
    if PARTS == 1:
        # a token's inputs are under way while the one before it is worked out
        some = mask & (first < last)
        x_now = x_at + ALIGN * tl.cast(first, tl.int64) * stride_xs
        x_i = tl.load(x_now, mask=some, other=0.0)
        x_f = tl.load(x_now + gate_x, mask=some, other=0.0)
        x_z = tl.load(x_now + 2 * gate_x, mask=some, other=0.0)
        x_o = tl.load(x_now + 3 * gate_x, mask=some, other=0.0)
    for token in range(first, last):
        if PARTS == 1:
            i = gate_input(x_i) + bias_i
            f = gate_input(x_f) + bias_f
            z = x_z.to(tl.float32) + bias_z
            o = x_o.to(tl.float32) + bias_o
            some = mask & (token + 1 < last)
            x_now = x_at + ALIGN * tl.cast(token + 1, tl.int64) * stride_xs
            x_i = tl.load(x_now, mask=some, other=0.0)
            x_f = tl.load(x_now + gate_x, mask=some, other=0.0)
            x_z = tl.load(x_now + 2 * gate_x, mask=some, other=0.0)
            x_o = tl.load(x_now + 3 * gate_x, mask=some, other=0.0)
        h_old = h
        c_old = c
        n_old = n
        m_old = m
        if RESETS:
            # chosen, not multiplied: what came before may be NaN
            at = rows * stride_zb + tl.cast(token, tl.int64) * stride_zs
            fresh = tl.load(resets_ptr + at, mask=mask_b, other=0).to(tl.int1)[:, None]
            h = tl.where(fresh, 0.0, h)
            c = tl.where(fresh, 0.0, c)
            n = tl.where(fresh, 0.0, n)
            m = tl.where(fresh, 0.0, m)
        # in steps of 16, so that accesses stay wide
        again = r_ptr + (token & zero) * 16
        bias_again = bias_ptr + (token & zero) * 16
        if PARTS > 1:
            x_now = x_at + ALIGN * tl.cast(token, tl.int64) * stride_xs
            i = gate_input(tl.load(x_now, mask=mask, other=0.0))
            i += _bias(bias_again, 0, offs_d, stride_bg, stride_bd, mask_d, BIAS)
        i = _added(
            i, h, again, r_i, 0, offs_k, offs_d, stride_rg, stride_rk, stride_rn, CONTIGUOUS, ALIGN, UNITS, D, EVEN,
            PRECISION, PARTS, BLOCK_K, STAGES,
        )  # fmt: skip
        if PARTS > 1:
            f = gate_input(tl.load(x_now + gate_x, mask=mask, other=0.0))
            f += _bias(bias_again, 1, offs_d, stride_bg, stride_bd, mask_d, BIAS)
        f = _added(
            f, h, again, r_f, 1, offs_k, offs_d, stride_rg, stride_rk, stride_rn, CONTIGUOUS, ALIGN, UNITS, D, EVEN,
            PRECISION, PARTS, BLOCK_K, STAGES,
        )  # fmt: skip
        forget, take, m = weights(i, f, n, m, EXPONENTIAL)
        if PARTS > 1:
            z = tl.load(x_now + 2 * gate_x, mask=mask, other=0.0).to(tl.float32)
            z += _bias(bias_again, 2, offs_d, stride_bg, stride_bd, mask_d, BIAS)
        z = _added(
            z, h, again, r_z, 2, offs_k, offs_d, stride_rg, stride_rk, stride_rn, CONTIGUOUS, ALIGN, UNITS, D, EVEN,
            PRECISION, PARTS, BLOCK_K, STAGES,
        )  # fmt: skip
        # as `updated`, but for the order, as z and o are not needed at once
        c = tl.fma(forget, c, take * tanh(z))
        n = tl.fma(forget, n, take)
        if PARTS > 1:
            o = tl.load(x_now + 3 * gate_x, mask=mask, other=0.0).to(tl.float32)
            o += _bias(bias_again, 3, offs_d, stride_bg, stride_bd, mask_d, BIAS)
        o = _added(
            o, h, again, r_o, 3, offs_k, offs_d, stride_rg, stride_rk, stride_rn, CONTIGUOUS, ALIGN, UNITS, D, EVEN,
            PRECISION, PARTS, BLOCK_K, STAGES,
        )  # fmt: skip
        h = sigmoid(o) * (c / n)
        wanted = mask
        if PADDED:
            inside = ((token >= begin) & (token < end))[:, None]
            wanted = mask & inside
            h = tl.where(inside, h, h_old)
            c = tl.where(inside, c, c_old)
            n = tl.where(inside, n, n_old)
            m = tl.where(inside, m, m_old)
        y = h.to(y_ptr.dtype.element_ty)
        tl.store(y_at + tl.cast(token, tl.int64) * (heads * D), y, mask=wanted)
    if LAST:
        at = (rows * heads * D + head * D)[:, None] + offs_d[None, :]
        tl.store(h_new_ptr + at, h, mask=mask)
        tl.store(c_new_ptr + at, c, mask=mask)
        tl.store(n_new_ptr + at, n, mask=mask)
        tl.store(m_new_ptr + at, m, mask=mask)
