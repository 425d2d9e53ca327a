"""Fresh processes of a pair: turns that exclude each other, and the errors that children end with."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from wavecrest.errors import ClockError, EnvironmentProblem, MissingDependency, PlanMismatch, WorkloadError
from wavecrest.measure.timing import Side
from wavecrest.optimizer import children
from wavecrest.optimizer.children import Job, Problem, Task, run_child, run_pair

# a side writes down when its calls ran, and the second one spins in a thread all the time, to slow the first
WORKLOAD = """
import os, threading, time
import torch
from torch import nn

LOG = open(os.environ["TURNS_LOG"], "a", buffering=1)

def spin():
    while True:
        end = time.monotonic() + 0.002
        while time.monotonic() < end:
            pass
        LOG.write(f"spin {time.monotonic()}\\n")

class Logged(nn.Linear):
    def forward(self, x):
        begin = time.monotonic()
        time.sleep(0.01)
        LOG.write(f"call {begin} {time.monotonic()}\\n")
        return super().forward(x)

def make():
    if os.environ.get("SPINS"):
        threading.Thread(target=spin, daemon=True).start()
    return Logged(4, 4), torch.randn(2, 4)

class Raises(nn.Linear):
    def forward(self, x):
        raise ValueError("planted in forward")

def raises():
    return Raises(4, 4), torch.randn(2, 4)

def dies():
    os._exit(7)
"""


@pytest.fixture
def work(tmp_path: Path) -> str:
    (tmp_path / "work.py").write_text(WORKLOAD)
    return str(tmp_path / "work.py")


def _rows(path: Path, kind: str) -> list[list[float]]:
    # the last line of a process that was ended may be cut
    rows = [line.split() for line in path.read_text().splitlines()]
    return [[float(part) for part in row[1:]] for row in rows if row and row[0] == kind]


def test_a_side_stands_still_while_the_other_is_timed(work: str, tmp_path: Path) -> None:
    logs = {side: tmp_path / side for side in ("base", "new")}
    task = Task(f"{work}:make", "cpu", 0.3)
    jobs: dict[Side, Job] = {
        "base": Job(task, {"TURNS_LOG": str(logs["base"])}, "the first"),
        "new": Job(task, {"TURNS_LOG": str(logs["new"]), "SPINS": "1"}, "the second"),
    }
    found = run_pair(jobs, 0)
    assert found["base"].times.keys() == found["new"].times.keys() == {"default"}
    calls, others = _rows(logs["base"], "call"), _rows(logs["new"], "call")
    # turns begin once both are loaded; before, both call once to compile
    begin = max(calls[0][1], others[0][1])
    timed = [row for row in calls if row[0] > begin]
    turns_of_other = [row for row in others if row[0] > begin]
    assert len(timed) > 15 and len(turns_of_other) > 15
    overlap = [1 for a in timed for b in turns_of_other if a[0] < b[1] and b[0] < a[1]]
    assert not overlap
    # a signal may take a moment to arrive
    during = sum(any(a + 0.005 < at < b for a, b in timed) for (at,) in _rows(logs["new"], "spin"))
    assert during <= 2 < len(_rows(logs["new"], "spin"))


def test_no_process_of_a_pair_is_left(work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    real = children.subprocess.Popen

    def start(*arguments: object, **options: object) -> object:
        process = real(*arguments, **options)  # type: ignore[call-overload]
        started.append(process.pid)
        return process

    monkeypatch.setattr(children.subprocess, "Popen", start)
    log = {"TURNS_LOG": str(tmp_path / "log")}
    good, bad = (Job(Task(f"{work}:{name}", "cpu", 0.1), log, name) for name in ("make", "dies"))
    with pytest.raises(EnvironmentProblem, match="dies failed: exit code 7"):
        run_pair({"base": good, "new": bad}, 0)
    assert len(started) == 2
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.killpg(pid, 0)


def test_a_model_that_raises_is_the_users_error(work: str, tmp_path: Path) -> None:
    log = {"TURNS_LOG": str(tmp_path / "log")}
    job = Job(Task(f"{work}:raises", "cpu", 0.1), log, "process 0 of the original")
    with pytest.raises(WorkloadError, match="process 0 of the original: the model raised ValueError: planted in forw"):
        run_child(job)


def test_a_child_that_takes_too_long_is_ended(work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "CHILD_TIMEOUT", 0.2)
    job = Job(Task(f"{work}:make", "cpu", 60.0), {"TURNS_LOG": str(tmp_path / "log")}, "the child")
    begin = time.monotonic()
    with pytest.raises(EnvironmentProblem, match="the child took more than 0 s"):
        run_child(job)
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WorkloadError("no"), WorkloadError),
        (PlanMismatch("no"), PlanMismatch),
        (ClockError("no"), ClockError),
        (MissingDependency("a", "b", "c"), EnvironmentProblem),
    ],
)
def test_an_error_keeps_its_class_on_the_way(error: WorkloadError, kind: type) -> None:
    found = Problem.of(error).error("it")
    assert type(found) is kind and str(found) == f"it: {error}"
    assert type(Problem(kind="annotations", text="no").error("it")) is EnvironmentProblem
