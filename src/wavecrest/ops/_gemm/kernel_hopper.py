"""The GEMM kernel for sm_90 with a gated activation: one group of warps copies tiles, two multiply.

Gluon, as Triton's own compiler does not put the roles on different warps there (triton 3.6). A program goes on to its
next tile without a gap: while the groups complete one, the tiles of the next are copied. And the second group stays
behind the first, so that one multiplies while the other works out exponentials.
"""

from __future__ import annotations

from wavecrest.ops.common.activation import activate
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
    GROUP_M: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the tiles that the groups multiply: of a, and of b for the gate and for what it gates, N columns behind."""
    step = 0
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _place(index, tiles_m, tiles_n, GROUP_M)
        for i in range(steps):
            slot = step % STAGES
            bar = full.index(slot)
            b_tile = b_tiles.index(slot)
            hopper.mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            hopper.mbarrier.expect(bar, a_desc.block_type.nbytes + 2 * b_desc.block_type.nbytes)
            load_tile(a_desc, [tile_m * BLOCK_M, i * BLOCK_K], bar, a_tiles.index(slot))
            load_tile(b_desc, [tile_n * BLOCK_N, i * BLOCK_K], bar, b_tile.slice(0, BLOCK_N))
            load_tile(b_desc, [N + tile_n * BLOCK_N, i * BLOCK_K], bar, b_tile.slice(BLOCK_N, BLOCK_N))
            step += 1


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    me: gl.constexpr, c_desc, a_tiles, b_tiles, c_tiles, full, empty, behind, tiles_m, tiles_n, steps, alpha,
    ACTIVATION: gl.constexpr, GROUP_M: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, BEHIND: gl.constexpr,
):  # fmt: skip
    """A group's rows of each tile: act(alpha · gate) · (alpha · up), rounded once."""
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
        gate, up = acc.reshape([ROWS, 2, BLOCK_N]).permute((0, 2, 1)).split()
        y = activate(gate * alpha, 0.0, ACTIVATION) * (up * alpha)
        # what was stored before has left
        hopper.tma.store_wait(0)
        c_tile.store(gl.convert_layout(y, SUMS).to(c_tiles.dtype))
        hopper.fence_async_shared()
        store_tile(c_desc, [tile_m * BLOCK_M + me * ROWS, tile_n * BLOCK_N], c_tile)
    hopper.tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "tiles_m", "tiles_n", "steps", "alpha"])
def _hopper_gated_kernel(  # type: ignore[no-untyped-def]
    a_desc, b_desc, c_desc, N, tiles_m, tiles_n, steps, alpha,
    ACTIVATION: gl.constexpr, GROUP_M: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, BEHIND: gl.constexpr,
):  # fmt: skip
    """Tiles [BLOCK_M, BLOCK_N] of act(alpha · a @ gate) · (alpha · a @ up), every `programs`-th one a program.

    Descriptors are over a [M, K], the weight [2N, K] with gate before up, and the result [M, N], with blocks of
    BLOCK_M × BLOCK_K, BLOCK_N × BLOCK_K and BLOCK_M / 2 × BLOCK_N. `steps`: of BLOCK_K a tile. BEHIND: steps that the
    second group stays behind the first.
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
                GROUP_M, BLOCK_M, BLOCK_N, BLOCK_K, STAGES,
            )),
            (_multiply, (
                gl.constexpr(0), c_desc, a_tiles, b_tiles, c_tiles, full, empty, behind, tiles_m, tiles_n, steps, alpha,
                ACTIVATION, GROUP_M, BLOCK_M, BLOCK_N, STAGES, BEHIND,
            )),
            (_multiply, (
                gl.constexpr(1), c_desc, a_tiles, b_tiles, c_tiles, full, empty, behind, tiles_m, tiles_n, steps, alpha,
                ACTIVATION, GROUP_M, BLOCK_M, BLOCK_N, STAGES, BEHIND,
            )),
        ],
        [4, 4],
        [MULTIPLIES, MULTIPLIES],
    )  # fmt: skip
