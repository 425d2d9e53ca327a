"""Effects of an instruction of CDNA for machine/watch.h: reads, writes, waits, from tinygrad's operand tables.

Registers have one numbering: SGPRs from 0, VGPRs from 256, accumulation registers from 512.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

VGPRS, ACCS = 256, 512
VCC, EXEC = 106, 126
_LITERAL = 255

# counters that s_waitcnt waits for; scalar loads and messages share lgkmcnt with LDS and end in any order
COUNTS_VM, COUNTS_LDS, COUNTS_SCALAR = 1, 2, 4
# what decides how values that nothing wrote pass from sources to results; 0: the result is known
FLOWS = ("lanes", "pairs", "select", "compare", "scalar")
FLOW = {name: number for number, name in enumerate(FLOWS, start=1)}
# memory accesses that have no fields of an action in the watch
ACCESSES = ("load", "store", "scalar")
ACCESS = {name: number for number, name in enumerate(ACCESSES, start=1)}
BRANCHES = ("scc", "vcc", "exec")
BRANCH = {name: number for number, name in enumerate(BRANCHES, start=1)}
BITS = ("none", "move", "and", "or", "and_not", "or_not", "xor")
# the low result is that of the low halves, the high one of all
PAIRS_MOVE, PAIRS_CARRY = 1, 2
SCC_READ, SCC_WRITTEN = 1, 2

# fields of C's Facts: name -> (how many, default)
FIELDS: dict[str, tuple[int, int]] = {
    # pairs of first register and count, closed by a count of 0
    "reads": (18, 0),
    "writes": (10, 0),
    # counts that s_waitcnt names; -1 for none
    "vm_wait": (1, -1),
    "lgkm_wait": (1, -1),
    "counts": (1, 0),
    "flow": (1, 0),
    # source operands: first register (-1 for a constant), registers, and for scalar ones the code
    "source": (3, -1),
    "words": (3, 0),
    "code": (3, -1),
    "literal": (1, 0),
    "target": (1, 0),
    "target_words": (1, 0),
    # SGPR pairs of a bit per lane: what is read, what is written; -1 for none
    "mask": (1, -1),
    "carry": (1, -1),
    "operation": (1, 0),
    # halves that each operand gives to the low and to the high result
    "select": (1, 0),
    "select_high": (1, 0),
    # the target gets EXEC, and EXEC the result
    "save": (1, 0),
    "scc": (1, 0),
    "branch": (1, 0),
    "access": (1, 0),
    "vaddr": (1, -1),
    "saddr": (1, -1),
    "offset": (1, 0),
    "bytes": (1, 0),
    "data": (1, 0),
}

_WRITES = ("vdst", "sdst")
_MATRIX = ("vdst", "src0", "src1", "src2")
# reads its result too
_READS_RESULT = re.compile(r"V_(?:PK_)?(?:FMAC|MAC|DOT\dC|SWAP|WRITELANE)|V_PERMLANE\d+_SWAP|S_CMOV|S_BITSET")
_SOPK_READS = re.compile(r"S_(?:CMPK|SETREG)")
_SOPK_BOTH = re.compile(r"S_(?:ADDK|MULK|CMOVK)")
_NO_SCC = re.compile(
    r"S_(?:MOV|CMOV|CSELECT|BFM|MUL|PACK|BREV|FF0|FF1|FLBIT|SEXT|BITSET|BITREPLICATE|GET|SET|SWAPPC|CALL|RFE|WAIT)"
)
_READS_SCC = re.compile(r"S_(?:ADDC|SUBB|CSELECT|CMOV)")
_BITWISE = {"AND": "and", "OR": "or", "ANDN2": "and_not", "ORN2": "or_not", "XOR": "xor", "NAND": "and", "NOR": "or"}
_BITWISE |= {"XNOR": "xor", "MOV": "move", "NOT": "move"}
_PAIR_CARRIES = re.compile(r"V_(?:MAD_[UI]64|LSHL_ADD_U64|LSHLREV_B64)")
# its matrix instructions are missing in tinygrad's tables: rows, columns
_XF32 = re.compile(r"V_MFMA_F32_(\d+)X(\d+)X\d+_XF32")
_CARRY_E32 = re.compile(r"V_(?:ADD|SUB|SUBREV)_CO_U32")
_CARRIES = re.compile(r"V_(?:ADDC|SUBB|SUBBREV)_")


class Operand(NamedTuple):
    """A source or result: `register` is -1 for a constant, whose 9-bit code is `code`."""

    name: str
    register: int
    words: int
    code: int


def _raw(inst: Any, name: str, word: int) -> int:
    field = dict(type(inst)._fields)[name]
    return word >> int(field.lo) & (1 << int(field.hi) - int(field.lo) + 1) - 1


def _accumulates(name: str, kind: str, raw: dict[str, int]) -> bool:
    """True if an operand that can be either is an accumulation register."""
    if "OR_ACCVGPR" not in kind:
        return "ACCVGPR" in kind
    if "acc_cd" in raw:
        return bool(raw["acc_cd"] if name in ("vdst", "src2") else raw["acc"] >> int(name[-1]) & 1)
    return bool(raw.get("acc", 0))


def operands(opcode: str, inst: Any, raw: dict[str, int]) -> list[Operand]:
    """The operands of an instruction as its encoding has them, without implicit ones."""
    found = []
    kinds = [(name, kind.name, inst.op_regs.get(name, 1)) for name, (_, _, kind) in inst.operands.items()]
    if (shape := _XF32.match(opcode)) is not None:
        either, results = "OPR_SRC_VGPR_OR_ACCVGPR", int(shape[1]) * int(shape[2]) // 64
        # taken for a packed instruction, whose fields have other names
        raw = {"acc_cd": raw.get("clmp", 0), "acc": raw.get("opsel_hi", 0)} | raw
        kinds = [(name, either, words) for name, words in zip(_MATRIX, (results, 2, 2, results), strict=True)]
    for name, kind, words in kinds:
        if kind.startswith(("OPR_SIMM", "OPR_LABEL", "OPR_WAITCNT", "OPR_HWREG", "OPR_SENDMSG")):
            continue
        # the source of DPP and SDWA forms has a field of its own
        field = "v" + name if name == "src0" and "vsrc0" in raw else name
        if field not in raw or (name == "soffset" and "soffset_en" in raw and not raw["soffset_en"]):
            continue
        # a field that tinygrad does not take for a register is the code itself
        code = int(getattr(getattr(inst, field), "offset", raw[field]))
        if (field == "vsrc0" and raw.get("s0")) or (field == "vsrc1" and raw.get("s1")):
            code -= VGPRS
        if kind.startswith(("OPR_SREG", "OPR_SDST")) and code >= VGPRS:
            code -= VGPRS
        register = code if code < 128 or code >= VGPRS else -1
        if register >= VGPRS and _accumulates(name, kind, raw):
            register += VGPRS
        if name == "saddr" and code >= 124:
            register = -1
        if name == "addr" and raw.get("sve") == 0 and type(inst).__name__.startswith("SCRATCH"):
            register = -1
        if name == "vaddr" and not (raw.get("offen") or raw.get("idxen")):
            register = -1
        found.append(Operand(name, register, words, code))
    return found


def _is_written(name: str, opcode: str, encoding: str, raw: dict[str, int]) -> bool:
    if encoding == "SOPK" and name == "sdst":
        return not _SOPK_READS.match(opcode)
    if name == "sdata":
        return opcode.startswith(("S_LOAD", "S_BUFFER_LOAD", "S_SCRATCH_LOAD", "S_MEM", "S_ATC"))
    if name == "vdata":
        return "LOAD" in opcode and not raw.get("lds")
    return name in _WRITES and "_LDS_" not in opcode


def _returns(opcode: str, raw: dict[str, int]) -> bool:
    """True if an atomic operation returns the old value."""
    return bool(raw.get("sc0"))


def facts(opcode: str, inst: Any, data: bytes) -> dict[str, list[int]]:
    """The fields of FIELDS for one instruction, as lists.

    Args:
        opcode: tinygrad's name of it.
        inst: its object, DPP and SDWA forms as they are in the code.
        data: its bytes.
    """
    word = int.from_bytes(data[: inst.size()], "little")
    raw = {name: _raw(inst, name, word) for name, _ in type(inst)._fields}
    encoding = type(inst).__name__.partition("_")[0]
    result = {name: [default] * count for name, (count, default) in FIELDS.items()}
    found = operands(opcode, inst, raw)
    reads: list[tuple[int, int]] = []
    writes: list[tuple[int, int]] = []
    for one in found:
        if one.register < 0:
            continue
        written = _is_written(one.name, opcode, encoding, raw)
        atomic = "ATOMIC" in opcode
        if atomic and one.name == "vdst" and not _returns(opcode, raw):
            continue
        if atomic and one.name == "vdata" and _returns(opcode, raw):
            writes.append((one.register, one.words))
        (writes if written else reads).append((one.register, one.words))
        if written and (_READS_RESULT.match(opcode) or (encoding == "SOPK" and _SOPK_BOTH.match(opcode))):
            reads.append((one.register, one.words))
        if "SWAP_B32" in opcode and one.name == "src0":
            writes.append((one.register, one.words))
    mask, carry = _masks(opcode, encoding, raw)
    reads += [(pair, 2) for pair in [mask] if pair >= 0]
    writes += [(pair, 2) for pair in [carry] if pair >= 0 and (pair, 2) not in writes]
    result["mask"], result["carry"] = [mask], [carry]
    _fill_waits(result, opcode, encoding, raw)
    _fill_flow(result, opcode, encoding, raw, found, word >> 8 * (inst.size() - 4) & 0xFFFFFFFF)
    if result["branch"] == [BRANCH["vcc"]]:
        reads.append((VCC, 2))
    _fill_access(result, opcode, encoding, raw, found)
    for name, pairs in (("reads", reads), ("writes", writes)):
        flat = [number for pair in pairs for number in pair][: FIELDS[name][0] - 2]
        result[name][: len(flat)] = flat
    return result


def _masks(opcode: str, encoding: str, raw: dict[str, int]) -> tuple[int, int]:
    """The SGPR pairs with a bit per lane that an instruction reads (not as a source operand) and writes, or -1."""
    if encoding in ("VOPC", "VOP3") and opcode.startswith("V_CMP"):
        # SDWA forms say with a bit that they have a target of their own
        explicit = raw.get("sdst", raw.get("vdst", VCC)) if encoding == "VOP3" or raw.get("sd") else VCC
        return -1, explicit
    if encoding == "VOP3SD":
        return (raw["src2"] if _CARRIES.match(opcode) else -1), raw["sdst"]
    if opcode.startswith("V_CNDMASK"):
        return (raw["src2"] if encoding == "VOP3" else VCC), -1
    if _CARRIES.match(opcode):
        return VCC, VCC
    if _CARRY_E32.match(opcode):
        return -1, VCC
    return (VCC, -1) if opcode.startswith("V_DIV_FMAS") else (-1, -1)


def _fill_waits(result: dict[str, list[int]], opcode: str, encoding: str, raw: dict[str, int]) -> None:
    """Counters: what counts, and what an s_waitcnt waits for (its immediate as gfx9 has it)."""
    if opcode == "S_WAITCNT":
        simm = raw["simm16"]
        vm, lgkm = simm & 15 | simm >> 14 << 4, simm >> 8 & 15
        # the largest value waits for nothing
        result["vm_wait"], result["lgkm_wait"] = [vm if vm < 63 else -1], [lgkm if lgkm < 15 else -1]
    elif encoding in ("MUBUF", "MTBUF", "GLOBAL", "SCRATCH") and re.search("LOAD|STORE|ATOMIC", opcode):
        result["counts"] = [COUNTS_VM]
    elif encoding == "FLAT":
        # may be LDS, so it counts in both; what order it ends in is not known
        result["counts"] = [COUNTS_VM | COUNTS_SCALAR]
    elif encoding == "DS":
        result["counts"] = [COUNTS_LDS]
    elif (encoding == "SMEM" and not opcode.startswith("S_DCACHE")) or opcode.startswith("S_SENDMSG"):
        result["counts"] = [COUNTS_SCALAR]


def _fill_flow(
    result: dict[str, list[int]], opcode: str, encoding: str, raw: dict[str, int], found: list[Operand], literal: int
) -> None:
    """How values that nothing wrote pass through the instruction."""
    if opcode.startswith("S_CBRANCH_"):
        kind = opcode.removeprefix("S_CBRANCH_")
        result["branch"] = [next((number for name, number in BRANCH.items() if name.upper() in kind), 0)]
        return
    vector, scalar = encoding.startswith("VOP"), encoding in ("SOP1", "SOP2", "SOPC", "SOPK")
    if not vector and not scalar:
        return
    sources = [one for one in found if one.name not in (*_WRITES, "simm16")]
    if encoding == "VOP3SD" or opcode.startswith("V_CNDMASK"):
        # the third one is the mask
        sources = [one for one in sources if one.name != "src2" or _masks(opcode, encoding, raw)[0] < 0]
    # the scales of a matrix instruction come after its operands
    sources.sort(key=lambda one: one.name.startswith("scale"))
    targets = [one for one in found if one.name in _WRITES and one.register >= 0]
    if _READS_RESULT.match(opcode) or (encoding == "SOPK" and not re.match("S_MOVK|S_GETREG", opcode)):
        sources += targets
    for index, one in enumerate(sources[:3]):
        result["source"][index], result["words"][index] = one.register, one.words
        result["code"][index] = one.code
    result["literal"] = [literal]
    if scalar:
        _fill_scalar(result, opcode, encoding, targets)
        return
    result["flow"] = [FLOW["lanes"]]
    if result["carry"][0] >= 0 and opcode.startswith("V_CMP"):
        result["flow"] = [FLOW["compare"]]
        return
    vectors = [one for one in targets if one.register >= VGPRS]
    if vectors:
        result["target"], result["target_words"] = [vectors[0].register], [vectors[0].words]
    if opcode.startswith("V_CNDMASK"):
        result["flow"] = [FLOW["select"]]
    elif opcode.startswith(("V_PK_MOV_B32", "V_PK_FMA_F32", "V_PK_MUL_F32", "V_PK_ADD_F32")):
        result["flow"] = [FLOW["pairs"]]
        result["select"] = [raw["opsel"]]
        result["select_high"] = [raw["opsel_hi"] | raw.get("opsel_hi2", 0) << 2]
        result["operation"] = [PAIRS_MOVE if opcode.startswith("V_PK_MOV") else 0]
        if opcode.startswith("V_PK_MOV"):
            # its two selectors are those of src0 and of src1
            result["select_high"] = [raw["opsel"]]
    elif _PAIR_CARRIES.match(opcode):
        result["flow"], result["operation"] = [FLOW["pairs"]], [PAIRS_CARRY]
    elif opcode.startswith("V_MOV_B64"):
        result["flow"], result["select_high"] = [FLOW["pairs"]], [1]
    elif opcode == "V_READFIRSTLANE_B32_E32":
        result["target"], result["target_words"] = [raw["vdst"]], [1]


def _fill_scalar(result: dict[str, list[int]], opcode: str, encoding: str, targets: list[Operand]) -> None:
    result["flow"] = [FLOW["scalar"]]
    if encoding == "SOPK" and _SOPK_READS.match(opcode):
        targets = []
    if targets:
        result["target"], result["target_words"] = [targets[0].register], [targets[0].words]
    if encoding != "SOPK":
        written = not _NO_SCC.match(opcode)
    else:
        written = opcode.startswith(("S_CMPK", "S_ADDK"))
    result["scc"] = [(SCC_READ if _READS_SCC.match(opcode) else 0) | (SCC_WRITTEN if written else 0)]
    save = "SAVEEXEC" in opcode
    operation = _BITWISE.get(opcode.split("_")[1])
    if operation is None or encoding not in ("SOP1", "SOP2"):
        return
    if save:
        # exec is the second operand
        result["save"], result["code"][1] = [1], EXEC
        if opcode.startswith(("S_ANDN1", "S_ORN1")):
            return
    result["operation"] = [BITS.index(operation)]


def _fill_access(
    result: dict[str, list[int]], opcode: str, encoding: str, raw: dict[str, int], found: list[Operand]
) -> None:
    """Memory accesses of instructions that are not actions of the C machine."""
    by_name = {one.name: one for one in found}
    if encoding in ("GLOBAL", "FLAT") and "ATOMIC" not in opcode and "_LDS_" not in opcode:
        data = by_name.get("vdst" if "LOAD" in opcode else "data")
        if data is None:
            return
        size = re.search(r"X([234])$|(DWORD$)|(SHORT)|(BYTE)", opcode)
        if size is None:
            return
        count = 4 * int(size[1]) if size[1] else 4 if size[2] else 2 if size[3] else 1
        offset = raw["offset"] - (1 << 13) if encoding == "GLOBAL" and raw["offset"] >> 12 else raw["offset"]
        result["access"] = [ACCESS["load" if "LOAD" in opcode else "store"]]
        result["vaddr"], result["offset"] = [by_name["addr"].register - VGPRS], [offset]
        result["saddr"] = [by_name["saddr"].register if "saddr" in by_name else -1]
        result["bytes"], result["data"] = [count], [data.register]
    elif encoding == "SMEM" and opcode.startswith("S_LOAD"):
        result["access"] = [ACCESS["scalar"]]
        offset = raw["offset"] - (1 << 21) if raw["offset"] >> 20 else raw["offset"]
        soffset = by_name.get("soffset")
        result["saddr"], result["offset"] = [by_name["sbase"].register], [offset if raw["imm"] else 0]
        result["vaddr"] = [soffset.register if soffset is not None else -1]
        result["data"], result["bytes"] = [by_name["sdata"].register], [4 * by_name["sdata"].words]
