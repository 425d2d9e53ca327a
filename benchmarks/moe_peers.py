"""The experts of sparse layers by wavecrest's op beside transformers' ways to run them, interleaved.

    python -m benchmarks.moe_peers --out DATE_moe-peers_moe.jsonl.gz
    python -m benchmarks.moe_peers --small --device cpu --out try.json      # seconds, on a CPU too

The layers are those of Mixtral 8x7B and Qwen3-30B-A3B with random weights in bfloat16, and each token's experts are
drawn at random. Peers: transformers' `grouped_mm` (its default), `batched_mm` where the weights that it gathers fit
into 2 GiB, and `eager`, the loop over experts. `graph` is the same work as a CUDA graph, without the host's part.
Answers are held against the op's definition in float32 first; what is wrong has no time. Times are with cold caches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wavecrest import hardware
from wavecrest.bench import ops as bench_ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.keys import dtype_name
from wavecrest.measure import cuda_graph, interleaved, numerics, timing
from wavecrest.nn import Experts
from wavecrest.ops._moe.call import MoeCall
from wavecrest.records import files, provenance

Row = dict[str, Any]
Work = Callable[[], Tensor]

OURS = "wavecrest"
PEERS = ("grouped_mm", "batched_mm", "eager")
# bytes of weights that batched_mm may copy in a call
GATHERED = 2 << 30
# seconds of a case, all of its works together
SECONDS = 4.0


class Layer(NamedTuple):
    """A sparse layer of a transformers model; `topk` experts of a token."""

    model: str
    experts: int
    topk: int
    hidden: int
    intermediate: int


LAYERS = {
    "mixtral-8x7b": Layer("mixtral", 8, 2, 4096, 14336),
    "qwen3-30b-a3b": Layer("qwen3_moe", 128, 8, 2048, 768),
}
TOKENS = (1, 16, 64, 2048)
SMALL = {"mixtral": Layer("mixtral", 4, 2, 32, 48), "qwen3": Layer("qwen3_moe", 16, 4, 32, 24)}
SMALL_TOKENS = (1, 5)


def experts_of(layer: Layer, device: str, dtype: torch.dtype) -> Any:
    """transformers' module for the experts of a layer, with random weights."""
    from transformers import MixtralConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = {"hidden_size": layer.hidden, "num_experts_per_tok": layer.topk}
    made: nn.Module
    with torch.device(device):
        if layer.model == "mixtral":
            config = MixtralConfig(**sizes, num_local_experts=layer.experts, intermediate_size=layer.intermediate)
            made = MixtralExperts(config)
        else:
            config = Qwen3MoeConfig(**sizes, num_experts=layer.experts, moe_intermediate_size=layer.intermediate)
            made = Qwen3MoeExperts(config)
    made = made.to(dtype).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for weight in made.parameters():
        weight.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
    return made


def routed(layer: Layer, tokens: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts, and the weights of these."""
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(tokens, layer.hidden, generator=generator, device=device).to(dtype)
    scores = torch.randn(tokens, layer.experts, generator=generator, device=device).softmax(-1)
    weights, ids = scores.topk(layer.topk, dim=-1)
    return x, ids, weights / weights.sum(-1, keepdim=True)


def by_transformers(experts: Any, way: str, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The experts by one of transformers' implementations."""
    experts.config._experts_implementation = way
    # it may write to the experts' numbers
    made: Tensor = experts(given[0], given[1].clone(), given[2])
    return made


def judge(name: str, y: Tensor, wanted: Tensor) -> str:
    """The fault of a result, or an empty text; peers may be off by ten times the op's limit."""
    limits, slack = numerics.tolerance("gemm", dtype_name(y)), 1.0 if name.startswith(OURS) else bench_ops.PEER_SLACK
    found = numerics.compare(y, wanted)
    fine = found.within(numerics.Tolerance(slack * limits.relative, slack * limits.worst))
    return "" if fine else f"wrong: error {found.relative:.2g}, at worst {found.worst:.2g}"


def captured(work: Work, name: str) -> Work:
    """A work as a CUDA graph: a replay, and the result that it writes."""
    cuda_graph.warm_up(work)
    graph, result = cuda_graph.record(work, torch.cuda.graph_pool_handle(), name)

    def replay() -> Tensor:
        graph.replay()
        made: Tensor = result
        return made

    return replay


def works_of(layer: Layer, experts: Any, given: tuple[Tensor, Tensor, Tensor], device: str) -> dict[str, Work]:
    """The ways to run a case, by name."""
    ours = Experts.from_module(experts)
    gathered = given[1].numel() * 3 * layer.hidden * layer.intermediate * given[0].element_size()
    works: dict[str, Work] = {OURS: partial(ours, *given)}
    for way in PEERS:
        if way != "batched_mm" or gathered <= GATHERED:
            works[way] = partial(by_transformers, experts, way, given)
    return works


def tried(name: str, work: Work, wanted: Tensor) -> Row:
    """A first call, judged."""
    try:
        problem = judge(name, work(), wanted)
    # whatever a peer raises is what is reported of it
    except Exception as error:
        problem = f"raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return {"problem": problem} if problem else {}


@torch.no_grad()
def case_of(layer: Layer, tokens: int, experts: Any, device: str, copy_gbps: float) -> Row:
    """The row of a layer and a number of tokens."""
    op = registry.get("moe")
    given = routed(layer, tokens, device, experts.down_proj.dtype)
    call = MoeCall(given[0], experts.gate_up_proj, experts.down_proj, given[2], given[1])
    wanted = op.reference(call._replace(x=given[0].float()))
    rows: dict[str, Row] = {}
    works: dict[str, Work] = {}
    for name, work in works_of(layer, experts, given, device).items():
        rows[name] = tried(name, work, wanted)
        if rows[name]:
            continue
        works[name] = work
        # the loop over experts reads their numbers on the host: it cannot be captured
        if device != "cpu" and name != "eager":
            graph = f"{name} graph"
            try:
                replay = captured(work, graph)
            except Exception as error:
                rows[graph] = {"problem": f"cannot be captured: {type(error).__name__}: {str(error)[:200]}"}
            else:
                rows[graph] = tried(graph, replay, wanted)
                works |= {} if rows[graph] else {graph: replay}
    cost = op.study.cost(call)
    taken = interleaved.measure(list(works.values()), device=device, seconds=SECONDS)
    for name, exact in zip(works, taken.samples, strict=True):
        samples = [round(one, 6) for one in exact]
        interval, ms = timing.bootstrap_median(samples), statistics.median(samples)
        rows[name] = {
            "ms": ms, "ci": [interval.low, interval.high], "samples": samples,
            "tflops": cost.flops / ms / 1e9, "percent_of_copy": 100 * cost.bytes / ms / 1e6 / copy_gbps,
        }  # fmt: skip
    decision = op.decide(call)
    config = {} if decision.config is None else dict(decision.config.kwargs)
    return {
        "tokens": tokens, "layer": layer._asdict(), "active_experts": int(given[1].unique().numel()),
        "bytes": cost.bytes, "flops": cost.flops, "clock": taken.clock, "rounds": taken.rounds,
        "runs": f"{decision.backend} {config} ({decision.source}: {decision.reason})",
        "speedups": {suffix or "calls": speedup(rows, suffix) for suffix in ("", " graph")}, "rows": rows,
    }  # fmt: skip


def speedup(rows: dict[str, Row], suffix: str) -> Row | None:
    """The fastest of transformers' ways over ours, both as calls or both as graphs, where both have times."""
    others = {f"{name}{suffix}" for name in PEERS}
    timed = {name: row for name, row in rows.items() if "ms" in row and name in others}
    ours = rows.get(f"{OURS}{suffix}", {})
    if not timed or "ms" not in ours:
        return None
    best = min(timed, key=lambda name: timed[name]["ms"])
    ratio, interval = timing.bootstrap_speedup([(timed[best]["samples"], ours["samples"])])
    return {"best": best, "ratio": ratio, "ci": [interval.low, interval.high]}


def shown(name: str, row: Row) -> str:
    """The lines of a case, for people."""
    lines = [f"{name}: {row['active_experts']} experts, {row['bytes'] / 1e6:.1f} MB; {row['runs']}"]
    for way, one in row["rows"].items():
        if "ms" not in one:
            lines.append(f"  {way:18} {one['problem']}")
            continue
        lines.append(
            f"  {way:18} {1e3 * one['ms']:10.1f} µs  {one['percent_of_copy']:6.1f} % of a copy's bandwidth  "
            f"{one['tflops']:7.1f} TFLOP/s"
        )
    for kind, found in row["speedups"].items():
        if found is not None:
            low, high = found["ci"]
            lines.append(f"  {kind}: {found['ratio']:.2f}× the speed of {found['best']} ({low:.2f} to {high:.2f})")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Measure and write one record; it is written anew after every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=None)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try this script")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)

    device = hardware.detect(args.device)
    name, kind = device.torch_name, "cpu" if args.small else "cuda"
    dtype = torch.bfloat16 if name != "cpu" else torch.float32
    gbps, _ = bench_ops.copy_bandwidth(name, bench_ops.COPY_BYTES[kind], seconds=0.25)
    result: Row = {"header": provenance.header(device).model_dump(mode="json"), "copy_gbps": gbps, "cases": []}
    for title, layer in (SMALL if args.small else LAYERS).items():
        experts = experts_of(layer, name, dtype)
        for tokens in SMALL_TOKENS if args.small else TOKENS:
            row = {"case": f"{title} t{tokens}"} | case_of(layer, tokens, experts, name, gbps)
            result["cases"].append(row)
            files.write_document(args.out, result)
            sys.stdout.write(shown(row["case"], row))
            sys.stdout.flush()
        del experts
        if name != "cpu":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
