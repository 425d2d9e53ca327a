"""The attention kernel for gfx950: k and v go straight to LDS, and from there to matrix units without conflicts.

Gluon, as Triton's own compiler (triton 3.6) copies k and v through registers, and lays them out in LDS so that half of
its cycles are bank conflicts. A step has one barrier: behind it the tiles of this step are in LDS for all waves, and
those of the step before have been read by all, so that the copies of the next step take their place.
"""

from __future__ import annotations

from wavecrest.ops._flash_attention.kernel import LN_2, place_of
from wavecrest.ops.common.device import LOG2_E
from wavecrest.ops.common.triton import gl, gluon, laid_out

# elements of 16 bytes, which a lane copies at a time and the units of strides
CHUNK = gl.constexpr(8)
# bytes of LDS without two in one bank
BANKS = gl.constexpr(256)

# values that do not make a kernel anew when they change
SIZES = [
    "scale", "seqlen_q", "seqlen_k", "heads", "group", "tiles", "right", "stride_qb", "stride_qh", "stride_qs",
    "stride_kb", "stride_kh", "stride_ks", "stride_vb", "stride_vh", "stride_vs", "stride_ob", "stride_oh", "stride_os",
    "stride_lb", "stride_lh", "stride_sink", "stride_cq", "stride_ck", "section", "total",
]  # fmt: skip


@gluon.jit
def _copy(tile, base, stride, start, offs, lines, last, MASKED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Begin to copy the keys or values from `start` on to LDS; with MASKED zeros from `last` on."""
    at = base + start.to(gl.int64) * stride
    if MASKED:
        gl.amd.cdna4.async_copy.buffer_load_to_shared(tile, at, offs, mask=lines < last - start)
    else:
        gl.amd.cdna4.async_copy.buffer_load_to_shared(tile, at, offs)


@gluon.jit
def _step(  # type: ignore[no-untyped-def]
    acc, l_i, m_i, q, start, now, base, strides, offs, lines, keys, values, last, scale, upper,
    MASKED: gl.constexpr, NEXT_MASKED: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr, SUMS: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Attention to the tile of keys from `start` on, at `now` in LDS; the next tile is copied meanwhile.

    MASKED: a row i sees keys up to upper[i] alone. NEXT_MASKED: the next tile may have keys from `last` on.
    """
    K: gl.constexpr = gl.DotOperandLayout(1, SUMS, CHUNK)
    # weights as scores lie: in fours of keys, which no lane exchanges
    P: gl.constexpr = gl.DotOperandLayout(0, SUMS, 4)
    V: gl.constexpr = gl.DotOperandLayout(1, SUMS, 4)
    copied = start + BLOCK_N
    gl.amd.cdna4.async_copy.wait_group(0)
    k_base, v_base = base
    k_offs, v_offs = offs
    k_stride, v_stride = strides
    _copy(keys.index(1 - now), k_base, k_stride, copied, k_offs, lines, last, NEXT_MASKED)
    _copy(values.index(1 - now), v_base, v_stride, copied, v_offs, lines, last, NEXT_MASKED)
    gl.amd.cdna4.async_copy.commit_group()
    k_tile = laid_out(keys.index(now), BLOCK_N, keys.shape[2], KEYS)
    k = gl.amd.cdna4.async_copy.load_shared_relaxed(k_tile.permute((1, 0)), K)
    s = gl.amd.cdna3.mfma(q, k, gl.zeros([q.shape[0], BLOCK_N], gl.float32, SUMS))
    if MASKED:
        # LLVM schedules no instruction across a change of EXEC, which is as it was: else it reads so early that
        # registers spill
        gl.inline_asm_elementwise("s_mov_b64 exec, -1", "={exec},s", [last], gl.int64, is_pure=False, pack=1)
        cols = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SUMS))
        s = gl.where(cols[None, :] <= upper[:, None], s, float("-inf"))
    # the scale is above 0: it is multiplied in with the subtraction
    m_new = gl.maximum(m_i, gl.max(s, 1) * scale)
    largest = m_new
    if MASKED:
        # a row that has seen nothing yet: −inf − −inf would be NaN
        largest = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * scale - largest[:, None])
    alpha = gl.exp2(m_i - largest)
    l_i = l_i * alpha + gl.sum(p, 1)
    acc = acc * alpha[:, None]
    v_tile = laid_out(values.index(now), BLOCK_N, values.shape[2], VALUES)
    v = gl.amd.cdna4.async_copy.load_shared_relaxed(v_tile, V)
    acc = gl.amd.cdna3.mfma(gl.convert_layout(p.to(v.dtype), P), v, acc)
    return acc, l_i, m_new


@gluon.jit(do_not_specialize=SIZES)
def _cdna_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, o_ptr, lse_ptr,
    scale, seqlen_q, seqlen_k, heads, group, tiles, right, stride_qb, stride_qh, stride_qs, stride_kb, stride_kh,
    stride_ks, stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_os, stride_lb, stride_lh, stride_sink,
    stride_cq, stride_ck, section, total,
    PACKED: gl.constexpr, RIGHT: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr, XCDS: gl.constexpr,
    SECTIONS: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """BLOCK_M queries of one head of one sequence, 32 a wave. Strides of q, k, v and o come in units of CHUNK."""
    SUMS: gl.constexpr = gl.amd.AMDMFMALayout(4, [32, 32, 16], True, [num_warps, 1])
    ROW: gl.constexpr = gl.SliceLayout(1, SUMS)
    Q: gl.constexpr = gl.DotOperandLayout(0, SUMS, CHUNK)
    CHUNKS: gl.constexpr = D // CHUNK
    # 64 lanes copy 1,024 bytes that are side by side in LDS
    COPY: gl.constexpr = gl.BlockedLayout([1, CHUNK], [64 // CHUNKS, CHUNKS], [num_warps, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PER: gl.constexpr = BANKS // (2 * D)
    # lanes read a chunk each of 16 rows at a time, or 64 bytes of each of four rows
    KEYS: gl.constexpr = gl.SwizzledSharedLayout(CHUNK, PER, CHUNKS, [1, 0])
    VALUES: gl.constexpr = gl.SwizzledSharedLayout(4 * CHUNK, PER, 4 // PER, [1, 0])
    tile_m, place = place_of(gl.program_id(0), gl.num_programs(0), tiles, section, total, XCDS, RIGHT, SECTIONS)
    head = place % heads
    sequence = (place // heads).to(gl.int64)
    head = head.to(gl.int64)
    kv_head = head // group
    start_m = tile_m * BLOCK_M
    if PACKED:
        q_start = gl.load(cu_q_ptr + sequence * stride_cq)
        k_start = gl.load(cu_k_ptr + sequence * stride_ck)
        seqlen_q = gl.load(cu_q_ptr + (sequence + 1) * stride_cq) - q_start
        seqlen_k = gl.load(cu_k_ptr + (sequence + 1) * stride_ck) - k_start
        if start_m >= seqlen_q:
            return
    stride_qs *= CHUNK
    stride_ks *= CHUNK
    stride_vs *= CHUNK
    stride_os *= CHUNK
    q_ptr += (sequence * stride_qb + head * stride_qh) * CHUNK
    k_ptr += (sequence * stride_kb + kv_head * stride_kh) * CHUNK
    v_ptr += (sequence * stride_vb + kv_head * stride_vh) * CHUNK
    o_ptr += (sequence * stride_ob + head * stride_oh) * CHUNK
    lse_ptr += sequence * stride_lb + head * stride_lh
    q_at = start_m.to(gl.int64)
    if PACKED:
        q_at += q_start
        k_ptr += k_start.to(gl.int64) * stride_ks
        v_ptr += k_start.to(gl.int64) * stride_vs
    q_ptr += q_at * stride_qs
    o_ptr += q_at * stride_os
    lse_ptr += q_at
    # keys that any row of this tile sees end at `last`, those that every row sees at `rest`
    top_row = start_m + seqlen_k - seqlen_q
    last = seqlen_k
    rest = seqlen_k
    offs_m = gl.arange(0, BLOCK_M, layout=ROW)
    upper = gl.zeros([BLOCK_M], gl.int32, ROW) + (seqlen_k - 1)
    if RIGHT:
        bottom_row = gl.minimum(start_m + BLOCK_M, seqlen_q) - 1 + seqlen_k - seqlen_q
        last = gl.minimum(gl.maximum(bottom_row + right + 1, 0), seqlen_k)
        rest = gl.minimum(gl.maximum(top_row + right + 1, 0), seqlen_k)
        upper = gl.minimum(top_row + offs_m + right, upper)
    end = gl.cdiv(last, BLOCK_N) * BLOCK_N

    kv_type: gl.constexpr = k_ptr.dtype.element_ty
    keys = gl.allocate_shared_memory(kv_type, [2, BLOCK_N, D], FLAT)
    values = gl.allocate_shared_memory(kv_type, [2, BLOCK_N, D], FLAT)
    lines = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, COPY))[:, None]
    places = gl.arange(0, D, layout=gl.SliceLayout(0, COPY))[None, :]
    # the chunk of a row that a lane copies to its place
    key_columns = ((places // CHUNK) ^ (lines // PER % CHUNKS)) * CHUNK + places % CHUNK
    value_columns = ((places // (4 * CHUNK)) ^ (lines // PER % (4 // PER))) * (4 * CHUNK) + places % (4 * CHUNK)
    offs = (lines * stride_ks + key_columns, lines * stride_vs + value_columns)
    base = (k_ptr, v_ptr)
    strides = (stride_ks, stride_vs)
    zero = start_m - start_m
    _copy(keys.index(0), k_ptr, stride_ks, zero, offs[0], lines, last, True)
    _copy(values.index(0), v_ptr, stride_vs, zero, offs[1], lines, last, True)
    gl.amd.cdna4.async_copy.commit_group()

    rows_q = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, Q))
    cols_q = gl.arange(0, D, layout=gl.SliceLayout(0, Q))
    q_tile = rows_q[:, None] * stride_qs + cols_q[None, :]
    q = gl.amd.cdna3.buffer_load(q_ptr, q_tile, mask=(rows_q < seqlen_q - start_m)[:, None])
    scale = scale.to(gl.float32) * LOG2_E
    m_i = gl.full([BLOCK_M], float("-inf"), gl.float32, ROW)
    l_i = gl.zeros([BLOCK_M], gl.float32, ROW)
    if SINKS:
        # a key without a value, seen first
        sink = gl.load(sinks_ptr + head * stride_sink).to(gl.float32) * LOG2_E
        m_i = gl.zeros([BLOCK_M], gl.float32, ROW) + sink
        l_i = gl.where(m_i == float("-inf"), 0.0, 1.0)
    acc = gl.zeros([BLOCK_M, D], gl.float32, SUMS)
    # two steps, as then each has its place in LDS; the tile behind them may end early
    pairs = rest // (2 * BLOCK_N) * (2 * BLOCK_N)
    for at in range(0, pairs, 2 * BLOCK_N):
        for i in gl.static_range(2):
            acc, l_i, m_i = _step(
                acc, l_i, m_i, q, at + i * BLOCK_N, i, base, strides, offs, lines, keys, values, last, scale, upper,
                False, i == 1, KEYS, VALUES, SUMS, BLOCK_N,
            )  # fmt: skip
    for at in range(pairs, end, BLOCK_N):
        acc, l_i, m_i = _step(
            acc, l_i, m_i, q, at, at // BLOCK_N % 2, base, strides, offs, lines, keys, values, last, scale, upper,
            True, True, KEYS, VALUES, SUMS, BLOCK_N,
        )  # fmt: skip
    gl.amd.cdna4.async_copy.wait_group(0)

    mask_m = offs_m < seqlen_q - start_m
    if LSE:
        # −inf for a row that has seen nothing
        gl.store(lse_ptr + offs_m, (m_i + gl.log2(l_i)) * LN_2, mask=mask_m)
    acc = acc * (1.0 / gl.where(l_i == 0.0, 1.0, l_i))[:, None]
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, SUMS))
    o_tile = offs_m[:, None] * stride_os + cols[None, :]
    gl.store(o_ptr + o_tile, acc.to(o_ptr.dtype.element_ty), mask=mask_m[:, None])
