"""The optimized decode step against what a user has without wavecrest, interleaved in one process.

    python benchmarks/decode_peers.py examples/llama.py:decode runs/decode/plan.json --out peers.json

Peers: the eager model, and torch.compile(mode="reduce-overhead") as its documentation shows it. Each pair runs in
ABBA blocks; answers are compared first, and no time is written for a model that gives wrong ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from wavecrest import hardware
from wavecrest.measure import timing, workload
from wavecrest.measure.workload import Call
from wavecrest.optimizer.gate import Gate, failures
from wavecrest.optimizer.plan import Plan, replay
from wavecrest.records import files, provenance


def main() -> None:
    """Measure and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--device", default=None)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    loaded = workload.load(args.workload, device=args.device)
    device = hardware.detect(loaded.device)
    plan = Plan.load(args.plan)
    ours = replay(plan, loaded, verify=False, because=plan.match(loaded, device), strict=False).model
    peers = {"eager": loaded.model, "reduce-overhead": torch.compile(loaded.model, mode="reduce-overhead")}
    gate = Gate.prepare(loaded)
    problem = failures(gate.check(ours))
    result: dict[str, object] = {
        "header": provenance.header(device).model_dump(),
        "workload": args.workload,
        "steps": plan.stack,
        "answers": problem or "pass",
        "pairs": [],
    }
    for name, peer in peers.items():
        for bucket in loaded.buckets:
            row: dict[str, object] = {
                "peer": name,
                "bucket": bucket,
                "peer_answers": failures(gate.check(peer)) or "pass",
            }
            if not problem:
                pair = timing.measure_pair(
                    Call(loaded, bucket, peer), Call(loaded, bucket, ours), device=loaded.device, seconds=args.seconds
                )
                row |= {
                    "peer_ms": pair.base_ms,
                    "ours_ms": pair.new_ms,
                    "speedup": pair.ratio,
                    "ci": [pair.ci.low, pair.ci.high],
                    "blocks": pair.n,
                    "peer_samples": list(pair.base),
                    "ours_samples": list(pair.new),
                }
            result["pairs"].append(row)  # type: ignore[attr-defined]
    files.write_document(args.out, result)


if __name__ == "__main__":
    main()
