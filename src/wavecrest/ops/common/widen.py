"""Values of 8 and 4 bits widened in the kernel to the dtype that they are multiplied in, and weights rounded to it."""

from __future__ import annotations

from wavecrest.ops.common.ptx import INT4_BF16, INT4_FP16, INT8_BF16, INT8_FP16
from wavecrest.ops.common.triton import tl, triton


@triton.jit
def narrowed(wide, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers in float32 that TYPE holds exactly, in TYPE."""
    if tl.bfloat16 == TYPE:
        # the lower half is 0: cut off rather than rounded, which takes 5 instructions an element on gfx942
        wide = (wide.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
        wide = wide.to(TYPE, bitcast=True)
    else:
        wide = wide.to(TYPE)
    return wide


@triton.jit
def rounded(wide, TYPE: tl.constexpr, TIES_UP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers in float32 rounded to TYPE, to nearest; in bfloat16 with TIES_UP, ties away from zero.

    For numbers that are multiplied, not for results: without an instruction for it, ties to even and the test for NaN
    take four instructions an element on gfx942, this takes one (triton 3.6, beside one for two elements). A NaN whose
    lower bits are all set is lost.
    """
    if TIES_UP and tl.bfloat16 == TYPE:
        bits = wide.to(tl.uint32, bitcast=True) + 0x8000
        wide = (bits >> 16).to(tl.uint16).to(TYPE, bitcast=True)
    else:
        wide = wide.to(TYPE)
    return wide


@triton.jit
def int4_values(packed, TYPE: tl.constexpr, PTX: tl.constexpr):  # type: ignore[no-untyped-def]
    """The low and the high 4-bit values of bytes, less 8, in TYPE."""
    if PTX and tl.bfloat16 == TYPE:
        low, high = tl.inline_asm_elementwise(
            INT4_BF16, "=r,=r,=r,=r,r", [packed], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif PTX and tl.float16 == TYPE:
        low, high = tl.inline_asm_elementwise(
            INT4_FP16, "=r,=r,=r,=r,r", [packed], (tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        low = narrowed(((packed & 15).to(tl.int16) - 8).to(tl.float32), TYPE)
        high = narrowed(((packed >> 4).to(tl.int16) - 8).to(tl.float32), TYPE)
    return low, high


@triton.jit
def int4_values_from(packed, low_zero, high_zero, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The low and the high 4-bit values of bytes, less their zero points, int16 that broadcast, in TYPE."""
    low = narrowed(((packed & 15).to(tl.int16) - low_zero).to(tl.float32), TYPE)
    high = narrowed(((packed >> 4).to(tl.int16) - high_zero).to(tl.float32), TYPE)
    return low, high


@triton.jit
def widened(values, TYPE: tl.constexpr, PTX: tl.constexpr, FOREIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys or values in the queries' type, which has all that 8 bits hold.

    FOREIGN: e4m3fn where no instruction takes it; the compiler's own way is 60 instructions an element.
    """
    if TYPE.primitive_bitwidth > values.dtype.primitive_bitwidth:
        if PTX and tl.int8 == values.dtype and tl.bfloat16 == TYPE:
            values = tl.inline_asm_elementwise(INT8_BF16, "=r,=r,r", [values], tl.bfloat16, is_pure=True, pack=4)
        elif PTX and tl.int8 == values.dtype and tl.float16 == TYPE:
            values = tl.inline_asm_elementwise(INT8_FP16, "=r,=r,r", [values], tl.float16, is_pure=True, pack=4)
        elif PTX and tl.float16 == TYPE:
            # an instruction for two of them
            values = values.to(TYPE)
        else:
            if FOREIGN:
                # as float16 of 2⁻⁸ times the value, subnormal ones too, and NaN added where it is one: without a mask,
                # which takes scalar registers
                bits = values.to(tl.uint8, bitcast=True).to(tl.int16)
                half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
                nan = (-(((bits & 0x7F) + 1) >> 7) & 0x7E00).to(tl.float16, bitcast=True)
                wide = (half * 256.0 + nan).to(tl.float32)
            else:
                wide = values.to(tl.float32)
            values = narrowed(wide, TYPE)
    return values
