"""The GEMM kernel for sm_90 of up to 8 rows and a weight in 4 or 8 bits, which goes from memory to the matrix unit.

Gluon. The rows of a come as digits of 8 bits (`kernel_digits.py`), so that the matrix unit multiplies whole numbers: an
8-bit weight needs no instruction before it, eight 4-bit values take three. Rows' digits are columns of a product: it
has eight, which are two rows. A lane loads 16 bytes of a row of the weight, which are what the matrix unit expects of
this lane, as digits are loaded in the same order: no value passes through shared memory, and none is moved between
lanes. Of `num_warps` warps each takes every num_warps-th block of K; their sums are added at the end.
"""

from __future__ import annotations

from wavecrest.ops._gemm.kernel_digits import DIGITS
from wavecrest.ops.common.activation import activate
from wavecrest.ops.common.device import load_past_l1, pdl_launch_dependents, pdl_wait
from wavecrest.ops.common.ptx import INT4_WORD
from wavecrest.ops.common.triton import gl, gluon, mma

# columns of K of a step of a warp
BLOCK = gl.constexpr(128)
# values of K that a lane holds side by side
WIDTH = gl.constexpr(16)
# a float32 whose last bit is 1: a whole number that is added to its bits is added to it. Sums of a block's products
# are below 2^22, and a conversion would have a quarter of the rate
WHOLE, WHOLE_BITS = gl.constexpr(12582912.0), gl.constexpr(0x4B400000)
# what a value of 4 bits is multiplied by, as it is the upper half of a byte
SHIFTED = gl.constexpr(16.0)


@gluon.jit
def along(SIZE: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """0 to SIZE - 1 along one of the three dimensions of a layout."""
    if DIM == 0:
        i = gl.arange(0, SIZE, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
        i = gl.expand_dims(gl.expand_dims(i, 1), 2)
    elif DIM == 1:
        i = gl.arange(0, SIZE, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
        i = gl.expand_dims(gl.expand_dims(i, 0), 2)
    else:
        i = gl.arange(0, SIZE, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
        i = gl.expand_dims(gl.expand_dims(i, 0), 0)
    return i


@gluon.jit
def bytes_of(word):  # type: ignore[no-untyped-def]
    """The four bytes of each word, [..., 2, 2]."""
    v0 = word.to(gl.int8)
    v1 = (word >> 8).to(gl.int8)
    v2 = (word >> 16).to(gl.int8)
    v3 = (word >> 24).to(gl.int8)
    return gl.join(gl.join(v0, v2), gl.join(v1, v3))


@gluon.jit
def _values(word, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """The four bytes of each word behind each other, words behind words, as the matrix unit takes them."""
    values = gl.reshape(bytes_of(word), [word.shape[0], word.shape[1], 4 * word.shape[2]])
    return gl.convert_layout(values, LAYOUT)


@gluon.jit
def words_at(chunks, inside, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Four words of each address that is `inside`, words behind words."""
    w0, w1, w2, w3 = load_past_l1(chunks, inside)
    four = gl.join(gl.join(w0, w2), gl.join(w1, w3))
    return gl.convert_layout(gl.reshape(four, [w0.shape[0], w0.shape[1], 4 * w0.shape[2]]), LAYOUT)


@gluon.jit
def _nibbles(word):  # type: ignore[no-untyped-def]
    """The eight values of each word less 8, times 16, as bytes: of its bytes' low halves, and of the high ones."""
    low, high = gl.inline_asm_elementwise(INT4_WORD, "=r,=r,r", [word], (gl.int32, gl.int32), is_pure=True, pack=1)
    return low, high


@gluon.jit
def multiplied(  # type: ignore[no-untyped-def]
    acc, words, x_low, x_high, whole, scale, INT4: gl.constexpr, VALUES: gl.constexpr
):  # fmt: skip
    """acc with the products of words of the weight and digits: of int8 in whole numbers, of int4 times a block's scale.

    x_low, x_high: digits for the low and the high halves of bytes; of int8 the first alone. whole: `WHOLE_BITS`.
    """
    if INT4:
        low, high = _nibbles(words)
        part = mma(_values(low, VALUES), x_low, whole)
        part = mma(_values(high, VALUES), x_high, part)
        acc += (part.to(gl.float32, bitcast=True) - WHOLE) * scale
    else:
        acc = mma(_values(words, VALUES), x_low, acc)
    return acc


@gluon.jit
def _summed(acc, worth, OUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """The sums of all warps [columns, rows] of those of digits [warps, columns, 4 · rows]; `worth`: of each digit."""
    total = gl.sum(acc, axis=0).to(gl.float32) * worth
    total = gl.sum(gl.reshape(total, [total.shape[0], total.shape[1] // DIGITS, DIGITS]), axis=2)
    return gl.convert_layout(total, OUT)


@gluon.jit
def ended(  # type: ignore[no-untyped-def]
    total, scale_ptr, bias_ptr, first, columns, mask, stride_sn, stride_bias, alpha, INT4: gl.constexpr,
    BIAS: gl.constexpr,
):  # fmt: skip
    """alpha · scale · total + bias of the columns of b from `first` on; scales of groups are in the sums."""
    if INT4:
        y = total * (alpha / SHIFTED)
    else:
        y = total * alpha
        y *= gl.load(scale_ptr + (first + columns).to(gl.int64) * stride_sn, mask=mask, other=0.0)
    if BIAS:
        y += gl.load(bias_ptr + (first + columns).to(gl.int64) * stride_bias, mask=mask, other=0.0).to(gl.float32)
    return y


@gluon.jit(
    do_not_specialize=[
        "M", "N", "blocks", "steps", "stride_bn", "stride_sn", "stride_bias", "stride_rm", "stride_rn", "alpha",
        "slope",
    ]
)  # fmt: skip
def _hopper_words_kernel(  # type: ignore[no-untyped-def]
    digits, b, c_ptr, bias_ptr, residual_ptr, scale_ptr, M, N, blocks, steps, stride_bn, stride_sn, stride_bias,
    stride_rm, stride_rn, alpha, slope,
    INT4: gl.constexpr, COLUMNS: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
    RESIDUAL: gl.constexpr, PDL: gl.constexpr, EARLY: gl.constexpr, BLOCK_N: gl.constexpr, AHEAD: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of c, of M rows; b's bytes lie K behind K, in `blocks` of 128 columns of K.

    digits: int8 [M · 4, K], then float32 [M · 4], of `_digits_kernel`. COLUMNS: of a product, no fewer than M · 4.
    AHEAD: blocks of each warp in a step; those of the next step are loaded while these are multiplied. stride_bn is in
    units of 16 bytes. GATED: b has N columns of gate, then N of up.
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
    # of the first of each four
    CHUNKS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 8, 0]] + ([] if INT4 else [[0, 0, 4]]) + MORE_N,
        [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        OF_WARPS, [], [num_warps, BLOCK_N, WORDS // 4],
    )  # fmt: skip
    first = gl.program_id(0) * BLOCK_N
    # of b's words
    warp = along(num_warps, 0, CHUNKS)
    column = first + along(BLOCK_N, 1, CHUNKS)
    chunk = along(WORDS // 4, 2, CHUNKS)
    words = b.to(gl.pointer_type(gl.int32), bitcast=True) + (column.to(gl.int64) * stride_bn + chunk) * 4
    in_b = column < N
    up = N.to(gl.int64) * stride_bn * 4
    # of digits: the columns of K in the order of the words
    warp_a = along(num_warps, 0, OF_A)
    j = gl.arange(0, INNER, layout=gl.SliceLayout(0, gl.SliceLayout(2, OF_A)))
    # a unit of 64 columns in 32 bytes, which are two lanes' 16
    k = (j // 32) * 64 + j % 32 if INT4 else j
    row = along(COLUMNS, 2, OF_A)
    rows = digits + (row * blocks * BLOCK + gl.expand_dims(gl.expand_dims(k, 0), 2))
    in_a = row < M * DIGITS
    # of the scales
    warp_s = along(num_warps, 0, SUMS)
    column_s = first + along(BLOCK_N, 1, SUMS)
    scales = scale_ptr + column_s.to(gl.int64) * stride_sn
    in_s = column_s < N
    up_s = N.to(gl.int64) * stride_sn
    HALVES: gl.constexpr = 2 if GATED else 1

    # of int8 all products are added as whole numbers, of int4 those of a block, which has a scale
    NUMBER: gl.constexpr = gl.float32 if INT4 else gl.int32
    whole = gl.full([num_warps, BLOCK_N, COLUMNS], WHOLE_BITS if INT4 else 0, gl.int32, layout=SUMS)
    acc = gl.zeros([num_warps, BLOCK_N, COLUMNS], NUMBER, layout=SUMS)
    acc_up = gl.zeros([num_warps, BLOCK_N, COLUMNS], NUMBER, layout=SUMS)
    now = ()
    scale = ()
    for i in gl.static_range(AHEAD):
        block = warp + i * num_warps
        block_s = warp_s + i * num_warps
        for half in gl.static_range(HALVES):
            now = now + (words_at(words + (half * up + block * WORDS), in_b & (block < blocks), AS_LOADED),)  # type: ignore[assignment]
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
                later = later + (words_at(words + (half * up + block * WORDS), in_b & (block < blocks), AS_LOADED),)  # type: ignore[assignment]
                if INT4:
                    scale_later = scale_later + (  # type: ignore[assignment]
                        gl.load(scales + (half * up_s + block_s), mask=in_s & (block_s < blocks), other=0.0),
                    )
        for i in gl.static_range(AHEAD):
            block_a = warp_a + (step * AHEAD + i) * num_warps
            x_low = gl.load(rows + block_a * BLOCK, mask=in_a & (block_a < blocks), other=0)
            x_high = x_low
            if INT4:
                x_high = gl.load(rows + (block_a * BLOCK + 32), mask=in_a & (block_a < blocks), other=0)
            for half in gl.static_range(HALVES):
                block_scale = scale[HALVES * i + half] if INT4 else whole
                if half == 0:
                    acc = multiplied(acc, now[HALVES * i], x_low, x_high, whole, block_scale, INT4, VALUES)
                else:
                    acc_up = multiplied(acc_up, now[2 * i + 1], x_low, x_high, whole, block_scale, INT4, VALUES)
        now = later
        scale = scale_later
    pdl_launch_dependents(PDL)

    OF_SUMS: gl.constexpr = gl.SliceLayout(0, SUMS)
    digit = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, OF_SUMS)), 0)
    worths = digits.to(gl.pointer_type(gl.float32), bitcast=True) + M * blocks * BLOCK
    worth = gl.load(worths + digit, mask=digit < M * DIGITS, other=0.0)
    OUT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [num_warps, 1], [0, 1])
    columns = gl.expand_dims(first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, OUT)), 1)
    out_rows = gl.expand_dims(gl.arange(0, COLUMNS // DIGITS, layout=gl.SliceLayout(0, OUT)), 0)
    mask = columns < N
    y = _summed(acc, worth, OUT)
    y = ended(y, scale_ptr, bias_ptr, 0, columns, mask, stride_sn, stride_bias, alpha, INT4, BIAS)
    y = activate(y, slope, ACTIVATION)
    if GATED:
        total = _summed(acc_up, worth, OUT)
        y *= ended(total, scale_ptr, bias_ptr, N, columns, mask, stride_sn, stride_bias, alpha, INT4, BIAS)
    mask = mask & (out_rows < M)
    if RESIDUAL:
        beside = out_rows.to(gl.int64) * stride_rm + columns.to(gl.int64) * stride_rn
        y += gl.load(residual_ptr + beside, mask=mask, other=0.0).to(gl.float32)
    gl.store(c_ptr + (out_rows.to(gl.int64) * N + columns), y.to(c_ptr.dtype.element_ty), mask=mask)
