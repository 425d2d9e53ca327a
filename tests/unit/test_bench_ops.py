"""Ops beside their peers: which cases, who is let in, what is timed in which order, and what is made of it."""

from __future__ import annotations

import math
import statistics
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.clock import SimulatedClock
from tests.ops.op_harness import call_of
from tests.toy import OneCall, ToyOp
from wavecrest import hardware, records
from wavecrest.bench import ops, peers, plot, suites
from wavecrest.dispatch import registry
from wavecrest.dispatch.call import mapped, tensors_of
from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, MissingDependency, OutputError, Unsupported
from wavecrest.measure import interleaved, timing

MIB = 1 << 20
UNLIMITED = ops._Limits(0.25, math.inf, math.inf, timing.HOST_CLOCK)


@pytest.fixture
def double() -> Iterator[ToyOp]:
    """An op of this test: y = 2x, 8 bytes an element read and written."""
    op = ToyOp(
        "double",
        reference=lambda x: 2 * x,
        key=lambda x: (x.shape[-1],),
        inputs=lambda M, N, dtype, device: (torch.randn(M, N, dtype=dtype, device=device),),
        cost=lambda x: Cost(flops=x.numel(), bytes=2 * x.nbytes),
        default_config=lambda key: Config(BLOCK_N=key[0]),
        call_type=OneCall,
    )
    op.native("torch", lambda x: x + x, priority=10)
    yield op
    del registry.STATE.ops["double"]


class Timer:
    """Stands for the timer: the n-th work of a call takes (n + 1) · `ms` in every round, the copy `copy_ms`."""

    def __init__(self) -> None:
        self.ms, self.copy_ms, self.rounds = 1.0, 0.5, 40
        self.calls: list[list[Any]] = []

    def __call__(self, works: list[Any], *, device: str, seconds: float, **_options: Any) -> interleaved.Interleaved:
        self.calls.append(list(works))
        for work in works:
            work()
        # a drift that hits all works of a round alike
        drift = [1 + index / 100 for index in range(self.rounds)]
        times = [(index + 1) * self.ms for index in range(len(works) - 1)] + [self.copy_ms]
        return interleaved.Interleaved(tuple(tuple(t * d for d in drift) for t in times), "device events")


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Timer:
    timer = Timer()
    monkeypatch.setattr(interleaved, "measure", timer)
    return timer


def bench(name: str = "double", **options: Any) -> records.OpBenchRecord:
    settings = ops.Settings(**{"suite": "quick", "peers": ("eager",), **options})
    return ops.bench_ops([name], hardware.cpu(), settings)


# --- cases


def test_the_shared_suite_has_the_table_and_the_limit() -> None:
    names = [case.name for case in suites.cases(registry.get("rms_norm"), "shared", "cpu")]
    for wanted in ("1x4096", "16x4096", "4096x1024", "4096x4096", "8192x8192", "4096x16384", "2048x65536"):
        assert f"{wanted} bf16" in names
    for wanted in ("8192x8192 fp16", "8192x8192 fp32", "4096x32768 bf16", "1024x131072 bf16", "512x262144 bf16"):
        assert wanted in names
    assert len(names) == len(set(names)) == 14
    for M, N, dtype in suites.LIMIT:
        assert M * N * suites.dtype_of(dtype).itemsize >= 64 * MIB


def test_a_dtype_takes_every_shape_once() -> None:
    names = [case.name for case in suites.cases(registry.get("rms_norm"), "shared", "cpu", dtype="float16")]
    assert len(names) == len(set(names)) == 12 and all(name.endswith(" fp16") for name in names)
    short = suites.cases(registry.get("rms_norm"), "quick", "cpu", dtype="fp32", matching="64x")
    assert [case.name for case in short] == ["64x4096 fp32"]
    assert short[0].make().x.dtype == torch.float32 and short[0].make().x.shape == (64, 4096)


def test_a_variant_of_a_peer_is_not_measured_at_the_limit() -> None:
    found = suites.cases(registry.get("gelu_and_mul"), "shared", "cpu")
    tanh = [case for case in found if case.name.endswith(" tanh")]
    assert len(found) == 21 and len(tanh) == 7
    assert suites.cases(registry.get("gelu_and_mul"), "quick", "cpu", matching="tanh")[0].make().approximate == "tanh"


def test_an_op_can_bring_its_own_cases(double: ToyOp) -> None:
    asked = []

    def own(suite: str, device: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
        asked.append((suite, device))
        return {"one": lambda: (torch.ones(1, 8),), "two": lambda: (torch.ones(2, 8),)}

    double.restudy(bench_cases=own)
    found = suites.cases(double, "shared", "cpu", matching="tw")
    assert [case.name for case in found] == ["two"] and found[0].make()[0].shape == (2, 8)
    assert asked == [("shared", "cpu")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suite": "large"}, "no suite 'large'; there are shared, quick"),
        ({"dtype": "int8"}, "--dtype takes bfloat16, float16, float32, float64, not 'int8'"),
        ({"dtype": "nn"}, "not 'nn'"),
        ({"matching": "9x9"}, "no case of suite 'quick' has '9x9' in its name"),
        (
            {"peers": ("eager", "ligr")},
            "no peer 'ligr'; there are eager, compile, liger, aiter, sdpa_flash, sdpa_cudnn, or none",
        ),
    ],
    ids=["suite", "int8", "module", "case", "peer"],
)
def test_bad_settings(timer: Timer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message.replace("(", r"\(")):
        bench("rms_norm", **options)
    assert not timer.calls


# --- who is let in


@pytest.mark.usefixtures("users_copy")
def test_ratio_and_percent_of_a_case(double: ToyOp, timer: Timer) -> None:
    timer.ms = 0.25
    record = bench(peers=("eager",), matching="64x4096")
    (found,) = record.ops
    # the large copy: 64 MiB read and written, the last (and only) work of its call, 0.5 ms and its drift
    middle = 1 + 39 / 200
    assert found.copy_gbps == pytest.approx(2 * 64 * MIB / (0.5 * middle) / 1e6)
    (case,) = found.cases
    assert case.bytes == 2 * 64 * 4096 * 2 and case.tensor_bytes == case.bytes // 2 and case.columns == 4096
    assert case.shapes == ["64x4096 bfloat16"] and case.backend == "torch" and case.rounds == 40
    ours, eager = case.impls
    assert (ours.name, eager.name) == ("wavecrest", "eager")
    assert ours.ms == pytest.approx(0.25 * middle) and eager.ms == pytest.approx(0.5 * middle)
    assert case.copy_ms == pytest.approx(0.5 * middle)
    # the drift is in both alike, so the interval of the ratio is a point
    assert case.best_peer == "eager" and case.ratio == pytest.approx(2.0)
    assert case.ci is not None and case.ci.low == pytest.approx(2.0) and case.ci.high == pytest.approx(2.0)
    assert ops.percent(found, case, ours) == pytest.approx(100 * (case.bytes / 0.25) / (2 * 64 * MIB / 0.5))
    assert found.geomean == pytest.approx(2.0) and found.clock == "device events"


def test_the_copy_of_a_case_moves_as_many_bytes(double: ToyOp, timer: Timer) -> None:
    bench(matching="64x4096")
    copied = timer.calls[1][-1]
    (source,) = copied.args
    assert 2 * source.nbytes == 2 * 64 * 4096 * 2 and copied.func.__self__.nbytes == source.nbytes
    assert not torch.equal(source, torch.zeros_like(source))


def test_the_best_peer_is_the_fastest_that_is_right(
    double: ToyOp, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"eager": lambda x: 2.2 * x, "liger": lambda x: 2 * x, "aiter": lambda x: x + x}
    monkeypatch.setattr(peers, "available", lambda names: (dict.fromkeys(names, "1"), {}))
    monkeypatch.setattr(peers, "prepare", lambda peer, op, call: peers.Prepared(partial(made[peer], call.x)))
    case = bench(peers=("eager", "liger", "aiter"), matching="64x").ops[0].cases[0]
    wrong, second, third = case.impls[1:]
    assert wrong.ms is None and wrong.ci is None and not wrong.samples
    assert wrong.problem.startswith("wrong: result 0 has error 0.1") and wrong.relative == pytest.approx(0.1, rel=0.1)
    # works in the order ours, liger, aiter, copy
    assert len(timer.calls[1]) == 4
    assert second.ms is not None and third.ms is not None and second.ms < third.ms
    assert case.best_peer == "liger" and case.ratio == pytest.approx(2.0)


def test_a_peer_may_be_less_exact_than_we_may(double: ToyOp, timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    # one percent off: outside the limit of bfloat16 (0.4 %), inside ten times that
    rough = lambda x: (2.02 * x.float()).to(x.dtype)  # noqa: E731
    monkeypatch.setattr(peers, "prepare", lambda peer, op, call: peers.Prepared(partial(rough, call.x)))
    case = bench(matching="64x").ops[0].cases[0]
    assert case.impls[1].ms is not None and case.ratio is not None
    double.native("torch", rough, priority=30)
    case = bench(matching="64x").ops[0].cases[0]
    assert case.impls[0].problem.startswith("wrong") and case.impls[0].ms is None


def test_no_ratio_where_ours_is_wrong(double: ToyOp, timer: Timer) -> None:
    double.native("broken", lambda x: 3 * x, priority=99)
    found = bench(matching="64x").ops[0]
    case = found.cases[0]
    assert case.backend == "broken" and case.impls[0].problem.startswith("wrong") and case.impls[0].ms is None
    assert case.impls[1].ms is not None
    assert case.ratio is case.ci is case.best_peer is found.geomean is None


def test_no_ratio_without_peers(double: ToyOp, timer: Timer) -> None:
    found = bench(peers=()).ops[0]
    assert all(case.impls[0].ms and case.ratio is None for case in found.cases) and found.geomean is None


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: (2 * x, x), "wrong: 2 results instead of 1"),
        (lambda x: (2 * x).float(), "wrong: result 0 is torch.float32, not torch.bfloat16"),
        (lambda x: (2 * x)[:1], "wrong: result 0 has error inf"),
        (lambda x: torch.where(x > 3, math.nan, 2 * x), "wrong: result 0 has error"),
        (lambda x: x @ x, "raised RuntimeError: mat1 and mat2"),
    ],
    ids=["count", "dtype", "shape", "nan", "raises"],
)
def test_what_a_peer_does_wrong_is_said(
    double: ToyOp, timer: Timer, monkeypatch: pytest.MonkeyPatch, result: Callable[[Tensor], Any], message: str
) -> None:
    monkeypatch.setattr(peers, "prepare", lambda peer, op, call: peers.Prepared(partial(result, call.x)))
    torch.manual_seed(0)
    case = bench(matching="64x").ops[0].cases[0]
    assert case.impls[1].problem.startswith(message) and case.impls[1].ms is None


def _codes(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values = torch.linspace(-100, 100, 4000).to(dtype)
    return values, values.clone()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_codes_may_differ_by_a_tie_here_and_there(dtype: torch.dtype) -> None:
    ours = ops.limits_of(registry.get("rms_norm"), "bfloat16")
    theirs = ops.Limits(ours.values, ops.PEER_CODE_SHARE)
    row = records.ImplTiming(name="x")
    want, got = _codes(dtype)
    raw = got if dtype == torch.int8 else got.view(torch.uint8)
    assert ops.gate(row, (got,), (want,), ours) == ""
    raw[:20] += 1
    assert ops.gate(row, (got,), (want,), ours) == ""
    raw[20:400] += 1
    assert ops.gate(row, (got,), (want,), ours).startswith("wrong"), "a tenth of the codes is off"
    assert ops.gate(row, (got,), (want,), theirs) == ""
    raw[7] += 1
    assert ops.gate(row, (got,), (want,), theirs).startswith("wrong"), "a code is two steps off"
    assert ops.gate(row, (got[:10],), (want,), theirs).startswith("wrong: result 0 has error inf")


def test_integers_that_are_no_codes_are_exact() -> None:
    limits = ops.limits_of(registry.get("rms_norm"), "bfloat16")
    row = records.ImplTiming(name="x")
    total = torch.tensor(1 << 40)
    assert ops.gate(row, (total.clone(),), (total,), limits) == "" and row.relative == 0.0
    assert ops.gate(row, (total + 1,), (total,), limits).startswith("wrong")


def test_ops_that_quantize_have_limits() -> None:
    quantizes = types.SimpleNamespace(op_class="no such class")
    assert ops.limits_of(quantizes, "float16").values == ops.numerics.tolerance("row", "float16")
    assert ops.limits_of(types.SimpleNamespace(op_class="model"), "float16").values.relative == 2e-3


def test_the_smallest_float8_of_both_signs_are_two_steps_apart() -> None:
    bits = torch.tensor([0x81, 0x80, 0x00, 0x01], dtype=torch.uint8)
    assert ops._ordinal(bits.view(torch.float8_e4m3fn)).tolist() == [-1, 0, 0, 1]


# --- what is left out is said


def test_time_that_runs_out(double: ToyOp, timer: Timer) -> None:
    found = bench(budget=1e-9).ops[0]
    assert [case.problem for case in found.cases] == ["no time left of the budget"] * 3
    assert not any(case.impls for case in found.cases) and found.geomean is None


def test_the_time_of_a_case_leaves_out_what_does_not_fit(double: ToyOp, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimulatedClock()
    real = interleaved.measure
    monkeypatch.setattr(interleaved, "measure", lambda works, **options: real(works, **options, now=clock))
    monkeypatch.setattr(ops, "copy_bandwidth", lambda *args, **options: (10.0, "simulated"))

    def lasting(seconds: float) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            clock.advance(seconds)
            return x + x

        return run

    def prepare(name: str, _op: Any, call: Any) -> peers.Prepared:
        return peers.Prepared(partial(lasting({"eager": 0.1, "compile": 2.0}[name]), call.x))

    double.native("slow", lasting(0.5), priority=99)
    monkeypatch.setattr(peers, "prepare", prepare)
    monkeypatch.setattr(ops, "_copy", lambda size, device: partial(clock.advance, 0.001))

    def found(case_seconds: float) -> records.OpCase:
        settings = ops.Settings("quick", ("eager", "compile"), "64x", case_seconds=case_seconds)
        (case,) = ops.bench_ops(["double"], hardware.cpu(), settings, now=clock).ops[0].cases
        return case

    # nine calls of 2 s do not fit, what does gets fewer rounds
    case = found(10.0)
    assert [impl.name for impl in case.impls if impl.ms] == ["wavecrest", "eager"]
    assert case.impls[2].problem == "9 calls of 2 s do not fit into the 10 s of --case-seconds"
    assert case.rounds == 3 and case.cut == "3 rounds in place of 30: the 10 s of --case-seconds were over"
    assert case.impls[0].samples == [500.0] * 3 and case.ratio == pytest.approx(0.2)
    # ours alone
    assert [impl.problem for impl in found(5.05).impls[1:]] == [
        "9 calls of 0.1 s do not fit into the 5.05 s of --case-seconds",
        "no time left of the 5.05 s of --case-seconds",
    ]  # fmt: skip
    # not even that
    none = found(2.0)
    assert none.problem == "9 calls of 0.5 s do not fit into the 2 s of --case-seconds" and not none.impls
    begin = clock.seconds
    whole = found(math.inf)
    assert whole.rounds == 30 and not whole.cut and clock.seconds - begin > 100


def test_a_case_that_a_cpu_has_no_memory_for(double: ToyOp, timer: Timer) -> None:
    settings = ops.Settings(words=("M=999999999", "N=999999999"), peers=())
    (case,) = ops.bench_ops(["double"], hardware.cpu(), settings).ops[0].cases
    assert case.problem.startswith("out of memory: ") and case.sizes == {"M": 999999999, "N": 999999999}


def test_a_case_too_large_for_the_memory(double: ToyOp, timer: Timer) -> None:
    def huge() -> tuple[Any, ...]:
        raise torch.OutOfMemoryError("tried to allocate 900 GiB\nmore")

    double.restudy(bench_cases=lambda suite, device: {"huge": huge, "fine": lambda: (torch.ones(4, 8),)})
    first, second = bench().ops[0].cases
    assert first.problem == "out of memory: tried to allocate 900 GiB" and not first.impls
    assert not second.problem and second.ratio is not None


def test_a_peer_that_needs_too_much_memory(double: ToyOp, timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    def huge(*_args: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 900 GiB")

    monkeypatch.setattr(peers, "prepare", huge)
    case = bench(matching="64x").ops[0].cases[0]
    assert case.impls[0].ms is not None and case.impls[1].problem.startswith("raised OutOfMemoryError: tried")
    double.native("huge", huge, priority=99)
    assert bench(matching="64x").ops[0].cases[0].problem.startswith("out of memory: tried")


def test_a_case_that_the_op_refuses(double: ToyOp, timer: Timer) -> None:
    def refuse(x: Tensor) -> None:
        if x.shape[0] == 16:
            raise InvalidArgument("double: takes no 16 rows")

    double.redefine(check=refuse)
    first, second, _ = bench().ops[0].cases
    assert first.problem == "the op refuses it: double: takes no 16 rows" and not first.impls
    assert not second.problem and second.ratio is not None


def test_a_device_that_fails_keeps_what_was_measured(double: ToyOp, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Timer):
        def __call__(self, works: list[Any], **options: Any) -> interleaved.Interleaved:
            if len(self.calls) == 2:
                raise RuntimeError("CUDA error: an illegal memory access\nmore")
            return super().__call__(works, **options)

    monkeypatch.setattr(interleaved, "measure", Failing())
    found = bench().ops[0]
    assert found.problem == "ended at RuntimeError: CUDA error: an illegal memory access"
    assert len(found.cases) == 1 and found.geomean == pytest.approx(2.0)


def test_progress(double: ToyOp, timer: Timer) -> None:
    seen: list[tuple[str, str, int, int]] = []
    ops.bench_ops(
        ["double", "rms_norm", "double"],
        hardware.cpu(),
        ops.Settings(suite="quick", peers=(), matching="bf16"),
        on_case=lambda *facts: seen.append(facts),
    )
    assert [(op, index, total) for op, _, index, total in seen] == [
        ("double", 0, 4), ("double", 1, 4), ("rms_norm", 2, 4), ("rms_norm", 3, 4),
    ]  # fmt: skip


def test_the_record_so_far_after_each_op(double: ToyOp, timer: Timer) -> None:
    seen: list[records.OpBenchRecord] = []
    settings = ops.Settings(suite="quick", peers=(), matching="bf16")
    whole = ops.bench_ops(["double", "rms_norm"], hardware.cpu(), settings, on_op=seen.append)
    assert [[op.op for op in record.ops] for record in seen] == [["double"], ["double", "rms_norm"]]
    assert seen[1].ops == whole.ops and seen[0].ops == whole.ops[:1]


# --- records


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz"])
def test_every_time_of_a_record_can_be_computed_from_its_file(
    double: ToyOp, timer: Timer, tmp_path: Path, name: str
) -> None:
    timer.rounds, timer.ms = 400, 1 / 3
    records.save(bench(peers=("eager",)), tmp_path / name)
    record = records.load_as(tmp_path / name, records.OpBenchRecord)
    assert record.samples == "full"
    pairs = []
    for case in record.ops[0].cases:
        ours, *_ = timed = [impl for impl in case.impls if impl.ms is not None]
        assert len(timed) == 2
        for impl in timed:
            assert len(impl.samples) == case.rounds == 400
            assert impl.ms == statistics.median(impl.samples) and impl.ci == timing.bootstrap_median(impl.samples)
        (peer,) = [impl for impl in timed if impl.name == case.best_peer]
        pairs.append((peer.samples, ours.samples))
        assert (case.ratio, case.ci) == timing.bootstrap_speedup(pairs[-1:])
    assert (record.ops[0].geomean, record.ops[0].ci) == timing.bootstrap_speedup(pairs)


def test_one_record_an_op(double: ToyOp, timer: Timer) -> None:
    record = ops.bench_ops(["double", "rms_norm"], hardware.cpu(), ops.Settings("quick", ("eager",), "64x"))
    parts = ops.by_op(record)
    assert list(parts) == ["double", "rms_norm"] == [part.ops[0].op for part in parts.values()]
    assert all(len(part.ops) == 1 and part.header == record.header for part in parts.values())
    assert len(record.ops) == 2


# --- the timer


def test_works_run_in_turn_in_random_order() -> None:
    order: list[str] = []
    works = [partial(order.append, name) for name in "abc"]
    taken = interleaved.measure(works, device="cpu", seconds=0.0, min_rounds=12)
    assert taken.rounds == 12 and len(taken.samples) == 3 and taken.clock == "host wall"
    assert all(sample > 0 for series in taken.samples for sample in series)
    rounds = ["".join(order[-72:][start : start + 6]) for start in range(0, 72, 6)]
    # each timed call follows one that is not timed
    assert all(sorted(turns[::2]) == list("abc") and turns[::2] == turns[1::2] for turns in rounds)
    assert len(set(rounds)) > 3


def test_a_limit_ends_the_rounds_but_not_before_the_third() -> None:
    clock = SimulatedClock()
    works = [partial(clock.advance, 1.0)]
    assert interleaved.measure(works, device="cpu", limit=20.0, now=clock).rounds == 9
    assert interleaved.measure(works, device="cpu", limit=-1.0, now=clock).rounds == interleaved.LEAST_ROUNDS
    assert interleaved.measure(works, device="cpu", now=clock).rounds == 30


def test_a_sample_is_of_the_work_it_is_listed_under() -> None:
    clock = SimulatedClock()
    works = [partial(clock.advance, seconds) for seconds in (0.001, 0.002, 0.003)]
    taken = interleaved.measure(works, device="cpu", seconds=0.0, min_rounds=8, now=clock)
    assert taken.samples == tuple(pytest.approx([ms] * 8) for ms in (1.0, 2.0, 3.0))


def test_rounds_go_on_for_the_time_given_and_end() -> None:
    clock = SimulatedClock()
    taken = interleaved.measure([partial(clock.advance, 0.002)], device="cpu", seconds=0.1, min_rounds=3, now=clock)
    # warm-up calls come before; 0.1 s of two calls of 2 ms each, or one more where sums of floats fall short
    assert 25 <= taken.rounds <= 26 and taken.samples[0] == pytest.approx([2.0] * taken.rounds)
    one = interleaved.measure([partial(clock.advance, 0.5)], device="cpu", seconds=0.1, min_rounds=3, now=clock)
    assert one.rounds == 3
    endless = interleaved.measure([partial(clock.advance, 0.01)], device="cpu", seconds=60.0, now=clock)
    assert endless.rounds == interleaved.MAX_ROUNDS
    with pytest.raises(InvalidArgument, match="at least one work"):
        interleaved.measure([], device="cpu")


class FakeGpu:
    """The part of torch.cuda that the timer uses, with the order on the stream; events are 1 ms a step apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: Any) -> None:
                gpu.log.append("event")
                self.at = len(gpu.log)

            def synchronize(self) -> None:
                gpu.log.append("wait")

            def elapsed_time(self, end: Any) -> float:
                return float(end.at - self.at)

        stream = types.SimpleNamespace(synchronize=lambda: gpu.log.append("wait"))
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: gpu.log.append("wait"))
        monkeypatch.setattr(timing.Stopwatch, "flush", lambda self: gpu.log.append("flush"))
        monkeypatch.setattr(interleaved, "CLOCK_SECONDS", 0.0)


def test_on_a_gpu_every_call_is_cold_and_nothing_waits_inside_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    monkeypatch.setattr(interleaved, "_flushes", lambda stopwatch, works: 2)
    works = [partial(gpu.log.append, name) for name in "ab"]
    taken = interleaved.measure(works, device="cuda:0", seconds=0.0, min_rounds=3)
    calls = {name: ["flush", "flush", "event", name, "event"] for name in "ab"}
    one, other = [*calls["a"], *calls["b"], "wait"], [*calls["b"], *calls["a"], "wait"]
    rounds = [gpu.log[-33:][start : start + 11] for start in range(0, 33, 11)]
    assert all(turns in (one, other) for turns in rounds)
    assert taken.samples == ((2.0,) * 3, (2.0,) * 3) and taken.clock == "device events, caches cold and clean"


@pytest.mark.parametrize(("host", "wanted"), [(0.0001, 1), (0.01, 4), (1.0, interleaved.MAX_FLUSHES)])
def test_flushes_last_longer_than_the_slowest_host_call(
    monkeypatch: pytest.MonkeyPatch, host: float, wanted: int
) -> None:
    FakeGpu(monkeypatch)
    # a flush lasts 2 steps of 1 ms, plus the step of its own; 10 ms of host need 15 ms of flush
    clock = SimulatedClock()
    watch = timing.Stopwatch("cuda:0", now=clock)
    monkeypatch.setattr(timing.Stopwatch, "time", lambda self, work: (4.0, 4.0))
    assert interleaved._flushes(watch, [lambda: None, partial(clock.advance, host)]) == wanted


@pytest.mark.gpu
def test_a_cold_read_on_the_gpu_is_not_faster_than_memory() -> None:
    # 16 MiB fit into the cache: warm reads would pass the memory's bandwidth
    x = torch.randn(4 * MIB, device="cuda")
    y = torch.empty_like(x)
    taken = interleaved.measure([lambda: y.copy_(x)], device=hardware.detect().torch_name)
    gbps = 2 * x.nbytes / min(taken.samples[0]) / 1e6
    known = hardware.detect().known
    assert known is None or gbps < 1.1 * known.bandwidth


# --- peers


def test_packages_that_are_not_here_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    versions, missing = peers.available()
    assert versions == {"eager": f"torch {torch.__version__}", "compile": f"torch {torch.__version__}"}
    assert "pip install --no-deps liger-kernel" in missing["liger"] and "AMD GPU" in missing["aiter"]


def test_eager_and_compile_are_the_torch_backend(double: ToyOp, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 5)
    torch.testing.assert_close(peers.prepare("eager", double, double.of(x)).run(), 2 * x)
    asked: list[dict[str, Any]] = []
    resets: list[bool] = []

    def compile(function: Any, **options: Any) -> Any:
        asked.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(True))
    torch.testing.assert_close(peers.prepare("compile", double, double.of(x)).run(), 2 * x)
    assert asked == [{"dynamic": False, "fullgraph": True}] and resets == [True]
    double.native("torch", lambda x: x + x, refuse=lambda x: "takes float64", priority=10)
    with pytest.raises(Unsupported, match="takes float64"):
        peers.prepare("eager", double, double.of(x))
    del double.backends["torch"]
    with pytest.raises(Unsupported, match="no PyTorch backend"):
        peers.prepare("compile", double, double.of(x))


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules or end == len(parts):
            monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
    for key, value in content.items():
        setattr(sys.modules[name], key, value)


def _function(apply: Callable[..., Any]) -> Any:
    return types.SimpleNamespace(apply=apply)


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """liger-kernel 0.8.5 as its signatures are, computing with torch."""

    def rms(X: Tensor, W: Tensor, eps: float, offset: float, casting_mode: str, in_place: bool) -> Tensor:
        assert (offset, casting_mode, in_place) == (0.0, "llama", False)
        return F.rms_norm(X, X.shape[-1:], W, eps)

    def add_rms(
        X: Tensor, R: Tensor, W: Tensor, eps: float, offset: float, casting_mode: str, in_place: bool
    ) -> tuple[Tensor, Tensor]:
        return rms(X + R, W, eps, offset, casting_mode, in_place), X + R

    def layer(X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
        return F.layer_norm(X, X.shape[-1:], W, B, eps)

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, ids: None, unsqueeze_dim: int, rotary_dim: int) -> Any:
        assert q.transpose(1, 2).is_contiguous() and k.transpose(1, 2).is_contiguous(), "it would copy them"
        half = rotary_dim // 2
        # [S, R/2] or [batch, S, R/2]
        cos, sin = (table[None, None] if table.ndim == 2 else table[:, None] for table in (cos, sin))
        for part in (q, k):
            a, b = part[..., :half].clone(), part[..., half:rotary_dim].clone()
            part[..., :half] = a * cos - b * sin
            part[..., half:rotary_dim] = b * cos + a * sin
        return q, k

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    _module(monkeypatch, "liger_kernel.ops.rope", LigerRopeFunction=_function(rope))
    _module(monkeypatch, "liger_kernel.ops.rms_norm", LigerRMSNormFunction=_function(rms))
    _module(monkeypatch, "liger_kernel.ops.fused_add_rms_norm", LigerFusedAddRMSNormFunction=_function(add_rms))
    _module(monkeypatch, "liger_kernel.ops.layer_norm", LigerLayerNormFunction=_function(layer))
    _module(
        monkeypatch,
        "liger_kernel.ops.swiglu",
        LigerSiLUMulFunction=_function(lambda a, b: F.silu(a) * b),
        LigerFusedGateUpSiLUMulFunction=_function(lambda y: F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1]),
    )
    gelu = _function(lambda a, b: F.gelu(a, approximate="tanh") * b)
    _module(monkeypatch, "liger_kernel.ops.geglu", LigerGELUMulFunction=gelu)
    _module(monkeypatch, "liger_kernel.ops.softmax", LigerSoftmaxFunction=_function(lambda x: x.softmax(-1)))


def _peer_matches(peer: str, name: str, *args: Any) -> None:
    op, call = registry.get(name), call_of(name, *args)
    before = mapped(call, torch.clone)
    prepared = peers.prepare(peer, op, call)
    got = ops.results_of(prepared.finish(prepared.run()))
    for result, want in zip(got, ops.results_of(op.reference(before)), strict=True):
        torch.testing.assert_close(result, want, rtol=1e-5, atol=1e-5)
    for value, kept in zip(tensors_of(call), tensors_of(before), strict=True):
        assert torch.equal(value, kept), "the peer wrote to what it shares"


def test_liger_is_called_as_it_wants_to_be(liger: None) -> None:
    x, y, w, b = torch.randn(4, 64), torch.randn(4, 64), torch.randn(64), torch.randn(64)
    _peer_matches("liger", "rms_norm", x, w, 1e-3)
    _peer_matches("liger", "add_rms_norm", x, y, w, 1e-3)
    _peer_matches("liger", "layer_norm", x, w, b, 1e-3)
    _peer_matches("liger", "silu_and_mul", x, y)
    _peer_matches("liger", "silu_and_mul", x)
    _peer_matches("liger", "gelu_and_mul", x, y, "tanh")
    _peer_matches("liger", "softmax", x)


def test_liger_rotates_copies_of_its_own(liger: None) -> None:
    for tokens, heads, rotated in ((7, 3, 32), (1, 2, 32), (5, 4, 16)):
        table = torch.randn(tokens + 2, rotated // 2)
        _peer_matches("liger", "rope", torch.randn(tokens, heads, 32), table.cos(), table.sin())
    table, positions = torch.randn(9, 16), torch.tensor([[8], [0], [3]])
    _peer_matches("liger", "rope", torch.randn(3, 1, 4, 32), table.cos(), table.sin(), positions)
    own = torch.randn(3, 5, 16)
    _peer_matches("liger", "rope", torch.randn(3, 5, 2, 32), own.cos(), own.sin())
    x, table = torch.randn(4, 2, 32), torch.randn(4, 16)
    for args in ((x, table, table, None, "gptj"), (x[None, None], table, table), (x[:, :1], table, table)):
        with pytest.raises(Unsupported, match=r"NeoX style on one batch|here 2 to 128 heads"):
            peers.prepare("liger", registry.get("rope"), call_of("rope", *args))


@pytest.mark.parametrize(
    ("name", "count", "extra", "message"),
    [
        ("gelu_and_mul", 2, (), "offers the tanh form only"),
        ("gelu_and_mul", 1, (None, "tanh"), "takes gate and up as two tensors"),
        ("layer_norm", 1, (), "needs a weight and a bias"),
        ("add_rms_norm", 2, (), "needs a weight"),
        ("double", 1, (), "does not offer this op"),
    ],
)
def test_what_liger_does_not_offer_is_said(
    double: ToyOp, liger: None, name: str, count: int, extra: tuple[Any, ...], message: str
) -> None:
    args = (*(torch.randn(4, 64) for _ in range(count)), *extra)
    with pytest.raises(Unsupported, match=message):
        peers.prepare("liger", registry.get(name), double.of(*args) if name == "double" else call_of(name, *args))


def test_kernels_of_others_are_not_tried_on_a_cpu(liger: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(Unsupported, match="runs on a GPU"):
        peers.prepare(
            "liger", registry.get("silu_and_mul"), call_of("silu_and_mul", torch.ones(1, 2), torch.ones(1, 2))
        )


def test_aiter_is_called_as_it_wants_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def gated(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], None]:
        return lambda out, x: out.copy_(act(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1])

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    _module(
        monkeypatch,
        "aiter",
        rms_norm=lambda x, weight, epsilon: F.rms_norm(x, x.shape[-1:], weight, epsilon),
        layer_norm=lambda x, weight, bias, epsilon: F.layer_norm(x, x.shape[-1:], weight, bias, epsilon),
        silu_and_mul=gated(F.silu),
        gelu_and_mul=gated(F.gelu),
        gelu_tanh_and_mul=gated(partial(F.gelu, approximate="tanh")),
    )
    x, y, w, b = torch.randn(4, 64), torch.randn(4, 64), torch.randn(64), torch.randn(64)
    _peer_matches("aiter", "rms_norm", x, w, 1e-3)
    _peer_matches("aiter", "layer_norm", x, w, b, 1e-3)
    _peer_matches("aiter", "silu_and_mul", x, y)
    _peer_matches("aiter", "silu_and_mul", x)
    _peer_matches("aiter", "gelu_and_mul", x, y)
    _peer_matches("aiter", "gelu_and_mul", x, y, "tanh")
    with pytest.raises(Unsupported, match="needs a weight"):
        peers.prepare("aiter", registry.get("rms_norm"), call_of("rms_norm", x))
    quantized: list[Any] = []
    per_token = lambda x, quant_dtype: quantized.append((x, quant_dtype))  # noqa: E731
    _module(monkeypatch, "aiter.ops.quant", per_token_quant_hip=per_token)
    peers.AITER["quantize_int8"](call_of("quantize_int8", x))()
    assert quantized[0][0] is x and quantized[0][1] == torch.int8
    with pytest.raises(Unsupported, match="a scale a token"):
        peers.AITER["quantize_int8"](call_of("quantize_int8", x, None, "group"))


def test_peers_are_of_ops_there_are() -> None:
    assert {*peers.LIGER, *peers.AITER, *suites.VARIANTS} <= {*registry.names()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(peers.LIGER))
def test_liger_computes_what_we_compute(name: str) -> None:
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    op = registry.get(name)
    call = op.study.inputs(64, 1024, torch.float32, "cuda")._replace(**suites.VARIANTS.get(name, {}).get("tanh", {}))
    prepared = peers.prepare("liger", op, call)
    got_all = ops.results_of(prepared.finish(prepared.run()))
    for got, want in zip(got_all, ops.results_of(op.reference(call)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


# --- the plot


@pytest.fixture
def record(double: ToyOp, timer: Timer) -> records.OpBenchRecord:
    made = ops.bench_ops(
        ["double", "silu_and_mul"], hardware.cpu(), ops.Settings("quick", ("eager",)), command="bench x"
    )
    made.header.device["name"] = "Some GPU"
    return made


def test_svg_says_what_was_measured_where(record: records.OpBenchRecord, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "a.svg"
    record.peers = {"eager": "torch 9", "liger": "liger-kernel 8.7"}
    plot.draw(record, path, source="results/ops.json")
    text = path.read_text()
    for part in ("double", "silu_and_mul", "wavecrest", "eager", "copy of as many bytes", "% of copy bandwidth"):
        assert part in text, part
    for part in ("Measured on Some GPU", record.header.created[:10], "liger-kernel 8.7", "bench x", "results/ops.json"):
        assert part in text, part
    before = path.read_bytes()
    plot.draw(record, path, source="results/ops.json")
    assert path.read_bytes() == before and len(before) < 100_000
    assert [file.name for file in tmp_path.iterdir()] == ["a.svg"]


def test_png(record: records.OpBenchRecord, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot.draw(record, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_bars_are_percentages_and_gaps_are_gaps(record: records.OpBenchRecord) -> None:
    figure_module = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed")
    found = record.ops[0]
    found.cases[1].impls[1].ms = None
    axes = figure_module.Figure().subplots()
    plot._panel(axes, found, found.cases)
    heights = [round(bar.get_height(), 6) for bar in axes.patches]
    shares = [
        ops.percent(found, case, impl) for index in (0, 1) for case in found.cases for impl in [case.impls[index]]
    ]
    assert heights == [round(share, 6) for share in shares if share is not None] and len(heights) == 5
    (line,) = axes.collections
    level = line.get_segments()[0][0][1]
    first = found.cases[0]
    assert first.copy_ms is not None
    assert level == pytest.approx(100 * first.bytes / first.copy_ms / 1e6 / found.copy_gbps)
    assert [text.get_text() for text in axes.get_legend().get_texts()][-1] == "copy of as many bytes"


def test_names_of_cases_fit_under_their_bars() -> None:
    assert plot._label("4096x16384 bf16 tanh") == "4096\n× 16384\nbf16\ntanh"
    assert plot._label("prefill 64 columns=80") == "prefill\n64\ncolumns=80"


def test_many_cases_make_several_panels(record: records.OpBenchRecord) -> None:
    found = record.ops[0]
    found.cases = [found.cases[0].model_copy(update={"case": str(index)}) for index in range(21)]
    rows = plot._chunks(found)
    assert [len(row) for row in rows] == [11, 10] and [case.case for row in rows for case in row] == [
        *map(str, range(21))
    ]


def test_plots_that_cannot_be_drawn(
    record: records.OpBenchRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgument, match=r"ending in \.svg or \.png, not a\.pdf"):
        plot.draw(record, tmp_path / "a.pdf")
    with pytest.raises(OutputError, match="cannot write"):
        plot.draw(record, tmp_path / "gone" / "a.svg")
    for found in record.ops:
        for case in found.cases:
            case.impls = []
    with pytest.raises(InvalidArgument, match="nothing was timed"):
        plot.draw(record, tmp_path / "a.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependency, match="pip install matplotlib"):
        plot.check(tmp_path / "a.svg")
    assert not list(tmp_path.iterdir())


def bench_case(op: str, case: str) -> Any:
    cases = registry.get(op).study.bench_cases
    assert cases is not None
    return cases("quick", "cpu")[case]()


def test_a_peer_gets_a_packed_weight_unpacked() -> None:
    op, call = registry.get("gemm"), bench_case("gemm", "16x4096x4096 weight int4")
    small = call._replace(a=call.a[:, :128], b=call.b[:64, :32], scale_b=call.scale_b[:1, :32])
    eager = peers.prepare("eager", op, small)
    want = op.reference(small)
    assert (eager.run().float() - want.float()).abs().max() <= 2e-2 * want.abs().max()
    with pytest.raises(Unsupported, match="stored in fewer bits"):
        op.run("torch", small)


def test_an_op_with_several_kernels_shows_each(device: str) -> None:
    op = registry.get("gemm")
    assert ops._own_backends(op) == [
        "triton",
        "triton_stream_k",
        "triton_gemv",
        "triton_hopper",
        "triton_hopper_epilogue",
        "triton_hopper_blocks",
        "triton_hopper_words",
        "triton_cdna",
    ]
    assert ops._own_backends(registry.get("rms_norm")) == []
    call = op.study.inputs(3, 32, 64, torch.float32, device)
    planned = ops._with_peers(("eager",), op, call)
    names = [candidate.timing.name for candidate in ops._candidates(op, call, planned, UNLIMITED, math.inf)]
    assert names == [
        "wavecrest",
        "triton",
        "triton_stream_k",
        "triton_gemv",
        "triton_hopper",
        "triton_hopper_epilogue",
        "triton_hopper_blocks",
        "triton_hopper_words",
        "triton_cdna",
        "eager",
    ]
    prepared = ops.forced(op, "triton_gemv", call)
    assert torch.allclose(prepared.run(), op.reference(call), atol=1e-4)
    # beside ours, not one of those it is compared with
    row = records.OpCase(case="one")
    made = [ops._Candidate(records.ImplTiming(name=name), None, (1.0, 1.0)) for name in names]
    for candidate in made:
        candidate.timing.ms = 0.5 if candidate.timing.name == "triton" else 1.0
    ops._compare_with_best(row, made)
    assert row.best_peer == "eager"


@pytest.mark.parametrize(
    "case", ["b2h8kv2t256d64", "b2h8kv2t256d64 pages=64", "b2h8kv2t256d64 int8", "b2h8kv2t256d64 int4"]
)
def test_pytorch_on_full_caches_in_16_bits(case: str) -> None:
    op = registry.get("flash_decoding")
    # PyTorch rounds probabilities to bfloat16, which some values of so few keys put beyond the limit
    torch.manual_seed(0)
    call = bench_case("flash_decoding", case)
    made = peers.prepare("sdpa_flash", op, call)
    got, limits = made.finish(made.run()), ops.limits_of(op, "bfloat16")
    assert ops.gate(records.ImplTiming(name="x"), (got,), (op.reference(call),), limits) == ""
    with pytest.raises(Unsupported, match="over full caches"):
        peers.prepare("sdpa_flash", op, call._replace(seq_lens=call.seq_lens - 1))
    with pytest.raises(Unsupported, match="no window"):
        peers.prepare("sdpa_flash", op, call._replace(window=9))
    with pytest.raises(Unsupported, match="is for flash_decoding"):
        peers.prepare("sdpa_flash", registry.get("rms_norm"), call_of("rms_norm", torch.ones(2, 4)))
