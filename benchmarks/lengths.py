"""A server with free prompt lengths: how much of the speed-up of fixed shapes is left when lengths are drawn at random.

A small BERT with random weights, compiled; eager against it at one length, and over lengths drawn log-uniformly: padded
to compiled sizes (`graphs.bucketed`), and as one dynamic graph. `kept` is the speed-up over the drawn lengths, of the
faster way, over that at the compiled sizes themselves; the aim is 0.95. All of it compiles before anything is timed,
and the file says how many graphs that took and for how long. On a CPU the defaults are small, or compiling takes
minutes, and --processor-time counts what one thread works, which a busy machine does not change.

    PYTHONPATH=src python -m benchmarks.lengths [--out evidence/<machine>/<date>_lengths_bert.jsonl.gz]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from wavecrest import hardware
from wavecrest.graphs.bucketed import Bucketed
from wavecrest.graphs.inductor import PRESETS, compile_dynamic, compile_module
from wavecrest.measure import timing
from wavecrest.measure.ranges import Kwargs, Ranges, resized
from wavecrest.optimizer.ranged import drawn
from wavecrest.optimizer.steps.base import structural_copy
from wavecrest.records import files, provenance

CALLS = 24
PROCESSOR = "processor time of one thread"


def made(device: str, most: int, layers: int, width: int) -> tuple[nn.Module, Kwargs]:
    """The model and an example of the longest call."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1024, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 32,
        intermediate_size=4 * width,
    )  # fmt: skip
    dtype = torch.float32 if device == "cpu" else torch.float16
    ids = torch.randint(4, 1024, (1, most), device=device)
    model = BertModel(config).eval().to(device, dtype)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def over(model: Callable[..., Any], calls: list[Kwargs]) -> Callable[[], None]:
    """A work that makes all of these calls."""

    def work() -> None:
        with torch.no_grad():
            for kwargs in calls:
                model(**kwargs)

    return work


def warmed(work: Callable[[], None]) -> dict[str, float]:
    """Make all calls once: the graphs that were compiled, and the seconds that it took."""
    before, begin = counters["stats"]["unique_graphs"], time.perf_counter()
    work()
    return {
        "graphs": counters["stats"]["unique_graphs"] - before,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def measured(
    device: str, ranges: Ranges, layers: int, width: int, seconds: float, now: timing.Clock
) -> list[dict[str, Any]]:
    """A row for the compiled sizes themselves, and one for each way over the drawn lengths."""
    model, example = made(device, ranges.length[1], layers, width)
    fixed = structural_copy(model)
    compile_module(fixed, PRESETS["default"])
    padded = Bucketed(fixed, model, ranges, example)
    free = structural_copy(model)
    compile_dynamic(free)
    lengths = drawn(ranges, example, CALLS)
    sizes = [ranges.size(*kwargs["input_ids"].shape) for kwargs in lengths]
    # the same sizes as often as the drawn calls are padded to them
    at_sizes = [resized(example, *size) for size in sizes if size is not None]
    works: dict[str, tuple[nn.Module, list[Kwargs]]] = {
        "fixed": (padded, at_sizes), "padded": (padded, lengths), "dynamic": (free, lengths),
    }  # fmt: skip
    rows = []
    compiled = {name: warmed(over(*works[name])) for name in works}
    for name, (candidate, calls) in works.items():
        sides = over(model, calls), over(candidate, calls)
        pair = timing.measure_pair(*sides, device=device, seconds=seconds, now=now)
        rows.append(
            {
                "case": name, "eager_ms": round(pair.base_ms, 4), "ms": round(pair.new_ms, 4),
                "ratio": round(pair.ratio, 4), "ratio_ci": [round(pair.ci.low, 4), round(pair.ci.high, 4)],
                "blocks": pair.n, "clock": PROCESSOR if now is time.process_time else pair.clock,
                "compiled": compiled[name], "samples": list(pair.new), "eager_samples": list(pair.base),
            }
        )  # fmt: skip
    return rows


def main() -> int:
    """Measure, print, and write with --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--most", type=int, default=256 if on_gpu else 64, help="longest call (256 tokens; CPU: 64)")
    parser.add_argument("--layers", type=int, default=4 if on_gpu else 2)
    parser.add_argument("--width", type=int, default=256 if on_gpu else 128)
    parser.add_argument("--seconds", type=float, default=10.0 if on_gpu else 4.0, help="sampling time of a row")
    if not on_gpu:
        parser.add_argument("--processor-time", action="store_true", help="not the wall's: of one thread")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    args = parser.parse_args()
    device = "cuda:0" if on_gpu else "cpu"
    ranges = Ranges((1, 1), (8, args.most))
    now = timing.HOST_CLOCK
    if getattr(args, "processor_time", False):
        torch.set_num_threads(1)
        now = time.process_time
    rows = measured(device, ranges, args.layers, args.width, args.seconds, now)
    for row in rows:
        sys.stdout.write(json.dumps({name: value for name, value in row.items() if "samples" not in name}) + "\n")
    ratios = {row["case"]: row["ratio"] for row in rows}
    kept = max(ratios["padded"], ratios["dynamic"]) / ratios["fixed"]
    sys.stdout.write(f"kept {kept:.3f} of the speed-up at the compiled sizes {ranges.lengths}\n")
    if args.out is not None:
        header = provenance.header(hardware.detect(), command=provenance.command_line()).model_dump(mode="json")
        args.out.parent.mkdir(parents=True, exist_ok=True)
        document = {"kind": "lengths", "header": header, "sizes": ranges.lengths, "kept": round(kept, 4), "rows": rows}
        files.write_document(args.out, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
