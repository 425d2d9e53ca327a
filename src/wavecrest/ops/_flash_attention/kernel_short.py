"""The attention kernel for short sequences: one tile holds all keys, and a program takes its head in many sequences.

Where a sequence is a window of an image or a sentence, a program of the portable kernel ends before its loads are
hidden. Here those of the next sequence are under way while this one is multiplied, and a bias that all sequences share,
its mask and all offsets are made once. A softmax over one tile needs no correction.
"""

from __future__ import annotations

from wavecrest.ops.common.device import LOG2_E, remap_xcd
from wavecrest.ops.common.triton import tl, triton
from wavecrest.ops.common.widen import rounded

# elements in 16 bytes, the unit of strides
CHUNK = tl.constexpr(8)
# values of BIAS, which is 0 without one: all sequences share a head's, or each has its own
SHARED, OF_EACH = tl.constexpr(1), tl.constexpr(2)

# values that do not make the kernel anew when they change
SIZES = [
    "scale", "seqlen_q", "seqlen_k", "d_units", "dv_units", "batch", "heads", "group", "tiles", "parts", "right",
    "stride_qb", "stride_qh", "stride_qs", "stride_kb", "stride_kh", "stride_ks", "stride_vb", "stride_vh", "stride_vs",
    "stride_ob", "stride_oh", "stride_os", "stride_bb", "stride_bh", "stride_bm", "stride_bn",
]  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def _short_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, bias_ptr, o_ptr,
    scale, seqlen_q, seqlen_k, d_units, dv_units, batch, heads, group, tiles, parts, right,
    stride_qb, stride_qh, stride_qs, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os, stride_bb, stride_bh, stride_bm, stride_bn,
    RIGHT: tl.constexpr, BIAS: tl.constexpr, BIAS_ROWS: tl.constexpr, EVEN_N: tl.constexpr, EVEN_D: tl.constexpr,
    EVEN_DV: tl.constexpr, TIES_UP: tl.constexpr, XCDS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries of one head, of every sequence whose number is the program's part, counted in `parts`.

    Strides of q, k, v and o, and head_dim, come in units of CHUNK. `right`: of the window, where there is one (RIGHT).
    BIAS_ROWS: queries have a bias each, and not one in common. EVEN_N: there are BLOCK_N keys.
    """
    # tiles of a head and heads of a sequence side by side, as in memory
    program = remap_xcd(tl.program_id(0), tl.num_programs(0), XCDS)
    tile = program % tiles
    place = program // tiles
    head = (place % heads).to(tl.int64)
    part = place // heads
    kv_head = head // group
    scale = tl.cast(scale, tl.float32)

    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    # what lies behind the last query or key is a copy of it, which needs no mask where it is read
    rows = tl.minimum(offs_m, seqlen_q - 1)
    keys = tl.minimum(offs_n, seqlen_k - 1)
    q_ptr += head * stride_qh * CHUNK
    k_ptr += kv_head * stride_kh * CHUNK
    v_ptr += kv_head * stride_vh * CHUNK
    o_ptr += head * stride_oh * CHUNK
    bias_ptr += head * stride_bh
    q_tile = rows[:, None] * (stride_qs * CHUNK) + offs_d[None, :]
    k_tile = keys[None, :] * (stride_ks * CHUNK) + offs_d[:, None]
    o_tile = offs_m[:, None] * (stride_os * CHUNK) + offs_dv[None, :]
    # rows and keys apart: one offset for each element would be kept in registers for all sequences
    bias_rows = bias_ptr + tl.zeros([1, 1], tl.int32)
    if BIAS_ROWS:
        bias_rows += rows[:, None] * stride_bm
    bias_keys = keys[None, :] * stride_bn
    mask_d = offs_d < d_units * CHUNK
    mask_dv = offs_dv < dv_units * CHUNK
    if EVEN_DV:
        mask_dv = tl.full([BLOCK_DV], True, tl.int1)
    stored = (offs_m < seqlen_q)[:, None] & mask_dv[None, :]

    # −inf for copies of the last key
    added = tl.where(offs_n < seqlen_k, 0.0, float("-inf"))[None, :]
    if BIAS == SHARED:
        added += tl.load(bias_rows + bias_keys).to(tl.float32)
    diagonal = seqlen_k - seqlen_q + right
    upper = tl.minimum(offs_m + diagonal, seqlen_k - 1)
    if RIGHT:
        # no values that no row of the tile sees: 0 · NaN would be NaN
        last = tl.minimum(tile * BLOCK_M + BLOCK_M, seqlen_q) - 1 + diagonal
        keys = tl.minimum(keys, tl.maximum(last, 0))
    v_tile = keys[:, None] * (stride_vs * CHUNK) + offs_dv[None, :]

    for sequence in range(part, batch, parts):
        at = tl.cast(sequence, tl.int64)
        q_at = q_ptr + at * stride_qb * CHUNK
        k_at = k_ptr + at * stride_kb * CHUNK
        v_at = v_ptr + at * stride_vb * CHUNK
        if EVEN_D:
            q = tl.load(q_at + q_tile)
            k = tl.load(k_at + k_tile)
        else:
            q = tl.load(q_at + q_tile, mask=mask_d[None, :], other=0.0)
            k = tl.load(k_at + k_tile, mask=mask_d[:, None], other=0.0)
        # log2 e comes behind the bias, which is then added as it is: a sequence has the same bits with either kind
        s = tl.dot(q, k, out_dtype=tl.float32) * scale
        if BIAS == OF_EACH:
            s += tl.load(bias_rows + at * stride_bb + bias_keys).to(tl.float32)
        if BIAS == SHARED or not EVEN_N:
            s += added
        if RIGHT:
            # not added: what a row does not see may be NaN
            s = tl.where(offs_n[None, :] <= upper[:, None], s, float("-inf"))
        m = tl.max(s, 1)
        # a row that sees nothing: −inf − −inf would be NaN
        m = tl.where(m == float("-inf"), 0.0, m)
        p = tl.exp2(s * LOG2_E - (m * LOG2_E)[:, None])
        weight = tl.sum(p, 1)
        if EVEN_DV:
            v = tl.load(v_at + v_tile)
        else:
            v = tl.load(v_at + v_tile, mask=mask_dv[None, :], other=0.0)
        acc = tl.dot(rounded(p, v.dtype, TIES_UP), v, out_dtype=tl.float32)
        acc *= (1.0 / tl.where(weight == 0.0, 1.0, weight))[:, None]
        if RIGHT:
            # a tile that sees nothing has read the first value, which may be NaN
            acc = tl.where((weight == 0.0)[:, None], 0.0, acc)
        tl.store(o_ptr + at * stride_ob * CHUNK + o_tile, acc.to(o_ptr.dtype.element_ty), mask=stored)
