"""The GEMM kernel for sm_90 with an activation: one group of warps copies tiles, two multiply.

Gluon, as Triton's own compiler does not put the roles on different warps there (triton 3.6). A program goes on to its
next tile without a gap: while the groups complete one, the tiles of the next are copied. And the second group stays
behind the first, so that one multiplies while the other works out exponentials.

A tile has two halves of BLOCK_N columns of b: gate and up, or columns side by side.
"""

from __future__ import annotations

from wavecrest.ops.common.activation import NONE, activate
from wavecrest.ops.common.hopper import MULTIPLIES, barriers
from wavecrest.ops.common.triton import gl, gluon, hopper, load_tile, store_tile

# groups of warps that multiply, each with its own rows of a tile
GROUPS = gl.constexpr(2)


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
    return activate(y, slope, ACTIVATION)


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
