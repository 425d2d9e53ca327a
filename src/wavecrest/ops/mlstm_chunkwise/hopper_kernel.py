"""The chunkwise mLSTM's last kernel for sm_90: one group of warps copies tiles, two have 64 tokens each.

What it works out is what `kernel.py` does; Gluon, as Triton's own compiler does not put the roles on different warps
(triton 3.6). A program has all columns of a head, one half after the other, since sums of all of them have no room in
registers: so it normalises and gates what it has, and h is written once. The first half waits in shared memory.
"""

from __future__ import annotations

from wavecrest.ops._hopper import MULTIPLIES, barriers
from wavecrest.ops._mlstm_lib import denominator, sigmoid
from wavecrest.ops._triton import gl, gluon, hopper, load_tile, store_tile
from wavecrest.ops.mlstm_chunkwise.states_kernel import LN_2, LOCAL, PLANES, REST, SUMS, TOP

# groups of warps that multiply, and the tokens of each, as many rows as an instruction has
GROUPS, ROWS = gl.constexpr(2), gl.constexpr(64)
# columns of queries whose product with n is added up at a time; rows that are normalised at a time
QUERIES, LINES = gl.constexpr(64), gl.constexpr(16)


@gluon.jit
def _place(index, heads, chunks, CHUNK: gl.constexpr):  # type: ignore[no-untyped-def]
    """(chunk among all, head, row, chunk of the row, tile of the chunk): tiles of a chunk side by side, which read the
    same. They take turns: a program whose first tile sees the whole chunk has one next that sees less of it.
    """
    TILES: gl.constexpr = CHUNK // (GROUPS * ROWS)
    rest = index // TILES
    tile = (index + rest // gl.maximum(gl.num_programs(0) // TILES, 1)) % TILES
    head = rest % heads
    slot = rest // heads
    return slot, head, slot // chunks, slot % chunks, tile


@gluon.jit
def _next(at, turn, STAGES: gl.constexpr):  # type: ignore[no-untyped-def]
    """The slot behind one, and what its barriers' phase is then."""
    at = at + 1
    turn = gl.where(at == STAGES, turn ^ 1, turn)
    at = gl.where(at == STAGES, 0, at)
    return at, turn


@gluon.jit
def _copy(  # type: ignore[no-untyped-def]
    q_desc, k_desc, v_desc, c_desc, q_tiles, tiles, q_full, q_empty, full, empty, tokens, heads, chunks, items,
    INITIAL: gl.constexpr, DK: gl.constexpr, HALVES: gl.constexpr, CHUNK: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy what the groups multiply: queries, then for each half of the columns the state, and keys and values."""
    at = 0
    turn = 1
    q_turn = 1
    for index in range(gl.program_id(0), items, gl.num_programs(0)):
        slot, head, row, chunk, tile = _place(index, heads, chunks, CHUNK)
        first = chunk * CHUNK
        start = first + tile * (GROUPS * ROWS)
        if start < tokens:
            hopper.mbarrier.wait(q_empty.index(0), q_turn)
            q_turn = q_turn ^ 1
            hopper.mbarrier.expect(q_full.index(0), GROUPS * q_desc.block_type.nbytes)
            for me in gl.static_range(GROUPS):
                load_tile(q_desc, [row, head, start + me * ROWS, 0], q_full.index(0), q_tiles.index(me))
            until = gl.minimum((tile + 1) * (GROUPS * ROWS), tokens - first)
            for half in range(HALVES):
                if INITIAL or chunk > 0:
                    for part in range(0, DK, BLOCK):
                        bar = full.index(at)
                        hopper.mbarrier.wait(empty.index(at), turn)
                        hopper.mbarrier.expect(bar, c_desc.block_type.nbytes)
                        load_tile(c_desc, [slot, head, part, half * DK], bar, tiles.index(at))
                        at, turn = _next(at, turn, STAGES)
                for other in range(0, until, BLOCK):
                    bar = full.index(at)
                    hopper.mbarrier.wait(empty.index(at), turn)
                    hopper.mbarrier.expect(bar, k_desc.block_type.nbytes)
                    load_tile(k_desc, [row, head, first + other, 0], bar, tiles.index(at))
                    at, turn = _next(at, turn, STAGES)
                    bar = full.index(at)
                    hopper.mbarrier.wait(empty.index(at), turn)
                    hopper.mbarrier.expect(bar, v_desc.block_type.nbytes)
                    load_tile(v_desc, [row, head, first + other, half * DK], bar, tiles.index(at))
                    at, turn = _next(at, turn, STAGES)


@gluon.jit
def _normalise(  # type: ignore[no-untyped-def]
    h_tile, q_tile, weight_ptr, gate_ptr, first, tokens, norm_eps, stride_gs,
    GATE: gl.constexpr, DK: gl.constexpr, HALVES: gl.constexpr, ALIGN: gl.constexpr,
):  # fmt: skip
    """A few rows of h where they lie in shared memory: LayerNorm times weight, and σ(gate)."""
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DK, DK // 8], [4, 1], [1, 0])
    cols = gl.arange(0, DK, gl.SliceLayout(0, LINE))
    rows = first + gl.arange(0, LINES, gl.SliceLayout(1, LINE))
    mask = (rows < tokens)[:, None]
    last = q_tile.load(LINE).to(gl.float32)
    mean = gl.sum(last, 1)
    if HALVES == 2:
        other = h_tile.load(LINE).to(gl.float32)
        mean = mean + gl.sum(other, 1)
    mean = mean / (HALVES * DK)
    last = last - mean[:, None]
    square = gl.sum(last * last, 1)
    if HALVES == 2:
        other = other - mean[:, None]
        square = square + gl.sum(other * other, 1)
    scale = gl.rsqrt(square / (HALVES * DK) + norm_eps)
    weight_ptr += cols
    gate_at = gate_ptr + (rows.to(gl.int64) * (stride_gs * ALIGN))[:, None] + cols[None, :]
    last = last * scale[:, None] * gl.load(weight_ptr + (HALVES - 1) * DK).to(gl.float32)[None, :]
    if GATE:
        last = last * sigmoid(gl.load(gate_at + (HALVES - 1) * DK, mask=mask, other=0.0).to(gl.float32))
    q_tile.store(last.to(q_tile.dtype))
    if HALVES == 2:
        other = other * scale[:, None] * gl.load(weight_ptr).to(gl.float32)[None, :]
        if GATE:
            other = other * sigmoid(gl.load(gate_at, mask=mask, other=0.0).to(gl.float32))
        h_tile.store(other.to(h_tile.dtype))


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    me: gl.constexpr, h_desc, vectors_ptr, before_ptr, planes_ptr, weight_ptr, gate_ptr, q_tiles, h_tiles, tiles,
    q_full, q_empty, full, empty, eps, norm_eps, tokens, heads, chunks, items, stride_gb, stride_gh, stride_gs,
    LOG_SCALE: gl.constexpr, INITIAL: gl.constexpr, EXPONENTIAL: gl.constexpr, NORMALIZE: gl.constexpr,
    NORM: gl.constexpr, GATE: gl.constexpr, DK: gl.constexpr, HALVES: gl.constexpr, CHUNK: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, ALIGN: gl.constexpr,
):  # fmt: skip
    """A group's 64 tokens of each tile: the state before the chunk, then BLOCK tokens of it after the other."""
    SUMS_OF_H: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DK, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SUMS_OF_H, 2)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    OF_SUMS: gl.constexpr = gl.SliceLayout(1, SUMS_OF_H)
    PARTS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # as copies have them, and as products do
    q_block = q_tiles.index(me)
    h_block = h_tiles.index(me)
    q_tile = q_block.reshape([ROWS, DK])
    h_tile = h_block.reshape([ROWS, DK])
    rows = gl.arange(0, ROWS, OF_ROWS)
    offs_s = gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES))
    offs_q = gl.arange(0, QUERIES, gl.SliceLayout(0, PARTS))
    at = 0
    turn = 0
    q_turn = 0
    for index in range(gl.program_id(0), items, gl.num_programs(0)):
        slot, head, row, chunk, tile = _place(index, heads, chunks, CHUNK)
        first = chunk * CHUNK
        start = first + tile * (GROUPS * ROWS)
        if start < tokens:
            # of the chunk's tokens the group's first; behind the last that its own see, and that the other's do
            mine = tile * (GROUPS * ROWS) + me * ROWS
            until = gl.minimum((tile + 1) * (GROUPS * ROWS), tokens - first)
            seen = gl.minimum(mine + ROWS, until)
            place = (slot * heads + head).to(gl.int64)
            plane = planes_ptr + place * (PLANES * CHUNK)
            high = gl.load(plane + SUMS * CHUNK + mine + rows)
            rest = gl.load(plane + REST * CHUNK + mine + rows)
            m = 0.0
            if INITIAL or chunk > 0:
                m = gl.load(before_ptr + place)
            base = (high + m) + rest
            top = gl.zeros([ROWS], gl.float32, OF_ROWS)
            if EXPONENTIAL:
                top = gl.maximum(base, gl.load(plane + TOP * CHUNK + mine + rows))
            kept = gl.exp2((base - top) + LOG_SCALE)
            rest = (rest - top) + LOG_SCALE
            above = gl.zeros([ROWS], gl.float32, OF_ROWS)
            hopper.mbarrier.wait(q_full.index(0), q_turn)
            q_turn = q_turn ^ 1
            if INITIAL or chunk > 0:
                total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, PARTS))
                for part in gl.static_range(0, DK, QUERIES):
                    part_q = q_tile.slice(part, QUERIES, dim=1).load(PARTS)
                    n = gl.load(vectors_ptr + place * DK + part + offs_q)
                    total += gl.sum(part_q.to(gl.float32) * n[None, :], 1)
                above = gl.convert_layout(total, OF_ROWS) * kept
            for half in range(HALVES):
                acc = gl.zeros([ROWS, DK], gl.float32, layout=SUMS_OF_H)
                den = above
                if INITIAL or chunk > 0:
                    before = at
                    for part in gl.static_range(0, DK, BLOCK):
                        hopper.mbarrier.wait(full.index(at), turn)
                        some = q_tile.slice(part, BLOCK, dim=1)
                        acc = hopper.warpgroup_mma(some, tiles.index(at).reshape([BLOCK, DK]), acc, is_async=True)
                        # the product before this one is done, and its tile may be copied over
                        acc = hopper.warpgroup_mma_wait(1, deps=[acc])
                        if part > 0:
                            hopper.mbarrier.arrive(empty.index(before), count=1)
                        before = at
                        at, turn = _next(at, turn, STAGES)
                    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
                    hopper.mbarrier.arrive(empty.index(before), count=1)
                    acc = acc * gl.convert_layout(kept, OF_SUMS)[:, None]
                for other in range(0, seen, BLOCK):
                    # on their way while keys are
                    high_s = gl.load(plane + SUMS * CHUNK + other + offs_s)
                    local_s = gl.load(plane + LOCAL * CHUNK + other + offs_s)
                    hopper.mbarrier.wait(full.index(at), turn)
                    s = gl.zeros([ROWS, BLOCK], gl.float32, layout=SCORES)
                    k = tiles.index(at).reshape([BLOCK, DK]).permute((1, 0))
                    s = hopper.warpgroup_mma(q_tile, k, s, is_async=True)
                    s = hopper.warpgroup_mma_wait(0, deps=[s])
                    hopper.mbarrier.arrive(empty.index(at), count=1)
                    at, turn = _next(at, turn, STAGES)
                    d = (high[:, None] - high_s[None, :]) + (rest[:, None] + local_s[None, :])
                    sees = (mine + rows)[:, None] >= (other + offs_s)[None, :]
                    # what is not seen is chosen away: a product of it may be infinite
                    p = gl.where(sees, s * gl.exp2(d), 0.0)
                    den += gl.sum(p, 1)
                    p = gl.convert_layout(p.to(q_tile.dtype), WEIGHTS)
                    hopper.mbarrier.wait(full.index(at), turn)
                    acc = hopper.warpgroup_mma(p, tiles.index(at).reshape([BLOCK, DK]), acc, is_async=True)
                    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
                    hopper.mbarrier.arrive(empty.index(at), count=1)
                    at, turn = _next(at, turn, STAGES)
                # keys and values of tokens that the other group alone sees
                for _ in range(seen, until, BLOCK):
                    for _ in gl.static_range(2):
                        hopper.mbarrier.wait(full.index(at), turn)
                        hopper.mbarrier.arrive(empty.index(at), count=1)
                        at, turn = _next(at, turn, STAGES)
                if NORMALIZE:
                    below = denominator(den, top * LN_2, eps, EXPONENTIAL)
                    acc = acc * gl.convert_layout(1.0 / below, OF_SUMS)[:, None]
                if half < HALVES - 1:
                    h_tile.store(acc.to(h_tile.dtype))
                else:
                    # queries have been read
                    q_tile.store(acc.to(q_tile.dtype))
            if NORM:
                weight_at = weight_ptr + head * (HALVES * DK)
                gate_at = gate_ptr + ALIGN * (row.to(gl.int64) * stride_gb + head.to(gl.int64) * stride_gh)
                for part in gl.static_range(0, ROWS, LINES):
                    _normalise(
                        h_tile.slice(part, LINES), q_tile.slice(part, LINES), weight_at, gate_at,
                        start + me * ROWS + part, tokens, norm_eps, stride_gs, GATE, DK, HALVES, ALIGN,
                    )  # fmt: skip
            hopper.fence_async_shared()
            if HALVES == 2:
                store_tile(h_desc, [row, head, start + me * ROWS, 0], h_block)
            store_tile(h_desc, [row, head, start + me * ROWS, (HALVES - 1) * DK], q_block)
            # both have left, and may be written over
            hopper.tma.store_wait(0)
            hopper.mbarrier.arrive(q_empty.index(0), count=1)


_SIZES = ["eps", "norm_eps", "tokens", "heads", "chunks", "items", "stride_gb", "stride_gh", "stride_gs"]


@gluon.jit(do_not_specialize=_SIZES)
def _mlstm_hopper_kernel(  # type: ignore[no-untyped-def]
    q_desc, k_desc, v_desc, c_desc, h_desc, vectors_ptr, before_ptr, planes_ptr, weight_ptr, gate_ptr,
    eps, norm_eps, tokens, heads, chunks, items, stride_gb, stride_gh, stride_gs,
    LOG_SCALE: gl.constexpr, INITIAL: gl.constexpr, EXPONENTIAL: gl.constexpr, NORMALIZE: gl.constexpr,
    NORM: gl.constexpr, GATE: gl.constexpr, DK: gl.constexpr, HALVES: gl.constexpr, CHUNK: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, ALIGN: gl.constexpr,
):  # fmt: skip
    """`items` tiles of 128 tokens of a chunk and head with all HALVES · DK columns of h, every `programs`-th a program.

    Descriptors are over q, k, v, h [B, NH, S, D] and the states [slots, NH, DK, DV], with blocks of DK columns and of
    64 rows (q, h) or BLOCK. before: log2 of e^m of the states, of the chunks [slots, NH]. LOG_SCALE: log2 of the
    scores' scale. Strides of the gate in units of ALIGN. STAGES: tiles [BLOCK, DK] on their way.
    """
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [GROUPS] + q_desc.block_type.shape, q_desc.layout)
    h_tiles = q_tiles
    if HALVES == 2:
        h_tiles = gl.allocate_shared_memory(h_desc.dtype, [GROUPS] + h_desc.block_type.shape, h_desc.layout)
    tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    q_full = barriers(1, 1)
    q_empty = barriers(1, GROUPS)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, GROUPS)
    hopper.fence_async_shared()
    eps = gl.cast(eps, gl.float32)
    norm_eps = gl.cast(norm_eps, gl.float32)
    gl.warp_specialize(
        [
            (_copy, (
                q_desc, k_desc, v_desc, c_desc, q_tiles, tiles, q_full, q_empty, full, empty, tokens, heads, chunks,
                items, INITIAL, DK, HALVES, CHUNK, BLOCK, STAGES,
            )),
            (_multiply, (
                gl.constexpr(0), h_desc, vectors_ptr, before_ptr, planes_ptr, weight_ptr, gate_ptr, q_tiles, h_tiles,
                tiles, q_full, q_empty, full, empty, eps, norm_eps, tokens, heads, chunks, items, stride_gb, stride_gh,
                stride_gs, LOG_SCALE, INITIAL, EXPONENTIAL, NORMALIZE, NORM, GATE, DK, HALVES, CHUNK, BLOCK, STAGES,
                ALIGN,
            )),
            (_multiply, (
                gl.constexpr(1), h_desc, vectors_ptr, before_ptr, planes_ptr, weight_ptr, gate_ptr, q_tiles, h_tiles,
                tiles, q_full, q_empty, full, empty, eps, norm_eps, tokens, heads, chunks, items, stride_gb, stride_gh,
                stride_gs, LOG_SCALE, INITIAL, EXPONENTIAL, NORMALIZE, NORM, GATE, DK, HALVES, CHUNK, BLOCK, STAGES,
                ALIGN,
            )),
        ],
        [4, 4],
        [MULTIPLIES, MULTIPLIES],
    )  # fmt: skip
