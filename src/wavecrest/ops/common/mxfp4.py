"""MXFP4 in kernels: e2m1 values and e8m0 scales (OCP Microscaling Formats, version 1.0) as floats, without loss.

The bits of an e2m1 are set into a wider float: its 2 bits of exponent and its bit of mantissa are the lowest of the
exponent and the highest of the mantissa there. That is the value times 2^-126, subnormal where e2m1 is, and one product
with 2^126 gives the value. A second one with the scale, a power of two, adds to the exponent. Both are exact as long as
the result has a float, so that scaled values need no float32 sums of their own.
"""

from __future__ import annotations

from wavecrest.ops.common.ptx import E2M1_BF16
from wavecrest.ops.common.triton import tl, triton
from wavecrest.ops.common.widen import narrowed

# columns of K that share a scale: the low or the high halves of 32 bytes
HALF = tl.constexpr(32)
# sign, exponent and mantissa of an e2m1 in a float32, as int32
PLACES = tl.constexpr(-0x7E400000)
UNBIASED = tl.constexpr(2.0**126)


@triton.jit
def e2m1_values(bits):  # type: ignore[no-untyped-def]
    """The float32 values of the e2m1 in the highest 4 bits of 32."""
    # the shift copies the sign, which stays in its place
    return ((bits >> 6) & PLACES).to(tl.float32, bitcast=True) * UNBIASED


@triton.jit
def e8m0_values(scale):  # type: ignore[no-untyped-def]
    """The float32 scales of e8m0 bytes: 2^(byte − 127), NaN for 255."""
    # float32 has 0 and 255 for other things: the first bit of the mantissa makes them 2^-127 and NaN
    special = tl.where((scale == 0) | (scale == 255), 1 << 22, 0)
    return ((scale.to(tl.int32) << 23) | special).to(tl.float32, bitcast=True)


@triton.jit
def _e8m0_bf16(scale):  # type: ignore[no-untyped-def]
    """The same in bfloat16, which has all of them."""
    special = tl.where((scale == 0) | (scale == 255), 1 << 6, 0).to(tl.int16)
    return ((scale.to(tl.int16) << 7) | special).to(tl.bfloat16, bitcast=True)


@triton.jit
def mxfp4_values(packed, scale_low, scale_high, TYPE: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """The low and the high values of bytes [R, N] times their scales [R / 32, N], in TYPE: bfloat16 or float32."""
    UNITS: tl.constexpr = packed.shape[0] // HALF
    ROWS: tl.constexpr = packed.shape[0]
    COLUMNS: tl.constexpr = packed.shape[1]
    if UNITS > 1:
        packed = tl.reshape(packed, [UNITS, HALF, COLUMNS])
        scale_low, scale_high = scale_low[:, None, :], scale_high[:, None, :]
    if PTX and tl.bfloat16 == TYPE:
        low, high = tl.inline_asm_elementwise(
            E2M1_BF16, "=r,=r,=r,=r,r,r,r,r,r", [packed, _e8m0_bf16(scale_low), _e8m0_bf16(scale_high)],
            (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
    else:
        wide = packed.to(tl.int32)
        low = narrowed(e2m1_values(wide << 28) * e8m0_values(scale_low), TYPE)
        high = narrowed(e2m1_values(wide << 24) * e8m0_values(scale_high), TYPE)
    if UNITS > 1:
        low, high = tl.reshape(low, [ROWS, COLUMNS]), tl.reshape(high, [ROWS, COLUMNS])
    return low, high
