"""The GEMM kernel for sm_90 of 8-bit floats with block scales: each block's sums are scaled, and added in float32.

Gluon, with the roles of `kernel_hopper`: one group of warps copies tiles, one or two multiply 64 rows each. The matrix
unit sums the 128 products of a block from zero, in its 14 bits; the group then multiplies these sums by the scales of
the block and adds them to its own, while the matrix unit works for the other group.

Where there are few rows and tiles, K is divided, and the parts of a result are added by a second kernel.
"""

from __future__ import annotations

from wavecrest.ops._gemm.kernel_hopper import _ended, _place, _store
from wavecrest.ops.common.activation import NONE
from wavecrest.ops.common.hopper import MULTIPLIES, barriers
from wavecrest.ops.common.triton import gl, gluon, hopper, load_tile

# rows of a group of warps, columns of K that share a scale, and columns of b that do
ROWS = gl.constexpr(64)
BLOCK = gl.constexpr(128)


@gluon.jit
def _columns(tile_n, N, HALVES: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr):  # type: ignore[no-untyped-def]
    """The first columns of b of a tile's halves: side by side, or gate and up, which is N columns behind."""
    first = tile_n * BLOCK_N if GATED else HALVES * tile_n * BLOCK_N
    return first, first + (N if GATED else BLOCK_N)


@gluon.jit
def _turn(index, tiles, steps, blocks, SPLIT_K: gl.constexpr):  # type: ignore[no-untyped-def]
    """The tile of a program's turn, its first block of K and the one behind its last; a part of K begins anywhere."""
    tile = index
    begin = 0
    stop = blocks
    if SPLIT_K > 1:
        tile = index % tiles
        begin = index // tiles * steps
        stop = gl.minimum(begin + steps, blocks)
    return tile, begin, stop


@gluon.jit
def _copy_blocks(  # type: ignore[no-untyped-def]
    a_desc, b_desc, a_tiles, b_tiles, full, empty, N, tiles_m, tiles_n, steps, blocks,
    GATED: gl.constexpr, GROUPS: gl.constexpr, HALVES: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """Copy the tiles that the groups multiply: of a, and the halves of b."""
    step = 0
    tiles = tiles_m * tiles_n
    for index in range(gl.program_id(0), tiles * SPLIT_K, gl.num_programs(0)):
        tile, begin, stop = _turn(index, tiles, steps, blocks, SPLIT_K)
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP_M)
        first, second = _columns(tile_n, N, HALVES, GATED, BLOCK_N)
        for i in range(begin, stop):
            slot = step % STAGES
            bar = full.index(slot)
            b_tile = b_tiles.index(slot)
            hopper.mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            hopper.mbarrier.expect(bar, a_desc.block_type.nbytes + HALVES * b_desc.block_type.nbytes)
            load_tile(a_desc, [tile_m * GROUPS * ROWS, i * BLOCK], bar, a_tiles.index(slot))
            load_tile(b_desc, [first, i * BLOCK], bar, b_tile.slice(0, BLOCK_N))
            if HALVES == 2:
                load_tile(b_desc, [second, i * BLOCK], bar, b_tile.slice(BLOCK_N, BLOCK_N))
            step += 1


@gluon.jit
def _store_floats(c_ptr, y, rows, first, M, columns):  # type: ignore[no-untyped-def]
    """Store float32 of the columns from `first` on, without a tile in shared memory."""
    across = first + gl.arange(0, y.shape[1], layout=gl.SliceLayout(0, y.type.layout))
    inside = gl.expand_dims(rows < M, 1) & gl.expand_dims(across < columns, 0)
    gl.store(c_ptr + (gl.expand_dims(rows.to(gl.int64) * columns, 1) + gl.expand_dims(across, 0)), y, mask=inside)


@gluon.jit
def _multiply_blocks(  # type: ignore[no-untyped-def]
    me: gl.constexpr, c, scale_a_ptr, scale_b_ptr, bias_ptr, a_tiles, b_tiles, c_tiles, full, empty, M, N, tiles_m,
    tiles_n, steps, blocks, stride_am, stride_ak, stride_bn, stride_bk, stride_bias, slope,
    BIAS: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr, FLOATS: gl.constexpr, UNIT: gl.constexpr,
    GROUPS: gl.constexpr, HALVES: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr,
):  # fmt: skip
    """A group's rows of each tile, rounded once; of a part of K, float32 sums."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    # the gate of a part of K is not known yet
    GATES: gl.constexpr = GATED and SPLIT_K == 1
    # registers are few: a stride that is 1 takes none
    along_a = 1 if UNIT else stride_ak
    along_b = 1 if UNIT else stride_bk
    # columns of b
    end = 2 * N if GATED else N
    # false, which ptxas does not know: else it takes other registers for each half's sums, and spills (triton 3.6)
    onto = blocks < 0
    step = 0
    tiles = tiles_m * tiles_n
    for index in range(gl.program_id(0), tiles * SPLIT_K, gl.num_programs(0)):
        tile, begin, stop = _turn(index, tiles, steps, blocks, SPLIT_K)
        tile_m, tile_n = _place(tile, tiles_m, tiles_n, GROUP_M)
        first, second = _columns(tile_n, N, HALVES, GATED, BLOCK_N)
        row = (tile_m * GROUPS + me) * ROWS
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
        # the last row's and column's scales in place of those that there are not: what they scale is not stored
        at_a = scale_a_ptr + gl.minimum(rows, M - 1) * stride_am + begin * along_a
        at_left = scale_b_ptr + first // BLOCK * stride_bn + begin * along_b
        between = (gl.minimum(second, end - 1) // BLOCK - first // BLOCK) * stride_bn
        left = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SUMS)
        right = left
        sums = left
        for _ in range(begin, stop):
            slot = step % STAGES
            scale_a = gl.load(at_a)
            scale_left = gl.load(at_left)
            hopper.mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            a = a_tiles.index(slot).slice(me * ROWS, ROWS)
            b_tile = b_tiles.index(slot)
            # a block's sums begin at zero
            sums = hopper.warpgroup_mma(a, b_tile.slice(0, BLOCK_N).permute((1, 0)), sums, use_acc=onto, is_async=True)
            sums = hopper.warpgroup_mma_wait(0, deps=[sums])
            if HALVES == 2:
                scale_right = gl.load(at_left + between)
                # waits for nothing: sums that are added before the other half begins leave it their registers
                left = hopper.warpgroup_mma_wait(0, deps=[left + sums * gl.expand_dims(scale_a * scale_left, 1)])
                sums = hopper.warpgroup_mma(
                    a, b_tile.slice(BLOCK_N, BLOCK_N).permute((1, 0)), sums, use_acc=onto, is_async=True
                )
                sums = hopper.warpgroup_mma_wait(0, deps=[sums])
                hopper.mbarrier.arrive(empty.index(slot), count=1)
                right = right + sums * gl.expand_dims(scale_a * scale_right, 1)
            else:
                hopper.mbarrier.arrive(empty.index(slot), count=1)
                left = left + sums * gl.expand_dims(scale_a * scale_left, 1)
            at_a += along_a
            at_left += along_b
            step += 1
        if GATES:
            y = _ended(left, bias_ptr, first, N, stride_bias, 1.0, slope, BIAS, ACTIVATION)
            y *= _ended(right, bias_ptr, second, end, stride_bias, 1.0, slope, BIAS, NONE)
            if FLOATS:
                _store_floats(c, y, rows, first, M, N)
            else:
                _store(c, c_tiles.index(me), y, row, first, SUMS)
        else:
            y = _ended(left, bias_ptr, first, end, stride_bias, 1.0, slope, BIAS, ACTIVATION)
            if FLOATS:
                # a part of K behind the other
                _store_floats(c + (index // tiles).to(gl.int64) * M * end, y, rows, first, M, end)
            else:
                _store(c, c_tiles.index(me), y, row, first, SUMS)
            if HALVES == 2:
                y = _ended(right, bias_ptr, second, end, stride_bias, 1.0, slope, BIAS, ACTIVATION)
                if FLOATS:
                    _store_floats(c + (index // tiles).to(gl.int64) * M * end, y, rows, second, M, end)
                else:
                    _store(c, c_tiles.index(me), y, row, second, SUMS)
    if not FLOATS:
        hopper.tma.store_wait(0)


@gluon.jit(do_not_specialize=[
    "M", "N", "tiles_m", "tiles_n", "steps", "blocks", "stride_am", "stride_ak", "stride_bn", "stride_bk",
    "stride_bias", "slope",
])  # fmt: skip
def _hopper_blocks_kernel(  # type: ignore[no-untyped-def]
    a_desc, b_desc, c, scale_a_ptr, scale_b_ptr, bias_ptr, M, N, tiles_m, tiles_n, steps, blocks, stride_am, stride_ak,
    stride_bn, stride_bk, stride_bias, slope,
    BIAS: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr, FLOATS: gl.constexpr, UNIT: gl.constexpr,
    GROUPS: gl.constexpr, HALVES: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
    SPLIT_K: gl.constexpr,
):  # fmt: skip
    """act((scale_a · a) @ (scale_b · b) + bias) in tiles [64 · GROUPS, HALVES · BLOCK_N].

    GATED (two halves): act(gate) · up, in tiles of BLOCK_N columns. SPLIT_K above 1: sums of each part of K, of gate
    and up too, without what follows.

    Descriptors are over a [M, K], the weight [N, K] (GATED: [2N, K], gate before up) and the result [M, N], with blocks
    of 64 · GROUPS × 128, BLOCK_N × 128 and 64 × BLOCK_N. FLOATS: c is float32 [SPLIT_K, M, N] (GATED parts: [.., 2N])
    in place of a descriptor. scale_a [M, blocks] and scale_b [blocks, ceil(N / 128)] by any strides; bias [N] (GATED:
    [2N]) of any float. `steps`: blocks of a part of K.
    """
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [STAGES, GROUPS * ROWS, BLOCK], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [STAGES, HALVES * BLOCK_N, BLOCK], b_desc.layout)
    c_tiles = a_tiles
    if not FLOATS:
        c_tiles = gl.allocate_shared_memory(c.dtype, [GROUPS, ROWS, BLOCK_N], c.layout)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, GROUPS)
    hopper.fence_async_shared()
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_copy_blocks, (
                    a_desc, b_desc, a_tiles, b_tiles, full, empty, N, tiles_m, tiles_n, steps, blocks,
                    GATED, GROUPS, HALVES, BLOCK_N, GROUP_M, STAGES, SPLIT_K,
                )),
                (_multiply_blocks, (
                    gl.constexpr(0), c, scale_a_ptr, scale_b_ptr, bias_ptr, a_tiles, b_tiles, c_tiles, full, empty, M,
                    N, tiles_m, tiles_n, steps, blocks, stride_am, stride_ak, stride_bn, stride_bk, stride_bias, slope,
                    BIAS, ACTIVATION, GATED, FLOATS, UNIT, GROUPS, HALVES, BLOCK_N, GROUP_M, STAGES, SPLIT_K,
                )),
                (_multiply_blocks, (
                    gl.constexpr(1), c, scale_a_ptr, scale_b_ptr, bias_ptr, a_tiles, b_tiles, c_tiles, full, empty, M,
                    N, tiles_m, tiles_n, steps, blocks, stride_am, stride_ak, stride_bn, stride_bk, stride_bias, slope,
                    BIAS, ACTIVATION, GATED, FLOATS, UNIT, GROUPS, HALVES, BLOCK_N, GROUP_M, STAGES, SPLIT_K,
                )),
            ],
            [4, 4],
            [MULTIPLIES, MULTIPLIES],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_copy_blocks, (
                    a_desc, b_desc, a_tiles, b_tiles, full, empty, N, tiles_m, tiles_n, steps, blocks,
                    GATED, GROUPS, HALVES, BLOCK_N, GROUP_M, STAGES, SPLIT_K,
                )),
                (_multiply_blocks, (
                    gl.constexpr(0), c, scale_a_ptr, scale_b_ptr, bias_ptr, a_tiles, b_tiles, c_tiles, full, empty, M,
                    N, tiles_m, tiles_n, steps, blocks, stride_am, stride_ak, stride_bn, stride_bk, stride_bias, slope,
                    BIAS, ACTIVATION, GATED, FLOATS, UNIT, GROUPS, HALVES, BLOCK_N, GROUP_M, STAGES, SPLIT_K,
                )),
            ],
            [4],
            [MULTIPLIES],
        )  # fmt: skip
