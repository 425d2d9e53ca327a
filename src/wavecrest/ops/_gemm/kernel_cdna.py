"""The GEMM kernel for gfx950, whose loads go straight to LDS: four quarters of a tile, multiplied in turn.

Gluon, as Triton's own compiler (triton 3.6) loads through registers there, and has the matrix unit wait for the LDS it
reads in the same step. Here a step has four regions, one a quarter of the tile. While a region multiplies, it reads
from LDS what the next one needs, and a half of the tile of a or b of two steps on is copied where all have read.
"""

from __future__ import annotations

from wavecrest.ops._gemm.kernel import NO_SCALE, epilogue
from wavecrest.ops.common.device import remap_xcd, swizzle_tile
from wavecrest.ops.common.triton import gl, gluon

# rows of a, or columns of b, of a half of a tile
HALF = gl.constexpr(128)
# elements of 16 bytes, which a lane copies and reads at a time
CHUNK = gl.constexpr(8)


@gluon.jit
def _copy(tile, base, offs, columns, limit, EVEN_K: gl.constexpr):  # type: ignore[no-untyped-def]
    """Begin to copy a half of a tile to LDS; zeros from column `limit` on."""
    if EVEN_K:
        gl.amd.cdna4.async_copy.buffer_load_to_shared(tile, base, offs)
    else:
        gl.amd.cdna4.async_copy.buffer_load_to_shared(tile, base, offs, mask=columns < limit)
    gl.amd.cdna4.async_copy.commit_group()


@gluon.jit
def _read(tile, LAYOUT: gl.constexpr, SWAPPED: gl.constexpr):  # type: ignore[no-untyped-def]
    """A half of a tile as an operand; its copy has been waited for.

    Chunks lie in an order in which no two lanes, of those that LDS serves at a time, read from one bank.
    """
    TILE: gl.constexpr = gl.SwizzledSharedLayout(CHUNK, 2, CHUNK, [1, 0])
    tile = tile._reinterpret(tile.dtype, tile.shape, TILE)
    if SWAPPED:
        tile = tile.permute((1, 0))
    # as the wait is in the source, LLVM need not wait for every copy under way
    return gl.amd.cdna4.async_copy.load_shared_relaxed(tile, LAYOUT)


@gluon.jit
def _wait(copies: gl.constexpr, M):  # type: ignore[no-untyped-def]
    """Begin a region: all copies but the last `copies` have ended, for all waves.

    LLVM schedules no instruction across a change of EXEC, which is as it was: else it moves matrix instructions away
    from the reads that they hide, behind the next barrier.
    """
    gl.inline_asm_elementwise("s_mov_b64 exec, -1", "={exec},s", [M], gl.int64, is_pure=False, pack=1)
    gl.amd.cdna4.async_copy.wait_group(copies)


@gluon.jit
def _finish(acc, c_ptr, scales, after, row, col, M, N, BIAS: gl.constexpr, ACTIVATION: gl.constexpr):  # type: ignore[no-untyped-def]
    """Store a quarter of a tile."""
    OUT: gl.constexpr = gl.BlockedLayout([1, CHUNK], [4, 16], [8, 1], [1, 0])
    y = gl.convert_layout(acc, OUT)
    rows = row + gl.arange(0, HALF, layout=gl.SliceLayout(1, OUT))
    cols = col + gl.arange(0, HALF, layout=gl.SliceLayout(0, OUT))
    epilogue(y, y, c_ptr, scales, after, 0, rows, cols, M, N, NO_SCALE, NO_SCALE, BIAS, ACTIVATION, False, False, 0.0)


@gluon.jit(
    do_not_specialize=[
        "M", "n_units", "k_units", "tiles_m", "tiles_n", "stride_a", "stride_b", "stride_bias", "alpha", "slope"
    ]
)  # fmt: skip
def _cdna_kernel(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, c_ptr, bias_ptr, M, n_units, k_units, tiles_m, tiles_n, stride_a, stride_b, stride_bias, alpha, slope,
    EVEN_K: gl.constexpr, ALIGN_N: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr, XCDS: gl.constexpr,
    GROUP_M: gl.constexpr, MATRIX: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """A tile of 256 × 256 results; a and b contiguous along K.

    K and strides come in units of CHUNK. MATRIX: rows of a matrix instruction. The last tiles of rows and of columns
    begin where they fit, and make results of the tiles before again, with the same bits: nothing is masked.
    """
    N = n_units * ALIGN_N
    K = k_units * CHUNK
    stride_a *= CHUNK
    stride_b *= CHUNK
    SUMS: gl.constexpr = gl.amd.AMDMFMALayout(4, [MATRIX, MATRIX, 512 // MATRIX], True, [2, 4])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, CHUNK)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, CHUNK)
    # 64 lanes copy 1,024 bytes that are side by side in LDS
    COPY: gl.constexpr = gl.BlockedLayout([1, CHUNK], [512 // BLOCK_K, BLOCK_K // CHUNK], [8, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    index = remap_xcd(gl.program_id(0), gl.num_programs(0), XCDS)
    tile_m, tile_n = swizzle_tile(index, tiles_m, tiles_n, GROUP_M)
    row = gl.minimum(tile_m * (2 * HALF), M - 2 * HALF)
    col = gl.minimum(tile_n * (2 * HALF), N - 2 * HALF)
    a_type: gl.constexpr = a_ptr.dtype.element_ty
    # the upper and lower half of the rows of a, the left and right half of the columns of b; each of two steps
    tops = gl.allocate_shared_memory(a_type, [2, HALF, BLOCK_K], FLAT)
    bottoms = gl.allocate_shared_memory(a_type, [2, HALF, BLOCK_K], FLAT)
    lefts = gl.allocate_shared_memory(a_type, [2, HALF, BLOCK_K], FLAT)
    rights = gl.allocate_shared_memory(a_type, [2, HALF, BLOCK_K], FLAT)
    lines = gl.arange(0, HALF, layout=gl.SliceLayout(1, COPY))[:, None]
    places = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, COPY))[None, :]
    # the chunk of K that a lane copies to its place, see `_read`
    columns = ((places // CHUNK) ^ (lines // 2 % CHUNK)) * CHUNK
    a_offs = lines * stride_a + columns + places % CHUNK
    b_offs = lines * stride_b + columns + places % CHUNK
    top = a_ptr + row.to(gl.int64) * stride_a
    left = b_ptr + col.to(gl.int64) * stride_b
    bottom = top + stride_a.to(gl.int64) * HALF
    right = left + stride_b.to(gl.int64) * HALF
    limit = K
    for i in gl.static_range(2):
        _copy(lefts.index(i), left, b_offs, columns, limit, EVEN_K)
        _copy(tops.index(i), top, a_offs, columns, limit, EVEN_K)
        _copy(bottoms.index(i), bottom, a_offs, columns, limit, EVEN_K)
        _copy(rights.index(i), right, b_offs, columns, limit, EVEN_K)
        a_offs += BLOCK_K
        b_offs += BLOCK_K
        limit -= BLOCK_K
    top_left = gl.zeros([HALF, HALF], gl.float32, SUMS)
    bottom_left = gl.zeros([HALF, HALF], gl.float32, SUMS)
    top_right = gl.zeros([HALF, HALF], gl.float32, SUMS)
    bottom_right = gl.zeros([HALF, HALF], gl.float32, SUMS)
    _wait(6, M)
    b_left = _read(lefts.index(0), B, True)
    a_top = _read(tops.index(0), A, False)
    # two steps, as then each has its place in LDS
    for _ in range(gl.cdiv(K, 2 * BLOCK_K) - 1):
        for i in gl.static_range(2):
            # copies are waited for in their order: five are behind the one that is read
            _wait(5, M)
            a_bottom = _read(bottoms.index(i), A, False)
            _copy(lefts.index(i), left, b_offs, columns, limit, EVEN_K)
            top_left = gl.amd.cdna3.mfma(a_top, b_left, top_left)
            _wait(5, M)
            b_right = _read(rights.index(i), B, True)
            _copy(tops.index(i), top, a_offs, columns, limit, EVEN_K)
            bottom_left = gl.amd.cdna3.mfma(a_bottom, b_left, bottom_left)
            _wait(5, M)
            b_left = _read(lefts.index(1 - i), B, True)
            _copy(bottoms.index(i), bottom, a_offs, columns, limit, EVEN_K)
            top_right = gl.amd.cdna3.mfma(a_top, b_right, top_right)
            _wait(5, M)
            a_top = _read(tops.index(1 - i), A, False)
            _copy(rights.index(i), right, b_offs, columns, limit, EVEN_K)
            bottom_right = gl.amd.cdna3.mfma(a_bottom, b_right, bottom_right)
            a_offs += BLOCK_K
            b_offs += BLOCK_K
            limit -= BLOCK_K
    # the last two steps, behind which nothing is copied
    _wait(5, M)
    a_bottom = _read(bottoms.index(0), A, False)
    top_left = gl.amd.cdna3.mfma(a_top, b_left, top_left)
    _wait(4, M)
    b_right = _read(rights.index(0), B, True)
    bottom_left = gl.amd.cdna3.mfma(a_bottom, b_left, bottom_left)
    _wait(3, M)
    b_left = _read(lefts.index(1), B, True)
    top_right = gl.amd.cdna3.mfma(a_top, b_right, top_right)
    _wait(2, M)
    a_top = _read(tops.index(1), A, False)
    bottom_right = gl.amd.cdna3.mfma(a_bottom, b_right, bottom_right)
    _wait(1, M)
    a_bottom = _read(bottoms.index(1), A, False)
    top_left = gl.amd.cdna3.mfma(a_top, b_left, top_left)
    _wait(0, M)
    b_right = _read(rights.index(1), B, True)
    bottom_left = gl.amd.cdna3.mfma(a_bottom, b_left, bottom_left)
    top_right = gl.amd.cdna3.mfma(a_top, b_right, top_right)
    bottom_right = gl.amd.cdna3.mfma(a_bottom, b_right, bottom_right)
    scales = (bias_ptr, bias_ptr, bias_ptr, 0, 0, 0, 0)
    after = (bias_ptr, bias_ptr, bias_ptr, stride_bias, 0, 0, 0, alpha, slope)
    _finish(top_left, c_ptr, scales, after, row, col, M, N, BIAS, ACTIVATION)
    _finish(top_right, c_ptr, scales, after, row, col + HALF, M, N, BIAS, ACTIVATION)
    _finish(bottom_left, c_ptr, scales, after, row + HALF, col, M, N, BIAS, ACTIVATION)
    _finish(bottom_right, c_ptr, scales, after, row + HALF, col + HALF, M, N, BIAS, ACTIVATION)
