"""Fresh processes of a pair: turns that exclude each other, and the errors that children end with."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import cache_dir

from wavecrest.bench.baseline import peak_memory
from wavecrest.errors import ClockError, EnvironmentProblem, MissingDependency, PlanMismatch, StepRefused, WorkloadError
from wavecrest.graphs.inductor import COMPILERS
from wavecrest.measure import fork_server
from wavecrest.measure.fork_server import ForkServer
from wavecrest.measure.timing import Side
from wavecrest.measure.workload import Buckets, Call, from_example
from wavecrest.optimizer import children, side
from wavecrest.optimizer.children import Job, Problem, SideReport, Starter, Task, run_child, run_pairs
from wavecrest.optimizer.gate import RuleBroken

# a side writes down when its calls ran, and the second one spins in a thread all the time, to slow the first. It leaves
# the interpreter to its own calls half of the time: without that their copies of inputs took 100 s
WORKLOAD = """
import atexit, os, threading, time
import torch
from torch import nn

LOG = open(os.environ["TURNS_LOG"], "a", buffering=1)
# PyTorch's compiler waits for its workers there
atexit.register(LOG.write, "exit\\n")

def spin():
    while True:
        end = time.monotonic() + 0.002
        while time.monotonic() < end:
            pass
        LOG.write(f"spin {time.monotonic()}\\n")
        time.sleep(0.002)

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


@pytest.mark.slow
def test_a_side_stands_still_while_the_other_is_timed(work: str, tmp_path: Path) -> None:
    logs = {side: tmp_path / side for side in ("base", "new")}
    task = Task(f"{work}:make", "cpu", 0.3)
    jobs: dict[Side, Job] = {
        "base": Job(task, {"TURNS_LOG": str(logs["base"])}, "the first"),
        "new": Job(task, {"TURNS_LOG": str(logs["new"]), "SPINS": "1"}, "the second"),
    }
    (found,) = run_pairs([jobs], 0)
    assert found["base"].times.keys() == found["new"].times.keys() == {"default"}
    calls, others = _rows(logs["base"], "call"), _rows(logs["new"], "call")
    # turns begin once both are loaded; before, both call once to compile
    begin = max(calls[0][1], others[0][1])
    timed = [row for row in calls if row[0] > begin]
    turns_of_other = [row for row in others if row[0] > begin]
    assert len(timed) > 15 and len(turns_of_other) > 15
    both = sorted([*timed, *turns_of_other])
    assert all(end <= start for (_, end), (start, _) in pairwise(both)) and not _rows(logs["base"], "exit")
    # thousands of them; a signal may take a moment to arrive
    spins = torch.tensor(_rows(logs["new"], "spin"), dtype=torch.float64)[:, 0]
    during = sum(int(((a + 0.005 < spins) & (spins < b)).sum()) for a, b in timed)
    assert during <= 2 < len(spins)


class Fake:
    """A child that is timed for two turns; `told` has what becomes of all of them, in order."""

    told: ClassVar[list[tuple[str, str]]] = []
    threads: ClassVar[list[int]] = []

    def __init__(
        self, job: Job, server: ForkServer | None, *, in_turns: bool = False, timeout: float | None = None
    ) -> None:
        assert in_turns and server is None and timeout is None
        self.name, self.place, self._turns = job.name, 0, 0
        self.threads.append(job.task.threads)
        self.told.append((self.name, "start"))

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_error: object) -> None:
        self.told.append((self.name, "gone"))

    def meet(self) -> None:
        self.told.append((self.name, "loaded"))

    def signal(self, number: signal.Signals) -> None:
        self.told.append((self.name, number.name))

    def take_turn(self) -> None:
        self._turns += 1
        self.place = children.TIMED if self._turns == 2 else 0
        self.told.append((self.name, "turn"))

    def allow(self) -> None:
        self.told.append((self.name, "allowed"))

    def report(self) -> SideReport:
        return SideReport(clock=self.name, times={}, numerics=[], quality=[], warnings=[])


def test_pairs_are_loaded_together_and_timed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: no turn before all are loaded, one pair after the other, none ends before all are timed."""
    monkeypatch.setattr(children, "pairs_together", lambda device, memory: 2)
    monkeypatch.setattr(children, "_Child", Fake)
    monkeypatch.setattr(Fake, "told", [])
    monkeypatch.setattr(Fake, "threads", [])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    task = Task("work.py:make", "cuda:0", 0.1)
    jobs: list[dict[Side, Job]] = [
        {side: Job(task, {}, f"{side}{pair}") for side in ("base", "new")} for pair in range(3)
    ]
    found = run_pairs(jobs, 0)
    assert [{side: report.clock for side, report in row.items()} for row in found] == [
        {"base": "base0", "new": "new0"}, {"new": "new1", "base": "base1"}, {"base": "base2", "new": "new2"}
    ]  # fmt: skip
    first = [one for one in Fake.told if one[0][-1] != "2"]
    together = ["base0", "new0", "new1", "base1"]
    turns = ["base0", "new0", "new0", "base0", "new1", "base1", "base1", "new1"]
    assert first == [
        *((name, "start") for name in together), *((name, "loaded") for name in together),
        *((name, "SIGSTOP") for name in together), *((name, "turn") for name in turns),
        *((name, what) for name in together for what in ("SIGCONT", "allowed")),
        *((name, "gone") for name in reversed(together)),
    ]  # fmt: skip
    # those that load together share the processors
    assert Fake.threads == [4, 4, 4, 4, 8, 8]
    # the third pair is loaded by itself, behind the others
    assert Fake.told[: len(first)] == first and Fake.told[len(first)] == ("base2", "start")
    # checks take memory beside the times: one pair at once
    Fake.told.clear()
    run_pairs([{side: Job(replace(task, check=True), {}, side) for side in ("base", "new")}] * 2, 0)
    assert [what for _, what in Fake.told].index("gone") < len(Fake.told) // 2


@pytest.mark.parametrize(
    ("device", "memory", "free", "cores", "count"),
    [
        ("cpu", 10 << 30, 9 << 30, 64, 0),
        ("cpu", 8 << 30, 9 << 30, 64, 1),
        # two processes a pair, each with a context of its own
        ("cuda:0", 1 << 30, 60 << 30, 64, 10),
        ("cuda:0", 1 << 30, 60 << 30, 8, 4),
        ("cuda:0", 28 << 30, 59 << 30, 64, 0),
    ],
)
def test_how_many_pairs_memory_and_processors_hold(
    device: str, memory: int, free: int, cores: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children.hardware, "free_host_memory", lambda: free)
    monkeypatch.setattr(children.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(children.torch.cuda, "mem_get_info", lambda device: (90 << 30, 90 << 30))
    assert children.pairs_together(device, 2 * memory) == count
    monkeypatch.setattr(children.torch.cuda, "mem_get_info", lambda device: (1 << 30, 90 << 30))
    assert children.pairs_together(device, 2 * memory) == (count if device == "cpu" else 0)


@pytest.mark.slow
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
        run_pairs([{"base": good, "new": bad}], 0)
    assert len(started) == 2
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.killpg(pid, 0)


@pytest.mark.slow
def test_pairs_are_forked_where_both_sides_have_this_environment(
    work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides of a pair start alike; the user's own file runs anew in each child."""
    monkeypatch.setenv("TURNS_LOG", str(tmp_path / "log"))
    interpreters: list[list[str]] = []
    real = children.subprocess.Popen

    def start(command: list[str], **options: object) -> object:
        interpreters.append(command)
        return real(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(children.subprocess, "Popen", start)
    task = Task(f"{work}:make", "cpu", 0.1)
    same, other = Job(task, {}, "same"), Job(task, {"X": "1"}, "other")
    model = nn.Sequential(nn.Linear(2, 2), Block())
    with Starter(model, "cpu") as starter:
        starter.begin()
        assert starter.server_for([{"base": same, "new": same}]) is None and not interpreters
    # the children's tasks are for the CPU all the same
    with Starter(model, "cuda:0") as starter:
        assert starter.saved_seconds == 0.0 and not interpreters
        (forked,) = run_pairs([{"base": same, "new": same}], 0, starter=starter)
        # the server alone: of classes that are not installed it imports nothing
        (command,) = interpreters
        assert command[2:4] == ["wavecrest.measure.child", str(os.getpid())]
        assert "torch.nn.modules.linear" in command and not any("tests" in part for part in command[5:])
        assert not set(COMPILERS) & set(command)
        assert starter.problem == "" and starter.saved_seconds > 0.5
        assert not _rows(tmp_path / "log", "exit")
        assert len(_rows(tmp_path / "log", "call")) >= sum(len(row.times["default"]) for row in forked.values()) > 0
        # as PyTorch's compiler and its profiler do
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        monkeypatch.setenv("TEARDOWN_CUPTI", "0")
        run_pairs([{"base": same, "new": same}], 1, starter=starter)
        assert len(interpreters) == 1 and starter.problem == ""
        run_pairs([{"base": same, "new": other}], 2, starter=starter)
        assert len(interpreters) == 3
        dies = Job(Task(f"{work}:dies", "cpu", 0.1), {}, "dies")
        with pytest.raises(EnvironmentProblem, match="dies failed: exit code 7"):
            run_pairs([{"base": same, "new": dies}], 3, starter=starter)
        assert len(interpreters) == 3


def test_the_compilers_are_imported_once_for_all_children(tmp_path: Path) -> None:
    """And PyTorch's do nothing at import that keeps a process from being forked."""
    (tmp_path / "compiled.py").write_text(
        "import sys, torch\n"
        f"assert all(name in sys.modules for name in {COMPILERS!r})\n"
        "def make(device):\n"
        "    model = torch.nn.Linear(2, 2)\n"
        "    model.compile(backend='aot_eager')\n"
        "    return model, torch.ones(1, 2)\n"
    )
    job = Job(Task(f"{tmp_path / 'compiled.py'}:make", "cpu", 0.05), {}, "it")
    with Starter(nn.Linear(2, 2), "cuda:0", compiles=True) as starter:
        (pair,) = run_pairs([{"base": job, "new": job}], 0, starter=starter)
        assert starter.problem == ""
    assert all(row.times["default"] for row in pair.values())


def test_variables_that_are_set_as_a_run_works_stop_no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run profiles and compiles behind the begin of its starter."""
    for name in fork_server.AT_USE:
        monkeypatch.delenv(name, raising=False)
    job = Job(Task("work.py:make", "cuda:0", 0.1), {}, "same")
    model = nn.Linear(2, 2)
    with Starter(model, "cuda:0") as starter:
        starter.begin()
        # as the baseline and the first compiled step of a run do
        loaded = from_example(model, torch.ones(1, 2))
        peak_memory(Call(loaded, "default", model), "cpu")
        cache_dir()
        assert starter.server_for([{"base": job, "new": job}]) is not None
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert starter.server_for([{"base": job, "new": job}]) is not None
        assert starter.problem == "" and starter.saved_seconds > 0


@pytest.mark.parametrize("device", ["cpu", "cuda:0"], ids=["interpreters", "forks"])
def test_what_a_run_sets_reaches_no_child(
    work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """A step that sets a variable would slow the original, which does without the step, in its own process."""
    monkeypatch.setenv("TURNS_LOG", str(tmp_path / "before"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with Starter(nn.Linear(2, 2), device) as starter:
        for name in ("TURNS_LOG", "PYTHONPATH"):
            monkeypatch.setenv(name, str(tmp_path / "since"))
        job = Job(Task(f"{work}:make", "cpu", 0.05), {}, "it")
        # on the CPU one of the two has a variable of its own
        own = Job(job.task, {"TURNS_LOG": str(tmp_path / "own")} if device == "cpu" else {}, "it")
        run_pairs([{"base": job, "new": own}], 0, starter=starter)
    assert (tmp_path / "before").exists() and not (tmp_path / "since").exists()
    assert (tmp_path / "own").exists() == (device == "cpu")


class Block(nn.Linear):
    """A class that is not of an installed package."""

    def __init__(self) -> None:
        super().__init__(2, 2)


def test_a_model_that_raises_is_the_users_error(work: str, tmp_path: Path) -> None:
    log = {"TURNS_LOG": str(tmp_path / "log")}
    job = Job(Task(f"{work}:raises", "cpu", 0.1), log, "process 0 of the original")
    with pytest.raises(WorkloadError, match="process 0 of the original: the model raised ValueError: planted in forw"):
        run_child(job)


def test_a_side_that_falls_back_to_eager_is_an_error_and_not_slow() -> None:
    """More shapes than Dynamo compiles: the third would run in eager, which nobody sees in its times."""
    loaded = from_example(torch.nn.Linear(4, 4), Buckets({f"b{size}": (torch.ones(size, 4),) for size in (2, 3, 4)}))
    torch._dynamo.reset()
    compiled = torch.compile(loaded.model, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2), pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        side.time_buckets(loaded, compiled, 0.01)


def test_a_child_that_takes_too_long_is_ended(work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "CHILD_TIMEOUT", 0.2)
    job = Job(Task(f"{work}:make", "cpu", 60.0), {"TURNS_LOG": str(tmp_path / "log")}, "the child")
    begin = time.monotonic()
    with pytest.raises(EnvironmentProblem, match="the child took more than 0 s"):
        run_child(job)
    assert time.monotonic() - begin < 30


THREADS = """
import os
import torch
from torch import nn

def note(when):
    with open(os.environ["THREADS_LOG"], "a") as file:
        file.write(f"{when} {torch.get_num_threads()}\\n")

class Noted(nn.Linear):
    def forward(self, x):
        note("call")
        return super().forward(x)

def make():
    note("load")
    return Noted(4, 4), torch.randn(2, 4)
"""


@pytest.mark.parametrize(("threads", "load"), [(1, 1), (0, 2), (64, 2)])
def test_threads_are_fewer_until_the_first_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, load: int
) -> None:
    """A timed call has as many as its user's. Eight processes that loaded on 16 cores had 16 each."""
    (tmp_path / "noted.py").write_text(THREADS)
    monkeypatch.setenv("THREADS_LOG", str(tmp_path / "log"))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        side.measure_side(Task(f"{tmp_path}/noted.py:make", "cpu", 0.01, threads=threads))
    finally:
        torch.set_num_threads(before)
    rows = [row.split() for row in (tmp_path / "log").read_text().splitlines()]
    assert rows[0] == ["load", str(load)] and {count for what, count in rows if what == "call"} == {"2"}


STANDS = """
import os
import pathlib
import time


def make(device):
    pathlib.Path(__file__).with_name(f"begun{os.getpid()}").touch()
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_child_that_stands_still_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the place nobody knew why a run went on until its starter was killed."""
    (tmp_path / "stands.py").write_text(STANDS)
    now = time.monotonic

    def later() -> float:
        """The time is over once both stand, however long imports take."""
        return now() + 500 * (len(list(tmp_path.glob("begun*"))) == 2)

    monkeypatch.setattr(children.time, "monotonic", later)
    job = Job(Task(f"{tmp_path}/stands.py:make", "cpu", 0.05), {}, "the child")
    place = r"the child took more than 300 s; it was at: File \".*/stands.py\", line \d+ in make < File "
    with pytest.raises(EnvironmentProblem, match=place):
        run_pairs([{"base": job, "new": job}], 0, timeout=300.0)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (WorkloadError("no"), WorkloadError),
        (PlanMismatch("no"), PlanMismatch),
        (ClockError("no"), ClockError),
        (MissingDependency("a", "b", "c"), EnvironmentProblem),
        # of a class that is not one of `errors`: what it is there
        (RuleBroken("held", "no"), StepRefused),
    ],
)
def test_an_error_keeps_its_class_on_the_way(error: WorkloadError, kind: type) -> None:
    found = Problem.of(error).error("it")
    assert type(found) is kind and str(found) == f"it: {error}"
    assert type(Problem(kind="annotations", text="no").error("it")) is EnvironmentProblem
