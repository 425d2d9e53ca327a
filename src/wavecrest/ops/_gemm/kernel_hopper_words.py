"""The GEMM kernel for sm_90 of up to 8 rows and a weight in 4 or 8 bits, which goes from memory to the matrix unit.

Gluon. A lane loads 16 bytes of a row of the weight. Widened in its registers they are the columns of K that the matrix
unit expects of this lane, as a is loaded in the same order: no value passes through shared memory, and none is moved
between lanes. A 4-bit value takes 2.5 instructions, in the kernel over tiles 2.8, and 5.2 without matrix units (loops
of sm_90's code counted for one row, triton 3.6; no record). Of `num_warps` warps each takes every num_warps-th block of
K; their sums are added at the end.
"""

from __future__ import annotations

from wavecrest.ops.common.activation import activate
from wavecrest.ops.common.device import pdl_launch_dependents, pdl_wait
from wavecrest.ops.common.ptx import INT4_WORD_BF16, INT4_WORD_FP16, INT8_WORD_BF16, INT8_WORD_FP16
from wavecrest.ops.common.triton import gl, gluon, mma

# columns of K of a step of a warp, and rows of a that the matrix unit takes at a time
BLOCK = gl.constexpr(128)
ROWS = gl.constexpr(8)
# values of K that a lane holds side by side
WIDTH = gl.constexpr(8)


@gluon.jit
def _int4_values(word, FLOAT16: gl.constexpr):  # type: ignore[no-untyped-def]
    """The eight values of each word less 8: of the low halves of its bytes, then of the high ones."""
    if FLOAT16:
        values = gl.inline_asm_elementwise(
            INT4_WORD_FP16, "=h,=h,=h,=h,=h,=h,=h,=h,r", [word],
            (gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16, gl.float16),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        values = gl.inline_asm_elementwise(
            INT4_WORD_BF16, "=h,=h,=h,=h,=h,=h,=h,=h,r", [word],
            (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
            is_pure=True, pack=1,
        )  # fmt: skip
    return values


@gluon.jit
def _int8_values(word, FLOAT16: gl.constexpr):  # type: ignore[no-untyped-def]
    """The four values of each word."""
    if FLOAT16:
        values = gl.inline_asm_elementwise(
            INT8_WORD_FP16, "=h,=h,=h,=h,r", [word], (gl.float16, gl.float16, gl.float16, gl.float16),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        values = gl.inline_asm_elementwise(
            INT8_WORD_BF16, "=h,=h,=h,=h,r", [word], (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
            is_pure=True, pack=1,
        )  # fmt: skip
    return values


@gluon.jit
def _in_a_row(v0, v1, v2, v3, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Four values of each word behind each other, words behind words, as the matrix unit takes them."""
    four = gl.join(gl.join(v0, v2), gl.join(v1, v3))
    return gl.convert_layout(gl.reshape(four, [v0.shape[0], v0.shape[1], 4 * v0.shape[2]]), LAYOUT)


@gluon.jit
def _product(  # type: ignore[no-untyped-def]
    word, x_low, x_high, INT4: gl.constexpr, LAYOUT: gl.constexpr, SUMS: gl.constexpr
):
    """The sums of a block's products [warps, columns, rows]; `word` [warps, columns, words] in memory's order."""
    warps: gl.constexpr = word.shape[0]
    columns: gl.constexpr = word.shape[1]
    words: gl.constexpr = word.shape[2]
    zero = gl.zeros([warps, columns, ROWS], gl.float32, layout=SUMS)
    float16: gl.constexpr = x_low.dtype == gl.float16
    # the 16 bytes of a lane are four words: two side by side, then the other lanes' first two, then the other two
    if INT4:
        word = gl.permute(gl.reshape(word, [warps, columns, 4, 2, 2]), [0, 1, 3, 2, 4])
        l0, l1, l2, l3, h0, h1, h2, h3 = _int4_values(gl.reshape(word, [warps, columns, words]), float16)
        part = mma(_in_a_row(l0, l1, l2, l3, LAYOUT), x_low, zero)
        part = mma(_in_a_row(h0, h1, h2, h3, LAYOUT), x_high, part)
    else:
        word = gl.permute(gl.reshape(word, [warps, columns, 2, 4, 2, 2]), [0, 1, 2, 4, 3, 5])
        v0, v1, v2, v3 = _int8_values(gl.reshape(word, [warps, columns, words]), float16)
        part = mma(_in_a_row(v0, v1, v2, v3, LAYOUT), x_low, zero)
    return part


@gluon.jit
def _ended(  # type: ignore[no-untyped-def]
    total, scale_ptr, bias_ptr, first, columns, mask, stride_sn, stride_bias, alpha, INT4: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """alpha · scale · total + bias of the columns of b from `first` on; scales of groups are in the sums."""
    y = total * alpha
    if not INT4:
        y *= gl.load(scale_ptr + (first + columns).to(gl.int64) * stride_sn, mask=mask, other=0.0)
    if BIAS:
        y += gl.load(bias_ptr + (first + columns).to(gl.int64) * stride_bias, mask=mask, other=0.0).to(gl.float32)
    return y


@gluon.jit(
    do_not_specialize=[
        "M", "N", "blocks", "steps", "stride_am", "stride_bn", "stride_sn", "stride_bias", "stride_rm", "stride_rn",
        "alpha", "slope",
    ]
)  # fmt: skip
def _hopper_words_kernel(  # type: ignore[no-untyped-def]
    a, b, c_ptr, bias_ptr, residual_ptr, scale_ptr, M, N, blocks, steps, stride_am, stride_bn, stride_sn, stride_bias,
    stride_rm, stride_rn, alpha, slope,
    INT4: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr, RESIDUAL: gl.constexpr,
    PDL: gl.constexpr, EARLY: gl.constexpr, BLOCK_N: gl.constexpr, AHEAD: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of c, of M rows; b's bytes lie K behind K, in `blocks` of 128 columns of K.

    AHEAD: blocks of each warp in a step; those of the next step are loaded while these are multiplied. stride_am and
    stride_bn are in units of 16 bytes. GATED: b has N columns of gate, then N of up.
    """
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    VALUES: gl.constexpr = gl.DotOperandLayout(0, SUMS, WIDTH)
    OF_A: gl.constexpr = gl.DotOperandLayout(1, SUMS, WIDTH)
    # words of a block in a row of b, and columns of K of one product: of 4-bit values the low halves, or the high ones
    WORDS: gl.constexpr = 16 if INT4 else 32
    INNER: gl.constexpr = 64 if INT4 else 128
    MORE_K: gl.constexpr = [] if INT4 else [[0, 0, 16]]
    MORE_N: gl.constexpr = [[0, 16, 0]] if BLOCK_N == 32 else []
    OF_WARPS: gl.constexpr = (
        [[1, 0, 0], [2, 0, 0]]
        if num_warps == 4
        else [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
        if num_warps == 8
        else [[1, 0, 0], [2, 0, 0], [4, 0, 0], [8, 0, 0]]
    )
    # a lane: four words side by side, of two rows; four lanes side by side
    AS_LOADED: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 8, 0]] + MORE_K + MORE_N,
        [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        OF_WARPS, [], [num_warps, BLOCK_N, WORDS],
    )  # fmt: skip
    first = gl.program_id(0) * BLOCK_N
    # of b's words
    warp = gl.expand_dims(
        gl.expand_dims(gl.arange(0, num_warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, AS_LOADED))), 1), 2
    )
    column = gl.expand_dims(
        gl.expand_dims(first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, AS_LOADED))), 0), 2
    )
    place = gl.expand_dims(
        gl.expand_dims(gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(0, AS_LOADED))), 0), 0
    )
    words = b.to(gl.pointer_type(gl.int32), bitcast=True) + (column.to(gl.int64) * stride_bn * 4 + place)
    in_b = column < N
    up = N.to(gl.int64) * stride_bn * 4
    # of a: the columns of K in the order of the words
    warp_a = gl.expand_dims(
        gl.expand_dims(gl.arange(0, num_warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, OF_A))), 1), 2
    )
    j = gl.arange(0, INNER, layout=gl.SliceLayout(0, gl.SliceLayout(2, OF_A)))
    if INT4:
        # a unit of 64 columns in 32 bytes, which are two lanes' 16
        k = (j % 8) + ((j // 8) % 2) * 16 + ((j // 16) % 2) * 64 + (j // 32) * 8
    else:
        k = (j % 8) + ((j // 8) % 4) * 16 + ((j // 32) % 2) * 8 + (j // 64) * 64
    row = gl.expand_dims(gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(0, OF_A))), 0), 0)
    rows = a + (row.to(gl.int64) * stride_am * 8 + gl.expand_dims(gl.expand_dims(k, 0), 2))
    in_a = row < M
    # of the scales
    warp_s = gl.expand_dims(
        gl.expand_dims(gl.arange(0, num_warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, SUMS))), 1), 2
    )
    column_s = gl.expand_dims(
        gl.expand_dims(first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, SUMS))), 0), 2
    )
    scales = scale_ptr + column_s.to(gl.int64) * stride_sn
    in_s = column_s < N
    up_s = N.to(gl.int64) * stride_sn
    HALVES: gl.constexpr = 2 if GATED else 1

    acc = gl.zeros([num_warps, BLOCK_N, ROWS], gl.float32, layout=SUMS)
    acc_up = gl.zeros([num_warps, BLOCK_N, ROWS], gl.float32, layout=SUMS)
    now = ()
    scale = ()
    for i in gl.static_range(AHEAD):
        block = warp + i * num_warps
        block_s = warp_s + i * num_warps
        for half in gl.static_range(HALVES):
            now = now + (gl.load(words + (half * up + block * WORDS), mask=in_b & (block < blocks), other=0),)  # type: ignore[assignment]
            if INT4:
                scale = scale + (  # type: ignore[assignment]
                    gl.load(scales + (half * up_s + block_s), mask=in_s & (block_s < blocks), other=0.0),
                )
    if EARLY:
        # the weight is nobody's result: it is on its way before the kernel in front has ended
        pdl_wait(True)
    for step in range(steps):
        later = ()
        scale_later = ()
        for i in gl.static_range(AHEAD):
            block = warp + ((step + 1) * AHEAD + i) * num_warps
            block_s = warp_s + ((step + 1) * AHEAD + i) * num_warps
            for half in gl.static_range(HALVES):
                later = later + (gl.load(words + (half * up + block * WORDS), mask=in_b & (block < blocks), other=0),)  # type: ignore[assignment]
                if INT4:
                    scale_later = scale_later + (  # type: ignore[assignment]
                        gl.load(scales + (half * up_s + block_s), mask=in_s & (block_s < blocks), other=0.0),
                    )
        for i in gl.static_range(AHEAD):
            block_a = warp_a + (step * AHEAD + i) * num_warps
            x_low = gl.load(rows + block_a * BLOCK, mask=in_a & (block_a < blocks), other=0.0)
            x_high = x_low
            if INT4:
                x_high = gl.load(rows + (block_a * BLOCK + 32), mask=in_a & (block_a < blocks), other=0.0)
            for half in gl.static_range(HALVES):
                part = _product(now[HALVES * i + half], x_low, x_high, INT4, VALUES, SUMS)
                if INT4:
                    part *= scale[HALVES * i + half]
                if half == 0:
                    acc += part
                else:
                    acc_up += part
        now = later
        scale = scale_later
    pdl_launch_dependents(PDL)

    total = gl.sum(acc, axis=0)
    OUT: gl.constexpr = gl.SliceLayout(0, SUMS)
    columns = gl.expand_dims(first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, OUT)), 1)
    out_rows = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT)), 0)
    mask = columns < N
    y = _ended(total, scale_ptr, bias_ptr, 0, columns, mask, stride_sn, stride_bias, alpha, INT4, BIAS)
    y = activate(y, slope, ACTIVATION)
    if GATED:
        total = gl.sum(acc_up, axis=0)
        y *= _ended(total, scale_ptr, bias_ptr, N, columns, mask, stride_sn, stride_bias, alpha, INT4, BIAS)
    mask = mask & (out_rows < M)
    if RESIDUAL:
        beside = out_rows.to(gl.int64) * stride_rm + columns.to(gl.int64) * stride_rn
        y += gl.load(residual_ptr + beside, mask=mask, other=0.0).to(gl.float32)
    gl.store(c_ptr + (out_rows.to(gl.int64) * N + columns), y.to(c_ptr.dtype.element_ty), mask=mask)
