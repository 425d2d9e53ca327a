"""The C half of the emulator: the fields of its actions, and how it is compiled and loaded.

The sources in `machine/` are compiled once per compiler and processor into the user's cache folder (`wavecrest.cc`).
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from wavecrest import cc
from wavecrest.errors import EnvironmentProblem
from wavecrest.isa.emulate import effects

# before each function of an opcode
PRELUDE = ("wave.h", "operands.h")
SOURCES = ("wave.h", "formats.h", "matrix.h", "memory.h", "lanes.h", "dpp.h", "watch.h", "banks.h", "machine.c")

FOLDER, NEEDED_FOR = "emulate", "the emulator"
# each operation rounds by itself, as the hardware's do; no float is trapped on
OPCODE_FLAGS = (
    ("-O2", "-ftree-vectorize", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-march=native"),
)

# return values of `run`
BARRIER, END, COMPILE, BUDGET, RANGE, TRAP, FAULT, OUTSIDE_LDS = range(1, 9)

# number formats of machine/formats.h
F16, BF16, F32, E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, I8, XF32, E2M1, F64, U8, I4, U4, E2M3, E3M2 = range(16)

# action -> the fields of its C struct, all int32: the one place that orders them. Registers are given by number,
# source operands (src, srsrc, scale, …) by their 9-bit code, `wave` is the wave size, `literal` the word after the
# instruction.
ACTIONS: dict[str, tuple[str, ...]] = {
    "nop": (),
    # op: -1 load, -2 store, else the number of an atomic operation
    "buffer": (
        *("wave", "op", "bytes", "sign", "high", "d16", "vdata", "vaddr", "srsrc", "soffset", "offset"),
        *("offen", "idxen", "acc", "lds", "returns"),
    ),
    # saddr: -1 for none
    "atomic": ("wave", "op", "bytes", "vaddr", "saddr", "offset", "vdata", "vdst", "returns", "acc"),
    "load_lds": ("wave", "bytes", "vaddr", "saddr", "offset"),
    "lds_transpose": ("bits", "vaddr", "offset", "vdst", "acc"),
    # offset1: -1 where there is one address
    "lds": (
        *("wave", "store", "bytes", "sign", "high", "d16", "vaddr", "offset0", "offset1", "data0", "data1", "acc"),
    ),
    "lds_atomic": ("wave", "op", "bytes", "vaddr", "offset", "data", "compare", "vdst", "returns", "acc"),
    # scaled: -1 not an f8f6f4 instruction, 0 one without scales, 1 with
    "matrix": (
        *("M", "N", "K", "blocks", "format_a", "format_b", "integer", "vdst", "s0", "s1", "s2"),
        *("acc_cd", "acc_a", "acc_b", "scaled", "scale0", "scale1", "select0", "select1"),
    ),
    # out: 0 f32, 1 i32, 2 f16, 3 bf16
    "wmma": ("gfx12", "K", "format_a", "format_b", "out", "vdst", "s0", "s1", "s2", "high"),
    "dot2": ("wave", "bf16", "vdst", "src0", "src1", "src2", "opsel", "neg", "literal"),
    "permute": ("wave", "push", "vaddr", "offset", "vdata", "vdst"),
    "swizzle": ("wave", "offset", "vaddr", "vdst"),
    "swap": ("width", "vdst", "src"),
    "permlane": (
        *("other_row", "vsrc", "vdst", "select_low", "select_high", "literal", "fetch_inactive", "bound_ctrl"),
    ),
    # op: 0 read, 1 write, 2 read the first active lane
    "lane": ("wave", "op", "vdst", "src0", "src1", "literal"),
    # write: to an accumulation register
    "accumulator": ("write", "vdst", "src", "literal"),
    # global, flat and scratch; soffset: an SGPR that is added to the address, saddr: a pair, or -1 for none
    "flat": (*("wave", "store", "bytes", "sign", "high", "d16", "vaddr", "saddr", "offset", "data", "acc", "scratch"),),
    "scalar": ("store", "buffer", "bytes", "sign", "sbase", "soffset", "offset", "sdata"),
    "dual": ("opx", "opy", "srcx0", "vsrcx1", "vdstx", "srcy0", "vsrcy1", "vdsty", "literal"),
    # scale: -1 for none
    "convert_small": (
        *("wave", "to_small", "small", "wide", "vdst", "src0", "src1", "scale", "count", "select", "literal"),
        *("neg", "abs"),
    ),
    # operand: the SGPR, or -1 for the literal
    "hwreg": ("set", "operand", "simm", "literal"),
    # control: -1 dpp8
    "dpp": (
        *("wave", "control", "row_mask", "bank_mask", "bound_ctrl", "fetch_inactive", "src0", "spare", "abs", "neg"),
        *("sign", "sel8"),
    ),
    # target: the SGPR pair to jump to, or -1 to go on
    "getpc": ("sdst", "target"),
    "setpc": ("ssrc",),
    "end": (),
}
# the operands of an opcode's function, all int32: name -> how many; machine/operands.h says what they mean
OPERANDS = {
    "source": 3,
    "part": 3,
    "keep": 3,
    "flip": 3,
    "flip_low": 3,
    "sign_extend": 1,
    "literal": 1,
    "target": 1,
    "target_part": 1,
    "unused": 1,
    "mask": 1,
    "mask_target": 1,
    "select": 1,
    "select_high": 1,
    "multiply": 1,
    "clamp": 1,
}
MAX_FIELDS = 19
_NUMBER = {name: number for number, name in enumerate(ACTIONS, start=1)}


class FunctionOperands(ctypes.Structure):
    """The operands of an opcode's function (OPERANDS)."""

    _fields_ = tuple(
        (name, ctypes.c_int32 * count if count > 1 else ctypes.c_int32) for name, count in OPERANDS.items()
    )

    def set(self, values: Mapping[str, int | Sequence[int]]) -> None:
        """Take every field, as 32 signed or unsigned bits."""
        for name, count in OPERANDS.items():
            value = values[name]
            if isinstance(value, int):
                setattr(self, name, _signed(value))
                continue
            field = getattr(self, name)
            for index in range(count):
                field[index] = _signed(value[index])


def _signed(value: int) -> int:
    return ctypes.c_int32(value & 0xFFFFFFFF).value


class Entry(ctypes.Structure):
    """One decoded instruction, as machine.c has it."""

    _fields_ = (
        ("opcode", ctypes.c_void_p),
        ("jumps", ctypes.c_ubyte),
        ("stops", ctypes.c_ubyte),
        ("size", ctypes.c_ubyte),
        ("action", ctypes.c_int32),
        ("fields", ctypes.c_int32 * MAX_FIELDS),
        ("operands", FunctionOperands),
    )

    def set_action(self, name: str, values: dict[str, int]) -> None:
        """Make the entry run an action; every field of the action must be given, as 32 signed or unsigned bits."""
        names = ACTIONS[name]
        if set(values) != set(names):
            raise TypeError(f"{name} takes {names}, got {sorted(values)}")
        self.action = _NUMBER[name]
        for index, field in enumerate(names):
            self.fields[index] = _signed(values[field])


class Facts(ctypes.Structure):
    """Facts about an instruction for the watch (`effects.FIELDS`)."""

    _fields_ = tuple((name, ctypes.c_int32 * count) for name, (count, _) in effects.FIELDS.items())

    def set(self, values: dict[str, list[int]]) -> None:
        """Take the fields from `effects.facts`."""
        for name, numbers in values.items():
            field = getattr(self, name)
            for index, number in enumerate(numbers):
                field[index] = _signed(number)


def _enum(prefix: str, names: Sequence[str], first: int = 1) -> str:
    return "enum { " + ", ".join(f"{prefix}_{name.upper()} = {i}" for i, name in enumerate(names, start=first)) + " };"


def _declarations() -> str:
    """The C structs and numbers of ACTIONS and of `effects`."""
    lines = ["#include <stdint.h>", "typedef int32_t i32;"]
    for name, fields in ACTIONS.items():
        struct = "".join(part.capitalize() for part in name.split("_"))
        if fields:
            lines.append(f"typedef struct {{ i32 {', '.join(fields)}; }} {struct};")
    for struct, counts in (
        ("Operands", OPERANDS),
        ("Facts", {name: count for name, (count, _) in effects.FIELDS.items()}),
    ):
        members = ", ".join(name + (f"[{count}]" if count > 1 else "") for name, count in counts.items())
        lines.append(f"typedef struct {{ i32 {members}; }} {struct};")
    lines += [_enum("ACTION", tuple(ACTIONS)), _enum("FLOW", effects.FLOWS), _enum("ACCESS", effects.ACCESSES)]
    lines += [_enum("BRANCH", effects.BRANCHES), _enum("BITS", effects.BITS, 0)]
    numbers = ("PAIRS_MOVE", "PAIRS_CARRY", "SCC_READ", "SCC_WRITTEN", "COUNTS_VM", "COUNTS_LDS", "COUNTS_SCALAR")
    lines.append("enum { " + ", ".join(f"{name} = {getattr(effects, name)}" for name in numbers) + " };")
    return "\n".join(lines) + "\n"


def source(names: Sequence[str] = SOURCES) -> str:
    """The whole C program, or what comes before the functions of opcodes."""
    folder = resources.files(__package__).joinpath("machine")
    return "\n".join([_declarations(), *(folder.joinpath(name).read_text(encoding="utf-8") for name in names)])


def build() -> Path:
    """The compiled machine, from the cache folder or made now.

    Raises:
        EnvironmentProblem: not Linux on x86-64, no compiler, or the folder cannot be written.
    """
    _check_machine()
    return cc.library(source(), FOLDER, "machine", NEEDED_FOR, (("-march=native",),))


def _check_machine() -> None:
    if sys.platform != "linux" or platform.machine().lower() not in ("x86_64", "amd64"):
        raise EnvironmentProblem(
            f"the emulator runs on Linux on x86-64 processors; this is {sys.platform} on {platform.machine()}"
        )


@cache
def _opcodes() -> tuple[str, str]:
    """The text before functions of opcodes, and the folder below the user's cache folder that keeps them."""
    _check_machine()
    text = source(PRELUDE)
    return text, f"{FOLDER}/opcodes-{cc.key(text, NEEDED_FOR, OPCODE_FLAGS)}"


def build_opcodes(functions: Mapping[str, str]) -> dict[Path, list[str]]:
    """Compile functions, those that the cache folder lacks in one call of the compiler.

    Args:
        functions: C text by symbol. A symbol stands for its text: it is found again by its name alone.

    Returns:
        The symbols by the library that has them.

    Raises:
        EnvironmentProblem: as for `build`.
    """
    before, name = _opcodes()
    folder = cc.cache_folder(name)
    found: dict[Path, list[str]] = {}
    missing = sorted(symbol for symbol in functions if not (folder / f"{symbol}.so").exists())
    try:
        if missing:
            text = "\n".join([before, *(functions[symbol] for symbol in missing)])
            library = cc.library(text, name, "library", NEEDED_FOR, OPCODE_FLAGS)
            for symbol in missing:
                link = folder / f".{symbol}.{os.getpid()}"
                link.symlink_to(library.name)
                link.replace(folder / f"{symbol}.so")
        for symbol in functions:
            found.setdefault((folder / f"{symbol}.so").resolve(), []).append(symbol)
    except OSError as error:
        raise EnvironmentProblem(f"the emulator cannot keep its compiled opcodes in {folder}: {error}") from error
    return found


@cache
def load() -> Any:
    """The compiled machine, ready to run."""
    library = ctypes.CDLL(str(build()))
    library.fault_address.restype = ctypes.c_uint64
    library.convert_float.restype = ctypes.c_uint32
    library.convert_float.argtypes = (ctypes.c_uint32, ctypes.c_int, ctypes.c_int, ctypes.c_int)
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    library.run.argtypes = (
        pointer, number, number, pointer, number, pointer, ctypes.c_int, pointer, ctypes.c_int, pointer
    )  # fmt: skip
    library.watch_size.argtypes, library.watch_size.restype = (ctypes.c_int,), number
    return library
