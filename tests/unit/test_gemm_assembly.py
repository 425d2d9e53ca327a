"""The assembly that makes floats of 4- and 8-bit values, instruction by instruction: alone, and in the kernels."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import ARCHS
from wavecrest.ops._flash_decoding import kernel as decoding
from wavecrest.ops._gemm import launch
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import linear_call
from wavecrest.ops.common import ptx as kernel
from wavecrest.ops.common import triton as _triton
from wavecrest.ops.packed import pack

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# 32-bit registers of many lanes
Words = Any


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    pool = [a >> 8 * place & 255 for place in range(4)] + [b >> 8 * place & 255 for place in range(4)]
    chosen = [int(selector) >> 4 * place & 15 for place in range(4)]
    # above 7 it is the sign of a byte
    assert max(chosen) < 8
    return sum((pool[byte] << 8 * place for place, byte in enumerate(chosen)), start=np.uint32(0))


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    found = np.uint32(0)
    for row in range(8):
        if int(table) >> row & 1:
            found = found | ((a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c))
    return found


def _fma(dtype: torch.dtype) -> Callable[[Words, Words, Words], Words]:
    """Two at a time; the sums must be exact, so that rounding changes nothing."""

    def half(word: Words, shift: int) -> torch.Tensor:
        bits = np.asarray(word >> shift & 0xFFFF, dtype=np.uint16)
        return torch.from_numpy(bits.view(np.int16)).view(dtype).double()

    def made(x: Words, y: Words, z: Words) -> Words:
        both = np.uint32(0)
        for shift in (0, 16):
            exact = half(x, shift) * half(y, shift) + half(z, shift)
            assert torch.equal(exact.to(dtype).double(), exact)
            both = both | exact.to(dtype).view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << shift
        return both

    return made


def _from_bits(bits: Words, dtype: torch.dtype) -> torch.Tensor:
    width = np.uint8 if dtype.itemsize == 1 else np.uint16
    return torch.from_numpy(np.asarray(bits, dtype=width).copy()).view(dtype)


def _to_bits(values: torch.Tensor) -> Words:
    return values.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)


def _e4m3_pair(pair: Words) -> Words:
    """The low byte as float16 in the low half, the high byte in the high half."""
    low, high = (_from_bits(pair >> shift & 255, torch.float8_e4m3fn).half() for shift in (0, 8))
    return _to_bits(low) | _to_bits(high) << 16


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda value: value,
    "cvt.u16.u32": lambda value: value & 0xFFFF,
    "cvt.rn.f16x2.e4m3x2": _e4m3_pair,
    "cvt.f32.f16": lambda bits: _from_bits(bits, F16).float(),
    # the first operand is the high half
    "cvt.rn.bf16x2.f32": lambda high, low: _to_bits(low.bfloat16()) | _to_bits(high.bfloat16()) << 16,
    "prmt.b32": _prmt,
    "shr.b32": lambda value, by: value >> by,
    "shl.b32": lambda value, by: value << by,
    "and.b32": lambda value, other: value & other,
    "xor.b32": lambda value, other: value ^ other,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _fma(BF16),
    "fma.rn.f16x2": _fma(F16),
}


def execute(text: str, outputs: int, inputs: list[Words]) -> list[Words]:
    """The registers $0, $1, … for those in the operands after them."""
    registers = {f"${outputs + place}": value for place, value in enumerate(inputs)}
    for line in text.strip("{}").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        target, *sources = re.findall(r"\{[^}]*\}|[^\s,]+", rest)
        values = [registers[source] if source in registers else np.uint32(int(source, 0)) for source in sources]
        if target.startswith("{"):
            # a word into two registers of 16 bits, the low half first
            low, high = target.strip("{}").replace(" ", "").split(",")
            registers[low], registers[high] = values[0] & 0xFFFF, values[0] >> 16
        else:
            registers[target] = INSTRUCTIONS[name](*values)
    return [registers[f"${place}"] for place in range(outputs)]


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("what", ["INT4", "INT8"])
def test_every_byte_in_every_place(what: str, dtype: torch.dtype) -> None:
    name = f"{what}_{'BF16' if dtype == BF16 else 'FP16'}"
    text: Any = getattr(kernel, name).value
    # Inductor writes it into a file as one line
    assert "\n" not in text and "'" not in text and "\\" not in text
    byte = np.arange(256)
    four = np.stack([byte, (7 * byte + 3) % 256, (13 * byte + 5) % 256, 255 - byte], 1)
    outputs = 4 if what == "INT4" else 2
    registers = execute(text, outputs, [four.astype(np.uint8).view(np.uint32)[:, 0]])
    halves = np.stack(registers, 1).astype(np.uint32).view(np.int16)
    got = torch.from_numpy(halves.copy()).view(dtype).double().numpy()
    want = four - 256 * (four > 127) if what == "INT8" else np.concatenate([four & 15, four >> 4], 1) - 8
    assert np.array_equal(got, want)


def test_every_byte_as_float32() -> None:
    text: Any = kernel.INT8_FP32.value
    assert "\n" not in text and "'" not in text and "\\" not in text
    byte = np.arange(256)
    four = np.stack([byte, (7 * byte + 3) % 256, (13 * byte + 5) % 256, 255 - byte], 1)
    registers = execute(text, 4, [four.astype(np.uint8).view(np.uint32)[:, 0]])
    floats = np.stack(registers, 1).astype(np.uint32).view(np.float32)
    # float32 has both, and what is left
    assert np.array_equal(floats - np.float32(kernel.INT8_FP32_OFFSET.value), four - 256 * (four > 127))


def test_every_byte_of_4_bit_floats() -> None:
    """In every place, times scales of each exponent that bfloat16 has, low and high values with their own."""
    text: Any = kernel.E2M1_BF16.value
    assert "\n" not in text and "'" not in text and "\\" not in text
    byte = np.arange(256)
    four = np.stack([byte, (7 * byte + 3) % 256, (13 * byte + 5) % 256, 255 - byte], 1)
    # up to 2^125, beyond which 6 scales are beyond bfloat16, and from 2^-127 on, which is subnormal
    exponent = np.stack([byte % 253, (byte + 70) % 253], 1) - 127
    scale = torch.exp2(torch.from_numpy(exponent).double())
    low, high = (_to_bits(scale[:, place].bfloat16()) * 0x10001 for place in (0, 1))
    registers = execute(text, 4, [four.astype(np.uint8).view(np.uint32)[:, 0], low, low, high, high])
    halves = np.stack(registers, 1).astype(np.uint32).view(np.int16)
    got = torch.from_numpy(halves.copy()).view(BF16).double()
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    codes = torch.from_numpy(np.concatenate([four & 15, four >> 4], 1))
    want = torch.cat([values, -values])[codes] * scale.repeat_interleave(4, 1)
    assert torch.equal(got, want) and torch.equal(got.signbit(), codes >= 8)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("what", ["INT4_PAIRS", "INT8_PAIRS"])
def test_every_byte_of_pairs(what: str, dtype: torch.dtype) -> None:
    """Two pairs of bytes, each pair of two columns: the columns' numbers side by side."""
    text: Any = getattr(kernel, f"{what}_{'BF16' if dtype == BF16 else 'FP16'}").value
    assert "\n" not in text and "'" not in text and "\\" not in text
    byte = np.arange(256)
    four = np.stack([byte, (7 * byte + 3) % 256, (13 * byte + 5) % 256, 255 - byte], 1)
    outputs = 4 if what == "INT4_PAIRS" else 2
    registers = execute(text, outputs, [four.astype(np.uint8).view(np.uint32)[:, 0]])
    halves = np.stack(registers, 1).astype(np.uint32).view(np.int16)
    got = torch.from_numpy(halves.copy()).view(dtype).double().numpy()
    columns = np.concatenate([four[:, ::2], four[:, 1::2]], 1)
    signed = columns - 256 * (columns > 127)
    want = signed if what == "INT8_PAIRS" else np.concatenate([columns & 15, columns >> 4], 1) - 8
    assert np.array_equal(got, want)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_8_bit_float_of_pairs(dtype: torch.dtype) -> None:
    """Two pairs of e4m3: the first elements of both pairs, then the second ones."""
    text: Any = (decoding.E4M3_PAIRS_BF16 if dtype == BF16 else decoding.E4M3_PAIRS_FP16).value
    assert "\n" not in text and "'" not in text and "\\" not in text
    byte = np.arange(256)
    four = np.stack([byte, (7 * byte + 3) % 256, (13 * byte + 5) % 256, 255 - byte], 1).astype(np.uint8)
    registers = execute(text, 2, [four.view(np.uint32)[:, 0]])
    halves = np.stack(registers, 1).astype(np.uint32).view(np.int16)
    got = torch.from_numpy(halves.copy()).view(dtype).float()
    want = torch.from_numpy(four).view(torch.float8_e4m3fn).float()[:, [0, 2, 1, 3]]
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


# --- in the kernels


class _Results:
    """The builder's value for a call with several results."""

    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles

    def get_result(self, place: int) -> Any:
        return self.handles[place]


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let Triton's interpreter execute assembly, and kernels have it; the texts that were executed."""
    if not _triton.interpreted:
        pytest.skip("needs Triton's interpreter")
    interpreter: Any = sys.modules["triton.runtime.interpreter"]
    texts: list[str] = []
    types = {"bf16": np.uint16, "fp16": np.float16, "int32": np.int32}

    def create(
        _self: Any, text: str, constraints: str, values: list[Any], made: list[Any], pure: bool, pack: int
    ) -> Any:
        outputs = [part for part in constraints.split(",") if part.startswith("=")]
        sources = constraints.split(",")[len(outputs) :]
        assert pure and set(outputs) == {"=r"}
        inputs: list[Words] = []
        for value in values:
            lanes = np.ascontiguousarray(value.data).reshape(-1, pack).view(np.uint32)
            inputs += list(lanes.T)
        assert len(inputs) == len(sources)
        # numbers in the text, not registers
        constant = {f"${len(outputs) + place}": inputs[place] for place, part in enumerate(sources) if part == "n"}
        for name, value in constant.items():
            assert len(set(value.tolist())) == 1
            text = text.replace(name, str(value[0]))
        texts.append(text)
        registers = execute(text, len(outputs), inputs)
        each = len(outputs) // len(made)
        handles = []
        for place, kind in enumerate(made):
            lanes = np.stack(registers[each * place : each * (place + 1)], 1)
            data = np.ascontiguousarray(lanes).astype(np.uint32).view(types[str(kind.scalar)])
            handles.append(interpreter.TensorHandle(data.reshape(kind.shape), kind.scalar))
        return _Results(handles)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", create)
    monkeypatch.setattr(launch, "assembles", lambda _arch: True)
    return texts


FORMATS: dict[str, dict[str, Any]] = {
    "int4-32": {"format": "int4", "group": 32},
    "int4-64": {"format": "int4", "group": 64},
    "int4-128": {"format": "int4", "group": 128},
    "int4-64-zeros": {"format": "int4", "group": 64, "symmetric": False},
    "mxfp4": {"format": "mxfp4"},
    "int8": {"format": "int8"},
    "int8-64": {"format": "int8", "group": 64},
    "e4m3": {"format": "fp8"},
}


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("format", FORMATS)
def test_kernels_with_assembly_are_those_without_bit_for_bit(
    format: str, dtype: torch.dtype, executed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = pack(torch.randn(24, 150, generator=generator).to(dtype), **FORMATS[format])
    x = torch.randn(3, 150, generator=generator).to(dtype)
    call = linear_call(x, weight, out_dtype=F32)
    tile = Config(
        BLOCK_M=16, BLOCK_N=16, BLOCK_K=64, GROUP_M=2, SPLIT_K=1, PERSISTENT=0, TMA=0, num_warps=4, num_stages=2
    )
    # bytes that are whole numbers; codes without zero points, in floats of 16 bits; words for each x
    whole = format in ("int8", "int8-64")
    tiles = whole or (dtype != F32 and format != "int4-64-zeros" and format != "e4m3")
    # 4-bit floats in bfloat16 alone
    tiles = dtype == BF16 if format == "mxfp4" else tiles
    for backend, config, has in (
        ("triton", tile, tiles),
        ("triton_gemv", Config(BLOCK_N=4, BLOCK_K=128, SPLIT_K=1, num_warps=1, num_stages=2), True),
    ):
        if backend == "triton_gemv" and format not in ("int4-64", "int4-128", "int8"):
            continue
        executed.clear()
        got = gemm.run(backend, call, config=config)
        assert bool(executed) == has
        with monkeypatch.context() as patch:
            patch.setattr(launch, "assembles", lambda _arch: False)
            executed.clear()
            want = gemm.run(backend, call, config=config)
            assert not executed
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def test_assembly_is_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "interpreted", False)
    assert {name for name, arch in ARCHS.items() if launch.assembles(arch)} == {
        name for name in ARCHS if name.startswith("sm_")
    }
    assert not launch.assembles(None)
    monkeypatch.setattr(_triton, "interpreted", True)
    assert not launch.assembles(ARCHS["sm_90"])
