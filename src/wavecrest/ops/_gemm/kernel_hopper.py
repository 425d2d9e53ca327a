"""The GEMM kernel for sm_90 with an activation: one group of warps copies tiles, two multiply, a fourth may end them.

Gluon, as Triton's own compiler does not put the roles on different warps there (triton 3.6). A program goes on to its
next tile without a gap: while the groups complete one, the tiles of the next are copied.

Without the fourth group each that multiplies also ends its rows, and the second stays behind the first, so that one
multiplies while the other works out exponentials. The fourth takes rounded sums from shared memory, and ends a tile
while the next is multiplied. Linear layers of 12,608 to 16,384 rows, 3,072 columns and K = 768 with a bias and GELU on
one H200, 2026-11-27: 108 and 151 us, where cuBLAS and PyTorch's GELU take 142 and 195, and the kernel without the
fourth group 120 and 172.

A tile has two halves of BLOCK_N columns of b: gate and up, or columns side by side.
"""

from __future__ import annotations

from wavecrest.ops.common.activation import GELU, GELU_16, NONE, activate
from wavecrest.ops.common.hopper import MULTIPLIES, barriers
from wavecrest.ops.common.triton import gl, gluon, hopper, load_tile, store_tile

# groups of warps that multiply, each with its own rows of a tile
GROUPS = gl.constexpr(2)
# registers a thread of four groups: of those that multiply, which hold 128 sums, and of the one that ends them. the
# one that copies keeps 24 of 512
SUMS_ONLY = gl.constexpr(168)
ENDS = gl.constexpr(152)


@gluon.jit
def _place(index, tiles_m, tiles_n, GROUP_M: gl.constexpr):  # type: ignore[no-untyped-def]
    """Row and column of a tile in grouped order, as of `kernel.swizzle_tile`."""
    group = index // (GROUP_M * tiles_n)
    first = group * GROUP_M
    height = gl.minimum(tiles_m - first, GROUP_M)
    within = index % (GROUP_M * tiles_n)
    return first + within % height, within // height


@gluon.jit
def _copy(  # type: ignore[no-untyped-def]
    a_desc, b_desc, a_tiles, b_tiles, full, empty, N, tiles_m, tiles_n, steps,
    GATED: gl.constexpr, GROUP_M: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the tiles that the groups multiply: of a, and both halves of b; up is N columns behind its gate."""
    step = 0
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _place(index, tiles_m, tiles_n, GROUP_M)
        first = tile_n * BLOCK_N if GATED else 2 * tile_n * BLOCK_N
        second = first + (N if GATED else BLOCK_N)
        for i in range(steps):
            slot = step % STAGES
            bar = full.index(slot)
            b_tile = b_tiles.index(slot)
            hopper.mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            hopper.mbarrier.expect(bar, a_desc.block_type.nbytes + 2 * b_desc.block_type.nbytes)
            load_tile(a_desc, [tile_m * BLOCK_M, i * BLOCK_K], bar, a_tiles.index(slot))
            load_tile(b_desc, [first, i * BLOCK_K], bar, b_tile.slice(0, BLOCK_N))
            load_tile(b_desc, [second, i * BLOCK_K], bar, b_tile.slice(BLOCK_N, BLOCK_N))
            step += 1


@gluon.jit
def _ended(  # type: ignore[no-untyped-def]
    acc, bias_ptr, first, end, stride_bias, alpha, slope, BIAS: gl.constexpr, ACTIVATION: gl.constexpr
):
    """act(alpha · acc + bias) of the columns of b from `first` on; b has `end` columns."""
    y = acc * alpha
    if BIAS:
        columns = first + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, y.type.layout))
        bias = gl.load(bias_ptr + columns * stride_bias, mask=columns < end, other=0.0)
        y += gl.expand_dims(bias.to(gl.float32), 0)
    return activate(y, slope, GELU_16 if ACTIVATION == GELU else ACTIVATION)


@gluon.jit
def _store(c_desc, c_tile, y, row, column, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Store a half of a group's rows, once what was stored before has left."""
    hopper.tma.store_wait(0)
    c_tile.store(gl.convert_layout(y, LAYOUT).to(c_tile.dtype))
    hopper.fence_async_shared()
    store_tile(c_desc, [row, column], c_tile)


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    me: gl.constexpr, c_desc, bias_ptr, a_tiles, b_tiles, c_tiles, full, empty, behind, N, tiles_m, tiles_n, steps,
    stride_bias, alpha, slope, BIAS: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr, GROUP_M: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, BEHIND: gl.constexpr,
):  # fmt: skip
    """A group's rows of each tile, rounded once."""
    ROWS: gl.constexpr = BLOCK_M // GROUPS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BLOCK_N, 16])
    c_tile = c_tiles.index(me)
    step = 0
    # the step, of the first tile, behind which the second group starts
    starts = 0
    if BEHIND > 0:
        if me == 0:
            starts = gl.minimum(BEHIND, steps)
        else:
            hopper.mbarrier.wait(behind.index(0), 0)
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _place(index, tiles_m, tiles_n, GROUP_M)
        acc = gl.zeros([ROWS, 2 * BLOCK_N], gl.float32, layout=SUMS)
        for i in range(steps):
            slot = step % STAGES
            hopper.mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            a = a_tiles.index(slot).slice(me * ROWS, ROWS)
            acc = hopper.warpgroup_mma(a, b_tiles.index(slot).permute((1, 0)), acc, is_async=True)
            # the product before this one is done, and its tiles may be copied over
            acc = hopper.warpgroup_mma_wait(1, deps=[acc])
            if i > 0:
                hopper.mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            step += 1
            if step == starts:
                hopper.mbarrier.arrive(behind.index(0), count=1)
        acc = hopper.warpgroup_mma_wait(0, deps=[acc])
        hopper.mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        left, right = acc.reshape([ROWS, 2, BLOCK_N]).permute((0, 2, 1)).split()
        row = tile_m * BLOCK_M + me * ROWS
        if GATED:
            first = tile_n * BLOCK_N
            y = _ended(left, bias_ptr, first, N, stride_bias, alpha, slope, BIAS, ACTIVATION)
            y *= _ended(right, bias_ptr, N + first, 2 * N, stride_bias, alpha, slope, BIAS, NONE)
            _store(c_desc, c_tile, y, row, first, SUMS)
        else:
            first = 2 * tile_n * BLOCK_N
            second = first + BLOCK_N
            y = _ended(left, bias_ptr, first, N, stride_bias, alpha, slope, BIAS, ACTIVATION)
            _store(c_desc, c_tile, y, row, first, SUMS)
            y = _ended(right, bias_ptr, second, N, stride_bias, alpha, slope, BIAS, ACTIVATION)
            _store(c_desc, c_tile, y, row, second, SUMS)
    hopper.tma.store_wait(0)


@gluon.jit
def _sum(  # type: ignore[no-untyped-def]
    me: gl.constexpr, a_tiles, b_tiles, c_tiles, full, empty, summed, ended, tiles, steps, alpha,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A group's rows of each tile as rounded sums, which `_end` takes."""
    ROWS: gl.constexpr = BLOCK_M // GROUPS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    WIDTH: gl.constexpr = c_tiles.shape[2]
    STORED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    # parts of a half
    PARTS: gl.constexpr = BLOCK_N // WIDTH
    step = 0
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        # two products of half the columns: ptxas takes no instruction with 128 sums where 512 threads share registers
        left = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SUMS)
        right = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SUMS)
        for i in range(steps):
            slot = step % STAGES
            hopper.mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            a = a_tiles.index(slot).slice(me * ROWS, ROWS)
            b = b_tiles.index(slot)
            left = hopper.warpgroup_mma(a, b.slice(0, BLOCK_N).permute((1, 0)), left, is_async=True)
            right = hopper.warpgroup_mma(a, b.slice(BLOCK_N, BLOCK_N).permute((1, 0)), right, is_async=True)
            # the products before these two are done, and their tiles may be copied over
            left, right = hopper.warpgroup_mma_wait(2, deps=[left, right])
            if i > 0:
                hopper.mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            step += 1
        left, right = hopper.warpgroup_mma_wait(0, deps=[left, right])
        hopper.mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        turn = index // gl.num_programs(0)
        hopper.mbarrier.wait(ended.index(me), (turn & 1) ^ 1)
        for j in gl.static_range(PARTS):
            first = gl.convert_layout(_part(left, j, PARTS) * alpha, STORED)
            second = gl.convert_layout(_part(right, j, PARTS) * alpha, STORED)
            c_tiles.index(2 * me * PARTS + j).store(first.to(c_tiles.dtype))
            c_tiles.index((2 * me + 1) * PARTS + j).store(second.to(c_tiles.dtype))
        hopper.mbarrier.arrive(summed.index(me), count=1)


@gluon.jit
def _part(x, i: gl.constexpr, PARTS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The i-th of PARTS equal parts of x's columns; no register moves."""
    if PARTS == 1:
        return x
    else:
        HALF: gl.constexpr = PARTS // 2
        left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
        if i < HALF:
            return _part(left, i, HALF)
        else:
            return _part(right, i - HALF, HALF)


@gluon.jit
def _end(  # type: ignore[no-untyped-def]
    c_desc, bias_ptr, c_tiles, summed, ended, N, tiles_m, tiles_n, stride_bias, slope, BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, GATED: gl.constexpr, GROUP_M: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """What `_ended` does to sums, and the stores of each tile."""
    ROWS: gl.constexpr = BLOCK_M // GROUPS
    WIDTH: gl.constexpr = c_tiles.shape[2]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # parts of a group's sums, and of its result
    SUMS: gl.constexpr = 2 * BLOCK_N // WIDTH
    PARTS: gl.constexpr = SUMS // 2 if GATED else SUMS
    # a part is worked out in a loop of 32 rows, 16 values a thread: of more, ptxas works out one after another
    UNITS: gl.constexpr = ROWS // 32
    units = c_tiles._reinterpret(c_tiles.dtype, [c_tiles.shape[0] * UNITS, 32, WIDTH], c_desc.layout)
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        turn = index // gl.num_programs(0)
        tile_m, tile_n = _place(index, tiles_m, tiles_n, GROUP_M)
        first = tile_n * PARTS * WIDTH
        # a part's bias is loaded while the part before is worked out
        bias = _bias(bias_ptr, first, N, stride_bias, BIAS, WIDTH, LAYOUT)
        up_bias = _bias(bias_ptr, N + first, 2 * N, stride_bias, BIAS and GATED, WIDTH, LAYOUT)
        for me in gl.static_range(GROUPS):
            row = tile_m * BLOCK_M + me * ROWS
            hopper.mbarrier.wait(summed.index(me), turn & 1)
            for j in gl.static_range(PARTS):
                after = first + (j + 1) % PARTS * WIDTH
                next_bias = _bias(bias_ptr, after, N, stride_bias, BIAS, WIDTH, LAYOUT)
                next_up_bias = _bias(bias_ptr, N + after, 2 * N, stride_bias, BIAS and GATED, WIDTH, LAYOUT)
                for i in range(UNITS):
                    unit = units.index((me * SUMS + j) * UNITS + i)
                    y = unit.load(LAYOUT).to(gl.float32) + bias
                    y = activate(y, slope, GELU_16 if ACTIVATION == GELU else ACTIVATION)
                    if GATED:
                        up = units.index((me * SUMS + PARTS + j) * UNITS + i).load(LAYOUT)
                        y = y * (up.to(gl.float32) + up_bias)
                    unit.store(y.to(c_tiles.dtype))
                c_tile = c_tiles.index(me * SUMS + j)
                hopper.fence_async_shared()
                store_tile(c_desc, [row, first + j * WIDTH], c_tile)
                bias = next_bias
                up_bias = next_up_bias
                if j == 0:
                    # what was stored before has left, all of the group before
                    hopper.tma.store_wait(1)
                    if me > 0 or turn > 0:
                        hopper.mbarrier.arrive(ended.index((me + GROUPS - 1) % GROUPS), count=1)
    hopper.tma.store_wait(0)


@gluon.jit
def _bias(  # type: ignore[no-untyped-def]
    bias_ptr, first, end, stride_bias, BIAS: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr
):
    """The bias of WIDTH columns of b from `first` on, of `end`, as a row."""
    if BIAS:
        columns = first + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
        bias = gl.load(bias_ptr + columns * stride_bias, mask=columns < end, other=0.0)
        return gl.expand_dims(bias.to(gl.float32), 0)
    else:
        return 0.0


@gluon.jit(do_not_specialize=["N", "tiles_m", "tiles_n", "steps", "stride_bias", "alpha", "slope"])
def _hopper_gemm_kernel(  # type: ignore[no-untyped-def]
    a_desc, b_desc, c_desc, bias_ptr, N, tiles_m, tiles_n, steps, stride_bias, alpha, slope,
    BIAS: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr, GROUP_M: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, BEHIND: gl.constexpr,
):  # fmt: skip
    """act(alpha · a @ b + bias) in tiles [BLOCK_M, 2 · BLOCK_N], every `programs`-th one a program.

    GATED: act(alpha · a @ gate + bias) · (alpha · a @ up + bias) in tiles [BLOCK_M, BLOCK_N].

    Descriptors are over a [M, K], the weight [N, K] (GATED: [2N, K], gate before up) and the result [M, N], with blocks
    of BLOCK_M × BLOCK_K, BLOCK_N × BLOCK_K and BLOCK_M / 2 × BLOCK_N. bias [N] (GATED: [2N]) of any float. `steps`: of
    BLOCK_K a tile. BEHIND: steps that the second group stays behind the first.
    """
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 2 * BLOCK_N, BLOCK_K], b_desc.layout)
    c_tiles = gl.allocate_shared_memory(c_desc.dtype, [GROUPS, BLOCK_M // GROUPS, BLOCK_N], c_desc.layout)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, GROUPS)
    behind = barriers(1, 1)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (_copy, (
                a_desc, b_desc, a_tiles, b_tiles, full, empty, N, tiles_m, tiles_n, steps,
                GATED, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )),
            (_multiply, (
                gl.constexpr(0), c_desc, bias_ptr, a_tiles, b_tiles, c_tiles, full, empty, behind, N, tiles_m, tiles_n,
                steps, stride_bias, alpha, slope, BIAS, ACTIVATION, GATED, GROUP_M, BLOCK_M, BLOCK_N, STAGES, BEHIND,
            )),
            (_multiply, (
                gl.constexpr(1), c_desc, bias_ptr, a_tiles, b_tiles, c_tiles, full, empty, behind, N, tiles_m, tiles_n,
                steps, stride_bias, alpha, slope, BIAS, ACTIVATION, GATED, GROUP_M, BLOCK_M, BLOCK_N, STAGES, BEHIND,
            )),
        ],
        [4, 4],
        [MULTIPLIES, MULTIPLIES],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["N", "tiles_m", "tiles_n", "steps", "stride_bias", "alpha", "slope"])
def _hopper_apart_kernel(  # type: ignore[no-untyped-def]
    a_desc, b_desc, c_desc, bias_ptr, N, tiles_m, tiles_n, steps, stride_bias, alpha, slope,
    BIAS: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr, GROUP_M: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """As `_hopper_gemm_kernel`, with a fourth group that ends tiles; sums are rounded before the bias is added too.

    The descriptor over the result has blocks of BLOCK_M / 2 × 64.
    """
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 2 * BLOCK_N, BLOCK_K], b_desc.layout)
    WIDTH: gl.constexpr = c_desc.block_type.shape[1]
    C_TILES: gl.constexpr = 2 * GROUPS * BLOCK_N // WIDTH
    c_tiles = gl.allocate_shared_memory(c_desc.dtype, [C_TILES, BLOCK_M // GROUPS, WIDTH], c_desc.layout)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, GROUPS)
    # a group's sums are there, and may be written over
    summed = barriers(GROUPS, 1)
    ended = barriers(GROUPS, 1)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (_copy, (
                a_desc, b_desc, a_tiles, b_tiles, full, empty, N, tiles_m, tiles_n, steps,
                GATED, GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )),
            (_sum, (
                gl.constexpr(0), a_tiles, b_tiles, c_tiles, full, empty, summed, ended, tiles_m * tiles_n, steps, alpha,
                BLOCK_M, BLOCK_N, STAGES,
            )),
            (_sum, (
                gl.constexpr(1), a_tiles, b_tiles, c_tiles, full, empty, summed, ended, tiles_m * tiles_n, steps, alpha,
                BLOCK_M, BLOCK_N, STAGES,
            )),
            (_end, (
                c_desc, bias_ptr, c_tiles, summed, ended, N, tiles_m, tiles_n, stride_bias, slope,
                BIAS, ACTIVATION, GATED, GROUP_M, BLOCK_M, BLOCK_N,
            )),
        ],
        [4, 4, 4],
        [SUMS_ONLY, SUMS_ONLY, ENDS],
    )  # fmt: skip
