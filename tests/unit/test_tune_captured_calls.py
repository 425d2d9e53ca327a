"""Calls in a row in a graph: memory of their own, faults that a graph alone shows, and the time of one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.clock import SimulatedClock
from tests.toy import ToyOp, doubling
from wavecrest import hardware, ops, records
from wavecrest.bench import suites
from wavecrest.cli import tune as cli
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument, StepRefused
from wavecrest.measure import cuda_graph, interleaved
from wavecrest.measure.interleaved import Interleaved
from wavecrest.tune import admission, captured_calls, race, session
from wavecrest.tune.candidates import Candidate

CONFIG = Config(BLOCK=1)
CANDIDATE = Candidate("planted", CONFIG, "tried")


class Parts(NamedTuple):
    """A call with two views of one tensor and a scalar."""

    q: Tensor
    k: Tensor
    scale: float = 2.0


class Eager:
    """A graph for tests: a replay makes the calls again and puts their results where the capture has its own."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.results = work, work()
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for kept, found in zip(self.results, self.work(), strict=True):
            # what a kernel leaves out stays as it is
            kept.copy_(torch.where(found.isnan(), kept, found))


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Eager]:
    made: list[Eager] = []

    def record(work: Callable[[], Any], _pool: Any, _what: str) -> tuple[Any, Any]:
        made.append(Eager(work))
        return made[-1], made[-1].results

    monkeypatch.setattr(cuda_graph, "warm_up", lambda work: work())
    monkeypatch.setattr(cuda_graph, "record", record)
    return made


@pytest.fixture
def op() -> Iterator[ToyOp]:
    with doubling(CONFIG) as made:
        yield made


def captured(op: ToyOp, run: Callable[[Tensor], Any], count: int = 3) -> tuple[Any, records.TuneCandidate]:
    op.kernel("planted", lambda x, *, config: run(x), priority=5)
    call = op.of(torch.randn(4, 8))
    calls = [call, *captured_calls.copies(call, count - 1)]
    row = records.TuneCandidate(backend="planted")
    return captured_calls.captured(op, CANDIDATE, calls, admission.oracle(op, call), None, row), row


def test_copies_have_memory_of_their_own_and_share_what_the_call_shares() -> None:
    both = torch.randn(6, 16)
    call = Parts(both[::2, :8], both[::2, 8:])
    first, second = captured_calls.copies(call, 2)
    for one in (first, second):
        assert type(one) is Parts and one.scale == 2.0
        assert torch.equal(one.q, call.q) and torch.equal(one.k, call.k)
        assert one.q.stride() == call.q.stride() and one.k.storage_offset() == call.k.storage_offset()
        assert one.q.untyped_storage().data_ptr() == one.k.untyped_storage().data_ptr()
    assert len({one.q.data_ptr() for one in (call, first, second)}) == 3


def test_a_replay_makes_every_call_once(op: ToyOp, graphs: list[Eager]) -> None:
    seen: list[int] = []

    def twice(x: Tensor) -> Tensor:
        seen.append(x.data_ptr())
        return 2 * x

    replay, row = captured(op, twice)
    assert row.status == "timed" and row.reason == "" and row.relative == 0.0
    seen.clear()
    replay()
    assert len(set(seen)) == len(seen) == 3 and graphs[0].replays == 2


def test_what_only_a_graph_leaves_unwritten_is_found(op: ToyOp) -> None:
    calls = 0

    def skips(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        # the warm-up and the capture are calls 1 to 6, the replay of the third is call 9
        return torch.full_like(x, float("nan")) if calls == 9 else 2 * x

    replay, row = captured(op, skips)
    assert replay is None and row.status == "wrong" and row.reason.startswith("in a graph: result 0 has error nan")


def test_a_result_in_an_argument_is_not_overwritten(op: ToyOp) -> None:
    # as of an op that appends to a cache and returns it
    op.kernel("planted", lambda x, *, config: x, priority=5)
    call = op.of(torch.zeros(4, 8))
    row = records.TuneCandidate(backend="planted")
    assert captured_calls.captured(op, CANDIDATE, [call], admission.oracle(op, call), None, row) is not None
    assert torch.equal(call.x, torch.zeros(4, 8))


def test_what_cannot_be_captured_is_refused_with_the_reason(op: ToyOp, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_args: Any) -> Any:
        raise StepRefused("calls in a row cannot be captured: it asks the host")

    monkeypatch.setattr(cuda_graph, "record", refuses)
    replay, row = captured(op, lambda x: 2 * x)
    assert replay is None and (row.status, row.reason) == (
        "refused", "calls in a row cannot be captured: it asks the host",
    )  # fmt: skip


def test_what_raises_has_failed(op: ToyOp) -> None:
    def raises(_x: Tensor) -> Tensor:
        raise RuntimeError("an illegal address\nsecond line")

    replay, row = captured(op, raises)
    assert replay is None and (row.status, row.reason) == ("failed", "an illegal address")


def test_the_time_is_that_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleaved, "measure", lambda works, **_options: Interleaved(((8.0, 4.0),), "events"))
    alone = race.timer_of("cuda")([lambda: None], rounds=2, seconds=0.0)
    row = race.timer_of("cuda", SimulatedClock(), in_a_row=4)([lambda: None], rounds=2, seconds=0.0)
    assert alone == Interleaved(((8.0, 4.0),), "events")
    assert row == Interleaved(((2.0, 1.0),), "events, one of 4 calls in a graph")


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(InvalidArgument, match="only a GPU has"):
        session.tune("softmax", hardware.cpu(), session.Settings(in_a_row=4))


def test_the_number_of_calls_is_one_at_least() -> None:
    with pytest.raises(InvalidArgument, match="--in-a-row must be at least 1, not 0"):
        cli.run("softmax", session.Settings(in_a_row=0), device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("starts", [None, "child"])
def test_a_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch, starts: str | None) -> None:
    monkeypatch.undo()
    from wavecrest.tune import workers

    device = hardware.detect("cuda")
    settings = session.Settings(
        suite="quick", matching="", backends=("triton",), seconds=0.05, in_a_row=4, candidates=2
    )
    case = suites.cases(ops.get("softmax"), "quick", "cuda")[0]
    given: dict[str, Any] = {"cases": [case], "sources": {case.name: {"suite": "quick"}}}
    found = session.tune(
        "softmax", device, settings, starts=workers.local(device, 1, one=False) if starts else None, **given
    )
    (key,) = found.keys
    assert found.in_a_row == 4 and key.backend is not None and key.problem == ""
    assert key.clock.endswith("caches cold and clean, one of 4 calls in a graph")
    alone = session.tune(
        "softmax", device, session.Settings(suite="quick", backends=("triton",), candidates=2), **given
    )
    # a launch alone takes a few microseconds more
    assert key.us is not None and alone.keys[0].us is not None and key.us < alone.keys[0].us
