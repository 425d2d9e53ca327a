"""Llama 3.1 8B of the zoo over the GPUs of one host: eager, compiled and optimized, beside the same model on one GPU.

    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel [CASE …] [--out FILE.jsonl.gz]

A step of decoding has a static key-value cache with a prompt in it, of which each rank holds its own heads. The model
on one GPU is measured first, on rank 0, while the others wait. A call of the parallel model is timed on all ranks by
events behind a barrier, and a sample is the slowest rank's; variants take turns, and the number of rounds is fixed, so
that ranks make the same calls. `shard` is the optimized model without communication: the difference to `optimized` is
what communication costs. Answers are held to those of one GPU: no further from the model in higher precision than twice
what the eager model on one GPU is. No variant begins after `--seconds`. `--tiny` and gloo try the script on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.zoo import registry
from benchmarks.zoo.registry import Site, Size
from torch import Tensor, nn

from wavecrest import hardware
from wavecrest.errors import WavecrestError
from wavecrest.graphs.capture import CapturedModule
from wavecrest.integrations import distributed
from wavecrest.measure import numerics
from wavecrest.measure.workload import Buckets, Call, Workload
from wavecrest.optimizer import api
from wavecrest.optimizer.options import Options
from wavecrest.records import files, provenance

# name: model of the zoo, sequences and tokens (of the prompt before a step of decoding)
CASES = {
    "decode 1": ("llama-8b-decode", Size(1, 1024, "bfloat16")),
    "decode 16": ("llama-8b-decode-16", Size(16, 1024, "bfloat16")),
    "prefill 2048": ("llama-8b-prefill", Size(1, 2048, "bfloat16")),
}
# of the parallel model, and of the one on one GPU
VARIANTS = ("eager", "compiled", "optimized", "shard")
ONE_GPU = ("one gpu eager", "one gpu optimized")
# rounds that are not kept
FIRST_ROUNDS = 3
# a rank that does not come to a barrier or a sum within this time ends the job: compiling takes a minute
TIMEOUT = timedelta(minutes=3)

Row = dict[str, Any]


def once(call: Call) -> float:
    """Milliseconds of one call on this rank."""
    call.prepare()
    if call.workload.device == "cpu":
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    call()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last))


def on_all(call: Call) -> float:
    """Milliseconds of one call on the slowest rank."""
    call.prepare()
    dist.barrier()
    slowest = torch.tensor(once(call), device=call.workload.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def measure(calls: dict[str, Call], rounds: int, timed: Callable[[Call], float]) -> dict[str, Row]:
    """By variant the samples in ms, one a round, and their median."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + FIRST_ROUNDS):
        for name, call in calls.items():
            spent = timed(call)
            if number >= FIRST_ROUNDS:
                samples[name].append(round(spent, 5))
    return {name: {"median_ms": statistics.median(kept), "samples": kept} for name, kept in samples.items()}


def is_captured(model: nn.Module) -> bool:
    """Whether calls of a model replayed a graph, all of them."""
    graphs = [module for module in model.modules() if isinstance(module, CapturedModule)]
    return bool(graphs) and not any(module.eager_calls for module in graphs)


class Answers:
    """On rank 0 what the model on one GPU answers, and how far others may be from its copy in higher precision."""

    def __init__(self, workload: Workload, finish: Callable[[nn.Module], Workload]) -> None:
        (self.bucket,) = workload.buckets
        wide = torch.float64 if workload.dtype == "float32" else torch.float32
        self.right: Tensor = finish(copy.deepcopy(workload.model).to(wide)).run(self.bucket)
        own = self.error(workload.run(self.bucket))
        self.limit = max(2 * own, numerics.tolerance("model", workload.dtype).relative)

    def error(self, answer: Tensor) -> float:
        """‖answer − right‖ / ‖right‖; infinite where one of them is not finite and the other is."""
        found = numerics.compare(answer, self.right)
        return found.relative if found.nonfinite_match else float("inf")

    def judged(self, answer: Tensor) -> Row:
        """The error with its limit."""
        error = self.error(answer)
        return {"error": error, "limit": self.limit, "agrees": error <= self.limit}


class Case:
    """One case on this rank: the model on one GPU, then divided."""

    def __init__(self, name: str, options: argparse.Namespace, device: str, begin: float) -> None:
        self.name, self.options, self.begin = name, options, begin
        entry = registry.entries()[CASES[name][0]]
        size = entry.tiny if options.tiny else CASES[name][1]
        self.model, self.finish = entry.module(Site(device, size, options.tiny))
        inner: Any = self.model.inner
        if options.layers:
            inner.model.layers = inner.model.layers[: options.layers]
            inner.config.num_hidden_layers = len(inner.model.layers)
        self.about = {
            "case": name, "batch": size.batch, "length": size.length, "layers": inner.config.num_hidden_layers,
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
        }  # fmt: skip
        self.answers: Answers | None = None

    def rows(self) -> list[Row]:
        """A row for each variant."""
        one = distributed.on_rank_zero(self._one_gpu)
        # weights and graphs of the optimized model on one GPU are in the way of the next
        torch._dynamo.reset()
        gc.collect()
        return [self.about | {"variant": name} | row for name, row in (one | self._parallel()).items()]

    def _left_out(self, *names: str) -> str:
        """Why all of some variants are left out, the same on every rank, or an empty string."""
        if not set(names) & set(self.options.variants):
            return "not asked for"
        return late(self.begin, self.options.seconds)

    def _asked(self) -> Row:
        """Options of each run of the optimizer."""
        steps = self.options.steps
        return {"budget": self.options.budget} | ({"steps": tuple(steps)} if steps else {})

    def _one_gpu(self) -> dict[str, Row]:
        workload = self.finish(self.model)
        self.answers = Answers(workload, self.finish)
        models: dict[str, nn.Module] = {"one gpu eager": workload.model}
        steps: dict[str, Row] = {}
        if "one gpu optimized" in self.options.variants:
            # as the ranks do it, which start no other processes
            done = api.run(workload, Options(skip=("environment",), **self._asked()))
            models["one gpu optimized"] = done.model
            steps["one gpu optimized"] = {"kept": done.plan.stack}
        calls = {name: Call(workload, self.answers.bucket, model) for name, model in models.items()}
        rows = measure(calls, self.options.rounds, once)
        for name, call in calls.items():
            rows[name] |= steps.get(name, {}) | {"captured": is_captured(models[name])}
            rows[name] |= self.answers.judged(workload.run(call.bucket, call.function))
        rows |= {name: {"left_out": "not asked for"} for name in ONE_GPU if name not in rows}
        return rows

    def _parallel(self) -> dict[str, Row]:
        distributed.parallelize(self.model.inner)  # type: ignore[arg-type]
        workload = self.finish(self.model)
        (bucket,) = workload.buckets
        models: dict[str, nn.Module] = {}
        steps: dict[str, Row] = {}
        left_out = {name: {"left_out": "not asked for"} for name in VARIANTS}
        for names in (("eager",), ("compiled",), ("optimized", "shard")):
            if reason := self._left_out(*names):
                left_out |= {name: {"left_out": reason} for name in names}
            elif names == ("eager",):
                models["eager"] = self.model
            elif names == ("compiled",):
                # the model itself stays eager
                models["compiled"] = torch.compile(self.model, dynamic=False)  # type: ignore[assignment]
            else:
                made, steps = self._planned(workload)
                models |= {name: made[name] for name in names if name in self.options.variants}
        calls = {name: Call(workload, bucket, model) for name, model in models.items()}
        firsts = {name: round(on_all(call) / 1e3, 3) for name, call in calls.items()}
        rows = measure(calls, self.options.rounds, on_all) if calls else {}
        for name, call in calls.items():
            judged = {} if name == "shard" else self._judged(workload.run(bucket, call.function))
            rows[name] |= {"first_call_s": firsts[name], "captured": is_captured(models[name])}
            rows[name] |= steps.get(name, {}) | judged
        return left_out | rows

    def _planned(self, workload: Workload) -> tuple[dict[str, nn.Module], dict[str, Row]]:
        inputs = Buckets(workload.buckets)
        result = distributed.optimize(self.model, inputs, reset=workload.reset, **self._asked())
        # a captured graph holds its communication, so that the shard without it is a model of its own
        with distributed.gather_local(self.model):
            shard = self.model if result.refused else result.plan.apply(self.model, inputs)
        row: Row = {"kept": [] if result.refused else result.plan.stack, "refused": result.refused}
        return {"optimized": result.model, "shard": Alone(shard)}, {"optimized": row, "shard": dict(row)}

    def _judged(self, answer: Tensor) -> Row:
        """The parallel model's answer beside that of one GPU, and whether all ranks have the same."""
        first = answer.clone()
        dist.broadcast(first, 0)
        same = torch.tensor(int(torch.equal(first, answer)), device=answer.device)
        dist.all_reduce(same, dist.ReduceOp.MIN)
        answers = self.answers
        judged: Row = distributed.on_rank_zero(lambda: answers.judged(answer) if answers else {})
        return judged | {"ranks_agree": bool(same)}


def late(begin: float, seconds: float) -> str:
    """That more than `seconds` have gone on rank 0, the same on every rank, or an empty string."""
    spent = distributed.on_rank_zero(lambda: time.perf_counter() - begin)
    return f"{spent:.0f} s of {seconds:.0f} s had gone" if spent > seconds else ""


class Alone(nn.Module):
    """A shard whose calls put nothing together over ranks.

    A captured graph holds no communication after the call that captured it. To walk the modules of 32 layers at every
    call would delay its replay.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self._replays = inner, False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's part of the answer."""
        if self._replays:
            return self.inner(*args, **kwargs)
        with distributed.gather_local(self.inner):
            answer = self.inner(*args, **kwargs)
        self._replays = is_captured(self.inner)
        return answer


def main() -> int:
    """Measure, print, and write with --out on rank 0; 1 if an answer is not that of one GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; all of them without one")
    parser.add_argument("--variants", nargs="+", choices=[*ONE_GPU, *VARIANTS], default=[*ONE_GPU, *VARIANTS])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds for each wavecrest.optimize (default 30)")
    parser.add_argument("--steps", nargs="+", metavar="STEP", help="ids of the steps to try (default: all)")
    parser.add_argument("--seconds", type=float, default=240.0, help="no variant begins after these (default 240)")
    parser.add_argument("--layers", type=int, help="of the model; all without it")
    parser.add_argument("--tiny", action="store_true", help="a model for tests, in float32 on a CPU")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    options = parser.parse_args()
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    begin = time.perf_counter()
    rank, on_gpu = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.is_available()
    device = f"cuda:{rank}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", timeout=TIMEOUT, device_id=torch.device(device) if on_gpu else None
    )
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, hardware.detect(device).name)
    rows: list[Row] = []
    for name in options.cases or CASES:
        reason = late(begin, options.seconds)
        all_left_out: list[Row] = [{"case": name, "variant": one, "left_out": reason} for one in (*ONE_GPU, *VARIANTS)]
        made = all_left_out if reason else Case(name, options, device, begin).rows()
        rows += made
        # with a graph alive that has collectives, NCCL 2.28.9 does not end its process group (two H200s, 2026-11-26)
        gc.collect()
        if rank == 0:
            show(made)
    wrong = [f"{row['case']} {row['variant']}" for row in rows if not row.get("agrees", True)]
    wrong += [f"{row['case']} {row['variant']} by rank" for row in rows if not row.get("ranks_agree", True)]
    if rank == 0:
        sys.stdout.write(f"answers that are not those of one GPU: {', '.join(wrong) or 'none'}\n")
        if options.out is not None:
            command = provenance.command_line().replace("tensor_parallel.py", "benchmarks.tensor_parallel", 1)
            command = f"torchrun --nproc-per-node {len(names)} -m {command}"
            header = provenance.header(hardware.detect(device), command=command).model_dump(mode="json")
            about = {"ranks": len(names), "devices": names, "backend": dist.get_backend(), "nccl": nccl(on_gpu)}
            options.out.parent.mkdir(parents=True, exist_ok=True)
            files.write_document(options.out, {"kind": "tensor-parallel", "header": header, **about, "rows": rows})
    dist.barrier()
    dist.destroy_process_group()
    return 1 if wrong else 0


def nccl(on_gpu: bool) -> str | None:
    """The version of NCCL or RCCL; None on a CPU."""
    return ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None


def show(rows: list[Row]) -> None:
    """Print a line for each row, without samples."""
    for row in rows:
        shown = " ".join(f"{name}={value}" for name, value in row.items() if name != "samples")
        sys.stdout.write(f"{shown}\n")
    sys.stdout.flush()


def ended(error: BaseException) -> int:
    """Say in one line why this rank ends, behind the traceback of what is no error of wavecrest."""
    if not isinstance(error, WavecrestError):
        traceback.print_exception(error)
    first = (str(error).strip().splitlines() or ["(no message)"])[0]
    sys.stderr.write(f"error: rank {os.environ.get('RANK', '0')} ends: {type(error).__name__}: {first}\n")
    return 3


if __name__ == "__main__":
    try:
        code = main()
    except Exception as error:
        code = ended(error)
        sys.stderr.flush()
        # past destructors, which wait for the other ranks; torchrun then ends those
        os._exit(code)
    sys.exit(code)
