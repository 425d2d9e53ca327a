"""`wavecrest bench OP`: an op beside its peers and beside the copy bandwidth of the same run.

For every case: all implementations are first held against the op's reference; those that pass are timed in turn,
together with a copy of as many bytes. Percentages compare with the bandwidth of a large copy measured just before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wavecrest import hardware, records
from wavecrest.bench import peers, rates, shapes, sizes, suites
from wavecrest.bench.baseline import _first_line
from wavecrest.dispatch import registry
from wavecrest.dispatch.call import AnyCall
from wavecrest.dispatch.keys import dtype_name
from wavecrest.dispatch.op import AnyOp
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.measure import interleaved, numerics, timing
from wavecrest.measure.clock import Clock
from wavecrest.records import provenance

# the name of wavecrest's implementation in results
OURS = "wavecrest"
# bytes of the tensor whose copy is the limit
COPY_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
# factor by which a peer may exceed wavecrest's own error limits before it is left out: a peer that rounds on the way
# (in Llama's RMSNorm before the weight) is still a peer, and leaving it out would make wavecrest look faster
PEER_SLACK = 10.0
# 8-bit results: how far off a quantized value may be, and which share may be off at all. For wavecrest only ties
# differ; a peer that rounds before it quantizes (the norm) is off in many
CODE_STEPS, CODE_SHARE, PEER_CODE_SHARE = 1, 0.01, 1.0

# calls of an implementation that a case needs at least once its time is limited: to warm up, then a pair a round
LEAST_CALLS = 3 + 2 * interleaved.LEAST_ROUNDS

# (op, case, index of the case, number of cases), before each case
OnCase = Callable[[str, str, int, int], None]
# (op, its row, seconds it took), after each case
OnRow = Callable[[str, records.OpCase, float], None]
# the record so far, after each op
OnOp = Callable[[records.OpBenchRecord], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a measurement: see `bench_ops`."""

    suite: str = "shared"
    peers: tuple[str, ...] = peers.PEERS
    matching: str = ""
    dtype: str | None = None
    seconds: float = 0.25
    budget: float = math.inf
    words: tuple[str, ...] = ()
    shapes: Path | None = None
    case_seconds: float = math.inf

    @property
    def source(self) -> str:
        """Where the cases are from: a suite by name, "sizes", or a file."""
        if self.shapes is not None:
            return self.shapes.name
        return "sizes" if self.words else self.suite


@dataclass(frozen=True, slots=True)
class _Limits:
    """Seconds of sampling and in all of a case, and the time after which no case begins, by a clock."""

    seconds: float
    case_seconds: float
    deadline: float
    now: Clock


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of `gate`: errors of values, and the share of 8-bit values that may be a step off."""

    values: numerics.Tolerance
    code_share: float


# an implementation of a call: its name, what makes it ready, and its error limits
Planned = tuple[str, Callable[[], peers.Prepared], Limits]
# the implementations of an op's call, the one that dispatch chooses first
Plan = Callable[[AnyOp, AnyCall], list[Planned]]


@dataclass(slots=True)
class _Candidate:
    """One implementation: its call, None once it has failed, and its row in the record."""

    timing: records.ImplTiming
    call: Callable[[], Any] | None = None
    series: tuple[float, ...] = field(default=())
    # it is right, as far as is known, and there was no time for it
    late: bool = False


def bench_ops(
    names: Sequence[str],
    device: hardware.Device,
    settings: Settings,
    *,
    command: str | None = None,
    on_case: OnCase | None = None,
    on_row: OnRow | None = None,
    on_op: OnOp | None = None,
    now: Clock = timing.HOST_CLOCK,
) -> records.OpBenchRecord:
    """Measure ops over a suite of cases, or at sizes of the user's.

    Args:
        names: ops by name; empty takes those that a file of shapes names.
        device: where to run.
        settings: `suite` and `dtype` as in `suites.cases`, `peers` as in `peers.available`, `matching` a part of the
            names of the cases wanted; `words` give sizes in place of the suite (`sizes.several`), `shapes` a file of
            them (`shapes.read`); `seconds` of sampling a case (30 rounds are the least); `budget` in
            seconds after which no case is started: the record names the cases left out, with that reason.
            `case_seconds` bounds a case: peers that do not fit into it are left out, and rounds end early, with the
            reason; a call that has begun is not stopped.
        command: for the record's header; None takes this process's.
        on_case: called before each case.
        on_row: called after each case.
        on_op: called after each op with the record so far.
        now: the clock of `budget` and `case_seconds`.

    Raises:
        InvalidArgument: an unknown op, suite, dtype, size or peer, or no case has `matching` in its name.
        TableError: the file of shapes cannot be read.
    """
    versions, missing = peers.available(settings.peers)
    work = _work(names, settings, device)
    total = sum(len(found) for _, found in work)
    if total == 0 and settings.shapes is not None:
        raise InvalidArgument(f"{settings.shapes} has nothing to measure: it has no row")
    if total == 0:
        raise InvalidArgument(f"no case of suite {settings.source!r} has {settings.matching!r} in its name")
    plan = partial(_with_peers, tuple(versions))
    return bench_work(
        work, plan, device, settings, versions=versions, missing=missing, command=command, on_case=on_case,
        on_row=on_row, on_op=on_op, now=now,
    )  # fmt: skip


def bench_work(
    work: Sequence[tuple[AnyOp, Sequence[suites.Case]]],
    plan: Plan,
    device: hardware.Device,
    settings: Settings,
    *,
    versions: dict[str, str],
    missing: dict[str, str],
    command: str | None = None,
    on_case: OnCase | None = None,
    on_row: OnRow | None = None,
    on_op: OnOp | None = None,
    now: Clock = timing.HOST_CLOCK,
) -> records.OpBenchRecord:
    """Measure ops on the cases given with each, by the implementations that a plan has for a call.

    `versions` and `missing` are of peers, for the record; the other arguments are those of `bench_ops`, of whose
    settings the times and the name of the suite count here.
    """
    target, total = device.torch_name, sum(len(found) for _, found in work)
    limits = _Limits(settings.seconds, settings.case_seconds, now() + settings.budget, now)
    done = 0
    benches: list[records.OpBench] = []

    def record() -> records.OpBenchRecord:
        return records.OpBenchRecord(
            header=provenance.header(device, command=command),
            suite=settings.source,
            peers=versions,
            missing=missing,
            peak_gbps=None if device.known is None else device.known.bandwidth,
            peaks_from=rates.source(device.known),
            samples="full",
            ops=list(benches),
        )

    with torch.no_grad():
        for op, found in work:
            if not found:
                continue

            def before(case: str, index: int, name: str = op.name, offset: int = done) -> None:
                if on_case is not None:
                    on_case(name, case, offset + index, total)

            def after(row: records.OpCase, seconds: float, name: str = op.name) -> None:
                row.peak_tflops = rates.peak_tflops(device.known, row.dtype)
                if on_row is not None:
                    on_row(name, row, seconds)

            benches.append(_bench_op(op, found, target, plan, limits, before, after))
            done += len(found)
            if on_op is not None:
                on_op(record())
    return record()


def _work(
    names: Sequence[str], settings: Settings, device: hardware.Device
) -> list[tuple[AnyOp, Sequence[suites.Case]]]:
    """The ops with their cases: of a file of shapes, of words, or of a suite."""
    target = device.torch_name
    fp8 = None if device.known is None else device.known.fp8
    if settings.shapes is not None:
        listed = shapes.read(settings.shapes, target, known=tuple(dict.fromkeys(names)), fp8=fp8)
        return [(registry.get(name), own.cases) for name, own in listed.items()]
    found = list(map(registry.get, dict.fromkeys(names)))
    if settings.words:
        return [(op, [suites.sized(op, one, target) for one in sizes.several(op, settings.words, fp8)]) for op in found]
    return [
        (op, suites.cases(op, settings.suite, target, dtype=settings.dtype, matching=settings.matching)) for op in found
    ]


def _bench_op(
    op: AnyOp,
    found: Sequence[suites.Case],
    device: str,
    plan: Plan,
    limits: _Limits,
    before: Callable[[str, int], None],
    after: Callable[[records.OpCase, float], None],
) -> records.OpBench:
    bench = records.OpBench(op=op.name, copy_bytes=COPY_BYTES[device.partition(":")[0]])
    pairs: list[tuple[Sequence[float], Sequence[float]]] = []
    try:
        bench.copy_gbps, bench.clock = copy_bandwidth(device, bench.copy_bytes, seconds=limits.seconds)
        for index, case in enumerate(found):
            before(case.name, index)
            begin = limits.now()
            if begin > limits.deadline:
                bench.cases.append(_unmeasured(case, "no time left of the budget"))
                continue
            row, pair = _bench_case(op, case, device, plan, limits)
            bench.cases.append(row)
            after(row, limits.now() - begin)
            pairs += [pair] if pair is not None else []
            if device != "cpu":
                # the next case's tensors have other sizes
                torch.cuda.empty_cache()
    except RuntimeError as error:
        # a failed kernel may leave the device unusable: later cases are dropped, earlier ones are kept
        bench.problem = f"ended at {type(error).__name__}: {_first_line(error)}"
    if pairs:
        bench.geomean, bench.ci = timing.bootstrap_speedup(pairs)
    return bench


def copy_bandwidth(device: str, size: int, *, seconds: float) -> tuple[float, str]:
    """GB/s (read plus written) of copying a bfloat16 tensor of `size` bytes, and the kind of clock used."""
    taken = interleaved.measure([_copy(size, device)], device=device, seconds=seconds)
    return 2 * size / statistics.median(taken.samples[0]) / 1e6, taken.clock


def _copy(size: int, device: str) -> Callable[[], Any]:
    # random, as zeros can move faster than data
    source = torch.randn(max(1, size // 2), dtype=torch.bfloat16, device=device)
    return partial(torch.empty_like(source).copy_, source)


def _unmeasured(case: suites.Case, problem: str) -> records.OpCase:
    return records.OpCase(case=case.name, sizes=dict(case.sizes), problem=problem)


def _bench_case(
    op: AnyOp, case: suites.Case, device: str, plan: Plan, limits: _Limits
) -> tuple[records.OpCase, tuple[Sequence[float], Sequence[float]] | None]:
    end = limits.now() + limits.case_seconds
    try:
        call = _made(case)
        row = _describe(op, case, call)
        candidates = _candidates(op, call, plan(op, call), limits, end)
        if candidates[0].late:
            return _unmeasured(case, candidates[0].timing.problem), None
        timed = [candidate for candidate in candidates if candidate.call is not None]
        # the copy reads n/2 bytes and writes n/2, n being the bytes that the case moves
        copied = interleaved.measure(
            [*(candidate.call for candidate in timed if candidate.call is not None), _copy(row.bytes // 2, device)],
            device=device,
            seconds=limits.seconds,
            limit=end - limits.now(),
        )
    except torch.OutOfMemoryError as error:
        return _unmeasured(case, f"out of memory: {_first_line(error)}"), None
    except (InvalidArgument, Unsupported) as error:
        return _unmeasured(case, f"the op refuses it: {_first_line(error)}"), None
    row.rounds, row.copy_ms = copied.rounds, statistics.median(copied.samples[-1])
    if row.rounds < timing.MIN_SAMPLES:
        over = f"the {limits.case_seconds:g} s of --case-seconds were over"
        row.cut = f"{row.rounds} rounds in place of {timing.MIN_SAMPLES}: {over}"
    for candidate, exact in zip(timed, copied.samples, strict=False):
        # nanoseconds, as the record has them, so that every figure can be computed again from it
        series = tuple(round(sample, 6) for sample in exact)
        candidate.series = series
        candidate.timing.ms = statistics.median(series)
        candidate.timing.ci = timing.bootstrap_median(series)
        candidate.timing.samples = list(series)
    row.impls = [candidate.timing for candidate in candidates]
    return row, _compare_with_best(row, candidates)


def _made(case: suites.Case) -> AnyCall:
    """The call of a case.

    Raises:
        torch.OutOfMemoryError: it does not fit into the memory; that of a CPU, too.
    """
    try:
        return case.make()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # the CPU's allocator has no class of its own
        if "memory" not in str(error):
            raise
        raise torch.OutOfMemoryError(_first_line(error)) from error


def _compare_with_best(
    row: records.OpCase, candidates: list[_Candidate]
) -> tuple[Sequence[float], Sequence[float]] | None:
    ours, *others = candidates
    others = [other for other in others if other.timing.name in peers.ALL]
    best = min((other for other in others if other.series), key=lambda other: other.timing.ms or 0.0, default=None)
    if best is None or not ours.series:
        return None
    row.best_peer = best.timing.name
    row.ratio, row.ci = timing.bootstrap_speedup([(best.series, ours.series)])
    return best.series, ours.series


def _describe(op: AnyOp, case: suites.Case, call: AnyCall) -> records.OpCase:
    tensors = [value for value in call if isinstance(value, Tensor)]
    cost, decision = op.study.cost(call), op.decide(call)
    return records.OpCase(
        case=case.name,
        sizes=dict(case.sizes),
        dtype=dtype_name(tensors[0]),
        columns=tensors[0].shape[-1] if tensors[0].ndim > 1 else 0,
        shapes=[
            f"{'x'.join(map(str, value.shape))} {dtype_name(value)}" if isinstance(value, Tensor) else repr(value)
            for value in call
        ],
        bytes=cost.bytes,
        flops=cost.flops,
        tensor_bytes=max(tensor.nbytes for tensor in tensors),
        backend=decision.backend,
        config={} if decision.config is None else dict(decision.config.kwargs),
    )


def _with_peers(wanted: tuple[str, ...], op: AnyOp, call: AnyCall) -> list[Planned]:
    """Wavecrest's dispatched call, its kernels where there are several, and peers."""
    own = limits_of(op, dtype_of_call(call))
    loose = Limits(numerics.Tolerance(PEER_SLACK * own.values.relative, PEER_SLACK * own.values.worst), PEER_CODE_SHARE)
    return [
        (OURS, lambda: peers.Prepared(partial(op, call)), own),
        *((backend, partial(forced, op, backend, call), own) for backend in _own_backends(op)),
        *((peer, partial(peers.prepare, peer, op, call), loose) for peer in wanted),
    ]


def dtype_of_call(call: AnyCall) -> str:
    """The dtype of a call's first tensor, by name."""
    return dtype_name(next(value for value in call if isinstance(value, Tensor)))


def _candidates(op: AnyOp, call: AnyCall, planned: Sequence[Planned], limits: _Limits, end: float) -> list[_Candidate]:
    """Implementations, each called once and compared with the op's reference; those that fail have no call.

    Those that do not fit into the time until `end` have none either: a share of it goes to each that is taken in.
    """
    oracle = results_of(op.reference(call))
    found: list[_Candidate] = []
    # seconds that the timing of those taken in needs at least
    promised = 0.0
    for name, prepare, bounds in planned:
        left = end - limits.now() - promised
        if left <= 0:
            row = records.ImplTiming(
                name=name, problem=f"no time left of the {limits.case_seconds:g} s of --case-seconds"
            )
            found.append(_Candidate(row, late=True))
            continue
        begin = limits.now()
        candidate = _candidate(name, prepare, oracle, bounds)
        if candidate.call is not None:
            promised += _fit(candidate, limits.now() - begin, end - promised, limits)
        found.append(candidate)
    return found


def _fit(candidate: _Candidate, first: float, end: float, limits: _Limits) -> float:
    """The seconds that timing a candidate takes at least; where they are not left, it loses its call, and 0.

    `first` are those of its first call, which may have compiled something: too long, and a second one decides.
    """
    assert candidate.call is not None
    needed = LEAST_CALLS * first
    if needed > end - limits.now() > 0:
        begin = limits.now()
        _finished(results_of(candidate.call()))
        needed = LEAST_CALLS * (limits.now() - begin)
    if needed <= end - limits.now():
        return needed
    candidate.call, candidate.late = None, True
    candidate.timing.problem = (
        f"{LEAST_CALLS} calls of {needed / LEAST_CALLS:.2g} s do not fit into the {limits.case_seconds:g} s "
        "of --case-seconds"
    )
    return 0.0


def _own_backends(op: AnyOp) -> list[str]:
    """The backends to show beside the dispatched call: kernels, where there are several, and those of users."""
    own = [name for name in op.backends if name.startswith("triton")]
    users = [name for name, backend in op.backends.items() if backend.user and name not in own]
    return [*(own if len(own) > 1 else []), *users]


def forced(op: AnyOp, backend: str, call: AnyCall) -> peers.Prepared:
    """One backend's call with its default configuration, or with that of a measured row which names it."""
    chosen = op.backends[backend]
    reason = chosen.refuse(call)
    if reason is not None:
        raise Unsupported(reason)
    decision = op.decide(call)
    if not chosen.takes_config:
        return peers.Prepared(partial(chosen.run if chosen.bind is None else chosen.bind(call), call))
    config = decision.config if decision.backend == backend else None
    config = config or op.config_of(backend, decision.key)
    run = partial(chosen.run, config=config) if chosen.bind is None else chosen.bind(call, config)
    return peers.Prepared(lambda: run(call))


def limits_of(op: AnyOp, dtype: str) -> Limits:
    """Wavecrest's own limits; for results that are not 8-bit, ops that quantize have those of "row"."""
    known = op.op_class if op.op_class in numerics.TOLERANCES else "row"
    return Limits(numerics.tolerance(known, dtype), CODE_SHARE)


def _candidate(
    name: str, prepare: Callable[[], peers.Prepared], oracle: tuple[Tensor, ...], limits: Limits
) -> _Candidate:
    row = records.ImplTiming(name=name)
    begin = timing.HOST_CLOCK()
    try:
        prepared = prepare()
        results = results_of(prepared.finish(prepared.run()))
        _finished(results)
        row.first_ms = round((timing.HOST_CLOCK() - begin) * 1e3, 3)
        row.problem = gate(row, results, oracle, limits)
    except Unsupported as error:
        row.problem = str(error)
    except Exception as error:
        if name == OURS and isinstance(error, torch.OutOfMemoryError):
            # the machine is too small for the case: no implementation is to blame
            raise
        row.problem = f"raised {type(error).__name__}: {_first_line(error)}"
    return _Candidate(row, None if row.problem else prepared.run)


def _finished(results: tuple[Any, ...]) -> None:
    """Wait until the device has computed results."""
    if isinstance(results[0], Tensor) and results[0].is_cuda:
        torch.cuda.synchronize(results[0].device)


def results_of(value: Any) -> tuple[Tensor, ...]:
    """The results of an op as a tuple of tensors."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def gate(row: records.ImplTiming, results: tuple[Tensor, ...], oracle: tuple[Tensor, ...], limits: Limits) -> str:
    """Compare results with the oracle: fills the errors of `row` and returns the fault, or an empty string."""
    if len(results) != len(oracle):
        return f"wrong: {len(results)} results instead of {len(oracle)}"
    row.relative = row.worst = 0.0
    for index, (got, want) in enumerate(zip(results, oracle, strict=True)):
        if got.dtype != want.dtype:
            return f"wrong: result {index} is {got.dtype}, not {want.dtype}"
        if _same_bits(got, want):
            continue
        compared = numerics.compare(got, want)
        row.relative, row.worst = max(row.relative, compared.relative), max(row.worst, compared.worst)
        if want.dtype.itemsize == 1:
            right = _codes_agree(got, want, limits.code_share)
        else:
            # an integer that is not a quantized value is a count or a sum, and exact
            right = want.dtype.is_floating_point and compared.within(limits.values)
        if not right:
            return f"wrong: result {index} has error {compared.relative:.2g}, at worst {compared.worst:.2g}"
    return ""


def _same_bits(got: Tensor, want: Tensor) -> bool:
    if got.shape != want.shape:
        return False
    if want.dtype.itemsize == 1:
        return torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    # false where there is a NaN, which then is compared element by element
    return torch.equal(got, want)


def _codes_agree(got: Tensor, want: Tensor, share: float) -> bool:
    """True if no quantized value is further than a step off, and no more than a share of them is off at all."""
    if got.shape != want.shape:
        return False
    off = (_ordinal(got) - _ordinal(want)).abs()
    return off.numel() == 0 or (int(off.max()) <= CODE_STEPS and float((off > 0).double().mean()) <= share)


def _ordinal(tensor: Tensor) -> Tensor:
    """Quantized values as integers in the order of their values: float8 is sign and magnitude."""
    if not tensor.dtype.is_floating_point:
        return tensor.to(torch.int16)
    bits = tensor.view(torch.uint8).to(torch.int16)
    return torch.where(bits >= 128, 128 - bits, bits)


def percent(bench: records.OpBench, case: records.OpCase, impl: records.ImplTiming) -> float | None:
    """Percent of the copy bandwidth at which an implementation moves the bytes that must move."""
    if impl.ms is None or not bench.copy_gbps:
        return None
    return 100.0 * case.bytes / impl.ms / 1e6 / bench.copy_gbps


def by_op(record: records.OpBenchRecord) -> dict[str, records.OpBenchRecord]:
    """One record per op, with the header of the run they come from."""
    return {bench.op: record.model_copy(update={"ops": [bench]}) for bench in record.ops}
