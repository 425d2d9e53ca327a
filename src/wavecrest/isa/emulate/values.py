"""Values of AMD's pseudocode: C text with its type, how it becomes another type, and the functions of values.

What has no meaning raises `grammar.NotUnderstood`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from wavecrest.isa.emulate.grammar import F16, F64, I32, U1, U32, NotUnderstood, Type

# a result of integer arithmetic that may be outside of its type, where results saturate
EXACT = Type("i", 64)
# functions of one float: name -> C's name without the type's letter
MATH = {"floor": "floor", "trunc": "trunc", "sqrt": "sqrt", "log2": "log2", "abs": "fabs", "rint": "rint"}


class Value(NamedTuple):
    """C text, without a need for parentheses, and its type."""

    c: str
    type: Type

    def bits(self) -> Value:
        """The bits of it."""
        kind = Type("b", self.type.bits)
        if self.type.is_float:
            name = "bfloat" if self.type.kind == "bf" else {16: "half", 32: "float", 64: "double"}[kind.bits]
            return Value(f"{name}_bits({self.c})", kind)
        if self.type.kind == "i" and kind.bits < 32:
            return Value(f"((u32){self.c} & {(1 << kind.bits) - 1:#x}u)", kind)
        return Value(self.c if self.type.kind != "i" else f"({kind.c}){self.c}", kind)

    def reinterpreted(self, kind: Type) -> Value:
        """The low bits of it as another type."""
        if self.type == kind:
            return self
        bits = self.bits()
        c = bits.c
        if kind.is_float:
            name = "bfloat" if kind.kind == "bf" else {16: "half", 32: "float", 64: "double"}[kind.bits]
            return Value(f"bits_{name}(({'u64' if kind.bits == 64 else 'u32'}){c})", kind)
        if kind.bits in (32, 64, 128) or kind.bits > 64:
            return Value(f"({kind.c}){c}", kind)
        if kind.kind == "i":
            unused = (32 if kind.bits < 32 else 64) - kind.bits
            return Value(f"(({kind.c})(({kind.c.replace('i', 'u')}){c} << {unused}) >> {unused})", kind)
        if bits.type.bits <= kind.bits and self.type.kind != "i" and not _may_overflow(c):
            return Value(c, kind)
        return Value(f"(({kind.c}){c} & {(1 << kind.bits) - 1:#x}{'ull' if kind.bits > 32 else 'u'})", kind)

    def converted(self, kind: Type, *, saturates: bool = False) -> str:
        """The C of it as another type, by value; bits that mean nothing are taken as they are."""
        have = self.type
        if have == kind:
            return self.c
        if saturates and have == EXACT and kind.bits <= 32 and kind.kind in "ui":
            low = -(1 << kind.bits - 1) if kind.kind == "i" else 0
            return f"({kind.c})saturated({self.c}, {low}ll, {low + (1 << kind.bits) - 1}ll)"
        if have.kind == "b" and kind.is_float:
            return self.reinterpreted(kind).c
        if have == F64 and kind == F16:
            return f"round_half_double({self.c})"
        if have.is_float and kind.is_float:
            return rounded(f"({kind.c}){self.c}", kind).c if kind.bits < have.bits else f"({kind.c}){self.c}"
        if have.is_float:
            if kind.kind == "b":
                return self.bits().c
            if kind.bits == 1:
                return f"({self.c} != 0)"
            raise NotUnderstood(f"{have} as {kind}")
        if kind.is_float:
            return rounded(f"({kind.c}){self.c}", kind).c
        if kind.bits == 1:
            return f"({self.c} & 1)" if have.bits != 1 else self.c
        if kind.bits in (32, 64) or kind.bits > 64:
            return f"({kind.c}){self.c}"
        return Value(self.c, Type(have.kind, max(have.bits, 32))).reinterpreted(kind).c


def common(a: Type, b: Type) -> Type:
    """The type in which two values are combined."""
    if a == b:
        return a
    if a.is_float != b.is_float:
        if a.kind == "b" or b.kind == "b":
            return a if a.is_float else b
        raise NotUnderstood(f"{a} with {b}")
    if a.is_float:
        if a.kind != b.kind:
            raise NotUnderstood(f"{a} with {b}")
        return max(a, b, key=lambda kind: kind.bits)
    bits = max(a.bits, b.bits, 32)
    # as in C: the wider one, unsigned if both are as wide
    wide = [kind for kind in (wide_type(a), wide_type(b)) if kind.bits == bits]
    return Type("i" if all(kind.kind == "i" for kind in wide) else "u", bits)


def scaled(value: Value, by: Value) -> Value:
    """value · 2^by."""
    return rounded(f"{c_math('ldexp', value.type)}({value.c}, {by.converted(I32)})", value.type)


def rounded(c: str, kind: Type) -> Value:
    """A result of float arithmetic, rounded to its type."""
    if kind == F16:
        return Value(f"round_half({c})", F16)
    if kind.kind == "bf":
        return Value(f"round_bfloat({c})", kind)
    return Value(c, kind)


def wide_type(kind: Type) -> Type:
    """The type of a result of arithmetic: at least 32 bits, never bits without a meaning."""
    bits = 32 if kind.bits <= 32 else 64 if kind.bits <= 64 else 128
    return kind if kind.is_float else Type("i" if kind.kind == "i" else "u", bits)


def _may_overflow(c: str) -> bool:
    """True if a C expression may have bits above its type's: it is arithmetic on narrow values."""
    return any(operator in c for operator in ("~", " << ", " + ", " - ", " * "))


def is_small(c: str, bits: int) -> bool:
    """Whether a C expression is a number below another."""
    match = re.fullmatch(r"\(u32\)\(?[iu]\d+\)?\(?(0x[0-9a-f]+)u\)?|\([iu]\d+\)(0x[0-9a-f]+)u", c)
    return match is not None and int(match[1] or match[2], 16) < bits


def c_math(name: str, kind: Type) -> str:
    """C's name of a function of floats of a type."""
    return f"__builtin_{name}" + ("" if kind.bits == 64 else "f")


def quiet_bit(kind: Type) -> int:
    """The bit that makes a NaN of a type a quiet one."""
    return {16: 0x200, 32: 0x400000, 64: 1 << 51}[kind.bits]


def _fma(values: list[Value]) -> Value:
    kind = values[0].type
    if kind == F16:
        # exact in double but for sums that no rounding to 11 bits can tell apart
        c = ", ".join(f"(double){value.c}" for value in values)
        return Value(f"round_half_double(__builtin_fma({c}))", F16)
    return Value(f"{c_math('fma', kind)}({', '.join(value.converted(kind) for value in values)})", kind)


def _fract(values: list[Value]) -> Value:
    x, kind = values[0].c, values[0].type
    return rounded(f"({x} - {c_math('floor', kind)}({x}))", kind)


def _pow(values: list[Value]) -> Value:
    if not values[0].c.endswith(("2.0f", "2.0")):
        raise NotUnderstood("a power of another number than 2")
    return rounded(f"{c_math('exp2', values[1].type)}({values[1].c})", values[1].type)


def _turns(name: str) -> Callable[[list[Value]], Value]:
    def write(values: list[Value]) -> Value:
        return rounded(f"(float){name}_of_turns({values[0].c})", values[0].type)

    return write


def _exponent(values: list[Value]) -> Value:
    bits, kind = values[0].bits(), values[0].type
    shift, mask = {16: (10, 31), 32: (23, 255), 64: (52, 2047)}[kind.bits]
    return Value(f"(i32)({bits.c} >> {shift} & {mask})", I32)


def _sign(values: list[Value]) -> Value:
    return Value(f"({values[0].bits().c} >> {values[0].type.bits - 1} & 1)", U1)


def _frexp(which: str) -> Callable[[list[Value]], Value]:
    def write(values: list[Value]) -> Value:
        kind = values[0].type
        c = f"frexp_{which}({values[0].c})" if which == "exponent" else f"({kind.c})frexp_mantissa({values[0].c})"
        return Value(c, I32 if which == "exponent" else kind)

    return write


def _ldexp(values: list[Value]) -> Value:
    return scaled(values[0], values[1])


def _signext(values: list[Value]) -> Value:
    kind = values[0].type
    if kind.kind != "i":
        raise NotUnderstood("signext of an unsigned value")
    return Value(f"({kind.c}){values[0].c}", Type("i", 64))


def _signext_from_bit(values: list[Value]) -> Value:
    kind = wide_type(values[0].type)
    return Value(f"sign_from_bit_{kind.c}({values[0].c}, {values[1].c})", kind)


def _bit_count(values: list[Value]) -> Value:
    return Value(f"(u32)__builtin_popcountll((u64){values[0].c})", U32)


FUNCTIONS: Mapping[str, Callable[[list[Value]], Value]] = {
    "fma": _fma,
    "fract": _fract,
    "pow": _pow,
    "sin_turns": _turns("sine"),
    "cos_turns": _turns("cosine"),
    "exponent": _exponent,
    "sign": _sign,
    "mantissa": _frexp("mantissa"),
    "frexp_exponent": _frexp("exponent"),
    "ldexp": _ldexp,
    "signext": _signext,
    "signext_from_bit": _signext_from_bit,
    "bitCount": _bit_count,
}
