"""Sums across lanes in sm_90's machine code, in kernels that pass them on, as JSON: `python shuffles.py`.

A process of its own, since kernels defined for Triton's interpreter cannot be compiled.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import wavecrest.ops.common.launcher as _launcher
from tests.compile.known import Known
from wavecrest import hardware
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.isa import compiler
from wavecrest.ops.common.triton import tl, triton
from wavecrest.ops.mlstm.sequence import launch as sequence
from wavecrest.ops.mlstm.step import launch as step
from wavecrest.ops.mlstm.step.config import default
from wavecrest.ops.mlstm.step.study.cases import example as step_example
from wavecrest.ops.mlstm.study.cases import example

ARCH = "sm_90"
SHUFFLE = re.compile(r"SHFL\.BFLY PT, (R\d+),")


@triton.jit
def _product_kernel(a_ptr, b_ptr, c_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A product that is summed as it is."""
    offs = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(a_ptr + offs) * tl.load(b_ptr + offs), 0)
    tl.store(c_ptr + offs, total * tl.load(b_ptr + offs))


def merged(code: str) -> tuple[int, int]:
    """(sums across lanes, those whose addition has a lane's own product in it)."""
    lines = code.splitlines()
    places = [(index, found[1]) for index, line in enumerate(lines) if (found := SHUFFLE.search(line))]
    count = 0
    for index, register in places:
        reads = re.compile(rf"\b(FADD|FFMA)\b[^;]*,[^;]*\b{register}\b")
        first = next((found[1] for line in lines[index + 1 :] if (found := reads.search(line))), "")
        count += first == "FFMA"
    return len(places), count


def main() -> None:
    vector = torch.empty(32, device="meta")
    found = {"control": _launcher.Launch(_product_kernel, (1,), (vector,) * 3, {"BLOCK": 32}, Config(num_warps=1))}
    arch, op = hardware.ARCHS[ARCH], registry.get("mlstm_sequence")
    for dk, dv in ((16, 24), (64, 128), (256, 512)):
        call = example((2, 2, 20, dk, dv), torch.float32, "meta")
        config = op.config_of("triton", op.key(call))
        found[f"sequence {dk}x{dv}"] = sequence.planned(call, config, arch)[0]
        token = step_example((2, 2, dk, dv), torch.float32, "meta")
        found[f"step {dk}x{dv}"] = step.planned(token, default(dk, dv, arch), arch)[0]
    known = Known(__file__)

    def counted(launch: _launcher.Launch) -> tuple[int, int]:
        return merged(compiler.compile_launch(launch, ARCH).listing)

    counts = {name: known.answer(one, ARCH, functools.partial(counted, one)) for name, one in found.items()}
    json.dump(counts, sys.stdout)


if __name__ == "__main__":
    main()
