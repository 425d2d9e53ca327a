"""AMD's pseudocode of an opcode as C: a writer of statements and expressions, whose values have types (`values`).

What it has no meaning for raises `grammar.NotUnderstood`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from wavecrest.isa.emulate.grammar import (
    F16,
    F32,
    F64,
    I32,
    U1,
    U32,
    Node,
    NotUnderstood,
    Parser,
    Type,
    suffix_type,
)
from wavecrest.isa.emulate.values import (
    EXACT,
    FUNCTIONS,
    MATH,
    Value,
    c_math,
    common,
    is_small,
    quiet_bit,
    rounded,
    scaled,
    wide_type,
)


@dataclass
class Variable:
    """A C variable; `count` elements if it is an array. `raw`: it holds bits whatever `type` is (registers)."""

    c: str
    type: Type
    count: int = 0
    raw: bool = False


# names with a value of their own: C text and type
_CONSTANTS = {
    "PI": Value("3.14159265358979323846", F64),
    "INF": Value("(double)INFINITY", F64),
    "UNDERFLOW_F32": Value("0.0f", F32),
    "OVERFLOW_F32": Value("INFINITY", F32),
    "UNDERFLOW_F64": Value("0.0", F64),
    "OVERFLOW_F64": Value("(double)INFINITY", F64),
}
_SPECIAL = {("INF", F16): "INFINITY", ("INF", F32): "INFINITY", ("INF", F64): "(double)INFINITY"}
_SPECIAL |= {("NAN", F16): "NAN", ("NAN", F32): "NAN", ("NAN", F64): "(double)NAN"}
_CONVERT = re.compile(r"(bf16|[uif]\d+)_to_(bf16|[uif]\d+)$")


@dataclass
class Writer:
    """Writes C statements for the statements of an opcode.

    Attributes:
        variables: what the pseudocode may name: sources, results, state.
        opcode: gives the pseudocode of another opcode by the name it is called by, and its parameters' types.
        lane: True for a vector instruction, whose masks have a bit per lane.
        saturates: results of integer arithmetic stop at the ends of their type: the clamp modifier of integers.
    """

    variables: dict[str, Variable]
    opcode: Callable[[str], str | None] = lambda _name: None
    lane: bool = True
    saturates: bool = False
    lines: list[str] = field(default_factory=list)
    declared: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, tuple[list[str], list[Node]]] = field(default_factory=dict)
    helpers: dict[str, str] = field(default_factory=dict)
    # names that were assigned, and the types their results were given
    written: dict[str, set[Type]] = field(default_factory=dict)
    sliced: set[str] = field(default_factory=set)
    rounding: str = "even"
    returned: Variable | None = None
    serial: int = 0

    def program(self, text: str) -> None:
        """Write a whole pseudocode."""
        statements = Parser(text).program()
        self.widths = _widths(text)
        self.statements(statements)

    def statements(self, statements: list[Node]) -> None:
        for statement in statements:
            getattr(self, "_do_" + statement[0])(*statement[1:])

    # statements

    def _do_break(self) -> None:
        self.lines.append("break;")

    def _do_declare(self, name: str, kind: Type, count: int) -> None:
        if name in self.variables:
            return
        if name == "S" and count == 3:
            sources = [self.variables[part].c for part in ("S0", "S1", "S2")]
            self.lines.append(f"u32 all_sources[3] = {{{', '.join(sources)}}};")
            self.declared["S"] = Variable("all_sources", Type("b", 32), 3, raw=True)
            return
        self._declare(name, kind, count)

    def _declare(self, name: str, kind: Type, count: int = 0) -> Variable:
        self.serial += 1
        variable = Variable(f"{name}_{self.serial}", kind, count)
        self.lines.insert(0, f"{kind.c} {variable.c}{f'[{count}] = {{0}}' if count else ' = 0'};")
        self.declared[name] = variable
        return variable

    def _do_function(self, name: str, names: list[str], body: list[Node]) -> None:
        self.functions[name] = names, body

    def _do_return(self, value: Node) -> None:
        got = self.value(value)
        if self.returned is None:
            raise NotUnderstood("return outside of a function")
        if self.returned.type.bits == 0:
            self.returned.type = got.type
        self.lines.append(f"{self.returned.c} = {self.converted(got, self.returned.type)};")

    def _do_if(self, branches: list[tuple[Node | None, list[Node]]]) -> None:
        closing = 0
        for condition, body in branches:
            if condition is not None:
                # what the condition needs comes before it
                test = self.truth(condition)
                self.lines.append(f"if ({test}) {{")
                closing += 1
            self._nested(body)
            self.lines.append("} else {" if condition is not None else "")
        self.lines.append("}" * closing)

    def _nested(self, body: list[Node]) -> None:
        # declarations go to the beginning of everything
        self.statements(body)

    def _do_for(self, name: str, first: Node, last: Node, body: list[Node]) -> None:
        begin, end = self.value(first), self.value(last)
        before = self.declared.get(name)
        self.serial += 1
        variable = Variable(f"{name}_{self.serial}", I32)
        self.declared[name] = variable
        self.lines.append(f"for (i32 {variable.c} = {begin.c}; {variable.c} <= (i32){end.c}; {variable.c}++) {{")
        self._nested(body)
        self.lines.append("}")
        if before is not None:
            self.declared[name] = before

    def _do_assign(self, targets: list[Node], value: Node) -> None:
        if targets[0] == ("name", "ROUND_MODE"):
            self.rounding = "zero" if value == ("name", "ROUND_TOWARD_ZERO") else "even"
            return
        if value == ("name", "ROUND_MODE") or targets[0][:2] == ("suffix", ("name", "TRAPSTS")):
            return
        got = self.value(value)
        if len(targets) > 1:
            self.serial += 1
            self.lines.append(f"{got.type.c} several_{self.serial} = {got.c};")
            got = Value(f"several_{self.serial}", got.type)
        for target in targets:
            self.assign(target, got)

    def assign(self, target: Node, value: Value) -> None:
        """Write an assignment to a name, its typed form, a bit, a range, an element, or several joined ones."""
        what = target[0]
        if what == "join":
            self._assign_joined(target[1], value)
            return
        kind: Type | None = None
        if what == "suffix":
            kind = suffix_type(target[2])
            if kind is None:
                raise NotUnderstood(f"assignment to .{target[2]}")
            if target[1][0] == "slice":
                self._assign_slice(target[1], Value(self.converted(value, kind), kind).bits(), kind)
                return
            target = target[1]
            what = target[0]
        if what == "slice":
            self._assign_slice(target, value.bits(), value.type)
        elif what == "index":
            self._assign_index(target, value)
        elif what == "name":
            self._assign_name(target[1], value, kind)
        else:
            raise NotUnderstood(f"assignment to {what}")

    def _assign_name(self, name: str, value: Value, kind: Type | None) -> None:
        if self.lane and name in ("VCC", "EXEC"):
            # one bit of this lane
            self._lane_bit(name, value)
            return
        variable = self.find(name)
        if variable is None:
            variable = self._declare(name, kind or value.type)
        kind = kind or (Type("b", variable.type.bits) if variable.raw else variable.type)
        if variable.raw:
            if kind.is_float or not value.type.is_float or kind.kind != "b":
                value = Value(self.converted(value, kind), kind)
            self.written.setdefault(name, set()).add(value.type)
            self.lines.append(f"{variable.c} = {value.bits().c};")
            return
        if variable.type != kind:
            value = Value(self.converted(value, kind), kind)
            self.lines.append(f"{variable.c} = {value.reinterpreted(variable.type).c};")
            return
        self.lines.append(f"{variable.c} = {self.converted(value, kind)};")

    def _lane_bit(self, name: str, value: Value) -> None:
        self.written.setdefault(name, set()).add(U1)
        self.lines.append(f"{name}_bit = {self.converted(value, U1)};")

    def _assign_slice(self, target: Node, value: Value, kind: Type) -> None:
        base = target[1]
        if base[0] == "suffix":
            base = base[1]
        if base[0] != "name":
            raise NotUnderstood("assignment to a range of an expression")
        low, width, reverse = self.span(target)
        if reverse:
            raise NotUnderstood("assignment to a reversed range")
        variable = self.find(base[1])
        if variable is None:
            variable = self._declare(base[1], Type("b", self.widths.get(base[1], 32)))
        if variable.type.is_float or variable.count:
            raise NotUnderstood(f"a range of {base[1]}, which is {variable.type}")
        self.sliced.add(base[1])
        self.written.setdefault(base[1], set()).add(kind)
        if width == variable.type.bits and low == "0":
            self.lines.append(f"{variable.c} = {value.c};")
            return
        c = variable.type.c.replace("i", "u")
        mask = f"(({c}){(1 << min(width, 64)) - 1:#x}ull << {low})"
        self.lines.append(f"{variable.c} = ({variable.c} & ~{mask}) | (({c}){value.c} << {low} & {mask});")

    def _assign_index(self, target: Node, value: Value) -> None:
        base = target[1]
        typed = base[1] if base[0] == "suffix" else base
        if typed[0] != "name":
            raise NotUnderstood("assignment to a bit of an expression")
        name = typed[1]
        if target[2] == ("name", "laneId") and name in ("VCC", "EXEC", "D0"):
            self._lane_bit(name, value)
            return
        variable = self.find(name)
        if variable is None:
            raise NotUnderstood(f"a bit of {name}, which has no value")
        at = self.value(target[2]).c
        if variable.count:
            self.lines.append(f"{variable.c}[{at}] = {self.converted(value, variable.type)};")
            return
        self.sliced.add(name)
        self.written.setdefault(name, set()).add(Type("b", variable.type.bits))
        c = variable.type.c.replace("i", "u")
        bit = self.converted(value, U1)
        self.lines.append(f"{variable.c} = ({variable.c} & ~(({c})1 << {at})) | ({c}){bit} << {at};")

    def _assign_joined(self, parts: list[Node], value: Value) -> None:
        bits = value.bits()
        self.serial += 1
        whole = f"joined_{self.serial}"
        self.lines.append(f"{bits.type.c} {whole} = {bits.c};")
        low = 0
        for part in reversed(parts):
            kind = suffix_type(part[2]) if part[0] == "suffix" else None
            if kind is None or part[1][0] != "name":
                raise NotUnderstood("assignment to joined values without types")
            piece = Value(f"({whole} >> {low})", Type("b", value.type.bits)).reinterpreted(kind)
            if part[1][1] == "D1":
                self._lane_bit("VCC", piece)
            else:
                self.assign(part, piece)
            low += kind.bits

    # values

    def find(self, name: str) -> Variable | None:
        return self.declared.get(name) or self.variables.get(name)

    def truth(self, node: Node) -> str:
        return self.value(node).c

    def value(self, node: Node) -> Value:
        """The C of an expression."""
        result: Value = getattr(self, "_get_" + node[0])(*node[1:])
        return result

    def _get_number(self, text: str) -> Value:
        if "." in text:
            return Value(f"{text[:-1]}f", F32) if text.endswith("F") else Value(text, F64)
        digits = text.rstrip("UL")
        number = int(digits, 0)
        wide = text.endswith("LL") or number > 0xFFFFFFFF
        unsigned = "U" in text or (digits.startswith("0x") and number > 0x7FFFFFFF)
        kind = Type("u" if unsigned else "i", 64 if wide else 32)
        return Value(f"({kind.c}){number:#x}{'ull' if wide else 'u'}", kind)

    def _get_sized(self, text: str) -> Value:
        bits, number = text.split("'")
        if "." in number:
            kind = Type("f", int(bits))
            return Value(f"({kind.c}){number}", kind)
        # without a letter it takes part in any arithmetic
        kind = Type("u" if number.endswith("U") else "i", int(bits))
        return Value(f"({kind.c}){int(number.rstrip('U'), 0):#x}", kind)

    def _get_name(self, name: str) -> Value:
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        variable = self.find(name)
        if variable is None or variable.count:
            raise NotUnderstood(f"the name {name}")
        return Value(variable.c, Type("b", variable.type.bits) if variable.raw else variable.type)

    def _get_suffix(self, base: Node, text: str) -> Value:
        if base[0] == "name":
            if base[1] == "WAVE_MODE" and text == "IEEE":
                return Value("(w->s[HWREG + HWREG_MODE] >> 9 & 1)", U1)
            kind = suffix_type(text)
            if kind is not None and (base[1], kind) in _SPECIAL:
                return Value(_SPECIAL[base[1], kind], kind)
            if base[1] in ("laneId", "laneID") and kind is not None:
                return Value("lane", kind)
        kind = suffix_type(text)
        if kind is None:
            raise NotUnderstood(f".{text}")
        return self.value(base).reinterpreted(kind)

    def _get_cast(self, kind: Type, node: Node) -> Value:
        value = self.value(node)
        if kind.is_float and (value.type.kind == "b" or (node[0] == "number" and node[1].startswith("0x"))):
            return value.reinterpreted(kind)
        return Value(self.converted(value, kind), kind)

    def _get_select(self, condition: Node, yes: Node, no: Node) -> Value:
        test, a, b = self.truth(condition), self.value(yes), self.value(no)
        kind = common(a.type, b.type)
        return Value(f"({test} ? {self.converted(a, kind)} : {self.converted(b, kind)})", kind)

    def _get_join(self, parts: list[Node]) -> Value:
        values = [self.value(part).bits() for part in parts]
        total = sum(value.type.bits for value in values)
        kind, low, pieces = Type("b", total), 0, []
        for value in reversed(values):
            masked = value.reinterpreted(Type("u", value.type.bits)).c
            pieces.append(f"({kind.c}){masked} << {low}")
            low += value.type.bits
        return Value(f"({' | '.join(pieces)})", kind)

    def span(self, node: Node) -> tuple[str, int, bool]:
        """The lowest bit, the width and whether the bits are reversed, of a range."""
        _, _, high, low = node
        top, bottom = _constant(high), _constant(low)
        if top is not None and bottom is not None:
            return str(min(top, bottom)), abs(top - bottom) + 1, top < bottom
        # [at + 7 : at], and [i * 8 + 7 : i * 8]
        if high[0] == "binary" and high[1] == "+" and high[2] == low and (width := _constant(high[3])) is not None:
            return f"{self.value(low).c}", width + 1, False
        if (
            high[0] == "binary" and high[1] == "-" and high[2][0] == "binary" and high[2][2] == low
            and (width := _constant(high[2][3])) is not None
        ):  # fmt: skip
            return f"{self.value(low).c}", width, False
        raise NotUnderstood("a range whose width is not fixed")

    def _get_slice(self, base: Node, high: Node, low: Node) -> Value:
        value = self.value(base)
        if base[0] == "suffix" and base[1][0] == "name" and (register := self.find(base[1][1])) and register.raw:
            # the suffix says what the bits mean, and not how many there are: S0.u32[63 : 32]
            value = Value(register.c, Type("u" if value.type.kind == "u" else "b", register.type.bits))
        at, width, reverse = self.span(("slice", base, high, low))
        bits = value.bits()
        if reverse:
            if width not in (32, 64) or at != "0":
                raise NotUnderstood("reversed bits of another width")
            return Value(f"reverse_bits{width}({bits.c})", Type("b", width))
        kind = Type("u" if value.type.kind == "u" else "b", width)
        shifted = bits.c if at == "0" else f"({bits.c} >> {at})"
        return Value(shifted, bits.type).reinterpreted(kind)

    def _get_index(self, base: Node, at: Node) -> Value:
        name = base[1] if base[0] == "name" else base[1][1] if base[0] == "suffix" and base[1][0] == "name" else ""
        if at == ("name", "laneId") and name in ("VCC", "EXEC"):
            return Value(f"({self.variables[name].c} >> lane & 1)", U1)
        if base[0] == "name" and (variable := self.find(base[1])) is not None and variable.count:
            kind = Type("b", variable.type.bits) if variable.raw else variable.type
            return Value(f"{variable.c}[{self.value(at).c}]", kind)
        bits = self.value(base).bits()
        return Value(f"({bits.c} >> {self.value(at).c} & 1)", U1)

    def _get_unary(self, operator: str, node: Node) -> Value:
        value = self.value(node)
        if operator == "!":
            return Value(f"(!{value.c})", U1)
        if operator == "~":
            if value.type.is_float:
                raise NotUnderstood("~ of a float")
            return Value(f"(~{value.c})", wide_type(value.type))
        if value.type.is_float:
            return Value(f"(-{value.c})", value.type)
        kind = wide_type(value.type)
        return Value(f"(({kind.c})-({kind.c.replace('i', 'u')}){value.c})", kind)

    def _get_power(self, base: Node, exponent: Node) -> Value:
        kind = self.value(base).type
        if base[0] != "number" or float(base[1].rstrip("F")) != 2:
            raise NotUnderstood("a power of another number than 2")
        return Value(f"{c_math('ldexp', kind)}(1, {self.converted(self.value(exponent), I32)})", kind)

    def _get_binary(self, operator: str, left: Node, right: Node) -> Value:
        if operator == "*":
            # x * 2 ** n is exact wherever its result is
            for number, power in ((left, right), (right, left)):
                inner = power[2] if power[0] == "cast" else power
                if inner[0] == "power" and number[0] != "power":
                    self._get_power(*inner[1:])
                    return scaled(self.value(number), self.value(inner[2]))
        if operator in ("==", "!=") and right[0] == "suffix" and right[1] == ("name", "DENORM"):
            value = self.value(left)
            return Value(f"{'!' * (operator == '!=')}is_denormal{value.type.bits}({value.bits().c})", U1)
        a, b = self.value(left), self.value(right)
        if operator in ("&&", "||"):
            return Value(f"({a.c} {operator} {b.c})", U1)
        if operator in ("<<", ">>"):
            return self.shifted(operator, a, b)
        kind = common(a.type, b.type)
        x, y = self.converted(a, kind), self.converted(b, kind)
        if operator == "<>":
            return Value(f"({x} < {y} || {x} > {y})", U1)
        if operator in ("==", "!=", "<", "<=", ">", ">="):
            return Value(f"({x} {operator} {y})", U1)
        if kind.is_float:
            return rounded(f"({x} {operator} {y})", kind)
        if operator == "/":
            raise NotUnderstood("division of integers")
        if self.saturates and kind.bits <= 32:
            return Value(f"((i64){a.c} {operator} (i64){b.c})", EXACT)
        # signed overflow wraps
        unsigned = kind.c.replace("i", "u")
        return Value(f"({kind.c})(({unsigned}){x} {operator} ({unsigned}){y})", wide_type(kind))

    def shifted(self, operator: str, a: Value, b: Value) -> Value:
        kind = wide_type(a.type)
        if a.type.is_float or kind.bits > 64:
            if kind.bits > 64 and not a.type.is_float and operator == ">>":
                return Value(f"({a.c} >> ({b.c}))", kind)
            raise NotUnderstood(f"a shift of {a.type}")
        x, count = self.converted(a, kind), self.converted(b, U32)
        if b.type.bits <= (5 if kind.bits == 32 else 6) or (b.c.startswith("(") and is_small(b.c, kind.bits)):
            unsigned = kind.c.replace("i", "u")
            x = f"({kind.c})(({unsigned}){x} << {count})" if operator == "<<" else f"({x} >> {count})"
            return Value(x, kind)
        return Value(f"{'left' if operator == '<<' else 'right'}_{kind.c}({x}, {count})", kind)

    def converted(self, value: Value, kind: Type) -> str:
        """As `Value.converted`, where results stop at the ends of their type if those of this opcode do."""
        return value.converted(kind, saturates=self.saturates)

    # calls

    def _get_call(self, name: str, arguments: list[Node]) -> Value:
        if name in self.functions:
            return self._inlined(*self.functions[name], arguments)
        # these look at a value before it is made wider
        if name in ("isSignalNAN", "isQuietNAN", "isNAN", "cvtToQuietNAN"):
            argument = arguments[0]
            while argument[0] == "cast" and argument[1].is_float and self.value(argument[2]).type.is_float:
                argument = argument[2]
            value = self.value(argument)
            bits = value.bits()
            if name == "cvtToQuietNAN":
                return Value(f"({bits.c} | {quiet_bit(value.type):#x})", bits.type).reinterpreted(value.type)
            test = {"isNAN": "is_nan", "isSignalNAN": "is_signaling", "isQuietNAN": "is_quiet"}[name]
            return Value(f"{test}{value.type.bits}({bits.c})", U1)
        values = [self.value(argument) for argument in arguments]
        if (match := _CONVERT.match(name)) is not None and len(values) == 1:
            return self._conversion(values[0], match[1], match[2])
        if name in MATH and len(values) == 1 and values[0].type.is_float:
            return rounded(f"{c_math(MATH[name], values[0].type)}({values[0].c})", values[0].type)
        if name.startswith("v_") and (text := self.opcode(name)) is not None:
            return self._other_opcode(name, text, values)
        function = FUNCTIONS.get(name)
        if function is None:
            raise NotUnderstood(f"the function {name}")
        return function(values)

    def _conversion(self, value: Value, source: str, target: str) -> Value:
        have, kind = suffix_type(source), suffix_type(target)
        assert have is not None and kind is not None
        if value.type != have:
            value = value.reinterpreted(have)
        if have.is_float and not kind.is_float:
            if kind.bits not in (16, 32) or have.kind == "bf":
                raise NotUnderstood(f"{source}_to_{target}")
            c = "double" if have == F64 else "float"
            return Value(f"{c}_to_{target}({value.c})", kind)
        if have == F32 and kind == F16:
            return Value(f"{'cut_half' if self.rounding == 'zero' else 'round_half'}(quiet({value.c}))", F16)
        if not have.is_float and not kind.is_float and kind.bits < have.bits:
            # saturates
            low, high = (
                (-(1 << kind.bits - 1), (1 << kind.bits - 1) - 1) if kind.kind == "i" else (0, (1 << kind.bits) - 1)
            )
            x = value.c
            below = f"{x} < {low} ? {low} : " if have.kind == "i" else ""
            return Value(f"({kind.c})({below}{x} > {high} ? {high} : {x})", kind)
        return Value(self.converted(value, kind), kind)

    def _inlined(self, names: list[str], body: list[Node], arguments: list[Node]) -> Value:
        values = [self.value(argument) for argument in arguments]
        self.serial += 1
        kept, kept_return = dict(self.declared), self.returned
        result = Variable(f"result_{self.serial}", Type("u", 0))
        for name, value in zip(names, values, strict=True):
            local = self._declare(name, value.type)
            self.lines.append(f"{local.c} = {value.c};")
        self.returned = result
        self.statements(body)
        if result.type.bits == 0:
            raise NotUnderstood("a function without a value")
        self.lines.insert(0, f"{result.type.c} {result.c} = 0;")
        self.declared, self.returned = kept, kept_return
        return Value(result.c, result.type)

    def _other_opcode(self, name: str, text: str, values: list[Value]) -> Value:
        if name not in self.helpers:
            inner = Writer({f"S{i}": Variable(f"S{i}", Type("b", 32), raw=True) for i in range(3)}, self.opcode)
            inner.variables["D0"] = Variable("D0", Type("b", 32), raw=True)
            inner.helpers = self.helpers
            inner.program(text)
            kinds = inner.written.get("D0", set())
            if len(kinds) != 1 or "D0" in inner.sliced:
                raise NotUnderstood(f"the result of {name}")
            kind = next(iter(kinds))
            body = "\n".join(inner.lines)
            result = Value("D0", Type("b", 32)).reinterpreted(kind).c
            self.helpers[name] = (
                f"static inline {kind.c} {name}(const Wave* w, u32 S0, u32 S1, u32 S2) {{\nu32 D0 = 0;\n"
                f"(void)w, (void)S2;\n{body}\nreturn {result};\n}}\n"
            )
            self.helpers[name + " kind"] = f"/* {kind.kind}{kind.bits} */\n"
        found = re.search(r"(bf|[a-z])(\d+)", self.helpers[name + " kind"])
        assert found is not None
        given = [f"(u32){value.bits().c}" for value in values]
        return Value(f"{name}(w, {', '.join(given + ['0'] * (3 - len(given)))})", Type(found[1], int(found[2])))


def _constant(node: Node) -> int | None:
    """The number that an expression is, or None."""
    if node[0] == "number" and "." not in node[1]:
        return int(node[1].rstrip("UL"), 0)
    if node[0] == "binary" and node[1] in "+-*":
        left, right = _constant(node[2]), _constant(node[3])
        if left is not None and right is not None:
            return {"+": left + right, "-": left - right, "*": left * right}[node[1]]
    return None


def _widths(text: str) -> dict[str, int]:
    """How many bits a name needs that is first assigned by ranges."""
    found: dict[str, int] = {}
    for name, high in re.findall(r"(\w+)\[(\d+) : \d+\]", text):
        bits = 32 if int(high) < 32 else 64 if int(high) < 64 else 128
        found[name] = max(found.get(name, 0), bits)
    return found
