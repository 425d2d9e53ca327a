"""A whole tuning run of an op of this test, over planted backends: verdicts, files, budget, interruption, resuming."""

from __future__ import annotations

import gzip
import json
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.clock import SimulatedClock
from tests.toy import ToyOp, takes
from wavecrest import hardware, records
from wavecrest.dispatch import lookup, registry
from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.keys import row_bucket
from wavecrest.dispatch.tuned import Config, database
from wavecrest.errors import InvalidArgument, OutputError, TableError, Unsupported
from wavecrest.measure import timing
from wavecrest.measure.interleaved import Interleaved
from wavecrest.records import files, provenance
from wavecrest.tune import admission, candidates, compile_ahead, race, session

# an architecture is known, so that spaces are asked and impossible times found, and everything runs on the CPU
DEVICE = replace(hardware.cpu(), arch="sm_90")
ROWS = (4, 16, 64)


class Clock:
    """A timer whose works take what `times` has for the call they end up in (ms), and that counts its calls."""

    def __init__(self, times: dict[str, float]) -> None:
        self.times, self.calls = times, 0
        self.ran: list[str] = []

    def __call__(self, works: Sequence[Callable[[], Any]], *, rounds: int, seconds: float) -> Interleaved:
        self.calls += 1
        names = []
        for work in works:
            self.ran.clear()
            work()
            names.append(self.ran[-1])
        series = tuple(tuple(self.times[name] * (1 + index / 1000) for index in range(rounds)) for name in names)
        return Interleaved(series, "made up")


@pytest.fixture
def clock() -> Clock:
    return Clock({"torch": 2.0, "b1": 1.5, "b2": 1.0, "b4": 0.9, "lib": 1.8})


@pytest.fixture
def op(clock: Clock) -> Iterator[ToyOp]:
    """y = 2x, with PyTorch, a kernel of three configurations (b1, the default, b2, b4), and a library."""

    def ran(name: str) -> None:
        clock.ran.append(name)

    def native(x: Tensor) -> Tensor:
        ran("torch")
        return x + x

    def kernel(x: Tensor, *, config: Config) -> Tensor:
        ran(f"b{config['BLOCK']}")
        return 2 * x

    def library(x: Tensor) -> Tensor:
        ran("lib")
        return x * 2

    made = ToyOp(
        "double",
        reference=lambda x: 2 * x,
        key=lambda x: (row_bucket(x.shape[0]), x.shape[1], "float32", None, x.device.type, False),
        key_fields=("rows", "columns", "dtype", "option", "device", "grad"),
        inputs=lambda M, N, dtype, device: (torch.randn(M, N, dtype=dtype, device=device),),
        cost=lambda x: Cost(flops=x.numel(), bytes=2 * x.nbytes),
        default_config=lambda key: Config(BLOCK=1),
        bench_cases=lambda suite, device: {f"rows {M}": lambda M=M: (torch.randn(M, 8),) for M in ROWS},
    )
    made.native("torch", native, priority=10)
    made.native("library", library, priority=4)
    made.kernel(
        "kernel",
        kernel,
        priority=5,
        space=lambda key, arch: [Config(BLOCK=1), Config(BLOCK=2), Config(BLOCK=4), Config(BLOCK=2)],
    )
    yield made
    del registry.STATE.ops["double"]


def plant(op: ToyOp, clock: Clock, name: str, ms: float, run: Callable[[Tensor], Tensor], **more: Any) -> None:
    def planted(x: Tensor) -> Tensor:
        clock.ran.append(name)
        return run(x)

    clock.times[name] = ms
    op.native(name, planted, refuse=more.pop("refuse", takes), priority=1)


def tune(
    clock: Clock, targets: session.Targets | None = None, *, resume: bool = False, **settings: Any
) -> records.TuneRecord:
    return session.tune("double", DEVICE, session.Settings(**settings), targets, resume=resume, timer=clock)


def rows_of(key: records.TunedKey) -> dict[str, records.TuneCandidate]:
    return {" ".join([one.backend, *(str(value) for value in one.config.values())]): one for one in key.candidates}


def test_every_key_gets_the_fastest(op: ToyOp, clock: Clock) -> None:
    record = tune(clock)
    assert [key.case for key in record.keys] == ["rows 4", "rows 16", "rows 64"] and not record.left
    for key, rows in zip(record.keys, ROWS, strict=True):
        assert key.key == {
            "rows": rows, "columns": 8, "dtype": "float32", "option": None, "device": "cpu", "grad": False,
        }  # fmt: skip
        assert (key.backend, key.config) == ("kernel", {"BLOCK": 4})
        assert key.us == pytest.approx(900, rel=0.05) and key.native_us == pytest.approx(2000, rel=0.05)
        assert key.ratio == pytest.approx(2 / 0.9) and key.ci is not None and key.ci.low == pytest.approx(2 / 0.9)
        assert key.reason == "the fastest of 4 in the final" and key.clock == "made up" and key.rounds == 60
        found = rows_of(key)
        assert list(found) == ["torch", "kernel 1", "kernel 2", "kernel 4", "library"]
        assert {name: one.role for name, one in found.items() if one.role != "tried"} == {
            "torch": "native", "kernel 1": "default",
        }  # fmt: skip
        assert found["kernel 4"].status == "won" and found["kernel 2"].status == "timed"
        assert found["library"].status == "dropped" and found["library"].quick_ms == pytest.approx(1.8, rel=0.05)
    assert record.header.evidence == "measured" and record.compilation.note == "the CPU runs no compiled kernels"


LIARS: dict[str, tuple[float, Callable[[Tensor], Tensor], str, str]] = {
    "fast and wrong": (0.1, lambda x: 2.5 * x, "wrong", "result 0 has error 0.25"),
    "wrong at the tail": (
        0.1, lambda x: torch.cat([2 * x[:-1], 1.9 * x[-1:]]), "wrong", "result 0 has error"
    ),
    "NaN": (0.1, lambda x: (2 * x).masked_fill(x == x.max(), float("nan")), "wrong", "result 0 has error"),
    "crashing": (0.1, lambda x: 1 / 0, "failed", "raised ZeroDivisionError: division by zero"),
    "slow": (9.0, lambda x: 2 * x, "dropped", "10.00 times the best in the quick round"),
    "impossible": (1e-9, lambda x: 2 * x, "impossible", "0.00 µs is below the"),
}  # fmt: skip


@pytest.mark.parametrize("name", LIARS)
def test_planted_liars_get_their_verdict(op: ToyOp, clock: Clock, name: str) -> None:
    ms, run, status, reason = LIARS[name]
    plant(op, clock, name, ms, run)
    (key,) = tune(clock, matching="rows 64").keys
    found = rows_of(key)[name]
    assert found.status == status and found.reason.startswith(reason)
    assert (key.backend, key.config) == ("kernel", {"BLOCK": 4})
    assert found.ms is None and not found.samples
    if status in ("wrong", "failed"):
        assert found.quick_ms is None, "what is wrong is not timed"


def test_a_tie_keeps_the_default(op: ToyOp, clock: Clock) -> None:
    clock.times |= {"b1": 0.904, "b2": 0.901}
    (key,) = tune(clock, matching="rows 64").keys
    assert key.config == {"BLOCK": 1} and "goes to the default" in key.reason
    assert rows_of(key)["kernel 1"].status == "won" and rows_of(key)["kernel 4"].status == "timed"


def test_native_wins_what_it_is_fastest_in(op: ToyOp, clock: Clock, tmp_path: Path) -> None:
    clock.times["torch"] = 0.5
    targets = session.Targets(tmp_path / "a.json", tmp_path / "double.csv")
    (key,) = tune(clock, targets, matching="rows 64").keys
    assert (key.backend, key.config, key.ratio) == ("torch", {}, 1.0) and key.us == key.native_us
    (row,) = database.read(tmp_path / "double.csv", lookup.fields_of(op)).values()
    assert row.backend == "torch" and row.config is None and row.us == row.native_us == pytest.approx(515, rel=0.05)


def test_where_native_declines_there_is_no_time_of_it(op: ToyOp, clock: Clock, tmp_path: Path) -> None:
    op.native("torch", lambda x: x, refuse=lambda x: "has no such product", priority=10)
    targets = session.Targets(tmp_path / "a.json", tmp_path / "double.csv")
    (key,) = tune(clock, targets, matching="rows 64").keys
    assert key.native_us is None and key.ratio is None and key.backend == "kernel"
    assert rows_of(key)["torch"].status == "refused" and rows_of(key)["torch"].reason == "has no such product"
    (row,) = database.read(tmp_path / "double.csv", lookup.fields_of(op)).values()
    assert row.native_us is None


def test_wrong_native_is_no_measure(op: ToyOp, clock: Clock) -> None:
    op.native("torch", lambda x: 3 * x, priority=10)
    (key,) = tune(clock, matching="rows 64").keys
    assert rows_of(key)["torch"].status == "wrong" and key.native_us is None and key.backend == "kernel"


def test_a_winner_that_is_wrong_the_second_time_has_not_won(op: ToyOp, clock: Clock) -> None:
    calls = 0

    def racing(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return 2 * x if calls <= 5 else 2.1 * x

    plant(op, clock, "racing", 0.4, racing)
    (key,) = tune(clock, matching="rows 64").keys
    found = rows_of(key)["racing"]
    assert found.status == "wrong" and found.reason.startswith("after it was timed: result 0 has error")
    assert (key.backend, key.config, key.reason) == ("kernel", {"BLOCK": 4}, "the fastest of 4 in the final")
    # what its time had thrown out is back
    others = {name: (one.status, one.reason) for name, one in rows_of(key).items() if name != "racing"}
    assert others.pop("library") == ("dropped", "2.00 times the best in the quick round")
    assert others.pop("kernel 4") == ("won", "") and set(others.values()) == {("timed", "")}


def test_nobody_left_is_no_row(op: ToyOp, clock: Clock, tmp_path: Path) -> None:
    for name in ("torch", "kernel", "library"):
        op.native(name, lambda x: 3 * x, priority=5)
    record = tune(clock, session.Targets(tmp_path / "a.json", tmp_path / "double.csv"), matching="rows 64")
    assert (
        record.keys[0].backend is None and record.keys[0].problem == "no candidate was found right and could be timed"
    )
    assert not (tmp_path / "double.csv").exists() and clock.calls == 0


def test_only_wanted_backends_beside_native(op: ToyOp, clock: Clock) -> None:
    (key,) = tune(clock, matching="rows 64", backends=("library",)).keys
    assert list(rows_of(key)) == ["torch", "library"] and key.backend == "library"
    (key,) = tune(clock, matching="rows 64", backends=("torch",)).keys
    assert list(rows_of(key)) == ["torch"] and key.backend == "torch"
    with pytest.raises(InvalidArgument, match="double has no backend 'triton' to tune; it has torch, library, kernel"):
        tune(clock, backends=("triton",))
    with pytest.raises(InvalidArgument, match="no backend 'reference' to tune"):
        tune(clock, backends=("reference",))


def test_unknown_hardware_leaves_the_default(op: ToyOp) -> None:
    key = op.key(op.of(torch.ones(4, 8)))
    assert candidates.configurations(op, "kernel", key, None) == (Config(BLOCK=1),)
    assert len(candidates.configurations(op, "kernel", key, hardware.ARCHS["sm_90"])) == 3
    record = session.tune("double", hardware.cpu(), session.Settings(matching="rows 4", seconds=0.001))
    assert [one.backend for one in record.keys[0].candidates] == ["torch", "kernel", "library"]
    assert record.keys[0].least_us is None and record.keys[0].clock == "host wall"


def test_there_is_one_default(op: ToyOp) -> None:
    op.kernel("other", lambda x, *, config: 2 * x, priority=5)
    call = op.of(torch.ones(4, 8))
    field = candidates.field(op, call, op.key(call), None, candidates.backends(op, None))
    assert [(one.backend, one.role) for one in field.candidates] == [
        ("torch", "native"), ("kernel", "default"), ("other", "tried"), ("library", "tried"),
    ]  # fmt: skip


def test_configurations_in_place_of_the_backends_own(op: ToyOp, clock: Clock) -> None:
    clock.times["b16"] = 0.5
    wanted = (Config(BLOCK=16), Config(BLOCK=16, num_warps=2), Config(WIDTH=3))
    (key,) = tune(clock, matching="rows 64", backends=("kernel",), configs=wanted).keys
    tried = [(one.backend, one.config) for one in key.candidates if one.status != "refused"]
    # launch options may be set by any
    assert tried == [("torch", {}), ("kernel", {"BLOCK": 16}), ("kernel", {"BLOCK": 16, "num_warps": 2})]
    assert [one.role for one in key.candidates if one.status != "refused"] == ["native", "tried", "tried"]
    # none of them is the default, whose time rows are compared by
    assert session.evidence_of(key, provenance.header(DEVICE)).default_us is None
    (left,) = [one for one in key.candidates if one.status == "refused"]
    assert left.reason == "with WIDTH=3, which does not know WIDTH=3" and key.config == {"BLOCK": 16}


# --- cases


def test_a_key_is_tuned_once(op: ToyOp, clock: Clock) -> None:
    op.restudy(bench_cases=lambda suite, device: {f"rows {M}": lambda M=M: (torch.randn(M, 8),) for M in (60, 64, 65)})
    record = tune(clock)
    assert [key.case for key in record.keys] == ["rows 60", "rows 65"]
    assert record.left == {"rows 64": "has the key of rows 60"}


def test_cases_that_cannot_be_tuned_say_why(op: ToyOp, clock: Clock) -> None:
    def too_large() -> tuple[Any, ...]:
        raise torch.OutOfMemoryError("out of memory\nmore")

    def refused() -> tuple[Any, ...]:
        raise Unsupported("no such thing")

    op.restudy(bench_cases=lambda suite, device: {"a": too_large, "b": refused, "c": lambda: (torch.ones(4, 8),)})
    record = tune(clock)
    assert record.left == {"a": "out of memory: out of memory", "b": "the op refuses it: no such thing"}
    assert [key.case for key in record.keys] == ["c"]
    with pytest.raises(InvalidArgument, match="no case of suite 'shared' has 'z' in its name"):
        tune(clock, matching="z")


def test_memory_that_runs_out_in_a_contest_costs_one_key(op: ToyOp, clock: Clock) -> None:
    made = 0

    def cases(suite: str, device: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
        def large() -> tuple[Any, ...]:
            nonlocal made
            made += 1
            if made > 1:
                raise torch.OutOfMemoryError("no room")
            return (torch.ones(4, 8),)

        return {"large": large, "small": lambda: (torch.ones(64, 8),)}

    op.restudy(bench_cases=cases)
    record = tune(clock)
    assert [(key.case, key.problem, key.backend) for key in record.keys] == [
        ("large", "out of memory: no room", None), ("small", "", "kernel"),
    ]  # fmt: skip


def test_an_error_while_several_are_timed_costs_one_key(op: ToyOp, clock: Clock) -> None:
    class Breaking(Clock):
        def __call__(self, works: Any, **options: Any) -> Interleaved:
            if self.calls == 0:
                self.calls += 1
                raise RuntimeError("launch failed")
            return super().__call__(works, **options)

    breaking = Breaking(clock.times)
    breaking.ran = clock.ran
    record = tune(breaking)
    assert record.keys[0].problem == "raised RuntimeError: launch failed" and record.keys[0].backend is None
    assert [key.backend for key in record.keys[1:]] == ["kernel", "kernel"]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz"])
def test_every_time_of_a_record_can_be_computed_from_its_file(
    op: ToyOp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Also where the final takes many rounds, with the digits that a clock has."""

    def noisy(works: Sequence[Callable[[], Any]], *, rounds: int, seconds: float) -> Interleaved:
        draw = random.Random(0)
        for work in works:
            work()
        series = [
            tuple((1 + place) * draw.lognormvariate(0, 0.1) for _ in range(5 * rounds)) for place in range(len(works))
        ]
        return Interleaved(tuple(series), "planted")

    session.tune("double", DEVICE, session.Settings(), session.Targets(tmp_path / name), timer=noisy)
    record = records.load_as(tmp_path / name, records.TuneRecord)
    timed = [one for key in record.keys for one in key.candidates if one.ms is not None]
    assert record.samples == "full" and len(record.keys) == 3 and len(timed) >= 6
    for one in timed:
        assert len(one.samples) == 5 * race.FINAL_ROUNDS
        assert one.ms == statistics.median(one.samples) and one.ci == timing.bootstrap_median(one.samples)
    for key in record.keys:
        (won,) = [one for one in key.candidates if one.status == "won"]
        (native,) = [one for one in key.candidates if one.role == "native"]
        assert (key.ratio, key.ci) == timing.bootstrap_speedup([(native.samples, won.samples)])


def test_a_device_that_is_lost_while_several_are_timed_ends_the_run(
    op: ToyOp, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lost(_device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def breaking() -> None:
        monkeypatch.setattr(admission, "_synchronize", lost)
        raise RuntimeError("CUDA error: misaligned address")

    with pytest.raises(admission.DeviceLost, match=r"^timing rows 16 ended the device: CUDA error: an illegal"):
        tune(Stopping(clock, 6, breaking), session.Targets(tmp_path / "a.json"))
    record = records.load_as(tmp_path / "a.json", records.TuneRecord)
    assert [key.case for key in record.keys] == ["rows 4"] and "illegal" in record.problem


# --- files


def test_rows_are_what_dispatch_reads(op: ToyOp, clock: Clock, tmp_path: Path) -> None:
    table = tmp_path / "sm_90" / "double.csv"
    path = tmp_path / "evidence" / "h200" / "tune.jsonl.gz"
    tune(clock, session.Targets(path, table))
    fields = ("rows", "columns", "dtype", "option")
    rows = database.read(table, fields)
    assert list(rows) == [(4, 8, "float32", None), (16, 8, "float32", None), (64, 8, "float32", None)]
    row = rows[16, 8, "float32", None]
    assert (row.backend, row.config, row.record) == (
        "kernel",
        Config(BLOCK=4),
        f"h200/{path.name}@{files.content_hash(path)}",
    )
    assert row.us == pytest.approx(900, rel=0.05) and row.native_us == pytest.approx(2000, rel=0.05)


@pytest.mark.parametrize("commit", [None, "abc1234+changes", "abc1234"])
def test_rows_that_ship_are_measured_from_a_commit(
    op: ToyOp, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: str | None
) -> None:
    monkeypatch.setattr(database, "DATA", tmp_path / "data")
    monkeypatch.setattr(provenance, "_commit", lambda _rows: commit)
    targets = session.Targets(tmp_path / "a.json", tmp_path / "data" / "sm_90" / "double.csv")
    if commit == "abc1234":
        tune(clock, targets)
        assert len(database.read(targets.table, lookup.fields_of(op))) == 3  # type: ignore[arg-type]
        return
    with pytest.raises(InvalidArgument, match=r"ships with the package.*(no commit is known|changes): commit first"):
        tune(clock, targets)
    # found before anything is measured, and other tables are the user's own
    assert not clock.calls and not targets.table.exists()  # type: ignore[union-attr]
    tune(clock, session.Targets(tmp_path / "a.json", tmp_path / "sm_90" / "double.csv"))


def test_rows_of_other_keys_stay_and_the_same_are_replaced(op: ToyOp, clock: Clock, tmp_path: Path) -> None:
    targets = session.Targets(tmp_path / "a.json", tmp_path / "double.csv")
    tune(clock, targets)
    clock.times |= {"b2": 0.3}
    tune(clock, session.Targets(tmp_path / "b.json", tmp_path / "double.csv"), matching="rows 16")
    rows = database.read(tmp_path / "double.csv", lookup.fields_of(op))
    assert [(row.config, row.record) for row in rows.values()] == [
        (Config(BLOCK=4), session.named(tmp_path / "a.json")), (Config(BLOCK=2), session.named(tmp_path / "b.json")),
        (Config(BLOCK=4), session.named(tmp_path / "a.json")),
    ]  # fmt: skip


def test_files_are_checked_before_anything_is_measured(op: ToyOp, clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("nonsense\n")
    for targets, error, message in (
        (session.Targets(None, tmp_path / "a.csv"), InvalidArgument, "give --out FILE too"),
        (session.Targets(tmp_path, None), OutputError, "is a folder"),
        (session.Targets(tmp_path / "a.json", tmp_path / "bad.csv"), TableError, "the columns are"),
        (
            session.Targets(tmp_path / "a.json", tmp_path / "gfx942" / "double.csv"),
            InvalidArgument,
            "is for gfx942, and",
        ),
        (
            session.Targets(tmp_path / "a.json", tmp_path / "gemm.csv"),
            InvalidArgument,
            "is for gemm, and this is double",
        ),
    ):
        with pytest.raises(error, match=message):
            tune(clock, targets)
    assert clock.calls == 0 and not (tmp_path / "a.json").exists()


def test_the_record_is_read_back(op: ToyOp, clock: Clock, tmp_path: Path) -> None:
    record = tune(clock, session.Targets(tmp_path / "a.json"))
    assert records.load_as(tmp_path / "a.json", records.TuneRecord) == record
    assert json.loads((tmp_path / "a.json").read_text())["kind"] == "tune"


# --- ending early


class Stopping(Clock):
    """Does something at its n-th call."""

    def __init__(self, other: Clock, at: int, act: Callable[[], None]) -> None:
        super().__init__(other.times)
        self.ran, self.at, self.act = other.ran, at, act

    def __call__(self, works: Any, **options: Any) -> Interleaved:
        if self.calls == self.at:
            self.act()
        return super().__call__(works, **options)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _lose() -> None:
    raise admission.DeviceLost("kernel ended the device: illegal access")


@pytest.mark.parametrize(
    ("act", "error", "problem"),
    [
        (_interrupt, KeyboardInterrupt, "interrupted"),
        (_lose, admission.DeviceLost, "DeviceLost: kernel ended the device: illegal access"),
        (lambda: [][0], IndexError, "IndexError: list index out of range"),
    ],
    ids=["interrupted", "lost", "bug"],
)
def test_what_was_found_before_the_end_is_kept(
    op: ToyOp, clock: Clock, tmp_path: Path, act: Callable[[], None], error: type[BaseException], problem: str
) -> None:
    targets = session.Targets(tmp_path / "a.json", tmp_path / "double.csv")
    # four calls of the timer a key: in the second key
    with pytest.raises(error):
        tune(Stopping(clock, 6, act), targets)
    record = records.load_as(tmp_path / "a.json", records.TuneRecord)
    assert [key.case for key in record.keys] == ["rows 4"] and record.problem == problem
    assert record.left == {"rows 16": "the run ended before it", "rows 64": "the run ended before it"}
    assert len(database.read(tmp_path / "double.csv", lookup.fields_of(op))) == 1


def test_each_key_is_written_when_it_is_found(op: ToyOp, clock: Clock, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    def look(what: str, done: int, planned: int) -> None:
        if what.startswith("rows"):
            kept = records.load_as(tmp_path / "a.json", records.TuneRecord) if done else None
            rows = database.read(tmp_path / "double.csv", lookup.fields_of(op))
            seen.append((0 if kept is None else len(kept.keys), len(rows)))

    targets = session.Targets(tmp_path / "a.json", tmp_path / "double.csv")
    session.tune("double", DEVICE, session.Settings(), targets, timer=clock, on_step=look)
    assert seen == [(0, 0), (1, 1), (2, 2)]


def test_a_budget(op: ToyOp, clock: Clock) -> None:
    now = SimulatedClock()
    timer = Stopping(clock, 2, lambda: now.advance(100.0))
    record = session.tune("double", DEVICE, session.Settings(budget=60.0), timer=timer, now=now)
    assert [key.case for key in record.keys] == ["rows 4"]
    assert record.left == dict.fromkeys(["rows 16", "rows 64"], "no time left of the budget")
    assert record.budget_seconds == 60.0 and record.problem == "" and record.seconds == 100.0


def test_resuming_tunes_the_rest(op: ToyOp, clock: Clock, tmp_path: Path) -> None:
    targets = session.Targets(tmp_path / "a.json", tmp_path / "double.csv")
    with pytest.raises(KeyboardInterrupt):
        tune(Stopping(clock, 6, _interrupt), targets)
    first = records.load_as(tmp_path / "a.json", records.TuneRecord).keys[0]
    clock.times |= {"b2": 0.3}
    record = tune(clock, targets, resume=True)
    assert [key.case for key in record.keys] == ["rows 4", "rows 16", "rows 64"] and not record.left
    assert record.keys[0] == first and record.keys[1].config == {"BLOCK": 2}
    assert len(database.read(tmp_path / "double.csv", lookup.fields_of(op))) == 3
    clock.calls = 0
    assert tune(clock, targets, resume=True).keys == record.keys and clock.calls == 0


def test_resuming_without_a_record_begins(op: ToyOp, clock: Clock, tmp_path: Path) -> None:
    assert len(tune(clock, session.Targets(tmp_path / "a.json"), resume=True).keys) == 3
    with pytest.raises(InvalidArgument, match="nothing to resume without a record"):
        tune(clock, resume=True)


def test_keys_of_a_resumed_record_are_not_tuned_under_another_name(op: ToyOp, clock: Clock, tmp_path: Path) -> None:
    targets = session.Targets(tmp_path / "a.json")
    tune(clock, targets, matching="rows 64")
    op.restudy(bench_cases=lambda suite, device: {"same": lambda: (torch.randn(60, 8),)})
    record = tune(clock, targets, resume=True)
    assert [key.case for key in record.keys] == ["rows 64"] and record.left == {"same": "has the key of rows 64"}


def test_another_machine_is_not_resumed(op: ToyOp, clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    tune(clock, session.Targets(path))
    good = records.load_as(path, records.TuneRecord)
    other = good.header.model_copy(update={"device": good.header.device | {"name": "another"}})
    for changes, what in (
        ({"header": other}, "device"), ({"op": "gemm"}, "op"), ({"suite": "quick"}, "suite"),
        ({"header": good.header.model_copy(update={"commit": "another"})}, "commit"),
        ({"samples": "thinned"}, "form of samples"), ({"in_a_row": 8}, "number of calls in a row"),
    ):  # fmt: skip
        records.save(good.model_copy(update=changes), path)
        with pytest.raises(InvalidArgument, match=f"has another {what}"):
            tune(clock, session.Targets(path), resume=True)
    # a key without a winner is tried again
    failed = good.keys[1].model_copy(update={"backend": None, "problem": "raised"})
    records.save(good.model_copy(update={"keys": [good.keys[0], failed, good.keys[2]]}), path)
    assert [key.backend for key in tune(clock, session.Targets(path), resume=True).keys] == ["kernel"] * 3


# --- kernels


def test_what_does_not_compile_is_not_run(op: ToyOp, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Broken(compile_ahead.Kernels):
        def add(self, op: Any, case: str, args: Any, candidates: Any, arch: Any) -> None:
            asked.append((case, arch.name, [one.config for one in candidates]))

        def error(self, case: str, candidate: candidates.Candidate) -> str | None:
            return "too many registers" if candidate.config == Config(BLOCK=4) else None

    monkeypatch.setattr(compile_ahead, "kernels", lambda on_cpu, arch: Broken("sm_90"))
    done = records.TuneCompilation(kernels=3, workers=2)
    compiled: list[Any] = []

    def compile_all(wanted: Any, workers: int, **options: Any) -> records.TuneCompilation:
        compiled.append((wanted, workers))
        options["on_kernel"](1, 3)
        assert clock.calls == 0, "compiled before anything is timed"
        return done

    monkeypatch.setattr(compile_ahead, "compile_all", compile_all)
    record = tune(clock, workers=2)
    assert record.compilation == done and compiled[0][1] == 2 and len(compiled) == 1
    assert [case for case, *_ in asked] == ["rows 4", "rows 16", "rows 64"] and asked[0][1] == "sm_90"
    assert asked[0][2] == [None, Config(BLOCK=1), Config(BLOCK=2), Config(BLOCK=4), None]
    for key in record.keys:
        found = rows_of(key)["kernel 4"]
        assert (found.status, found.reason, found.first_ms) == ("refused", "too many registers", None)
        assert key.config == {"BLOCK": 2}


def test_what_spills_more_is_not_run(op: ToyOp, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest by its made-up time spills: the next wins, and the record says why."""

    class Spilling(compile_ahead.Kernels):
        def add(self, *_args: Any) -> None:
            pass

        def spilled(self, case: str, candidate: candidates.Candidate) -> int | None:
            return None if candidate.config is None else 64 * (candidate.config == Config(BLOCK=2))

    monkeypatch.setattr(compile_ahead, "kernels", lambda on_cpu, arch: Spilling("sm_90"))
    monkeypatch.setattr(compile_ahead, "compile_all", lambda *_args, **_options: records.TuneCompilation())
    for key in tune(clock).keys:
        found = rows_of(key)["kernel 2"]
        assert (found.status, found.first_ms) == ("refused", None)
        assert found.reason == "spills: 64 bytes of scratch memory a lane, the default 0"
        assert key.config != {"BLOCK": 2}


def test_names_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # sha256 of nothing, and of "{}"
    nothing, empty = "e3b0c44298fc", "44136fa355b3"
    for folder, name in (("evidence/h200/tune", "h200/tune/a.json"), ("results", "a.json"), ("evidence", "a.json")):
        path = tmp_path / folder / "a.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        assert session.named(path) == f"{name}@{nothing}"
    monkeypatch.chdir(tmp_path)
    assert session.named(Path("evidence/a.json")) == f"a.json@{nothing}"
    # of what is in the file, whether it is compressed or not
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    assert session.named(Path("a.json")) == f"a.json@{empty}"
    assert session.named(Path("a.jsonl.gz")) == f"a.jsonl.gz@{empty}"
