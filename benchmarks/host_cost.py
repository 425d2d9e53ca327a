"""Host cost of one op call, in µs: what the CPU does before the GPU has its work.

On a GPU: the bare `kernel[grid](...)`, the op's call, and PyTorch's function, rms_norm of 16×4096 bfloat16.
On the CPU: the dispatch alone (checks, key, cached decision), as the op's call minus the backend it runs.
Each figure is the median of 7 rounds of 500 calls.

    python benchmarks/host_cost.py --out benchmarks/results/<machine>/host_cost.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from wavecrest import hardware, ops
from wavecrest.dispatch import registry
from wavecrest.errors import EnvironmentProblem, WavecrestError
from wavecrest.ops.rows import launch as _row_launch

ROUNDS = 7
CALLS = 500
ROWS, COLUMNS = 16, 4096


def microseconds(work: Callable[[], Any]) -> float:
    """Median host time of a call; the GPU runs behind and is waited for between rounds."""
    for _ in range(50):
        work()
    rounds = []
    for _ in range(ROUNDS):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            work()
        rounds.append((time.perf_counter() - start) / CALLS * 1e6)
    return round(statistics.median(rounds), 2)


def on_gpu() -> dict[str, float]:
    """Bare launch, backend, op call and F.rms_norm."""
    if not torch.cuda.is_available():
        raise EnvironmentProblem("torch sees no GPU")
    op = registry.get("rms_norm")
    call = op.study.inputs(ROWS, COLUMNS, torch.bfloat16, "cuda")
    x, weight = call.x, call.weight
    y = torch.empty_like(x)
    config = op.config_of("triton", op.key(call))
    launch = _row_launch.launch(call, y, x, x, x, config, 0)
    arguments = launch.options()
    bind = op.backends["triton"].bind
    assert bind is not None
    bound = bind(call, config)
    op.force("triton")
    return {
        "bare_launch": microseconds(lambda: launch.kernel[launch.grid](*launch.args, **arguments)),
        "empty": microseconds(lambda: torch.empty_like(x, memory_format=torch.contiguous_format)),
        "bound": microseconds(lambda: bound(call)),
        "check": microseconds(lambda: op.check(call)),
        "key": microseconds(lambda: op.key(call)),
        "op_call": microseconds(lambda: ops.rms_norm(x, weight, 1e-6)),
        "torch": microseconds(lambda: F.rms_norm(x, (COLUMNS,), weight, 1e-6)),
    }


def on_cpu() -> dict[str, float]:
    """Dispatch alone, by its parts: the backend is replaced by one that returns its argument."""
    op = registry.get("rms_norm")
    call = op.study.inputs(ROWS, COLUMNS, torch.bfloat16, "cpu")
    x, weight = call.x, call.weight
    op.attach("nothing", lambda call: call.x, priority=99)
    return {
        "check": microseconds(lambda: op.check(call)),
        "key": microseconds(lambda: op.key(call)),
        "dispatch": microseconds(lambda: ops.rms_norm(x, weight, 1e-6)),
    }


def main() -> int:
    """Measure, print, and write with --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the result to this JSON file")
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    try:
        with torch.no_grad():
            measured = on_gpu() if gpu else on_cpu()
    except WavecrestError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    result = {
        "what": f"host µs a call, rms_norm {ROWS}x{COLUMNS} bfloat16, median of {ROUNDS}x{CALLS}",
        "evidence": "measured",
        "device": hardware.detect().to_dict(),
        "torch": torch.__version__,
        "us": measured,
    }
    text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
    sys.stdout.write(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
