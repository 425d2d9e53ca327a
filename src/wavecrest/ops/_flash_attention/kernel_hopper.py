"""The attention kernel for sm_90: one group of warps copies tiles, two multiply, and each pair of GEMMs overlaps.

Gluon, as Triton's own compiler does not put the roles on different warps there (triton 3.6). The schedule is that of
FlashAttention-3 (Shah et al., 2024): the next tile's scores are multiplied before this one's softmax, and the two
groups take turns, so that one multiplies while the other works out exponentials.
"""

from __future__ import annotations

from wavecrest.ops._flash_attention.kernel import LN_2
from wavecrest.ops.common.device import LOG2_E
from wavecrest.ops.common.hopper import MULTIPLIES, barriers
from wavecrest.ops.common.triton import gl, gluon, hopper, load_tile, store_tile

# what is done to scores: edges of a window, softcap, ALiBi slopes; added up in KIND
LEFT_EDGE, RIGHT_EDGE, CAPPED, SLOPED = gl.constexpr(1), gl.constexpr(2), gl.constexpr(4), gl.constexpr(8)
# groups of warps that multiply, each with its own rows
GROUPS = gl.constexpr(2)
# barriers, by what they say: of a group, and of a stage of k and v. In arrays of their own, as Triton has all warps
# wait between two accesses to one array
Q_FULL, Q_EMPTY, TURN = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
K_FULL, K_EMPTY, V_FULL, V_EMPTY = gl.constexpr(3), gl.constexpr(4), gl.constexpr(5), gl.constexpr(6)


@gluon.jit
def _turns(tiles, section, total):  # type: ignore[no-untyped-def]
    """How many pieces of work, or gaps, a program has in a section, and in all."""
    one = gl.cdiv(section * tiles, gl.num_programs(0))
    return one, one * gl.cdiv(total, section)


@gluon.jit
def _work(turn, turns, tiles, section, total, RIGHT: gl.constexpr):  # type: ignore[no-untyped-def]
    """A turn's tile of queries and its head, of the heads of all sequences; tile −1: a gap, where a section ends.

    With a diagonal the heads of a section, whose k and v stay in the L2 cache, go together, the last queries first:
    those see the most keys. Every other turn goes backwards through the programs, so that all get as much.
    """
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    part = turn // turns
    heads = gl.minimum(total - part * section, section)
    place = gl.where((turn + part) % 2 == 0, program, programs - 1 - program)
    inside = (turn - part * turns) * programs + place
    if RIGHT:
        tile = tiles - 1 - inside // heads
        head = part * section + inside % heads
    else:
        tile = inside % tiles
        head = part * section + inside // tiles
    return gl.where(inside < heads * tiles, tile, -1), head


@gluon.jit
def _ends(  # type: ignore[no-untyped-def]
    tile, seqlen_q, seqlen_k, left, right, KIND: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):
    """(begin, low, high, end): queries of the tile see tiles of keys from begin to end; all see those low to high."""
    # the first query's place on the diagonal
    place = tile * BLOCK_M + seqlen_k - seqlen_q
    last = seqlen_k
    whole = seqlen_k
    if KIND & RIGHT_EDGE:
        last = gl.minimum(gl.maximum(place + right + BLOCK_M, 0), seqlen_k)
        whole = gl.minimum(gl.maximum(place + right + 1, 0), seqlen_k)
    end = gl.cdiv(last, BLOCK_N)
    begin = 0 * end
    low = begin
    if KIND & LEFT_EDGE:
        begin = gl.minimum(gl.maximum(place - left, 0) // BLOCK_N, end)
        low = gl.cdiv(gl.maximum(place + BLOCK_M - 1 - left, 0), BLOCK_N)
    return begin, low, whole // BLOCK_N, end


@gluon.jit
def _marks(start_m, offs_m, seqlen_q, seqlen_k, left, right):  # type: ignore[no-untyped-def]
    """(place on the diagonal, first key that it sees, last one) of each row; the last two where there are edges."""
    rows = start_m + offs_m + seqlen_k - seqlen_q
    return rows, rows - left, gl.minimum(rows + right, seqlen_k - 1)


@gluon.jit
def _numbers(  # type: ignore[no-untyped-def]
    slopes_ptr, sequence, head, stride_slope_b, stride_slope_h, scale, softcap, KIND: gl.constexpr
):
    """(scale, softcap, slope) for scores that are exponents of 2."""
    slope = 0.0
    if KIND & SLOPED:
        slope = gl.load(slopes_ptr + sequence * stride_slope_b + head * stride_slope_h).to(gl.float32) * LOG2_E
    if KIND & CAPPED:
        # of 2 s / softcap, see `_weighed`
        scale = 2.0 * LOG2_E * scale / softcap
    else:
        scale = scale * LOG2_E
    return scale, softcap * LOG2_E, slope


@gluon.jit
def _copy(  # type: ignore[no-untyped-def]
    q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, bars, seqlen_q, seqlen_k, heads, group, section, tiles, total,
    left, right, KIND: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the tiles that the groups multiply, from the last keys to the first."""
    ROWS: gl.constexpr = BLOCK_M // GROUPS
    step = 0
    done = 0
    turns, all_turns = _turns(tiles, section, total)
    for turn in range(all_turns):
        tile, head = _work(turn, turns, tiles, section, total, KIND & RIGHT_EDGE)
        if tile >= 0:
            sequence = head // heads
            kv_head = (head % heads) // group
            begin, _, _, end = _ends(tile, seqlen_q, seqlen_k, left, right, KIND, BLOCK_M, BLOCK_N)
            for one in gl.static_range(GROUPS):
                hopper.mbarrier.wait(bars[Q_EMPTY].index(one), (done & 1) ^ 1)
                hopper.mbarrier.expect(bars[Q_FULL].index(one), q_desc.block_type.nbytes)
                load_tile(
                    q_desc, [sequence, head % heads, tile * BLOCK_M + one * ROWS, 0], bars[Q_FULL].index(one),
                    q_tiles.index(one),
                )  # fmt: skip
            for i in range(end - begin):
                start = (end - 1 - i) * BLOCK_N
                slot = step % STAGES
                phase = ((step // STAGES) & 1) ^ 1
                hopper.mbarrier.wait(bars[K_EMPTY].index(slot), phase)
                hopper.mbarrier.expect(bars[K_FULL].index(slot), k_desc.block_type.nbytes)
                load_tile(k_desc, [sequence, kv_head, start, 0], bars[K_FULL].index(slot), k_tiles.index(slot))
                hopper.mbarrier.wait(bars[V_EMPTY].index(slot), phase)
                hopper.mbarrier.expect(bars[V_FULL].index(slot), v_desc.block_type.nbytes)
                load_tile(v_desc, [sequence, kv_head, start, 0], bars[V_FULL].index(slot), v_tiles.index(slot))
                step += 1
            done += 1


@gluon.jit
def _weighed(  # type: ignore[no-untyped-def]
    s, m_i, l_i, start, marks, numbers, seqlen_k, MASKED: gl.constexpr, KIND: gl.constexpr, BLOCK_N: gl.constexpr,
    SCORES: gl.constexpr,
):  # fmt: skip
    """(weights, m_i, l_i, alpha): of each row the largest score and sums of weights so far; alpha scales older sums."""
    scale, softcap, slope = numbers
    if MASKED or KIND & CAPPED or KIND & SLOPED:
        rows, lower, upper = marks
        cols = start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
        if KIND & CAPPED:
            # c · tanh(s / c) = c − 2c / (1 + e^(2s / c))
            s = softcap - 2.0 * softcap / (1.0 + gl.exp2(s * scale))
        else:
            # before the mask, as the scale may be 0
            s = s * scale
        if KIND & SLOPED:
            s -= slope * gl.abs((rows[:, None] - cols[None, :]).to(gl.float32))
        if MASKED:
            if KIND & RIGHT_EDGE:
                seen = cols[None, :] <= upper[:, None]
            else:
                seen = (cols < seqlen_k)[None, :]
            if KIND & LEFT_EDGE:
                seen = seen & (cols[None, :] >= lower[:, None])
            s = gl.where(seen, s, float("-inf"))
        m_new = gl.maximum(m_i, gl.max(s, 1))
        # a row that has seen nothing yet: −inf − −inf would be NaN
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
        p = gl.exp2(s - base[:, None])
    else:
        # multiplied in with the subtraction
        m_new = gl.maximum(m_i, gl.max(s, 1) * scale)
        base = m_new
        p = gl.exp2(s * scale - base[:, None])
    alpha = gl.exp2(m_i - base)
    sums = _sums(p)
    older = gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    return p, m_new, l_i * older[:, None] + sums, alpha


@gluon.jit
def _weighed_first(  # type: ignore[no-untyped-def]
    s, m_i, l_i, low, high, end, marks, numbers, seqlen_k, KIND: gl.constexpr, BLOCK_N: gl.constexpr,
    SCORES: gl.constexpr,
):  # fmt: skip
    """(weights, m_i, l_i) of the last tile of keys, `end` − 1, of which those from low to high need no mask."""
    start = (end - 1) * BLOCK_N
    if KIND & RIGHT_EDGE:
        # it is on the diagonal
        p, m_i, l_i, _ = _weighed(s, m_i, l_i, start, marks, numbers, seqlen_k, True, KIND, BLOCK_N, SCORES)
    elif (end > high) | (end <= low):
        p, m_i, l_i, _ = _weighed(s, m_i, l_i, start, marks, numbers, seqlen_k, True, KIND, BLOCK_N, SCORES)
    else:
        p, m_i, l_i, _ = _weighed(s, m_i, l_i, start, marks, numbers, seqlen_k, False, KIND, BLOCK_N, SCORES)
    return p, m_i, l_i


@gluon.jit
def _sums(p):  # type: ignore[no-untyped-def]
    """Sums of every eighth column, [M, 8] of [M, N]: each of columns that one thread has, added up when all is done."""
    return gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 8]), 1)


@gluon.jit
def _before(  # type: ignore[no-untyped-def]
    sinks_ptr, head, stride_sink, SINKS: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, SCORES: gl.constexpr
):
    """(m_i, l_i) of each row before the first tile of keys."""
    m_i = gl.full([ROWS], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    l_i = _sums(gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES))
    if SINKS:
        # a key without a value, seen first: an eighth of its weight, 1, in each sum
        sink = gl.load(sinks_ptr + head * stride_sink).to(gl.float32) * LOG2_E
        m_i = gl.full([ROWS], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORES)) + sink
        l_i += gl.where(sink == float("-inf"), 0.0, 0.125)
    return m_i, l_i


@gluon.jit
def _parts(begin, low, high, end, KIND: gl.constexpr):  # type: ignore[no-untyped-def]
    """(masked, full): of a tile's steps those from `masked` to `full` need no mask; step 0 is `_weighed_first`'s."""
    count = end - begin
    masked = gl.minimum(gl.maximum(end - high, 1), count)
    full = count
    if KIND & LEFT_EDGE:
        full = gl.minimum(gl.maximum(end - low, masked), count)
    return masked, full


# tiles are as wide as a power of two, and may have columns behind head_dim. With REST > 0 only REST columns behind the
# first half are multiplied: sums are `acc`, of that half, and `rest`. With 0 `acc` has all, and `rest` is not used


@gluon.jit
def _halves(rows: gl.constexpr, BLOCK_D: gl.constexpr, REST: gl.constexpr, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """(acc, rest) of zeros, for `rows` rows of results."""
    head: gl.constexpr = BLOCK_D if REST == 0 else BLOCK_D // 2
    behind: gl.constexpr = 16 if REST == 0 else REST
    first: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, head, 16])
    second: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, behind, 16])
    return gl.zeros([rows, head], gl.float32, layout=first), gl.zeros([rows, behind], gl.float32, layout=second)


@gluon.jit
def _begin_scores(q, k, zeros, BLOCK_D: gl.constexpr, REST: gl.constexpr):  # type: ignore[no-untyped-def]
    """Begin q @ k, of a tile of keys [BLOCK_D, BLOCK_N]."""
    if REST == 0:
        s = hopper.warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    else:
        half: gl.constexpr = BLOCK_D // 2
        s = hopper.warpgroup_mma(q.slice(0, half, 1), k.slice(0, half, 0), zeros, use_acc=False, is_async=True)
        s = hopper.warpgroup_mma(q.slice(half, REST, 1), k.slice(half, REST, 0), s, is_async=True)
    return s


@gluon.jit
def _begin_values(p, v, acc, rest, BLOCK_D: gl.constexpr, REST: gl.constexpr):  # type: ignore[no-untyped-def]
    """Begin (acc, rest) + p @ v, of a tile of values [BLOCK_N, BLOCK_D]: one product, or two."""
    if REST == 0:
        acc = hopper.warpgroup_mma(p, v, acc, is_async=True)
    else:
        half: gl.constexpr = BLOCK_D // 2
        acc = hopper.warpgroup_mma(p, v.slice(0, half, 1), acc, is_async=True)
        weights = gl.convert_layout(p, gl.DotOperandLayout(0, rest.type.layout, 2), assert_trivial=True)
        rest = hopper.warpgroup_mma(weights, v.slice(half, REST, 1), rest, is_async=True)
    return acc, rest


@gluon.jit
def _wait_for_scores(s, REST: gl.constexpr):  # type: ignore[no-untyped-def]
    """The scores of products that were begun before those of `_begin_values`, which may go on."""
    return hopper.warpgroup_mma_wait(1 if REST == 0 else 2, deps=[s])


@gluon.jit
def _wait_for_values(acc, rest, REST: gl.constexpr):  # type: ignore[no-untyped-def]
    """(acc, rest) when all products are made."""
    if REST == 0:
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    else:
        acc, rest = hopper.warpgroup_mma_wait(0, deps=[acc, rest])
    return acc, rest


@gluon.jit
def _times(acc, rest, factor, REST: gl.constexpr):  # type: ignore[no-untyped-def]
    """(acc, rest) with each row times its factor."""
    acc = acc * gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    if REST > 0:
        rest = rest * gl.convert_layout(factor, gl.SliceLayout(1, rest.type.layout))[:, None]
    return acc, rest


@gluon.jit
def _store(tile, acc, rest, BLOCK_D: gl.constexpr, REST: gl.constexpr):  # type: ignore[no-untyped-def]
    """(acc, rest) into a tile of results, [rows, BLOCK_D]; what is behind head_dim does not leave it."""
    if REST == 0:
        tile.store(acc.to(tile.dtype))
    else:
        half: gl.constexpr = BLOCK_D // 2
        tile.slice(0, half, 1).store(acc.to(tile.dtype))
        tile.slice(half, REST, 1).store(rest.to(tile.dtype))


@gluon.jit
def _scores(  # type: ignore[no-untyped-def]
    me: gl.constexpr, q, k_tiles, bars, step, ROWS: gl.constexpr, BLOCK_D: gl.constexpr, REST: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Begin to multiply q with a step's keys, when they are there and it is this group's turn."""
    slot = step % STAGES
    hopper.mbarrier.wait(bars[K_FULL].index(slot), (step // STAGES) & 1)
    if TURNS:
        hopper.mbarrier.wait(bars[TURN].index(me), step & 1)
    k = k_tiles.index(slot).reshape([BLOCK_N, BLOCK_D]).permute((1, 0))
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    return _begin_scores(q, k, zeros, BLOCK_D, REST)


@gluon.jit
def _step(  # type: ignore[no-untyped-def]
    me: gl.constexpr, p, m_i, l_i, acc, rest, step, start, q, k_tiles, v_tiles, bars, marks, numbers,
    seqlen_k, MASKED: gl.constexpr, KIND: gl.constexpr, ROWS: gl.constexpr, BLOCK_D: gl.constexpr, REST: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr, SCORES: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Multiply one step's weights with v beside the next step's scores and softmax: both of the next step."""
    slot = step % STAGES
    phase = (step // STAGES) & 1
    s = _scores(me, q, k_tiles, bars, step + 1, ROWS, BLOCK_D, REST, BLOCK_N, STAGES, TURNS, SCORES)
    hopper.mbarrier.wait(bars[V_FULL].index(slot), phase)
    v = v_tiles.index(slot).reshape([BLOCK_N, BLOCK_D])
    acc, rest = _begin_values(p, v, acc, rest, BLOCK_D, REST)
    if TURNS:
        hopper.mbarrier.arrive(bars[TURN].index(1 - me), count=1)
    s = _wait_for_scores(s, REST)
    hopper.mbarrier.arrive(bars[K_EMPTY].index((step + 1) % STAGES), count=1)
    weights, m_i, l_i, alpha = _weighed(s, m_i, l_i, start, marks, numbers, seqlen_k, MASKED, KIND, BLOCK_N, SCORES)
    p_next = gl.convert_layout(weights.to(v_tiles.dtype), WEIGHTS)
    # v has been there for long; without a branch here ptxas puts the wait below in front of the softmax (triton 3.6)
    hopper.mbarrier.wait(bars[V_FULL].index(slot), phase)
    if REST == 0:
        acc, p, p_next, l_i, alpha = hopper.warpgroup_mma_wait(0, deps=[acc, p, p_next, l_i, alpha])
    else:
        acc, rest, p, p_next, l_i, alpha = hopper.warpgroup_mma_wait(0, deps=[acc, rest, p, p_next, l_i, alpha])
    hopper.mbarrier.arrive(bars[V_EMPTY].index(slot), count=1)
    acc, rest = _times(acc, rest, alpha, REST)
    return p_next, m_i, l_i, acc, rest


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    me: gl.constexpr, o_desc, lse_ptr, sinks_ptr, slopes_ptr, q_tiles, k_tiles, v_tiles, o_tiles, bars,
    seqlen_q, seqlen_k, heads, section, tiles, total, left, right, stride_sink, stride_slope_b, stride_slope_h, scale,
    softcap, KIND: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr, OWN: gl.constexpr, BLOCK_D: gl.constexpr,
    REST: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """The attention of one group's rows, tile after tile."""
    ROWS: gl.constexpr = BLOCK_M // GROUPS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    q = q_tiles.index(me).reshape([ROWS, BLOCK_D])
    offs_m = gl.arange(0, ROWS, layout=ROW)
    step = 0
    done = 0
    turns, all_turns = _turns(tiles, section, total)
    for turn in range(all_turns):
        tile, head = _work(turn, turns, tiles, section, total, KIND & RIGHT_EDGE)
        if tile >= 0:
            begin, low, high, end = _ends(tile, seqlen_q, seqlen_k, left, right, KIND, BLOCK_M, BLOCK_N)
            count = end - begin
            start_m = tile * BLOCK_M + me * ROWS
            marks = _marks(start_m, offs_m, seqlen_q, seqlen_k, left, right)
            numbers = _numbers(
                slopes_ptr, head // heads, head % heads, stride_slope_b, stride_slope_h, scale, softcap, KIND
            )
            m_i, l_i = _before(sinks_ptr, head % heads, stride_sink, SINKS, ROWS, BLOCK_N, SCORES)
            acc, rest = _halves(ROWS, BLOCK_D, REST, 4)
            WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
            hopper.mbarrier.wait(bars[Q_FULL].index(me), done & 1)
            if count > 0:
                s = _scores(me, q, k_tiles, bars, step, ROWS, BLOCK_D, REST, BLOCK_N, STAGES, TURNS, SCORES)
                if TURNS:
                    hopper.mbarrier.arrive(bars[TURN].index(1 - me), count=1)
                s = hopper.warpgroup_mma_wait(0, deps=[s])
                hopper.mbarrier.arrive(bars[K_EMPTY].index(step % STAGES), count=1)
                p, m_i, l_i = _weighed_first(
                    s, m_i, l_i, low, high, end, marks, numbers, seqlen_k, KIND, BLOCK_N, SCORES
                )
                p = gl.convert_layout(p.to(v_tiles.dtype), WEIGHTS)
                masked, full = _parts(begin, low, high, end, KIND)
                if KIND & RIGHT_EDGE:
                    for i in range(1, masked):
                        p, m_i, l_i, acc, rest = _step(
                            me, p, m_i, l_i, acc, rest, step, (end - 1 - i) * BLOCK_N, q, k_tiles, v_tiles, bars, marks,
                            numbers, seqlen_k, True, KIND, ROWS, BLOCK_D, REST, BLOCK_N, STAGES, TURNS, SCORES, WEIGHTS,
                        )  # fmt: skip
                        step += 1
                for i in range(masked, full):
                    p, m_i, l_i, acc, rest = _step(
                        me, p, m_i, l_i, acc, rest, step, (end - 1 - i) * BLOCK_N, q, k_tiles, v_tiles, bars, marks,
                        numbers, seqlen_k, False, KIND, ROWS, BLOCK_D, REST, BLOCK_N, STAGES, TURNS, SCORES, WEIGHTS,
                    )  # fmt: skip
                    step += 1
                if KIND & LEFT_EDGE:
                    for i in range(full, count):
                        p, m_i, l_i, acc, rest = _step(
                            me, p, m_i, l_i, acc, rest, step, (end - 1 - i) * BLOCK_N, q, k_tiles, v_tiles, bars, marks,
                            numbers, seqlen_k, True, KIND, ROWS, BLOCK_D, REST, BLOCK_N, STAGES, TURNS, SCORES, WEIGHTS,
                        )  # fmt: skip
                        step += 1
                if OWN:
                    # the next tile's q, k and v arrive beside the last values and the division
                    hopper.mbarrier.arrive(bars[Q_EMPTY].index(me), count=1)
                slot = step % STAGES
                hopper.mbarrier.wait(bars[V_FULL].index(slot), (step // STAGES) & 1)
                v = v_tiles.index(slot).reshape([BLOCK_N, BLOCK_D])
                acc, rest = _begin_values(p, v, acc, rest, BLOCK_D, REST)
                acc, rest = _wait_for_values(acc, rest, REST)
                hopper.mbarrier.arrive(bars[V_EMPTY].index(slot), count=1)
                step += 1
            elif OWN:
                hopper.mbarrier.arrive(bars[Q_EMPTY].index(me), count=1)
            denominator = gl.convert_layout(gl.sum(l_i, 1), ROW)
            if LSE:
                # −inf for a row that has seen nothing
                logarithm = (m_i + gl.log2(denominator)) * LN_2
                gl.store(
                    lse_ptr + head.to(gl.int64) * seqlen_q + start_m + offs_m,
                    logarithm,
                    mask=start_m + offs_m < seqlen_q,
                )
            acc, rest = _times(acc, rest, 1.0 / gl.where(denominator == 0.0, 1.0, denominator), REST)
            # the last tile's result has left
            hopper.tma.store_wait(0)
            _store(o_tiles.index(me).reshape([ROWS, BLOCK_D]), acc, rest, BLOCK_D, REST)
            hopper.fence_async_shared()
            store_tile(o_desc, [head // heads, head % heads, start_m, 0], o_tiles.index(me))
            if not OWN:
                hopper.tma.store_wait(0)
                hopper.mbarrier.arrive(bars[Q_EMPTY].index(me), count=1)
            done += 1
    hopper.tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "scale", "softcap", "seqlen_q", "seqlen_k", "heads", "group", "section", "tiles", "total", "left", "right",
        "stride_sink", "stride_slope_b", "stride_slope_h",
    ]
)  # fmt: skip
def _hopper_attention_kernel(  # type: ignore[no-untyped-def]
    q_desc, k_desc, v_desc, o_desc, lse_ptr, sinks_ptr, slopes_ptr,
    scale, softcap, seqlen_q, seqlen_k, heads, group, section, tiles, total, left, right,
    stride_sink, stride_slope_b, stride_slope_h,
    KIND: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr, OWN: gl.constexpr, BLOCK_D: gl.constexpr,
    REST: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
):  # fmt: skip
    """Tiles of BLOCK_M queries of `total` heads, those of all sequences, shared out among the programs.

    Descriptors are over [B, H, S, D] with blocks of BLOCK_M / 2 rows (q, o) or BLOCK_N (k, v); `section`: heads whose
    tiles go together; `left`, `right`: of the window, where KIND has these edges; OWN: results have shared memory of
    their own, otherwise they take the place of q; REST: columns behind the first half of BLOCK_D that are multiplied,
    or 0: all.
    """
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [GROUPS] + q_desc.block_type.shape, q_desc.layout)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    o_tiles = q_tiles
    if OWN:
        o_tiles = gl.allocate_shared_memory(o_desc.dtype, [GROUPS] + o_desc.block_type.shape, o_desc.layout)
    bars = (
        barriers(GROUPS, 1), barriers(GROUPS, 1), barriers(GROUPS, 1), barriers(STAGES, 1),
        barriers(STAGES, GROUPS), barriers(STAGES, 1), barriers(STAGES, GROUPS),
    )  # fmt: skip
    hopper.fence_async_shared()
    if TURNS:
        # the first group begins
        hopper.mbarrier.arrive(bars[TURN].index(0), count=1)
    gl.warp_specialize(
        [
            (_copy, (
                q_desc, k_desc, v_desc, q_tiles, k_tiles, v_tiles, bars, seqlen_q, seqlen_k, heads, group, section,
                tiles, total, left, right, KIND, BLOCK_M, BLOCK_N, STAGES,
            )),
            (_multiply, (
                gl.constexpr(0), o_desc, lse_ptr, sinks_ptr, slopes_ptr, q_tiles, k_tiles, v_tiles, o_tiles,
                bars, seqlen_q, seqlen_k, heads, section, tiles, total, left, right, stride_sink, stride_slope_b,
                stride_slope_h, scale, softcap, KIND, SINKS, LSE, OWN, BLOCK_D, REST, BLOCK_M, BLOCK_N, STAGES, TURNS,
            )),
            (_multiply, (
                gl.constexpr(1), o_desc, lse_ptr, sinks_ptr, slopes_ptr, q_tiles, k_tiles, v_tiles, o_tiles,
                bars, seqlen_q, seqlen_k, heads, section, tiles, total, left, right, stride_sink, stride_slope_b,
                stride_slope_h, scale, softcap, KIND, SINKS, LSE, OWN, BLOCK_D, REST, BLOCK_M, BLOCK_N, STAGES, TURNS,
            )),
        ],
        [4, 4],
        [MULTIPLIES, MULTIPLIES],
    )  # fmt: skip
