"""Split rows whose programs wait for each other, and whose programs do not: JSON of the ops with other bits.

`python -m tests.emulated.exchange gfx942`. With one workgroup under way at a time and one look, those before the last
of a row work the missing parts out by themselves.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import wavecrest.ops.rows.launch as _launch
from wavecrest.dispatch import registry
from wavecrest.dispatch.tuned import Config
from wavecrest.isa.emulate import emulated

OPS = ("rms_norm", "layer_norm", "softmax", "add_layer_norm_quantize", "rms_norm_quantize")


def bits(op: str, arch: str, patience: int, resident: int) -> tuple[list[bytes], int]:
    """The results, and how many instructions the waves executed."""
    torch.manual_seed(0)
    found = registry.get(op)
    call = found.study.inputs(3, 1000, torch.bfloat16, "cpu")
    _launch.PATIENCE = patience
    with emulated(arch, resident=resident) as driver:
        results: Any = found.run("triton", call, config=Config(BLOCK_M=1, BLOCK_N=256, PACKED=1, num_warps=1))
        instructions = driver.runs[-1].stats.instructions
    results = results if isinstance(results, tuple) else (results,)
    return [result.contiguous().view(torch.uint8).numpy().tobytes() for result in results], instructions


def main(arch: str) -> None:
    differ = []
    for op in OPS:
        waited, many = bits(op, arch, 1 << 14, 64)
        alone, few = bits(op, arch, 1, 1)
        assert few != many, "both ways took the same instructions"
        if waited != alone:
            differ.append(op)
    json.dump(differ, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
