"""The sLSTM ops beside PyTorch: an eager loop over tokens, a compiled one, and that one captured; interleaved.

    PYTHONPATH=src python -m benchmarks.slstm_peers --out DATE_slstm-peers_slstm.jsonl.gz [PART …]
    PYTHONPATH=src python -m benchmarks.slstm_peers --build b16s256d512

About a minute and a half on one GPU. A loop that is compiled as a whole is written out by tokens and takes minutes to
compile, so what is compiled is one token. The peers multiply in the inputs' dtype and keep states in float32, as ours
does. The official package's vanilla backend takes part where it can be imported (pip install --no-deps xlstm; it keeps
states in the inputs' dtype). Its CUDA backend does in the part `extension`: nvcc builds it anew for each batch and size
of heads, which `--build` does beforehand, with CPATH and LIBRARY_PATH where cuBLAS is not beside nvcc. Every one is
first held against the definition in float64, over up to 128 tokens; what is wrong has no time. A ratio is the best of
the others over ours, paired by round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
from benchmarks import mlstm_peers, parts
from benchmarks.parts import Part, Report, Row
from torch import Tensor

from wavecrest.dispatch import registry
from wavecrest.measure import interleaved, timing
from wavecrest.ops import slstm_sequence, slstm_step
from wavecrest.ops.slstm import reference
from wavecrest.ops.slstm.call import SlstmCall, SlstmStepCall
from wavecrest.ops.slstm.study.cases import Shape, example

OURS = mlstm_peers.OURS
# B, S, NH, D
SHAPES: dict[str, Shape] = {
    f"b{b}s{s}d{d}": (b, s, 4, d) for d in (64, 128, 256) for s in (256, 1024) for b in (1, 16, 64)
}
# one size of heads by three batches, and one batch by three sizes of heads
EXTENSION: dict[str, Shape] = {
    f"b{b}s256d{d}": (b, 256, 4, d) for b, d in ((1, 256), (16, 256), (64, 256), (16, 128), (16, 512))
}
SMALL: dict[str, Shape] = {"b2s6d16": (2, 6, 2, 16), "b1s9d24": (1, 9, 2, 24)}
# tokens that are held against float64
CHECKED = 128
# loops that the host drives token by token are timed up to this length
LONGEST_LOOP = 256
# seconds of a case, of which the slow ones have a few rounds
LIMIT = 1.5

State = tuple[Tensor, Tensor, Tensor, Tensor]
Call = Callable[[], Tensor]


def token(x: Tensor, r: Tensor, bias: Tensor, state: State) -> State:
    """The states after a token, x [B, 4, NH, D]: products in x's dtype, the rest in float32."""
    added = reference.recurrent(state[0].to(x.dtype), r)
    return reference.cell(x.float() + added.float() + bias, state, "sigmoid")


def loop(step: Callable[..., State], x: Tensor, call: SlstmCall) -> Tensor:
    """h of all tokens, one after another, from x [S, B, 4, NH, D]."""
    assert call.bias is not None
    # four tensors: a compiled function is compiled anew for one in the place of several
    state = tuple(torch.zeros_like(x[0, :, 0], dtype=torch.float32) for _ in "hcnm")
    found = []
    for one in x.unbind(0):
        state = step(one, call.r, call.bias, state)
        found.append(state[0])
    return torch.stack(found, 1).to(x.dtype)


def by_token(call: SlstmCall, step: Callable[..., State]) -> Call:
    """The loop of a call, over x in the order of tokens, which is not part of its time."""
    return partial(loop, step, call.x.transpose(0, 1).contiguous(), call)


def captured(call: SlstmCall, step: Callable[..., State]) -> Call:
    """The loop as a graph, over memory of its own."""
    if not call.x.is_cuda:
        raise ImportError("graphs are captured on a GPU")
    side, whole = torch.cuda.Stream(), by_token(call, step)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        whole()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h = whole()

    def replay() -> Tensor:
        graph.replay()
        return h

    return replay


def official(call: SlstmCall) -> Call:
    """The loop of package xlstm, with operands in the layouts that it takes."""
    from xlstm.blocks.slstm.src.vanilla import slstm_forward, slstm_pointwise_function_registry

    assert call.bias is not None
    batch, tokens, heads, dim = call.batch, call.tokens, call.heads, call.head_dim
    x = call.x.transpose(0, 1).reshape(tokens, batch, -1)
    r = call.r.permute(1, 0, 3, 2).reshape(heads, 4 * dim, dim).contiguous()
    bias = call.bias.to(call.x.dtype).flatten()
    states = x.new_zeros(4, batch, heads * dim)
    pointwise = slstm_pointwise_function_registry["slstm"]
    return lambda: (
        slstm_forward(x, states, r, bias, pointwise)[0][0, 1:].view(tokens, batch, heads, dim).transpose(0, 1)
    )


def built(shape: Shape) -> Any:
    """The class of package xlstm over its CUDA kernels for a batch and size of heads, bfloat16 as it comes."""
    if not torch.cuda.is_available():
        raise ImportError("the CUDA backend of package xlstm needs a GPU of NVIDIA")
    from xlstm.blocks.slstm.cell import sLSTMCellConfig, sLSTMCellCUDA

    batch, _tokens, heads, dim = shape
    config = sLSTMCellConfig(hidden_size=heads * dim, num_heads=heads, batch_size=batch, dtype="bfloat16")
    # it waits for up to ten seconds, so that processes do not build the same at once
    with mock.patch.object(time, "sleep"):
        module = sLSTMCellCUDA.instance(config)
    return module.sLSTMFunc(False, batch, heads * dim, heads)


def extension(call: SlstmCall) -> Call:
    """The CUDA kernels of package xlstm, with operands in the layouts that they take."""
    assert call.bias is not None
    batch, tokens, heads, dim = call.batch, call.tokens, call.heads, call.head_dim
    function = built((batch, tokens, heads, dim))
    x = call.x.permute(1, 0, 3, 2, 4).reshape(tokens, batch, -1)
    r = call.r.permute(1, 2, 0, 3).reshape(heads, dim, 4 * dim)
    bias = call.bias.transpose(0, 1).reshape(-1)
    states = x.new_zeros(4, batch, heads * dim)
    return lambda: function.forward(False, x, states, r, bias)[0][0, 1:].view(tokens, batch, heads, dim).transpose(0, 1)


def implementations(call: SlstmCall, compiled: Callable[..., State]) -> dict[str, Callable[[], Call]]:
    """Who takes part, by name; each is made when it is needed, as an import may fail."""
    found: dict[str, Callable[[], Call]] = {
        OURS: lambda: partial(slstm_sequence, call.x, call.r, call.bias),
        f"{OURS} in PyTorch": lambda: partial(registry.get("slstm_sequence").run, "torch", call),
        "captured": lambda: captured(call, compiled),
    }
    if call.tokens <= LONGEST_LOOP:
        found["eager"] = lambda: by_token(call, token)
        found["compiled"] = lambda: by_token(call, compiled)
        found["official vanilla"] = lambda: official(call)
    return found


def judged(report: Report, name: str, case: str, call: Call, wanted: Tensor, bound: Tensor) -> Row:
    """A first call, over its first tokens, held to `mlstm_peers.judge`."""
    tokens = wanted.shape[1]
    ours = name if not name.startswith(OURS) or name == OURS else "PyTorch"
    row = mlstm_peers.attempt(report, ours, f"{name} {case}", lambda: call()[:, :tokens], (), wanted, bound)
    return {"problem": "an earlier process died of it"} if row is None else row


def timed(works: dict[str, Call], device: str) -> dict[str, Row]:
    """Works in turn: milliseconds, interval and rounds of each."""
    taken = interleaved.measure(list(works.values()), device=device, seconds=0.25, limit=LIMIT)
    found = {}
    for name, exact in zip(works, taken.samples, strict=True):
        series = [round(one, 6) for one in exact]
        interval = timing.bootstrap_median(series)
        found[name] = {
            "ms": statistics.median(series), "ci": [interval.low, interval.high], "clock": taken.clock,
            "samples": series,
        }  # fmt: skip
    return found


def case_of(shape: Shape, device: str) -> SlstmCall:
    """A call in bfloat16; on a CPU in float32."""
    torch.manual_seed(0)
    return example(shape, torch.float32 if device == "cpu" else torch.bfloat16, device)


def in_double(call: SlstmCall) -> SlstmCall:
    """The first tokens of a call in float64."""
    return call._replace(x=call.x[:, :CHECKED].double(), r=call.r.double())


@torch.no_grad()
def sequence(report: Report, args: argparse.Namespace) -> None:
    """All implementations at every shape."""
    device = mlstm_peers.begin(report, args)
    # Inductor needs a C++ compiler on a CPU; graphs of one size each, as the captured loop is
    compiled = torch.compile(token, fullgraph=True, backend="eager" if device == "cpu" else "inductor", dynamic=False)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(SHAPES))
    for case, shape in (SMALL if args.small else SHAPES).items():
        if report.has(case):
            continue
        call = case_of(shape, device)
        compare(report, case, call, implementations(call, compiled))


@torch.no_grad()
def beside_extension(report: Report, args: argparse.Namespace) -> None:
    """Ours, each of its kernels, and the CUDA backend of package xlstm."""
    device = mlstm_peers.begin(report, args)
    op = registry.get("slstm_sequence")
    for case, shape in (SMALL if args.small else EXTENSION).items():
        if report.has(case):
            continue
        call = case_of(shape, device)
        makers: dict[str, Callable[[], Call]] = {
            OURS: partial(partial, slstm_sequence, call.x, call.r, call.bias),
            "official CUDA": partial(extension, call),
        }
        for backend in op.by_priority():
            if backend.name.startswith("triton") and backend.refuse(call) is None:
                makers[f"{OURS} by {backend.name}"] = partial(partial, op.run, backend.name, call)
        compare(report, case, call, makers)


def compare(report: Report, case: str, call: SlstmCall, makers: Mapping[str, Callable[[], Call]]) -> None:
    """Hold everyone's first tokens against float64, then time those that are right."""
    op = registry.get("slstm_sequence")
    wanted = op.reference(in_double(call))
    assert op.study.bound is not None
    bounds = op.study.bound(call._replace(x=call.x[:, :CHECKED]))
    assert isinstance(bounds, tuple)
    rows: dict[str, Row] = {}
    works: dict[str, Call] = {}
    for name, maker in makers.items():
        try:
            work = maker()
        except ImportError as error:
            rows[name] = {"problem": f"not there: {error}"}
            continue
        rows[name] = judged(report, name, case, work, wanted, bounds[0])
        if "problem" not in rows[name]:
            works[name] = work
    if report.at(f"times {case}") and OURS in works:
        for name, times in timed(works, call.x.device.type).items():
            rows[name] |= times
    more = mlstm_peers.best_peer(rows, OURS)
    if "ms" in rows[OURS]:
        more["us_per_token"] = round(1e3 * rows[OURS]["ms"] / call.tokens, 3)
        more["config"] = mlstm_peers.chosen("slstm_sequence", tuple(call))
    report.row(case, **more, rows=rows)
    del works, wanted, bounds
    if call.x.is_cuda:
        torch.cuda.empty_cache()


@torch.no_grad()
def step(report: Report, args: argparse.Namespace) -> None:
    """One token, by batch and size of heads: ours, and PyTorch's operations eager and compiled."""
    device = mlstm_peers.begin(report, args)
    op = registry.get("slstm_step")
    compiled = torch.compile(token, fullgraph=True, backend="eager" if device == "cpu" else "inductor", dynamic=False)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(SHAPES))
    for case, shape in {
        name: (*one[:1], 1, *one[2:]) for name, one in (SMALL if args.small else SHAPES).items()
    }.items():
        # each batch and size of heads once
        if report.has(case) or not (args.small or "s256" in case):
            continue
        made = case_of(shape, device)
        state = reference.first_state(made)
        assert made.bias is not None
        given: tuple[Any, ...] = (made.x[:, 0], made.r, *state, made.bias)
        wanted = op.reference(SlstmStepCall(*(one.double() for one in given)))[0]
        assert op.study.bound is not None
        bounds = op.study.bound(SlstmStepCall(*given))
        assert isinstance(bounds, tuple)
        works: dict[str, Call] = {
            OURS: lambda given=given: slstm_step(*given)[0],
            "eager": lambda made=made, state=state: token(made.x[:, 0], made.r, made.bias, state)[0],  # type: ignore[arg-type]
            "compiled": lambda made=made, state=state: compiled(made.x[:, 0], made.r, made.bias, state)[0],
        }  # type: ignore[dict-item]
        rows = {}
        for name, work in list(works.items()):
            found = mlstm_peers.attempt(report, name, f"{name} {case}", work, (), wanted, bounds[0])
            rows[name] = {"problem": "an earlier process died of it"} if found is None else found
            if "problem" in rows[name]:
                del works[name]
        if report.at(f"times {case}") and works:
            for name, times in timed(works, device).items():
                rows[name] |= times
        report.row(case, **mlstm_peers.best_peer(rows, OURS), rows=rows)


def all_parts() -> list[Part]:
    """Sequences, then steps, then sequences beside the CUDA backend of package xlstm."""
    return [
        Part("sequence", 240.0, sequence, summary=mlstm_peers.geomean),
        Part("step", 90.0, step, summary=mlstm_peers.geomean),
        Part("extension", 90.0, beside_extension, summary=mlstm_peers.geomean),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--build"]:
        for asked in sys.argv[2:]:
            built(EXTENSION[asked])
        raise SystemExit
    raise SystemExit(parts.main(__doc__ or "", "benchmarks.slstm_peers", all_parts()))
