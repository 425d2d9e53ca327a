"""One model of the zoo, in a process of its own: what wavecrest makes of it, and the peers beside that, interleaved.

Rows: `model` (sizes), `bound` (the roofline), `wavecrest` (the run with its default settings), then one a peer, timed
in blocks of ABBA against wavecrest's result by the timer that judges steps.
"""

from __future__ import annotations

import argparse
import math
import signal
import statistics
import time
import types
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks.parts import Report, Row
from benchmarks.zoo.peers import Call as PeerCall
from benchmarks.zoo.peers import Peer, peers
from benchmarks.zoo.registry import Entry
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from wavecrest import hardware
from wavecrest.measure import numerics, timing, workload
from wavecrest.measure.rotation import Rotation
from wavecrest.measure.tree import iter_tensors
from wavecrest.measure.workload import Call, Workload
from wavecrest.optimizer import api
from wavecrest.optimizer.gate.reference import Reference
from wavecrest.optimizer.ledger import RESULT
from wavecrest.optimizer.plan import Plan
from wavecrest.optimizer.progress import Lines
from wavecrest.profile import measure_ceilings
from wavecrest.records import Ceilings, OptimizeRecord, provenance

WAVECREST = "wavecrest"
# a peer whose answer differs from eager's by more than this gets no time: it computes something else. A deep network of
# random weights may differ by more between two right orders of rounding: there a peer may be this many times as far
# from eager as eager is from the same model in higher precision
MOST_ERROR, TIMES_EAGERS = 0.1, 3.0
Shape = Sequence[int]
# verdicts that say something of a step: the rest had nothing to change
TOLD = ("kept", "reverted", "tie", "refused")


class TookTooLong(Exception):
    """A peer's compilation ran out of its time."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TookTooLong` in the main thread after this many seconds; infinity sets no limit."""
    if math.isinf(seconds):
        yield
        return

    def late(_signal: int, _frame: types.FrameType | None) -> None:
        raise TookTooLong(f"not ready after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def measure(entry: Entry, report: Report, args: argparse.Namespace, only: Collection[str] | None = None) -> None:
    """Measure one model and report its rows; see the docstring of this file. `only`: beside these peers alone."""
    device = args.device or hardware.detect().torch_name
    loaded = workload.load(entry.spec(tiny=args.tiny), device=device)
    (bucket,) = loaded.buckets
    if not report.has("model"):
        report.header(provenance.header(hardware.detect(device), command=args.command).model_dump(mode="json"))
        report.row("model", **_described(entry, loaded, tiny=args.tiny))
    if not report.has("bound") and report.at("bound"):
        report.row("bound", **bound(loaded, measure_ceilings(loaded.device, loaded.dtype)))
    ours = _optimized(entry, loaded, report, args)
    with torch.no_grad():
        eager = _copied(loaded.run(bucket))
    wanted = [peer for peer in peers(device, slow=args.autotune > 0) if only is None or peer.name in only]
    for peer in wanted:
        if not report.has(peer.name) and report.at(peer.name):
            limit = args.autotune if peer.slow else math.inf
            report.row(peer.name, **compared(peer, loaded, ours, eager, seconds=args.seconds, limit=limit))


def _described(entry: Entry, loaded: Workload, *, tiny: bool) -> Row:
    size = entry.size(loaded.device, tiny=tiny)
    return {
        **size._asdict(), "library": entry.library, "about": entry.about, "unit": entry.unit,
        "count": entry.count(size),
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()), "tiny": tiny,
        "load_s": round(loaded.load_seconds, 1),
    }  # fmt: skip


def _attention_flops(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    """FLOPs of q·kᵀ and of p·v, from [batch, heads, tokens, head_dim]; fewer heads of k and v than of q are shared."""
    batch, heads, tokens, _head_dim = query
    return 2 * batch * heads * tokens * key[-2] * (query[-1] + value[-1])


def _experts_flops(rows: Shape, weights: Shape, *_: object, **__: object) -> int:
    """FLOPs of rows [tokens, K], each by the weights of one expert of [experts, K, N]."""
    return 2 * rows[0] * rows[1] * weights[-1]


def _flops(loaded: Workload, bucket: str) -> int:
    """FLOPs of one call.

    PyTorch's counter knows neither the fused layer of nn.TransformerEncoder, nor a library's LSTM, nor attention whose
    query heads share keys, nor grouped products of experts: the first two are called as the products that they are
    made of.
    """
    aten = torch.ops.aten
    fused = (
        aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_flash_attention_for_cpu,
    )  # fmt: skip
    known = {**dict.fromkeys(fused, _attention_flops), aten._grouped_mm: _experts_flops}
    counter = FlopCounterMode(display=False, custom_mapping=known)
    fast = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        if any(isinstance(module, nn.RNNBase) for module in loaded.model.modules()):
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        stack.enter_context(counter)
        loaded.run(bucket)
    return counter.get_total_flops()


def bound(loaded: Workload, ceilings: Ceilings) -> Row:
    """The roofline of one call: the longer of its GEMMs', convolutions' and attentions' FLOPs at the measured peak, and
    of reading the weights and what the call is given once at the measured bandwidth.

    Tables of embeddings are read in a few rows, so they count only where an output layer shares them. Masked halves of
    attention count as FLOPs. All experts count as read.
    """
    (bucket,) = loaded.buckets
    flops = _flops(loaded, bucket)
    state = {id(tensor): tensor for tensor in (*loaded.model.parameters(), *loaded.model.buffers())}
    modules = list(loaded.model.modules())
    used = {id(tensor) for module in modules if isinstance(module, nn.Linear) for tensor in module.parameters()}
    tables = {id(module.weight) for module in modules if isinstance(module, nn.Embedding)} - used
    state |= {id(tensor): tensor for _, tensor in loaded.buckets[bucket].tensors()}
    size = sum(tensor.numel() * tensor.element_size() for key, tensor in state.items() if key not in tables)
    peak = ceilings.peak.get(loaded.dtype, math.nan)
    times = {"compute": flops / peak / 1e9, "memory": size / ceilings.bandwidth / 1e6}
    limit = max(times, key=lambda kind: times[kind])
    return {
        "ms": _digits(times[limit]), "limit": limit, "flops": flops, "bytes": size,
        "tflops": _digits(peak), "gbps": _digits(ceilings.bandwidth),
    }  # fmt: skip


def _optimized(entry: Entry, loaded: Workload, report: Report, args: argparse.Namespace) -> nn.Module | None:
    """Wavecrest's result; from the plan, where an earlier process of this part made it. None where it died of it."""
    plan = Path(args.scratch) / f"{entry.name}.plan.json"
    if report.has(WAVECREST):
        return Plan.load(plan).apply(loaded.model) if plan.exists() else None
    if not report.at(WAVECREST):
        return None
    begin = time.perf_counter()
    try:
        result = api.run(loaded, api.Options(budget=args.budget), command=args.command, progress=Lines())
    except Exception as error:
        report.row(WAVECREST, problem=f"{type(error).__name__}: {error}", seconds=_spent(begin))
        return None
    result.plan.save(plan)
    report.row(WAVECREST, budget=args.budget, seconds=_spent(begin), **outcome(result.record, result.plan))
    return result.model


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _spent(begin: float) -> float:
    return round(time.perf_counter() - begin, 1)


def outcome(record: OptimizeRecord, plan: Plan) -> Row:
    """Steps that a run kept, and why not more; `steps` has all that had something to change, in the order of trial."""
    result = record.result
    return {
        "verdict": result.verdict if result else "interrupted",
        "reason": result.reason if result else "",
        "ratio": _digits(result.ratio) if result else None,
        "unit": result.unit if result else None,
        # median ms of original and result in each pair of processes
        "pairs": [
            [_digits(statistics.median(side)) for side in (row.base, row.new)]
            for row in record.samples
            if row.step == RESULT
        ],
        "kept": [step.title for step in plan.kept()],
        "environment": {row.name: row.value for row in plan.environment},
        "steps": [
            {
                "title": step.title, "attempt": step.attempt, "verdict": step.verdict, "reason": step.reason,
                "causes": [cause.text for cause in step.causes],
                "predicted": None if step.predicted is None else _digits(step.predicted),
                "prediction": step.prediction, "chosen": step.chosen,
                "ratio": None if step.ratio is None else _digits(step.ratio), "seconds": round(step.seconds, 1),
                "compile_s": round(step.compile_seconds, 1),
            }
            for step in record.steps
            if step.verdict in TOLD or step.sites
        ],
        "final_s": _seconds(record.final_seconds), "final_expected_s": _seconds(record.final_expected),
        "final_parts_s": {name: _seconds(seconds) for name, seconds in record.final_parts.items()},
        "notes": record.notes,
    }  # fmt: skip


def compared(
    peer: Peer, loaded: Workload, ours: nn.Module | None, eager: list[torch.Tensor], *, seconds: float, limit: float
) -> Row:
    """A peer beside wavecrest's result (beside the eager model, without one).

    `ratio` is the peer's time over ours, so above 1 ours is faster. A peer that raises, answers otherwise than eager or
    is not ready in `limit` seconds gets the reason as `problem`.
    """
    (bucket,) = loaded.buckets
    begin = time.perf_counter()
    try:
        with limited(limit):
            function = peer.make(loaded)
            first = _copied(loaded.run(bucket, function))
            ready = time.perf_counter() - begin
        error = _error(first, eager)
        if not error <= MOST_ERROR and not error <= TIMES_EAGERS * _own_error(loaded, eager):
            return {"problem": f"its answer differs from eager's by {error:.2g}", "first_s": round(ready, 1)}
        pair = _timed(loaded, function, loaded.model if ours is None else ours, seconds)
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        return {"problem": f"{type(error).__name__}: {first_line}"[:300], "first_s": _spent(begin)}
    samples, own = [*map(_digits, pair.base)], [*map(_digits, pair.new)]
    return {
        # medians of what is written, so that they can be computed again from it
        "first_s": round(ready, 1), "error": float(f"{error:.2g}"), "ms": round(statistics.median(samples), 6),
        "ours_ms": round(statistics.median(own), 6), "ratio": _digits(pair.ratio),
        "ratio_ci": [_digits(pair.ci.low), _digits(pair.ci.high)],
        "blocks": pair.n, "clock": pair.clock, "beside": "eager" if ours is None else WAVECREST, "seed": pair.seed,
        "samples": samples, "ours_samples": own,
    }  # fmt: skip


def _timed(loaded: Workload, function: PeerCall, ours: nn.Module, seconds: float) -> timing.Paired:
    (bucket,) = loaded.buckets
    rotation = Rotation(loaded.buckets[bucket])
    sides = [Call(loaded, bucket, side, rotation) for side in (function, ours)]
    return timing.measure_pair(*sides, device=loaded.device, seconds=seconds, rotation=rotation)


def _copied(answer: Any) -> list[torch.Tensor]:
    return [tensor.detach().clone() for _, tensor in iter_tensors("", answer, set()) if tensor.is_floating_point()]


def _own_error(loaded: Workload, eager: list[torch.Tensor]) -> float:
    """The largest relative error of eager's answer against the model in higher precision; 0 if that cannot be made."""
    (inputs,) = loaded.buckets.values()
    found = Reference(loaded).answer(inputs)
    if found is None:
        return 0.0
    leaves = [leaf.value for leaf in found[0].leaves.values() if leaf.kind == "tensor"]
    return _error(eager, [value for value in leaves if value.is_floating_point()])


def _error(found: list[torch.Tensor], eager: list[torch.Tensor]) -> float:
    """The largest relative error of an output."""
    if len(found) != len(eager):
        return math.inf
    return max((numerics.compare(a, b).relative for a, b in zip(found, eager, strict=True)), default=0.0)


def _digits(value: float) -> float:
    """Five significant digits: more than a timer has, and a third of the size in a record."""
    return float(f"{value:.5g}")


def summary(rows: list[Row]) -> Row:
    """The figures of a model's line in the page: `best` is the fastest peer."""
    by_case = {row["case"]: row for row in rows}
    timed = {name: row for name, row in by_case.items() if "ratio" in row and "ms" in row}
    if not timed or "model" not in by_case or any(row["beside"] != WAVECREST for row in timed.values()):
        return {}
    best = min(timed, key=lambda name: timed[name]["ratio"])
    ours = statistics.median(row["ours_ms"] for row in timed.values())
    found = {
        "ms": ours, "rate": _digits(by_case["model"]["count"] / ours * 1e3), "best": best,
        "best_ms": timed[best]["ms"], "ratio": timed[best]["ratio"], "ratio_ci": timed[best]["ratio_ci"],
    }  # fmt: skip
    if "eager" in timed:
        found["eager_ratio"] = timed["eager"]["ratio"]
    if "bound" in by_case and "ms" in by_case["bound"]:
        found["bound_percent"] = round(100 * by_case["bound"]["ms"] / ours, 1)
    return found
