"""Map instructions that are more than arithmetic in a lane to actions of the C machine: memory, lanes, matrices.

`action` reads the fields of a decoded instruction.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wavecrest.isa.emulate import machine
from wavecrest.isa.emulate.decode import wave_size

# (action, its fields)
Action = tuple[str, dict[str, int]]

_FORMATS = {"F16": machine.F16, "BF16": machine.BF16, "F32": machine.F32, "XF32": machine.XF32, "F64": machine.F64}
_FORMATS |= {"I8": machine.I8}
# the codes of cbsz and blgp in f8f6f4 instructions
_F8F6F4 = (machine.E4M3, machine.E5M2, machine.E2M3, machine.E3M2, machine.E2M1)
# beginning of an atomic's name -> operation of machine/memory.h; the first that fits
_ATOMICS = (
    *(("CMPSWAP", 1), ("SWAP", 0), ("PK_ADD_F16", 14), ("PK_ADD_BF16", 15), ("ADD_F", 13), ("ADD", 2), ("SUB", 3)),
    *(("MIN_F", 16), ("MAX_F", 17), ("MIN_NUM_F", 16), ("MAX_NUM_F", 17), ("SMIN", 4), ("UMIN", 5), ("SMAX", 6)),
    *(("UMAX", 7), ("MIN_I", 4), ("MIN_U", 5), ("MAX_I", 6), ("MAX_U", 7), ("AND", 8), ("XOR", 10), ("OR", 9)),
    *(("INC", 11), ("DEC", 12)),
)
# part of a buffer access's name -> bytes
_BUFFER_BYTES = (
    *(("128", 16), ("96", 12), ("64", 8), ("X4", 16), ("X3", 12), ("X2", 8), ("DWORD", 4), ("B32", 4)),
    *(("SHORT", 2), ("16", 2), ("BYTE", 1), ("8", 1)),
)
NO_EFFECT = re.compile(
    r"(?:BUFFER|GLOBAL|S_DCACHE|S_ICACHE|S_GL1)_?(?:GL[01]_)?(?:INV|WB|WBINV|WBL2|WBINVL1)(?:_VOL|L1|_SC1)?$"
    r"|S_PREFETCH|S_DCACHE|S_SLEEP|S_WAIT|V_NOP|S_NOP"
)
# complete once the program counter has moved on; barriers and traps stop the wave besides
_ONLY_GOES_ON = re.compile(
    r"S_(?:BARRIER|TRAP|SETPRIO|SETHALT|SENDMSG$|SENDMSGHALT|INCPERFLEVEL|DECPERFLEVEL|CLAUSE|DELAY_ALU|CODE_END"
    r"|SET_INST_PREFETCH|INST_PREFETCH|TTRACEDATA|WAKEUP|SETKILL)"
)


@dataclass(frozen=True)
class _Fields:
    """The fields of an instruction by name."""

    name: str
    arch: str
    word: int
    size: int
    ranges: dict[str, Any]

    @property
    def wave(self) -> int:
        return wave_size(self.arch)

    @property
    def literal(self) -> int:
        """The last four bytes: the literal, where the instruction has one."""
        return self.word >> 8 * (self.size - 4) & 0xFFFFFFFF

    @property
    def ds_offset(self) -> int:
        return self["offset0"] | self["offset1"] << 8

    def __contains__(self, name: str) -> bool:
        return name in self.ranges

    def __getitem__(self, name: str) -> int:
        low, high = int(self.ranges[name].lo), int(self.ranges[name].hi)
        return self.word >> low & (1 << high - low + 1) - 1

    def get(self, *names: str, default: int = 0) -> int:
        """The first of the fields that this instruction has."""
        return next((self[name] for name in names if name in self.ranges), default)

    def signed(self, *names: str) -> int:
        name = next(name for name in names if name in self.ranges)
        bits = self.ranges[name].hi - self.ranges[name].lo + 1
        return self[name] - (1 << bits) if self[name] >> bits - 1 else self[name]

    def fp8(self, text: str) -> int:
        """The format that FP8 or BF8 names on this architecture."""
        pair = (machine.E4M3FNUZ, machine.E5M2FNUZ) if self.arch == "gfx942" else (machine.E4M3, machine.E5M2)
        return pair["BF8" in text]


def _atomic_operation(f: _Fields, text: str) -> dict[str, int]:
    op = next((code for start, code in _ATOMICS if text.startswith(start)), None)
    if op is None:
        raise NotImplementedError("atomic operation")
    # sc0, glc, or bit 0 of the temporal hint: the old value is wanted
    returns = f.get("sc0") or f.get("glc") or f.get("th") & 1
    return {"op": op, "bytes": 8 if re.search(r"_X2$|64$", f.name) else 4, "returns": int(bool(returns))}


def _buffer(f: _Fields, match: re.Match[str]) -> Action:
    if "FORMAT" in f.name:
        raise NotImplementedError("formatted buffer access")
    if match[1]:
        what = _atomic_operation(f, match[1])
    else:
        bare = f.name.replace("D16_HI", "").replace("D16", "")
        size = next(count for part, count in _BUFFER_BYTES if part in bare)
        what = {"op": -2 if "STORE" in f.name else -1, "bytes": size, "returns": 0}
    return "buffer", what | {
        "wave": f.wave,
        "sign": int(bool(re.search(r"SBYTE|SSHORT|_I8|_I16", f.name))),
        "high": int("D16_HI" in f.name),
        "d16": int("D16" in f.name),
        "vdata": f["vdata"],
        "vaddr": f["vaddr"],
        "srsrc": f["srsrc"] * 4 if "srsrc" in f else f["rsrc"],
        "soffset": f["soffset"],
        "offset": f.get("ioffset", "offset"),
        "offen": f["offen"],
        "idxen": f["idxen"],
        "acc": f.get("acc"),
        "lds": int(bool(f.get("lds")) or "_LDS_" in f.name),
    }


def _global_address(f: _Fields) -> dict[str, int]:
    # flat instructions have the field, which says nothing there, and offsets without a sign on gfx9
    flat, saddr = f.name.startswith("FLAT"), f.get("saddr", default=127)
    return {
        "wave": f.wave,
        "vaddr": f.get("vaddr", "addr"),
        "saddr": saddr if saddr < 124 and not flat else -1,
        "offset": f["offset"] if flat and "offset" in f else f.signed("ioffset", "offset"),
    }


def _atomic(f: _Fields, match: re.Match[str]) -> Action:
    fields = {"vdata": f.get("vsrc", "data"), "vdst": f["vdst"], "acc": f.get("acc")}
    return "atomic", _atomic_operation(f, match[1]) | _global_address(f) | fields


def _flat(f: _Fields, match: re.Match[str]) -> Action:
    kind, verb, rest = match.groups()
    bare = rest.replace("D16_HI", "").replace("D16", "")
    store, vaddr, saddr = verb == "STORE", f.get("vaddr", "addr"), f.get("saddr", default=127)
    if kind == "SCRATCH":
        scalar = saddr < 124
        # gfx90a has no bit for a VGPR offset: it is taken where there is no SGPR
        vector = not scalar if f.arch == "gfx90a" else f["sve"]
        vaddr, saddr = vaddr if vector else -1, saddr if scalar else -1
    else:
        saddr = saddr if saddr < 124 and kind == "GLOBAL" else -1
    return "flat", {
        "wave": f.wave,
        "store": int(store),
        "bytes": next(count for part, count in _BUFFER_BYTES if part in bare),
        "sign": int(bool(re.search(r"SBYTE|SSHORT|_I8|_I16", "_" + rest))),
        "high": int("D16_HI" in rest),
        "d16": int("D16" in rest),
        "vaddr": vaddr,
        "saddr": saddr,
        "offset": f["offset"] if kind == "FLAT" and "offset" in f else f.signed("ioffset", "offset"),
        "data": f.get("vsrc", "data") if store else f["vdst"],
        "acc": f.get("acc"),
        "scratch": int(kind == "SCRATCH"),
    }


_SCALAR_BYTES = {"DWORD": 4, "B32": 4, "DWORDX2": 8, "B64": 8, "B96": 12, "DWORDX4": 16, "B128": 16}
_SCALAR_BYTES |= {"DWORDX8": 32, "B256": 32, "DWORDX16": 64, "B512": 64, "U8": 1, "I8": 1, "U16": 2, "I16": 2}


def _scalar(f: _Fields, match: re.Match[str]) -> Action:
    buffer, verb, size = match.groups()
    offset, soffset = f.signed("ioffset", "offset"), f["soffset"]
    if f.wave == 64:
        # the offset is a number, or an SGPR, or both
        offset, soffset = offset if f["imm"] else 0, soffset if f["soffset_en"] else -1
    if f.wave == 32 and soffset == 124:
        soffset = -1
    return "scalar", {
        "store": int(verb == "STORE"),
        "buffer": int(bool(buffer)),
        "bytes": _SCALAR_BYTES[size],
        "sign": int(size.startswith("I")),
        "sbase": f["sbase"] * 2,
        "soffset": soffset,
        "offset": offset,
        "sdata": f["sdata"],
    }


def _accumulator(f: _Fields, match: re.Match[str]) -> Action:
    source = f["src0"]
    if match[1] != "WRITE":
        source = -1 - (source - 256)
    return "accumulator", {"write": int(match[1] != "READ"), "vdst": f["vdst"], "src": source, "literal": f.literal}


def _end(_f: _Fields, _match: re.Match[str]) -> Action:
    return "end", {}


def _load_lds(f: _Fields, _match: re.Match[str]) -> Action:
    size = {"BYTE": 1, "HORT": 2, "WORD": 4, "RDX3": 12, "RDX4": 16}[f.name[-4:]]
    return "load_lds", _global_address(f) | {"bytes": size}


def _scale_selects(f: _Fields) -> tuple[int, int]:
    """Which byte of each scale register: bit i of opsel and of opsel_hi belongs to operand i."""
    low, high = f["opsel"], f["opsel_hi"]
    return (low & 1) | (high & 1) << 1, (low >> 1 & 1) | (high >> 1 & 1) << 1


def _matrix(f: _Fields, match: re.Match[str]) -> Action:
    scaled, result, m, n, k, blocks, kind = match.groups()
    if f["src0"] < 256 or f["src1"] < 256:
        raise NotImplementedError("MFMA with a constant operand")
    if kind == "F8F6F4":
        format_a, format_b = _F8F6F4[f["cbsz"]], _F8F6F4[f["blgp"]]
    elif "F8" in kind or "FP8" in kind:
        format_a, format_b = (f.fp8(part) for part in kind.split("_"))
    elif kind not in _FORMATS:
        raise NotImplementedError(f"MFMA of {kind}")
    else:
        format_a = format_b = _FORMATS[kind]
        if f.get("cbsz") or f.get("abid") or f.get("blgp"):
            raise NotImplementedError("MFMA broadcast")
    acc, acc_cd = f.word >> (123 if scaled else 59) & 3, f.word >> (79 if scaled else 15) & 1
    scales = dict.fromkeys(("scale0", "scale1", "select0", "select1"), 0)
    if scaled:
        select0, select1 = _scale_selects(f)
        scales = {"scale0": f["scale_src0"], "scale1": f["scale_src1"], "select0": select0, "select1": select1}
    return "matrix", scales | {
        "M": int(m),
        "N": int(n),
        "K": int(k),
        "blocks": int(blocks or 1),
        "format_a": format_a,
        "format_b": format_b,
        "integer": int(result == "I32"),
        "vdst": f["vdst"],
        "s0": f["src0"] - 256,
        "s1": f["src1"] - 256,
        "s2": f["src2"],
        "acc_cd": acc_cd,
        "acc_a": acc & 1,
        "acc_b": acc >> 1,
        "scaled": 1 if scaled else 0 if kind == "F8F6F4" else -1,
    }


def _wmma(f: _Fields, match: re.Match[str]) -> Action:
    result, k, kind = match.groups()
    integers = {"8": (machine.U8, machine.I8), "4": (machine.U4, machine.I4)}
    if kind.startswith("IU"):
        # neg says which operand is signed
        format_a, format_b = (integers[kind[2]][f["neg"] >> i & 1] for i in (0, 1))
    elif "F8" in kind or "FP8" in kind:
        format_a, format_b = (f.fp8(part) for part in kind.split("_"))
    else:
        format_a = format_b = _FORMATS[kind]
    if (f["neg"] and not kind.startswith("IU")) or f["neg_hi"]:
        raise NotImplementedError("WMMA with negated operands")
    return "wmma", {
        "gfx12": int(f.arch.startswith("gfx12")),
        "K": int(k),
        "format_a": format_a,
        "format_b": format_b,
        "out": ("F32", "I32", "F16", "BF16").index(result),
        "vdst": f["vdst"],
        "s0": f["src0"] - 256,
        "s1": f["src1"] - 256,
        "s2": f["src2"],
        "high": f["opsel"] >> 2 & 1,
    }


def _lds_transpose(f: _Fields, match: re.Match[str]) -> Action:
    fields = {"bits": int(match[1]), "vaddr": f["addr"], "offset": f.ds_offset, "vdst": f["vdst"], "acc": f.get("acc")}
    return "lds_transpose", fields


def _lds(f: _Fields, match: re.Match[str]) -> Action:
    verb, pair, sign, bits, d16, high = match.groups()
    store, size = verb in ("WRITE", "STORE"), int(bits) // 8
    # two addresses: offsets count elements, or 64 of them
    step = size * 64 if "64" in (pair or "") else size
    words = (size + 3) // 4
    return "lds", {
        "wave": f.wave,
        "store": int(store),
        "bytes": size,
        "sign": int(sign == "I"),
        "high": int(bool(high)),
        "d16": int(bool(d16)),
        "vaddr": f["addr"],
        "offset0": f["offset0"] * step if pair else f.ds_offset,
        "offset1": f["offset1"] * step if pair else -1,
        "data0": f["data0"] if store else f["vdst"],
        "data1": f["data1"] if store else f["vdst"] + words,
        "acc": f.get("acc"),
    }


def _lds_atomic(f: _Fields, match: re.Match[str]) -> Action | None:
    operation, returns, kind = match[1], match[2], match[3]
    name = {"WRXCHG": "SWAP", "STOREXCHG": "SWAP", "CMPST": "CMPSWAP", "CMPSTORE": "CMPSWAP"}.get(operation)
    name = name or f"{operation}_{kind}"
    op = next((code for start, code in _ATOMICS if name.startswith(start)), None)
    if op is None or (name == "CMPSWAP" and kind.startswith("F")):
        return None
    # the compared operand comes first on gfx9
    compare, data = ("data0", "data1") if operation == "CMPST" else ("data1", "data0")
    return "lds_atomic", {
        "wave": f.wave,
        "op": op,
        "bytes": 8 if kind.endswith("64") else 4,
        "vaddr": f["addr"],
        "offset": f.ds_offset,
        "data": f[data] if name == "CMPSWAP" else f["data0"],
        "compare": f[compare],
        "vdst": f["vdst"],
        "returns": int(bool(returns)),
        "acc": f.get("acc"),
    }


def _dot2(f: _Fields, match: re.Match[str]) -> Action | None:
    if "abs" not in f:
        return None
    if f["abs"]:
        raise NotImplementedError("dot2 with abs")
    fields = {name: f[name] for name in ("vdst", "src0", "src1", "src2", "opsel", "neg")}
    return "dot2", fields | {"wave": f.wave, "bf16": int(match[1] == "BF16"), "literal": f.literal}


def _hwreg(f: _Fields, match: re.Match[str]) -> Action:
    fields = {"set": int(match[1] == "SET"), "simm": f["simm16"], "literal": f.literal}
    return "hwreg", fields | {"operand": -1 if match[2] else f["sdst"]}


def _convert_small(f: _Fields, match: re.Match[str]) -> Action | None:
    scaled, packed, to, source = match.groups()
    small = ("FP8", "BF8", "FP4")
    if f.wave != 64 or not {to, source} & set(small):
        return None
    to_small, count, opsel = to in small, 2 if packed else 1, f.get("opsel")
    if to_small and not packed:
        raise NotImplementedError("single conversion to a small float")
    name, wide = (to, source) if to_small else (source, to)
    src0 = f.get("src0")
    if "src0_sel" in f:
        # SDWA: a byte or a word of a VGPR, or of an SGPR
        src0 = f["vsrc0"] + (0 if f.get("s0") else 256)
        select = f["src0_sel"] - 4 * (count == 2)
    elif to_small:
        select = opsel >> 2 & 3 if name == "FP4" else opsel >> 3 & 1
    else:
        select = opsel & 1 if name != "FP4" and count == 2 else opsel & 3
    scale = f["src2" if to_small and wide == "F32" else "src1"] if scaled else -1
    return "convert_small", {
        "wave": f.wave,
        "to_small": int(to_small),
        "small": machine.E2M1 if name == "FP4" else f.fp8(name),
        "wide": _FORMATS[wide],
        "vdst": f["vdst"],
        "src0": src0,
        "src1": f.get("src1"),
        "scale": scale,
        "count": count,
        "select": max(select, 0),
        "literal": f.literal,
        "neg": f.get("neg"),
        "abs": f.get("abs"),
    }


def _lane(f: _Fields, match: re.Match[str]) -> Action:
    fields = {"vdst": f["vdst"], "src0": f["src0"], "src1": f.get("src1"), "literal": f.literal}
    return "lane", fields | {"wave": f.wave, "op": ("READ", "WRITE", "READFIRST").index(match[1])}


def _permlane(f: _Fields, match: re.Match[str]) -> Action:
    if f["src1"] >= 256 or f["src2"] >= 256:
        raise NotImplementedError("permlane with a VGPR selector")
    return "permlane", {
        "other_row": int(bool(match[1])),
        "vsrc": f["src0"] - 256,
        "vdst": f["vdst"],
        "select_low": f["src1"],
        "select_high": f["src2"],
        "literal": f.literal,
        "fetch_inactive": f["opsel"] & 1,
        "bound_ctrl": f["opsel"] >> 1 & 1,
    }


def _permute(f: _Fields, match: re.Match[str]) -> Action:
    fields = {"vaddr": f["addr"], "offset": f.ds_offset, "vdata": f["data0"], "vdst": f["vdst"]}
    return "permute", fields | {"wave": f.wave, "push": int(not match[1])}


def _dual(f: _Fields) -> Action:
    # 12 and 13 are the dot products
    if {f["opx"], f["opy"]} & {12, 13}:
        raise NotImplementedError("a dot product in dual issue")
    names = ("opx", "opy", "srcx0", "vsrcx1", "vdstx", "srcy0", "vsrcy1")
    # of the two destinations one is even and one odd: the low bit of the second is not stored
    second = f["vdsty"] << 1 | (f["vdstx"] & 1 ^ 1)
    return "dual", {name: f[name] for name in names} | {"vdsty": second, "literal": f.literal}


def _getpc(f: _Fields, match: re.Match[str]) -> Action:
    return "getpc", {"sdst": f["sdst"], "target": f["ssrc0"] if match[1] == "SWAP" else -1}


def _setpc(f: _Fields, _match: re.Match[str]) -> Action:
    return "setpc", {"ssrc": f["ssrc0"]}


def _swizzle(f: _Fields, _match: re.Match[str]) -> Action:
    if f.ds_offset >= 0xC000:
        raise NotImplementedError("ds_swizzle in rotate or fft mode")
    return "swizzle", {"wave": f.wave, "offset": f.ds_offset, "vaddr": f["addr"], "vdst": f["vdst"]}


def _swap(f: _Fields, match: re.Match[str]) -> Action:
    return "swap", {"width": int(match[1]), "vdst": f["vdst"], "src": f["src0"] - 256}


_SMALL = "FP8|BF8|FP4|F32|F16|BF16"
_RULES: tuple[tuple[re.Pattern[str], Callable[[_Fields, re.Match[str]], Action | None]], ...] = tuple(
    (re.compile(pattern), rule)
    for pattern, rule in (
        (r"BUFFER_(?:ATOMIC_(\w+)$)?", _buffer),
        (r"(?:GLOBAL|FLAT)_ATOMIC_(\w+)$", _atomic),
        (r"GLOBAL_LOAD_LDS", _load_lds),
        (
            r"(GLOBAL|FLAT|SCRATCH)_(LOAD|STORE)_((?:D16_)?(?:HI_)?(?:[USIB](?:BYTE|SHORT|8|16|32|64|96|128)|BYTE|SHORT"
            r"|DWORD(?:X[234])?)(?:_D16)?(?:_HI)?)$",
            _flat,
        ),
        (rf"S_(BUFFER_)?(LOAD|STORE)_({'|'.join(_SCALAR_BYTES)})$", _scalar),
        (r"V_ACCVGPR_(READ|WRITE|MOV)", _accumulator),
        (r"S_ENDPGM", _end),
        (r"V_MFMA_(SCALE_)?(F32|I32|F64)_(\d+)X(\d+)X(\d+)(?:_(\d+)B)?_(\w+?)(?:_E64)?$", _matrix),
        (r"V_WMMA_(F32|I32|F16|BF16)_16X16X(\d+)_(\w+?)(?:_E64)?$", _wmma),
        (r"DS_READ_B64_TR_B(\d+)$", _lds_transpose),
        (
            r"DS_(READ|LOAD|WRITE|STORE)(2|2ST64|_2ADDR|_2ADDR_STRIDE64)?_([UIB])(8|16|32|64|96|128)(_D16)?(_HI)?$",
            _lds,
        ),
        (
            r"DS_(ADD|SUB|INC|DEC|MIN|MAX|AND|OR|XOR|PK_ADD|WRXCHG|STOREXCHG|CMPST|CMPSTORE)(_RTN)?"
            r"_([UIBF](?:32|64)|B?F16)$",
            _lds_atomic,
        ),
        (r"V_DOT2_(B?F16)_B?F16(?:_E64)?$", _dot2),
        (r"S_(GET|SET)REG(_IMM32)?_B32$", _hwreg),
        (rf"V_CVT_(SCALEF32_)?(PK_)?({_SMALL})_({_SMALL})(?:_E32|_E64)?$", _convert_small),
        (r"V_(READ|WRITE|READFIRST)LANE_B32", _lane),
        (r"V_PERMLANE(16|32)_SWAP_B32", _swap),
        (r"V_PERMLANE(X?)16_B32", _permlane),
        (r"DS_(B?)PERMUTE_B32$", _permute),
        (r"S_(GET|SWAP)PC_B64", _getpc),
        (r"S_SETPC_B64$", _setpc),
        (r"DS_SWIZZLE_B32$", _swizzle),
    )
)


def action(name: str, inst: Any, raw: bytes, arch: str) -> Action | None:
    """The action that runs an instruction, or None if its opcode's pseudocode says what it does.

    Raises:
        NotImplementedError: it cannot run; the message names the part of the instruction.
    """
    if NO_EFFECT.match(name) or _ONLY_GOES_ON.match(name):
        return "nop", {}
    size = inst.size()
    ranges = dict(type(inst)._fields)
    fields = _Fields(name, arch, int.from_bytes(raw[:size], "little"), size, ranges)
    if "opx" in fields:
        return _dual(fields)
    for pattern, rule in _RULES:
        match = pattern.match(name)
        if match is not None:
            return rule(fields, match)
    return None
