"""Backends and configurations of a captured model's GEMMs, each tried where it runs: between the kernels beside it.

A GEMM of a few rows is bound by reading its weight, so that what counts is how soon it begins to read. Alone, behind
caches that were emptied, another configuration is the fastest than in a graph, where its first programs may start while
the kernel in front ends. So the graph is recorded with each candidate, and replayed.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.dispatch import lookup
from wavecrest.dispatch.choices import Choices
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, StepRefused, Unsupported
from wavecrest.graphs.capture import CapturedModule
from wavecrest.measure import numerics, timing
from wavecrest.measure.tree import iter_tensors
from wavecrest.measure.workload import Call
from wavecrest.ops._gemm.backend import op
from wavecrest.ops.common import warmup
from wavecrest.optimizer.steps.around import Around
from wavecrest.optimizer.steps.base import Found, Prediction, Step, StepContext, structural_copy
from wavecrest.optimizer.steps.capture import CaptureGraph
from wavecrest.optimizer.steps.params import Launches
from wavecrest.tune import candidates, untuned_calls

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.hardware import Device

# rows up to which a GEMM is bound by reading its weight
MOST_ROWS = 64
# GEMMs that are looked at, those with the largest weights first, and configurations of each beside the defaults
MOST_KEYS, MOST_CONFIGS = 6, 6
# part of the seconds left for trials, and seconds, that looking may take
SHARE, MOST_SECONDS = 0.4, 60.0
# gain of the whole replay that a candidate must show
LEAST_GAIN = 0.003
# replays of each side, in turn
REPLAYS = 12
# part of the time of GEMMs that this may save, before it has looked. A step of Llama 3.1 8B went from 3,188 to 2,998 µs
# in int8, where dispatch ran one GEMM of four on a slow default, and from 2,723 to 2,671 in int4 (H200,
# evidence/nvidia-h200/2026-11-28_quantized_steps_tuned.jsonl.gz); since it does not, 3,032 to 3,027 (no record)
HOPED = 0.04

# a backend, and its configuration where it takes one
Choice = tuple[str, Config | None]


class Tuned(NamedTuple):
    """The choices, and ms of a replay without and with them; how many candidates were tried, and which failed."""

    chosen: dict[Key, Choice]
    before: float
    after: float
    tried: int
    failed: list[str]


class TuneLaunches(Step):
    """GEMMs of few rows of a captured model on the backends and configurations with which its replay is shortest."""

    id = "tune_launches"
    title = "GEMM launches → tuned in the graph"
    level = 5
    phase = "library"
    group = "tune_launches"
    params_type = Launches
    in_graphs = True
    # they change the GEMMs, or what runs beside them
    tried_after = (
        "capture", "quantize", "fuse_qkv", "fuse_gate_up", "fuse_parallel", "route_linear", "choose_linear",
        "replace_attention", "replace_norm", "replace_activation", "replace_rotary", "fuse_append", "fuse_residual",
        "fuse_add_norm", "fuse_norm", "join_ties",
    )  # fmt: skip

    def looks_long(self, device: Device) -> bool:
        """Kernels are compiled and graphs recorded, for up to a minute."""
        return device.kind != "cpu"

    def hope(self, context: StepContext) -> Prediction:
        """As if every GEMM were one of few rows."""
        share = context.share("gemm") if context.captured and not context.compiled else 0.0
        return Prediction.of_saved(HOPED * share, f"at best, as nothing is tried yet; GEMM is {share:.0%} of the time")

    def find(self, context: StepContext) -> Found:
        """The GEMMs for which another backend or configuration makes the replay shorter."""
        assert context.model is not None
        if context.device.kind == "cpu":
            return Found((), note="launches are tuned inside a captured graph, which exist on GPUs only")
        if context.compiled:
            return Found((), note="compiled code holds the choices that it was compiled with")
        if not context.captured:
            return Found((), note="launches are tuned inside a captured graph, and no capture is in force")
        keys = keys_of(context)
        if not keys:
            return Found((), note=f"the model calls no GEMM of wavecrest's with up to {MOST_ROWS} rows")
        deadline = context.now() + min(MOST_SECONDS, SHARE * context.seconds_left)
        fields = {key: _field(context, key) for key in keys}
        _compile(fields, context)
        found = search(fields, _Graph(context), lambda: context.now() < deadline)
        told = f"; {len(found.failed)} failed ({found.failed[0]})" if found.failed else ""
        if found.tried < (field := sum(map(len, fields.values()))):
            told += f"; {field - found.tried} had no time"
        if alone := [_named(key) for key, field in fields.items() if not field]:
            told += f"; no call can be made of, or nothing else runs, {', '.join(alone)}"
        note = f"{found.tried} candidates for {len(keys)} GEMMs in the graph{told}"
        if not found.chosen:
            return Found((), note=f"dispatch's choices are the fastest of {note}")
        rows = [
            {"key": list(key), "backend": backend, "config": dict(config.kwargs) if config else {}}
            for key, (backend, config) in found.chosen.items()
        ]
        note = f"{len(rows)} changed, of {note}: {found.before * 1e3:.0f} → {found.after * 1e3:.0f} µs"
        sites = tuple(_named(key) for key in found.chosen)
        return Found(sites, {"rows": rows}, note, saved_ms=found.before - found.after)

    def predict(self, found: Found, context: StepContext) -> Prediction:
        """The time that replays became shorter by, as a share of that of all buckets."""
        saved, whole = found.saved_ms or 0.0, sum(bucket.wall_ms for bucket in context.profile)
        return Prediction.of_saved(saved / whole if whole else 0.0, found.note)

    def apply(self, model: nn.Module, params: dict[str, Any]) -> nn.Module:
        """Run the forward with these choices; a graph that is recorded of it holds them.

        Raises:
            StepRefused: a configuration is not one of this version's.
        """
        chosen = choices_of(params)
        if model._compiled_call_impl is None:
            model.forward = _Choosing(model, chosen)
        return model


class _Choosing(Around):
    def __init__(self, module: nn.Module, chosen: Mapping[Key, Choice]) -> None:
        super().__init__(module)
        self.chosen = dict(chosen)
        self._choices: Choices | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without what was decided in this process."""
        return {**self.__dict__, "_choices": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._choices is None:
            self._choices = Choices(op, self.chosen, "tuned in the model's graph")
        with self._choices:
            return self.run(*args, **kwargs)


class _Graph:
    """Replays of a model that was captured with choices, beside each other."""

    def __init__(self, context: StepContext) -> None:
        assert context.model is not None
        self._context = context
        self._model = structural_copy(context.model)
        self._watch = timing.Stopwatch(context.workload.device)
        # of each bucket the first capture's answer, and how far another may be from it
        self._first: dict[str, tuple[list[Tensor], float]] = {}

    def record(self, chosen: Mapping[Key, Choice]) -> CapturedModule:
        """Capture all buckets, and hold their answers to the first capture's.

        Raises:
            StepRefused: an answer is further from the first than that may be from the model's as it was.
        """
        workload, capture = self._context.workload, CaptureGraph()
        captured = capture.apply(self._model, capture.find(self._context).params)
        assert isinstance(captured, CapturedModule)
        for bucket in workload.buckets:
            with Choices(op, chosen, "tried in the model's graph"):
                answer = _tensors(workload.run(bucket, captured))
            if bucket not in self._first:
                own = _apart(answer, _tensors(workload.run(bucket)))
                limit = max(numerics.tolerance("model", workload.dtype).relative, own)
                self._first[bucket] = answer, limit
            first, limit = self._first[bucket]
            apart = _apart(answer, first)
            if not apart <= limit:
                raise StepRefused(f"bucket {bucket}: the answer is off by {apart:.2g}, more than {limit:.2g}")
        return captured

    def times(self, *models: CapturedModule) -> list[float]:
        """The median ms of each model's calls in turn, summed over buckets."""
        workload = self._context.workload
        totals = [0.0] * len(models)
        for bucket in workload.buckets:
            calls = [Call(workload, bucket, model) for model in models]
            taken: list[list[float]] = [[] for _ in models]
            for _ in range(REPLAYS):
                for call, kept in zip(calls, taken, strict=True):
                    call.prepare()
                    kept.append(self._watch.time(call)[0])
            totals = [total + statistics.median(kept) for total, kept in zip(totals, taken, strict=True)]
        return totals


def _tensors(answer: Any) -> list[Tensor]:
    return [tensor for _, tensor in iter_tensors("", answer, set())]


def _apart(answer: list[Tensor], other: list[Tensor]) -> float:
    """The largest ‖difference‖ / ‖other‖ of tensors; infinite where one is not finite and the other is."""
    found = [numerics.compare(mine, its) for mine, its in zip(answer, other, strict=True)]
    return max((one.relative if one.nonfinite_match else float("inf") for one in found), default=0.0)


def search(fields: Mapping[Key, list[Choice]], graph: Any, has_time: Callable[[], bool]) -> Tuned:
    """One GEMM after the other, the fastest candidate for each while those before have theirs.

    Args:
        fields: candidates by key.
        graph: has `record(choices)` and `times(*recorded)`.
        has_time: asked before each candidate.
    """
    chosen: dict[Key, Choice] = {}
    failed: list[str] = []
    best = first = graph.record({})
    tried = 0
    for key, field in fields.items():
        for choice in field:
            if not has_time():
                break
            tried += 1
            try:
                other = graph.record({**chosen, key: choice})
            # a configuration that does not fit the chip raises what the compiler or the driver raises
            except Exception as error:
                failed.append(f"{_words(choice)}: {(str(error).splitlines() or [type(error).__name__])[0]}")
                continue
            own, its = graph.times(best, other)
            if its < own * (1 - LEAST_GAIN):
                best, chosen = other, {**chosen, key: choice}
    if not chosen:
        return Tuned({}, 0.0, 0.0, tried, failed)
    before, after = graph.times(first, best)
    return Tuned(chosen if after < before else {}, before, after, tried, failed)


def keys_of(context: StepContext) -> list[Key]:
    """The keys of the model's GEMMs of few rows, those that read the most first."""
    assert context.model is not None
    outside = op.swap(None)
    try:
        with torch.no_grad():
            for inputs in context.workload.buckets.values():
                inputs.clone().call(context.model)
        seen = [(decision.key, calls) for decision, calls in op.decisions()]
    finally:
        op.swap(outside)
    rows, columns, k = (op.key_fields.index(name) for name in ("rows", "columns", "k"))
    few = [(key, calls) for key, calls in seen if 0 < key[rows] <= MOST_ROWS]
    # a product with its gated activation is asked about, and not called where it is made in two
    few.sort(key=lambda one: -max(1, one[1]) * one[0][columns] * one[0][k])
    return [key for key, _ in few[:MOST_KEYS]]


def _field(context: StepContext, key: Key) -> list[Choice]:
    """The candidates for a key but dispatch's own choice, the likeliest first."""
    try:
        call = untuned_calls.call(op, untuned_calls.parts_of(op, key), context.workload.device)
    except (InvalidArgument, Unsupported):
        # a key that says too little of its calls
        return []
    with torch.no_grad():
        found = candidates.field(op, call, key, context.device.known, candidates.backends(op, None), MOST_CONFIGS)
        now = op.decide(call)
    field = [(one.backend, one.config) for one in found.candidates]
    return [choice for choice in field if choice != (now.backend, now.config)]


def _compile(fields: Mapping[Key, list[Choice]], context: StepContext) -> None:
    """Compile the candidates' kernels in threads."""

    def launch_all() -> None:
        for key in [key for key, field in fields.items() if field]:
            call = untuned_calls.call(op, untuned_calls.parts_of(op, key), context.workload.device)
            for backend, config in fields[key]:
                # told when it is recorded
                with contextlib.suppress(Exception):
                    op.run(backend, call, config=config)

    if warmup.possible(torch.device(context.workload.device)):
        with torch.no_grad():
            warmup.rehearse(launch_all)


def choices_of(params: dict[str, Any]) -> dict[Key, Choice]:
    """The choices that parameters hold.

    Raises:
        StepRefused: a key or configuration is not one of this version's.
    """
    found: dict[Key, Choice] = {}
    for row in params["rows"]:
        key, backend = tuple(row["key"]), row["backend"]
        if len(key) != len(op.key_fields):
            raise StepRefused(f"a key of gemm has {len(op.key_fields)} parts here, and {len(key)} in the plan")
        if backend not in op.backends:
            raise StepRefused(f"gemm has no backend {backend}; it has {', '.join(sorted(op.backends))}")
        config = Config(**row["config"]) if row.get("config") else None
        problem = lookup.misfit(op, key, backend, config)
        if problem:
            raise StepRefused(f"{backend} for {_named(key)}: the plan has a configuration {problem}")
        found[key] = backend, config
    return found


def _named(key: Key) -> str:
    part = dict(zip(op.key_fields, key, strict=True))
    more = f" {part['activation']}" if part["activation"] else ""
    return f"{part['rows']} × {part['columns']} × {part['k']} {part['b']}{more}"


def _words(choice: Choice) -> str:
    return candidates.named(candidates.Candidate(*choice))
