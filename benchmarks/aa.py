"""The same object on both sides of the paired timer, many times: how often it is called faster, or slower.

Eager, compiled and, on a GPU, captured, each timed as `wavecrest optimize` times a step: with the progress display, the
inputs going round, and the interval that keeps a step. Half of 5 % may be called faster and half slower, plus the error
of a share of so few runs.

    python benchmarks/aa.py [KIND …] [--out evidence/<machine>/<date>_aa_<subject>.jsonl.gz]
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wavecrest import hardware
from wavecrest.cli.optimize import Display
from wavecrest.graphs.capture import CapturedModule
from wavecrest.measure import timing
from wavecrest.measure.rotation import Rotation
from wavecrest.measure.speedup import TAIL
from wavecrest.measure.workload import Call, Workload, from_example
from wavecrest.records import files, provenance

# a run of a pair warms up for twice SECONDS and measures for one of them: 200 runs take less than a minute
RUNS, SECONDS = 200, 0.08
# a share may be above its own by this many standard errors
ERRORS = 3
MIN_GAIN = 0.02


def made(device: str) -> Workload:
    """A few layers whose call takes tens of microseconds: position and layout weigh most on short calls."""
    torch.manual_seed(0)
    width, dtype = (1024, torch.bfloat16) if device != "cpu" else (64, torch.float32)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.GELU()]
    model = nn.Sequential(*layers).eval().to(device, dtype)
    return from_example(model, torch.randn(32, width, device=device, dtype=dtype))


def compiled(model: nn.Module) -> Any:
    """The model as the compilation step runs it."""
    return torch.compile(model, dynamic=False)


KINDS: dict[str, Callable[[nn.Module], Any]] = {"eager": lambda model: model, "compiled": compiled}
GPU_KINDS: dict[str, Callable[[nn.Module], Any]] = {"captured": CapturedModule}


def most(runs: int) -> float:
    """The most of `runs` that may lie beyond one end of a 95 % interval."""
    return TAIL * runs + ERRORS * math.sqrt(TAIL * (1 - TAIL) * runs)


def one_kind(workload: Workload, kind: str, runs: int, seconds: float) -> dict[str, Any]:
    """Time one object against itself `runs` times."""
    function = (KINDS | GPU_KINDS)[kind](workload.model)
    begin, pairs = time.perf_counter(), []
    with torch.no_grad(), Display() as display:
        for number in range(runs):
            display.phase(f"{kind} against itself, run {number + 1} of {runs}")
            rotation = Rotation(workload.buckets["default"])
            sides = [Call(workload, "default", function, rotation) for _ in range(2)]
            pairs.append(
                timing.measure_pair(
                    *sides,
                    device=workload.device,
                    seconds=seconds,
                    threshold=1 + MIN_GAIN,
                    rotation=rotation,
                    on_progress=display.update,
                )
            )
    floors = sorted(timing.resolution(pair) for pair in pairs)
    return {
        "case": kind,
        "runs": runs,
        "faster": sum(pair.ci.low > 1 for pair in pairs),
        "slower": sum(pair.ci.high < 1 for pair in pairs),
        "kept": sum(timing.keeps(pair.ci, MIN_GAIN) for pair in pairs),
        "allowed": round(most(runs), 1),
        "median_ms": round(statistics.median(pair.base_ms for pair in pairs), 5),
        "median_ratio": round(statistics.median(pair.ratio for pair in pairs), 5),
        "median_resolution": round(statistics.median(floors), 5),
        "blocks": statistics.median_low(pair.n for pair in pairs),
        "clock": pairs[0].clock,
        "seconds": round(time.perf_counter() - begin, 1),
        "ratios": [round(pair.ratio, 5) for pair in pairs],
        "low": [round(pair.ci.low, 5) for pair in pairs],
        "high": [round(pair.ci.high, 5) for pair in pairs],
        "seeds": [pair.seed for pair in pairs],
    }


def main() -> int:
    """Measure, print, and write with --out; 1 if a side wins more often than chance allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="eager, compiled, captured; all of them without one")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"runs of each kind (default {RUNS})")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"sampling time of a run (default {SECONDS})")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    known = KINDS if device == "cpu" else KINDS | GPU_KINDS
    unknown = [kind for kind in arguments.kinds if kind not in known]
    if unknown:
        parser.error(f"no kind {', '.join(unknown)} on {device}; there are {', '.join(known)}")
    torch.set_num_threads(1)
    workload, rows = made(device), []
    for kind in arguments.kinds or known:
        row = one_kind(workload, kind, arguments.runs, arguments.seconds)
        rows.append(row)
        shown = " ".join(f"{name}={value}" for name, value in row.items() if not isinstance(value, list))
        sys.stdout.write(f"{shown}\n")
        sys.stdout.flush()
    wrong = [row["case"] for row in rows if max(row["faster"], row["slower"]) > row["allowed"]]
    sys.stdout.write(f"a side wins more often than chance allows: {', '.join(wrong) or 'no'}\n")
    if arguments.out is not None:
        header = provenance.header(hardware.detect(), command=provenance.command_line()).model_dump(mode="json")
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        files.write_document(arguments.out, {"kind": "aa", "header": header, "rows": rows})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
