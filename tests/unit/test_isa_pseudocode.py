"""AMD's pseudocode as C: the grammar, and one opcode of each kind with values worked out by hand."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from wavecrest import cc
from wavecrest.errors import EnvironmentProblem, MissingDependency
from wavecrest.isa.emulate import actions, decode, machine, opcodes
from wavecrest.isa.emulate.grammar import NotUnderstood, Parser, Type
from wavecrest.isa.emulate.pseudocode import Variable, Writer

WAVE = 64


def written(text: str, **variables: Variable) -> str:
    word = {name: Variable(name, Type("b", 32), raw=True) for name in ("S0", "S1", "D0")}
    writer = Writer(word | variables)
    writer.program(text)
    return "\n".join(writer.lines)


def test_the_grammar() -> None:
    assert Parser("D0.u32 = S0.u32[4 : 0] + 1U").program() == [
        (
            "assign",
            [("suffix", ("name", "D0"), "u32")],
            (
                "binary",
                "+",
                ("slice", ("suffix", ("name", "S0"), "u32"), ("number", "4"), ("number", "0")),
                ("number", "1U"),
            ),
        )
    ]
    # the last of a chain is the value, comments are left out, and powers bind before products
    (several,) = Parser("EXEC.u64[laneId] = D0.u64[laneId] = 1'1U; // D0 = VCC").program()
    assert [target[1][1][1] for target in several[1]] == ["EXEC", "D0"] and several[2] == ("sized", "1'1U")
    assert Parser("a = 2.0F ** 32 * b").program()[0][2][:3] == (
        "binary", "*", ("power", ("number", "2.0F"), ("number", "32")),
    )  # fmt: skip


def test_types_decide_what_c_is_written() -> None:
    assert "bits_float(" in written("D0.f32 = S0.f32 * S1.f32")
    assert "round_half(" in written("D0.f16 = S0.f16 + S1.f16")
    assert "& 0x1fu" in written("D0.u32 = 32'U(S0.u32[4 : 0])")
    assert written("tmp = S0.u32;\nfor i in 0 : 3 do\nif tmp[i] == 1'1U then\nD0.i32 = i;\nbreak\nendif\nendfor")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("D0.u32 = nosuch(S0.u32)", "the function nosuch"),
        ("D0.u32 = S7.u32", "the name S7"),
        ("D0.f32 = S0.f32 + 1", "with"),
        ("D0.u32 = S0.q32", r"\.q32"),
        ("D0.u32 = S0.u32 / S1.u32", "division of integers"),
        ("D0.u32 = S0.u32[S1.u32 : 0]", "not fixed"),
        ("if S0.u32 then D0.u32 = 1U", "in place of"),
        ("D0.u32 = S0.u32 §", "§"),
        ("D0.u32 = ", "the end"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, said: str) -> None:
    with pytest.raises(NotUnderstood, match=said):
        written(text)


@pytest.fixture(scope="module")
def cdna() -> Any:
    try:
        return opcodes.tables("cdna").instructions
    except MissingDependency as problem:
        pytest.skip(f"no instruction tables: {problem}")


class Machine:
    """One wave's registers, in which single instructions run."""

    def __init__(self, arch: str = "gfx942") -> None:
        self.arch = arch
        self.s, self.v = np.zeros(340, np.uint32), np.zeros((264, WAVE), np.uint32)
        self.s[128:193] = np.arange(65)
        self.s[193:209] = (-np.arange(1, 17)).astype(np.int64) & 0xFFFFFFFF
        self.s[242] = 0x3F800000
        self.s[126:128] = 0xFFFFFFFF

    def run(self, inst: Any) -> None:
        raw = inst.to_bytes() + bytes(16)
        inst = decode.decode(raw[:16], self.arch)
        what = opcodes.opcode(inst, "cdna")
        values = opcodes.operands(inst, raw, what, self.arch)
        operands = machine.FunctionOperands()
        operands.set(values)
        wave = (ctypes.c_uint64 * 7)(self.s.ctypes.data, self.v.ctypes.data)
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(opcodes.address(what))
        function(ctypes.addressof(wave), ctypes.addressof(operands))


def f32(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def f16(value: float) -> int:
    return int(np.float16(value).view(np.uint16))


def test_one_opcode_of_each_kind(cdna: Any) -> None:
    v, s, VCC = cdna.v, cdna.s, cdna.VCC
    m = Machine()
    # all in one call of the compiler, as a kernel's are
    names = ("VOP1", "VOP2", "VOPC", "VOP3", "VOP3P", "SOP2", "SOPC", "SOPK", "SOPP")
    assert all(hasattr(cdna, name) for name in names)
    m.v[0], m.v[1], m.v[2] = f32(1.5), f32(-2.0), f32(10.0)
    # VOP2, an inline constant, a literal
    m.run(cdna.v_add_f32_e32(v[8], v[0], v[1]))
    assert m.v[8, 5] == f32(-0.5)
    m.run(cdna.v_mul_f32_e32(v[8], 1.0, v[1]))
    assert m.v[8, 63] == f32(-2.0)
    m.run(cdna.v_add_u32_e32(v[8], 0x12345678, v[0]))
    assert m.v[8, 0] == 0x12345678 + f32(1.5)
    # lanes that are not active keep what they had
    m.s[126], m.v[9] = 0b101, 7
    m.run(cdna.v_mov_b32_e32(v[9], v[0]))
    assert list(m.v[9, :4]) == [f32(1.5), 7, f32(1.5), 7] and m.v[9, 40] == f32(1.5)
    m.s[126] = 0xFFFFFFFF
    # VOP3 with neg of src1, abs of src1, and a clamp: 1.5 * -|-2| + 10 = 7 -> 1
    fma = {"neg": 2, "abs": 2}
    m.run(cdna.v_fma_f32_e64(v[8], v[0], v[1], v[2], **fma))
    assert m.v[8, 1] == f32(7.0)
    m.run(cdna.v_fma_f32_e64(v[8], v[0], v[1], v[2], clmp=1, **fma))
    assert m.v[8, 1] == f32(1.0)
    # times 4, where the mode flushes denormal results and only there
    m.run(cdna.v_mul_f32_e64(v[8], v[0], v[1], omod=2))
    assert m.v[8, 1] == f32(-12.0)
    m.s[265] = 0xF0
    m.run(cdna.v_mul_f32_e64(v[8], v[0], v[1], omod=2))
    assert m.v[8, 1] == f32(-3.0)
    # integers: wrapped, and stopped at 0 by a clamp
    m.v[3], m.v[4] = 3, 5
    m.run(cdna.v_sub_u32_e64(v[8], v[3], v[4]))
    assert m.v[8, 2] == 0xFFFFFFFE
    m.run(cdna.v_sub_u32_e64(v[8], v[3], v[4], clmp=1))
    assert m.v[8, 2] == 0
    m.run(cdna.v_mul_lo_u32(v[8], v[3], v[4]))
    assert m.v[8, 2] == 15
    # float16: halves by opsel, an upper half as result; 16-bit results of VOP2 clear the other half on gfx9
    m.v[5], m.v[6] = f16(2.0) << 16 | f16(0.5), f16(3.0) << 16 | f16(4.0)
    m.v[8] = 0xAAAAAAAA
    m.run(cdna.v_add_f16_e32(v[8], v[5], v[6]))
    assert m.v[8, 3] == f16(4.5)
    m.v[8] = 0xAAAAAAAA
    m.run(cdna.v_add_f16_e64(v[8], v[5], v[6], opsel=0b1001))
    assert m.v[8, 3] == f16(6.0) << 16 | 0xAAAA
    # packed: low * low, high * high, then with the halves of src0 exchanged and the high product negated
    m.run(cdna.v_pk_mul_f16(v[8], v[5], v[6], opsel_hi=3))
    assert m.v[8, 3] == f16(6.0) << 16 | f16(2.0)
    m.run(cdna.v_pk_mul_f16(v[8], v[5], v[6], opsel=1, opsel_hi=2, neg_hi=1))
    assert m.v[8, 3] == f16(-1.5) << 16 | f16(8.0)
    # compares: a bit per active lane, into VCC or a pair; and the select that reads it
    m.v[7] = np.where(np.arange(WAVE) % 2, f32(9.0), f32(-9.0))
    m.run(cdna.v_cmp_gt_f32_e32(v[7], v[0]))
    assert list(m.s[106:108]) == [0xAAAAAAAA] * 2
    m.s[126] = 0xFF
    m.run(cdna.v_cmp_lt_f32_e64(s[20:21], v[7], v[0]))
    assert m.s[20] == 0x55 and m.s[21] == 0x55555555
    m.s[126] = 0xFFFFFFFF
    m.run(cdna.v_cndmask_b32_e32(v[8], v[0], v[1]))
    assert list(m.v[8, :2]) == [f32(1.5), f32(-2.0)]
    # carries
    m.v[8], m.v[9] = 0xFFFFFFFF, 2
    m.run(cdna.v_add_co_u32(v[10], VCC, v[8], v[9]))
    assert m.v[10, 0] == 1 and list(m.s[106:108]) == [0xFFFFFFFF] * 2
    m.run(cdna.v_addc_co_u32(v[10], VCC, v[9], v[9], VCC))
    assert m.v[10, 0] == 5 and m.s[106] == 0
    # 64 bits and a product of 64 bits
    m.v[10], m.v[11], m.v[12] = 1, 0, 36
    m.run(cdna.v_lshlrev_b64(v[14:15], v[12], v[10:11]))
    assert (m.v[14, 9], m.v[15, 9]) == (0, 16)
    m.run(cdna.v_mad_u64_u32(v[14:15], s[20:21], v[8], v[9], v[10:11]))
    assert (m.v[14, 9], m.v[15, 9], m.s[20]) == (0xFFFFFFFF, 1, 0)
    # a range whose place the instruction chooses: the high register of src0, the low one of src1
    m.v[10], m.v[11], m.v[12], m.v[13] = 1, 2, 3, 4
    m.run(cdna.v_pk_mov_b32(v[14:15], v[10:11], v[12:13], opsel=1))
    assert (m.v[14, 0], m.v[15, 0]) == (2, 3)
    # conversions: saturated, toward zero, to nearest even
    m.v[3] = f32(-3e9)
    m.run(cdna.v_cvt_i32_f32_e32(v[8], v[3]))
    assert m.v[8, 0] == 0x80000000
    m.v[3] = f32(2049.0)
    m.run(cdna.v_cvt_f16_f32_e32(v[8], v[3]))
    assert m.v[8, 0] == f16(2048.0)
    m.v[3] = 0x3EFFFFFF
    m.run(cdna.v_rndne_f32_e32(v[8], v[3]))
    assert m.v[8, 0] == 0
    m.v[3], m.v[4] = f32(1.0), 0xFFFFFF6A
    m.run(cdna.v_ldexp_f32(v[8], v[3], v[4]))
    assert m.v[8, 0] == 0
    # lambda, loop, bits by number
    m.v[3], m.v[4], m.v[5] = 0x11223344, 0xAABBCCDD, 0x0C040107
    m.run(cdna.v_perm_b32_e64(v[8], v[3], v[4], v[5]))
    assert m.v[8, 0] == 0x0044CC11
    m.v[3] = 0x00F00000
    m.run(cdna.v_ffbh_u32_e32(v[8], v[3]))
    assert m.v[8, 0] == 8


def test_scalar_opcodes(cdna: Any) -> None:
    s = cdna.s
    m = Machine()
    m.s[0], m.s[1], m.s[2], m.s[3] = 0xFFFFFFFF, 0, 1, 0
    m.run(cdna.s_add_u32(s[8], s[0], s[2]))
    assert (m.s[8], m.s[253]) == (0, 1)
    m.run(cdna.s_addc_u32(s[8], s[1], s[3]))
    assert (m.s[8], m.s[253]) == (1, 0)
    m.run(cdna.s_and_saveexec_b64(s[8:9], s[0:1]))
    assert list(m.s[8:10]) == [0xFFFFFFFF] * 2 and list(m.s[126:128]) == [0xFFFFFFFF, 0] and m.s[253] == 1
    m.run(cdna.s_movk_i32(s[8], 0x8000))
    assert m.s[8] == 0xFFFF8000
    m.run(cdna.s_bfe_u32(s[8], s[0], 0x40004))
    assert m.s[8] == 0xF
    m.run(cdna.s_cmp_gt_i32(s[2], s[0]))
    assert m.s[253] == 1
    # forward by 3 words after this one
    m.s[256], m.s[257] = 0x1000, 7
    m.run(cdna.s_cbranch_scc1(3))
    assert (m.s[256], m.s[257]) == (0x1010, 7)
    m.s[253], m.s[256] = 0, 0x1000
    m.run(cdna.s_cbranch_scc1(3))
    assert m.s[256] == 0x1004


@pytest.mark.parametrize(
    ("code", "name", "words"),
    [
        ("0080d4d302050204", "V_MFMA_I32_32X32X8_I8", (16, 1)),
        ("0080d5d302050204", "V_MFMA_I32_16X16X16_I8", (4, 1)),
        ("0080e3d302050204", "V_MFMA_F32_32X32X4_2B_BF16", (32, 2)),
        ("0080e4d302050204", "V_MFMA_F32_16X16X4_4B_BF16", (16, 2)),
        ("0080e5d302050204", "V_MFMA_F32_4X4X4_16B_BF16", (4, 2)),
        ("0080e6d302050204", "V_MFMA_F32_32X32X8_BF16", (16, 2)),
        ("0080e7d302050204", "V_MFMA_F32_16X16X16_BF16", (4, 2)),
        ("0080cdd302050204", "V_MFMA_F32_16X16X16_F16", (4, 2)),
    ],
)
def test_matrix_opcodes_of_gfx90a(cdna: Any, code: str, name: str, words: tuple[int, int]) -> None:
    """The first seven are gfx90a's own; LLVM's assembler made the bytes: v_mfma_… a[0:n], v[2:3], v[2:3], a[0:n]."""
    raw = bytes.fromhex(code) + bytes(8)
    inst = decode.decode(raw, "gfx90a")
    assert decode.name(inst, raw, "gfx90a") == name
    assert (inst.op_regs["vdst"], inst.op_regs["src0"]) == words
    _, fields = actions.action(name, inst, raw, "gfx90a") or ("", {})
    assert (fields["s0"], fields["s1"], fields["acc_cd"], fields["vdst"]) == (2, 2, 1, 0)


def test_gfx90a_writes_its_cache_back(cdna: Any) -> None:
    """buffer_wbinvl1_vol, which has no effect here."""
    raw = bytes.fromhex("0000fce000000000") + bytes(8)
    inst = decode.decode(raw, "gfx90a")
    assert actions.NO_EFFECT.match(decode.name(inst, raw, "gfx90a")) and inst.size() == 8


def test_gfx90a_has_no_later_matrix_opcodes(cdna: Any) -> None:
    # v_mfma_f32_16x16x8_bf16 of gfx908, and what gfx942 has there
    with pytest.raises(NotImplementedError, match="matrix instruction of gfx90a with opcode 0x6d"):
        decode.decode(bytes.fromhex("0080edd302050204") + bytes(8), "gfx90a")
    with pytest.raises(NotImplementedError, match="opcode 0x57"):
        decode.decode(bytes.fromhex("0080d7d302050204") + bytes(8), "gfx90a")
    raw = bytes.fromhex("0080d7d302050204") + bytes(8)
    assert decode.name(decode.decode(raw, "gfx942"), raw, "gfx942") == "V_MFMA_I32_16X16X32_I8"


def test_a_part_that_has_no_meaning_here_is_said(cdna: Any) -> None:
    m = Machine()
    with pytest.raises(NotUnderstood, match="clamped result"):
        m.run(cdna.v_and_b32_e64(cdna.v[8], cdna.v[0], cdna.v[1], clmp=1))
    with pytest.raises(NotUnderstood, match="f16_to_snorm"):
        m.run(cdna.v_cvt_norm_i16_f16_e32(cdna.v[8], cdna.v[0]))


def test_a_missing_package_and_a_missing_compiler_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    def other(name: str) -> Any:
        if name != "tinygrad":
            gone(name)

    opcodes.tables.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(opcodes.importlib, "import_module", gone)
        with pytest.raises(MissingDependency, match="pip install --no-deps tinygrad") as missing:
            opcodes.tables("cdna")
        assert missing.value.exit_code == 3 and "\n" not in str(missing.value)
        patch.setattr(opcodes.importlib, "import_module", other)
        with pytest.raises(EnvironmentProblem, match=r"has no tinygrad\.runtime.*0\.14"):
            opcodes.tables("cdna")
    monkeypatch.setattr(cc.shutil, "which", lambda *_args, **_options: None)
    with pytest.raises(MissingDependency, match="gcc or clang"):
        machine.build()
    opcodes.tables.cache_clear()
