"""The calls of a workload are tuned; rows stay only if the workload itself is faster by them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.clock import SimulatedClock
from tests.toy import ToyOp
from wavecrest import hardware, records
from wavecrest.dispatch import registry
from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.tuned import Config, Database, Overlay
from wavecrest.errors import InvalidArgument, OutputError
from wavecrest.measure import timing
from wavecrest.measure.speedup import LEAST_BLOCKS
from wavecrest.measure.timing import Interval, Paired
from wavecrest.measure.workload import Buckets, Inputs, Workload, from_example
from wavecrest.tune import model, session

FAST = session.Settings(seconds=0.001)
DEVICE = replace(hardware.cpu(), arch="sm_90")


class _Rates:
    """Simulated milliseconds that a call takes: alone, and inside of the model."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.torch, self.kernel = 2.0, {1: 1.5, 2: 0.3}
        self.model: dict[int, float] | None = None
        self.inside = False
        self.wrong = False


@pytest.fixture
def rates() -> _Rates:
    return _Rates()


@pytest.fixture
def op(rates: _Rates, tmp_path: Path) -> Iterator[ToyOp]:
    """y = 2x, whose calls say that they are on a GPU; an empty table, so that PyTorch runs them."""

    def native(x: Tensor) -> Tensor:
        rates.clock.advance(rates.torch / 1e3)
        return 2 * x

    def kernel(x: Tensor, *, config: Config) -> Tensor:
        own = rates.model if rates.inside and rates.model is not None else rates.kernel
        rates.clock.advance(own[config["BLOCK"]] / 1e3)
        return (3 if rates.wrong and config["BLOCK"] == 2 else 2) * x

    made = ToyOp(
        "double",
        reference=lambda x: 2 * x,
        key=lambda x: (x.shape[0], x.shape[1], "float32", "cuda", x.requires_grad),
        key_fields=("rows", "columns", "dtype", "device", "grad"),
        inputs=lambda M, N, dtype, device: (torch.ones(M, N, dtype=dtype, device=device),),
        cost=lambda x: Cost(flops=x.numel(), bytes=2 * x.nbytes),
        default_config=lambda key: Config(BLOCK=1),
    )
    made.native("torch", native, priority=10)
    made.kernel('kernel', kernel, priority=5, space=lambda key, arch: [Config(BLOCK=1), Config(BLOCK=2)])  # fmt: skip
    with registry.measured_in(Database(tmp_path / "none", "sm_90")):
        yield made
    del registry.STATE.ops["double"]


class Model(nn.Module):
    """Three calls of x's rows and one of half of them."""

    def __init__(self, op: ToyOp, rates: _Rates) -> None:
        super().__init__()
        self.op, self.rates = op, rates

    def forward(self, x: Tensor) -> Tensor:
        self.rates.inside = True
        for _ in range(3):
            x = self.op(x)
        self.op(x[: x.shape[0] // 2])
        self.rates.inside = False
        return x


def workload(op: ToyOp, rates: _Rates) -> Workload:
    return from_example(Model(op, rates), torch.ones(4, 8), name="planted")


def tuned(work: Workload, rates: _Rates, **options: Any) -> records.WorkloadTuneRecord:
    return model.tune(work, DEVICE, FAST, seconds=0.05, now=rates.clock, **options)


def test_rows_that_make_the_workload_faster_are_kept(op: ToyOp, rates: _Rates, tmp_path: Path) -> None:
    overlay = Overlay(tmp_path / "user.sqlite")
    written: list[str] = []
    record = tuned(
        workload(op, rates),
        rates,
        overlay=overlay,
        record_name="a.json",
        on_record=lambda one: written.append(one.verdict),
    )
    # by how often they are called
    assert [(one.key["rows"], one.calls, one.backend, one.source) for one in record.keys] == [
        (4, 3, "torch", "default"), (2, 1, "torch", "default"),
    ]  # fmt: skip
    for one in record.keys:
        assert (one.winner, one.winner_config, one.left, one.note) == ("kernel", {"BLOCK": 2}, "", "")
        assert one.us is not None and one.before_us is not None and one.before_us > 2 * one.us
    assert [(made.op, len(made.keys), made.suite) for made in record.tunes] == [("double", 2, "workload")]
    assert (record.verdict, record.kept, record.written) == ("kept", True, True) and written == ["", "kept"]
    (bucket,) = record.buckets
    assert (
        record.ci is not None
        and record.ci.low > 2
        and bucket.base_ms > 2 * bucket.new_ms
        and bucket.blocks >= LEAST_BLOCKS
    )
    with registry.measured_in(Database(tmp_path / "none", "sm_90", overlay)):
        decision = op.decide(op.of(torch.ones(4, 8)))
        assert (decision.backend, decision.config, decision.source) == ("kernel", Config(BLOCK=2), "exact")
        assert "(a.json, user database)" in decision.reason
        # a second run finds that all have rows
        with pytest.raises(InvalidArgument, match="nothing that can be tuned here: double has a measured row"):
            tuned(workload(op, rates), rates)
    path = tmp_path / "record.json"
    records.save(record, path)
    assert records.load_as(path, records.WorkloadTuneRecord) == record


def test_what_is_faster_alone_and_slower_in_the_workload_is_not_kept(op: ToyOp, rates: _Rates, tmp_path: Path) -> None:
    rates.model = {1: 4.0, 2: 4.0}
    overlay = Overlay(tmp_path / "user.sqlite")
    record = tuned(workload(op, rates), rates, overlay=overlay)
    assert {one.winner for one in record.keys} == {"kernel"}
    assert (record.verdict, record.kept, record.written) == ("slower", False, False)
    assert record.ci is not None and record.ci.high < 1 and "slower" in record.reason
    assert not overlay.entries() and op.decide(op.of(torch.ones(4, 8))).backend == "torch"


@pytest.mark.parametrize(
    ("pairs", "verdict"),
    [
        ({"a": (0.999, 1.004)}, "tie"),
        ({"a": (1.0, 1.2)}, "tie"),
        ({"a": (1.001, 1.2)}, "kept"),
        ({"a": (0.9, 0.999)}, "slower"),
        ({"a": (3.0, 3.1), "b": (0.9, 0.99)}, "slower"),
        ({"a": (3.0, 3.1), "b": (0.9, 1.01)}, "kept"),
    ],
)
def test_a_tie_keeps_what_ran_before(
    op: ToyOp, rates: _Rates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pairs: Any, verdict: str
) -> None:
    """Intervals of made-up times: kept only with the lower end above 1, and no bucket behind."""
    made = iter(Paired((1.0, 1.0), (1.0, 1.0), sum(ends) / 2, Interval(*ends), "made up") for ends in pairs.values())
    joint = Interval(min(low for low, _ in pairs.values()), max(high for _, high in pairs.values()))
    if len(pairs) > 1:
        joint = Interval(1.5, 2.0)
    monkeypatch.setattr(timing, "measure_pair", lambda *_works, **_options: next(made))
    monkeypatch.setattr(timing, "block_speedup", lambda _pairs: (1.1, joint))
    work = Workload(Model(op, rates), dict.fromkeys(pairs, Inputs((torch.ones(4, 8),))))
    overlay = Overlay(tmp_path / "user.sqlite")
    record = tuned(work, rates, overlay=overlay)
    assert record.verdict == verdict and record.kept == record.written == (verdict == "kept")
    assert bool(overlay.entries()) == (verdict == "kept")
    assert [bucket.bucket for bucket in record.buckets] == list(pairs)


def test_what_ran_before_may_be_the_fastest(op: ToyOp, rates: _Rates) -> None:
    rates.torch = 0.2
    record = tuned(workload(op, rates), rates)
    assert {one.winner for one in record.keys} == {"torch"}
    assert (record.verdict, record.kept, record.buckets) == ("nothing", False, [])


def test_a_wrong_kernel_is_never_tried_in_the_workload(op: ToyOp, rates: _Rates) -> None:
    rates.wrong = True
    record = tuned(workload(op, rates), rates)
    wrong = [one for key in record.tunes[0].keys for one in key.candidates if one.status == "wrong"]
    assert len(wrong) == 2 and {one.winner_config["BLOCK"] for one in record.keys} == {1}
    assert record.verdict == "kept" and not record.written


def test_every_bucket_is_run_and_counted(op: ToyOp, rates: _Rates) -> None:
    buckets = Buckets(short=torch.ones(4, 8), long=torch.ones(16, 8))
    found = model.called(from_example(Model(op, rates), buckets))
    assert [(one.key[0], one.calls) for one in found] == [(4, 3), (16, 3), (2, 1), (8, 1)]


def test_what_cannot_be_tuned_is_said(op: ToyOp, rates: _Rates, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="calls no op of wavecrest"):
        tuned(from_example(nn.Linear(2, 2), torch.ones(1, 2)), rates)
    plain = op.key
    op.redefine(key=lambda x: (*plain(op.of(x))[:3], "cpu", False))
    with pytest.raises(InvalidArgument, match="nothing that can be tuned here: double rows are for calls on a GPU"):
        tuned(workload(op, rates), rates)
    op.key = plain
    op.forget()
    op.force("kernel")
    with pytest.raises(InvalidArgument, match="double is forced or pinned"):
        tuned(workload(op, rates), rates)
    op.force(None)
    op.restudy(call_of_key=lambda parts, device: None if parts["rows"] == 2 else (torch.ones(4, 8, device=device),))
    record = tuned(workload(op, rates), rates)
    assert [one.left[:37] for one in record.keys] == ["", "double makes no call from this key: t"]
    assert record.keys[1].winner == "" and record.verdict == "kept"
    (tmp_path / "a folder").mkdir()
    with pytest.raises(OutputError):
        tuned(workload(op, rates), rates, overlay=Overlay(tmp_path / "a folder"))


def test_a_choice_that_a_captured_call_keeps_is_noted(
    op: ToyOp, rates: _Rates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that calls nothing by dispatch when it is timed, as a captured one."""
    work = workload(op, rates)
    plain = model._judge

    def captured(*args: Any) -> None:
        def forward(x: Tensor) -> Tensor:
            rates.clock.advance(0.001)
            return x

        work.model.forward = forward  # type: ignore[method-assign]
        plain(*args)

    monkeypatch.setattr(model, "_judge", captured)
    record = tuned(work, rates)
    assert all("a compiled or captured call keeps its choice" in one.note for one in record.keys)


def test_an_interrupted_run_says_so(op: ToyOp, rates: _Rates, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(*_args: Any, **_options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(timing, "measure_pair", interrupt)
    kept: list[records.WorkloadTuneRecord] = []
    overlay = Overlay(tmp_path / "user.sqlite")
    with pytest.raises(KeyboardInterrupt):
        tuned(workload(op, rates), rates, overlay=overlay, on_record=kept.append)
    assert kept[-1].problem == "interrupted" and kept[-1].tunes and not overlay.entries()
    # dispatch is as it was
    assert op.decide(op.of(torch.ones(4, 8))).backend == "torch"


def test_databases_decide_in_turn(op: ToyOp, tmp_path: Path) -> None:
    """Each with the decisions and counts of its own, none of which is left or lost."""
    x = torch.ones(4, 8)
    op(x)
    outside = op.decisions()
    before = registry.database()
    row = session.Row((4, 8, "float32"), "kernel", Config(BLOCK=2), 1.0, 2.0, "a.json")
    with registry.in_turn(before, before.trying({"double": [row]})) as (old, new):
        for choose, backend, calls in ((old, "torch", 1), (new, "kernel", 1), (old, "torch", 2), (new, "kernel", 2)):
            choose()
            op(x)
            ((decision, count),) = op.decisions()
            assert (decision.backend, count) == (backend, calls)
    assert op.decisions() == outside and registry.database() is before
    with pytest.raises(ZeroDivisionError), registry.in_turn(before) as (old,):
        old()
        raise ZeroDivisionError
    assert op.decisions() == outside and op.decide(op.of(x)).backend == "torch"
