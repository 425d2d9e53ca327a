"""A model of the zoo with its linear layers in 8 and 4 bits, each optimized, beside the optimized model itself.

    python -m benchmarks.quantized [--model NAME] [--formats int8 fp8 int4] [--budget 40] [--out FILE.jsonl.gz]
                                   [--no-original] [--steps fuse_qkv,capture] [--logits int8 int4]

All variants share the weights that are not quantized, and take turns in one process. `wavecrest.optimize` is held to
the answers of the quantized model; how far these are from the original's is in `error`. A bound is the time of reading
the variant's weights and inputs once at the bandwidth measured here. Weights are random, so that errors say what
rounding does and nothing of a trained model. `--tiny` tries the script on a CPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.tensor_parallel import is_captured, measure, once
from benchmarks.zoo import registry
from benchmarks.zoo.registry import Site
from torch import Tensor, nn

import wavecrest
from wavecrest import hardware
from wavecrest.errors import StepRefused
from wavecrest.measure import numerics
from wavecrest.measure.workload import Call, Workload
from wavecrest.optimizer import api
from wavecrest.optimizer.gate.snapshot import in_parts
from wavecrest.optimizer.options import Options
from wavecrest.optimizer.steps import AppliedSteps, StepContext, build, step_by_id, structural_copy
from wavecrest.optimizer.steps.base import TREE
from wavecrest.profile import measure_ceilings
from wavecrest.quantizer.layers import SCHEMES
from wavecrest.records import files, provenance

# behind a format: of the logits too, which `quantize` leaves as they are unless it is asked
LOGITS = " with logits"
# bytes that 1 GB/s moves in a millisecond
BYTES_A_MS = 1e6

Row = dict[str, Any]


def size_of(workload: Workload) -> int:
    """Bytes of the weights that a call reads, and of its inputs; embeddings are read in a few rows."""
    model = workload.model
    tables = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    tables -= {id(one.weight) for one in model.modules() if isinstance(one, nn.Linear)}
    state: dict[str, Tensor] = {name: one for name, one in model.named_parameters() if id(one) not in tables}
    (bucket,) = workload.buckets.values()
    tensors: Iterable[Tensor] = [*in_parts(state).values(), *(tensor for _, tensor in bucket.tensors())]
    return sum({id(one): one.nbytes for one in tensors}.values())


def made(base: nn.Module, finish: Any, form: str, options: argparse.Namespace) -> tuple[Workload, nn.Module, Row]:
    """A variant's workload, its optimized model, and what became of it; `form` "" is the model as it is."""
    model, row = structural_copy(base), Row(variant=form or "original")
    begin = time.perf_counter()
    if form:
        quantized = wavecrest.quantize(model, form.removesuffix(LOGITS), keep=("!lm_head",) if LOGITS in form else ())
        quantized.forget()
        model = quantized.model
        row |= {"layers": len(quantized.formats), "quantize_s": round(time.perf_counter() - begin, 1)}
    workload = finish(model)
    begin = time.perf_counter()
    row["bytes"] = size_of(workload)
    if not form and options.no_original:
        return workload, model, row
    if options.steps:
        stepped, found = with_steps(workload, options.steps.split(","), options.budget)
        return workload, stepped, row | {"kept": list(found), "found": found, "captured": is_captured(stepped)}
    done = api.run(workload, Options(budget=options.budget, skip=("environment",)))
    row |= {
        "optimize_s": round(time.perf_counter() - begin, 1), "kept": done.plan.stack,
        "steps": [
            {"title": one.title, "verdict": one.verdict, "ratio": one.ratio, "reason": one.reason}
            for one in done.record.steps
            if one.verdict != "skipped" or one.sites
        ],
        "captured": is_captured(done.model),
    }  # fmt: skip
    return workload, done.model, row


def with_steps(workload: Workload, names: list[str], seconds: float) -> tuple[nn.Module, dict[str, Row]]:
    """The model with these steps, one after the other, none of them judged; and what each found, with `seconds` left.

    Raises:
        StepRefused: one finds nothing to change.
    """
    applied, device = AppliedSteps(), hardware.detect(workload.device)
    told: dict[str, Row] = {}
    for name in names:
        step = step_by_id(name)
        context = StepContext(workload, device, model=build(workload.model, applied.only(*TREE)))
        context.seconds_left = seconds
        context.compiled, context.captured = applied.compiled, bool(applied.only("capture").steps)
        found = step.find(context)
        if not found.sites:
            raise StepRefused(f"{name}: {found.note}")
        applied = applied.plus(step, found.params)
        told[name] = {"sites": len(found.sites), "note": found.note}
    return build(workload.model, applied), told


def main() -> int:
    """Measure, print, and write with --out; 1 if an answer has NaN or infinity where the other has none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b-decode", help="of the zoo (default llama-8b-decode)")
    parser.add_argument("--formats", nargs="+", choices=tuple(SCHEMES), default=["int8", "fp8", "int4"])
    parser.add_argument("--logits", nargs="+", choices=tuple(SCHEMES), default=[], help="and these, of logits too")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds for each variant (default 40)")
    parser.add_argument("--steps", help="apply these steps to each variant, in place of wavecrest.optimize")
    parser.add_argument(
        "--no-original", action="store_true", help="of the model as it is, take the answers alone: no optimize, no time"
    )
    parser.add_argument("--tiny", action="store_true", help="a model for tests")
    parser.add_argument("--device", help="torch device name")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    options = parser.parse_args()
    device = hardware.detect(options.device)
    entry = registry.entries()[options.model]
    size = entry.size(device.torch_name, tiny=options.tiny)
    base, finish = entry.module(Site(device.torch_name, size, options.tiny))
    calls, rows = {}, {}
    original: Tensor | None = None
    for form in ("", *options.formats, *(form + LOGITS for form in options.logits)):
        workload, model, row = made(base, finish, form, options)
        (bucket,) = workload.buckets
        answer = workload.run(bucket)
        original = answer if original is None else original
        found = numerics.compare(answer, original)
        after = numerics.compare(workload.run(bucket, model), answer)
        row |= {"error": found.relative, "optimized_error": after.relative}
        row |= {"finite": found.nonfinite_match and after.nonfinite_match}
        if form or not options.no_original:
            calls[row["variant"]], rows[row["variant"]] = Call(workload, bucket, model), row
        sys.stdout.write(f"{row}\n")
    dtype = str(next(base.parameters()).dtype).removeprefix("torch.")
    bandwidth = measure_ceilings(device.torch_name, dtype).bandwidth
    for name, times in measure(calls, options.rounds, once).items():
        bound = rows[name]["bytes"] / bandwidth / BYTES_A_MS
        rows[name] |= times | {
            "tokens_s": round(entry.count(size) / times["median_ms"] * 1e3, 1),
            "bound_ms": round(bound, 4), "bound_percent": round(100 * bound / times["median_ms"], 1),
        }  # fmt: skip
        shown = " ".join(f"{key}={value}" for key, value in rows[name].items() if key not in ("samples", "steps"))
        sys.stdout.write(f"{shown}\n")
    if options.out is not None:
        header = provenance.header(device, command=provenance.command_line()).model_dump(mode="json")
        about = {"model": options.model, "size": size._asdict(), "bandwidth_gbps": round(bandwidth, 1)}
        files.write_document(options.out, {"kind": "quantized", "header": header, **about, "rows": list(rows.values())})
    return int(not all(row["finite"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
