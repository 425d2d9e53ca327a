"""The GEMM kernel for sm_90 whose epilogue has warps of its own: one group copies, two multiply, a fourth ends tiles.

The groups that multiply leave their sums in shared memory, rounded to 16 bits, and go on; the fourth adds the bias,
applies the activation and stores a tile while the next one is multiplied. So sums are rounded before the bias is added
and once more at the end, as in PyTorch's linear layer and activation. A linear layer of 16,384 rows, 3,072 columns and
K = 768 with a bias and GELU takes 146.5 us on one H200, where cuBLAS and PyTorch's GELU take 186.8 (2026-11-27,
`2026-11-27_tune_gelu.jsonl.gz`).

Tiles as of `kernel_hopper`: two halves of BLOCK_N columns of b, gate and up, or columns side by side.
"""

from __future__ import annotations

from wavecrest.ops._gemm.kernel_hopper import GROUPS, _copy, _place
from wavecrest.ops.common.activation import GELU, activate, gelu_16
from wavecrest.ops.common.hopper import barriers
from wavecrest.ops.common.triton import gl, gluon, hopper, in_units, load_tile, store_tile

# registers a thread: of the groups that multiply, which hold 128 sums, and of the one that ends tiles. the one that
# copies keeps 24 of 512
SUMS_ONLY = gl.constexpr(168)
ENDS = gl.constexpr(152)


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
    # parts of a half, one or two
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
    """All of x, or the first or second half of its columns; no register moves."""
    if PARTS == 1:
        return x
    else:
        left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
        if i == 0:
            return left
        else:
            return right


@gluon.jit
def _end(  # type: ignore[no-untyped-def]
    c_desc, r_desc, bias_ptr, c_tiles, r_tiles, summed, ended, arrived, N, tiles_m, tiles_n, stride_bias, slope,
    BIAS: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr, RESIDUAL: gl.constexpr, GROUP_M: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The epilogue of each tile, and its stores."""
    ROWS: gl.constexpr = BLOCK_M // GROUPS
    WIDTH: gl.constexpr = c_tiles.shape[2]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    # parts of a group's sums, and of its result
    SUMS: gl.constexpr = 2 * BLOCK_N // WIDTH
    PARTS: gl.constexpr = SUMS // 2 if GATED else SUMS
    # a part is worked out in a loop of 32 rows, 16 values a thread: 8 and 32 were slower (H200, 2026-11-27, no record)
    UNITS: gl.constexpr = ROWS // 32
    STORED: gl.constexpr = c_desc.layout
    units = in_units(c_tiles, c_tiles.shape[0] * UNITS, 32, WIDTH, STORED)
    r_units = in_units(r_tiles, r_tiles.shape[0] * UNITS, 32, WIDTH, STORED)
    for index in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        turn = index // gl.num_programs(0)
        tile_m, tile_n = _place(index, tiles_m, tiles_n, GROUP_M)
        first = tile_n * PARTS * WIDTH
        # a part's bias is loaded while the part before is worked out
        bias = _bias(bias_ptr, first, N, stride_bias, BIAS, WIDTH, LAYOUT)
        up_bias = _bias(bias_ptr, N + first, 2 * N, stride_bias, BIAS and GATED, WIDTH, LAYOUT)
        # and its residual copied, to one of two places
        if RESIDUAL:
            _copy_residual(r_desc, r_tiles, arrived, tile_m * BLOCK_M, first, 0)
        for me in gl.static_range(GROUPS):
            row = tile_m * BLOCK_M + me * ROWS
            hopper.mbarrier.wait(summed.index(me), turn & 1)
            for j in gl.static_range(PARTS):
                after = first + (j + 1) % PARTS * WIDTH
                next_bias = _bias(bias_ptr, after, N, stride_bias, BIAS, WIDTH, LAYOUT)
                next_up_bias = _bias(bias_ptr, N + after, 2 * N, stride_bias, BIAS and GATED, WIDTH, LAYOUT)
                if RESIDUAL:
                    if me * PARTS + j + 1 < GROUPS * PARTS:
                        next_row = tile_m * BLOCK_M + (me * PARTS + j + 1) // PARTS * ROWS
                        _copy_residual(r_desc, r_tiles, arrived, next_row, after, (me * PARTS + j + 1) % 2)
                    hopper.mbarrier.wait(
                        arrived.index((me * PARTS + j) % 2), (turn * PARTS + (me * PARTS + j) // 2) & 1
                    )
                for i in range(UNITS):
                    unit = units.index((me * SUMS + j) * UNITS + i)
                    y = unit.load(LAYOUT).to(gl.float32) + bias
                    y = gelu_16(y) if ACTIVATION == GELU else activate(y, slope, ACTIVATION)
                    if GATED:
                        up = units.index((me * SUMS + PARTS + j) * UNITS + i).load(LAYOUT)
                        y = y * (up.to(gl.float32) + up_bias)
                    if RESIDUAL:
                        y += r_units.index((me * PARTS + j) % 2 * UNITS + i).load(LAYOUT).to(gl.float32)
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
def _copy_residual(r_desc, r_tiles, arrived, row, column, place: gl.constexpr):  # type: ignore[no-untyped-def]
    hopper.mbarrier.expect(arrived.index(place), r_desc.block_type.nbytes)
    load_tile(r_desc, [row, column], arrived.index(place), r_tiles.index(place))


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
def _hopper_epilogue_kernel(  # type: ignore[no-untyped-def]
    a_desc, b_desc, c_desc, r_desc, bias_ptr, N, tiles_m, tiles_n, steps, stride_bias, alpha, slope,
    BIAS: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr, RESIDUAL: gl.constexpr, GROUP_M: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """act(alpha · a @ b + bias) + residual, tiles and arguments as of `_hopper_gemm_kernel`.

    Descriptors over the result and the residual have blocks of BLOCK_M / 2 × 64.
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
    # two parts of the residual
    arrived = barriers(2, 1)
    R_TILES: gl.constexpr = 2 if RESIDUAL else 1
    r_tiles = gl.allocate_shared_memory(c_desc.dtype, [R_TILES, BLOCK_M // GROUPS, WIDTH], c_desc.layout)
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
                c_desc, r_desc, bias_ptr, c_tiles, r_tiles, summed, ended, arrived, N, tiles_m, tiles_n, stride_bias,
                slope, BIAS, ACTIVATION, GATED, RESIDUAL, GROUP_M, BLOCK_M, BLOCK_N,
            )),
        ],
        [4, 4, 4],
        [SUMS_ONLY, SUMS_ONLY, ENDS],
    )  # fmt: skip
