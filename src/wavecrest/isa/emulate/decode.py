"""Decode instructions: from bytes to tinygrad's object and a name, those of gfx90a too, which its tables lack.

DPP forms are taken apart by `dpp`: a gather over the lanes, then the plain instruction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wavecrest.isa.emulate import opcodes

# the first 9 bits of a packed or matrix instruction of gfx9
_VOP3P = 0b110100111
# matrix instructions of gfx90a with the opcodes of tinygrad's tables, which are gfx942's and gfx950's; 0x58 and 0x59
# move accumulation registers
_GFX90A_SAME = frozenset(
    (*range(0x40, 0x43), 0x44, 0x45, *range(0x48, 0x4B), 0x4C, 0x4D, *range(0x50, 0x53), 0x58, 0x59, 0x6E, 0x6F)
)
# those with opcodes of its own (LLVM's VOP3PInstructions.td): the opcode of one with as many registers, and the name
_GFX90A = {
    0x54: (0x44, "V_MFMA_I32_32X32X8_I8"),
    0x55: (0x45, "V_MFMA_I32_16X16X16_I8"),
    0x63: (0x5D, "V_MFMA_F32_32X32X4_2B_BF16"),
    0x64: (0x5E, "V_MFMA_F32_16X16X4_4B_BF16"),
    0x65: (0x5F, "V_MFMA_F32_4X4X4_16B_BF16"),
    0x66: (0x60, "V_MFMA_F32_32X32X8_BF16"),
    0x67: (0x61, "V_MFMA_F32_16X16X16_BF16"),
}
# of buffer_wbinvl1_vol, which the tables lack, and of buffer_inv in its place: opcodes of MUBUF
_WBINVL1_VOL, _INV = 0x3F, 0x29


def family(arch: str) -> str:
    """tinygrad's name of an architecture's instruction set."""
    for prefix, name in (("gfx9", "cdna"), ("gfx11", "rdna3"), ("gfx12", "rdna4")):
        if arch.startswith(prefix):
            return name
    raise NotImplementedError(f"no instruction set of {arch}")


def wave_size(arch: str) -> int:
    """Lanes of a wave as Triton compiles for an architecture."""
    return 64 if arch.startswith("gfx9") else 32


def decode(raw: bytes, arch: str) -> Any:
    """The instruction at the start of `raw` (16 bytes), as tinygrad's object."""
    kind, word = family(arch), int.from_bytes(raw[:4], "little")
    if kind == "rdna3" and word >> 26 == 0b111000:
        return opcodes.tables(kind).instructions.MUBUF.from_bytes(raw)
    if kind == "rdna4" and word >> 26 == 0b110001:
        return opcodes.tables(kind).instructions.VBUFFER.from_bytes(raw)
    if kind == "cdna" and word >> 16 != 0xD3AC:
        # tinygrad takes what precedes an f8f6f4 MFMA for its scale prefix
        raw = raw[:8] + bytes(8)
    if arch == "gfx90a" and word >> 26 == 0b111000 and word >> 18 & 0x7F == _WBINVL1_VOL:
        raw = (word ^ (_WBINVL1_VOL ^ _INV) << 18).to_bytes(4, "little") + raw[4:]
    if (op := _gfx90a_opcode(raw, arch)) in _GFX90A:
        raw = (word ^ (op ^ _GFX90A[op][0]) << 16).to_bytes(4, "little") + raw[4:]
    elif op is not None and op not in _GFX90A_SAME:
        raise NotImplementedError(f"a matrix instruction of gfx90a with opcode {op:#x}")
    return opcodes.decode(raw, kind)


def name(inst: Any, raw: bytes, arch: str) -> str:
    """The name of an instruction that `decode` made of `raw`."""
    op = _gfx90a_opcode(raw, arch)
    return _GFX90A[op][1] if op in _GFX90A else opcodes.name(inst)


def _gfx90a_opcode(raw: bytes, arch: str) -> int | None:
    """The opcode of a matrix instruction of gfx90a; None for all others."""
    word = int.from_bytes(raw[:4], "little")
    op = word >> 16 & 0x7F
    return op if arch == "gfx90a" and word >> 23 == _VOP3P and op >= 0x40 else None


@dataclass(frozen=True)
class Dpp:
    """A DPP instruction: the bytes of its plain form, its own size, and the action but for the sign bit of src0."""

    plain: bytes
    size: int
    fields: dict[str, int]


_DPP16, _DPP8, _DPP8_FETCH_INACTIVE = 0xFA, 0xE9, 0xEA


def _dpp_fields(control: int, src0: int, spare: int, **values: int) -> dict[str, int]:
    fields = {"row_mask": 15, "bank_mask": 15, "bound_ctrl": 1, "fetch_inactive": 0, "abs": 0, "neg": 0, "sel8": 0}
    return fields | {"control": control, "src0": src0, "spare": spare} | values


def dpp(inst: Any, raw: bytes, arch: str) -> Dpp | None:
    """A DPP16 or DPP8 instruction taken apart, or None."""
    kind, encoding = family(arch), type(inst).__name__
    long = encoding.startswith("VOP3")
    if not encoding.startswith(("VOP1", "VOP2", "VOPC", "VOP3")) or (long and kind == "cdna"):
        return None
    size, at = (8, 32) if long else (4, 0)
    word, tail = int.from_bytes(raw[:size], "little"), int.from_bytes(raw[size : size + 4], "little")
    src0, vdst = word >> at & 0x1FF, word >> 17 & 0xFF
    if src0 != _DPP16 and (kind == "cdna" or src0 not in (_DPP8, _DPP8_FETCH_INACTIVE)):
        return None
    # a register that the instruction does not use, nor the one after it (64-bit operands)
    used = {word >> at + 9 & 0xFF, vdst, word & 0xFF, word >> 50 & 0xFF}
    used |= {r + 1 for r in used}
    spare = next(r for r in range(256) if r not in used and r + 1 not in used)
    plain = (word & ~(0x1FF << at) | (256 + spare) << at).to_bytes(size, "little")
    if src0 != _DPP16:
        values = {"fetch_inactive": int(src0 == _DPP8_FETCH_INACTIVE), "sel8": tail >> 8}
        return Dpp(plain, size + 4, _dpp_fields(-1, tail & 0xFF, spare, **values))
    if tail >> 22 & 3 and not long:
        raise NotImplementedError("DPP with a modifier of src1")
    values = {
        "row_mask": tail >> 28,
        "bank_mask": tail >> 24 & 15,
        "bound_ctrl": tail >> 19 & 1,
        "fetch_inactive": 0 if kind == "cdna" else tail >> 18 & 1,
        "abs": 0 if long else tail >> 21 & 1,
        "neg": 0 if long else tail >> 20 & 1,
    }
    return Dpp(plain, size + 4, _dpp_fields(tail >> 8 & 0x1FF, tail & 0xFF, spare, **values))
