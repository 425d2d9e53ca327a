"""The GEMM kernel for sm_90 of one row and a weight in 4 or 8 bits, by programs that stay and take tile after tile.

Gluon. Loads and products are those of `kernel_hopper_words.py`; three things differ. There are as many programs as the
multiprocessors hold at a time: none begins late, and while one sums up a tile, its loads for the next are under way.
Each program makes the digits of the row itself, in shared memory, and waits for no launch that does. Two halves of a
line of the weight, 64 bytes each, are as two rows of it, each with digits of its own, as one row's digits are four of
the eight columns of a product. With three of a layer's four GEMMs by these programs, those of Llama 3.1 8B in int4 take
44.6 µs in place of 51.0 (a chain in a graph, H200, 2026-11-29, no record).
"""

from __future__ import annotations

from wavecrest.ops._gemm.kernel_digits import DIGITS, numbers_of, sum_and_largest
from wavecrest.ops._gemm.kernel_hopper_words import (
    BLOCK,
    WHOLE_BITS,
    WIDTH,
    along,
    bytes_of,
    ended,
    multiplied,
    words_at,
)
from wavecrest.ops.common.activation import activate
from wavecrest.ops.common.device import magnitude, pdl_launch_dependents, pdl_wait, prefetch_l2
from wavecrest.ops.common.triton import gl, gluon, in_order

# halves of a line, and columns of a product: the digits of each half
SPLIT, COLUMNS = gl.constexpr(2), gl.constexpr(8)
# values of a row that a lane has in registers at a time, while digits are made
HELD = gl.constexpr(32)
# 16-bit values of a sector of memory
SECTOR = gl.constexpr(16)


@gluon.jit
def _row(a, gain_ptr, k, K, NORMED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Values of a row at k, and times the norm's weight."""
    x = gl.load(a + k, mask=k < K, other=0.0).to(gl.float32)
    y = x
    if NORMED:
        y *= gl.load(gain_ptr + k, mask=k < K, other=0.0).to(gl.float32)
    return x, y


@gluon.jit
def _digits(  # type: ignore[no-untyped-def]
    a, gain_ptr, K, NORM_EPS: gl.constexpr, NORMED: gl.constexpr, INT4: gl.constexpr, UNIT: gl.constexpr,
    BLOCK_K: gl.constexpr, num_warps: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Digits of a row in shared memory, int8, and what digit 0 and the others are worth.

    [steps · halves of bytes, warps, 2 · 4, 64], as `_digits_kernel` makes them. BLOCK_K: a power of two, no less than K
    and what all warps take in a step. Of long rows no more is in registers than a lane's HELD values: they are read a
    second time.
    """
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [num_warps], [0])
    CHUNK: gl.constexpr = min(BLOCK_K, HELD * 32 * num_warps)
    k = gl.arange(0, CHUNK, layout=LANES)
    x, y = _row(a, gain_ptr, k, K, NORMED)
    size = magnitude(y)
    squares = x * x
    for chunk in gl.static_range(1, BLOCK_K // CHUNK):
        x, y = _row(a, gain_ptr, chunk * CHUNK + k, K, NORMED)
        size = gl.maximum(size, magnitude(y))
        squares += x * x
    factor = 1.0
    if NORMED:
        total, most = gl.reduce((squares, size), 0, sum_and_largest)
        factor = gl.rsqrt(total / K.to(gl.float32) + NORM_EPS)
    else:
        most = gl.max(size, 0)
    # of a chunk
    STEPS: gl.constexpr = CHUNK // (SPLIT * UNIT * num_warps)
    PLACES: gl.constexpr = 2 * STEPS if INT4 else STEPS
    IN_ORDER: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    tiles = gl.allocate_shared_memory(gl.int8, [BLOCK_K // CHUNK * PLACES, num_warps, COLUMNS, 64], IN_ORDER)
    lowest = 0.0
    others = 0.0
    for chunk in gl.static_range(BLOCK_K // CHUNK):
        if CHUNK < BLOCK_K:
            x, y = _row(a, gain_ptr, chunk * CHUNK + k, K, NORMED)
            size = magnitude(y)
        number, lowest, others = numbers_of(y, size, most)
        four = bytes_of(number)
        if INT4:
            # of 64 columns the first 32 are in low halves of bytes, the others in high ones
            four = gl.reshape(four, [STEPS, num_warps, SPLIT, 2, 2, 32, 4])
            four = gl.permute(four, (0, 4, 1, 2, 6, 3, 5))
        else:
            four = gl.permute(gl.reshape(four, [STEPS, num_warps, SPLIT, 64, 4]), (0, 1, 2, 4, 3))
        tiles.slice(chunk * PLACES, PLACES).store(gl.reshape(four, [PLACES, num_warps, COLUMNS, 64]))
    return in_order(tiles, TILE), lowest * factor, others * factor


@gluon.jit
def _summed(acc, worth, OUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """The sums [columns] of those of digits [warps, 2 · columns, 8]; `worth`: of a digit, 0 of the other half's."""
    # not times 0 alone: a row with infinities has a worth of infinity, and that times 0 is NaN
    total = gl.where(worth == 0.0, 0.0, acc.to(gl.float32) * worth)
    total = gl.sum(total, axis=2)
    total = gl.sum(gl.reshape(total, [total.shape[0], total.shape[1] // SPLIT, SPLIT]), axis=2)
    return gl.convert_layout(gl.sum(total, axis=0), OUT)


@gluon.jit(
    do_not_specialize=["N", "blocks", "tiles", "stride_bn", "stride_sn", "stride_bias", "stride_rn", "alpha", "slope"]
)
def _hopper_row_kernel(  # type: ignore[no-untyped-def]
    a, gain_ptr, b, c_ptr, bias_ptr, residual_ptr, scale_ptr, N, blocks, tiles, stride_bn, stride_sn, stride_bias,
    stride_rn, alpha, slope,
    INT4: gl.constexpr, STEPS: gl.constexpr, NORMED: gl.constexpr, NORM_EPS: gl.constexpr, BLOCK_K: gl.constexpr,
    BIAS: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
    EARLY: gl.constexpr, BLOCK_N: gl.constexpr, AHEAD: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """c [N] of a [K], 16-bit floats, which is normalised first if NORMED; b's bytes lie K behind K, in `blocks` of 128.

    A program takes every num_programs-th of `tiles` of BLOCK_N columns, each in STEPS steps of all warps, a line of 128
    bytes of each column in each warp. BLOCK_K: as `_digits` wants it. AHEAD: steps that are loaded while as many are
    multiplied. stride_bn is in units of 16 bytes. GATED: b has N columns of gate, then N of up.
    """
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    VALUES: gl.constexpr = gl.DotOperandLayout(0, SUMS, WIDTH)
    OF_A: gl.constexpr = gl.DotOperandLayout(1, SUMS, WIDTH)
    # halves of lines of a step in a warp; words and values of one
    PARTS: gl.constexpr = SPLIT * BLOCK_N
    WORDS: gl.constexpr = 16
    UNIT: gl.constexpr = 128 if INT4 else 64
    MORE_N: gl.constexpr = [] if PARTS == 16 else [[0, 16, 0]] if PARTS == 32 else [[0, 16, 0], [0, 32, 0]]
    OF_WARPS: gl.constexpr = (
        [[1, 0, 0], [2, 0, 0]]
        if num_warps == 4
        else [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
        if num_warps == 8
        else [[1, 0, 0], [2, 0, 0], [4, 0, 0], [8, 0, 0]]
    )
    # a lane: four words side by side, of two halves; four lanes side by side
    AS_LOADED: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 8, 0]] + MORE_N,
        [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        OF_WARPS, [], [num_warps, PARTS, WORDS],
    )  # fmt: skip
    CHUNKS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 8, 0]] + MORE_N,
        [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        OF_WARPS, [], [num_warps, PARTS, WORDS // 4],
    )  # fmt: skip
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    mine = (tiles - program + programs - 1) // programs * STEPS
    units = blocks * (BLOCK // UNIT)
    # of b's words
    warp = along(num_warps, 0, CHUNKS)
    part = along(PARTS, 1, CHUNKS)
    chunk = along(WORDS // 4, 2, CHUNKS)
    column = part // SPLIT
    unit = warp * SPLIT + part % SPLIT
    words = b.to(gl.pointer_type(gl.int32), bitcast=True) + (
        column.to(gl.int64) * stride_bn * 4 + (unit * WORDS + chunk * 4)
    )
    up = N.to(gl.int64) * stride_bn * 4
    # of the scales
    warp_s = along(num_warps, 0, SUMS)
    part_s = along(PARTS, 1, SUMS)
    column_s = part_s // SPLIT
    unit_s = warp_s * SPLIT + part_s % SPLIT
    scales = scale_ptr + (column_s.to(gl.int64) * stride_sn + unit_s)
    up_s = N.to(gl.int64) * stride_sn
    HALVES: gl.constexpr = 2 if GATED else 1
    # units of all warps
    ALL: gl.constexpr = SPLIT * num_warps

    # of int8 all products are added as whole numbers, of int4 those of a block, which has a scale
    NUMBER: gl.constexpr = gl.float32 if INT4 else gl.int32
    whole = gl.full([num_warps, PARTS, COLUMNS], WHOLE_BITS if INT4 else 0, gl.int32, layout=SUMS)
    acc = gl.zeros([num_warps, PARTS, COLUMNS], NUMBER, layout=SUMS)
    acc_up = gl.zeros([num_warps, PARTS, COLUMNS], NUMBER, layout=SUMS)
    now = ()
    scale = ()
    for i in gl.static_range(AHEAD):
        from_n = (program + i // STEPS * programs).to(gl.int64) * BLOCK_N
        from_k = i % STEPS * ALL
        inside = (i < mine) & (from_n + column < N) & (unit + from_k < units)
        inside_s = (i < mine) & (from_n + column_s < N) & (unit_s + from_k < units)
        for half in gl.static_range(HALVES):
            place = half * up + from_n * stride_bn * 4 + from_k * WORDS
            now = now + (words_at(words + place, inside, AS_LOADED),)  # type: ignore[assignment]
            if INT4:
                place_s = half * up_s + from_n * stride_sn + from_k
                scale = scale + (gl.load(scales + place_s, mask=inside_s, other=0.0),)  # type: ignore[assignment]
    if NORMED and EARLY:
        sectors = gl.arange(0, BLOCK_K // SECTOR, layout=gl.BlockedLayout([1], [32], [num_warps], [0])) * SECTOR
        prefetch_l2(gain_ptr + sectors, sectors < blocks * BLOCK)
    if EARLY:
        # the weight is nobody's result: it is on its way before the kernel in front has ended
        pdl_wait(True)
    # there is room for the next one's programs beside these, and they wait for the end of these
    pdl_launch_dependents(PDL)
    TILE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    digits, lowest, others = _digits(
        a, gain_ptr, blocks * BLOCK, NORM_EPS, NORMED, INT4, UNIT, BLOCK_K, num_warps, TILE
    )
    # digit i of a half is worth 256^i, nothing of the other half
    digit = along(COLUMNS, 2, SUMS)
    times = ((127 + 8 * (digit % DIGITS)) << 23).to(gl.float32, bitcast=True)
    worth = gl.where(digit % DIGITS == 0, lowest, others * times)
    worth = gl.where(digit // DIGITS == part_s % SPLIT, worth, 0.0)
    OUT: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    n = gl.arange(0, BLOCK_N, layout=OUT)
    for step in range((mine + AHEAD - 1) // AHEAD):
        later = ()
        scale_later = ()
        for i in gl.static_range(AHEAD):
            it = (step + 1) * AHEAD + i
            from_n = (program + it // STEPS * programs).to(gl.int64) * BLOCK_N
            from_k = it % STEPS * ALL
            inside = (it < mine) & (from_n + column < N) & (unit + from_k < units)
            inside_s = (it < mine) & (from_n + column_s < N) & (unit_s + from_k < units)
            for half in gl.static_range(HALVES):
                place = half * up + from_n * stride_bn * 4 + from_k * WORDS
                later = later + (words_at(words + place, inside, AS_LOADED),)  # type: ignore[assignment]
                if INT4:
                    place_s = half * up_s + from_n * stride_sn + from_k
                    scale_later = scale_later + (  # type: ignore[assignment]
                        gl.load(scales + place_s, mask=inside_s, other=0.0),
                    )
        for i in gl.static_range(AHEAD):
            it = step * AHEAD + i
            at = it % STEPS
            x_low = digits.index(at * 2 if INT4 else at).permute((0, 2, 1)).load(OF_A)
            x_high = x_low
            if INT4:
                x_high = digits.index(at * 2 + 1).permute((0, 2, 1)).load(OF_A)
            for half in gl.static_range(HALVES):
                block_scale = scale[HALVES * i + half] if INT4 else whole
                if half == 0:
                    acc = multiplied(acc, now[HALVES * i], x_low, x_high, whole, block_scale, INT4, VALUES)
                else:
                    acc_up = multiplied(acc_up, now[2 * i + 1], x_low, x_high, whole, block_scale, INT4, VALUES)
            if at == STEPS - 1:
                first = (program + it // STEPS * programs) * BLOCK_N
                mask = (it < mine) & (first + n < N)
                y = _summed(acc, worth, OUT)
                y = ended(y, scale_ptr, bias_ptr, first, n, mask, stride_sn, stride_bias, alpha, INT4, BIAS)
                y = activate(y, slope, ACTIVATION)
                if GATED:
                    total = _summed(acc_up, worth, OUT)
                    y *= ended(
                        total, scale_ptr, bias_ptr, N + first, n, mask, stride_sn, stride_bias, alpha, INT4, BIAS
                    )
                if RESIDUAL:
                    beside = (first + n).to(gl.int64) * stride_rn
                    y += gl.load(residual_ptr + beside, mask=mask, other=0.0).to(gl.float32)
                gl.store(c_ptr + (first + n), y.to(c_ptr.dtype.element_ty), mask=mask)
                acc = gl.zeros([num_warps, PARTS, COLUMNS], NUMBER, layout=SUMS)
                acc_up = gl.zeros([num_warps, PARTS, COLUMNS], NUMBER, layout=SUMS)
        now = later
        scale = scale_later
