"""The assembly that makes 16-bit floats of 4-bit codes and of bytes, instruction by instruction, for every byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from wavecrest.ops.gemm import kernel


def _prmt(a: int, b: int, selector: int) -> int:
    pool = [a >> 8 * place & 255 for place in range(4)] + [b >> 8 * place & 255 for place in range(4)]
    return sum(pool[selector >> 4 * place & 7] << 8 * place for place in range(4))


def _lop3(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))


def _float(bits: int, dtype: torch.dtype) -> float:
    signed = bits - (1 << 16 if bits >= 1 << 15 else 0)
    return float(torch.tensor([signed], dtype=torch.int16).view(dtype))


def execute(text: str, word: int, dtype: torch.dtype) -> list[float]:
    """The values of $0, $1, … for a word in the last operand."""
    outputs = sum(f"x2 ${place}," in text for place in range(4))
    registers = {f"${outputs}": word}
    results: dict[str, list[float]] = {}
    integers: dict[str, Callable[..., int]] = {
        "mov.b32": lambda value: value,
        "prmt.b32": _prmt,
        "shr.b32": lambda value, by: value >> by,
        "lop3.b32": _lop3,
    }
    for line in text.strip("{}").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        target, *sources = (part.strip() for part in rest.split(","))
        values = [registers[source] if source in registers else int(source, 0) for source in sources]
        if name in integers:
            registers[target] = integers[name](*values)
            continue
        assert name == f"fma.rn.{'bf16' if dtype == torch.bfloat16 else 'f16'}x2"
        halves = [[_float(value >> shift & 0xFFFF, dtype) for value in values] for shift in (0, 16)]
        results[target] = [x * y + z for x, y, z in halves]
        # exact, so that fma's rounding changes nothing
        assert torch.tensor(results[target]).to(dtype).double().tolist() == results[target]
    return [value for place in range(outputs) for value in results[f"${place}"]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("what", ["CODES", "BYTES"])
def test_every_byte_in_every_place(what: str, dtype: torch.dtype) -> None:
    name = f"{what}_{'BF16' if dtype == torch.bfloat16 else 'FP16'}"
    text: Any = getattr(kernel, name).value
    # Inductor writes it into a file as one line
    assert "\n" not in text and "'" not in text and "\\" not in text
    for byte in range(256):
        four = [byte, (7 * byte + 3) % 256, (13 * byte + 5) % 256, 255 - byte]
        got = execute(text, sum(value << 8 * place for place, value in enumerate(four)), dtype)
        if what == "BYTES":
            assert got == [value - 256 * (value > 127) for value in four]
        else:
            assert got == [(value & 15) - 8 for value in four] + [(value >> 4) - 8 for value in four]
