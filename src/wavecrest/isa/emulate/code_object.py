"""An AMDGPU code object (the ELF file of one Triton kernel) in host memory, and the arguments as it expects them.

Formats: LLVM's "User Guide for AMDGPU Backend" (code object, kernel descriptor, metadata, kernarg segment).
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from wavecrest.errors import InvalidArgument, Unsupported

_PT_LOAD, _PF_X = 1, 1
_SHT_SYMTAB, _SHT_RELA, _SHT_NOTE, _SHT_DYNSYM = 2, 4, 7, 11
_R_AMDGPU_RELATIVE64 = 13
_NT_AMDGPU_METADATA = 32

# first byte -> struct format of a number, or of the length of a string, list or map
_MSGPACK = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
    0xD9: ">B",
    0xDA: ">H",
    0xDB: ">I",
    0xDC: ">H",
    0xDD: ">I",
    0xDE: ">H",
    0xDF: ">I",
}


def unpack(data: bytes, at: int = 0) -> tuple[Any, int]:
    """The msgpack value at an offset, and the offset after it (the part of the format that metadata uses)."""

    def sequence(count: int, at: int) -> tuple[list[Any], int]:
        values = []
        for _ in range(count):
            value, at = unpack(data, at)
            values.append(value)
        return values, at

    def mapping(count: int, at: int) -> tuple[dict[Any, Any], int]:
        flat, at = sequence(2 * count, at)
        return dict(zip(flat[::2], flat[1::2], strict=True)), at

    def text(count: int, at: int) -> tuple[str, int]:
        return data[at : at + count].decode(), at + count

    kind, at = data[at], at + 1
    if kind < 0x80:
        return kind, at
    if kind < 0x90:
        return mapping(kind & 15, at)
    if kind < 0xA0:
        return sequence(kind & 15, at)
    if kind < 0xC0:
        return text(kind & 31, at)
    if kind >= 0xE0:
        return kind - 256, at
    if kind in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[kind], at
    if kind not in _MSGPACK:
        raise Unsupported(f"kernel metadata holds msgpack type {kind:#x}, which code objects do not use")
    (value,) = struct.unpack_from(_MSGPACK[kind], data, at)
    at += struct.calcsize(_MSGPACK[kind])
    if kind in (0xD9, 0xDA, 0xDB):
        return text(value, at)
    if kind in (0xDC, 0xDD):
        return sequence(value, at)
    return mapping(value, at) if kind in (0xDE, 0xDF) else (value, at)


class _Segment(NamedTuple):
    kind: int
    flags: int
    offset: int
    address: int
    physical: int
    file_size: int
    memory_size: int
    align: int


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry_size: int


def _table(elf: bytes, offset_at: int, size_at: int, layout: str) -> list[tuple[int, ...]]:
    (offset,) = struct.unpack_from("<Q", elf, offset_at)
    size, count = struct.unpack_from("<HH", elf, size_at)
    return [struct.unpack_from(layout, elf, offset + i * size) for i in range(count)]


class CodeObject:
    """An AMDGPU ELF loaded into host memory.

    Args:
        elf: the bytes of the file (`compiled.asm["hsaco"]`).
        name: the kernel in it; None takes the first.

    Attributes:
        arch: its architecture, such as "gfx942".
        wave: lanes of a wave.
        entry: host address of the first instruction; `code`, `code_size`: the executable segment, with functions the
            kernel calls.
        lds: bytes of static LDS; `scratch`: bytes of scratch memory a lane.
        rsrc1, rsrc2, properties: registers of the kernel descriptor.
        kernel: the kernel's metadata; `symbols`: name to (offset from `base`, size).
    """

    def __init__(self, elf: bytes, name: str | None = None) -> None:
        segments = [_Segment(*row) for row in _table(elf, 32, 54, "<IIQQQQQQ")]
        loads = [segment for segment in segments if segment.kind == _PT_LOAD]
        # room after the end, as instructions are read ahead
        self._memory = mmap.mmap(-1, max(segment.address + segment.memory_size for segment in loads) + 8192)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        for segment in loads:
            data = elf[segment.offset : segment.offset + segment.file_size]
            self._memory[segment.address : segment.address + segment.file_size] = data
        self.symbols: dict[str, tuple[int, int]] = {}
        self._metadata: dict[str, Any] = {}
        sections = [_Section(*row) for row in _table(elf, 40, 58, "<IIQQQQIIQQ")]
        for section in sections:
            if section.kind in (_SHT_SYMTAB, _SHT_DYNSYM):
                self._read_symbols(elf, section, sections[section.link].offset)
            elif section.kind == _SHT_RELA:
                self._relocate(elf, section)
            elif section.kind == _SHT_NOTE:
                self._read_note(elf, section)
        kernels = [kernel for kernel in self._metadata.get("amdhsa.kernels", ()) if name in (None, kernel[".name"])]
        if not kernels:
            raise InvalidArgument(f"the code object has no kernel {name or 'at all'}")
        self.kernel: dict[str, Any] = kernels[0]
        self.arch: str = self._metadata["amdhsa.target"].rsplit("-", 1)[1].split(":")[0]
        self.wave: int = self.kernel[".wavefront_size"]
        self._read_descriptor(self.symbols[self.kernel[".symbol"]][0])
        code = next(segment for segment in loads if segment.flags & _PF_X)
        self.code, self.code_size = self.base + code.address, code.memory_size

    def _read_symbols(self, elf: bytes, section: _Section, names: int) -> None:
        for at in range(section.offset, section.offset + section.size, 24):
            name, _, _, _, value, size = struct.unpack_from("<IBBHQQ", elf, at)
            if name:
                text = elf[names + name : elf.index(b"\0", names + name)].decode()
                self.symbols[text] = (value, size)

    def _relocate(self, elf: bytes, section: _Section) -> None:
        for at in range(section.offset, section.offset + section.size, 24):
            where, info, addend = struct.unpack_from("<QQq", elf, at)
            if info & 0xFFFFFFFF != _R_AMDGPU_RELATIVE64:
                raise Unsupported(f"the code object has a relocation of type {info & 0xFFFFFFFF}")
            struct.pack_into("<Q", self._memory, where, self.base + addend)

    def _read_note(self, elf: bytes, section: _Section) -> None:
        owner_size, size, kind = struct.unpack_from("<III", elf, section.offset)
        if kind == _NT_AMDGPU_METADATA:
            start = section.offset + 12 + (owner_size + 3 & ~3)
            self._metadata, _ = unpack(elf[start : start + size])

    def _read_descriptor(self, at: int) -> None:
        self.lds, self.scratch, self.kernarg_size = struct.unpack_from("<III", self._memory, at)
        (entry,) = struct.unpack_from("<q", self._memory, at + 16)
        _, self.rsrc1, self.rsrc2, self.properties = struct.unpack_from("<IIIH", self._memory, at + 44)
        self.entry, self.size = self.base + at + entry, self.symbols[self.kernel[".name"]][1]

    def kernarg(self, values: Sequence[Any], grid: Sequence[int], block: Sequence[int]) -> bytearray:
        """The kernarg segment.

        Args:
            values: the explicit arguments, pointers as addresses; missing pointers at the end (Triton's scratch
                memory) become null.
            grid: workgroups along x, y, z; `block`: threads of a workgroup along each.
        """
        buffer, given = bytearray(max(self.kernarg_size, 8)), list(values)
        hidden: dict[str, int] = {"hidden_grid_dims": 3}
        for axis, groups, threads in zip("xyz", grid, block, strict=True):
            hidden |= {f"hidden_block_count_{axis}": groups, f"hidden_group_size_{axis}": threads}
        for argument in self.kernel[".args"]:
            offset, size, kind = argument[".offset"], argument[".size"], argument[".value_kind"]
            if kind.startswith("hidden"):
                value: Any = hidden.get(kind, 0)
            elif given:
                value = given.pop(0)
            elif kind == "global_buffer":
                value = 0
            else:
                raise InvalidArgument(f"the kernel's argument at offset {offset} ({kind}, {size} bytes) has no value")
            if isinstance(value, float):
                buffer[offset : offset + size] = struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], value)
            else:
                buffer[offset : offset + size] = (int(value) & (1 << 8 * size) - 1).to_bytes(size, "little")
        if given:
            kinds = [argument[".value_kind"] for argument in self.kernel[".args"]]
            raise InvalidArgument(f"{len(given)} argument(s) too many: the kernel takes {kinds}")
        return buffer

    def user_sgprs(self, kernarg: int) -> list[int]:
        """The SGPRs that the descriptor requests, in its order, from s0 on.

        Preloaded arguments are not among them: the code at the entry loads those itself (LLVM's prologue for firmware
        without preloading).
        """
        # buffer, dispatch, queue, kernarg, dispatch id, flat scratch, private size: registers of each
        values: list[int] = []
        for bit, count in enumerate((4, 2, 2, 2, 2, 2, 1)):
            if self.properties >> bit & 1:
                known = {3: [kernarg & 0xFFFFFFFF, kernarg >> 32], 6: [self.scratch]}
                values += known.get(bit, [0] * count)
        return values

    @property
    def has_scratch_buffer(self) -> bool:
        """Whether s0 to s3 describe the scratch memory of a wave, as on gfx90a; later ones have instructions for it."""
        return bool(self.properties & 1) and self.scratch > 0

    def scratch_buffer(self, address: int) -> list[int]:
        """The descriptor of a wave's scratch memory: `scratch` bytes a lane, not swizzled.

        Raises:
            Unsupported: more than a stride of 18 bits.
        """
        if self.scratch >= 1 << 18:
            raise Unsupported(f"the kernel has {self.scratch:,} bytes of scratch memory a lane, more than 18 bits hold")
        stride, add_tid = self.scratch, 1 << 23
        return [
            address & 0xFFFFFFFF,
            address >> 32 | (stride & 0x3FFF) << 16,
            self.scratch,
            add_tid | stride >> 14 << 15,
        ]

    def where(self, address: int) -> str:
        """Function and offset of a host address in the code."""
        offset = address - self.base
        inside = [
            (size, name, start)
            for name, (start, size) in self.symbols.items()
            if size and start <= offset < start + size and not name.endswith(".kd")
        ]
        if not inside:
            return f"offset {offset:#x}, outside every function"
        _, name, start = min(inside)
        hostcall = (
            " (a call of the host: device_assert or device_print)" if "ockl" in name or "hostcall" in name else ""
        )
        return f"{name}+{offset - start:#x}{hostcall}"
