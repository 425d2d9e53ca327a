"""Attention in the latent space of MLA for sm_90: one warp group copies tiles, two multiply, half of the result each.

The accumulators of 64 rows are as wide as a latent and fill the registers of two warp groups, and both need the scores
of every tile. So each group computes the scores of every other tile and passes the softmax weights to the other group
through shared memory, in the place of the tile's rotary part, which is not needed any more. A group's GEMM with the
other group's tile runs beside its own softmax. The idea that two groups share a result and its weights in this way is
FlashMLA's (DeepSeek, 2025).
"""

from __future__ import annotations

from wavecrest.ops._mla_decode.kernel import LN_2, SIZES
from wavecrest.ops.common.device import LOG2_E
from wavecrest.ops.common.hopper import MULTIPLIES, barriers
from wavecrest.ops.common.triton import gl, gluon, hopper, laid_out, load_tile, thread_barrier

# rows of a program, columns of a latent that a group accumulates, columns of the rotary part
ROWS, HALF, ROTARY = gl.constexpr(64), gl.constexpr(256), gl.constexpr(64)
# barriers of a stage. FULL: the left half of a tile's latents is there; FULL + 1: the right half and the rotary part;
# WEIGHED: the weights of its keys. EMPTY, EMPTY + 1: one group needs its half, and the rotary part's place, no more
FULL, WEIGHED, EMPTY = gl.constexpr(0), gl.constexpr(2), gl.constexpr(3)
# the queries are there
ROWS_FULL = gl.constexpr(5)


@gluon.jit
def _copy(  # type: ignore[no-untyped-def]
    c_desc, rope_desc, table_ptr, c_tiles, rope_tiles, bars, sequence, begin, count, page_size,
    PAGED: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy a program's tiles of latents, from the last keys to the first."""
    for i in range(count):
        slot = i % STAGES
        phase = ((i // STAGES) & 1) ^ 1
        start = begin + (count - 1 - i) * KEYS
        number = sequence
        if PAGED:
            number = gl.load(table_ptr + start // page_size)
            start = start % page_size
        hopper.mbarrier.wait(bars[EMPTY].index(slot), phase)
        hopper.mbarrier.expect(bars[FULL].index(slot), c_desc.block_type.nbytes)
        load_tile(c_desc, [number, start, 0], bars[FULL].index(slot), c_tiles[0].index(slot))
        hopper.mbarrier.wait(bars[EMPTY + 1].index(slot), phase)
        hopper.mbarrier.expect(bars[FULL + 1].index(slot), c_desc.block_type.nbytes + rope_desc.block_type.nbytes)
        load_tile(c_desc, [number, start, HALF], bars[FULL + 1].index(slot), c_tiles[1].index(slot))
        load_tile(rope_desc, [number, start, 2 * HALF], bars[FULL + 1].index(slot), rope_tiles.index(slot))


@gluon.jit
def _latents(tiles, slot, KEYS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Half of a tile's latents, [keys, columns]."""
    return tiles.index(slot).reshape([KEYS, HALF])


@gluon.jit
def _weights(rope_tiles, slot, KEYS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The memory of a tile's rotary part, seen as its weights [rows, keys]."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, KEYS], rope_tiles.dtype)
    return laid_out(rope_tiles.index(slot), ROWS, KEYS, LAYOUT)


@gluon.jit
def _scores(  # type: ignore[no-untyped-def]
    q_tiles, q_rope_tile, c_tiles, rope_tiles, bars, slot, phase, KEYS: gl.constexpr, SCORES: gl.constexpr
):
    """Wait for a tile and start to multiply the queries by it."""
    s = gl.zeros([ROWS, KEYS], gl.float32, layout=SCORES)
    hopper.mbarrier.wait(bars[FULL].index(slot), phase)
    left = _latents(c_tiles[0], slot, KEYS).permute((1, 0))
    s = hopper.warpgroup_mma(q_tiles.index(0), left, s, use_acc=False, is_async=True)
    hopper.mbarrier.wait(bars[FULL + 1].index(slot), phase)
    right = _latents(c_tiles[1], slot, KEYS).permute((1, 0))
    s = hopper.warpgroup_mma(q_tiles.index(1), right, s, is_async=True)
    rope = rope_tiles.index(slot).reshape([KEYS, ROTARY]).permute((1, 0))
    return hopper.warpgroup_mma(q_rope_tile, rope, s, is_async=True)


@gluon.jit
def _weighed(  # type: ignore[no-untyped-def]
    s, start, upper, lowest, m_i, l_i, scale, KEYS: gl.constexpr, SCORES: gl.constexpr
):
    """The online softmax of a tile: weights, m_i, l_i, and the factor alpha of earlier sums, of each row."""
    s = s * scale
    if start + KEYS - 1 > lowest:
        cols = start + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
        s = gl.where(cols[None, :] <= upper[:, None], s, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(s, 1))
    # a row that has seen nothing yet: −inf − −inf would be NaN
    base = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s - base[:, None])
    alpha = gl.exp2(m_i - base)
    return p, m_new, l_i * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _pass_on(p, m_i, l_i, alpha, rope_tiles, m_tiles, l_tiles, alpha_tiles, bars, slot, KEYS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Store what the other group needs of a tile in shared memory."""
    _weights(rope_tiles, slot, KEYS).store(p)
    m_tiles.index(slot).store(m_i)
    l_tiles.index(slot).store(l_i)
    alpha_tiles.index(slot).store(alpha)
    hopper.fence_async_shared()
    hopper.mbarrier.arrive(bars[WEIGHED].index(slot), count=1)


@gluon.jit
def _zero_from(tile, last, KEYS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Set the latents of a tile's keys from `last` on to 0: 0 · NaN would be NaN."""
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    rows = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LOADED))
    latents = tile.load(LOADED)
    tile.store(gl.where((rows < last)[:, None], latents, 0.0).to(tile.dtype))


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    me: gl.constexpr, q_ptr, rope_ptr, o_ptr, lse_ptr, part_ptr, meta_ptr, q_tiles, q_rope_tile, c_tiles, rope_tiles,
    m_tiles, l_tiles, alpha_tiles, bars, sequence, split, splits, start_m, rows, seqlen_q, heads, seqlen_k, begin,
    end, count, scale, stride_qb, stride_qt, stride_qh, stride_rb, stride_rt, stride_rh,
    LSE: gl.constexpr, SPLIT: gl.constexpr, Q_ALIGN: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A group's half of the columns of the result of a program's rows, and the weights of every other tile."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS)
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    LOADED_ROPE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])

    # the queries: half of the columns each, and one group the rotary part
    at = start_m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOADED))
    wide = (at // heads).to(gl.int64) * stride_qt + (at % heads).to(gl.int64) * stride_qh
    q_at = (sequence * stride_qb + wide) * Q_ALIGN
    cols = me * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, LOADED))
    q_tiles.index(me).store(gl.load(q_ptr + q_at[:, None] + cols[None, :], mask=(at < rows)[:, None], other=0.0))
    if me == 1:
        at = start_m + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LOADED_ROPE))
        wide = (at // heads).to(gl.int64) * stride_rt + (at % heads).to(gl.int64) * stride_rh
        q_at = (sequence * stride_rb + wide) * Q_ALIGN
        cols = gl.arange(0, ROTARY, layout=gl.SliceLayout(0, LOADED_ROPE))
        q_rope_tile.store(gl.load(rope_ptr + q_at[:, None] + cols[None, :], mask=(at < rows)[:, None], other=0.0))
    hopper.fence_async_shared()
    hopper.mbarrier.arrive(bars[ROWS_FULL].index(0), count=1)
    hopper.mbarrier.wait(bars[ROWS_FULL].index(0), 0)

    upper = seqlen_k - seqlen_q + (start_m + gl.arange(0, ROWS, layout=ROW)) // heads
    # of the first row, which sees the fewest
    lowest = seqlen_k - seqlen_q + start_m // heads
    m_i = gl.full([ROWS], float("-inf"), gl.float32, layout=ROW)
    l_i = gl.full([ROWS], 0.0, gl.float32, layout=ROW)
    acc = gl.zeros([ROWS, HALF], gl.float32, layout=SUMS)
    # a constant, which decides while the kernel is compiled
    if me == 0:  # noqa: SIM102
        # the last tile, which may be ragged
        if count > 0:
            start = begin + (count - 1) * KEYS
            s = _scores(q_tiles, q_rope_tile, c_tiles, rope_tiles, bars, 0, 0, KEYS, SCORES)
            s = hopper.warpgroup_mma_wait(0, deps=[s])
            p, m_i, l_i, alpha = _weighed(s, start, upper, lowest, m_i, l_i, scale, KEYS, SCORES)
            p = p.to(rope_tiles.dtype)
            if start + KEYS > end:
                _zero_from(_latents(c_tiles[0], 0, KEYS), end - start, KEYS)
                _zero_from(_latents(c_tiles[1], 0, KEYS), end - start, KEYS)
            _pass_on(p, m_i, l_i, alpha, rope_tiles, m_tiles, l_tiles, alpha_tiles, bars, 0, KEYS)
            acc = hopper.warpgroup_mma(
                gl.convert_layout(p, WEIGHTS), _latents(c_tiles[0], 0, KEYS), acc, use_acc=False, is_async=True
            )
            acc = hopper.warpgroup_mma_wait(0, deps=[acc])
            hopper.mbarrier.arrive(bars[EMPTY].index(0), count=1)
    for i in range(2 - me, count, 2):
        # tile i is this group's, and i − 1, whose weights are there sooner, the other's
        slot = i % STAGES
        theirs = (i - 1) % STAGES
        before = ((i - 1) // STAGES) & 1
        s = _scores(q_tiles, q_rope_tile, c_tiles, rope_tiles, bars, slot, (i // STAGES) & 1, KEYS, SCORES)
        hopper.mbarrier.wait(bars[WEIGHED].index(theirs), before)
        hopper.mbarrier.wait(bars[FULL + me].index(theirs), before)
        acc = acc * alpha_tiles.index(theirs).load(OF_SUMS)[:, None]
        acc = hopper.warpgroup_mma(
            _weights(rope_tiles, theirs, KEYS), _latents(c_tiles[me], theirs, KEYS), acc, is_async=True
        )
        m_i = m_tiles.index(theirs).load(ROW)
        l_i = l_tiles.index(theirs).load(ROW)
        s = hopper.warpgroup_mma_wait(1, deps=[s])
        start = begin + (count - 1 - i) * KEYS
        p, m_i, l_i, alpha = _weighed(s, start, upper, lowest, m_i, l_i, scale, KEYS, SCORES)
        p = p.to(rope_tiles.dtype)
        _pass_on(p, m_i, l_i, alpha, rope_tiles, m_tiles, l_tiles, alpha_tiles, bars, slot, KEYS)
        own = gl.convert_layout(p, WEIGHTS)
        alpha = gl.convert_layout(alpha, OF_SUMS)
        # passed long ago; without a branch here ptxas puts the wait below in front of the softmax (triton 3.6)
        hopper.mbarrier.wait(bars[FULL + me].index(theirs), before)
        acc, own, alpha = hopper.warpgroup_mma_wait(0, deps=[acc, own, alpha])
        hopper.mbarrier.arrive(bars[EMPTY + me].index(theirs), count=1)
        acc = acc * alpha[:, None]
        acc = hopper.warpgroup_mma(own, _latents(c_tiles[me], slot, KEYS), acc, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        hopper.mbarrier.arrive(bars[EMPTY + me].index(slot), count=1)
    # the last one, where it is the other group's
    if (count > 0) & (count % 2 == me):
        theirs = (count - 1) % STAGES
        before = ((count - 1) // STAGES) & 1
        hopper.mbarrier.wait(bars[WEIGHED].index(theirs), before)
        hopper.mbarrier.wait(bars[FULL + me].index(theirs), before)
        # in the loop the compiler adds one here; racecheck takes a wait alone for that of one thread (2025.3, H200)
        thread_barrier()
        acc = acc * alpha_tiles.index(theirs).load(OF_SUMS)[:, None]
        acc = hopper.warpgroup_mma(
            _weights(rope_tiles, theirs, KEYS), _latents(c_tiles[me], theirs, KEYS), acc, is_async=True
        )
        m_i = m_tiles.index(theirs).load(ROW)
        l_i = l_tiles.index(theirs).load(ROW)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])

    below = gl.arange(0, ROWS, layout=ROW)
    of_sums = gl.arange(0, ROWS, layout=OF_SUMS)
    cols = me * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, SUMS))
    inner = of_sums[:, None] * (2 * HALF) + cols[None, :]
    mask = (of_sums < rows - start_m)[:, None]
    if SPLIT:
        # a split past the sequence's keys is never read; one with keys is written also by rows that see none of them
        if begin < seqlen_k:
            first = (sequence * splits + split) * rows + start_m
            gl.store(part_ptr + first * (2 * HALF) + inner, acc, mask=mask)
            if me == 0:
                gl.store(meta_ptr + first * 2 + below * 2, m_i, mask=below < rows - start_m)
                gl.store(meta_ptr + first * 2 + below * 2 + 1, l_i, mask=below < rows - start_m)
    else:
        if LSE and me == 0:
            query = (start_m + below) // heads
            head = (start_m + below) % heads
            # −inf for a row that has seen nothing
            lse_at = (sequence * heads + head) * seqlen_q + query
            gl.store(lse_ptr + lse_at, (m_i + gl.log2(l_i)) * LN_2, mask=below < rows - start_m)
        share = gl.convert_layout(1.0 / gl.where(l_i == 0.0, 1.0, l_i), OF_SUMS)
        made = (acc * share[:, None]).to(o_ptr.dtype.element_ty)
        gl.store(o_ptr + (sequence * rows + start_m) * (2 * HALF) + inner, made, mask=mask)


@gluon.jit(do_not_specialize=SIZES)
def _hopper_mla_kernel(  # type: ignore[no-untyped-def]
    c_desc, rope_desc, q_ptr, rope_ptr, lens_ptr, table_ptr, o_ptr, lse_ptr, part_ptr, meta_ptr,
    scale, seqlen_q, heads, page_size, splits, granularity, blocks, stride_qb, stride_qt, stride_qh, stride_rb,
    stride_rt, stride_rh, stride_tb, stride_len,
    PAGED: gl.constexpr, LSE: gl.constexpr, SPLIT: gl.constexpr, Q_ALIGN: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`_mla_kernel` for 512 columns of a latent and 64 rotary ones, 64 rows of one sequence a program.

    Descriptors are over [B or pages, S or page, 576], with blocks of BLOCK_N keys and 256 columns or 64. STAGES: tiles
    of keys in shared memory, an even number, as a stage is always one group's.
    """
    index = gl.program_id(0)
    # the last queries see the most keys: longest first
    block = blocks - 1 - index % blocks
    split = (index // blocks) % splits
    sequence = index // blocks // splits
    seqlen_k = gl.load(lens_ptr + sequence.to(gl.int64) * stride_len)
    rows = seqlen_q * heads
    start_m = block * ROWS
    # keys that the last query of this tile sees
    end = seqlen_k - seqlen_q + (gl.minimum(start_m + ROWS, rows) - 1) // heads + 1
    begin = 0
    if SPLIT:
        share = gl.maximum(gl.cdiv(gl.cdiv(seqlen_k, granularity), splits), 1) * granularity
        begin = split * share
        end = gl.minimum(begin + share, end)
    count = gl.cdiv(gl.maximum(end - begin, 0), BLOCK_N)
    if PAGED:
        table_ptr += sequence.to(gl.int64) * stride_tb

    dtype: gl.constexpr = c_desc.dtype
    WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF], dtype)
    NARROW: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROTARY], dtype)
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, HALF], WIDE)
    q_rope_tile = gl.allocate_shared_memory(dtype, [ROWS, ROTARY], NARROW)
    # one for each half: a group of warps reads it and gives it back alone
    c_tiles = (
        gl.allocate_shared_memory(dtype, [STAGES] + c_desc.block_type.shape, c_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES] + c_desc.block_type.shape, c_desc.layout),
    )
    rope_tiles = gl.allocate_shared_memory(dtype, [STAGES] + rope_desc.block_type.shape, rope_desc.layout)
    m_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], NUMBERS)
    l_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], NUMBERS)
    alpha_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], NUMBERS)
    bars = (
        barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1),
        barriers(1, 2),
    )  # fmt: skip
    hopper.fence_async_shared()
    scale = gl.cast(scale, gl.float32) * LOG2_E
    wide = sequence.to(gl.int64)
    gl.warp_specialize(
        [
            (_copy, (
                c_desc, rope_desc, table_ptr, c_tiles, rope_tiles, bars, sequence, begin, count, page_size, PAGED,
                BLOCK_N, STAGES,
            )),
            (_multiply, (
                gl.constexpr(0), q_ptr, rope_ptr, o_ptr, lse_ptr, part_ptr, meta_ptr, q_tiles, q_rope_tile, c_tiles,
                rope_tiles, m_tiles, l_tiles, alpha_tiles, bars, wide, split, splits, start_m, rows, seqlen_q, heads,
                seqlen_k, begin, end, count, scale, stride_qb, stride_qt, stride_qh, stride_rb, stride_rt, stride_rh,
                LSE, SPLIT, Q_ALIGN, BLOCK_N, STAGES,
            )),
            (_multiply, (
                gl.constexpr(1), q_ptr, rope_ptr, o_ptr, lse_ptr, part_ptr, meta_ptr, q_tiles, q_rope_tile, c_tiles,
                rope_tiles, m_tiles, l_tiles, alpha_tiles, bars, wide, split, splits, start_m, rows, seqlen_q, heads,
                seqlen_k, begin, end, count, scale, stride_qb, stride_qt, stride_qh, stride_rb, stride_rt, stride_rh,
                LSE, SPLIT, Q_ALIGN, BLOCK_N, STAGES,
            )),
        ],
        [4, 4],
        [MULTIPLIES, MULTIPLIES],
    )  # fmt: skip
