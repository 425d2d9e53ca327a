"""A model with its own attention against the same model with ours, both compiled and captured, interleaved.

    python benchmarks/attention_peers.py examples/llama.py:decode_8b --out peers.json

Nothing else differs between the two: `torch.compile` with its defaults, then one graph for the whole call. Answers are
compared with those of the model in float32 first, and no time is written for a model that gives wrong ones. Which token
is the most likely is written down and not judged: of a few logits of random weights the largest two may lie closer than
what rounding moves them, so that the model's own attention fails such a check as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from wavecrest import hardware
from wavecrest.graphs.capture import CapturedModule
from wavecrest.graphs.inductor import PRESETS, compile_module, strict_compilation
from wavecrest.measure import timing, workload
from wavecrest.measure.workload import Call
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.steps.base import structural_copy
from wavecrest.optimizer.steps.replace_attention import attention_calls, use_attention
from wavecrest.records import files, provenance


def captured(model: torch.nn.Module) -> torch.nn.Module:
    """The model compiled with torch's defaults, in one graph."""
    compile_module(model, PRESETS["default"])
    return CapturedModule(model)


def state_bytes(loaded: workload.Workload, bucket: str) -> dict[str, int]:
    """Bytes of the weights, each once, and of the tensors inside of the inputs (a cache with the room that it has)."""
    weights = {tensor.data_ptr(): tensor.nbytes for tensor in loaded.model.parameters()}
    return {
        "weights": sum(weights.values()),
        "inputs": sum(tensor.nbytes for _, tensor in loaded.buckets[bucket].tensors()),
    }


def main() -> None:
    """Measure and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--device", default=None)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    loaded = workload.load(args.workload, device=args.device)
    device = hardware.detect(loaded.device)
    ours = use_attention(structural_copy(loaded.model))
    result: dict[str, Any] = {
        "header": provenance.header(device).model_dump(),
        "workload": args.workload,
        "buckets": [],
    }
    with strict_compilation(8), torch.no_grad():
        gate = Gate.prepare(loaded)
        calls = {bucket: attention_calls(ours, inputs) for bucket, inputs in loaded.buckets.items()}
        peer, ours = captured(structural_copy(loaded.model)), captured(ours)
        errors = {"own": gate.check(peer), "wavecrest": gate.check(ours)}
        judged = {name: [row for row in rows if not row.output.endswith("top-1")] for name, rows in errors.items()}
        answers = {name: failures(rows) or "pass" for name, rows in judged.items()}
        for bucket in loaded.buckets:
            backends = sorted({f"{c.decision.op} {c.decision.backend}" for c in calls[bucket] if c.decision})
            row: dict[str, Any] = {
                "bucket": bucket,
                "answers": answers,
                "errors": {name: [one.model_dump() for one in rows] for name, rows in errors.items()},
                "runs": backends,
                "bytes": state_bytes(loaded, bucket),
            }
            if set(answers.values()) == {"pass"}:
                pair = timing.measure_pair(
                    Call(loaded, bucket, peer), Call(loaded, bucket, ours), device=loaded.device, seconds=args.seconds
                )
                row |= {
                    "own_ms": pair.base_ms,
                    "wavecrest_ms": pair.new_ms,
                    "speedup": pair.ratio,
                    "ci": [pair.ci.low, pair.ci.high],
                    "blocks": pair.n,
                    "own_samples": list(pair.base),
                    "wavecrest_samples": list(pair.new),
                }
            result["buckets"].append(row)
    files.write_document(args.out, result)


if __name__ == "__main__":
    main()
