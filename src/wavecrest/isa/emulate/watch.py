"""The watch of a launch: the memory that machine/watch.h works on, and its findings in words.

What a wave did before a barrier comes before what others do after it, if the wave waited for it: each byte of LDS
keeps its last write and read with the number of the operation, each wave how many of its operations had ended at the
last barrier. Order of execution here does not matter: waves that run one after the other are found all the same.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from wavecrest.isa.emulate import effects

_U32, _I32, _U64, _U8 = ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint8
_VECTORS, _REGISTERS, _WAVES = 256, 800, 32
# most findings that are kept of a launch; one per kind and instruction
CAPACITY = 256
# states of a byte
ADDRESSABLE, WRITTEN = 1, 2

READ, OVERWRITTEN, NO_BARRIER, NO_WAIT, BESIDE, STORED, ADDRESS, BRANCH = range(1, 9)


class Region(ctypes.Structure):
    """Memory of the launch from `start` to `end`, with a state per byte."""

    _fields_ = (("start", _U64), ("end", _U64), ("state", ctypes.c_void_p))


class _Finding(ctypes.Structure):
    _fields_ = (
        ("address", _U64),
        *((name, _I32) for name in ("kind", "at", "other", "wave", "lane", "reg")),
        ("workgroup", _I32 * 3),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("regions", ctypes.POINTER(Region)),
        ("region_count", _U64),
        ("findings", ctypes.POINTER(_Finding)),
        ("capacity", _U64),
        ("found", _U64),
        ("reported", ctypes.POINTER(_U32)),
    )


class _Byte(ctypes.Structure):
    _fields_ = (
        *((name, _U32) for name in ("write_number", "write_at", "write_epoch", "read_number", "read_at", "read_epoch")),
        *((name, _U32) for name in ("writers", "readers")),
        ("origin", _I32),
        *((name, _U8) for name in ("writer", "direct", "reader", "state", "atomic")),
    )


class _Group(ctypes.Structure):
    _fields_ = (
        ("launch", ctypes.POINTER(_Launch)),
        ("bytes", ctypes.c_void_p),
        ("epoch", _U32),
        ("workgroup", _I32 * 3),
        ("lds_at_barrier", _U32 * _WAVES),
        ("vm_at_barrier", _U32 * _WAVES),
    )


class _Wave(ctypes.Structure):
    _fields_ = (
        ("group", ctypes.POINTER(_Group)),
        ("unknown", _U64 * (_REGISTERS - _VECTORS)),
        ("scalar_unknown", _U32 * 128),
        *((name, _U32) for name in ("scc_unknown", "wave", "vm_issued", "vm_done", "lds_issued", "lds_done")),
        *((name, _U32) for name in ("scalar_issued", "scalar_done")),
        *((name, _U32 * _REGISTERS) for name in ("vm", "lds", "scalar", "by")),
        ("origin", _I32 * _REGISTERS),
    )


# in the order of watch_size in machine/watch.h
STRUCTS = (Region, _Finding, _Launch, _Byte, _Group, _Wave)


@dataclass(frozen=True)
class Finding:
    """A fault at one instruction: `kind` is a number above, `text` a sentence without the kernel's name."""

    kind: int
    text: str


class LaunchWatch:
    """The part that the waves of a launch share.

    Args:
        entries: instructions in the code.
        regions: memory of the arguments.
    """

    def __init__(self, entries: int, regions: Sequence[Region]) -> None:
        self._regions = (Region * max(len(regions), 1))(*regions)
        self._findings, self._reported = (_Finding * CAPACITY)(), (_U32 * entries)()
        self.struct = _Launch(self._regions, len(regions), self._findings, CAPACITY, 0, self._reported)

    def findings(self, where: Callable[[int], str], describe: Callable[[int], str]) -> list[Finding]:
        """Every finding, as it was met.

        Args:
            where: names the instruction of a number; `describe`: names the memory at an address.
        """
        count = min(int(self.struct.found), CAPACITY)
        return [Finding(raw.kind, _text(raw, where, describe)) for raw in self._findings[:count]]


class GroupWatch:
    """The part that the waves of a workgroup share: the states of its LDS, and what had ended at the last barrier."""

    def __init__(self, launch: LaunchWatch, workgroup: Sequence[int], lds_bytes: int) -> None:
        # pages that are not touched cost nothing
        self._memory = mmap.mmap(-1, max(lds_bytes, 1) * ctypes.sizeof(_Byte))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        # epochs count from 1: 0 is before everything
        self.struct = _Group(ctypes.pointer(launch.struct), address, 1, (_I32 * 3)(*workgroup))
        self._launch = launch

    def passed_barrier(self, waves: Sequence[WaveWatch]) -> None:
        """All waves are at a barrier: what they waited for comes before all that follows."""
        group = self.struct
        for number, wave in enumerate(waves):
            group.lds_at_barrier[number] = wave.struct.lds_done
            group.vm_at_barrier[number] = wave.struct.vm_done
        group.epoch += 1


class WaveWatch:
    """The watch of one wave.

    Args:
        group: its workgroup's.
        number: of the wave in the workgroup.
        scalars: SGPRs from 0 on that the hardware sets before the start.
    """

    def __init__(self, group: GroupWatch, number: int, scalars: int) -> None:
        self.struct = wave = _Wave(group=ctypes.pointer(group.struct), wave=number)
        self._group = group
        ones = 0xFFFFFFFF
        for register in range(_REGISTERS):
            # registers that nothing wrote are their own origin, as negative numbers
            wave.origin[register] = -register - 1
        # all but the work item's number in v0
        ctypes.memset(ctypes.byref(wave.unknown, 8), 0xFF, 8 * (_REGISTERS - _VECTORS - 1))
        for register in (*range(scalars, 102), effects.VCC, effects.VCC + 1, 124):
            wave.scalar_unknown[register] = ones

    @property
    def address(self) -> int:
        """Where the C struct is."""
        return ctypes.addressof(self.struct)


def register_name(number: int) -> str:
    """A register's name in assembly."""
    special = {effects.VCC: "vcc_lo", effects.VCC + 1: "vcc_hi", effects.EXEC: "exec_lo", 124: "m0"}
    special[effects.EXEC + 1] = "exec_hi"
    if number in special:
        return special[number]
    for first, letter in ((effects.ACCS, "a"), (effects.VGPRS, "v")):
        if number >= first:
            return f"{letter}{number - first}"
    return f"s{number}"


def _origin(number: int, where: Callable[[int], str]) -> str:
    if number < 0:
        return f"{register_name(-number - 1)}, which nothing wrote"
    return f"memory that nothing wrote, read at {where(number)}"


def _text(raw: Any, where: Callable[[int], str], describe: Callable[[int], str]) -> str:
    at, lane = where(raw.at), f" (lane {raw.lane})" if raw.lane >= 0 else ""
    who = f" [workgroup {tuple(raw.workgroup)}, wave {raw.wave}]"
    if raw.kind in (READ, OVERWRITTEN):
        verb = "read" if raw.kind == READ else "overwritten"
        what = f"{register_name(raw.reg)} is {verb} at {at} before an s_waitcnt covers its load at {where(raw.other)}"
        return f"missing wait: {what}{who}"
    if raw.kind == NO_BARRIER:
        return (
            f"missing barrier: byte {raw.address:,} of LDS is accessed at {at}{lane} and by wave {raw.reg} at "
            f"{where(raw.other)}, at least once to write, with no s_barrier between{who}"
        )
    if raw.kind == NO_WAIT:
        return (
            f"missing wait: byte {raw.address:,} of LDS is accessed at {at}{lane}; wave {raw.reg} had not waited for "
            f"its own access at {where(raw.other)}{who}"
        )
    if raw.kind == BESIDE:
        return f"out-of-bounds access at {at}{lane}: {describe(raw.address)}{who}"
    if raw.kind == STORED:
        return f"uninitialised value stored at {at}{lane}: it comes from {_origin(raw.other, where)}{who}"
    if raw.kind == ADDRESS:
        return f"uninitialised address at {at}{lane}: it comes from {_origin(raw.other, where)}{who}"
    register = f": {register_name(raw.reg)} comes from {_origin(raw.other, where)}" if raw.reg >= 0 else ""
    return f"uninitialised branch condition at {at}{register}{who}"
