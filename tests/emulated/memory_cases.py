"""Cases of opcodes that move memory: loads, stores and atomics of LDS and of global memory, by their names.

A lane has 16 bytes of its own. They hold what the third source has, the opcode works on them with the first source (an
atomic that compares, with the second too), and what it returned or left is the result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tests.emulated import meanings
from tests.emulated.meanings import Given, Meaning, Number, Result, decoded, encoded

# (bytes, sign) of what a name ends with
_SIZES = {
    "ubyte": (1, False), "sbyte": (1, True), "ushort": (2, False), "sshort": (2, True), "dword": (4, False),
    "dwordx2": (8, False), "byte": (1, False), "short": (2, False), "u8": (1, False), "i8": (1, True),
    "u16": (2, False), "i16": (2, True), "b8": (1, False), "b16": (2, False), "b32": (4, False), "b64": (8, False),
}  # fmt: skip
# with which instructions a space is read and written whole, and how it is addressed
_SPACES = {
    "ds": ("ds_write_b64 v30, {}", "ds_read_b64 {}, v30", "v30", ""),
    "global": ("global_store_dwordx2 v2, {}, s[6:7]", "global_load_dwordx2 {}, v2, s[6:7]", "v2", ", s[6:7]"),
    "flat": ("flat_store_dwordx2 v[32:33], {}", "flat_load_dwordx2 {}, v[32:33]", "v[32:33]", ""),
    "buffer": (
        "buffer_store_dwordx2 {}, v2, s[44:47], 0 offen", "buffer_load_dwordx2 {}, v2, s[44:47], 0 offen", "v2",
        ", s[44:47], 0 offen",
    ),
}  # fmt: skip
# addresses: of LDS, and flat; and a description of the memory that buffer instructions take
PREPARE = [
    "v_lshlrev_b32_e32 v30, 3, v0",
    "v_mov_b32_e32 v33, s7",
    "v_add_co_u32_e32 v32, vcc, s6, v2",
    "v_addc_co_u32_e32 v33, vcc, 0, v33, vcc",
    "s_mov_b64 s[44:45], s[6:7]",
    "s_and_b32 s45, s45, 0xffff",
    "s_movk_i32 s46, 0x400",
    "s_mov_b32 s47, 0x27000",
]
_WAIT = "s_waitcnt vmcnt(0) lgkmcnt(0)"

_WHOLE: dict[str, Callable[[int, int, int], int]] = {
    "add": lambda old, x, _w: old + x,
    "sub": lambda old, x, _w: old - x,
    "and": lambda old, x, _w: old & x,
    "or": lambda old, x, _w: old | x,
    "xor": lambda old, x, _w: old ^ x,
    "swap": lambda _old, x, _w: x,
    "wrxchg": lambda _old, x, _w: x,
    "inc": lambda old, x, _w: 0 if old >= x else old + 1,
    "dec": lambda old, x, _w: x if old == 0 or old > x else old - 1,
    "umin": lambda old, x, _w: min(old, x),
    "umax": lambda old, x, _w: max(old, x),
    "smin": lambda old, x, w: min(meanings.signed(old, w), meanings.signed(x, w)),
    "smax": lambda old, x, w: max(meanings.signed(old, w), meanings.signed(x, w)),
}
_FLOATS: dict[str, Callable[[Number, Number], Number]] = {
    "add": meanings.added,
    "min": meanings.smallest,
    "max": meanings.largest,
}


def _new(operation: str, kind: str) -> tuple[Callable[[int, int], int], int]:
    """The function from an old value and an operand to the new value, and the operand's bits."""
    if operation == "pk_add":

        def both(old: int, x: int) -> int:
            parts = [
                encoded(meanings.added(*(decoded(v >> 16 * i & 0xFFFF, kind) for v in (old, x))), kind) for i in (0, 1)
            ]
            return parts[0] | parts[1] << 16

        return both, 32
    width = meanings.bits_of(kind)
    if kind[0] == "f":
        change = _FLOATS[operation]
        return lambda old, x: encoded(change(decoded(old, kind), decoded(x, kind)), kind), width
    if operation in ("min", "max"):
        operation = ("s" if kind[0] == "i" else "u") + operation
    whole = _WHOLE[operation]
    return lambda old, x: whole(old, x, width) & (1 << width) - 1, width


class MemoryCase(NamedTuple):
    """An opcode's name, its lines, the kind of its three sources, bits of its result, and its meaning."""

    name: str
    lines: list[str]
    kind: str
    bits: int
    meaning: Meaning


def _atomic(space: str, name: str, operation: str, kind: str, returns: bool) -> Iterator[MemoryCase]:
    """An atomic's old value, if it returns it, and what it leaves."""
    fill, read, address, more = _SPACES[space]
    new, width = _new(operation, kind)
    wide, only = width == 64, (1 << width) - 1
    operand, got = ("v[10:11]", "v[40:41]") if wide else ("v10", "v40")
    if space == "ds":
        line = f"{name} {f'{got}, ' if returns else ''}{address}, {operand}"
    elif space == "buffer":
        # the operand's registers take the old value
        line = f"v_mov_b32_e32 v40, v10\n  v_mov_b32_e32 v41, v11\n  {name} {got}, {address}{more} sc0"
    else:
        line = f"{name} {got}, {address}, {operand}{more} sc0"
    start = [fill.format("v[14:15]"), _WAIT, line, _WAIT]
    # NaN of floats are alike, and of integers the bits beside the value count
    source, result = ("int", "u64") if kind[0] in "ui" else (kind, kind)
    elements = 2 if operation == "pk_add" else 1

    def left(given: Given) -> Result:
        found = new(given.sources[2] & only, given.sources[0] & only)
        return Result(found | (given.sources[2] >> width << width if source == "int" else 0))

    bits = 64 if source == "int" else width
    yield MemoryCase(name, [*start, read.format("v[20:21]"), _WAIT], source, bits, Meaning(left, result, elements))
    if returns:
        moves = ["v_mov_b32_e32 v20, v40", *(["v_mov_b32_e32 v21, v41"] if wide else [])]
        old = Meaning(lambda given: Result(given.sources[2] & only), f"u{width}")
        yield MemoryCase(f"{name} returns", [*start, *moves], source, width, old)


def _load(space: str, name: str, size: int, is_signed: bool, half: str) -> MemoryCase:
    fill, _, address, more = _SPACES[space]
    target = "v[20:21]" if size == 8 else "v20"

    def loaded(given: Given) -> Result:
        value = given.sources[2] & (1 << 8 * size) - 1
        value = meanings.signed(value, 8 * size) if is_signed else value
        if half == "hi":
            return Result((value & 0xFFFF) << 16 | given.before & 0xFFFF)
        if half:
            return Result(value & 0xFFFF | given.before & 0xFFFF0000)
        return Result(value & (1 << (64 if size == 8 else 32)) - 1)

    lines = [fill.format("v[14:15]"), _WAIT, f"{name} {target}, {address}{more}", _WAIT]
    bits = 64 if size == 8 else 32
    return MemoryCase(name, lines, "int", bits, Meaning(loaded, f"u{bits}"))


def _store(space: str, name: str, size: int, high: bool) -> MemoryCase:
    fill, read, address, more = _SPACES[space]
    data = "v[10:11]" if size == 8 else "v10"

    def stored(given: Given) -> Result:
        only = (1 << 8 * size) - 1
        return Result(given.sources[2] & ~only | given.sources[0] >> 16 * high & only)

    words = f"{name} {data}, {address}{more}" if space == "buffer" else f"{name} {address}, {data}{more}"
    lines = [fill.format("v[14:15]"), _WAIT, words, _WAIT, read.format("v[20:21]"), _WAIT]
    return MemoryCase(name, lines, "int", 64, Meaning(stored, "u64"))


def memory(name: str) -> list[MemoryCase]:
    """The cases of an opcode; none if its name is of no access to memory that is compared."""
    space, _, rest = name.partition("_")
    if space not in _SPACES:
        return []
    if (match := re.fullmatch(r"atomic_(\w+?)(?:_(f32|f64|f16|bf16))?(_x2)?", rest)) and space != "ds":
        operation, kind = match[1], match[2] or ("u64" if match[3] else "u32")
        known = operation in _WHOLE or operation in _FLOATS or operation == "pk_add"
        return list(_atomic(space, name, operation, kind, True)) if known else []
    if (match := re.fullmatch(r"(\w+?)(_rtn)?_([uib]|f|bf)(16|32|64)", rest)) and space == "ds":
        operation, kind = match[1], ("u" if match[3] == "b" else match[3]) + match[4]
        if operation in _WHOLE or operation in ("min", "max", "pk_add"):
            return list(_atomic(space, name, operation, kind, bool(match[2])))
    if (match := re.fullmatch(r"(?:load|read)_([a-z0-9]+)(?:_(d16)(?:_(hi))?)?", rest)) and match[1] in _SIZES:
        return [_load(space, name, *_SIZES[match[1]], match[3] or match[2] or "")]
    if (match := re.fullmatch(r"(?:store|write)_([a-z0-9]+)(?:_d16_(hi))?", rest)) and match[1] in _SIZES:
        return [_store(space, name, _SIZES[match[1]][0], bool(match[2]))]
    return []
