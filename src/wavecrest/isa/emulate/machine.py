"""The C half of the emulator: the fields of its actions, and how it is compiled and loaded.

The sources in `machine/` are compiled once per compiler and processor into the user's cache folder (`wavecrest.cc`).
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from wavecrest import cc
from wavecrest.errors import EnvironmentProblem
from wavecrest.isa.emulate import effects

SOURCES = ("wave.h", "formats.h", "matrix.h", "memory.h", "lanes.h", "dpp.h", "watch.h", "banks.h", "machine.c")

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
    "dual": ("opx", "opy", "srcx0", "vsrcx1", "vdstx", "srcy0", "vsrcy1", "vdsty", "literal"),
    # scale: -1 for none
    "convert_small": (
        *("wave", "to_small", "small", "wide", "vdst", "src0", "src1", "scale", "count", "select", "literal"),
        *("neg", "abs"),
    ),
    # operand: the SGPR, or -1 for the literal
    "hwreg": ("set", "operand", "simm", "literal"),
    # control: -1 dpp8, -2 fill the spare register with src0, -3 only run the plain form
    "dpp": (
        *("wave", "control", "row_mask", "bank_mask", "bound_ctrl", "fetch_inactive", "src0", "spare", "abs", "neg"),
        *("sign", "plain_low", "plain_high", "sel8"),
    ),
    # target: the SGPR pair to jump to, or -1 to go on
    "getpc": ("sdst", "target"),
    "setpc": ("ssrc",),
}
MAX_FIELDS = 19
_NUMBER = {name: number for number, name in enumerate(ACTIONS, start=1)}


class Entry(ctypes.Structure):
    """One decoded instruction, as machine.c has it."""

    _fields_ = (
        ("opcode", ctypes.c_void_p),
        ("arguments", ctypes.c_ubyte * 6),
        ("stops", ctypes.c_ubyte),
        ("size", ctypes.c_ubyte),
        ("action", ctypes.c_int32),
        ("fields", ctypes.c_int32 * MAX_FIELDS),
    )

    def set_action(self, name: str, values: dict[str, int]) -> None:
        """Make the entry run an action; every field of the action must be given, as 32 signed or unsigned bits."""
        names = ACTIONS[name]
        if set(values) != set(names):
            raise TypeError(f"{name} takes {names}, got {sorted(values)}")
        self.action = _NUMBER[name]
        for index, field in enumerate(names):
            self.fields[index] = ctypes.c_int32(int(values[field]) & 0xFFFFFFFF).value


class Facts(ctypes.Structure):
    """Facts about an instruction for the watch (`effects.FIELDS`)."""

    _fields_ = tuple((name, ctypes.c_int32 * count) for name, (count, _) in effects.FIELDS.items())

    def set(self, values: dict[str, list[int]]) -> None:
        """Take the fields from `effects.facts`."""
        for name, numbers in values.items():
            field = getattr(self, name)
            for index, number in enumerate(numbers):
                field[index] = ctypes.c_int32(number & 0xFFFFFFFF).value


def _enum(prefix: str, names: Sequence[str], first: int = 1) -> str:
    return "enum { " + ", ".join(f"{prefix}_{name.upper()} = {i}" for i, name in enumerate(names, start=first)) + " };"


def _declarations() -> str:
    """The C structs and numbers of ACTIONS and of `effects`."""
    lines = ["#include <stdint.h>", "typedef int32_t i32;"]
    for name, fields in ACTIONS.items():
        struct = "".join(part.capitalize() for part in name.split("_"))
        if fields:
            lines.append(f"typedef struct {{ i32 {', '.join(fields)}; }} {struct};")
    facts = ", ".join(name + (f"[{count}]" if count > 1 else "") for name, (count, _) in effects.FIELDS.items())
    lines.append(f"typedef struct {{ i32 {facts}; }} Facts;")
    lines += [_enum("ACTION", tuple(ACTIONS)), _enum("FLOW", effects.FLOWS), _enum("ACCESS", effects.ACCESSES)]
    lines += [_enum("BRANCH", effects.BRANCHES), _enum("BITS", effects.BITS, 0)]
    numbers = ("PAIRS_MOVE", "PAIRS_CARRY", "SCC_READ", "SCC_WRITTEN", "COUNTS_VM", "COUNTS_LDS", "COUNTS_SCALAR")
    lines.append("enum { " + ", ".join(f"{name} = {getattr(effects, name)}" for name in numbers) + " };")
    return "\n".join(lines) + "\n"


def source() -> str:
    """The whole C program."""
    folder = resources.files(__package__).joinpath("machine")
    parts = [folder.joinpath(name).read_text(encoding="utf-8") for name in SOURCES]
    return "\n".join([_declarations(), *parts])


def build() -> Path:
    """The compiled machine, from the cache folder or made now.

    Raises:
        EnvironmentProblem: not Linux on x86-64, no compiler, or the folder cannot be written.
    """
    if sys.platform != "linux" or platform.machine().lower() not in ("x86_64", "amd64"):
        raise EnvironmentProblem(
            f"the emulator runs on Linux on x86-64 processors; this is {sys.platform} on {platform.machine()}"
        )
    return cc.library(source(), "emulate", "machine", "the emulator", (("-march=native",),))


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
