"""How exact products of 8-bit floats are, and what that costs: wavecrest's kernels, cuBLAS, and both with fast_accum.

    PYTHONPATH=src python3 -m benchmarks.fp8_accuracy [--seconds 0.3] [--out evidence/<machine>/<date>_….jsonl.gz]

The error of an element is taken against float64, in units of the root of its squared products' sum, ‖aᵢ ∘ bⱼ‖, which is
the size of the sum where terms have random signs; and as a share of the bound that `wavecrest tune` admits kernels by.
Values are standard normal ("signed"), or their amounts ("positive"), whose sums grow with K and where what is cut off
does not cancel. Results are float32. Exit code 1 if an element is beyond the bound.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wavecrest import hardware
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import WavecrestError
from wavecrest.measure import interleaved
from wavecrest.ops._gemm.backend import op
from wavecrest.ops._gemm.call import FAST_ACCUM, GemmCall
from wavecrest.ops.common import warmup
from wavecrest.records import files, provenance

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
ROWS = 1024
SHAPES = ((256, 4096, 4096), (1024, 4096, 4096), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192))
PRECISIONS = ("ieee", FAST_ACCUM)


def _tile(m: int, n: int, k: int, warps: int, stages: int, **more: int) -> Config:
    values = {"GROUP_M": 8, "SPLIT_K": 1, "PERSISTENT": 0, "TMA": 1}
    return Config(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=warps, num_stages=stages, **(values | more))


CONFIGS = {
    "128x128": ("triton", _tile(128, 128, 128, 8, 3)),
    "128x256": ("triton", _tile(128, 256, 128, 8, 3)),
    "64x128": ("triton", _tile(64, 128, 128, 4, 4)),
    "64x256": ("triton", _tile(64, 256, 128, 4, 4)),
    "64x128 steps of 256": ("triton", _tile(64, 128, 256, 4, 4)),
    "128x128 without descriptors": ("triton", _tile(128, 128, 128, 8, 3, TMA=0)),
    "64x64 in 4 parts": ("triton", _tile(64, 64, 256, 4, 3, TMA=0, SPLIT_K=4)),
    "stream-K": (
        "triton_stream_k",
        Config(BLOCK_M=128, BLOCK_N=128, BLOCK_K=128, GROUP_M=8, TMA=1, PROGRAMS=1, num_warps=8, num_stages=3),
    ),
}

Work = Callable[[], Tensor]


def made(M: int, N: int, K: int, kind: str = "signed") -> GemmCall:
    """a [M, K] and the transpose of a weight [N, K] in float8_e4m3fn; the result is float32."""
    generator = torch.Generator("cuda").manual_seed(M + N + K)
    a, b = (torch.randn(rows, K, device="cuda", generator=generator) for rows in (M, N))
    if kind == "positive":
        a, b = a.abs(), b.abs()
    return GemmCall(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).mT, out_dtype=torch.float32)


def works(call: GemmCall) -> Iterator[tuple[str, str, Work]]:
    """(implementation, precision, work) of all that run a call."""
    for precision in PRECISIONS:
        # what is bound for a precision takes calls of it
        asked = call._replace(precision=precision)
        yield "PyTorch", precision, partial(op.backends["torch"].bind(asked), asked)
        for name, (backend, config) in CONFIGS.items():
            yield name, precision, partial(op.backends[backend].bind(asked, config), asked)


def errors(kind: str, K: int) -> Iterator[dict[str, Any]]:
    """A row for each implementation: its errors for one length of sums."""
    call = made(ROWS, ROWS, K, kind)
    a, b = call.a.double(), call.b.double()
    want, unit = a @ b, (a.square() @ b.square()).sqrt()
    for name, precision, work in works(call):
        bound = op.study.bound(call._replace(precision=precision))
        off = (work().double() - want).abs()
        figures = {
            "rms": float((off / unit).square().mean().sqrt()), "largest": float((off / unit).max()),
            "of_bound": float((off / bound).max()),
        }  # fmt: skip
        row = {"values": kind, "K": K, "implementation": name, "precision": precision}
        # JSON has no infinity, nor NaN
        yield row | {key: value if math.isfinite(value) else str(value) for key, value in figures.items()}


def times(shape: tuple[int, int, int], seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each implementation: its times, all taken in turn."""
    call = made(*shape)
    found = list(works(call))
    taken = interleaved.measure([work for _, _, work in found], device="cuda", seconds=seconds, min_rounds=20)
    operations = 2.0 * shape[0] * shape[1] * shape[2]
    for (name, precision, _), series in zip(found, taken.samples, strict=True):
        ms = statistics.median(series)
        yield {
            "shape": list(shape), "implementation": name, "precision": precision, "ms": ms,
            "tflops": operations / ms / 1e9, "samples": [round(one, 5) for one in series],
        }  # fmt: skip


def main() -> int:
    """Measure, print, and write with --out; 1 if an element is beyond its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="of timing a shape")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise WavecrestError("this needs a GPU with 8-bit floats")
    accuracy: list[dict[str, Any]] = []
    speed: list[dict[str, Any]] = []
    with torch.no_grad():
        small = made(256, 256, 512)
        warmup.rehearse(lambda: [work() for _, _, work in works(small)])
        for kind in ("signed", "positive"):
            for K in LENGTHS:
                for row in errors(kind, K):
                    accuracy.append(row)
                    sys.stdout.write(json.dumps(row) + "\n")
        for shape in SHAPES:
            for row in times(shape, arguments.seconds):
                speed.append(row)
                sys.stdout.write(json.dumps({name: row[name] for name in row if name != "samples"}) + "\n")
    beyond = [row for row in accuracy if isinstance(row["of_bound"], str) or row["of_bound"] > 1.0]
    sys.stdout.write(f"{len(beyond)} of {len(accuracy)} beyond the bound\n")
    if arguments.out is not None:
        header = provenance.header(hardware.detect(), command=provenance.command_line()).model_dump(mode="json")
        result = {"kind": "fp8_accuracy", "header": header, "accuracy": accuracy, "times": speed}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        files.write_document(arguments.out, result)
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
