"""The mLSTM ops beside the official kernels of mlstm-kernels, at the shapes that peers are compared on, interleaved.

    PYTHONPATH=src python -m benchmarks.mlstm_peers --out DATE_mlstm-peers_mlstm.jsonl.gz [PART …]

Not peers of `wavecrest bench`, as they cannot be trusted with its process: some abort the compiler. So every one is
first tried in a process of its own (parts `right-…`, which run side by side and leave compiled kernels behind): on
small sequences against the recurrence, then on every shape against the chunks in PyTorch's operations, both in
float64. The parts that time hold everything against these once more; what is wrong has no time. A ratio is the best
official kernel and chunk size over ours, paired by round.

mlstm-kernels is called by its public names alone (`get_mlstm_kernel`, `get_mlstm_step_kernel`).
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from benchmarks import parts
from benchmarks.parts import Part, Report, Row
from torch import Tensor

from wavecrest import hardware
from wavecrest.bench import ops as bench_ops
from wavecrest.dispatch import registry
from wavecrest.dispatch.keys import dtype_name
from wavecrest.measure import interleaved, numerics, timing
from wavecrest.ops import mlstm_chunkwise, mlstm_step
from wavecrest.ops.mlstm.call import MlstmCall, MlstmStepCall
from wavecrest.records import provenance

Shape = tuple[int, int, int, int, int]
# B, NH, S, DK, DV
SHAPES: dict[str, Shape] = {
    f"b{b}h{nh}s{s}qk{dk}v{dv}": (b, nh, s, dk, dv)
    for b, nh, s, dk, dv in (
        (1, 8, 2048, 256, 512), (1, 8, 4096, 256, 512), (2, 8, 2048, 256, 512), (2, 8, 4096, 256, 512),
        (4, 8, 2048, 256, 512), (4, 8, 4096, 256, 512), (4, 32, 2048, 64, 128), (4, 32, 4096, 64, 128),
        (1, 8, 16384, 256, 512),
    )
}  # fmt: skip
SMALL: dict[str, Shape] = {"b1h2s64qk16v32": (1, 2, 64, 16, 32), "b2h2s128qk32v64": (2, 2, 128, 32, 64)}
# held against the recurrence token by token: several chunks of 256 of both shapes of heads
RIGHT: dict[str, Shape] = {"right qk256v512": (1, 2, 768, 256, 512), "right qk64v128": (2, 2, 768, 64, 128)}
BATCHES, HEADS = (1, 4, 16, 64), (8, 256, 512)
SMALL_BATCHES, SMALL_HEADS = (1, 2), (2, 32, 64)

OURS = "wavecrest"
# kernel and chunk size
OFFICIAL = (
    ("chunkwise--triton_xl_chunk", 64),
    ("chunkwise--triton_xl_chunk", 128),
    ("chunkwise--triton_xl_chunk", 256),
    ("chunkwise--triton_limit_chunk", 64),
)
# on a CPU, to try this script
NATIVE = (("chunkwise--native_autograd", 16),)

# a call with operands, and what makes of its result the tensors that are compared
Call = Callable[..., Any]


def operands(shape: Shape, device: str) -> tuple[Tensor, ...]:
    """q, k, v [B, NH, S, D] and gates [B, NH, S] in float32: input gates about 0, forget gates about 3.

    In bfloat16; on a CPU in float32, as the official kernels there take one dtype alone.
    """
    b, nh, s, dk, dv = shape
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)
    made = partial(torch.randn, generator=generator, device=device)
    q, k, v = (made(b, nh, s, size).to(dtype) for size in (dk, dk, dv))
    return q, k, v, made(b, nh, s), 3.0 + made(b, nh, s)


def official(name: str, chunk: int) -> Call:
    """An official kernel over sequences."""
    from mlstm_kernels.torch import get_mlstm_kernel

    run = get_mlstm_kernel(name)
    return lambda q, k, v, i, f: run(q, k, v, i, f, eps=1e-6, chunk_size=chunk, autocast_kernel_dtype=torch.bfloat16)


def implementations(device: str) -> dict[str, Callable[[], Call]]:
    """Who takes part, by name; each is made when it is needed, as an import may fail."""
    found: dict[str, Callable[[], Call]] = {OURS: lambda: mlstm_chunkwise}
    for name, chunk in NATIVE if device == "cpu" else OFFICIAL:
        found[label(name, chunk)] = partial(official, name, chunk)
    return found


def label(name: str, chunk: int) -> str:
    """A kernel and its chunk size, as results have them."""
    return f"{name}@{chunk}"


def recurrence(given: tuple[Tensor, ...]) -> Tensor:
    """h in float64, token by token."""
    h: Tensor = registry.get("mlstm_chunkwise").reference(MlstmCall(*(one.double() for one in given)))
    return h


def chunks(given: tuple[Tensor, ...]) -> Tensor:
    """h in float64, by chunks in PyTorch's operations."""
    h: Tensor = registry.get("mlstm_chunkwise").backends["torch"].run(MlstmCall(*(one.double() for one in given)))
    return h


def judge(name: str, h: Tensor, wanted: Tensor, bound: Tensor) -> Row:
    """Errors of a result in q's dtype, and what is wrong.

    wavecrest's result may be off by the op's bound in each element. Peers, whose roundings are not known, may be off by
    ten times the limit of a GEMM.
    """
    found = numerics.compare(h, wanted)
    row: Row = {"relative": found.relative, "worst": found.worst}
    if name == OURS:
        beyond = int(((h.double() - wanted).abs() <= bound).logical_not().sum())
        share = float(((h.double() - wanted).abs() / bound).max())
        # JSON has no NaN
        row["of_bound"] = share if math.isfinite(share) else None
        return row if beyond == 0 else row | {"problem": f"wrong: {beyond} elements are beyond the op's bound"}
    limits, slack = numerics.tolerance("gemm", dtype_name(h)), bench_ops.PEER_SLACK
    fine = found.within(numerics.Tolerance(slack * limits.relative, slack * limits.worst))
    return row if fine else row | {"problem": f"wrong: error {found.relative:.2g}, at worst {found.worst:.2g}"}


def bound_of(op: str, given: tuple[Any, ...]) -> Tensor:
    """How far an element of our h may be off."""
    known = registry.get(op)
    assert known.study.bound is not None
    bounds = known.study.bound(known.call_of(given))
    assert isinstance(bounds, tuple)
    return bounds[0]


def attempt(
    report: Report, name: str, case: str, call: Call, given: tuple[Tensor, ...], wanted: Tensor, bound: Tensor
) -> Row | None:
    """A first call, judged: its row; None where an earlier process died of it."""
    if not report.at(f"{name} {case}"):
        return None
    begin = time.perf_counter()
    try:
        h = call(*given)
        if h.is_cuda:
            torch.cuda.synchronize(h.device)
    # whatever a peer raises is what is reported of it
    except Exception as error:
        return {"problem": f"raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    return judge(name, h, wanted, bound) | {"first_ms": round((time.perf_counter() - begin) * 1e3, 1)}


def begin(report: Report, args: argparse.Namespace) -> str:
    """The device's name for torch; the header is reported."""
    device = hardware.detect(args.device)
    report.header(provenance.header(device).model_dump(mode="json"))
    return device.torch_name


def cases(args: argparse.Namespace) -> dict[str, Shape]:
    """The shapes of a run."""
    return SMALL if args.small else SHAPES


@torch.no_grad()
def right(name: str, report: Report, args: argparse.Namespace) -> None:
    """One implementation against the references."""
    device = begin(report, args)
    made = implementations(device).get(name)
    if made is None:
        report.row(name, problem=f"does not run on {device}")
        return
    try:
        call = made()
    except ImportError as error:
        report.row(name, problem=f"not installed: {error}")
        return
    checks = SMALL if args.small else RIGHT
    for case, shape in (*checks.items(), *(() if args.small else SHAPES.items())):
        given = operands(shape, device)
        wanted = recurrence(given) if case in checks else chunks(given)
        row = attempt(report, name, case, call, given, wanted, bound_of("mlstm_chunkwise", given))
        if row is not None:
            report.row(f"{name} {case}", **row)


def timed(works: dict[str, Call], device: str, more: dict[str, Call] | None = None) -> dict[str, Row]:
    """Works in turn: milliseconds, interval and rounds of each."""
    every = works | (more or {})
    taken = interleaved.measure(list(every.values()), device=device, seconds=0.25)
    found = {}
    for name, exact in zip(every, taken.samples, strict=True):
        series = [round(one, 6) for one in exact]
        interval = timing.bootstrap_median(series)
        found[name] = {
            "ms": statistics.median(series), "ci": [interval.low, interval.high], "clock": taken.clock,
            "samples": series,
        }  # fmt: skip
    return found


def best_peer(rows: dict[str, Row], ours: str) -> Row:
    """The best of the official ones over ours, where both have times."""
    others = {name: row for name, row in rows.items() if not name.startswith(OURS) and "ms" in row}
    if not others or "ms" not in rows.get(ours, {}):
        return {}
    best = min(others, key=lambda name: others[name]["ms"])
    ratio, interval = timing.bootstrap_speedup([(others[best]["samples"], rows[ours]["samples"])])
    return {"best": best, "ratio": ratio, "ratio_ci": [interval.low, interval.high]}


@torch.no_grad()
def chunkwise(report: Report, args: argparse.Namespace) -> None:
    """All implementations at every shape."""
    device = begin(report, args)
    made = implementations(device)
    for case, shape in cases(args).items():
        if report.has(case):
            continue
        given = operands(shape, device)
        wanted, bound = chunks(given), bound_of("mlstm_chunkwise", given)
        rows: dict[str, Row] = {}
        works: dict[str, Call] = {}
        for name, maker in made.items():
            try:
                call = maker()
            except ImportError as error:
                rows[name] = {"problem": f"not installed: {error}"}
                continue
            row = attempt(report, name, case, call, given, wanted, bound)
            rows[name] = {"problem": "an earlier process died of it"} if row is None else row
            if "problem" not in rows[name]:
                works[name] = partial(call, *given)
        del wanted, bound
        if report.at(f"times {case}") and OURS in works:
            for name, times in timed(works, device).items():
                rows[name] |= times
        b, nh, s, dk, dv = shape
        more = best_peer(rows, OURS)
        if "ms" in rows[OURS]:
            # least work of a token: the update of its state and the read
            more["tflops"] = 4 * b * nh * s * dk * dv / rows[OURS]["ms"] / 1e9
            more["config"] = chosen("mlstm_chunkwise", given)
        report.row(case, **more, rows=rows)
        del given, works
        if device != "cpu":
            torch.cuda.empty_cache()


def chosen(op: str, given: tuple[Any, ...]) -> str:
    """The backend and configuration that dispatch chooses for a call, with source and reason."""
    known = registry.get(op)
    decision = known.decide(known.call_of(given))
    config = {} if decision.config is None else dict(decision.config.kwargs)
    return f"{decision.backend} {config} ({decision.source}: {decision.reason})"


def step_inputs(batch: int, heads: tuple[int, int, int], device: str) -> tuple[Tensor, ...]:
    """q, k, v, i, f, c, n, m of one token."""
    nh, dk, dv = heads
    q, k, v, i, f = (one.squeeze(2) for one in operands((batch, nh, 1, dk, dv), device))
    made = partial(torch.randn, device=device, generator=torch.Generator(device).manual_seed(1))
    return (
        q, k, v, i[..., None], f[..., None], made(batch, nh, dk, dv), made(batch, nh, dk),
        torch.zeros(batch, nh, 1, device=device),
    )  # fmt: skip


def official_step(device: str) -> Call:
    """The official kernel of one token."""
    from mlstm_kernels.torch import get_mlstm_step_kernel

    run = get_mlstm_step_kernel("native" if device == "cpu" else "triton")
    return lambda q, k, v, i, f, c, n, m: run(q=q, k=k, v=v, i=i, f=f, c=c, n=n, m=m, eps=1e-6)


def steps(rows: tuple[int, int], device: str) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Who takes part: ours with new states as theirs, and in the caller's memory, as models run it, and in one launch.

    `rows`: how many there are, and their heads.
    """
    arrivals = torch.zeros(rows, dtype=torch.int32, device=device)
    yield OURS, lambda: mlstm_step
    yield f"{OURS} in place", lambda: partial(mlstm_step, in_place=True)
    yield f"{OURS} counted", lambda: partial(mlstm_step, in_place=True, arrivals=arrivals)
    yield "official", lambda: official_step(device)


@torch.no_grad()
def step(report: Report, args: argparse.Namespace) -> None:
    """One token, by batch."""
    device = begin(report, args)
    size = bench_ops.COPY_BYTES["cpu" if args.small else "cuda"]
    gbps, _ = bench_ops.copy_bandwidth(device, size, seconds=0.25)
    op = registry.get("mlstm_step")
    for batch in SMALL_BATCHES if args.small else BATCHES:
        case = f"b{batch}"
        if report.has(case):
            continue
        given = step_inputs(batch, SMALL_HEADS if args.small else HEADS, device)
        wanted = op.reference(MlstmStepCall(*(one.double() for one in given)))[0]
        bound = bound_of("mlstm_step", given)
        rows: dict[str, Row] = {}
        works: dict[str, Call] = {}
        for name, maker in steps(tuple(given[0].shape[:2]), device):
            try:
                call = maker()
            except ImportError as error:
                rows[name] = {"problem": f"not installed: {error}"}
                continue
            # a copy, because one implementation overwrites the states
            mine = tuple(one.clone() for one in given)
            judged = OURS if name.startswith(OURS) else name
            row = attempt(report, judged, f"{name} {case}", first(call), mine, wanted, bound)
            rows[name] = {"problem": "an earlier process died of it"} if row is None else row
            if "problem" not in rows[name]:
                works[name] = partial(call, *mine)
        moved = op.study.cost(MlstmStepCall(*given)).bytes
        copied = torch.empty(moved // 2, dtype=torch.uint8, device=device).random_()
        if report.at(f"times {case}") and works:
            times = timed(works, device, {"copy": partial(torch.empty_like(copied).copy_, copied)})
            for name, row in times.items():
                of_copy = 100 * moved / row["ms"] / 1e6 / gbps
                rows[name] = rows.get(name, {}) | row | {"percent_of_copy": round(of_copy, 1)}
        # the copy is no peer
        others = {name: row for name, row in rows.items() if name != "copy"}
        report.row(case, **best_peer(others, f"{OURS} in place"), bytes=moved, copy_gbps=gbps, rows=rows)


def first(call: Call) -> Call:
    """The first of what a call returns."""
    return lambda *given: call(*given)[0]


@torch.no_grad()
def kernels(report: Report, args: argparse.Namespace) -> None:
    """Time of each wavecrest kernel in a call, by torch's profiler. Caches are warm, so these are no times to quote."""
    device = begin(report, args)
    activities = torch.profiler.ProfilerActivity
    for case, shape in cases(args).items():
        given = operands(shape, device)
        mlstm_chunkwise(*given)
        with torch.profiler.profile(activities=[activities.CPU if device == "cpu" else activities.CUDA]) as found:
            for _ in range(10):
                mlstm_chunkwise(*given)
            if device != "cpu":
                torch.cuda.synchronize()
        events = [one for one in found.key_averages() if device == "cpu" or one.device_time_total > 0]
        taken = {one.key: (one.cpu_time_total if device == "cpu" else one.device_time_total) / 10 for one in events}
        top = sorted(taken.items(), key=lambda one: -one[1])[:6]
        report.row(case, kernels={name[:80]: round(us, 2) for name, us in top})


def geomean(rows: list[Row]) -> Row:
    """The ratios of all cases together, and how many there are."""
    found = [row["ratio"] for row in rows if "ratio" in row]
    return {"geomean": statistics.geometric_mean(found), "cases": len(found)} if found else {"cases": 0}


def all_parts() -> list[Part]:
    """Correctness and compilation side by side, then what is timed, one after the other."""
    names = [OURS, *(label(*one) for one in (*OFFICIAL, *NATIVE))]
    return [
        *(Part(f"right-{name}", 240.0, partial(right, name), group="right") for name in names),
        Part("chunkwise", 240.0, chunkwise, summary=geomean),
        Part("step", 90.0, step, summary=geomean),
        Part("kernels", 60.0, kernels),
    ]


if __name__ == "__main__":
    raise SystemExit(parts.main(__doc__ or "", "benchmarks.mlstm_peers", all_parts()))
