"""The opcodes that AMD's pseudocode gives a meaning: one C function each, compiled with all others of a kernel.

tinygrad's package has the decoder, the encodings and the pseudocode. A function is the same for every instruction with
its opcode; registers, modifiers and literals are its operands. Compiled functions stay in the user's cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

from wavecrest.errors import EnvironmentProblem, MissingDependency
from wavecrest.isa.emulate import machine
from wavecrest.isa.emulate.grammar import NotUnderstood, Type
from wavecrest.isa.emulate.pseudocode import Variable, Writer

# the newest version that the tests were run with
TESTED = "0.14.0"

VCC, EXEC, LITERAL, FIRST_VGPR = 106, 126, 255, 256
_WHOLE, _LOW_HALF, _HIGH_HALF, _PAIR = 6, 4, 5, 16
_ZERO, _SIGN, _KEEP = range(3)

# where AMD's text is not what the hardware does, or means a function that C has exactly: opcode -> (text, in its place)
_SAME = r"[\s\S]*"
_CORRECTIONS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    # floor(x + 0.5) is 1 for the float before 0.5, and wrong for odd numbers above 2^23
    (r"V_RNDNE_F(16|32|64)", ((_SAME, r"D0.f{0} = rint(S0.f{0})"),)),
    # of an angle in turns; the product with 2 pi would lose what the hardware has
    (r"V_(?:SIN|COS)_F(16|32)", ((r"(sin|cos)\(S0\.f\d+ \* \d+'F\(PI \* 2\.0\)\)", r"\1_turns(S0.f{0})"),)),
    # a table whose values the text does not give: sixteenths
    (r"V_CVT_OFF_F(32)_I4", ((_SAME, "D0.f32 = i32_to_f32((S0.i32 << 28U) >> 28U) * 0.0625F"),)),
    # of denormals and zero too: mantissa and exponent are those of C's frexp
    (
        r"V_FREXP_EXP_I(?:16|32)_F(16|32|64)",
        ((r"exponent\(S0\.f\d+\) - \d+ \+ 1", r"frexp_exponent(S0.f{0})"),),
    ),
    # the scale that v_div_scale took is undone in the direction that the quotient needs
    (
        r"V_DIV_FMAS_F(32)",
        ((r"2\.0F \*\* 32 \* fma\(S0\.f32, S1\.f32, S2\.f32\)",
          "exponent(S2.f32) > 127 ? 2.0F ** 64 * fma(S0.f32, S1.f32, S2.f32)"
          " : 2.0F ** -64 * fma(S0.f32, S1.f32, S2.f32)"),),
    ),
    (
        r"V_DIV_FMAS_F(64)",
        ((r"2\.0 \*\* 64 \* fma\(S0\.f64, S1\.f64, S2\.f64\)",
          "exponent(S2.f64) > 1023 ? 2.0 ** 128 * fma(S0.f64, S1.f64, S2.f64)"
          " : 2.0 ** -128 * fma(S0.f64, S1.f64, S2.f64)"),),
    ),
    # a quotient that overflows comes as NaN
    (
        r"V_DIV_FIXUP_F(32|64)",
        ((r"D0\.f\d+ = sign_out \? -abs\(S0\.f\d+\) : abs\(S0\.f\d+\)",
          "D0.f{0} = isNAN(S0.f{0}) ? (sign_out ? -INF.f{0} : INF.f{0}) : (sign_out ? -abs(S0.f{0}) : abs(S0.f{0}))"),),
    ),
    # the truth table lies where other opcodes have modifiers
    (r"V_BITOP3_B(16|32)", ((r"\{ INST\.OMOD[^}]*\}", "TABLE.u32"),)),
    # without a case the numerator or denominator is as it was; VCC is a bit per lane
    (r"V_DIV_SCALE_F(32|64)", ((r"^VCC = 0x0LL;?", "VCC.u64[laneId] = 1'0U;\nD0.f{0} = S0.f{0};"),)),
)  # fmt: skip

_KINDS = dict.fromkeys(("F16", "PK2_F16", "PK_F16", "BF16", "I16", "U16", "B16"), "HALF")
_PAIRS = {"F64": "DOUBLE", "I64": "SIGNED", "PK2_F32": "FLOATS"}
_HALVES = re.compile(r"PK2_(?:F16|I16|U16|B16|BF16)|PK_(?:F16|I16|U16)")
_MODIFY = {"F16": "half", "F32": "float", "F64": "double", "PK2_F16": "halves", "PK2_F32": "floats", "PK_F16": "halves"}
# 16-bit results of gfx9 that leave the other half of the register: LLVM's list (zeroesHigh16BitsOfDest) has no others
_GFX9_KEEPS = re.compile(
    r"V_(?:MAD_[FIU]16|FMA_F16|DIV_FIXUP_F16|(?:MIN3|MAX3|MED3)_[FIU]16|(?:ADD|SUB)_I16|BITOP3_B16)(?:_E64)?$"
)


@dataclass(frozen=True)
class Tables:
    """The tables of an instruction set, from tinygrad."""

    family: str
    pseudocode: dict[Any, str]
    instructions: Any
    by_name: dict[str, str]

    @property
    def wave(self) -> int:
        return 64 if self.family == "cdna" else 32


def version() -> str:
    """The version of the installed tinygrad, or "unknown"."""
    try:
        return metadata.version("tinygrad")
    except metadata.PackageNotFoundError:
        return "unknown"


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == "tinygrad":
            raise MissingDependency("tinygrad", "the emulator", "pip install --no-deps tinygrad") from None
        raise EnvironmentProblem(
            f"tinygrad {version()} has no {error.name}, which the emulator needs; version {TESTED} is tested"
        ) from None


@cache
def tables(family: str) -> Tables:
    """The tables of cdna, rdna3 or rdna4.

    Raises:
        MissingDependency: tinygrad is not installed.
        EnvironmentProblem: its version does not fit.
    """
    _import("tinygrad")
    root = f"tinygrad.runtime.autogen.amd.{family}"
    text, instructions = _import(root + ".str_pcode"), _import(root + ".ins")
    names: dict[str, str] = {}
    for op, code in text.PCODE.items():
        names.setdefault(re.sub(r"_E(?:32|64)$", "", op.name).lower(), code)
    return Tables(family, text.PCODE, instructions, names)


def decode(raw: bytes, family: str) -> Any:
    """The instruction at the start of some bytes, as tinygrad's object."""
    return _import("tinygrad.renderer.amd").decode_inst(raw, family)


def name(inst: Any) -> str:
    """The name of an instruction's opcode; both, if it has two."""
    if hasattr(inst, "opx"):
        return f"{inst.opx.name}_{inst.opy.name}"
    return str(inst.op.name)


def _text(inst: Any, table: Tables) -> str:
    op = inst.op
    code = table.pseudocode.get(op) or table.by_name.get(re.sub(r"_E(?:32|64)$", "", op.name).lower())
    if code is None:
        raise NotUnderstood("there is no pseudocode")
    for pattern, changes in _CORRECTIONS:
        if (match := re.match(pattern + r"(?:_E32|_E64)?$", op.name)) is not None:
            for old, new in changes:
                code = re.sub(old, new.replace("{0}", match[1]), code, count=1)
    return code


def _other(table: Tables, called: str) -> str | None:
    # gfx950's text calls two that only RDNA 4's has
    return table.by_name.get(called) or (tables("rdna4").by_name.get(called) if table.family == "cdna" else None)


@dataclass(frozen=True)
class Source:
    """A source operand of an opcode: its field, bits, and type as the operand table has it."""

    field: str
    bits: int
    format: str

    @property
    def kind(self) -> str:
        """How constants become its bits: an enumerator of machine/operands.h."""
        if self.bits == 64:
            return _PAIRS.get(self.format, "UNSIGNED")
        return _KINDS.get(self.format, "WORD")


@dataclass(frozen=True)
class Opcode:
    """The C function of an opcode, and what its operands need.

    `jumps`: it sets the program counter.
    """

    symbol: str
    code: str
    sources: tuple[Source, ...]
    result: str
    result_bits: int
    jumps: bool
    takes_selectors: bool


def _sources(inst: Any) -> tuple[Source, ...]:
    found = []
    for field, (fmt, bits, _) in inst.operands.items():
        if re.fullmatch(r"v?s?src[012]", field):
            found.append(Source(field, bits, fmt.name.removeprefix("FMT_NUM_")))
    return tuple(sorted(found, key=lambda one: one.field[-1]))


def _encoding(inst: Any) -> str:
    return type(inst).__name__.partition("_")[0]


_known: dict[Any, Opcode] = {}


def opcode(inst: Any, family: str) -> Opcode:
    """The function of an instruction's opcode; another one where integers are clamped.

    Raises:
        NotUnderstood: its pseudocode has no meaning here.
    """
    scalar = _encoding(inst).startswith("SOP")
    saturates = bool(getattr(inst, "clmp", 0)) and not scalar and "F" not in _result(inst)
    key = family, inst.op, _encoding(inst), saturates
    if key not in _known:
        table = tables(family)
        _known[key] = _scalar(inst, table) if scalar else _vector(inst, table, saturates)
    return _known[key]


def _result(inst: Any) -> str:
    """The type of a vector instruction's result, as the operand table has it; nothing for a comparison."""
    found = inst.operands.get("vdst")
    return "" if found is None or inst.op.name.startswith("V_CMP") else str(found[0].name.removeprefix("FMT_NUM_"))


def _finished(writer: Writer, frame: str, **values: Any) -> Opcode:
    helpers = "".join(text for called, text in writer.helpers.items() if not called.endswith(" kind"))
    symbol = "op_" + hashlib.sha256((helpers + frame).encode()).hexdigest()[:20]
    # helpers are the same for all that use them, and each function is to stand alone
    for called in [called for called in writer.helpers if not called.endswith(" kind")]:
        helpers = re.sub(rf"\b{called}\(", f"{symbol}_{called}(", helpers)
        frame = re.sub(rf"\b{called}\(", f"{symbol}_{called}(", frame)
    return Opcode(symbol, helpers + f"void {symbol}(Wave* w, const Operands* o) {{\n{frame}}}\n", **values)


def _scalar(inst: Any, table: Tables) -> Opcode:
    sources, encoding = _sources(inst), _encoding(inst)
    result = inst.operands.get("sdst")
    bits = result[1] if result is not None else 32
    if encoding == "SOPK":
        # the immediate is a literal; comparisons compare the target with it
        sources = (Source("simm16", 32, "B32"),)
        if inst.op.name.startswith("S_CMPK"):
            sources = (Source("sdst", 32, "B32"), *sources)
    variables = {
        f"S{i}": Variable(f"S{i}", Type("b", max(one.bits, 32)), raw=True) for i, one in enumerate(sources)
    } | {
        "D0": Variable("D0", Type("b", max(bits, 32)), raw=True),
        "SCC": Variable("scc", Type("u", 1)),
        "EXEC": Variable("exec", Type("b", 64), raw=True),
        "VCC": Variable("vcc", Type("b", 64), raw=True),
        "EXECZ": Variable("(exec == 0)", Type("u", 1)),
        "VCCZ": Variable("(vcc == 0)", Type("u", 1)),
        "SIMM16": Variable("simm", Type("b", 16), raw=True),
        "PC": Variable("pc", Type("i", 64)),
    }  # fmt: skip
    writer = Writer(variables, lambda called: _other(table, called), lane=False)
    writer.program(_text(inst, table))
    wave, none = table.wave, 124 if table.family != "cdna" else -1
    lines = [f"enum {{ N = {wave} }};", "u64 exec = exec_mask(w, N), vcc = mask_source(w, VCC, N);"]
    lines.append("u32 scc = w->s[SCC], simm = (u32)o->literal & 0xffff;")
    lines.append("i64 pc = (i64)(w->s[PC] | (u64)w->s[PC + 1] << 32);")
    lines.append("(void)exec, (void)vcc, (void)scc, (void)simm, (void)pc;")
    for i, one in enumerate(sources):
        c = "u64" if one.bits == 64 else "u32"
        lines.append(f"{c} S{i} = ({c})scalar_source(w, o, {i}, {one.kind}, N);")
    lines.append(
        "u32 D0 = w->s[o->target];" if bits <= 32 else "u64 D0 = w->s[o->target] | (u64)w->s[o->target + 1] << 32;"
    )
    lines.append("{")
    lines += writer.lines
    lines.append("}")
    written = set(writer.written) | {
        name for name in ("SCC", "PC") if re.search(rf"\b{name}\b\s*[-+]?=[^=]", _text(inst, table))
    }
    if "EXEC" in written:
        lines.append("store_mask(w, EXEC, exec, N, -1);")
    if "VCC" in written:
        lines.append("store_mask(w, VCC, vcc, N, -1);")
    if "D0" in written:
        store = "w->s[o->target] = (u32)D0;" + (" w->s[o->target + 1] = D0 >> 32;" if bits == 64 else "")
        lines.append(f"if (o->target != {none}) {{ {store} }}")
    if "SCC" in written:
        lines.append("w->s[SCC] = scc;")
    if "PC" in written:
        lines.append("w->s[PC] = (u32)pc;\nw->s[PC + 1] = (u64)pc >> 32;")
    return _finished(
        writer, "\n".join(lines) + "\n", sources=sources, result="", result_bits=bits, jumps="PC" in written,
        takes_selectors=False,
    )  # fmt: skip


def _vector(inst: Any, table: Tables, saturates: bool) -> Opcode:
    encoding, opcode_name, text = _encoding(inst), inst.op.name, _text(inst, table)
    if saturates and re.search(r"[?&|^~]|<<|>>|VCC|\bfor\b|64", re.sub(r"//.*", "", text)):
        raise NotUnderstood("a clamped result that is no float, and not of addition and multiplication")
    if not encoding.startswith("VOP"):
        raise NotUnderstood(f"the encoding {encoding}")
    sources = _sources(inst)
    if (encoding == "VOP3" and opcode_name.startswith("V_CNDMASK")) or (
        encoding == "VOP3SD" and "VCC.u64[laneId]." in text
    ):
        # the mask is not one of the values
        sources = sources[:2]
    if any(one.bits > 64 for one in sources):
        raise NotUnderstood("operands of more than 64 bits")
    result = inst.operands.get("vdst")
    compares = opcode_name.startswith("V_CMP")
    bits, fmt = 0 if compares or result is None else result[1], _result(inst)
    if bits > 64:
        raise NotUnderstood("a result of more than 64 bits")
    if re.search(r"\bVGPR\b|\bMEM\b|\bSGPR\b", text):
        raise NotUnderstood("registers or memory by number")
    wave = table.wave
    variables = {f"S{i}": Variable(f"S{i}", Type("b", max(one.bits, 32)), raw=True) for i, one in enumerate(sources)}
    variables |= {
        "VCC": Variable("mask", Type("b", 64), raw=True),
        "EXEC": Variable("exec", Type("b", 64), raw=True),
        "OPSEL": Variable("o->select", Type("b", 32), raw=True),
        "OPSEL_HI": Variable("o->select_high", Type("b", 32), raw=True),
        "TABLE": Variable("o->select_high", Type("b", 32), raw=True),
        "SIMM32": Variable("o->literal", Type("b", 32), raw=True),
        "laneId": Variable("lane", Type("i", 32)),
    }
    if bits:
        variables["D0"] = variables["D"] = Variable("D0", Type("b", max(bits, 32)), raw=True)
    writer = Writer(variables, lambda called: _other(table, called), saturates=saturates)
    writer.program(text)
    written = writer.written
    masks = [one for one in ("D0" if compares else "VCC", "EXEC") if Type("u", 1) in written.get(one, ())]
    stores = bool(bits) and ("D0" in written or "D" in written)
    wide = bits == 64
    lines = [f"enum {{ N = {wave} }};", "const u64 exec = exec_mask(w, N);"]
    if "mask" in " ".join(writer.lines):
        lines.append("const u64 mask = mask_source(w, o->mask, N);")
    for i, one in enumerate(sources):
        shape = ("u64", "pairs") if one.bits == 64 else ("u32", "words")
        lines.append(f"{shape[0]} a{i}[N];\nsource_{shape[1]}(a{i}, w, o, {i}, {one.kind}, N);")
    c, shape_name = ("u64", "pairs") if wide else ("u32", "words")
    if stores:
        lines.append(f"{c} r[N];\nold_{shape_name}(r, w, o, N);")
    lines += [f"u8 {one}_bits[N];" for one in masks]
    lines.append("for (int lane = 0; lane < N; lane++) {")
    swaps = "S0" in written
    for i, one in enumerate(sources):
        lines.append(f"{'u64' if one.bits == 64 else 'u32'} S{i} = a{i}[lane];\n(void)S{i};")
    if stores:
        lines.append(f"{c} D0 = r[lane];")
    lines += [f"u32 {one}_bit = 0;" for one in masks]
    lines.append("{")
    lines += writer.lines
    lines.append("}")
    if stores:
        lines.append("r[lane] = D0;")
    lines += [f"{one}_bits[lane] = (u8){one}_bit;" for one in masks]
    if swaps:
        lines.append("a0[lane] = S0;")
    lines.append("}")
    if stores:
        if fmt in _MODIFY:
            lines.append(f"modify_{_MODIFY[fmt]}(r, w, o, N);")
        lines.append(f"store_{shape_name}(w, o, r, exec, N);")
    if swaps:
        lines.append("keep_active(w->v + (o->source[0] - FIRST_VGPR) * N, a0, exec, N);")
    none = 124 if table.family != "cdna" else -1
    for written_mask in masks:
        if written_mask == "EXEC":
            lines.append("store_mask(w, EXEC, mask_of(EXEC_bits, N) & exec, N, -1);")
        else:
            # lanes that are not active get 0
            lines.append(f"store_mask(w, o->mask_target, mask_of({written_mask}_bits, N) & exec, N, {none});")
    halves = bits == 16 and not writer.sliced & {"D0"} and "OPSEL" not in text
    return _finished(
        writer, "\n".join(lines) + "\n", sources=sources, result="half" if halves else fmt, result_bits=bits,
        jumps=False, takes_selectors=bool(re.search(r"\bOPSEL", text)),
    )  # fmt: skip


def _sign(one: Source) -> int:
    """The sign bits of a source operand, in its register or the higher of its two."""
    if _HALVES.match(one.format):
        return 0x80008000
    return 0x8000 if one.bits == 16 else 0x80000000


def operands(inst: Any, raw: bytes, what: Opcode, arch: str) -> dict[str, int | list[int]]:
    """The operands of an instruction: the fields of C's struct Operands.

    Raises:
        NotUnderstood: a modifier that this opcode has no meaning for here.
    """
    word = int.from_bytes(raw[: inst.size()], "little")
    fields = {name: word >> int(one.lo) & (1 << int(one.hi) - int(one.lo) + 1) - 1 for name, one in type(inst)._fields}
    encoding, cdna = _encoding(inst), arch.startswith("gfx9")
    values: dict[str, Any] = {
        "source": [0, 0, 0], "part": [_WHOLE] * 3, "keep": [0xFFFFFFFF] * 3, "flip": [0] * 3, "flip_low": [0] * 3,
        "sign_extend": 0, "literal": word >> 8 * (inst.size() - 4) & 0xFFFFFFFF, "target": fields.get("sdst", 0),
        "target_part": _WHOLE, "unused": _ZERO, "mask": -1, "mask_target": -1, "select": fields.get("opsel", 0),
        "select_high": fields.get("opsel_hi", 0) | fields.get("opsel_hi2", 0) << 2, "multiply": fields.get("omod", 0),
        "clamp": fields.get("clmp", 0),
    }  # fmt: skip
    if encoding.startswith("SOP"):
        if "simm16" in fields and encoding in ("SOPK", "SOPP"):
            values["literal"] = fields["simm16"]
        for i, one in enumerate(what.sources):
            values["source"][i] = LITERAL if one.field == "simm16" else fields[one.field]
        return values
    values["target"] = fields.get("vdst", 0)
    if inst.op.name.startswith("V_BITOP3"):
        values["select_high"] = fields["omod"] << 6 | fields["abs"] << 3 | fields["neg"]
        values["multiply"] = fields["abs"] = fields["neg"] = 0
    sdwa = "src0_sel" in fields
    for i, one in enumerate(what.sources):
        # RDNA's tables call operands of long forms by other names than their fields
        field = next(name for name in (f"vsrc{one.field[-1]}", f"src{one.field[-1]}") if name in fields)
        code = fields[field]
        if field.startswith("v") and not (sdwa and fields.get(f"s{i}")):
            code += FIRST_VGPR
        values["source"][i] = code
        _modify_source(values, fields, i, one, what, encoding)
        if sdwa:
            values["part"][i] = fields[f"src{i}_sel"]
            values["sign_extend"] |= fields[f"src{i}_sext"] << i
        elif not cdna and one.bits == 16 and encoding in ("VOP1", "VOP2", "VOPC") and code >= FIRST_VGPR + 128:
            # upper halves have numbers of their own
            values["source"][i], values["part"][i] = code - 128, _HIGH_HALF
    _set_masks(values, fields, inst, encoding, cdna)
    if what.result == "half":
        _set_half(values, fields, inst, encoding, cdna)
    if sdwa and "dst_sel" in fields:
        values["target_part"], values["unused"] = fields["dst_sel"], fields["dst_unused"]
    return values


def _modify_source(
    values: dict[str, Any], fields: dict[str, int], i: int, one: Source, what: Opcode, encoding: str
) -> None:
    sign = _sign(one)
    if not one.format.startswith(("F", "PK2_F", "PK_F", "BF", "B32", "B16", "B64")):
        # modifiers of the sign are those of floats
        fields = fields | dict.fromkeys(("neg", "neg_hi", "abs", f"src{i}_neg", f"src{i}_abs"), 0)
    if encoding == "VOP3P":
        negated, negated_high = fields["neg"] >> i & 1, fields["neg_hi"] >> i & 1
        if what.takes_selectors and not one.format.startswith("PK2"):
            # mixed precision: neg_hi is abs, and the operand a float32 or half of a register
            sign = 0x80008000 if values["select_high"] >> i & 1 else 0x80000000
            if values["select_high"] >> i & 1 and FIRST_FLOAT <= values["source"][i] <= LAST_FLOAT:
                raise NotUnderstood("a constant for float16 in mixed precision")
            values["keep"][i] = 0xFFFFFFFF & ~(sign if negated_high else 0)
            values["flip"][i] = sign if negated else 0
            return
        low, high = values["select"] >> i & 1, values["select_high"] >> i & 1
        if one.bits == 64:
            values["flip"][i], values["flip_low"][i] = 0x80000000 * negated_high, 0x80000000 * negated
            if one.format.startswith("PK2") and not what.takes_selectors:
                values["part"][i] = _PAIR | low | high << 1
        elif _HALVES.match(one.format):
            values["flip"][i] = 0x8000 * negated | 0x80000000 * negated_high
            if (low, high) != (0, 1):
                values["part"][i] = _PAIR | low | high << 1
        elif negated:
            values["flip"][i] = sign
        return
    negated = fields.get(f"src{i}_neg", fields.get("neg", 0) >> i & 1)
    absolute = fields.get(f"src{i}_abs", fields.get("abs", 0) >> i & 1)
    values["keep"][i] = 0xFFFFFFFF & ~(sign if absolute else 0)
    values["flip"][i] = sign if negated else 0
    if encoding == "VOP3" and one.bits == 16 and fields.get("opsel", 0) >> i & 1 and not what.takes_selectors:
        values["part"][i] = _HIGH_HALF


FIRST_FLOAT, LAST_FLOAT = 240, 248


def _set_masks(values: dict[str, Any], fields: dict[str, int], inst: Any, encoding: str, cdna: bool) -> None:
    """The mask that is read beside the sources, and where the one that is written goes."""
    called = inst.op.name
    values["mask"] = values["mask_target"] = VCC
    if encoding == "VOP3SD":
        values["mask_target"], values["mask"] = fields["sdst"], fields["src2"]
    elif encoding == "VOP3" and called.startswith("V_CNDMASK"):
        values["mask"] = fields["src2"]
    elif encoding == "VOP3" and called.startswith("V_CMP"):
        values["mask_target"] = fields["vdst"]
    elif encoding == "VOPC" and fields.get("sd"):
        values["mask_target"] = fields["sdst"]
    if called.startswith("V_CMPX") and not cdna:
        values["mask_target"] = EXEC


def _set_half(values: dict[str, Any], fields: dict[str, int], inst: Any, encoding: str, cdna: bool) -> None:
    """Which half of its register a 16-bit result is, and what becomes of the other one."""
    long, name = encoding.startswith("VOP3"), inst.op.name
    if not cdna and not long and values["target"] >= 128:
        values["target"], values["target_part"], values["unused"] = values["target"] - 128, _HIGH_HALF, _KEEP
    elif long and fields.get("opsel", 0) >> 3 & 1:
        values["target_part"], values["unused"] = _HIGH_HALF, _KEEP
    elif not cdna or _GFX9_KEEPS.match(name):
        values["target_part"], values["unused"] = _LOW_HALF, _KEEP
    else:
        values["target_part"], values["unused"] = _LOW_HALF, _ZERO


# symbol -> address, of those that are loaded
_loaded: dict[str, int] = {}


def compile_all(what: Iterable[Opcode]) -> None:
    """Make functions callable, from the cache or with one call of the compiler.

    Raises:
        EnvironmentProblem: no compiler, or the cache folder cannot be written.
    """
    missing = {one.symbol: one.code for one in what if one.symbol not in _loaded}
    if not missing:
        return
    for path, symbols in machine.build_opcodes(missing).items():
        library = ctypes.CDLL(str(path))
        for symbol in symbols:
            address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
            assert address is not None
            _loaded[symbol] = address
        _kept.append(library)


_kept: list[Any] = []


def address(what: Opcode) -> int:
    """Where the function of an opcode is, compiled if it is not yet."""
    compile_all([what])
    return _loaded[what.symbol]
