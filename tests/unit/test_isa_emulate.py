"""The parts of the emulator that need neither tinygrad nor a compiled kernel: formats, decoding, memory, arguments."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import wavecrest.ops.common.triton as _triton
from wavecrest import cc, env
from wavecrest.dispatch import registry
from wavecrest.errors import EnvironmentProblem, InvalidArgument, MissingDependency, OutOfBounds, Unsupported
from wavecrest.isa import emulate
from wavecrest.isa.emulate import actions, decode, driver, machine
from wavecrest.isa.emulate.code_object import CodeObject, unpack
from wavecrest.isa.emulate.memory import Guard


@pytest.fixture(scope="module")
def library() -> Any:
    try:
        return machine.load()
    except EnvironmentProblem as problem:
        pytest.skip(f"the C part cannot be built: {problem}")


def convert(library: Any, code: int, source: int, target: int, saturate: bool = False) -> int:
    return int(library.convert_float(code, source, target, int(saturate)))


def test_half_floats_round_as_numpy_does(library: Any) -> None:
    every = np.arange(65536, dtype=np.uint16)
    wide = every.view(np.float16).astype(np.float32)
    # every float16, its neighbours in float32, and what lies halfway to the next
    bits = wide.view(np.uint32)
    probes = np.concatenate([bits, bits + 1, bits - 1, bits + 0x1000, bits + 0x1001, bits + 0x0FFF])
    probes = probes[np.isfinite(probes.view(np.float32))]
    with np.errstate(over="ignore"):
        want = probes.view(np.float32).astype(np.float16).view(np.uint16)
    got = np.array([convert(library, int(code), machine.F32, machine.F16) for code in probes[::7]], np.uint16)
    np.testing.assert_array_equal(got, want[::7])
    back = np.array([convert(library, int(code), machine.F16, machine.F32) for code in every], np.uint32)
    finite = np.isfinite(wide)
    np.testing.assert_array_equal(back[finite], bits[finite])
    assert np.isnan(back.view(np.float32)[np.isnan(wide)]).all()


SMALL = {
    machine.E4M3: torch.float8_e4m3fn,
    machine.E5M2: torch.float8_e5m2,
    machine.E4M3FNUZ: torch.float8_e4m3fnuz,
    machine.E5M2FNUZ: torch.float8_e5m2fnuz,
    machine.BF16: torch.bfloat16,
}


@pytest.mark.parametrize("code", SMALL)
def test_small_floats_are_those_of_pytorch(library: Any, code: int) -> None:
    dtype = SMALL[code]
    values = torch.cat([torch.randn(2000) * 10.0**power for power in (-6, -3, 0, 2, 4)])
    values = values[values.abs() < torch.finfo(dtype).max]
    codes = values.view(torch.int32).tolist()
    stored = torch.int16 if dtype == torch.bfloat16 else torch.uint8
    mask = 0xFFFF if dtype == torch.bfloat16 else 0xFF
    want = [value & mask for value in values.to(dtype).view(stored).tolist()]
    assert [convert(library, bits & 0xFFFFFFFF, machine.F32, code) for bits in codes] == want
    every = torch.arange(mask + 1).to(stored)
    wide = every.view(dtype).float()
    back = [convert(library, bits & mask, code, machine.F32) for bits in every.tolist()]
    got = torch.tensor([struct.unpack("<f", struct.pack("<I", bits))[0] for bits in back])
    assert torch.equal(got.isnan(), wide.isnan())
    assert torch.equal(got[~got.isnan()], wide[~wide.isnan()])


def test_what_is_too_large_is_nan_or_the_largest(library: Any) -> None:
    huge = struct.unpack("<I", struct.pack("<f", -1e30))[0]
    # e4m3 has no infinity: NaN, unless MODE asks for saturation; e2m1 has neither
    assert convert(library, huge, machine.F32, machine.E4M3) == 0xFF
    assert convert(library, huge, machine.F32, machine.E4M3, saturate=True) == 0xFE
    assert convert(library, huge, machine.F32, machine.E5M2) == 0xFC
    assert convert(library, huge, machine.F32, machine.E4M3FNUZ) == 0x80
    assert convert(library, huge, machine.F32, machine.E2M1) == 0xF
    assert convert(library, 0x7FC00000, machine.F32, machine.E4M3FNUZ) == 0x80


@pytest.mark.parametrize(
    ("code", "largest", "step", "top", "beyond"),
    [
        (machine.E4M3, 448.0, 32.0, 0x7E, 0x7F),
        (machine.E4M3FNUZ, 240.0, 16.0, 0x7F, 0x80),
        (machine.E5M2, 57344.0, 8192.0, 0x7B, 0x7C),
        (machine.E5M2FNUZ, 57344.0, 8192.0, 0x7F, 0x80),
    ],
    ids=["e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"],
)
def test_the_largest_value_of_each_format(
    library: Any, code: int, largest: float, step: float, top: int, beyond: int
) -> None:
    """A value nearer to the largest than to the next step becomes it; others become NaN, infinity, or saturate."""

    def converted(value: float, saturate: bool = False) -> int:
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        return convert(library, bits, machine.F32, code, saturate)

    assert largest == torch.finfo(SMALL[code]).max
    for value in (largest - 0.49 * step, largest, largest + 0.49 * step):
        assert converted(value) == converted(value, True) == top
        assert converted(-value) == top | 0x80
    for value in (largest + 0.51 * step, largest + step, 1.5 * largest, 4 * largest):
        assert converted(value) == beyond and converted(value, True) == top
        assert converted(-value) == beyond | 0x80 and converted(-value, True) == top | 0x80


def test_actions_fit_and_name_every_field() -> None:
    entry = machine.Entry()
    assert max(map(len, machine.ACTIONS.values())) <= machine.MAX_FIELDS
    entry.set_action("swizzle", {"wave": 64, "offset": 0x8055, "vaddr": 3, "vdst": 4})
    assert list(entry.fields)[:4] == [64, 0x8055, 3, 4] and entry.action == 1 + list(machine.ACTIONS).index("swizzle")
    entry.set_action("setpc", {"ssrc": 0xFFFFFFFF})
    assert entry.fields[0] == -1
    with pytest.raises(TypeError, match="swizzle takes"):
        entry.set_action("swizzle", {"wave": 64})
    # what the C side is told and has: the structs it uses are those generated, and nothing is left out
    text = machine.source()
    for name in machine.ACTIONS:
        if name != "nop":
            assert f"case ACTION_{name.upper()}:" in text, name


def _fields(layout: dict[str, tuple[int, int]]) -> list[tuple[str, Any]]:
    return [(name, SimpleNamespace(lo=low, hi=high)) for name, (low, high) in layout.items()]


def _instruction(size: int, layout: dict[str, tuple[int, int]], values: dict[str, int], **attributes: Any) -> Any:
    """An object like tinygrad's, and its 16 bytes."""
    word = sum(values.get(name, 0) << low for name, (low, _) in layout.items())
    kind = type(attributes.pop("kind", "DS"), (), {"_fields": _fields(layout), "size": lambda self: size})
    inst = kind()
    for name, value in attributes.items():
        setattr(inst, name, value)
    return inst, word.to_bytes(16, "little")


DS = {
    "offset0": (0, 7), "offset1": (8, 15), "acc": (25, 25), "addr": (32, 39), "data0": (40, 47), "data1": (48, 55),
    "vdst": (56, 63),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("DS_READ_B128", {"bytes": 16, "store": 0, "offset0": 0x205, "offset1": -1, "data0": 9}),
        ("DS_WRITE_B64", {"bytes": 8, "store": 1, "offset0": 0x205, "offset1": -1, "data0": 5}),
        ("DS_READ2_B64", {"bytes": 8, "offset0": 40, "offset1": 16, "data0": 9, "data1": 11}),
        ("DS_WRITE2ST64_B32", {"bytes": 4, "offset0": 5 * 256, "offset1": 2 * 256, "data0": 5, "data1": 6}),
        ("DS_LOAD_2ADDR_STRIDE64_B64", {"bytes": 8, "offset0": 5 * 512, "offset1": 2 * 512}),
        ("DS_READ_U16_D16_HI", {"bytes": 2, "sign": 0, "d16": 1, "high": 1}),
        ("DS_READ_I8", {"bytes": 1, "sign": 1, "d16": 0, "high": 0}),
    ],
)
def test_lds_accesses(name: str, wanted: dict[str, int]) -> None:
    inst, raw = _instruction(8, DS, {"offset0": 5, "offset1": 2, "addr": 7, "data0": 5, "data1": 6, "vdst": 9})
    action = actions.action(name, inst, raw, "gfx942")
    assert action is not None and action[0] == "lds"
    assert wanted.items() <= action[1].items() and action[1]["vaddr"] == 7 and action[1]["wave"] == 64
    machine.Entry().set_action(*action)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("DS_ADD_RTN_F32", {"op": 13, "bytes": 4, "returns": 1, "data": 5}),
        ("DS_MAX_U64", {"op": 7, "bytes": 8, "returns": 0}),
        ("DS_CMPST_RTN_B32", {"op": 1, "compare": 5, "data": 6, "returns": 1}),
        ("DS_CMPSTORE_RTN_B32", {"op": 1, "compare": 6, "data": 5, "returns": 1}),
        ("DS_PK_ADD_RTN_BF16", {"op": 15, "returns": 1}),
        ("DS_WRXCHG_RTN_B32", {"op": 0, "returns": 1, "data": 5}),
    ],
)
def test_lds_atomics(name: str, wanted: dict[str, int]) -> None:
    inst, raw = _instruction(8, DS, {"addr": 7, "data0": 5, "data1": 6, "vdst": 9})
    action = actions.action(name, inst, raw, "gfx942")
    assert action is not None and action[0] == "lds_atomic" and wanted.items() <= action[1].items()
    machine.Entry().set_action(*action)


MFMA = {
    "vdst": (0, 7), "cbsz": (8, 10), "abid": (11, 14), "src0": (32, 40), "src1": (41, 49), "src2": (50, 58),
    "blgp": (61, 63),
}  # fmt: skip


def test_matrix_instructions() -> None:
    values = {"vdst": 8, "src0": 256 + 2, "src1": 256 + 4, "src2": 128}
    inst, raw = _instruction(8, MFMA, values)
    with pytest.raises(NotImplementedError, match="BF16_1K"):
        actions.action("V_MFMA_F32_32X32X8_BF16_1K", inst, raw, "gfx942")
    name, fields = actions.action("V_MFMA_F32_16X16X32_BF8_FP8", inst, raw, "gfx942") or ("", {})
    assert name == "matrix" and (fields["M"], fields["N"], fields["K"], fields["blocks"]) == (16, 16, 32, 1)
    assert (fields["format_a"], fields["format_b"]) == (machine.E5M2FNUZ, machine.E4M3FNUZ)
    assert (fields["s0"], fields["s1"], fields["s2"], fields["scaled"]) == (2, 4, 128, -1)
    _, other = actions.action("V_MFMA_F32_16X16X32_BF8_FP8", inst, raw, "gfx950") or ("", {})
    assert (other["format_a"], other["format_b"]) == (machine.E5M2, machine.E4M3)
    inst, raw = _instruction(8, MFMA, values | {"blgp": 1})
    with pytest.raises(NotImplementedError, match="broadcast"):
        actions.action("V_MFMA_F32_16X16X16_F16", inst, raw, "gfx942")
    inst, raw = _instruction(8, MFMA, values | {"src0": 242})
    with pytest.raises(NotImplementedError, match="constant"):
        actions.action("V_MFMA_F32_16X16X16_F16", inst, raw, "gfx942")


GLOBAL = {
    "offset": (0, 12), "sve": (13, 13), "addr": (32, 39), "data": (40, 47), "saddr": (48, 54), "acc": (55, 55),
    "vdst": (56, 63),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("GLOBAL_LOAD_DWORDX4", {"bytes": 16, "store": 0, "data": 9, "saddr": 4, "vaddr": 7, "offset": -8}),
        ("GLOBAL_STORE_SHORT_D16_HI", {"bytes": 2, "store": 1, "data": 5, "high": 1}),
        ("GLOBAL_LOAD_SBYTE_D16", {"bytes": 1, "sign": 1, "d16": 1, "high": 0}),
        ("FLAT_LOAD_USHORT", {"bytes": 2, "sign": 0, "saddr": -1, "scratch": 0}),
        ("SCRATCH_STORE_DWORDX2", {"bytes": 8, "scratch": 1, "vaddr": -1, "saddr": 4}),
    ],
)
def test_global_accesses(name: str, wanted: dict[str, int]) -> None:
    values = {"offset": 0x1FF8, "addr": 7, "data": 5, "saddr": 4, "vdst": 9}
    inst, raw = _instruction(8, GLOBAL, values)
    action = actions.action(name, inst, raw, "gfx942")
    assert action is not None and action[0] == "flat" and wanted.items() <= action[1].items()
    machine.Entry().set_action(*action)


SMEM = {
    "sbase": (0, 5),
    "sdata": (6, 12),
    "soffset_en": (14, 14),
    "imm": (17, 17),
    "offset": (32, 52),
    "soffset": (57, 63),
}


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"imm": 1, "offset": 0x1FFFFC}, {"offset": -4, "soffset": -1}),
        ({"soffset_en": 1, "soffset": 12, "offset": 5}, {"offset": 0, "soffset": 12}),
        ({"imm": 1, "soffset_en": 1, "soffset": 12, "offset": 8}, {"offset": 8, "soffset": 12}),
    ],
)
def test_scalar_loads(values: dict[str, int], wanted: dict[str, int]) -> None:
    inst, raw = _instruction(8, SMEM, {"sbase": 3, "sdata": 20} | values)
    action = actions.action("S_LOAD_DWORDX8", inst, raw, "gfx942")
    assert action is not None and action[0] == "scalar"
    assert ({"bytes": 32, "sbase": 6, "sdata": 20, "store": 0} | wanted).items() <= action[1].items()
    machine.Entry().set_action(*action)


@pytest.mark.parametrize("name", ["S_WAITCNT", "BUFFER_WBL2", "BUFFER_INV", "S_NOP", "BUFFER_GL0_INV"])
def test_what_has_no_effect_here(name: str) -> None:
    inst, raw = _instruction(8, {}, {})
    assert actions.action(name, inst, raw, "gfx942") == ("nop", {})


def test_dpp_is_taken_apart() -> None:
    # v_add_f32_dpp v3, v1, v2 row_shr:4 row_mask:0xa bank_mask:0xf bound_ctrl
    control = 0x114
    word = 1 << 25 | 3 << 17 | 2 << 9 | 0xFA
    tail = 1 | control << 8 | 1 << 19 | 0xF << 24 | 0xA << 28
    raw = (word | tail << 32).to_bytes(16, "little")
    inst, _ = _instruction(8, {}, {}, kind="VOP2_DPP16")
    found = decode.dpp(inst, raw, "gfx942")
    assert found is not None and found.size == 8
    assert (found.fields["control"], found.fields["row_mask"], found.fields["src0"]) == (control, 0xA, 1)
    assert found.fields["bound_ctrl"] == 1 and found.fields["spare"] not in (1, 2, 3)
    plain = int.from_bytes(found.plain, "little")
    assert plain & 0x1FF == 256 + found.fields["spare"] and plain >> 9 == word >> 9
    assert decode.dpp(inst, (word & ~0x1FF | 0x101).to_bytes(16, "little"), "gfx942") is None


def test_msgpack() -> None:
    packed = bytes([0x82, 0xA1]) + b"a" + bytes([0x93, 1, 0xFF, 0xCD, 1, 0]) + bytes([0xA1]) + b"b" + bytes([0xC3])
    assert unpack(packed) == ({"a": [1, -1, 256], "b": True}, len(packed))
    with pytest.raises(Unsupported, match="0xc1"):
        unpack(bytes([0xC1]))


def _code_object(arguments: list[tuple[int, int, str]], size: int, properties: int = 0) -> CodeObject:
    made = CodeObject.__new__(CodeObject)
    made.kernarg_size, made.properties, made.scratch = size, properties, 16
    keys = (".offset", ".size", ".value_kind")
    made.kernel = {".args": [dict(zip(keys, argument, strict=True)) for argument in arguments]}
    return made


def test_arguments_are_laid_out_as_the_kernel_declares() -> None:
    code = _code_object(
        [
            (0, 8, "global_buffer"), (8, 4, "by_value"), (12, 4, "by_value"), (16, 8, "global_buffer"),
            (24, 4, "hidden_block_count_y"), (28, 2, "hidden_group_size_x"), (30, 2, "hidden_grid_dims"),
        ],
        32,
    )  # fmt: skip
    segment = code.kernarg([0x1234567890, -2, 1.5], (5, 6, 7), (256, 1, 1))
    assert struct.unpack("<QifQIHH", segment) == (0x1234567890, -2, 1.5, 0, 6, 256, 3)
    with pytest.raises(InvalidArgument, match="2 argument"):
        code.kernarg([1, 2, 3, 4, 5, 6], (1, 1, 1), (64, 1, 1))
    with pytest.raises(InvalidArgument, match="offset 8"):
        code.kernarg([1], (1, 1, 1), (64, 1, 1))


def test_registers_that_a_kernel_asks_for() -> None:
    # private buffer (4), kernarg pointer (2), private size (1)
    code = _code_object([], 8, properties=1 << 0 | 1 << 3 | 1 << 6)
    assert code.user_sgprs(0x7F00_0000_1000) == [0, 0, 0, 0, 0x1000, 0x7F00, 16]
    # all seven, in LLVM's order: 4 of the buffer, then pairs, then one
    code = _code_object([], 8, properties=0x7F)
    assert code.user_sgprs(0x1000) == [0] * 8 + [0x1000, 0] + [0] * 4 + [16]


def _at(address: int, count: int) -> Any:
    return (ctypes.c_uint8 * count).from_address(address)


def test_a_guard_copies_in_and_out() -> None:
    x = torch.arange(100, dtype=torch.float32)
    guard = Guard([("x", x)])
    copy = np.ctypeslib.as_array((ctypes.c_float * 100).from_address(guard.pointer(x)))
    assert (copy == x.numpy()).all() and guard.pointer(x) != x.data_ptr()
    assert guard.pointer(x) % 16 == x.data_ptr() % 16
    copy[7] = -1
    assert x[7] == 7
    guard.finish()
    assert x[7] == -1 and x[8] == 8


def test_tensors_that_overlap_share_a_copy() -> None:
    whole = torch.zeros(64)
    left, right = whole[:40], whole[8:]
    guard = Guard([("left", left), ("right", right)])
    assert guard.pointer(right) - guard.pointer(left) == 32
    text = guard.describe(guard.pointer(left) + 260)
    assert "4 bytes past the end of argument left (float32 [40]) and argument right (float32 [56])" in text


def test_overlapping_storages_too() -> None:
    # two storages over one memory, neither knowing of the other
    memory = np.zeros(64, np.float32)
    left, right = torch.from_numpy(memory[:40]), torch.from_numpy(memory[8:])
    guard = Guard([("left", left), ("right", right)])
    assert guard.pointer(right) - guard.pointer(left) == 32
    _at(guard.pointer(right) + 55 * 4, 1)[0] = 1
    guard.finish()
    assert memory[63] != 0


@pytest.mark.parametrize(("offset", "text"), [(-5, "up to 5 bytes before the start"), (101, "up to 2 bytes past")])
def test_a_write_beside_a_tensor_is_found_and_nothing_copied(offset: int, text: str) -> None:
    # 100 bytes: 12 are left to the page's end, as addresses keep their value modulo 16
    x = torch.zeros(100, dtype=torch.uint8)
    guard = Guard([("x", x)])
    _at(guard.pointer(x), 1)[0] = 9
    _at(guard.pointer(x) + offset, 1)[0] = 9
    with pytest.raises(OutOfBounds, match=text):
        guard.finish()
    assert not x.any()


def test_a_guard_keeps_its_hands_off_what_is_large_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavecrest.isa.emulate.memory.LIMIT", 100)
    small, large, none = torch.zeros(10), torch.zeros(100), torch.zeros(0)
    guard = Guard([("small", small), ("large", large), ("none", none)])
    assert guard.unguarded == ["large"] and guard.pointer(large) == large.data_ptr()
    guard.finish()


def test_memory_that_was_only_read_is_not_written() -> None:
    kept = torch.zeros(16)
    page = torch.frombuffer(bytearray(64), dtype=torch.float32)
    guard = Guard([("kept", kept), ("page", page)])
    before = kept.data_ptr()
    guard.finish()
    assert kept.data_ptr() == before and not kept.any()


def test_another_platform_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(EnvironmentProblem, match="x86-64"):
        machine.build()


def test_a_build_is_kept_and_made_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("platformdirs.user_cache_path", lambda _name: tmp_path)
    try:
        cc.compiler("the emulator")
    except MissingDependency as problem:
        pytest.skip(str(problem))
    first = machine.build()
    assert first.parent == tmp_path / "emulate" and [path.name for path in first.parent.iterdir()] == [first.name]
    stamp = first.stat().st_mtime_ns
    assert machine.build() == first and first.stat().st_mtime_ns == stamp
    monkeypatch.setattr(machine, "source", lambda *_names: "not C")
    with pytest.raises(EnvironmentProblem, match="does not compile"):
        machine.build()
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_kernels_for_the_interpreter_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "interpreted", True)
    monkeypatch.setattr(_triton, "unavailable", None)
    with pytest.raises(EnvironmentProblem, match="TRITON_INTERPRET=1") as refused, emulate.emulated("gfx942"):
        pass
    assert refused.value.exit_code == 3
    monkeypatch.setattr(_triton, "unavailable", "no triton")
    with pytest.raises(MissingDependency, match="triton"):
        emulate.check_available()


def test_the_switch_sets_and_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("triton.runtime", reason="the switch sets Triton's driver")
    monkeypatch.setattr(driver, "check_available", lambda: None)
    forgotten: list[str | None] = []
    monkeypatch.setattr(registry, "forget", lambda: forgotten.append(_triton.emulated))
    before = runtime.driver._active
    with pytest.raises(KeyError), emulate.emulated("gfx950", resident=4) as active:
        assert runtime.driver.active is active and _triton.emulated == "gfx950"
        assert active.get_current_target().arch == "gfx950" and active.options["resident"] == 4
        raise KeyError
    assert runtime.driver._active is before and _triton.emulated is None
    # decisions made before know nothing of the emulator, those made inside nothing of what is outside
    assert forgotten == ["gfx950", None]
    with pytest.raises(InvalidArgument, match="gfx90a, gfx942"), emulate.emulated("sm_90"):
        pass
    assert _triton.emulated is None


def test_each_architecture_is_a_device_of_its_own() -> None:
    pytest.importorskip("triton", reason="drivers are Triton's")
    devices = {emulate.EmulatedDriver(arch).get_current_device() for arch in emulate.ARCHS}
    assert len(devices) == len(emulate.ARCHS) and min(devices) >= 100


def test_a_kernel_outside_of_the_emulator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = driver._Launcher(SimpleNamespace(signature={}), SimpleNamespace(name="kernel"))
    monkeypatch.setattr(driver, "_active", lambda: object())
    with pytest.raises(Unsupported, match="kernel was compiled for the emulator"):
        launcher(1, 1, 1, 0, None, None, None, None, None)  # type: ignore[arg-type]


def test_arguments_are_flattened() -> None:
    leaves = list(driver._leaves("pair", ("*fp32", "constexpr", "i32"), (1, 2, 3)))
    assert leaves == [("pair[0]", "*fp32", 1), ("pair[2]", "i32", 3)]
    assert driver._values("bf16", 1.5, None) == [0x3FC0]
    assert driver._values("fp32", 2, None) == [2.0] and isinstance(driver._values("fp32", 2, None)[0], float)


def test_a_record_shows_the_last_part_of_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/home/somebody/cache")
    assert env.snapshot()["TORCHINDUCTOR_CACHE_DIR"] == "…/cache"
