"""Keys spread over scripted workers: who is blamed for an end, what goes back to the queue, what counts once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.clock import SimulatedClock
from tests.toy import ToyOp
from wavecrest import records
from wavecrest.bench import suites
from wavecrest.dispatch import registry
from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import EnvironmentProblem
from wavecrest.tune import pool, trial
from wavecrest.tune.candidates import Candidate, Field

FIELD = Field(
    (Candidate("torch", role="native"), Candidate("kernel", Config(BLOCK=1), "default"), Candidate("library")),
    (("other", "refuses it"),),
)
READY = {"event": "ready"}


def step(phase: str, *who: int, seconds: float = 0.0) -> dict[str, Any]:
    return {"event": "step", "phase": phase, "who": list(who), "seconds": seconds}


def ended(reason: str = "ended its process with SIGSEGV", *, outside: bool = False) -> dict[str, Any]:
    return {"event": "ended", "reason": reason, "outside": outside}


SILENT = {"event": "silent"}
FIRST, ROUND = [step("make"), step("first", 2)], [step("make"), step("first", 2), step("round", 0, 1, 2)]


@pytest.fixture
def op() -> Iterator[ToyOp]:
    yield ToyOp(
        "spread", reference=lambda x: x, key=lambda x: (x, "cpu"), key_fields=("rows", "device"),
        inputs=lambda M, N, dtype, device: (), cost=lambda x: Cost(0, 0), default_config=lambda key: Config(),
    )  # fmt: skip
    del registry.STATE.ops["spread"]


def trials(count: int) -> list[trial.Trial]:
    return [trial.Trial(suites.Case(f"case {index}", tuple), (index, "cpu"), FIELD) for index in range(count)]


def done(job: dict[str, Any]) -> dict[str, Any]:
    key = dict(zip(("rows", "device"), job["key"], strict=True))
    return {"event": "done", "key": {"case": job["case"], "key": key, "backend": "torch"}}


class Script:
    """A worker and its start: answers jobs by scripts, one for every start, each a list of events or what makes them.

    A job without a script is done at once; `wait` holds back the answers to it.
    """

    def __init__(self, scripts: list[Any], *, ready: dict[str, Any] = READY) -> None:
        self.scripts, self.ready = scripts, ready
        self.children = 0
        self.jobs: list[dict[str, Any]] = []
        self.limits: list[float] = []
        self.stopped = 0
        self.wait: Callable[[], Any] = tuple

    def __call__(self) -> Script:
        self.children += 1
        self.coming: list[dict[str, Any]] = [self.ready]
        return self

    def send(self, message: dict[str, Any]) -> None:
        if "key" in message:
            self.jobs.append(message)
            script = self.scripts.pop(0) if self.scripts else [done]
            self.coming = [event(message) if callable(event) else event for event in script]

    def next(self, timeout: float) -> dict[str, Any]:
        if self.jobs:
            self.limits.append(timeout)
            self.wait()
        return self.coming.pop(0)

    def stop(self) -> None:
        self.stopped += 1


def made(op: ToyOp, **options: Any) -> pool.Pool:
    return pool.Pool(op, {"hello": 1}, options.pop("timeout", 10.0), **options)


def run(
    op: ToyOp, count: int, *workers: Script, **options: Any
) -> tuple[dict[int, records.TunedKey], list[pool.Ended]]:
    found: dict[int, records.TunedKey] = {}
    endings = []
    for event in made(op, **options).run(trials(count), workers):
        if isinstance(event, pool.Found):
            assert event.index not in found
            found[event.index] = event.key
        elif isinstance(event, pool.Ended):
            endings.append(event)
    return found, endings


def test_one_child_tunes_many_keys(op: ToyOp) -> None:
    worker = Script([])
    found, endings = run(op, 5, worker)
    assert [found[index].case for index in range(5)] == [f"case {index}" for index in range(5)]
    assert worker.children == 1 and worker.stopped >= 1 and not endings
    job = worker.jobs[3]
    assert job["op"] == "spread" and job["key"] == [3, "cpu"] and job["ended"] == [] and not job["alone"]
    assert job["candidates"] == [
        ["torch", None, "native"],
        ["kernel", {"BLOCK": 1}, "default"],
        ["library", None, "tried"],
    ]


def test_workers_run_at_the_same_time_and_share_no_key(op: ToyOp) -> None:
    # a key is done when the other worker has one too, or this breaks
    together = threading.Barrier(2, timeout=20)
    workers = [Script([]), Script([])]
    for worker in workers:
        worker.wait = together.wait
    found, _ = run(op, 40, *workers)
    assert len(found) == 40 and [len(worker.jobs) for worker in workers] == [20, 20]
    assert sorted(job["key"][0] for worker in workers for job in worker.jobs) == list(range(40))


@pytest.mark.parametrize(
    ("phase", "end", "reason"),
    [
        ("first", ended(), "ended its process with SIGSEGV"),
        ("first", SILENT, "did not come to an end within 10 s"),
        ("alone", ended(), "ended its process with SIGSEGV"),
        ("again", ended(), "ended its process with SIGSEGV"),
        ("first", {"event": "lost", "reason": "library ended the device: illegal access"}, "library ended the device"),
    ],
)
def test_who_ends_a_child_is_left_out(op: ToyOp, phase: str, end: dict[str, Any], reason: str) -> None:
    worker = Script([[step("make"), step(phase, 2), end]])
    found, endings = run(op, 2, worker)
    assert len(found) == 2 and worker.children == 2
    again = worker.jobs[1]
    assert again["key"] == [0, "cpu"], "the same key goes on"
    ((place, said),) = again["ended"]
    assert place == 2 and said.startswith(reason) and not again["alone"]
    assert endings == [pool.Ended(0, said, (2,))] and worker.jobs[2]["ended"] == []


def test_in_a_round_native_is_the_last_to_be_suspected(op: ToyOp) -> None:
    # the fifth child says that it runs what is left out, which ends the key
    rounds = [step("round", 0, 1, 2), step("round", 0, 1, 2), step("round", 0, 1, 2), step("round", 0, 1)] * 2
    worker = Script([[step("make"), event, ended()] for event in rounds[:5]])
    found, endings = run(op, 1, worker)
    assert [job["alone"] for job in worker.jobs] == [False, True, True, True, True]
    assert "alone none of them did" in endings[1].reason and found[0].backend is None
    assert [event.candidates for event in endings] == [(), (2,), (1,), (0,), ()]
    assert len(worker.jobs) == 5 and [place for place, _ in worker.jobs[4]["ended"]] == [0, 1, 2]


def test_what_is_ended_from_outside_is_nobodys_fault_at_first(op: ToyOp) -> None:
    worker = Script([[*FIRST, ended("was lost with its node", outside=True)]] * 2)
    found, endings = run(op, 1, worker)
    assert len(found) == 1 and [job["ended"] for job in worker.jobs] == [[], [], []]
    assert [event.candidates for event in endings] == [(), ()] and worker.children == 3
    worker = Script([[*FIRST, ended("ended its process with SIGKILL", outside=True)]] * 3)
    _, endings = run(op, 1, worker)
    assert [place for place, _ in worker.jobs[3]["ended"]] == [2] and endings[2].candidates == (2,)


def test_an_end_that_no_candidate_made_is_the_keys(op: ToyOp) -> None:
    worker = Script(
        [[step("make"), ended()], [step("make"), step("first", 2), ended()], [{"event": "problem", "reason": "no"}]]
    )
    found, _ = run(op, 2, worker)
    assert found[0].problem == "making its arguments ended its process with SIGSEGV" and found[0].backend is None
    assert found[1].problem == "no"
    status = {one.backend: (one.status, one.reason) for one in found[1].candidates}
    assert status == {
        "other": ("refused", "refuses it"), "library": ("failed", "ended its process with SIGSEGV"),
    }  # fmt: skip


def test_patience_is_as_long_as_the_step_takes(op: ToyOp) -> None:
    worker = Script([[step("make"), step("round", 0, 1, seconds=30.0), step("again", 0), done]])
    run(op, 1, worker)
    assert worker.limits == [10.0, 10.0, 70.0, 10.0]


def test_a_key_of_a_lost_worker_goes_to_another(op: ToyOp) -> None:
    at_work = threading.Event()
    lost = Script([[step("make"), step("first", 1), ended("was lost with its node", outside=True)]])
    other = Script([])
    lost.wait = at_work.set
    # nothing is done by the other before the first has a key
    other.wait = lambda: at_work.wait(20)
    real = lost.__call__

    def start() -> Script:
        if lost.children:
            lost.ready = ended("was lost with its node", outside=True)
        return real()

    events = list(made(op).run(trials(4), [start, other]))  # type: ignore[list-item]
    found = [event.index for event in events if isinstance(event, pool.Found)]
    assert sorted(found) == [0, 1, 2, 3]
    assert {job["key"][0] for job in other.jobs} == {0, 1, 2, 3}, "with the one that was lost in the middle"


def test_a_result_that_comes_twice_counts_once(op: ToyOp) -> None:
    worker, own = Script([]), made(op)

    def twice() -> None:
        # as of a worker that was given up, and whose result was under way
        place = worker.jobs[-1]["key"][0]
        own._events.put(pool.Found(place, records.TunedKey(case=f"case {place}", key={})))

    worker.wait = twice
    found = [event.index for event in own.run(trials(3), [worker]) if isinstance(event, pool.Found)]
    assert found == [0, 1, 2]


@pytest.mark.parametrize(
    ("ready", "message", "children"),
    [
        (ended("ended its process with code 1: no module named x"), "a child ended its process with code 1: no mod", 2),
        (SILENT, "a child was not ready after 180 s", 2),
        ({"event": "ready", "name": "another"}, r"a child has {'name': 'another'}, and this is {'name': 'this'}", 1),
    ],
    ids=["ended", "silent", "another device"],
)
def test_no_child_at_all(op: ToyOp, ready: dict[str, Any], message: str, children: int) -> None:
    worker = Script([], ready=ready)
    with pytest.raises(EnvironmentProblem, match=f"no process is left to tune in: {message}"):
        run(op, 2, worker, expected={"name": "this"})
    assert worker.children == children and not worker.jobs and worker.stopped == children
    good = Script([], ready={"event": "ready", "name": "this"})
    found, _ = run(op, 2, worker, good, expected={"name": "this"})
    assert len(found) == 2, "another worker does what is left"


def test_a_worker_that_cannot_be_made_ends_the_run(op: ToyOp) -> None:
    def broken() -> Script:
        raise OSError("cannot start a process")

    with pytest.raises(EnvironmentProblem, match="OSError: cannot start a process"):
        list(made(op).run(trials(1), [broken]))


def test_a_key_whose_answer_is_invalid_goes_to_another_worker(op: ToyOp) -> None:
    # an invalid answer makes the worker's thread raise, and the key must not be waited for
    worker, at_work = Script([[step("make"), {"event": "done", "key": {"nothing": 1}}]]), threading.Event()
    worker.wait = at_work.set
    other = Script([])
    other.wait = lambda: at_work.wait(20)
    found, _ = run(op, 3, worker, other)
    assert sorted(found) == [0, 1, 2] and len(worker.jobs) == 1


def test_no_key_is_begun_after_the_deadline(op: ToyOp) -> None:
    worker, now = Script([]), SimulatedClock()
    worker.wait = lambda: now.advance(0.3)
    found, _ = run(op, 5, worker, deadline=0.5, now=now)
    assert list(found) == [0, 1]


def test_children_are_stopped_when_nobody_asks_any_more(op: ToyOp) -> None:
    stopped = threading.Event()

    class Watched(Script):
        def stop(self) -> None:
            super().stop()
            stopped.set()

    worker = Watched([])
    # its first key is done when it was stopped
    worker.wait = lambda: stopped.wait(20)
    events = made(op).run(trials(50), [worker])
    assert next(events) == pool.Begun(0)
    events.close()
    assert stopped.is_set() and len(worker.jobs) == 1


def test_a_device_without_a_place_for_its_next_worker_holds_no_key(op: ToyOp) -> None:
    """As on a cluster that has lost a node: the worker that comes after is ready when the run is over, or never."""
    waits, over, heard_of = threading.Event(), threading.Event(), threading.Event()
    was_over: list[bool] = []

    class Homeless(Script):
        def next(self, timeout: float) -> dict[str, Any]:
            if self.children > 1:
                waits.set()
                was_over.append(over.wait(20))
                heard_of.set()
                return {"event": "ended", "reason": "has no place", "outside": True}
            return super().next(timeout)

        def stop(self) -> None:
            super().stop()
            if self.children > 1:
                over.set()

    lost = Homeless([[*FIRST, ended("was lost with its node", outside=True)]])
    other = Script([])
    # it has a key, and no other, until the first worker is lost
    other.wait = lambda: waits.wait(20)
    found, endings = run(op, 6, lost, other)
    assert sorted(found) == list(range(6)) and [one.reason for one in endings] == ["was lost with its node"]
    assert len(other.jobs) == 6
    # the run did not wait for the worker: it was over before the worker was heard of
    assert heard_of.wait(20) and was_over == [True]
