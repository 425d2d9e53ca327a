"""The process in which TunableOp tunes the GEMMs of a model: it may crash or never end, and nothing else is lost.

Run as `python -m wavecrest.optimizer.tuning_side TASK.json OUT.json`; the task has the GEMMs by operation, dtypes,
shapes and strides, and the device.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.cuda import tunable

from wavecrest.records import decode

# of results about 1: two roundings to bfloat16 differ by up to 2⁻⁸
TOLERANCE = 1e-2
_CALLS: dict[str, Any] = {"mm": torch.mm, "bmm": torch.bmm, "addmm": torch.addmm}


@contextlib.contextmanager
def tuning(path: Path) -> Iterator[None]:
    """Inside, TunableOp tunes what it meets, with a numerical check, and keeps it in the file of a path."""
    tunable.set_filename(str(path), insert_device_ordinal=False)
    tunable.enable(True)
    tunable.tuning_enable(True)
    # a solution that is fast because it computes less would win otherwise (ROCm/rocm-libraries#12226); older versions
    # of PyTorch have no such check, and the gate is behind this one
    if hasattr(tunable, "set_numerical_check_tolerances"):
        tunable.set_numerical_check_tolerances(True, TOLERANCE, TOLERANCE)
    # operands of a model are seldom in the cache
    tunable.set_rotating_buffer_size(512)
    try:
        yield
    finally:
        tunable.tuning_enable(False)
        tunable.enable(False)


def _operand(dtype: str, shape: list[int], stride: list[int], depth: int, device: str) -> Tensor:
    """Random numbers, of a size that makes sums of `depth` products about 1."""
    made: Tensor = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
    return made.copy_(torch.randn(shape, device=device) * depth**-0.25)


def tune(products: list[Any], device: str, folder: Path) -> dict[str, Any]:
    """Run every GEMM once with TunableOp; what it found, as the parameters of the step."""
    with torch.no_grad(), tuning(folder / "tuned.csv"):
        for name, operands in products:
            depth = max(1, operands[-1][1][-2])
            made = [_operand(dtype, shape, stride, depth, device) for dtype, shape, stride in operands]
            _CALLS[name](*made)
            torch.cuda.synchronize(device)
    # PyTorch annotates tuples of these as one of them
    results: Any = tunable.get_results()
    validators: Any = tunable.get_validators()
    rows = [[operator, sizes, solution, f"{ms:.6g}"] for operator, sizes, solution, ms in results]
    return {"validators": [list(pair) for pair in validators], "rows": rows}


def main() -> int:
    """Do the task of the command line; the exit code."""
    path, target = Path(sys.argv[1]), Path(sys.argv[2])
    task = decode.json_of(path.read_bytes())
    target.write_text(json.dumps(tune(task["products"], task["device"], target.parent)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
