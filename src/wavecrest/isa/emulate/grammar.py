"""The grammar of AMD's pseudocode: types, tokens, and a parser that makes tuples of a text.

AMD describes each opcode in a small language: values of any width with a type at their end (`S0.f32`), bit ranges
(`S1[4 : 0]`), `if`, `for`, lambdas, calls of other opcodes. What is not understood raises NotUnderstood.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class NotUnderstood(Exception):
    """Pseudocode without a meaning here."""


class Type(NamedTuple):
    """`kind`: u, i, f, bf, or b for bits without a meaning."""

    kind: str
    bits: int

    @property
    def is_float(self) -> bool:
        return self.kind in ("f", "bf")

    @property
    def c(self) -> str:
        """The C type that holds such a value: 16-bit floats are float, narrow integers 32 bits."""
        if self.is_float:
            return "double" if self.bits == 64 else "float"
        return ("i" if self.kind == "i" else "u") + ("32" if self.bits <= 32 else "64" if self.bits <= 64 else "128")


U1, I32, U32 = Type("u", 1), Type("i", 32), Type("u", 32)
F16, F32, F64 = Type("f", 16), Type("f", 32), Type("f", 64)
_SUFFIX = re.compile(r"(bf|[uifb])(\d+)$")


def suffix_type(text: str) -> Type | None:
    """The type that `.f32` and its like name."""
    match = _SUFFIX.match(text)
    if match is None or (match[1] == "bf" and match[2] != "16") or (match[1] == "f" and match[2] not in "163264"):
        return None
    return Type(match[1], int(match[2]))


# expressions and statements: (what, parts…)
Node = tuple[Any, ...]

_TOKEN = re.compile(
    r"\s*(?:(?P<cast>\d+'(?:BF|[UIFB])\b)|(?P<sized>\d+'(?:0x[0-9a-fA-F]+|\d+\.\d+|\d+)U?)"
    r"|(?P<number>0x[0-9a-fA-F]+(?:U?LL|U)?|\d+\.\d+F?|\d+(?:ULL|LL|U)?)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<op>\*\*|<<|>>|<=|>=|==|!=|<>|&&|\|\||\+=|-=|\|=|&=|\+:|[-+*/~!&|^<>=?:.,;()\[\]{}]))"
)
_LEVELS: tuple[tuple[str, ...], ...] = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!=", "<>"),
    ("<", "<=", ">", ">="),
    ("<<", ">>"),
)
_LEVELS += (("+", "-"), ("*", "/"))
_ENDS = ("endif", "else", "elsif", "endfor", "")


class Parser:
    """A recursive descent parser of one opcode's pseudocode."""

    def __init__(self, text: str) -> None:
        text = re.sub(r"//[^\n]*", "", text)
        self.tokens: list[tuple[str, str]] = []
        at, end = 0, len(text.rstrip())
        while at < end:
            match = _TOKEN.match(text, at)
            if match is None:
                raise NotUnderstood(f"{text[at : at + 20].strip()!r}")
            self.tokens.append((str(match.lastgroup), match[0].strip()))
            at = match.end()
        self.at = 0

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead][1] if self.at + ahead < len(self.tokens) else ""

    def take(self, *wanted: str) -> str:
        text = self.peek()
        if not text or (wanted and text not in wanted):
            raise NotUnderstood(f"{text or 'the end'!r} in place of {wanted}")
        self.at += 1
        return text

    def skip(self, text: str) -> bool:
        if self.peek() == text:
            self.at += 1
            return True
        return False

    def program(self) -> list[Node]:
        statements = self.block()
        if self.peek():
            raise NotUnderstood(f"{self.peek()!r} at the start of a statement")
        return statements

    def block(self, *ends: str) -> list[Node]:
        statements: list[Node] = []
        while self.skip(";"):
            pass
        while self.peek() not in (ends or _ENDS):
            statements.append(self.statement())
            while self.skip(";"):
                pass
        return statements

    def statement(self) -> Node:
        word = self.peek()
        if word == "if":
            return self.choice()
        if word == "for":
            return self.loop()
        if word == "declare":
            return self.declaration()
        if word in ("break", "return"):
            self.take()
            return ("break",) if word == "break" else ("return", self.expression())
        target = self.postfix()
        operator = self.take("=", "+=", "-=", "|=", "&=")
        if self.peek() == "lambda":
            return self.function(target)
        targets = [target]
        value = self.expression()
        while operator == "=" and self.skip("="):
            targets.append(value)
            value = self.expression()
        if operator != "=":
            value = ("binary", operator[0], target, value)
        return ("assign", targets, value)

    def choice(self) -> Node:
        self.take("if")
        branches: list[tuple[Node | None, list[Node]]] = []
        condition: Node | None = self.expression()
        self.take("then")
        branches.append((condition, self.block()))
        while self.peek() in ("elsif", "else"):
            condition = None
            if self.take() == "elsif":
                condition = self.expression()
                self.take("then")
            branches.append((condition, self.block()))
        self.take("endif")
        return ("if", branches)

    def loop(self) -> Node:
        self.take("for")
        name = self.take()
        self.take("in")
        first = self.expression()
        self.take(":")
        last = self.expression()
        self.take("do")
        body = self.block()
        self.take("endfor")
        return ("for", name, first, last, body)

    def declaration(self) -> Node:
        self.take("declare")
        name = self.take()
        self.take(":")
        kind, text = self.tokens[self.at]
        if kind != "cast":
            raise NotUnderstood(f"declaration of {name}")
        self.at += 1
        count = 0
        if self.skip("["):
            count = int(self.take())
            self.take("]")
        return ("declare", name, _cast_type(text), count)

    def function(self, target: Node) -> Node:
        self.take("lambda")
        self.take("(")
        names = [self.take()]
        while self.skip(","):
            names.append(self.take())
        self.take(")")
        self.take("(")
        if self.peek() in ("if", "declare", "return"):
            body = self.block(")")
        else:
            body = [("return", self.expression())]
        self.take(")")
        if target[0] != "name":
            raise NotUnderstood("a function without a name")
        return ("function", target[1], names, body)

    def expression(self) -> Node:
        condition = self.binary(0)
        if not self.skip("?"):
            return condition
        yes = self.expression()
        self.take(":")
        return ("select", condition, yes, self.expression())

    def binary(self, level: int) -> Node:
        if level == len(_LEVELS):
            return self.unary()
        left = self.binary(level + 1)
        while self.peek() in _LEVELS[level]:
            operator = self.take()
            left = ("binary", operator, left, self.binary(level + 1))
        return left

    def unary(self) -> Node:
        if self.peek() in ("-", "+", "~", "!"):
            operator = self.take()
            value = self.unary()
            return value if operator == "+" else ("unary", operator, value)
        base = self.postfix()
        return ("power", base, self.unary()) if self.skip("**") else base

    def postfix(self) -> Node:
        value = self.primary()
        while True:
            if self.skip("."):
                value = ("suffix", value, self.take())
            elif self.skip("["):
                first = self.expression()
                if self.skip(":"):
                    value = ("slice", value, first, self.expression())
                elif self.skip("+:"):
                    width = self.expression()
                    value = ("slice", value, ("binary", "-", ("binary", "+", first, width), ("number", "1")), first)
                else:
                    value = ("index", value, first)
                self.take("]")
            elif self.peek() == "(" and value[0] == "name":
                value = ("call", value[1], self.arguments())
            else:
                return value

    def arguments(self) -> list[Node]:
        self.take("(")
        found = []
        if not self.skip(")"):
            found.append(self.expression())
            while self.skip(","):
                found.append(self.expression())
            self.take(")")
        return found

    def primary(self) -> Node:
        if self.at >= len(self.tokens):
            raise NotUnderstood("the end in an expression")
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "cast":
            return ("cast", _cast_type(text), self.arguments()[0])
        if kind == "number":
            return ("number", text)
        if kind == "sized":
            return ("sized", text)
        if kind == "name":
            return ("name", text)
        if text == "(":
            value = self.expression()
            self.take(")")
            return value
        if text == "{":
            parts = [self.expression()]
            while self.skip(","):
                parts.append(self.expression())
            self.take("}")
            return ("join", parts)
        raise NotUnderstood(f"{text!r} in an expression")


def _cast_type(text: str) -> Type:
    bits, kind = text.split("'")
    return Type(kind.lower(), int(bits))
