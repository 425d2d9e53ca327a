"""The meaning of opcodes by their names, in exact arithmetic: the second source that the emulator is compared with.

Nothing here is read from AMD's pseudocode, which the emulator translates: integers are Python's, floats are fractions
that are rounded once, and what a name means is that of AMD's instruction set documents and of IEEE 754.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

Number = float | Fraction

# exponent and mantissa bits of IEEE formats
FORMATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}
NAN, INF = math.nan, math.inf


def bits_of(kind: str) -> int:
    """Bits of a type by its name, such as f16 or u32."""
    return int(re.sub(r"\D", "", kind))


def decoded(bits: int, kind: str) -> Number:
    """The exact value of the bits of a float; infinities, NaN and signed zeros as Python's."""
    exponent_bits, mantissa_bits = FORMATS[kind]
    sign = -1 if bits >> exponent_bits + mantissa_bits & 1 else 1
    exponent, mantissa = bits >> mantissa_bits & (1 << exponent_bits) - 1, bits & (1 << mantissa_bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    if exponent == (1 << exponent_bits) - 1:
        return NAN if mantissa else sign * INF
    if exponent == 0 and mantissa == 0:
        return math.copysign(0.0, sign)
    whole = mantissa | (1 << mantissa_bits if exponent else 0)
    return sign * whole * Fraction(2) ** (max(exponent, 1) - bias - mantissa_bits)


def encoded(value: Number, kind: str, *, toward_zero: bool = False) -> int:
    """The bits of a value, rounded once, to nearest even or toward zero."""
    exponent_bits, mantissa_bits = FORMATS[kind]
    most, bias = (1 << exponent_bits) - 1, (1 << exponent_bits - 1) - 1
    top = exponent_bits + mantissa_bits
    if isinstance(value, float):
        if math.isnan(value):
            return most << mantissa_bits | 1 << mantissa_bits - 1
        sign = 1 if math.copysign(1.0, value) < 0 else 0
        if math.isinf(value):
            return sign << top | most << mantissa_bits
        value = Fraction(value)
        if value == 0:
            return sign << top
    if value == 0:
        return 0
    sign, value = (1, -value) if value < 0 else (0, value)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > value:
        exponent -= 1
    exponent = max(exponent, 1 - bias)
    scaled = value / Fraction(2) ** (exponent - mantissa_bits)
    whole = math.floor(scaled) if toward_zero else round(scaled)
    if whole >> mantissa_bits + 1:
        whole, exponent = whole >> 1, exponent + 1
    if exponent > bias:
        return sign << top | ((most << mantissa_bits) - 1 if toward_zero else most << mantissa_bits)
    field = exponent + bias if whole >> mantissa_bits else 0
    return sign << top | field << mantissa_bits | whole & (1 << mantissa_bits) - 1


def signed(bits: int, width: int) -> int:
    """Two's complement."""
    bits &= (1 << width) - 1
    return bits - (1 << width) if bits >> width - 1 else bits


def clamped(value: int, kind: str) -> int:
    width = bits_of(kind)
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if kind[0] == "i" else (0, (1 << width) - 1)
    return min(max(value, low), high)


class Given(NamedTuple):
    """The operands of one lane: bits of the sources, those that the result had before, a mask's bit, the lane."""

    sources: Sequence[int]
    before: int
    carry: int
    lane: int


class Result(NamedTuple):
    """The outcome of an opcode: bits of the result and of a mask, or None; `near`: an error that its sums may have."""

    bits: int | None
    mask: int | None = None
    near: Fraction = Fraction(0)


class Meaning(NamedTuple):
    """How an opcode is compared.

    `kind`: the type of the result, whose NaN are alike; `elements` results of it lie in a register. `ulps`: how
    many places a float may be from the exact one.
    """

    function: Callable[[Given], Result]
    kind: str
    elements: int = 1
    ulps: int = 0


def _is_zero(value: Number) -> bool:
    return value == 0


def _special(*values: Number) -> bool:
    return any(isinstance(value, float) and not math.isfinite(value) for value in values)


def _fma(a: Number, b: Number, c: Number) -> Number:
    if _special(a, b, c):
        return float(_sign(a) if not _special(a) else a) * float(_sign(b) if not _special(b) else b) + (
            float(c) if _special(c) else 0.0
        )
    if _is_zero(a) or _is_zero(b):
        product = math.copysign(0.0, _sign(a) * _sign(b))
        return product + float(c) if _is_zero(c) else c
    total = Fraction(a) * Fraction(b) + Fraction(c)
    return total if total else 0.0


def _sign(value: Number) -> float:
    """±1, and a zero of a sign for a zero."""
    if value == 0:
        return float(value) if isinstance(value, float) else 0.0
    return math.copysign(1.0, float(value)) if isinstance(value, float) else (1.0 if value > 0 else -1.0)


def _signum(value: Number) -> float:
    return math.copysign(1.0, value) if isinstance(value, float) else (1.0 if value > 0 else -1.0)


def _rounded_twice(kind: str) -> Callable[[Number, Number, Number], Number]:
    """a · b + c with a rounded product."""
    return lambda a, b, c: added(decoded(encoded(_mul(a, b), kind), kind), c)


def _mul(a: Number, b: Number) -> Number:
    if _special(a, b):
        return float(_sign(a) if not _special(a) else a) * float(_sign(b) if not _special(b) else b)
    if a == 0 or b == 0:
        return math.copysign(0.0, _signum(a) * _signum(b))
    return Fraction(a) * Fraction(b)


def added(a: Number, b: Number) -> Number:
    if _special(a, b):
        return (float(a) if _special(a) else 0.0) + (float(b) if _special(b) else 0.0)
    if a == 0 and b == 0:
        return float(a) + float(b)
    total = Fraction(a) + Fraction(b)
    return total if total else 0.0


def _negated(value: Number) -> Number:
    return -value


def _isnan(value: Number) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _ordered(value: Number) -> tuple[Number, float]:
    """Zeros by their sign."""
    return value, _signum(value)


def largest(*values: Number) -> Number:
    """The largest, NaN only if all are; +0 above -0."""
    known = [value for value in values if not _isnan(value)]
    return max(known, key=_ordered) if known else NAN


def smallest(*values: Number) -> Number:
    known = [value for value in values if not _isnan(value)]
    return min(known, key=_ordered) if known else NAN


def _med(*values: Number) -> Number:
    if any(map(_isnan, values)):
        return smallest(*values)
    return sorted(values, key=_ordered)[1]


def _maximum(*values: Number) -> Number:
    return NAN if any(map(_isnan, values)) else max(values, key=_ordered)


def _minimum(*values: Number) -> Number:
    return NAN if any(map(_isnan, values)) else min(values, key=_ordered)


def _whole(make: Callable[[Fraction], int]) -> Callable[[Number], Number]:
    def function(value: Number) -> Number:
        if _special(value) or value == 0:
            return value
        found = make(Fraction(value))
        return Fraction(found) if found else math.copysign(0.0, _signum(value))

    return function


def _mantissa(value: Number) -> Number:
    if _special(value) or value == 0:
        return value
    return Fraction(value) / Fraction(2) ** _exponent(value)


def _exponent(value: Number) -> int:
    """The exponent with a mantissa from 1/2 up to 1."""
    if _special(value) or value == 0:
        return 0
    size = abs(Fraction(value))
    found = size.numerator.bit_length() - size.denominator.bit_length()
    return found + 1 if Fraction(2) ** found <= size else found


def _ldexp(value: Number, exponent: int) -> Number:
    if _special(value) or value == 0:
        return value
    return Fraction(value) * Fraction(2) ** max(min(exponent, 5000), -5000)


def _real(function: Callable[[float], float], poles: Callable[[float], float | None]) -> Callable[[Number], Number]:
    """A function in double precision, but for values that `poles` knows."""

    def value_of(value: Number) -> Number:
        # a fraction that a double has exactly: sources have 32 bits at most
        x = float(value)
        if math.isnan(x):
            return NAN
        found = poles(x)
        return function(x) if found is None else found

    return value_of


def _rcp(value: Number) -> Number:
    if _isnan(value):
        return NAN
    if value == 0:
        return math.copysign(INF, _signum(value))
    return math.copysign(0.0, _signum(value)) if _special(value) else 1 / Fraction(value)


def _exp2(x: float) -> float:
    return 2.0**x if -1074 <= x < 1024 else (INF if x > 0 else 0.0)


def _turned(function: Callable[[float], float]) -> Callable[[float], float]:
    """A function of an angle in turns."""
    return lambda x: function(2 * math.pi * math.fmod(x, 1.0))


_REAL: dict[str, Callable[[Number], Number]] = {
    "exp": _real(_exp2, lambda x: None if math.isfinite(x) else (INF if x > 0 else 0.0)),
    "log": _real(math.log2, lambda x: -INF if x == 0 else NAN if x < 0 else x if math.isinf(x) else None),
    "sqrt": _real(math.sqrt, lambda x: x if x == 0 else NAN if x < 0 else x if math.isinf(x) else None),
    "rsq": _real(
        lambda x: 1 / math.sqrt(x),
        lambda x: math.copysign(INF, x) if x == 0 else NAN if x < 0 else 0.0 if math.isinf(x) else None,
    ),
    "rcp": _rcp,
    "rcp_iflag": _rcp,
}
_UNARY: dict[str, Callable[[Number], Number]] = {
    "ceil": _whole(math.ceil),
    "floor": _whole(math.floor),
    "trunc": _whole(math.trunc),
    "rndne": _whole(round),
    "frexp_mant": _mantissa,
}
_FLOATS: dict[str, Callable[..., Number]] = {
    "add": added,
    "sub": lambda a, b: added(a, _negated(b)),
    "subrev": lambda a, b: added(b, _negated(a)),
    "mul": _mul,
    "mul_legacy": lambda a, b: 0.0 if a == 0 or b == 0 else _mul(a, b),
    "fma": _fma,
    "fma_legacy": _fma,
    "max": largest,
    "min": smallest,
    "max3": largest,
    "min3": smallest,
    "med3": _med,
    "maximum3": _maximum,
    "minimum3": _minimum,
}
_RELATIONS: dict[str, Callable[[Number, Number], bool]] = {
    "f": lambda _a, _b: False,
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "lg": lambda a, b: a < b or a > b,
    "ne": lambda a, b: a != b,
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: not _isnan(a) and not _isnan(b),
    "t": lambda _a, _b: True,
    "tru": lambda _a, _b: True,
}
_RELATIONS |= {
    "u": lambda a, b: _isnan(a) or _isnan(b),
    "nge": lambda a, b: not a >= b,
    "nlg": lambda a, b: not (a < b or a > b),
    "ngt": lambda a, b: not a > b,
    "nle": lambda a, b: not a <= b,
    "neq": lambda a, b: a != b,
    "nlt": lambda a, b: not a < b,
}


def _class(value: Number, bits: int, kind: str) -> int:
    """The number of the class of a float: NaN (quiet), -inf, -normal, -denormal, -0, +0, +denormal, +normal, +inf."""
    if _isnan(value):
        return 1
    negative = _signum(value) < 0
    if _special(value):
        return 2 if negative else 9
    if value == 0:
        return 5 if negative else 6
    exponent_bits, mantissa_bits = FORMATS[kind]
    denormal = not bits >> mantissa_bits & (1 << exponent_bits) - 1
    return (4 if denormal else 3) if negative else (7 if denormal else 8)


def _leading(value: int, width: int) -> int:
    """Zeros above the highest one, -1 if there is no one."""
    return width - value.bit_length() if value else -1


def _trailing(value: int) -> int:
    return (value & -value).bit_length() - 1 if value else -1


def _leading_signs(value: int, width: int) -> int:
    """Where the first bit is that differs from the sign, from the top; -1 if there is no such bit."""
    return _leading(value ^ ((1 << width) - 1 if value >> width - 1 else 0), width)


def _bytes(value: int, count: int = 4) -> list[int]:
    return [value >> 8 * i & 255 for i in range(count)]


def _sad(a: int, b: int, *, masked: bool = False) -> int:
    return sum(abs(x - y) for x, y in zip(_bytes(a), _bytes(b), strict=True) if not (masked and y == 0))


def _sads(a: int, b: int, c: int, *, masked: bool) -> int:
    sums = [(c >> 16 * i) + _sad(a >> 8 * i, b, masked=masked) & 0xFFFF for i in range(4)]
    return sum(total << 16 * i for i, total in enumerate(sums))


def _permuted(a: int, b: int, select: int) -> int:
    whole = a << 32 | b

    def byte(code: int) -> int:
        if code > 12:
            return 0xFF
        if code == 12:
            return 0
        if code >= 8:
            return 0xFF if whole >> (16 * (code - 7) - 1) & 1 else 0
        return whole >> 8 * code & 255

    return sum(byte(code) << 8 * i for i, code in enumerate(_bytes(select)))


def _field(value: int, offset: int, width: int, *, is_signed: bool) -> int:
    if width == 0:
        return 0
    return signed(value >> offset, width) if is_signed else value >> offset & (1 << width) - 1


def _rounded_int(make: Callable[[Fraction], int], kind: str) -> Callable[[Number], int]:
    def function(value: Number) -> int:
        if _isnan(value):
            return 0
        width = bits_of(kind)
        if _special(value):
            return clamped((1 << width + 1) * int(_signum(value)), kind)
        return clamped(make(Fraction(value)), kind)

    return function


def _dot(count: int, width: int, is_signed: bool) -> Callable[[int, int, int], int]:
    def part(value: int, i: int) -> int:
        found = value >> width * i & (1 << width) - 1
        return signed(found, width) if is_signed else found

    return lambda a, b, c: sum(part(a, i) * part(b, i) for i in range(count)) + c


def _table(a: int, b: int, c: int, width: int) -> int:
    chosen = (BITOP3 >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1 for i in range(width))
    return sum(bit << i for i, bit in enumerate(chosen))


# the truth table that v_bitop3 is tried with
BITOP3 = 0x6C
# literals of v_fmaak and v_fmamk, 1.5 in float32
LITERAL = 0x3FC00000

_S24 = (1 << 24) - 1


def _u24(value: int) -> int:
    return value & _S24


def _i24(value: int) -> int:
    return signed(value, 24)


def _i32(value: int) -> int:
    return signed(value, 32)


# opcodes of whole words: name -> result, of which the low bits count
_WORDS: dict[str, Callable[..., int]] = {
    "mov_b32": lambda a: a,
    "mov_b64": lambda a: a,
    "not_b32": lambda a: ~a,
    "and_b32": lambda a, b: a & b,
    "or_b32": lambda a, b: a | b,
    "xor_b32": lambda a, b: a ^ b,
    "xnor_b32": lambda a, b: ~(a ^ b),
    "and_or_b32": lambda a, b, c: a & b | c,
    "or3_b32": lambda a, b, c: a | b | c,
    "xad_u32": lambda a, b, c: (a ^ b) + c,
    "add3_u32": lambda a, b, c: a + b + c,
    "lshl_add_u32": lambda a, b, c: (a << (b & 31)) + c,
    "add_lshl_u32": lambda a, b, c: (a + b & 0xFFFFFFFF) << (c & 31),
    "lshl_or_b32": lambda a, b, c: a << (b & 31) | c,
    "lshl_add_u64": lambda a, b, c: (a << (b & 7)) + c,
    "bfi_b32": lambda a, b, c: a & b | ~a & c,
    "bfm_b32": lambda a, b: (1 << (a & 31)) - 1 << (b & 31),
    "bfe_u32": lambda a, b, c: _field(a, b & 31, c & 31, is_signed=False),
    "bfe_i32": lambda a, b, c: _field(a, b & 31, c & 31, is_signed=True) if (b & 31) + (c & 31) <= 32 else (
        _field(_i32(a), b & 31, c & 31, is_signed=True)
    ),
    "bfrev_b32": lambda a: int(f"{a:032b}"[::-1], 2),
    "ffbh_u32": lambda a: _leading(a, 32),
    "ffbh_i32": lambda a: _leading_signs(a, 32),
    "ffbl_b32": _trailing,
    "bcnt_u32_b32": lambda a, b: a.bit_count() + b,
    "alignbit_b32": lambda a, b, c: (a << 32 | b) >> (c & 31),
    "alignbyte_b32": lambda a, b, c: (a << 32 | b) >> 8 * (c & 3),
    "perm_b32": _permuted,
    "lerp_u8": lambda a, b, c: sum(
        (x + y + (z & 1) >> 1) << 8 * i for i, (x, y, z) in enumerate(zip(_bytes(a), _bytes(b), _bytes(c), strict=True))
    ),
    "sad_u8": lambda a, b, c: _sad(a, b) + c,
    "sad_hi_u8": lambda a, b, c: (_sad(a, b) << 16) + c,
    "msad_u8": lambda a, b, c: _sad(a, b, masked=True) + c,
    "sad_u16": lambda a, b, c: abs((a & 0xFFFF) - (b & 0xFFFF)) + abs((a >> 16) - (b >> 16)) + c,
    "sad_u32": lambda a, b, c: abs(a - b) + c,
    "mul_lo_u32": lambda a, b: a * b,
    "mul_lo_u16": lambda a, b: a * b,
    "mul_hi_u32": lambda a, b: a * b >> 32,
    "mul_hi_i32": lambda a, b: _i32(a) * _i32(b) >> 32,
    "mul_u32_u24": lambda a, b: _u24(a) * _u24(b),
    "mul_hi_u32_u24": lambda a, b: _u24(a) * _u24(b) >> 32,
    "mul_i32_i24": lambda a, b: _i24(a) * _i24(b),
    "mul_hi_i32_i24": lambda a, b: _i24(a) * _i24(b) >> 32,
    "mad_u32_u24": lambda a, b, c: _u24(a) * _u24(b) + c,
    "mad_i32_i24": lambda a, b, c: _i24(a) * _i24(b) + c,
    "mad_u32_u16": lambda a, b, c: (a & 0xFFFF) * (b & 0xFFFF) + c,
    "mad_i32_i16": lambda a, b, c: signed(a, 16) * signed(b, 16) + c,
    "bitop3_b32": lambda a, b, c: _table(a, b, c, 32),
    "bitop3_b16": lambda a, b, c: _table(a, b, c, 16),
    "cvt_pk_i16_i32": lambda a, b: clamped(_i32(a), "i16") & 0xFFFF | clamped(_i32(b), "i16") << 16,
    "cvt_pk_u16_u32": lambda a, b: clamped(a, "u16") | clamped(b, "u16") << 16,
    "sat_pk_u8_i16": lambda a: clamped(signed(a, 16), "u8") | clamped(signed(a >> 16, 16), "u8") << 8,
    "ashr_pk_i8_i32": lambda a, b, c: clamped(_i32(a) >> (c & 31), "i8") & 255
    | (clamped(_i32(b) >> (c & 31), "i8") & 255) << 8,
    "ashr_pk_u8_i32": lambda a, b, c: clamped(_i32(a) >> (c & 31), "u8") | clamped(_i32(b) >> (c & 31), "u8") << 8,
    "pack_b32_f16": lambda a, b: a & 0xFFFF | (b & 0xFFFF) << 16,
    "qsad_pk_u16_u8": lambda a, b, c: _sads(a, b, c, masked=False),
    "mqsad_pk_u16_u8": lambda a, b, c: _sads(a, b, c, masked=True),
    "dot2_i32_i16": _dot(2, 16, True),
    "dot2_u32_u16": _dot(2, 16, False),
    "dot4_i32_i8": _dot(4, 8, True),
    "dot4_u32_u8": _dot(4, 8, False),
    "dot8_i32_i4": _dot(8, 4, True),
    "dot8_u32_u4": _dot(8, 4, False),
}  # fmt: skip
# those whose third operand is the result's old value
_ACCUMULATE = {"dot2c_i32_i16": "dot2_i32_i16", "dot4c_i32_i8": "dot4_i32_i8", "dot8c_i32_i4": "dot8_i32_i4"}
_INTEGERS: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "subrev": lambda a, b: b - a,
    "max": max,
    "min": min,
    "max3": max,
    "min3": min,
    "med3": lambda *values: sorted(values)[1],
    "mad": lambda a, b, c: a * b + c,
    "mad_legacy": lambda a, b, c: a * b + c,
    "mul_lo": lambda a, b: a * b,
}
_SHIFTS: dict[str, Callable[[int, int, int], int]] = {
    "lshlrev": lambda count, value, width: value << (count & width - 1),
    "lshrrev": lambda count, value, width: value >> (count & width - 1),
    "ashrrev": lambda count, value, width: signed(value, width) >> (count & width - 1),
}


def _read(bits: int, kind: str) -> int:
    """An integer of a type from the bits of a register."""
    width = bits_of(kind)
    return signed(bits, width) if kind[0] == "i" else bits & (1 << width) - 1


def _cut(value: int, kind: str) -> int:
    return value & (1 << bits_of(kind)) - 1


def _of_floats(function: Callable[..., Number], kind: str, source: str | None = None) -> Callable[[Given], Result]:
    def run(given: Given) -> Result:
        width = bits_of(source or kind)
        values = [decoded(bits & (1 << width) - 1, source or kind) for bits in given.sources]
        return Result(encoded(function(*values), kind))

    return run


def _of_words(function: Callable[..., int], kind: str, read: str | None = None) -> Callable[[Given], Result]:
    def run(given: Given) -> Result:
        values = [bits if read is None else _read(bits, read) for bits in given.sources]
        return Result(_cut(function(*values), kind))

    return run


def _accumulated(run: Callable[[Given], Result]) -> Callable[[Given], Result]:
    return lambda given: run(given._replace(sources=[*given.sources[:2], given.before]))


def _packed(run: Callable[[Given], Result], kind: str) -> Callable[[Given], Result]:
    """The same on each of the two elements of registers."""
    width = bits_of(kind)

    def both(given: Given) -> Result:
        parts = []
        for i in range(2):
            of_one = [bits >> width * i & (1 << width) - 1 for bits in given.sources]
            found = run(given._replace(sources=of_one, before=given.before >> width * i & (1 << width) - 1)).bits
            assert found is not None
            parts.append(found)
        return Result(parts[0] | parts[1] << width)

    return both


def _compare(relation: Callable[[Number, Number], bool], kind: str) -> Callable[[Given], Result]:
    def run(given: Given) -> Result:
        a, b = (decoded(_cut(bits, kind), kind) if kind in FORMATS else _read(bits, kind) for bits in given.sources[:2])
        return Result(None, int(relation(a, b)))

    return run


def _classified(kind: str) -> Callable[[Given], Result]:
    def run(given: Given) -> Result:
        bits = _cut(given.sources[0], kind)
        return Result(None, given.sources[1] >> _class(decoded(bits, kind), bits, kind) & 1)

    return run


def _carried(first: int, second: int, *, subtracts: bool, carries: bool) -> Callable[[Given], Result]:
    def run(given: Given) -> Result:
        a, b = given.sources[first], given.sources[second]
        carry = given.carry if carries else 0
        total = a - b - carry if subtracts else a + b + carry
        return Result(_cut(total, "u32"), int(not 0 <= total < 1 << 32))

    return run


def _wide(kind: str) -> Callable[[Given], Result]:
    def run(given: Given) -> Result:
        a, b = (_read(bits, kind + "32") for bits in given.sources[:2])
        total = a * b + _read(given.sources[2], kind + "64")
        return Result(_cut(total, "u64"), int(not (0 <= total < 1 << 64)) if kind == "u" else None)

    return run


def _single(value: Fraction) -> Fraction:
    return Fraction(decoded(encoded(value, "f32"), "f32"))


_ROUNDED: dict[str, Callable[[Fraction], int]] = {
    "": math.trunc,
    "flr_": math.floor,
    # x + 0.5 is a float32, as in LLVM's pattern for it
    "rpi_": lambda x: math.floor(_single(x + Fraction(1, 2))),
}


def _converted(name: str) -> Meaning | None:
    """Conversions: cvt_TO_FROM."""
    if (match := re.fullmatch(r"cvt_(f16|f32|f64)_(bf16|f16|f32|f64)", name)) is not None:
        return Meaning(_of_floats(lambda x: x, match[1], match[2]), match[1])
    if (match := re.fullmatch(r"cvt_(f16|f32|f64)_([iu](?:16|32))", name)) is not None:
        to, source = match[1], match[2]
        return Meaning(lambda given: Result(encoded(Fraction(_read(given.sources[0], source)), to)), to)
    if (match := re.fullmatch(r"cvt_f32_ubyte([0-3])", name)) is not None:
        at = int(match[1])
        return Meaning(lambda given: Result(encoded(Fraction(given.sources[0] >> 8 * at & 255), "f32")), "f32")
    if (match := re.fullmatch(r"cvt_(flr_|rpi_)?([iu](?:16|32))_(f16|f32|f64)", name)) is not None:
        how, to, source = match.groups()
        whole = _rounded_int(_ROUNDED[how or ""], to)
        return Meaning(lambda given: Result(_cut(whole(decoded(_cut(given.sources[0], source), source)), to)), to)
    if name == "cvt_off_f32_i4":
        return Meaning(lambda given: Result(encoded(Fraction(signed(given.sources[0], 4), 16), "f32")), "f32")
    if (match := re.fullmatch(r"cvt_pk(rtz)?_(bf16|f16)_f32", name)) is not None:
        to, cuts = match[2], bool(match[1])

        def pair(given: Given) -> Result:
            low, high = (encoded(decoded(bits, "f32"), to, toward_zero=cuts) for bits in given.sources[:2])
            return Result(low | high << 16)

        return Meaning(pair, to, 2)
    if (match := re.fullmatch(r"frexp_exp_(i16|i32)_(f16|f32|f64)", name)) is not None:
        to, source = match[1], match[2]
        return Meaning(lambda given: Result(_cut(_exponent(decoded(_cut(given.sources[0], source), source)), to)), to)
    return None


def _mixed(part: str) -> Meaning:
    """fma of float32 (no operand is a half, as the modifiers say), as float32 or one half of a register."""

    def run(given: Given) -> Result:
        total = _fma(*(decoded(bits, "f32") for bits in given.sources))
        if part == "":
            return Result(encoded(total, "f32"))
        half = encoded(decoded(encoded(total, "f32"), "f32"), "f16")
        keep = given.before & (0xFFFF0000 if part == "lo" else 0xFFFF)
        return Result(keep | (half if part == "lo" else half << 16))

    return Meaning(run, "f16" if part else "f32", 2 if part else 1)


def _dot_of_halves(kind: str, accumulates: bool) -> Meaning:
    def run(given: Given) -> Result:
        a, b = given.sources[:2]
        total = decoded((given.before if accumulates else given.sources[2]) & 0xFFFFFFFF, "f32")
        size = Fraction(0) if _special(total) else abs(Fraction(total))
        for i in range(2):
            x, y = decoded(a >> 16 * i & 0xFFFF, kind), decoded(b >> 16 * i & 0xFFFF, kind)
            size += 0 if _special(x, y) else abs(Fraction(x) * Fraction(y))
            total = _fma(x, y, total)
        # in which order, and how often it is rounded, is not said
        return Result(encoded(total, "f32"), near=size / 2**22)

    return Meaning(run, "f32", ulps=1)


def _lanes_below(high: bool) -> Meaning:
    def run(given: Given) -> Result:
        below = (1 << given.lane) - 1
        mask = below >> 32 if high else below & 0xFFFFFFFF
        return Result(_cut((given.sources[0] & mask).bit_count() + given.sources[1], "u32"))

    return Meaning(run, "u32")


def quotient(kind: str) -> Meaning:
    """Division, rounded once: what v_div_scale, v_div_fmas and v_div_fixup are for."""

    def run(given: Given) -> Result:
        a, b = (decoded(bits, kind) for bits in given.sources[:2])
        if _isnan(a) or _isnan(b):
            return Result(encoded(NAN, kind))
        sign = _signum(a) * _signum(b)
        if _special(a) or b == 0:
            return Result(
                encoded(NAN if _special(a, b) == _special(a) and (_special(b) or a == 0) else sign * INF, kind)
            )
        if _special(b) or a == 0:
            return Result(encoded(math.copysign(0.0, sign), kind))
        return Result(encoded(Fraction(a) / Fraction(b), kind))

    return Meaning(run, kind)


def vector(name: str) -> Meaning | None:
    """The meaning of a vector opcode, by its name without v_ and the encoding; None if its name does not say it."""
    if name in _WORDS:
        kind = (
            "u64"
            if name.endswith(("b64", "u64", "pk_u16_u8"))
            else "u16"
            if name.endswith("16") and name.startswith(("mul_lo", "bitop3"))
            else "u16"
            if name.startswith(("sat_pk", "ashr_pk"))
            else "u32"
        )
        return Meaning(_of_words(_WORDS[name], kind), kind)
    if name in _ACCUMULATE:
        return Meaning(_accumulated(_of_words(_WORDS[_ACCUMULATE[name]], "u32")), "u32")
    if (found := _converted(name)) is not None:
        return found
    if (match := re.fullmatch(r"cmpx?_class_(f16|f32|f64)", name)) is not None:
        return Meaning(_classified(match[1]), match[1])
    if (match := re.fullmatch(r"cmpx?_([a-z]+)_([fiu]\d+)", name)) is not None:
        return Meaning(_compare(_RELATIONS[match[1]], match[2]), match[2])
    if (match := re.fullmatch(r"(lshlrev|lshrrev|ashrrev)_([ib])(16|32|64)", name)) is not None:
        shift, width = _SHIFTS[match[1]], int(match[3])
        kind = f"u{width}"
        return Meaning(
            lambda given: Result(_cut(shift(given.sources[0], _cut(given.sources[1], kind), width), kind)), kind
        )
    if (match := re.fullmatch(r"(add|sub|subrev|addc|subb|subbrev)_co_u32", name)) is not None:
        turned = match[1].endswith("rev")
        return Meaning(
            _carried(
                int(turned),
                int(not turned),
                subtracts=match[1].startswith("sub"),
                carries=match[1][:4] in ("addc", "subb"),
            ),
            "u32",
        )
    if name in ("mad_u64_u32", "mad_i64_i32"):
        return Meaning(_wide(name[4]), "u64")
    if name == "cndmask_b32":
        return Meaning(lambda given: Result(given.sources[1] if given.carry else given.sources[0]), "u32")
    if (match := re.fullmatch(r"mbcnt_(lo|hi)_u32_b32", name)) is not None:
        return _lanes_below(match[1] == "hi")
    if (match := re.fullmatch(r"mad_mix(lo|hi)?_f(?:16|32)", name)) is not None:
        return _mixed(match[1] or "")
    if (match := re.fullmatch(r"dot2(c?)_f32_(f16|bf16)", name)) is not None:
        return _dot_of_halves(match[2], bool(match[1]))
    if name in ("fmaak_f32", "fmamk_f32"):
        # a * b + literal, a * literal + b
        order = (0, 1, 2) if name == "fmaak_f32" else (0, 2, 1)
        run = _of_floats(_fma, "f32")
        return Meaning(
            lambda given: run(given._replace(sources=[[*given.sources[:2], LITERAL][i] for i in order])), "f32"
        )
    if name == "pk_mov_b32":
        return Meaning(
            lambda given: Result(given.sources[0] & 0xFFFFFFFF | (given.sources[1] & 0xFFFFFFFF) << 32), "u64"
        )
    return _typed(name)


def _typed(name: str) -> Meaning | None:
    """Opcodes whose name ends with the type of operands and result."""
    match = re.fullmatch(r"(pk_)?(\w+?)_(f16|f32|f64|[iu]16|[iu]32|b16)", name)
    if match is None:
        return None
    packs, what, kind = bool(match[1]), match[2], match[3]
    run: Callable[[Given], Result] | None = None
    ulps = 0
    if kind in FORMATS:
        if what == "fmac":
            run = _accumulated(_of_floats(_fma, kind))
        elif what in ("mac", "mad", "mad_legacy"):
            run = _of_floats(_rounded_twice(kind), kind)
            run = _accumulated(run) if what == "mac" else run
        elif what == "fract":
            # below 1, which a difference may be rounded to
            run = _of_floats(_fraction, kind)
            ulps = 1
        elif what == "ldexp":
            shift = "i16" if kind == "f16" else "i32"

            def run(given: Given) -> Result:
                value = decoded(_cut(given.sources[0], kind), kind)
                return Result(encoded(_ldexp(value, _read(given.sources[1], shift)), kind))

        elif what in ("sin", "cos"):
            function = _turned(math.sin if what == "sin" else math.cos)
            turned = _of_floats(_real(function, lambda x: None if math.isfinite(x) else NAN), kind)

            def run(given: Given) -> Result:
                angle = decoded(_cut(given.sources[0], kind), kind)
                # a double is that far from zeros of other angles than 0
                small = not _special(angle) and abs(Fraction(angle)) < Fraction(1, 8)
                return turned(given)._replace(near=Fraction(0) if small else Fraction(1, 10**15))

            ulps = 1
        elif what in _REAL:
            run, ulps = _of_floats(_REAL[what], kind), 1
        elif what in _UNARY or what in _FLOATS:
            run = _of_floats(_UNARY.get(what) or _FLOATS[what], kind)
    elif packs and what in ("lshlrev", "lshrrev", "ashrrev"):
        shift_by = _SHIFTS[what]

        def run(given: Given) -> Result:
            return Result(_cut(shift_by(given.sources[0], given.sources[1], 16), "u16"))

    elif what in _INTEGERS:
        run = _of_words(_INTEGERS[what], kind, kind)
    if run is None:
        return None
    return Meaning(_packed(run, kind) if packs else run, kind, 2 if packs else 1, ulps)


def _fraction(value: Number) -> Number:
    if _special(value):
        return NAN if _isnan(value) else 0.0
    found = Fraction(value) - math.floor(Fraction(value))
    return found if found else 0.0


def agrees(meaning: Meaning, got: int, want: Result) -> bool:
    """Whether a result is the one that is meant: its bits, any NaN for a NaN, or a neighbour where that is allowed."""
    assert want.bits is not None
    width = bits_of(meaning.kind)
    for i in range(meaning.elements):
        a, b = (bits >> width * i & (1 << width) - 1 for bits in (got, want.bits))
        if a == b:
            continue
        if meaning.kind not in FORMATS:
            return False
        x, y = decoded(a, meaning.kind), decoded(b, meaning.kind)
        if _isnan(x) and _isnan(y):
            continue
        if _isnan(x) or _isnan(y):
            return False
        close = not _special(x, y) and abs(Fraction(x) - Fraction(y)) <= want.near
        if not close and abs(_order(a, width) - _order(b, width)) > meaning.ulps:
            return False
    return True


def _order(bits: int, width: int) -> int:
    """The place of a float among all of its format."""
    size = bits & (1 << width - 1) - 1
    return -size if bits >> width - 1 else size


class Scalar(NamedTuple):
    """The outcome of a scalar opcode: result, SCC and EXEC, each None where it stays or the name does not say it."""

    bits: int | None
    scc: int | None = None
    exec: int | None = None


# a 16-bit immediate that opcodes with one are tried with, negative as a signed number
IMMEDIATE = 0xFF9C
_BITWISE: dict[str, Callable[[int, int], int]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "nand": lambda a, b: ~(a & b),
    "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b,
    "andn1": lambda a, b: ~a & b,
    "orn1": lambda a, b: ~a | b,
}


def _quads(value: int, width: int) -> int:
    return sum((value >> 4 * i & 15 != 0) << i for i in range(width // 4))


def _twice(value: int) -> int:
    """Each bit twice."""
    return sum((value >> i & 1) * 3 << 2 * i for i in range(32))


# opcodes of one source that leave SCC alone, or say with it that the result is not 0
_ONE: dict[str, tuple[Callable[[int, int], int], bool]] = {
    "mov": (lambda a, _w: a, False),
    "not": (lambda a, _w: ~a, True),
    "brev": (lambda a, w: int(f"{a:0{w}b}"[::-1], 2), False),
    "bcnt0_i32": (lambda a, w: w - a.bit_count(), True),
    "bcnt1_i32": (lambda a, _w: a.bit_count(), True),
    "ff0_i32": (lambda a, w: _trailing(~a & (1 << w) - 1), False),
    "ff1_i32": (lambda a, _w: _trailing(a), False),
    "flbit_i32": (_leading, False),
    "quadmask": (_quads, True),
}
_EXTENDED = {"sext_i32_i8": 8, "sext_i32_i16": 16}


def scalar(name: str) -> Callable[[Given], Scalar] | None:
    """The meaning of a scalar opcode, by its name without s_: `carry` of what is given is SCC, `lane` is EXEC."""
    if name in ("flbit_i32", "flbit_i32_i64"):
        width = 64 if name.endswith("64") else 32
        return lambda given: Scalar(_cut(_leading_signs(given.sources[0], width), "u32"))
    if name in _EXTENDED:
        return lambda given: Scalar(_cut(signed(given.sources[0], _EXTENDED[name]), "u32"))
    if name == "bitreplicate_b64_b32":
        return lambda given: Scalar(_twice(given.sources[0]))
    if name == "abs_i32":
        return lambda given: _nonzero(abs(_i32(given.sources[0])), 32)
    if (match := re.fullmatch(r"(\w+?)_saveexec_b64|(\w+?)_wrexec_b64", name)) is not None:
        bitwise, saves = _BITWISE[match[1] or match[2]], bool(match[1])

        def masks(given: Given) -> Scalar:
            made = _cut(bitwise(given.sources[0], given.lane), "u64")
            return Scalar(given.lane if saves else made, int(made != 0), made)

        return masks
    if (match := re.fullmatch(r"(\w+)_b(32|64)", name)) is not None and match[1] in _ONE:
        (one, tells), width = _ONE[match[1]], int(match[2])
        result = 32 if "_i32" in match[1] else width

        def single(given: Given) -> Scalar:
            found = _nonzero(one(given.sources[0], width), result)
            return found if tells else Scalar(found.bits)

        return single
    if (match := re.fullmatch(r"bitset([01])_b(32|64)", name)) is not None:
        on, width = match[1] == "1", int(match[2])

        def changed(given: Given) -> Scalar:
            bit = 1 << (given.sources[0] & width - 1)
            return Scalar((given.before | bit if on else given.before & ~bit) & (1 << width) - 1)

        return changed
    if (match := re.fullmatch(r"bitcmp([01])_b(32|64)", name)) is not None:
        wanted, width = int(match[1]), int(match[2])
        return lambda given: Scalar(None, int(given.sources[0] >> (given.sources[1] & width - 1) & 1 == wanted))
    if (match := re.fullmatch(r"cmp(k?)_(eq|lg|gt|ge|lt|le)_([iu])(32|64)", name)) is not None:
        short, relation, kind = bool(match[1]), _RELATIONS[match[2]], match[3] + match[4]

        def compared(given: Given) -> Scalar:
            first, second = (given.before, _immediate(kind)) if short else given.sources
            return Scalar(None, int(relation(_read(first, kind), _read(second, kind))))

        return compared
    if (match := re.fullmatch(r"(cmov|cselect)(k?)_[bi](32|64)", name)) is not None:
        width = int(match[3])

        def chosen(given: Given) -> Scalar:
            yes = _cut(_immediate("i32"), "u32") if match[2] else given.sources[0]
            no = given.before if match[1] == "cmov" else given.sources[1]
            return Scalar((yes if given.carry else no) & (1 << width) - 1)

        return chosen
    return _scalar_pairs(name)


def _immediate(kind: str) -> int:
    return signed(IMMEDIATE, 16) if kind[0] == "i" else IMMEDIATE


def _nonzero(value: int, width: int) -> Scalar:
    value &= (1 << width) - 1
    return Scalar(value, int(value != 0))


def _overflowing(function: Callable[[int, int], int]) -> Callable[[Given], Scalar]:
    """A sum of signed numbers, whose SCC says that it has no place in 32 bits."""

    def run(given: Given) -> Scalar:
        total = function(_i32(given.sources[0]), _i32(given.sources[1]))
        return Scalar(_cut(total, "u32"), int(clamped(total, "i32") != total))

    return run


def _summed(name: str) -> Callable[[Given], Scalar]:
    def run(given: Given) -> Scalar:
        a, b = given.sources
        carry = given.carry if name in ("addc", "subb") else 0
        total = a - b - carry if name.startswith("sub") else a + b + carry
        return Scalar(_cut(total, "u32"), int(not 0 <= total < 1 << 32))

    return run


def _scalar_pairs(name: str) -> Callable[[Given], Scalar] | None:
    if (match := re.fullmatch(r"(\w+)_b(32|64)", name)) is not None and match[1] in _BITWISE:
        bitwise, width = _BITWISE[match[1]], int(match[2])
        return lambda given: _nonzero(bitwise(*given.sources), width)
    if (match := re.fullmatch(r"(lshl|lshr|ashr)_[ib](32|64)", name)) is not None:
        shift, width = _SHIFTS[match[1] + "rev"], int(match[2])
        return lambda given: _nonzero(shift(given.sources[1], given.sources[0], width), width)
    if (match := re.fullmatch(r"bfe_([iu])(32|64)", name)) is not None:
        is_signed, width = match[1] == "i", int(match[2])

        def field(given: Given) -> Scalar:
            offset, count = given.sources[1] & width - 1, given.sources[1] >> 16 & 127
            value = signed(given.sources[0], width) if is_signed else given.sources[0]
            return _nonzero(_field(value, offset, min(count, width), is_signed=is_signed), width)

        return field
    if (match := re.fullmatch(r"bfm_b(32|64)", name)) is not None:
        width = int(match[1])
        return lambda given: Scalar(
            ((1 << (given.sources[0] & width - 1)) - 1 << (given.sources[1] & width - 1)) & (1 << width) - 1
        )
    if (match := re.fullmatch(r"(add|addc|sub|subb)_u32", name)) is not None:
        return _summed(match[1])
    if name in ("add_i32", "sub_i32"):
        return _overflowing(_INTEGERS[name[:3]])
    if name == "addk_i32":
        run = _overflowing(_INTEGERS["add"])
        return lambda given: run(given._replace(sources=[given.before, _cut(_immediate("i32"), "u32")]))
    if (match := re.fullmatch(r"lshl([1-4])_add_u32", name)) is not None:
        count = int(match[1])

        def shifted(given: Given) -> Scalar:
            total = (given.sources[0] << count) + given.sources[1]
            return Scalar(_cut(total, "u32"), int(total >> 32 != 0))

        return shifted
    if (match := re.fullmatch(r"(min|max)_([iu]32)", name)) is not None:
        pick, kind = _INTEGERS[match[1]], match[2]
        return lambda given: Scalar(_cut(pick(*(_read(bits, kind) for bits in given.sources)), "u32"))
    if (match := re.fullmatch(r"pack_([lh])([lh])_b32_b16", name)) is not None:
        parts = [16 * (letter == "h") for letter in match.groups()]
        return lambda given: Scalar(
            given.sources[0] >> parts[0] & 0xFFFF | (given.sources[1] >> parts[1] & 0xFFFF) << 16
        )
    simple: dict[str, Callable[[Given], Scalar]] = {
        # of a difference that wraps, as AMD's examples show
        "absdiff_i32": lambda given: _nonzero(abs(_i32(given.sources[0] - given.sources[1])), 32),
        "mul_i32": lambda given: Scalar(_cut(given.sources[0] * given.sources[1], "u32")),
        "mul_hi_u32": lambda given: Scalar(given.sources[0] * given.sources[1] >> 32),
        "mul_hi_i32": lambda given: Scalar(_cut(_i32(given.sources[0]) * _i32(given.sources[1]) >> 32, "u32")),
        "mulk_i32": lambda given: Scalar(_cut(given.before * _immediate("i32"), "u32")),
        "movk_i32": lambda given: Scalar(_cut(_immediate("i32"), "u32")),
    }
    return simple.get(name)
