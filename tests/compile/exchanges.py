"""Exchanges between lanes in the loops of the GEMV kernels, as JSON: `python exchanges.py`.

A process of its own, since kernels defined for Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.compile.known import Known
from wavecrest import hardware
from wavecrest.hardware import Arch
from wavecrest.isa import assembly, compiler
from wavecrest.ops._gemm.call import GemmCall
from wavecrest.ops._gemm.config import gemv
from wavecrest.ops._gemm.key import key_of, shape_of
from wavecrest.ops.common.launcher import Launch

# the function gemm of wavecrest.ops is in the module's place
launches: Any = importlib.import_module("wavecrest.ops._gemm.launch_gemv")
ARCHS = ("gfx90a", "gfx942", "gfx950")
BF16, F32 = torch.bfloat16, torch.float32


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch(arch: Arch, dtype: torch.dtype, rows: int = 1, a: torch.dtype = BF16, **more: Any) -> Launch:
    """The first launch of rows times a weight [4096, 4096], as it is configured where nothing is measured."""
    b = empty(4096, 4096, dtype=dtype).mT
    scale = None if dtype == BF16 else empty(4096, dtype=F32)
    call = GemmCall(empty(rows, 4096, dtype=a), b, scale_b=scale, **more)
    config = gemv(shape_of(key_of(call)), arch)
    made: Launch = launches.gemv(call, empty(0, dtype=a), empty(0, dtype=F32), config, arch, False).first
    return made


def cases(arch: Arch) -> Iterator[tuple[str, Launch]]:
    float8 = torch.float8_e4m3fnuz if arch.fp8 == "e4m3fnuz" else torch.float8_e4m3fn
    for name, dtype in (("bf16", BF16), ("int8", torch.int8), *((("fp8", float8),) if arch.fp8 else ())):
        yield name, launch(arch, dtype)
        yield f"{name} norm", launch(arch, dtype, norm_weight=empty(4096))
        yield f"{name} gated", launch(arch, dtype, activation="silu_and_mul")
        yield f"{name} 4 rows", launch(arch, dtype, 4)
    yield "int8 float32", launch(arch, torch.int8, a=F32)
    # as it was loaded before: 16 bytes of b a lane, whatever is loaded of a
    before, launches._alike = launches._alike, lambda *_args: 0
    yield "control", launch(arch, torch.int8)
    launches._alike = before


def exchanged(made: Launch, arch: str) -> list[str]:
    """Opcodes of exchanges in a kernel's loop."""
    hot = assembly.hot_loop(assembly.AMD.parse(compiler.compile_launch(made, arch).listing), assembly.AMD)
    assert any("_load_" in line.text for line in hot), f"{made.kernel.__name__} {arch}: no loads in its loop"
    return [line.text.split()[0] for line in hot if line.text.startswith(("ds_", "s_barrier"))]


def main() -> None:
    known, found = Known(__file__), dict[str, dict[str, list[str]]]()
    for name in ARCHS:
        found[name] = {}
        for case, made in cases(hardware.ARCHS[name]):
            found[name][case] = known.answer(made, name, functools.partial(exchanged, made, name))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
