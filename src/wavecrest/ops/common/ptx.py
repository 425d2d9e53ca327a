"""NVIDIA assembly that widens 4-bit and 8-bit whole numbers, and 4-bit floats, to floats."""

from __future__ import annotations

from typing import Any

from wavecrest.ops.common.triton import tl

# whole numbers as 16-bit floats on NVIDIA, four bytes at a time: a number set into the mantissa of 128 (bfloat16) or
# 1,024 (float16), whose unit is 1, less what it was set into, both exact. Conversions take 4 to 5 instructions each,
# some of them at a quarter of the rate; this takes 1.5 for a 4-bit value and 2 for a byte (1.25 in float16)
_SPREAD = """{
.reg .b32 x0, x1, y0, y1, one, off;
mov.b32 one, ONE;
mov.b32 off, OFF;
prmt.b32 x0, $BYTES, 0, FIRST;
prmt.b32 x1, $BYTES, 0, SECOND;
"""
# pairs of bytes, which need no spreading: two bytes of 16 bits are of two columns
_SHIFT = """{
.reg .b32 x0, x1, y0, y1, one, off;
mov.b32 one, ONE;
mov.b32 off, OFF;
mov.b32 x0, $BYTES;
shr.b32 x1, $BYTES, 8;
"""
_INT4 = """shr.b32 y0, x0, 4;
shr.b32 y1, x1, 4;
lop3.b32 x0, x0, 0x000F000F, MAGIC, 0xEA;
lop3.b32 x1, x1, 0x000F000F, MAGIC, 0xEA;
lop3.b32 y0, y0, 0x000F000F, MAGIC, 0xEA;
lop3.b32 y1, y1, 0x000F000F, MAGIC, 0xEA;
fma.rn.TYPEx2 $0, x0, one, off;
fma.rn.TYPEx2 $1, x1, one, off;
fma.rn.TYPEx2 $2, y0, one, off;
fma.rn.TYPEx2 $3, y1, one, off;
}"""
# 128 + the low 7 bits, less 128, or 256 where the sign is set
_INT8_BF16 = """lop3.b32 y0, x0, 0x00800080, 0xC300C300, 0xEA;
lop3.b32 y1, x1, 0x00800080, 0xC300C300, 0xEA;
lop3.b32 x0, x0, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 x1, x1, 0x007F007F, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, x0, one, y0;
fma.rn.bf16x2 $1, x1, one, y1;
}"""
# 1,024 + 128 + the number
_INT8_FP16 = """{
.reg .b32 x0, x1, one, off;
mov.b32 one, 0x3C003C00;
mov.b32 off, 0xE480E480;
xor.b32 x1, $BYTES, 0x80808080;
prmt.b32 x0, x1, 0x64646464, FIRST;
prmt.b32 x1, x1, 0x64646464, SECOND;
fma.rn.f16x2 $0, x0, one, off;
fma.rn.f16x2 $1, x1, one, off;
}"""


def _assembly(text: str, source: str, **names: str) -> Any:
    # bytes 0 and 1, and 2 and 3, each as the lower half of 16 bits
    for name, value in {"BYTES": source, "FIRST": "0x4140", "SECOND": "0x4342", **names}.items():
        text = text.replace(name, value)
    # Inductor (torch 2.11) writes the text into a file, where a line's end would end it
    return tl.constexpr(text.replace("\n", " "))


INT4_BF16 = _assembly(_SPREAD + _INT4, "4", MAGIC="0x43004300", ONE="0x3F803F80", OFF="0xC308C308", TYPE="bf16")
INT4_FP16 = _assembly(_SPREAD + _INT4, "4", MAGIC="0x64006400", ONE="0x3C003C00", OFF="0xE408E408", TYPE="f16")
INT8_BF16 = _assembly(_SPREAD + _INT8_BF16, "2", ONE="0x3F803F80", OFF="0")
INT8_FP16 = _assembly(_INT8_FP16, "2")
# the same of two pairs of bytes: the first bytes of both, and the second ones
_OF_PAIRS = {"FIRST": "0x4240", "SECOND": "0x4341"}
INT4_PAIRS_BF16 = _assembly(_SHIFT + _INT4, "4", MAGIC="0x43004300", ONE="0x3F803F80", OFF="0xC308C308", TYPE="bf16")
INT4_PAIRS_FP16 = _assembly(_SHIFT + _INT4, "4", MAGIC="0x64006400", ONE="0x3C003C00", OFF="0xE408E408", TYPE="f16")
INT8_PAIRS_BF16 = _assembly(_SPREAD + _INT8_BF16, "2", ONE="0x3F803F80", OFF="0", **_OF_PAIRS)
INT8_PAIRS_FP16 = _assembly(_INT8_FP16, "2", **_OF_PAIRS)
# the same in float32: 2²³ + 128 + the number. 2.25 instructions a byte, where a conversion has a quarter of their rate
INT8_FP32 = _assembly(
    """{
.reg .b32 x;
xor.b32 x, $BYTES, 0x80808080;
prmt.b32 $0, x, MAGIC, 0x7650;
prmt.b32 $1, x, MAGIC, 0x7651;
prmt.b32 $2, x, MAGIC, 0x7652;
prmt.b32 $3, x, MAGIC, 0x7653;
}""",
    "4",
    MAGIC="0x4B000000",
)
INT8_FP32_OFFSET = tl.constexpr(2.0**23 + 128)
# two e2m1 of each byte, times their scales (operands of two bfloat16 for two bytes: of the low, then of the high ones):
# sign, exponent and mantissa set into those of bfloat16, times 2^126, times the scale. 3 instructions a value. What is
# added is -0, which changes no zero
E2M1_BF16 = _assembly(
    """{
.reg .b32 x0, x1, y0, y1, bits, one, none;
mov.b32 one, 0x7E807E80;
mov.b32 none, 0x80008000;
prmt.b32 y0, $BYTES, 0, 0x1404;
prmt.b32 y1, $BYTES, 0, 0x3424;
shl.b32 x0, y0, 4;
shl.b32 x1, y1, 4;
shr.b32 bits, x0, 6;
and.b32 bits, bits, 0x01C001C0;
lop3.b32 x0, x0, 0x80008000, bits, 0xEA;
shr.b32 bits, x1, 6;
and.b32 bits, bits, 0x01C001C0;
lop3.b32 x1, x1, 0x80008000, bits, 0xEA;
shr.b32 bits, y0, 6;
and.b32 bits, bits, 0x01C001C0;
lop3.b32 y0, y0, 0x80008000, bits, 0xEA;
shr.b32 bits, y1, 6;
and.b32 bits, bits, 0x01C001C0;
lop3.b32 y1, y1, 0x80008000, bits, 0xEA;
fma.rn.bf16x2 x0, x0, one, none;
fma.rn.bf16x2 x1, x1, one, none;
fma.rn.bf16x2 y0, y0, one, none;
fma.rn.bf16x2 y1, y1, one, none;
fma.rn.bf16x2 $0, x0, $5, none;
fma.rn.bf16x2 $1, x1, $6, none;
fma.rn.bf16x2 $2, y0, $7, none;
fma.rn.bf16x2 $3, y1, $8, none;
}""",
    "4",
)
# the eight values of a word as bytes with signs, 16 times the value less 8: of the bytes' low halves, of the high ones
INT4_WORD = _assembly(
    """{
.reg .b32 x;
shl.b32 x, $2, 4;
lop3.b32 $0, x, 0xF0F0F0F0, 0x80808080, 0x6A;
lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6A;
}""",
    "2",
)
