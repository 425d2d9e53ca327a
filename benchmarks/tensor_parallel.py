"""A Llama-shaped model over the GPUs of one host: eager, compiled and optimized, beside the same model on one GPU.

    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel --out tensor_parallel.json

Every call is timed on all ranks by events between barriers, and a sample is the slowest rank's. Variants take turns
within a round; the number of rounds is fixed, so that ranks make the same calls. `shard` is the optimized model without
communication: the difference to `optimized` is what communication costs. `--tiny` and gloo try the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import wavecrest
from wavecrest.integrations import distributed
from wavecrest.records import provenance

# hidden, intermediate, layers, heads, key and value heads, vocabulary: Llama 3.1 8B
SIZES = (4096, 14336, 32, 32, 8, 128256)
TINY = (64, 128, 2, 4, 2, 128)
# name: (batch, tokens)
CASES = {"prefill 2048": (1, 2048), "decode 1": (1, 1), "decode 16": (16, 1)}


def model_of(sizes: tuple[int, ...], device: str, dtype: torch.dtype) -> torch.nn.Module:
    """A model of random weights, the same on every rank."""
    import transformers

    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = transformers.LlamaConfig(**dict(zip((*names, "vocab_size"), sizes, strict=True)))
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.LlamaForCausalLM(config).to(dtype).eval()


def timed(call: Callable[[], Any], device: str) -> float:
    """Milliseconds of one call on the slowest rank."""
    dist.barrier()
    if device == "cpu":
        begin = time.perf_counter()
        call()
        spent = (time.perf_counter() - begin) * 1e3
    else:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        spent = first.elapsed_time(last)
    slowest = torch.tensor(spent, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def measure(calls: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, list[float]]:
    """Samples in ms by variant, one a round, behind three rounds that are not kept."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 3):
        for name, call in calls.items():
            spent = timed(call, device)
            if number >= 3:
                samples[name].append(spent)
    return samples


def main() -> None:
    """Measure all cases and write the record on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for wavecrest.optimize of each case")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    device = f"cuda:{rank}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(rank)
    sizes, dtype = TINY if options.tiny else SIZES, torch.bfloat16 if on_gpu else torch.float32
    record: dict[str, Any] = {"ranks": dist.get_world_size(), "sizes": sizes, "dtype": str(dtype), "cases": {}}
    for name, (batch, tokens) in CASES.items():
        ids = torch.randint(0, sizes[-1], (batch, min(tokens, 64) if options.tiny else tokens), device=device)
        dist.broadcast(ids, 0)
        inputs = {"input_ids": ids, "use_cache": False}
        whole = model_of(sizes, device, dtype)
        one = distributed.on_rank_zero(lambda m=whole, i=inputs: _alone(m, i, options.budget))
        parallel = distributed.parallelize(whole)
        result = distributed.optimize(parallel, inputs, budget=options.budget)
        compiled = torch.compile(parallel)

        def shard(model: torch.nn.Module = result.model, inputs: dict[str, Any] = inputs) -> Any:
            with distributed.gather_local(model):
                return model(**inputs)

        calls = {
            "eager": lambda m=parallel, i=inputs: m(**i),
            "compiled": lambda m=compiled, i=inputs: m(**i),
            "optimized": lambda m=result.model, i=inputs: m(**i),
            "shard": shard,
        }
        with torch.no_grad():
            samples = measure(calls, options.rounds, device)
        kept = [step.id for step in result.plan.kept()]
        record["cases"][name] = {"ms": samples, "one_gpu_ms": one, "kept": kept, "refused": result.refused}
    if rank == 0:
        record["versions"] = provenance.versions().model_dump()
        record["wavecrest"] = wavecrest.__version__
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _alone(model: torch.nn.Module, inputs: dict[str, Any], budget: float) -> float:
    """Median ms of the optimized model on one GPU."""
    result = wavecrest.optimize(model, inputs, budget=budget)
    found = result.record.result
    # without a kept step there is nothing to compare, and the model is as it was
    return found.speed[0].new_ms if found and found.speed else result.record.baseline[0].measurement.median


if __name__ == "__main__":
    main()
