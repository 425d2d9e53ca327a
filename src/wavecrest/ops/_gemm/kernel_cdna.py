"""The GEMM kernels for gfx950 and gfx942: four quarters of a tile, multiplied in turn.

Gluon, as Triton's own compiler (triton 3.6) has the matrix unit wait for the LDS it reads in the same step. Here a step
has four regions, one a quarter of the tile. While a region multiplies, it reads from LDS what the next one needs, and a
half of the tile of a or b of two steps on takes the place of what all have read: on gfx950 it is copied straight to
LDS, on gfx942 it goes through registers, for which it is 8-bit floats alone that leave room.
"""

from __future__ import annotations

from wavecrest.ops._gemm.kernel import epilogue
from wavecrest.ops.common.device import remap_xcd, swizzle_tile
from wavecrest.ops.common.triton import gl, gluon, laid_out

# rows of a, or columns of b, of a half of a tile
HALF = gl.constexpr(128)
# results of 16 bytes, which a lane stores at a time
STORED = gl.constexpr(8)
# chunks of 16 bytes of a row of a half of a tile: on gfx950, and on gfx942
ROW, SHORT_ROW = gl.constexpr(8), gl.constexpr(4)


@gluon.jit
def _copy(tile, base, offs, columns, limit, EVEN_K: gl.constexpr):  # type: ignore[no-untyped-def]
    """Begin to copy a half of a tile to LDS; zeros from column `limit` on."""
    if EVEN_K:
        gl.amd.cdna4.async_copy.buffer_load_to_shared(tile, base, offs)
    else:
        gl.amd.cdna4.async_copy.buffer_load_to_shared(tile, base, offs, mask=columns < limit)
    gl.amd.cdna4.async_copy.commit_group()


@gluon.jit
def _read(tile, LAYOUT: gl.constexpr, SWAPPED: gl.constexpr, CHUNK: gl.constexpr):  # type: ignore[no-untyped-def]
    """A half of a tile as an operand; its copy has been waited for.

    Chunks lie in an order in which no two lanes, of those that LDS serves at a time, read from one bank.
    """
    TILE: gl.constexpr = gl.SwizzledSharedLayout(CHUNK, 2, ROW, [1, 0])
    tile = laid_out(tile, tile.shape[0], tile.shape[1], TILE)
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
def _multiply(a, b, acc, CHUNK: gl.constexpr):  # type: ignore[no-untyped-def]
    """acc + a @ b; 8-bit floats by the matrix instruction that has scales, here of 1: it is twice as fast as others."""
    if CHUNK == 16:
        FORMAT: gl.constexpr = "e4m3" if a.dtype == gl.float8e4nv else "e5m2"
        return gl.amd.cdna4.mfma_scaled(a, None, FORMAT, b, None, FORMAT, acc)
    return gl.amd.cdna3.mfma(a, b, acc)


@gluon.jit
def _made(acc):  # type: ignore[no-untyped-def]
    """A quarter of a tile, whose matrix instructions end here.

    LLVM moves scaled ones to where sums are stored, behind branches, and spills their operands until then.
    """
    return gl.inline_asm_elementwise("", "=v,0", [acc], gl.float32, is_pure=False, pack=1)


@gluon.jit
def _quarter(  # type: ignore[no-untyped-def]
    acc, c_ptr, scales, after, row, col, M, N, SCALE_A: gl.constexpr, SCALE_B: gl.constexpr, BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Store a quarter of a tile."""
    OUT: gl.constexpr = gl.BlockedLayout([1, STORED], [4, 16], [8, 1], [1, 0])
    y = gl.convert_layout(acc, OUT)
    rows = row + gl.arange(0, HALF, layout=gl.SliceLayout(1, OUT))
    cols = col + gl.arange(0, HALF, layout=gl.SliceLayout(0, OUT))
    epilogue(y, y, c_ptr, scales, after, 0, rows, cols, M, N, SCALE_A, SCALE_B, BIAS, ACTIVATION, False, False, 0.0)


@gluon.jit
def _finish(  # type: ignore[no-untyped-def]
    top_left, top_right, bottom_left, bottom_right, c_ptr, others, strides, row, col, M, N, alpha, slope,
    SCALE_A: gl.constexpr, SCALE_B: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Store a tile, one quarter after the other."""
    bias_ptr, scale_a_ptr, scale_b_ptr = others
    stride_bias, stride_sam, stride_sbn = strides
    scales = (scale_a_ptr, scale_b_ptr, bias_ptr, stride_sam, 0, stride_sbn, 0)
    after = (bias_ptr, bias_ptr, bias_ptr, stride_bias, 0, 0, 0, alpha, slope)
    _quarter(top_left, c_ptr, scales, after, row, col, M, N, SCALE_A, SCALE_B, BIAS, ACTIVATION)
    _quarter(top_right, c_ptr, scales, after, row, col + HALF, M, N, SCALE_A, SCALE_B, BIAS, ACTIVATION)
    _quarter(bottom_left, c_ptr, scales, after, row + HALF, col, M, N, SCALE_A, SCALE_B, BIAS, ACTIVATION)
    _quarter(bottom_right, c_ptr, scales, after, row + HALF, col + HALF, M, N, SCALE_A, SCALE_B, BIAS, ACTIVATION)


# values that do not make a kernel anew when they change
SIZES = [
    "M", "n_units", "k_units", "tiles_m", "tiles_n", "stride_a", "stride_b", "stride_bias", "stride_sam", "stride_sbn",
    "alpha", "slope",
]  # fmt: skip


@gluon.jit(do_not_specialize=SIZES)
def _cdna_kernel(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, c_ptr, bias_ptr, scale_a_ptr, scale_b_ptr, M, n_units, k_units, tiles_m, tiles_n, stride_a, stride_b,
    stride_bias, stride_sam, stride_sbn, alpha, slope,
    EVEN_K: gl.constexpr, ALIGN_N: gl.constexpr, CHUNK: gl.constexpr, SCALE_A: gl.constexpr, SCALE_B: gl.constexpr,
    BIAS: gl.constexpr, ACTIVATION: gl.constexpr, XCDS: gl.constexpr,
    GROUP_M: gl.constexpr, MATRIX: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """A tile of 256 × 256 results on gfx950; a and b contiguous along K.

    CHUNK: elements of 16 bytes, the unit of K and of strides. MATRIX: rows of a matrix instruction, which multiplies as
    many columns of K as there are: for 8-bit floats twice the bytes of 16-bit ones. The last tiles of rows and of
    columns begin where they fit, and make results of the tiles before again, with the same bits: nothing is masked.
    """
    N = n_units * ALIGN_N
    K = k_units * CHUNK
    stride_a *= CHUNK
    stride_b *= CHUNK
    DEEP: gl.constexpr = 512 // MATRIX if CHUNK == 8 else 2048 // MATRIX
    SUMS: gl.constexpr = gl.amd.AMDMFMALayout(4, [MATRIX, MATRIX, DEEP], True, [2, 4])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, CHUNK)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, CHUNK)
    # 64 lanes copy 1,024 bytes that are side by side in LDS
    COPY: gl.constexpr = gl.BlockedLayout([1, CHUNK], [64 // ROW, ROW], [8, 1], [1, 0])
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
    columns = ((places // CHUNK) ^ (lines // 2 % ROW)) * CHUNK
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
    b_left = _read(lefts.index(0), B, True, CHUNK)
    a_top = _read(tops.index(0), A, False, CHUNK)
    # two steps, as then each has its place in LDS
    for _ in range(gl.cdiv(K, 2 * BLOCK_K) - 1):
        for i in gl.static_range(2):
            # copies are waited for in their order: five are behind the one that is read
            _wait(5, M)
            a_bottom = _read(bottoms.index(i), A, False, CHUNK)
            _copy(lefts.index(i), left, b_offs, columns, limit, EVEN_K)
            top_left = _multiply(a_top, b_left, top_left, CHUNK)
            _wait(5, M)
            b_right = _read(rights.index(i), B, True, CHUNK)
            _copy(tops.index(i), top, a_offs, columns, limit, EVEN_K)
            bottom_left = _multiply(a_bottom, b_left, bottom_left, CHUNK)
            _wait(5, M)
            b_left = _read(lefts.index(1 - i), B, True, CHUNK)
            _copy(bottoms.index(i), bottom, a_offs, columns, limit, EVEN_K)
            top_right = _multiply(a_top, b_right, top_right, CHUNK)
            _wait(5, M)
            a_top = _read(tops.index(1 - i), A, False, CHUNK)
            _copy(rights.index(i), right, b_offs, columns, limit, EVEN_K)
            bottom_right = _multiply(a_bottom, b_right, bottom_right, CHUNK)
            a_offs += BLOCK_K
            b_offs += BLOCK_K
            limit -= BLOCK_K
    # the last two steps, behind which nothing is copied
    _wait(5, M)
    a_bottom = _read(bottoms.index(0), A, False, CHUNK)
    top_left = _multiply(a_top, b_left, top_left, CHUNK)
    _wait(4, M)
    b_right = _read(rights.index(0), B, True, CHUNK)
    bottom_left = _multiply(a_bottom, b_left, bottom_left, CHUNK)
    _wait(3, M)
    b_left = _read(lefts.index(1), B, True, CHUNK)
    top_right = _multiply(a_top, b_right, top_right, CHUNK)
    _wait(2, M)
    a_top = _read(tops.index(1), A, False, CHUNK)
    bottom_right = _multiply(a_bottom, b_right, bottom_right, CHUNK)
    _wait(1, M)
    a_bottom = _read(bottoms.index(1), A, False, CHUNK)
    top_left = _multiply(a_top, b_left, top_left, CHUNK)
    _wait(0, M)
    b_right = _read(rights.index(1), B, True, CHUNK)
    bottom_left = _multiply(a_bottom, b_left, bottom_left, CHUNK)
    top_right = _multiply(a_top, b_right, top_right, CHUNK)
    bottom_right = _multiply(a_bottom, b_right, bottom_right, CHUNK)
    if CHUNK == 16:
        top_left, top_right = _made(top_left), _made(top_right)
        bottom_left, bottom_right = _made(bottom_left), _made(bottom_right)
    _finish(
        top_left, top_right, bottom_left, bottom_right, c_ptr, (bias_ptr, scale_a_ptr, scale_b_ptr),
        (stride_bias, stride_sam, stride_sbn), row, col, M, N, alpha, slope, SCALE_A, SCALE_B, BIAS, ACTIVATION,
    )  # fmt: skip


@gluon.jit
def _fetch(base, offs, columns, limit, EVEN_K: gl.constexpr):  # type: ignore[no-untyped-def]
    """A half of a tile on its way to registers; zeros from column `limit` on.

    They are the hardware's for what is masked: with an `other` of zeros the load is waited for at once, to choose.
    """
    if EVEN_K:
        return gl.amd.cdna3.buffer_load(base, offs)
    return gl.amd.cdna3.buffer_load(base, offs, mask=columns < limit)


@gluon.jit
def _operand(tile, LAYOUT: gl.constexpr, SWAPPED: gl.constexpr):  # type: ignore[no-untyped-def]
    """A half of a tile in LDS as an operand."""
    if SWAPPED:
        tile = tile.permute((1, 0))
    return tile.load(LAYOUT)


@gluon.jit
def _begin(M):  # type: ignore[no-untyped-def]
    """Begin a region: see `_wait`. Barriers are the compiler's, where a half is stored that was read."""
    gl.inline_asm_elementwise("s_mov_b64 exec, -1", "={exec},s", [M], gl.int64, is_pure=False, pack=1)


@gluon.jit(do_not_specialize=SIZES)
def _cdna3_kernel(  # type: ignore[no-untyped-def]
    a_ptr, b_ptr, c_ptr, bias_ptr, scale_a_ptr, scale_b_ptr, M, n_units, k_units, tiles_m, tiles_n, stride_a, stride_b,
    stride_bias, stride_sam, stride_sbn, alpha, slope,
    EVEN_K: gl.constexpr, ALIGN_N: gl.constexpr, CHUNK: gl.constexpr, SCALE_A: gl.constexpr, SCALE_B: gl.constexpr,
    BIAS: gl.constexpr, ACTIVATION: gl.constexpr, XCDS: gl.constexpr,
    GROUP_M: gl.constexpr, MATRIX: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """As `_cdna_kernel`, of 8-bit floats on gfx942: steps half as long, so that LDS has room for two."""
    N = n_units * ALIGN_N
    K = k_units * CHUNK
    stride_a *= CHUNK
    stride_b *= CHUNK
    SUMS: gl.constexpr = gl.amd.AMDMFMALayout(3, [MATRIX, MATRIX, 512 // MATRIX], True, [2, 4])
    # what a lane reads at a time is for two matrix instructions
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, CHUNK)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, CHUNK)
    COPY: gl.constexpr = gl.BlockedLayout([1, CHUNK], [64 // SHORT_ROW, SHORT_ROW], [8, 1], [1, 0])
    TILE: gl.constexpr = gl.SwizzledSharedLayout(CHUNK, 2, SHORT_ROW, [1, 0])
    index = remap_xcd(gl.program_id(0), gl.num_programs(0), XCDS)
    tile_m, tile_n = swizzle_tile(index, tiles_m, tiles_n, GROUP_M)
    row = gl.minimum(tile_m * (2 * HALF), M - 2 * HALF)
    col = gl.minimum(tile_n * (2 * HALF), N - 2 * HALF)
    a_type: gl.constexpr = a_ptr.dtype.element_ty
    b_type: gl.constexpr = b_ptr.dtype.element_ty
    # of an even step and of an odd one, each by itself: the compiler sees which are stored over
    top0 = gl.allocate_shared_memory(a_type, [HALF, BLOCK_K], TILE)
    top1 = gl.allocate_shared_memory(a_type, [HALF, BLOCK_K], TILE)
    bottom0 = gl.allocate_shared_memory(a_type, [HALF, BLOCK_K], TILE)
    bottom1 = gl.allocate_shared_memory(a_type, [HALF, BLOCK_K], TILE)
    left0 = gl.allocate_shared_memory(b_type, [HALF, BLOCK_K], TILE)
    left1 = gl.allocate_shared_memory(b_type, [HALF, BLOCK_K], TILE)
    right0 = gl.allocate_shared_memory(b_type, [HALF, BLOCK_K], TILE)
    right1 = gl.allocate_shared_memory(b_type, [HALF, BLOCK_K], TILE)
    lines = gl.arange(0, HALF, layout=gl.SliceLayout(1, COPY))[:, None]
    columns = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, COPY))[None, :]
    a_offs = lines * stride_a + columns
    b_offs = lines * stride_b + columns
    top = a_ptr + row.to(gl.int64) * stride_a
    left = b_ptr + col.to(gl.int64) * stride_b
    bottom = top + stride_a.to(gl.int64) * HALF
    right = left + stride_b.to(gl.int64) * HALF
    left0.store(_fetch(left, b_offs, columns, K, EVEN_K))
    top0.store(_fetch(top, a_offs, columns, K, EVEN_K))
    bottom0.store(_fetch(bottom, a_offs, columns, K, EVEN_K))
    right0.store(_fetch(right, b_offs, columns, K, EVEN_K))
    k = BLOCK_K
    left1.store(_fetch(left, b_offs + k, columns, K - k, EVEN_K))
    top1.store(_fetch(top, a_offs + k, columns, K - k, EVEN_K))
    bottom1.store(_fetch(bottom, a_offs + k, columns, K - k, EVEN_K))
    right1.store(_fetch(right, b_offs + k, columns, K - k, EVEN_K))
    k = gl.minimum(2 * BLOCK_K, K - BLOCK_K) if EVEN_K else 2 * BLOCK_K
    new_left = _fetch(left, b_offs + k, columns, K - k, EVEN_K)
    new_top = _fetch(top, a_offs + k, columns, K - k, EVEN_K)
    new_bottom = _fetch(bottom, a_offs + k, columns, K - k, EVEN_K)
    new_right = _fetch(right, b_offs + k, columns, K - k, EVEN_K)
    top_left = gl.zeros([HALF, HALF], gl.float32, SUMS)
    bottom_left = gl.zeros([HALF, HALF], gl.float32, SUMS)
    top_right = gl.zeros([HALF, HALF], gl.float32, SUMS)
    bottom_right = gl.zeros([HALF, HALF], gl.float32, SUMS)
    b_left = _operand(left0, B, True)
    a_top = _operand(top0, A, False)
    for _ in range(gl.cdiv(K, 2 * BLOCK_K) - 1):
        for i in gl.static_range(2):
            # behind the last step nothing is needed: it is fetched again
            k = gl.minimum(k + BLOCK_K, K - BLOCK_K) if EVEN_K else k + BLOCK_K
            _begin(M)
            (left0 if i == 0 else left1).store(new_left)
            a_bottom = _operand(bottom0 if i == 0 else bottom1, A, False)
            new_left = _fetch(left, b_offs + k, columns, K - k, EVEN_K)
            top_left = gl.amd.cdna3.mfma(a_top, b_left, top_left)
            _begin(M)
            (top0 if i == 0 else top1).store(new_top)
            b_right = _operand(right0 if i == 0 else right1, B, True)
            new_top = _fetch(top, a_offs + k, columns, K - k, EVEN_K)
            bottom_left = gl.amd.cdna3.mfma(a_bottom, b_left, bottom_left)
            _begin(M)
            (bottom0 if i == 0 else bottom1).store(new_bottom)
            b_left = _operand(left1 if i == 0 else left0, B, True)
            new_bottom = _fetch(bottom, a_offs + k, columns, K - k, EVEN_K)
            top_right = gl.amd.cdna3.mfma(a_top, b_right, top_right)
            _begin(M)
            (right0 if i == 0 else right1).store(new_right)
            a_top = _operand(top1 if i == 0 else top0, A, False)
            new_right = _fetch(right, b_offs + k, columns, K - k, EVEN_K)
            bottom_right = gl.amd.cdna3.mfma(a_bottom, b_right, bottom_right)
    _begin(M)
    a_bottom = _operand(bottom0, A, False)
    top_left = gl.amd.cdna3.mfma(a_top, b_left, top_left)
    _begin(M)
    b_right = _operand(right0, B, True)
    bottom_left = gl.amd.cdna3.mfma(a_bottom, b_left, bottom_left)
    _begin(M)
    b_left = _operand(left1, B, True)
    top_right = gl.amd.cdna3.mfma(a_top, b_right, top_right)
    _begin(M)
    a_top = _operand(top1, A, False)
    bottom_right = gl.amd.cdna3.mfma(a_bottom, b_right, bottom_right)
    _begin(M)
    a_bottom = _operand(bottom1, A, False)
    top_left = gl.amd.cdna3.mfma(a_top, b_left, top_left)
    _begin(M)
    b_right = _operand(right1, B, True)
    bottom_left = gl.amd.cdna3.mfma(a_bottom, b_left, bottom_left)
    top_right = gl.amd.cdna3.mfma(a_top, b_right, top_right)
    bottom_right = gl.amd.cdna3.mfma(a_bottom, b_right, bottom_right)
    _finish(
        top_left, top_right, bottom_left, bottom_right, c_ptr, (bias_ptr, scale_a_ptr, scale_b_ptr),
        (stride_bias, stride_sam, stride_sbn), row, col, M, N, alpha, slope, SCALE_A, SCALE_B, BIAS, ACTIVATION,
    )  # fmt: skip
