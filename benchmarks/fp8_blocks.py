"""GEMMs of 8-bit floats with block scales: wavecrest's kernels beside cuBLAS, interleaved.

    PYTHONPATH=src python3 -m benchmarks.fp8_blocks [--rows 16 1024] [--out evidence/<machine>/<date>_….jsonl.gz]

a has a scale for 128 columns of a row, the weight one for 128 × 128 values. Layers are those of Llama 3 8B and
DeepSeek-V3. Kernels: the default of the portable `triton`, and every configuration of `triton_hopper_blocks` that
`wavecrest tune` tries. cuBLAS runs `torch._scaled_mm` with a scale for the tensor and with one a row and column, whose
numbers are not the same product, and with scales of blocks where this version of PyTorch has that, a's laid out before;
as the backend `torch` its time has that copy. Each backend's answer is held against the op's definition within the
bound that `wavecrest tune` admits kernels by; what is beyond it has no time, and the exit code is 1. Caches are cold.
`of_bandwidth`: bytes of the weight by the time, of a large copy's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wavecrest import hardware
from wavecrest.bench import ops as bench_ops
from wavecrest.errors import WavecrestError
from wavecrest.hardware import ARCHS
from wavecrest.measure import interleaved
from wavecrest.ops._gemm.backend import op
from wavecrest.ops._gemm.call import SCALE_BLOCK, GemmCall
from wavecrest.ops._gemm.key import key_of
from wavecrest.ops._gemm.launch_hopper_blocks import NAME
from wavecrest.ops._gemm.study import space
from wavecrest.ops.common import warmup
from wavecrest.records import files, provenance

Row = dict[str, Any]
Work = Callable[[], Tensor]

ROWS = (16, 32, 64, 128, 1024, 2048, 4096, 8192)
# [N, K]
WEIGHTS = ((4096, 4096), (7168, 2048), (2048, 7168), (14336, 4096), (4096, 14336))
TENSOR, CHANNEL, BLOCKWISE = "cuBLAS, tensor", "cuBLAS, rows", "cuBLAS, blocks"


def made(M: int, N: int, K: int) -> GemmCall:
    """Random values and scales."""
    generator = torch.Generator("cuda").manual_seed(M + N + K)
    a, b = (torch.randn(rows, K, device="cuda", generator=generator).to(torch.float8_e4m3fn) for rows in (M, N))
    blocks = -(-K // SCALE_BLOCK)
    scale_a = torch.rand(M, blocks, device="cuda", generator=generator) + 0.5
    scale_b = (torch.rand(-(-N // SCALE_BLOCK), blocks, device="cuda", generator=generator) + 0.5) * K**-0.5
    return GemmCall(a, b.mT, scale_a=scale_a, scale_b=scale_b.mT)


def peers(call: GemmCall) -> dict[str, Work]:
    """cuBLAS by the kind of scales."""
    a, b, (M, N) = call.a, call.b, (call.M, call.columns)
    assert call.scale_a is not None and call.scale_b is not None
    scaled = torch._scaled_mm
    one = torch.ones((), device="cuda")
    rows, columns = torch.ones(M, 1, device="cuda"), torch.ones(1, N, device="cuda")
    more = {"out_dtype": torch.bfloat16, "use_fast_accum": False}
    return {
        TENSOR: lambda: scaled(a, b, one, one, **more),
        CHANNEL: lambda: scaled(a, b, rows, columns, **more),
    }


def blockwise(call: GemmCall) -> tuple[Work | None, str]:
    """PyTorch's own GEMM with scales of blocks, in whichever form it takes them, or why it does not run here."""
    a, b, scale_a, scale_b = call.a, call.b, call.scale_a, call.scale_b
    assert scale_a is not None and scale_b is not None
    across = scale_a.mT.contiguous().mT
    problem = ""
    for one, other in (
        (across, scale_b), (across, scale_b.contiguous()), (scale_a, scale_b), (scale_a, scale_b.contiguous())
    ):  # fmt: skip
        work: Work = partial(torch._scaled_mm, a, b, one, other, out_dtype=torch.bfloat16)
        try:
            work()
        except (RuntimeError, ValueError) as error:
            problem = problem or str(error).splitlines()[0]
        else:
            return work, ""
    return None, problem


def works(call: GemmCall) -> dict[str, tuple[str, Any]]:
    """Backend and configuration of all that wavecrest chooses from, by name."""
    found: dict[str, tuple[str, Any]] = {"triton": ("triton", op.backends["triton"].default_config(key_of(call)))}
    if op.backends["torch"].refuse(call) is None:
        found["torch"] = "torch", None
    for config in space.blocks_space(key_of(call), ARCHS["sm_90"]):
        split = f" in {config['SPLIT_K']}" if config["SPLIT_K"] > 1 else ""
        tile = f"{64 * config['GROUPS']}x{config['HALVES'] * config['BLOCK_N']}"
        found[f"{tile} {config['STAGES']} stages groups of {config['GROUP_M']}{split}"] = NAME, config
    return found


def _bound(call: GemmCall, backend: str, config: Any) -> Callable[[GemmCall], Tensor]:
    bind: Any = op.backends[backend].bind
    run: Callable[[GemmCall], Tensor] = bind(call) if config is None else bind(call, config)
    return run


def case_of(M: int, N: int, K: int, seconds: float, gbps: float) -> Row:
    """The row of a shape: times of all that is right, taken in turn."""
    call = made(M, N, K)
    wanted, bound = op.reference(call).double(), op.study.bound(call)
    rows: dict[str, Row] = {}
    timed: dict[str, Work] = {}
    for name, (backend, config) in works(call).items():
        run = _bound(call, backend, config)
        off = float(((run(call).double() - wanted).abs() / bound).nan_to_num(torch.inf).max())
        kept = None if config is None else dict(config.kwargs)
        rows[name] = {"backend": backend, "config": kept, "of_bound": off if off < 1e30 else str(off)}
        if off <= 1.0:
            timed[name] = partial(run, call)
    timed |= peers(call)
    own, problem = blockwise(call)
    rows[BLOCKWISE] = {"problem": problem} if own is None else {}
    if own is not None:
        timed[BLOCKWISE] = own
    del wanted, bound
    taken = interleaved.measure(list(timed.values()), device="cuda", seconds=seconds, min_rounds=15)
    for name, series in zip(timed, taken.samples, strict=True):
        ms = statistics.median(series)
        rows[name] = rows.get(name, {}) | {
            "ms": ms, "tflops": 2.0 * M * N * K / ms / 1e9, "of_bandwidth": N * K / ms / 1e6 / gbps,
            "samples": [round(one, 5) for one in series],
        }  # fmt: skip
    default = next(name for name, row in rows.items() if row.get("backend") == NAME)
    best = min((name for name, row in rows.items() if row.get("backend") == NAME and "ms" in row), default=None,
               key=lambda name: rows[name]["ms"])  # fmt: skip
    return {
        "shape": [M, N, K], "rounds": taken.rounds, "clock": taken.clock, "default": default, "best": best, "rows": rows
    }  # fmt: skip


def shown(row: Row) -> str:
    """A shape's lines, for people: the fastest of the kernel's configurations, its default, and the others."""
    rows, best, default = row["rows"], row["best"], row["default"]
    lines = ["x".join(map(str, row["shape"]))]
    wrong = [name for name, one in rows.items() if "of_bound" in one and "ms" not in one]
    for name in dict.fromkeys((best, default, "triton", "torch", TENSOR, CHANNEL, BLOCKWISE)):
        one = rows.get(name, {})
        if "ms" not in one:
            lines.append(f"  {name}: {one.get('problem') or one.get('of_bound')}")
            continue
        peer = rows[TENSOR]["ms"] / one["ms"]
        mark = " (default)" if name == default else ""
        lines.append(
            f"  {1e3 * one['ms']:8.1f} µs {one['tflops']:7.1f} TFLOP/s {one['of_bandwidth']:5.2f} of bandwidth "
            f"{peer:5.2f} of {TENSOR}  {name}{mark}"
        )
    return "\n".join([*lines, *(f"  WRONG: {name} {rows[name]['of_bound']}" for name in wrong)]) + "\n"


def main() -> int:
    """Measure, print, and write with --out after every shape; 1 if a kernel is beyond its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.4, help="of timing a shape")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="rows of a")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    device = hardware.detect()
    if device.arch != "sm_90":
        raise WavecrestError(f"this is for sm_90, and here is {device.arch}")
    gbps, _ = bench_ops.copy_bandwidth("cuda", bench_ops.COPY_BYTES["cuda"], seconds=0.25)
    header = provenance.header(device, command=provenance.command_line()).model_dump(mode="json")
    result: Row = {"kind": "fp8_blocks", "header": header, "copy_gbps": gbps, "cases": []}
    wrong = 0
    with torch.no_grad():
        # all kernels are compiled first, side by side
        calls = [made(M, *WEIGHTS[0]) for M in (16, 64, 128, 1024) if M in arguments.rows]
        warmup.rehearse(lambda: [_bound(x, one, how)(x) for x in calls for one, how in works(x).values()])
        for N, K in WEIGHTS:
            for M in arguments.rows:
                row = case_of(M, N, K, arguments.seconds, gbps)
                wrong += sum("of_bound" in one and "ms" not in one for one in row["rows"].values())
                result["cases"].append(row)
                sys.stdout.write(shown(row))
                sys.stdout.flush()
                if arguments.out is not None:
                    arguments.out.parent.mkdir(parents=True, exist_ok=True)
                    files.write_document(arguments.out, result)
    sys.stdout.write(f"{wrong} answers beyond the bound\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
