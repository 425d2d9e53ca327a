"""Rows of floats as whole numbers of four digits of 8 bits, for GEMMs on matrix instructions of 8-bit whole numbers.

A row's values are n · 2^e with one e, cut off at less than 2^-29 of the largest: all above 2^-22 of it are exact in
bfloat16, all above 2^-19 in float16. n is d0 + 256 d1 + 256² d2 + 256³ d3 with digits from -128 to 127. The matrix
unit multiplies each digit with weights of 8 bits or fewer, and adds products exactly; float32 adds what the digits are
worth.
"""

from __future__ import annotations

from wavecrest.ops._gemm.kernel import fetch_columns
from wavecrest.ops.common.device import magnitude, pdl_launch_dependents, pdl_wait
from wavecrest.ops.common.triton import tl, triton

# digits of a number, and columns that a row's size is a multiple of
DIGITS = tl.constexpr(4)
UNIT = tl.constexpr(128)
# float32's exponent field of 1, and of the least largest value that is told from 0; its bits of infinity
ONE, LEAST, INFINITE = tl.constexpr(127), tl.constexpr(30), tl.constexpr(0x7F800000)
# bits of a number below its sign, so that digits do not overflow
BITS = tl.constexpr(29)


@triton.jit
def sum_and_largest(sum0, largest0, sum1, largest1):  # type: ignore[no-untyped-def]
    return sum0 + sum1, tl.maximum(largest0, largest1)


@triton.jit
def numbers_of(x, size, most):  # type: ignore[no-untyped-def]
    """A row's values as whole numbers whose bytes are its digits, and what digits 0 and the others are worth at first.

    size, most: the bits of |x|, and of the largest in the row.
    """
    finite = most < INFINITE
    exponent = tl.maximum(most >> 23, LEAST)
    # 2^BITS and 2^-BITS over the power of two below the largest
    up = ((tl.cast(2 * ONE + BITS, tl.int32) - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((exponent - BITS) << 23).to(tl.float32, bitcast=True)
    sign = tl.where(x > 0, 1.0, -1.0)
    number = tl.where(finite, x * up, tl.where(size == INFINITE, sign, 0.0)).to(tl.int32)
    # digits have signs: the upper ones take what the lower ones borrow
    number = (number + 0x808080) ^ 0x808080
    return number, tl.where(finite, down, most.to(tl.float32, bitcast=True)), tl.where(finite, down, 0.0)


@triton.jit(do_not_specialize=["blocks", "stride_am"])
def _digits_kernel(  # type: ignore[no-untyped-def]
    a, gain_ptr, digits_ptr, blocks, stride_am,
    NORMED: tl.constexpr, NORM_EPS: tl.constexpr, PDL: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of a, or RMSNorm of it, as int8 [4, K], and behind those of all rows what its digits are worth, [4].

    K is `blocks` of 128, BLOCK a power of two that is no less. stride_am is in units of 16 bytes of 16-bit values. Of a
    row with NaN the digits are worth NaN; of one with infinities these are ±1, the other values 0, the digit infinity.
    """
    K = blocks * UNIT
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    inside = k < K
    pdl_launch_dependents(PDL)
    if NORMED and EARLY:
        start = gain_ptr + tl.zeros([1, 1], tl.int32)
        fetch_columns(start, tl.full([1, 1], True, tl.int1), 0, K, BLOCK)
    pdl_wait(EARLY > 0)
    x = tl.load(a + row.to(tl.int64) * stride_am * 8 + k, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if NORMED:
        squares = x * x
        x *= tl.load(gain_ptr + k, mask=inside, other=0.0).to(tl.float32)
        size = magnitude(x)
        # in one exchange between warps
        total, most = tl.reduce((squares, size), 0, sum_and_largest)
        factor = tl.rsqrt(total / tl.cast(K, tl.float32) + NORM_EPS)
    else:
        size = magnitude(x)
        most = tl.max(size, 0)
    number, lowest, others = numbers_of(x, size, most)
    base = digits_ptr + row * DIGITS * K
    worth = digits_ptr.to(tl.pointer_type(tl.float32), bitcast=True) + tl.num_programs(0) * K + row * DIGITS
    for i in tl.static_range(DIGITS):
        tl.store(base + i * K + k, (number >> (8 * i)).to(tl.int8), mask=inside)
        tl.store(worth + i, (lowest if i == 0 else others) * factor)
        others *= 256.0
