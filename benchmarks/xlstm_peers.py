"""xLSTM 7B, random weights of the real shapes, beside the official package with the same weights, interleaved.

    PYTHONPATH=src python -m benchmarks.xlstm_peers --out DATE_xlstm-peers_xlstm_7b.jsonl.gz [PART …]

Answers first: logits of a prompt's last token and of steps behind it, ours by the calls that are timed, are held
against the model in float32 (PyTorch's operations, the weights as they are stored): each within 1.5 times the official
package's own error, or where that has no such model that of PyTorch's operations in the model's dtype. A model that is
wrong has no times. `prefill` compares reading prompts, judged as they are timed, with the official package's default
kernel for them, `prefill-xl` with its other one; `decode…` steps: ours as `generate` replays them (which compares the
first replay with the step that is judged), the official package eager and as a graph captured by hand. A step's floor
is the bytes of weights and states over the bandwidth measured in the same process.
`decode-early`, `decode-late`: the same kernels and configurations, all or none of them started while the launch before
them runs (EARLY of `pdl.start_of`), where `decode` starts each as its configuration says; `token_sum`
is the same where they choose the same tokens. `lengths` counts what is compiled for prompts of other lengths,
`lengths-ahead` the same behind `compile_ahead`; `cold-…` starts with no compiled kernel on the disk, `…-again` with
those that the former has left. `named`: prompts with the kernels that released checkpoints name.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks import parts
from benchmarks.parts import Part, Report, Row
from torch import Tensor

from wavecrest import hardware
from wavecrest.bench import ops as bench_ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.keys import dtype_name
from wavecrest.dispatch.tuned import Config
from wavecrest.measure import cuda_graph, interleaved, numerics, timing
from wavecrest.models.xlstm import generation, xLSTMLarge, xLSTMLargeConfig
from wavecrest.models.xlstm.generation import Decoder
from wavecrest.models.xlstm.kernels import Kernels
from wavecrest.models.xlstm.quantize import quantize
from wavecrest.models.xlstm.sampling import Sampling
from wavecrest.ops import PackedWeight
from wavecrest.records import provenance

SEVEN_B = {"embedding_dim": 4096, "num_heads": 8, "num_blocks": 32, "vocab_size": 50304}
SMALL = {"embedding_dim": 64, "num_heads": 2, "num_blocks": 2, "vocab_size": 211}
# rows and tokens of prompts
PROMPTS = {"1x2048": (1, 2048), "4x2048": (4, 2048), "1x16384": (1, 16384)}
SMALL_PROMPTS = {"1x48": (1, 48), "2x32": (2, 32)}
BATCHES = (1, 16)
# lengths in the order in which they come: of whole chunks, of none, one token more
LENGTHS = (2048, 2047, 1024, 1000, 777, 333, 129, 64, 40)
SMALL_LENGTHS = (32, 31, 17)
# and those behind `compile_ahead`, which was told of none but 2,048
MORE_LENGTHS = (17, 16, 9, 7, 3, 1, 4096, 16384)
NEW_TOKENS = 256
# behind each prompt that is judged, and how many times the others' error ours may have
STEPS, ALLOWED = 5, 1.5
# steps that follow each other without the host, as in `generate`: a single step begins with a launch of its graph
IN_A_ROW = 8
# of rows that start early: two steps of weights are fetched before the launch waits
EARLY = 3
# the official kernels for prompts, with their chunk size; the first is the default, which ours is compared with
OFFICIAL = {"limit_chunk": ("chunkwise--triton_limit_chunk", 64), "xl_chunk": ("chunkwise--triton_xl_chunk", 128)}
# those whose last states, which a model needs, Triton 3.6 aborts at in LLVM's vectorizer with every chunk size: what
# compiles is without LLVM's passes (of limit_chunk that takes 3 to 5 % longer; H200, 2026-11-24)
ABORTS = {"xl_chunk"}
NATIVE = {"limit_chunk": ("chunkwise--native_autograd", 16), "xl_chunk": ("chunkwise--native_custbw", 16)}
# the kernels that the files of xLSTM 7B name
RELEASED = {
    "chunkwise_kernel": "chunkwise--triton_xl_chunk", "sequence_kernel": "native_sequence__triton",
    "step_kernel": "triton", "chunk_size": 64,
}  # fmt: skip
# where the cold starts have their compiled kernels
COLD = Path(tempfile.gettempdir()) / "wavecrest_cold_start"


@dataclasses.dataclass(frozen=True)
class Place:
    """The device and the size of the model that a part runs on."""

    device: str
    small: bool

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights; float32 on a CPU, where the official kernels take one dtype alone."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    def wait(self) -> None:
        """Wait until the device has done its work."""
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

    def tokens(self, *shape: int) -> Tensor:
        """Random tokens."""
        generator = torch.Generator(self.device).manual_seed(sum(shape))
        return torch.randint(0, sizes(self)["vocab_size"], shape, generator=generator, device=self.device)


def start(report: Report, args: argparse.Namespace) -> Place:
    """The place of a part; the header is reported."""
    device = hardware.detect(args.device)
    report.header(provenance.header(device).model_dump(mode="json"))
    return Place(device.torch_name, args.small)


def sizes(place: Place) -> dict[str, int]:
    """The sizes of the model."""
    return SMALL if place.small else SEVEN_B


@torch.no_grad()
def fill(model: xLSTMLarge) -> None:
    """Weights in which every part of a block matters: fresh ones have gates that see nothing, cells that add 1e-5.

    What a block adds is small beside what it adds to, as in a trained model: else rounding grows from block to block,
    and hides what is wrong.
    """
    generator = torch.Generator(model.embedding.weight.device).manual_seed(0)
    added = 1 / math.sqrt(2 * model.config.num_blocks)
    for name, parameter in model.named_parameters():
        if name == "embedding.weight":
            parameter.normal_(generator=generator)
        elif parameter.ndim == 2:
            scale = added if name.endswith(("out_proj.weight", "proj_down.weight")) else 1.0
            parameter.normal_(std=scale / math.sqrt(parameter.shape[1]), generator=generator)
        elif name.endswith("preact.bias"):
            # input gates about 0, forget gates about 2
            parameter.zero_()
            parameter[parameter.shape[0] // 2 :] = 2.0
        else:
            parameter.normal_(mean=1.0, std=0.25, generator=generator)


def ours(place: Place, dtype: torch.dtype | None = None, **changes: Any) -> xLSTMLarge:
    """Our model with the same weights every time."""
    config = xLSTMLargeConfig(
        **sizes(place), mode="inference", return_last_states=True, weight_mode="fused", eos_token_id=None,
        force_bos_token_insert=False, **changes,
    )  # fmt: skip
    model = xLSTMLarge(config, device=place.device, dtype=place.dtype).eval().requires_grad_(False)
    fill(model)
    return model.to(dtype)


def official(model: xLSTMLarge, place: Place, kernel: str = "limit_chunk") -> Any:
    """The official package's model over our model's weights, which are not copied."""
    from xlstm import xlstm_large

    cpu = place.device == "cpu"
    name, chunk = (NATIVE if cpu else OFFICIAL)[kernel]
    config = xlstm_large.xLSTMLargeConfig(
        **sizes(place), mode="inference", return_last_states=True, weight_mode="fused", chunkwise_kernel=name,
        chunk_size=chunk, sequence_kernel=f"native_sequence__{'native' if cpu else 'triton'}",
        step_kernel="native" if cpu else "triton",
    )  # fmt: skip
    with torch.device("meta"):
        peer = xlstm_large.xLSTMLarge(config)
    peer.load_state_dict(model.state_dict(), assign=True)
    return peer.eval().requires_grad_(False)


def reference(model: xLSTMLarge, place: Place, dtype: torch.dtype = torch.float32) -> xLSTMLarge:
    """The same model in `dtype`, weights as they are stored, unpacked, and the mLSTM in PyTorch's operations."""
    found = ours(
        place, dtype, chunkwise_kernel="chunkwise--native_autograd", step_kernel="native",
        sequence_kernel="native_sequence__native",
    )  # fmt: skip
    stored = dict(model.named_parameters())
    for name, parameter in found.named_parameters():
        value = stored[name]
        parameter.copy_(value.dequantize_float32() if isinstance(value, PackedWeight) else value)
    return found


def answers(model: Any, tokens: Tensor, steps: int, timed: bool = False) -> dict[str, Tensor]:
    """Logits of a prompt's last token [B, 1, V], and of steps behind it [B, steps, V], given the tokens' last ones.

    `timed`: by the calls that are timed, which is our model's own alone; else by its plain ones, as the official one's.
    """
    head = tokens.shape[1] - steps
    if timed:
        logits, state = model(tokens[:, :head], last_only=True, return_last_states=True)
    else:
        logits, state = model(tokens[:, :head])
    prompt, found = logits[:, -1:].float(), []
    for place in range(head, tokens.shape[1]):
        if timed:
            logits = model.decode(tokens[:, place], state).unsqueeze(1)
        else:
            logits, state = model(tokens[:, place : place + 1], state)
        found.append(logits.float())
    return {"prompt": prompt, "steps": torch.cat(found, 1)}


def judge(report: Report, place: Place, model: xLSTMLarge, peers: dict[str, Any], prompts: list[Tensor]) -> bool:
    """Report how far models are from the one in float32; False where ours is further than it may be.

    `prompts`: [B, S + STEPS] each; prompts of S tokens, and steps behind them.
    """
    plain = reference(model, place)
    wanted = [answers(plain, tokens, STEPS) for tokens in prompts]
    del plain
    # dtypes that values are rounded to between layers, and from step to step
    rounded = (dtype_name(model.embedding.weight), str(model.config.state_dtype).removeprefix("torch."))
    least = max(numerics.tolerance("model", dtype).relative for dtype in rounded)
    # what rounding every step to the model's dtype makes of these weights, where no peer has the same
    others = peers or {"unpacked": reference(model, place, place.dtype)}
    errors: dict[str, dict[str, float]] = {}
    for name, one in {**others, "wavecrest": model}.items():
        errors[name] = dict.fromkeys(("prompt", "steps"), 0.0)
        for tokens, right in zip(prompts, wanted, strict=True):
            for part, found in answers(one, tokens, STEPS, name == "wavecrest").items():
                each = numerics.compare(found, right[part])
                errors[name][part] = max(errors[name][part], each.relative if each.nonfinite_match else math.inf)
    allowed = {part: max(least, ALLOWED * max(errors[name][part] for name in others)) for part in ("prompt", "steps")}
    del others
    beyond = [
        f"{part} {errors['wavecrest'][part]:.2g}, allowed {most:.2g}"
        for part, most in allowed.items()
        if not errors["wavecrest"][part] <= most
    ]
    report.row("answers", verdict=f"wrong: {'; '.join(beyond)}" if beyond else "right", allowed=allowed, errors=errors)
    empty(place)
    return not beyond


def empty(place: Place) -> None:
    """Give back memory that nothing holds, and begin to count the most that is taken anew."""
    if place.device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(place.device)


def most_memory(place: Place) -> float | None:
    """GiB taken at most since `empty`."""
    return None if place.device == "cpu" else round(torch.cuda.max_memory_allocated(place.device) / 2**30, 2)


def first_call(place: Place, work: Callable[[], Any]) -> Row:
    """One call by the clock of the host, and the most memory that was taken."""
    empty(place)
    begin = time.perf_counter()
    work()
    place.wait()
    return {"first_s": round(time.perf_counter() - begin, 3), "gib": most_memory(place)}


def paired(place: Place, base: Callable[[], Any], new: Callable[[], Any], seconds: float) -> Row:
    """Two pieces of work in ABBA blocks."""
    pair = timing.measure_pair(base, new, device=place.device, min_blocks=5, seconds=seconds)
    return {
        "official_ms": pair.base_ms, "wavecrest_ms": pair.new_ms, "ratio": pair.ratio,
        "ratio_ci": [pair.ci.low, pair.ci.high], "blocks": pair.n, "clock": pair.clock,
        "official_samples": list(pair.base),
        "wavecrest_samples": list(pair.new),
    }  # fmt: skip


def alone(place: Place, work: Callable[[], Any], seconds: float = 2.0) -> Row:
    """One piece of work by itself: the device's span and the host's clock."""
    found = timing.measure(work, device=place.device, min_samples=8, seconds=seconds)
    return {"ms": found.median, "wall_ms": statistics.median(found.wall), "unstable": found.unstable, "n": found.n}


def in_a_row(place: Place, work: Callable[[], Any]) -> float:
    """Milliseconds of a step among IN_A_ROW."""

    def steps() -> None:
        for _ in range(IN_A_ROW):
            work()

    return float(alone(place, steps, 1.0)["ms"]) / IN_A_ROW


def peer_of(report: Report, place: Place, model: xLSTMLarge, kernel: str = "limit_chunk") -> Any:
    """The official model; None where it is not installed, which is reported."""
    try:
        return official(model, place, kernel)
    except ImportError as error:
        report.row(f"official {kernel}", problem=f"not installed: {error}")
        return None


@contextlib.contextmanager
def unoptimized() -> Iterator[None]:
    """Triton compiles without LLVM's passes."""
    os.environ["DISABLE_LLVM_OPT"] = "1"
    try:
        yield
    finally:
        del os.environ["DISABLE_LLVM_OPT"]


@torch.no_grad()
def prefill(kernel: str, report: Report, args: argparse.Namespace) -> None:
    """Prompts: logits of the last token and states, from nothing; the official package's logits are of all tokens."""
    place = start(report, args)
    model = ours(place)
    peer = peer_of(report, place, model, kernel)
    shapes = SMALL_PROMPTS if place.small else PROMPTS
    prompts = [place.tokens(batch, length + STEPS) for batch, length in shapes.values()]
    peers = {} if peer is None else {"official": peer}
    if not report.at("answers"):
        return
    if peer is not None and kernel in ABORTS:
        with unoptimized():
            for tokens in prompts:
                peer(tokens[:, :-STEPS])
    if not judge(report, place, model, peers, prompts):
        return
    linear = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name)
    for case, shape in shapes.items():
        if report.has(case) or not report.at(case):
            continue
        tokens = place.tokens(*shape)
        work = partial(model, tokens, last_only=True, return_last_states=True)
        row: Row = {"wavecrest": first_call(place, work)}
        if peer is None:
            row |= {"wavecrest_ms": alone(place, work)["ms"]}
        else:
            row["official"] = first_call(place, partial(peer, tokens))
            row |= paired(place, partial(peer, tokens), work, 12.0)
        # two operations for each weight and token; those of the logits, and behind the last mLSTM, for one token a row
        once = model.lm_head.weight.numel() + behind_last(model)
        flops = 2 * shape[0] * ((linear - once) * shape[1] + once)
        report.row(case, tflops=round(flops / row["wavecrest_ms"] / 1e9, 1), **row)


def behind_last(model: xLSTMLarge) -> int:
    """Number of weights of the GEMMs behind the last block's mLSTM, without those of the logits."""
    block = model.backbone.blocks[-1]
    products = [block.mlstm_layer.out_proj, *block.ffn.children()]
    return sum(int(one.weight.numel()) for one in products)


def step_bytes(model: xLSTMLarge, batch: int) -> int:
    """Least bytes that a step moves: all weights but the embedding once, states in and out."""
    weights = sum(
        one.bytes_ if isinstance(one, PackedWeight) else one.nbytes
        for name, one in model.named_parameters()
        if name != "embedding.weight"
    )
    state = model.empty_state(batch)
    return weights + 2 * sum(part.nbytes for layer in state.values() for part in layer if part is not None)


def bandwidth(place: Place) -> Row:
    """GB/s of a large copy (read and written) and of a large read; the floor is by the larger one."""
    size = bench_ops.COPY_BYTES["cpu" if place.small else "cuda"]
    copied, clock = bench_ops.copy_bandwidth(place.device, size, seconds=0.25)
    source = torch.randn(size // 4, device=place.device)
    taken = interleaved.measure([source.sum], device=place.device, seconds=0.25)
    read = source.nbytes / statistics.median(taken.samples[0]) / 1e6
    return {"copy_gbps": round(copied, 1), "read_gbps": round(read, 1), "bandwidth_clock": clock}


def our_decoder(model: xLSTMLarge, tokens: Tensor, capture: bool) -> Decoder:
    """The decoder that `generate` uses for its steps, ready behind a prompt."""
    logits, state = model(tokens, last_only=True, return_last_states=True)
    decoder = Decoder(state, logits[:, 0], Sampling(0.0, 0, 1.0))
    decoder.start(state, logits[:, 0], None)
    decoder.choose(model, capture, NEW_TOKENS)
    return decoder


def official_step(peer: Any, tokens: Tensor) -> Callable[[], Any]:
    """A step of the official model behind a prompt: the token and the states stay where they are."""
    logits, state = peer(tokens)
    token = logits[:, -1:].argmax(-1)

    def work() -> Tensor:
        logits, _ = peer(token, state)
        token.copy_(logits[:, -1:].argmax(-1))
        return logits

    return work


@contextlib.contextmanager
def starting(early: int | None, model: xLSTMLarge, tokens: Tensor) -> Iterator[None]:
    """Decoding steps of this batch whose kernels start so early, as they are chosen and configured else.

    None: as early as they are configured to.
    """
    if early is None:
        yield
        return
    our_decoder(model, tokens, False).step(model, None)
    for op in map(registry.get, registry.names()):
        for made, _ in op.decisions():
            if made.config is not None and "EARLY" in op.backends[made.backend].optional:
                config = Config(**(made.config.kwargs | {"EARLY": early}))
                op.pin(made.key, made.backend, config, made.source, f"{made.reason}; EARLY={early}")
    # of the steps before there may be a graph
    generation._decoders.pop(model, None)
    try:
        yield
    finally:
        for op in map(registry.get, registry.names()):
            op.unpin()


def captured(work: Callable[[], Any]) -> Callable[[], Any]:
    """The work as a graph's replay."""
    cuda_graph.warm_up(work)
    graph, _ = cuda_graph.record(work, torch.cuda.graph_pool_handle(), "the official step")
    replay: Callable[[], Any] = graph.replay
    return replay


def generated(place: Place, model: xLSTMLarge, tokens: Tensor, count: int) -> Row:
    """`generate` by the host's clock, its graph recorded before."""
    model.generate(tokens, count)
    place.wait()
    begin = time.perf_counter()
    found = model.generate(tokens, count)
    seconds = time.perf_counter() - begin
    return {
        "decoding": found.decoding, "generate_tokens_s": round(tokens.shape[0] * count / seconds, 1),
        "token_sum": int(found.tokens.sum()),
    }  # fmt: skip


@torch.no_grad()
def decode(form: str | None, state: str, early: int | None, report: Report, args: argparse.Namespace) -> None:
    """Steps by batch; the official package has weights in 16 bits and states in float32 alone."""
    place = start(report, args)
    model = ours(place, inference_state_dtype=state)
    if form is not None:
        quantize(model, form, lm_head=True)
        empty(place)
    peer = peer_of(report, place, model) if form is None and state == "float32" and early is None else None
    # with the same numbers of rows as the timed calls, because rows decide which kernel runs
    prompts = [place.tokens(batch, (16 if place.small else 200) + STEPS) for batch in BATCHES]
    peers = {} if peer is None else {"official": peer}
    if not report.at("answers") or not judge(report, place, model, peers, prompts):
        return
    limit = bandwidth(place)
    for batch in BATCHES:
        tokens, case = place.tokens(batch, 16), f"batch {batch}"
        if not report.has(case) and report.at(case):
            with starting(early, model, tokens):
                report.row(case, **decoded(place, model, peer, tokens, limit))


def decoded(place: Place, model: xLSTMLarge, peer: Any, tokens: Tensor, limit: Row) -> Row:
    """A row of `decode`; `limit`: of `bandwidth`."""
    batch, count = tokens.shape[0], 24 if place.small else NEW_TOKENS
    empty(place)
    decoder = our_decoder(model, tokens, True)
    work = partial(decoder.step, model, None)
    moved = step_bytes(model, batch)
    row: Row = {"bytes": moved, "wavecrest": {"decoding": decoder.decoding, "gib": most_memory(place)}}
    if peer is None:
        row["wavecrest_ms"] = alone(place, work)["ms"]
    else:
        base = official_step(peer, tokens)
        base()
        row["official_eager"] = alone(place, base)
        base = base if place.device == "cpu" else captured(base)
        row |= paired(place, base, work, 4.0)
        row["official_tokens_s"] = round(1e3 * batch / row["official_ms"], 1)
        row["official_in_a_row_ms"] = in_a_row(place, base)
    row["wavecrest_in_a_row_ms"] = in_a_row(place, work)
    floor = moved / max(limit["copy_gbps"], limit["read_gbps"]) / 1e6
    row |= {
        "tokens_s": round(1e3 * batch / row["wavecrest_ms"], 1), "floor_ms": round(floor, 4),
        "of_floor": round(floor / row["wavecrest_ms"], 3), **limit,
    }  # fmt: skip
    row["wavecrest"] |= generated(place, model, tokens, count)
    row["wavecrest_eager"] = alone(place, partial(our_decoder(model, tokens, False).step, model, None))
    return row


@torch.no_grad()
def first(report: Report, args: argparse.Namespace) -> None:
    """Time to the first token of a prompt, everything compiled: `generate(…, 1)` of both."""
    place = start(report, args)
    model = ours(place)
    peer = peer_of(report, place, model)
    for case, shape in (SMALL_PROMPTS if place.small else PROMPTS).items():
        if not report.at(case):
            continue
        tokens = place.tokens(*shape)
        row: Row = {"wavecrest": alone(place, partial(model.generate, tokens, 1))}
        if peer is not None:
            row["official"] = alone(place, partial(peer.generate, tokens, 1))
            row["ratio"] = row["official"]["wall_ms"] / row["wavecrest"]["wall_ms"]
        report.row(case, **row)


class Compilations:
    """Variants of kernels that Triton makes ready in this process, cached or not, and graphs of torch.compile."""

    def __init__(self) -> None:
        self.kernels: list[str] = []
        from triton import knobs

        knobs.runtime.jit_post_compile_hook = self._count

    def _count(self, *, fn: Any, **_more: Any) -> None:
        self.kernels.append(fn.name)

    @property
    def graphs(self) -> int:
        """Graphs of torch.compile so far."""
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@torch.no_grad()
def lengths(ahead: bool, report: Report, args: argparse.Namespace) -> None:
    """Prompts of other lengths: what is compiled for each, and its first call beside its second."""
    place = start(report, args)
    if ahead:
        shutil.rmtree(COLD / "lengths", ignore_errors=True)
        os.environ["TRITON_CACHE_DIR"] = str(COLD / "lengths")
    counted = Compilations()
    model = ours(place)
    peer = None if ahead else peer_of(report, place, model)
    if ahead and report.at("ahead"):
        begin = time.perf_counter()
        stopped = model.compile_ahead(longest=32 if place.small else 2048)
        seconds = round(time.perf_counter() - begin, 2)
        report.row("ahead", seconds=seconds, kernels=len(counted.kernels), stopped=stopped)
    runs = {"wavecrest": partial(model, last_only=True, return_last_states=True)}
    runs |= {} if peer is None else {"official": peer}
    for name, run in runs.items():
        for length in SMALL_LENGTHS if place.small else (*LENGTHS, *(MORE_LENGTHS if ahead else ())):
            case = f"{name} {length}"
            if report.has(case) or not report.at(case):
                continue
            tokens, kernels, graphs = place.tokens(1, length), len(counted.kernels), counted.graphs
            work = partial(run, tokens)
            ms = [round(1e3 * first_call(place, work)["first_s"], 1) for _ in range(2)]
            names = sorted(set(counted.kernels[kernels:]))
            report.row(
                case, kernels=len(counted.kernels) - kernels, graphs=counted.graphs - graphs, first_ms=ms[0],
                second_ms=ms[1], names=names,
            )  # fmt: skip


@torch.no_grad()
def cold(name: str, again: bool, report: Report, args: argparse.Namespace) -> None:
    """Seconds from the start of the process; without `again` no compiled kernel is on the disk."""
    where = COLD / name
    if not again:
        shutil.rmtree(where, ignore_errors=True)
    os.environ |= {"TRITON_CACHE_DIR": str(where / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(where / "inductor")}
    row: Row = {}

    def passed(what: str) -> None:
        place.wait()
        row[what] = round(time.time() - report.began, 2)

    place = start(report, args)
    passed("imports_s")
    model: Any = ours(place)
    if name == "official":
        model = peer_of(report, place, model)
        if model is None:
            return
    tokens = place.tokens(1, 48 if place.small else 2048)
    passed("model_s")
    report.at("generate")
    model.generate(tokens, 1)
    passed("first_token_s")
    model.generate(tokens, 32)
    passed("32_tokens_s")
    begin = time.time()
    model.generate(tokens, 32)
    place.wait()
    report.row(name, **row, warm_32_tokens_s=round(time.time() - begin, 2))
    if again:
        shutil.rmtree(where, ignore_errors=True)


@torch.no_grad()
def named(report: Report, args: argparse.Namespace) -> None:
    """Prompts with the kernels that released checkpoints name, beside those that the dispatcher chooses."""
    place = start(report, args)
    model = ours(place)
    chosen, asked = model.config.selected_kernels(), dataclasses.replace(model.config, **RELEASED).selected_kernels()

    def read(kernels: Kernels, tokens: Tensor) -> None:
        for block in model.backbone.blocks:
            block.mlstm_layer.kernels = kernels
        model(tokens, last_only=True, return_last_states=True)

    for case, shape in (SMALL_PROMPTS if place.small else PROMPTS).items():
        if not report.at(case):
            continue
        works = [partial(read, one, place.tokens(*shape)) for one in (chosen, asked)]
        for work in works:
            work()
        pair = timing.measure_pair(*works, device=place.device, min_blocks=5, seconds=3.0)
        report.row(
            case, auto_ms=pair.base_ms, named_ms=pair.new_ms, ratio=pair.ratio, ratio_ci=[pair.ci.low, pair.ci.high],
            blocks=pair.n, clock=pair.clock, names=RELEASED,
        )  # fmt: skip


@torch.no_grad()
def kernels(report: Report, args: argparse.Namespace) -> None:
    """Shares of kernels in the time of a prompt and of eager steps, by torch's profiler; no times to quote."""
    place = start(report, args)
    model = ours(place)
    peer = peer_of(report, place, model)
    case, shape = next(iter((SMALL_PROMPTS if place.small else PROMPTS).items()))
    tokens = place.tokens(*shape)
    works: dict[str, Callable[[], Any]] = {f"prompt {case}": partial(model, tokens, last_only=True)}
    if peer is not None:
        works[f"official prompt {case}"] = partial(peer, tokens)
    for batch in BATCHES:
        decoder = our_decoder(model, place.tokens(batch, 16), False)
        works[f"step {batch}"] = partial(decoder.step, model, None)
    cpu, activity = place.device == "cpu", torch.profiler.ProfilerActivity
    for name, work in works.items():
        if not report.at(name):
            continue
        work()
        place.wait()
        with torch.profiler.profile(activities=[activity.CPU if cpu else activity.CUDA]) as found:
            work()
            place.wait()
        events = [
            (one.key, one.cpu_time_total if cpu else one.device_time_total, one.count) for one in found.key_averages()
        ]
        events.sort(key=lambda one: -one[1])
        report.row(
            name, total_us=round(sum(us for _, us, _ in events), 1), launches=sum(count for *_, count in events),
            kernels=[[key[:90], round(us, 1), count] for key, us, count in events[:16]],
        )  # fmt: skip


PARTS = [
    Part("decode", 150.0, partial(decode, None, "float32", None)),
    Part("prefill", 180.0, partial(prefill, "limit_chunk")),
    Part("decode-int8", 100.0, partial(decode, "int8", "float32", None)),
    Part("decode-fp8", 100.0, partial(decode, "fp8", "float32", None)),
    Part("lengths", 120.0, partial(lengths, False)),
    Part("lengths-ahead", 90.0, partial(lengths, True)),
    Part("first", 90.0, first),
    Part("kernels", 60.0, kernels),
    Part("cold-wavecrest", 120.0, partial(cold, "wavecrest", False)),
    Part("cold-wavecrest-again", 60.0, partial(cold, "wavecrest", True)),
    Part("cold-official", 120.0, partial(cold, "official", False)),
    Part("cold-official-again", 60.0, partial(cold, "official", True)),
    Part("decode-half", 100.0, partial(decode, None, "float16", None)),
    Part("decode-early", 100.0, partial(decode, None, "float32", EARLY)),
    Part("decode-late", 100.0, partial(decode, None, "float32", 0)),
    Part("prefill-xl", 180.0, partial(prefill, "xl_chunk")),
    Part("named", 60.0, named),
]

if __name__ == "__main__":
    raise SystemExit(parts.main(__doc__ or "", "benchmarks.xlstm_peers", PARTS))
