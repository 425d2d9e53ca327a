"""The attention kernel for sm_90 with programs of one group of warps, several of which share a multiprocessor.

In Gluon, as `kernel_hopper.py`, which gives roles to groups of warps. With a head_dim of 64 a tile of keys takes as
long in exponentials as in products, and programs that do not wait for each other hide one beside the other better than
two groups of a program (H200, 2026-11-29: docs/ops/flash_attention.md). Inside a program the next tile's scores are
multiplied beside this one's weights and v, as there.
"""

from __future__ import annotations

from wavecrest.ops._flash_attention.kernel import LN_2
from wavecrest.ops._flash_attention.kernel_hopper import (
    LEFT_EDGE,
    RIGHT_EDGE,
    _before,
    _begin_scores,
    _begin_values,
    _ends,
    _halves,
    _marks,
    _numbers,
    _parts,
    _store,
    _times,
    _wait_for_scores,
    _wait_for_values,
    _weighed,
    _weighed_first,
)
from wavecrest.ops.common.hopper import barriers
from wavecrest.ops.common.triton import gl, gluon, hopper, load_tile, store_tile, thread_barrier

# tiles of k, and of v, that a program holds
STAGES = gl.constexpr(2)


@gluon.jit
def _expect(i, desc, bars, count):  # type: ignore[no-untyped-def]
    """Announce the tile of step i, of k or v, where there is such a step."""
    hopper.mbarrier.expect(bars.index(i % STAGES), desc.block_type.nbytes, pred=i < count)


@gluon.jit
def _load(i, desc, tiles, bars, sequence, kv_head, count, end, BLOCK_N: gl.constexpr):  # type: ignore[no-untyped-def]
    """Begin to copy the tile of step i, of k or v, where there is such a step: the last keys are those of step 0."""
    place = [sequence, kv_head, (end - 1 - i) * BLOCK_N, 0]
    load_tile(desc, place, bars.index(i % STAGES), tiles.index(i % STAGES), pred=i < count)


@gluon.jit
def _scores(  # type: ignore[no-untyped-def]
    i, q, k_tiles, k_bars, BLOCK_D: gl.constexpr, REST: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    SCORES: gl.constexpr,
):  # fmt: skip
    """Begin to multiply q with the keys of step i, when they are there."""
    hopper.mbarrier.wait(k_bars.index(i % STAGES), (i // STAGES) & 1)
    k = k_tiles.index(i % STAGES).reshape([BLOCK_N, BLOCK_D]).permute((1, 0))
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout=SCORES)
    return _begin_scores(q, k, zeros, BLOCK_D, REST)


@gluon.jit
def _values(  # type: ignore[no-untyped-def]
    i, p, acc, rest, v_tiles, v_bars, BLOCK_D: gl.constexpr, REST: gl.constexpr, BLOCK_N: gl.constexpr
):
    """Begin to multiply the weights of step i with its values, when they are there."""
    hopper.mbarrier.wait(v_bars.index(i % STAGES), (i // STAGES) & 1)
    return _begin_values(p, v_tiles.index(i % STAGES).reshape([BLOCK_N, BLOCK_D]), acc, rest, BLOCK_D, REST)


@gluon.jit
def _step(  # type: ignore[no-untyped-def]
    i, p, m_i, l_i, acc, rest, q, k_desc, v_desc, k_tiles, v_tiles, k_bars, v_bars, q_bar, sequence, kv_head, count,
    end, marks, numbers, seqlen_k, MASKED: gl.constexpr, KIND: gl.constexpr, BLOCK_D: gl.constexpr, REST: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SCORES: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Multiply step i − 1's weights with v beside the scores and softmax of step i: both of step i."""
    s = _scores(i, q, k_tiles, k_bars, BLOCK_D, REST, BLOCK_M, BLOCK_N, SCORES)
    acc, rest = _values(i - 1, p, acc, rest, v_tiles, v_bars, BLOCK_D, REST, BLOCK_N)
    s = _wait_for_scores(s, REST)
    weights, m_i, l_i, alpha = _weighed(
        s, m_i, l_i, (end - 1 - i) * BLOCK_N, marks, numbers, seqlen_k, MASKED, KIND, BLOCK_N, SCORES
    )
    p_next = gl.convert_layout(weights.to(v_tiles.dtype), WEIGHTS)
    # here, where Triton has all warps wait after they have passed these barriers; it would again before each copy
    _expect(i + STAGES, k_desc, k_bars, count)
    _expect(i + STAGES - 1, v_desc, v_bars, count)
    # q has been there for long; without a branch here ptxas puts the wait below in front of the softmax (triton 3.6)
    hopper.mbarrier.wait(q_bar.index(0), 0)
    if REST == 0:
        acc, p, p_next, l_i, alpha = hopper.warpgroup_mma_wait(0, deps=[acc, p, p_next, l_i, alpha])
    else:
        acc, rest, p, p_next, l_i, alpha = hopper.warpgroup_mma_wait(0, deps=[acc, rest, p, p_next, l_i, alpha])
    # all warps have read the tiles that the next ones take the place of
    thread_barrier()
    _load(i + STAGES, k_desc, k_tiles, k_bars, sequence, kv_head, count, end, BLOCK_N)
    _load(i + STAGES - 1, v_desc, v_tiles, v_bars, sequence, kv_head, count, end, BLOCK_N)
    acc, rest = _times(acc, rest, alpha, REST)
    return p_next, m_i, l_i, acc, rest


@gluon.jit(
    do_not_specialize=[
        "scale", "softcap", "seqlen_q", "seqlen_k", "heads", "group", "tiles", "left", "right", "stride_sink",
        "stride_slope_b", "stride_slope_h",
    ]
)  # fmt: skip
def _hopper_group_attention_kernel(  # type: ignore[no-untyped-def]
    q_desc, k_desc, v_desc, o_desc, lse_ptr, sinks_ptr, slopes_ptr,
    scale, softcap, seqlen_q, seqlen_k, heads, group, tiles, left, right, stride_sink, stride_slope_b, stride_slope_h,
    KIND: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr, HELD: gl.constexpr, BLOCK_D: gl.constexpr,
    REST: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_M queries of a head: `tiles` of them a head, with a diagonal the last queries first.

    Descriptors are over [B, H, S, D] with blocks of BLOCK_M rows (q, o) or BLOCK_N (k, v); HELD: q stays in registers;
    REST: columns behind the first half of BLOCK_D that are multiplied, or 0: all; `left`, `right`: of the window,
    where KIND has these edges.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_N, 16])
    QUERIES: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    all_head = gl.program_id(0) // tiles
    tile = gl.program_id(0) % tiles
    if KIND & RIGHT_EDGE:
        tile = tiles - 1 - tile
    sequence = all_head // heads
    head = all_head % heads
    kv_head = head // group
    start_m = tile * BLOCK_M
    begin, low, high, end = _ends(tile, seqlen_q, seqlen_k, left, right, KIND, BLOCK_M, BLOCK_N)
    count = end - begin
    q_tile = gl.allocate_shared_memory(q_desc.dtype, q_desc.block_type.shape, q_desc.layout)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    # in arrays of their own, as Triton has all warps wait between two accesses to one array
    q_bar = barriers(1, 1)
    k_bars = barriers(STAGES, 1)
    v_bars = barriers(STAGES, 1)
    hopper.fence_async_shared()
    hopper.mbarrier.expect(q_bar.index(0), q_desc.block_type.nbytes)
    for first in gl.static_range(STAGES):
        _expect(first, k_desc, k_bars, count)
        if first < STAGES - 1:
            _expect(first, v_desc, v_bars, count)
    thread_barrier()
    load_tile(q_desc, [sequence, head, start_m, 0], q_bar.index(0), q_tile)
    for first in gl.static_range(STAGES):
        _load(first, k_desc, k_tiles, k_bars, sequence, kv_head, count, end, BLOCK_N)
        if first < STAGES - 1:
            _load(first, v_desc, v_tiles, v_bars, sequence, kv_head, count, end, BLOCK_N)
    offs_m = gl.arange(0, BLOCK_M, layout=ROW)
    marks = _marks(start_m, offs_m, seqlen_q, seqlen_k, left, right)
    numbers = _numbers(slopes_ptr, sequence, head, stride_slope_b, stride_slope_h, scale, softcap, KIND)
    m_i, l_i = _before(sinks_ptr, head, stride_sink, SINKS, BLOCK_M, BLOCK_N, SCORES)
    acc, rest = _halves(BLOCK_M, BLOCK_D, REST, num_warps)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    hopper.mbarrier.wait(q_bar.index(0), 0)
    q_block = q_tile.reshape([BLOCK_M, BLOCK_D])
    if count > 0:
        q = q_block.load(QUERIES) if HELD else q_block
        s = _scores(0, q, k_tiles, k_bars, BLOCK_D, REST, BLOCK_M, BLOCK_N, SCORES)
        s = hopper.warpgroup_mma_wait(0, deps=[s])
        _expect(STAGES, k_desc, k_bars, count)
        _expect(STAGES - 1, v_desc, v_bars, count)
        thread_barrier()
        _load(STAGES, k_desc, k_tiles, k_bars, sequence, kv_head, count, end, BLOCK_N)
        _load(STAGES - 1, v_desc, v_tiles, v_bars, sequence, kv_head, count, end, BLOCK_N)
        p, m_i, l_i = _weighed_first(s, m_i, l_i, low, high, end, marks, numbers, seqlen_k, KIND, BLOCK_N, SCORES)
        p = gl.convert_layout(p.to(v_tiles.dtype), WEIGHTS)
        masked, full = _parts(begin, low, high, end, KIND)
        if KIND & RIGHT_EDGE:
            for i in range(1, masked):
                p, m_i, l_i, acc, rest = _step(
                    i, p, m_i, l_i, acc, rest, q, k_desc, v_desc, k_tiles, v_tiles, k_bars, v_bars, q_bar, sequence,
                    kv_head, count, end, marks, numbers, seqlen_k, True, KIND, BLOCK_D, REST, BLOCK_M, BLOCK_N, SCORES,
                    WEIGHTS,
                )  # fmt: skip
        for i in range(masked, full):
            p, m_i, l_i, acc, rest = _step(
                i, p, m_i, l_i, acc, rest, q, k_desc, v_desc, k_tiles, v_tiles, k_bars, v_bars, q_bar, sequence,
                kv_head, count, end, marks, numbers, seqlen_k, False, KIND, BLOCK_D, REST, BLOCK_M, BLOCK_N, SCORES,
                WEIGHTS,
            )  # fmt: skip
        if KIND & LEFT_EDGE:
            for i in range(full, count):
                p, m_i, l_i, acc, rest = _step(
                    i, p, m_i, l_i, acc, rest, q, k_desc, v_desc, k_tiles, v_tiles, k_bars, v_bars, q_bar, sequence,
                    kv_head, count, end, marks, numbers, seqlen_k, True, KIND, BLOCK_D, REST, BLOCK_M, BLOCK_N, SCORES,
                    WEIGHTS,
                )  # fmt: skip
        acc, rest = _values(count - 1, p, acc, rest, v_tiles, v_bars, BLOCK_D, REST, BLOCK_N)
        acc, rest = _wait_for_values(acc, rest, REST)
    denominator = gl.convert_layout(gl.sum(l_i, 1), ROW)
    if LSE:
        # −inf for a row that has seen nothing
        logarithm = (m_i + gl.log2(denominator)) * LN_2
        place = lse_ptr + all_head.to(gl.int64) * seqlen_q + start_m + offs_m
        gl.store(place, logarithm, mask=start_m + offs_m < seqlen_q)
    acc, rest = _times(acc, rest, 1.0 / gl.where(denominator == 0.0, 1.0, denominator), REST)
    # the result takes the place of q
    _store(q_block, acc, rest, BLOCK_D, REST)
    hopper.fence_async_shared()
    thread_barrier()
    store_tile(o_desc, [sequence, head, start_m, 0], q_tile)
    hopper.tma.store_wait(0)
