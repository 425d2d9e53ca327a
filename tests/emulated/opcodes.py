"""Each vector and scalar opcode of the emulator, and those that move memory, beside its meaning by its name: JSON.

`python -m tests.emulated.opcodes gfx942 [PATTERN]`, without TRITON_INTERPRET. LLVM assembles a kernel that runs each
opcode once on loaded operands, so that encodings come from LLVM; results are compared with `meanings.py` and
`memory_cases.py`, which know nothing of AMD's pseudocode. The result has what was compared and what differs, opcodes
whose names do not say their meaning, and those that LLVM does not know on the architecture.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tests.emulated import meanings, memory_cases
from tests.emulated.meanings import BITOP3, LITERAL, Given, Meaning
from tests.emulated.planted import assemble
from wavecrest.isa.emulate import Program, actions, opcodes
from wavecrest.isa.emulate.grammar import NotUnderstood

LANES = 64
# operands of each kind in memory: three sources, the old result, a mask
SLOTS, BEFORE, MASK = 5, 3, 4
KINDS = ("int", "f16", "bf16", "f32", "f64")
_MEMORY = ("ds_", "global_", "flat_", "buffer_")
_OPERANDS = ("v[10:11]", "v[12:13]", "v[14:15]")

_HEAD = """
.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
.text
.globl opcodes
.p2align 8
.type opcodes,@function
opcodes:
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  s_waitcnt lgkmcnt(0)
  s_mul_i32 s3, s2, {inputs}
  s_add_u32 s4, s4, s3
  s_addc_u32 s5, s5, 0
  s_mul_i32 s3, s2, {outputs}
  s_add_u32 s6, s6, s3
  s_addc_u32 s7, s7, 0
  v_lshlrev_b32_e32 v2, 4, v0
  s_mov_b32 m0, -1
"""
_TAIL = """
  s_endpgm
.section .rodata,"a",@progbits
.p2align 6
.amdhsa_kernel opcodes
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_kernarg_size 16
  .amdhsa_group_segment_fixed_size 1024
  .amdhsa_next_free_vgpr 64
  .amdhsa_next_free_sgpr 96
  .amdhsa_accum_offset 64
  .amdhsa_float_denorm_mode_32 3
  .amdhsa_float_denorm_mode_16_64 3
.end_amdhsa_kernel
.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.target: amdgcn-amd-amdhsa--{arch}
amdhsa.kernels:
  - .name: opcodes
    .symbol: opcodes.kd
    .kernarg_segment_size: 16
    .kernarg_segment_align: 8
    .group_segment_fixed_size: 1024
    .private_segment_fixed_size: 0
    .wavefront_size: 64
    .sgpr_count: 96
    .vgpr_count: 64
    .max_flat_workgroup_size: 64
    .args:
      - {{.offset: 0, .size: 8, .value_kind: global_buffer, .address_space: global}}
      - {{.offset: 8, .size: 8, .value_kind: global_buffer, .address_space: global}}
...
.end_amdgpu_metadata
"""


# v[20:21], and what lanes have of the masks s[20:21] and s[26:27]
_STORE = [
    "  v_cndmask_b32_e64 v22, 0, 1, s[20:21]",
    "  v_cndmask_b32_e64 v23, 0, 1, s[26:27]",
    "  global_store_dwordx4 v2, v[20:23], s[6:7]",
    f"  s_add_u32 s6, s6, {LANES * 16}",
    "  s_addc_u32 s7, s7, 0",
]


class Case(NamedTuple):
    """A vector opcode to run: its name, its line in assembly, kinds and bits of its sources, its meaning."""

    name: str
    line: str
    kinds: tuple[str, ...]
    bits: tuple[int, ...]
    result_bits: int
    meaning: Meaning

    def written(self) -> list[str]:
        """The lines that load operands, run it, and store the result and masks."""
        lines = []
        for i, kind in enumerate(self.kinds):
            lines += _at((KINDS.index(kind) * SLOTS + i) * LANES * 16)
            lines.append(f"  global_load_dwordx2 {_OPERANDS[i]}, v2, s[8:9]")
        lines += [*_at(BEFORE * LANES * 16), "  global_load_dwordx2 v[20:21], v2, s[8:9]"]
        lines += [*_at(MASK * LANES * 16), "  s_load_dwordx2 vcc, s[8:9], 0x0"]
        lines.append("  s_load_dwordx2 s[28:29], s[8:9], 0x10")
        lines += ["  s_waitcnt vmcnt(0) lgkmcnt(0)", "  s_mov_b64 s[22:23], vcc", "  s_mov_b64 s[20:21], 0"]
        lines += [f"  {line}" for line in (memory_cases.PREPARE if self.name.startswith(_MEMORY) else ())]
        lines += ["  s_mov_b64 exec, s[28:29]", "  " + self.line]
        if re.search(r"\bvcc\b", self.line):
            lines.append("  s_mov_b64 s[20:21], vcc")
        return [*lines, "  s_mov_b64 s[26:27], exec", "  s_mov_b64 exec, -1", *_STORE]

    def wrong(self, operands: np.ndarray, out: np.ndarray) -> str:
        """The first of a workgroup's results that is not as meant, or nothing."""
        ints = operands[KINDS.index("int")]
        for lane in range(LANES):
            sources = [
                int(operands[KINDS.index(kind), i, lane]) & (1 << max(bits, 32)) - 1
                for i, (kind, bits) in enumerate(zip(self.kinds, self.bits, strict=True))
            ]
            before = int(ints[BEFORE, lane])
            want = self.meaning.function(Given(sources, before, int(ints[MASK, 0]) >> lane & 1, lane))
            if not int(ints[MASK, 1]) >> lane & 1:
                # a lane that is not active keeps what it has
                bits = max(self.result_bits, self.meaning.elements * meanings.bits_of(self.meaning.kind))
                kept = None if want.bits is None else before & (1 << bits) - 1
                want = meanings.Result(kept, None if want.mask is None else 0)
            low, high, mask, active = (int(word) for word in out[lane])
            wrong = ""
            if want.bits is not None and not meanings.agrees(self.meaning, low | high << 32, want):
                wrong = f"{(low | high << 32) & (1 << self.result_bits) - 1:#x}, not {want.bits:#x}"
            if want.mask is not None and mask != want.mask:
                wrong += f" mask {mask}, not {want.mask}"
            if self.name.startswith("v_cmpx") and active != want.mask:
                wrong += f" EXEC {active}, not {want.mask}"
            if wrong:
                return f"{self.line}: {', '.join(map(hex, sources))}, before {before:#x}: {wrong}"
        return ""


class ScalarCase(NamedTuple):
    """A scalar opcode to run: its name, its line, bits of its sources and of its result, its meaning."""

    name: str
    line: str
    bits: tuple[int, ...]
    result_bits: int
    meaning: Callable[[Given], meanings.Scalar]

    def written(self) -> list[str]:
        """The lines that load operands, run it, and store the result, SCC and EXEC."""
        lines = []
        for slot, register in ((0, "s[30:31]"), (1, "s[32:33]"), (BEFORE, "s[34:35]"), (MASK, "s[40:41]")):
            lines += [*_at(slot * LANES * 16), f"  s_load_dwordx2 {register}, s[8:9], 0x0"]
        lines += ["  s_waitcnt lgkmcnt(0)", "  s_mov_b64 exec, s[40:41]", "  s_bitcmp1_b32 s40, 5"]
        lines += ["  " + self.line, "  s_cselect_b64 s[20:21], -1, 0"]
        lines += ["  s_mov_b64 s[26:27], exec", "  s_mov_b64 exec, -1", "  v_mov_b32_e32 v20, s34"]
        return [*lines, "  v_mov_b32_e32 v21, s35", *_STORE]

    def wrong(self, operands: np.ndarray, out: np.ndarray) -> str:
        """The parts of a workgroup's result that are not as meant, or nothing."""
        values = [int(value) for value in operands[KINDS.index("int"), :, 0]]
        sources = [value & (1 << bits) - 1 for value, bits in zip(values, self.bits, strict=False)]
        mask, scc, before = values[MASK], values[MASK] >> 5 & 1, values[BEFORE]
        want = self.meaning(Given(sources, before & (1 << self.result_bits) - 1, scc, mask))
        left = before
        if want.bits is not None:
            left = want.bits | before >> self.result_bits << self.result_bits
        active = sum(int(bit) << lane for lane, bit in enumerate(out[:, 3]))
        found = [("result", int(out[0, 0]) | int(out[0, 1]) << 32, left)]
        found.append(("EXEC", active, mask if want.exec is None else want.exec))
        # which of two is named by SCC, the name does not say for equal ones
        if not self.name.startswith(("s_min", "s_max")):
            found.append(("SCC", int(out[0, 2]), scc if want.scc is None else want.scc))
        wrong = " ".join(f"{what} {a:#x}, not {b:#x}" for what, a, b in found if a != b)
        return wrong and f"{self.line}: {', '.join(map(hex, sources))}, before {before:#x}, SCC {scc}: {wrong}"


AnyCase = Case | ScalarCase


def _at(offset: int) -> list[str]:
    """s[8:9]: a place among the operands."""
    return [f"  s_add_u32 s8, s4, {offset}", "  s_addc_u32 s9, s5, 0"]


def _kind(format_name: str) -> str:
    found = re.search(r"BF16|F16|F32|F64", format_name)
    return found[0].lower() if found else "int"


def _register(number: int, bits: int) -> str:
    return f"v[{number}:{number + 1}]" if bits == 64 else f"v{number}"


def cases(arch: str) -> Iterator[tuple[str, AnyCase | None]]:
    """Opcodes that the emulator translates, each with its case, or None if its name does not say its meaning."""
    instructions = opcodes.tables("cdna").instructions
    for name in sorted(dir(instructions)):
        make = getattr(instructions, name)
        if not hasattr(make, "func"):
            continue
        for one in memory_cases.memory(name):
            three = (one.kind,) * 3
            yield one.name, Case(one.name, "\n  ".join(one.lines), three, (64,) * 3, one.bits, one.meaning)
        if not name.startswith(("v_", "s_")):
            continue
        try:
            inst = make()
        except TypeError:
            # a form with a literal
            inst = make(literal=LITERAL)
        try:
            if actions.action(opcodes.name(inst), inst, inst.to_bytes() + bytes(16), arch) is not None:
                continue
            what = opcodes.opcode(inst, "cdna")
        except (NotImplementedError, NotUnderstood):
            # the emulator refuses it, with its name
            continue
        yield name, (_vector if name.startswith("v_") else _scalar)(name, inst, what)
    for case in divisions():
        yield case.name, case


def _vector(name: str, _inst: Any, what: opcodes.Opcode) -> Case | None:
    bare = re.sub(r"_e(32|64)$", "", name[2:])
    meaning = meanings.vector(bare)
    if meaning is None:
        return None
    long, compares = not name.endswith("_e32"), bare.startswith("cmp")
    registers = [_register(10 + 2 * i, source.bits) for i, source in enumerate(what.sources)]
    target = "s[20:21]" if compares and long else "vcc" if compares else _register(20, what.result_bits)
    words = [target, *registers]
    if bare.endswith("_co_u32") or bare.startswith(("mad_u64", "mad_i64")):
        words.insert(1, "s[20:21]" if long else "vcc")
    if bare.startswith(("addc_", "subb", "cndmask")):
        words.append("s[22:23]" if long else "vcc")
    if bare in ("fmaak_f32", "fmamk_f32"):
        words = [target, *registers[:2]]
        words.insert(3 if bare == "fmaak_f32" else 2, f"{LITERAL:#x}")
    line = f"{name} {', '.join(words)}"
    if bare.startswith("bitop3"):
        line += f" bitop3:{BITOP3:#x}"
    kinds, bits = tuple(_kind(source.format) for source in what.sources), tuple(one.bits for one in what.sources)
    return Case(name, line, kinds, bits, what.result_bits, meaning)


def _scalar(name: str, inst: Any, what: opcodes.Opcode) -> ScalarCase | None:
    meaning = meanings.scalar(name[2:])
    if meaning is None:
        return None
    target = ["s[34:35]" if what.result_bits == 64 else "s34"] if "sdst" in inst.operands else []
    if type(inst).__name__.startswith("SOPK"):
        immediate = meanings.IMMEDIATE if name.endswith("u32") else meanings.signed(meanings.IMMEDIATE, 16)
        return ScalarCase(name, f"{name} s34, {immediate}", (), 32, meaning)
    pairs = [
        f"s[{30 + 2 * i}:{31 + 2 * i}]" if one.bits == 64 else f"s{30 + 2 * i}" for i, one in enumerate(what.sources)
    ]
    line = f"{name} {', '.join([*target, *pairs])}"
    return ScalarCase(name, line, tuple(max(one.bits, 32) for one in what.sources), what.result_bits, meaning)


# LLVM's division: the numerator in the first source, the denominator in the second
_DIVIDE = {
    "f32": """v_div_scale_f32 v30, s[20:21], v12, v12, v10
        v_div_scale_f32 v31, vcc, v10, v12, v10
        v_rcp_f32 v32, v30
        v_fma_f32 v33, -v30, v32, 1.0
        v_fma_f32 v32, v33, v32, v32
        v_mul_f32 v33, v31, v32
        v_fma_f32 v34, -v30, v33, v31
        v_fma_f32 v33, v34, v32, v33
        v_fma_f32 v30, -v30, v33, v31
        v_div_fmas_f32 v30, v30, v32, v33
        v_div_fixup_f32 v20, v30, v12, v10""",
    "f64": """v_div_scale_f64 v[30:31], s[20:21], v[12:13], v[12:13], v[10:11]
        v_rcp_f64 v[32:33], v[30:31]
        v_fma_f64 v[34:35], -v[30:31], v[32:33], 1.0
        v_fma_f64 v[32:33], v[32:33], v[34:35], v[32:33]
        v_fma_f64 v[34:35], -v[30:31], v[32:33], 1.0
        v_fma_f64 v[32:33], v[32:33], v[34:35], v[32:33]
        v_div_scale_f64 v[34:35], vcc, v[10:11], v[12:13], v[10:11]
        v_mul_f64 v[36:37], v[34:35], v[32:33]
        v_fma_f64 v[30:31], -v[30:31], v[36:37], v[34:35]
        v_div_fmas_f64 v[30:31], v[30:31], v[32:33], v[36:37]
        v_div_fixup_f64 v[20:21], v[30:31], v[12:13], v[10:11]""",
}


def divisions() -> Iterator[Case]:
    """Division by the opcodes that are made for it, whose results are nothing alone."""
    for kind, line in _DIVIDE.items():
        bits = meanings.bits_of(kind)
        yield Case(f"division {kind}", line, (kind, kind), (bits, bits), bits, meanings.quotient(kind))


def accepted(case: AnyCase, arch: str) -> AnyCase | None:
    """The case in words that LLVM knows on an architecture, or None if it has no such instruction."""
    # LLVM calls the mixed forms by what they are: fused; the old value is asked for by another name on gfx90a
    others = case.line.replace("v_mad_mix", "v_fma_mix"), case.line.replace(" sc0", " glc")
    for line in dict.fromkeys((case.line, *others)):
        try:
            assemble(_HEAD.format(arch=arch, inputs=0, outputs=0) + f"  {line}\n" + _TAIL.format(arch=arch), arch)
        except RuntimeError:
            continue
        return case._replace(line=line)
    return None


def inputs(generator: np.random.Generator, groups: int) -> np.ndarray:
    """Operands, uint64 [groups, kinds, slots, lanes]: numbers of each kind and its edges, without signaling NaN."""
    shape = (groups, SLOTS, LANES)
    made = np.zeros((groups, len(KINDS), SLOTS, LANES), np.uint64)
    for i, kind in enumerate(KINDS):
        if kind == "int":
            wide = generator.integers(0, 1 << 63, shape).astype(np.uint64) * np.uint64(2) + np.uint64(1)
            few = generator.integers(-40, 40, shape).astype(np.int64).view(np.uint64)
            edges = np.array([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 63, (1 << 63) - 1, 0xFFFF8000], np.uint64)
            edge = generator.choice(edges, shape)
            made[:, i] = np.choose(generator.integers(0, 3, shape), [wide, few, edge])
            continue
        exponent_bits, mantissa_bits = meanings.FORMATS[kind]
        width, bias = exponent_bits + mantissa_bits + 1, (1 << exponent_bits - 1) - 1
        exponent = generator.integers(bias - 8, bias + 9, shape) % (1 << exponent_bits)
        anything = generator.integers(0, 1 << exponent_bits, shape)
        exponent = np.where(generator.random(shape) < 0.7, exponent, anything).astype(np.uint64)
        mantissa = generator.integers(0, 1 << mantissa_bits, shape).astype(np.uint64)
        # short ones, whose sums and products are halfway cases
        mantissa = np.where(
            generator.random(shape) < 0.3,
            mantissa >> np.uint64(mantissa_bits - 2) << np.uint64(mantissa_bits - 2),
            mantissa,
        )
        infinite = exponent == (1 << exponent_bits) - 1
        quiet = np.uint64(1 << mantissa_bits - 1)
        mantissa = np.where(infinite & (mantissa != 0), mantissa | quiet, mantissa)
        sign = generator.integers(0, 2, shape).astype(np.uint64)
        bits = sign << np.uint64(width - 1) | exponent << np.uint64(mantissa_bits) | mantissa
        zero = generator.random(shape) < 0.05
        bits = np.where(zero, sign << np.uint64(width - 1), bits)
        made[:, i] = bits
        if width == 16:
            # the other half of the register
            made[:, i] |= np.roll(bits, 1, axis=-1) << np.uint64(16)
    return made


def run(arch: str, chosen: list[AnyCase], operands: np.ndarray) -> np.ndarray:
    """Results, uint32 [groups, cases, lanes, 4]: two words, the mask's bit, the lane's bit of EXEC."""
    groups = len(operands)
    text = _HEAD.format(arch=arch, inputs=operands.nbytes // groups * 2, outputs=len(chosen) * LANES * 16)
    text += "\n".join(line for case in chosen for line in case.written()) + _TAIL.format(arch=arch)
    program = Program(assemble(text, arch), "opcodes")
    # 16 bytes a lane
    padded = np.zeros((*operands.shape, 2), np.uint64)
    padded[..., 0] = operands
    out = np.zeros((groups, len(chosen), LANES, 4), np.uint32)
    program.launch((groups,), [padded.ctypes.data, out.ctypes.data], num_warps=1, shared=1024, describe=hex)
    return out


def compare(arch: str, chosen: list[AnyCase], operands: np.ndarray) -> dict[str, str]:
    """By name, the first operands with which a case differs from its meaning, or nothing."""
    out = run(arch, chosen, operands)
    return {
        case.name: next(filter(None, (case.wrong(operands[g], out[g, i]) for g in range(len(operands)))), "")
        for i, case in enumerate(chosen)
    }


def main(arch: str, pattern: str = "") -> None:
    found = {name: case for name, case in cases(arch) if re.search(pattern, name)}
    known = {name: accepted(case, arch) for name, case in found.items() if case is not None}
    generator, differ = np.random.default_rng(0), dict[str, str]()
    for kind, groups in ((Case, 6), (ScalarCase, 100)):
        chosen = [case for case in known.values() if isinstance(case, kind)]
        differ |= compare(arch, chosen, inputs(generator, groups)) if chosen else {}
    result = {
        "compared": list(differ),
        "differ": {name: text for name, text in differ.items() if text},
        "unnamed": [name for name, case in found.items() if case is None],
        "not on it": [name for name, case in known.items() if case is None],
    }
    json.dump(result, sys.stdout, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
