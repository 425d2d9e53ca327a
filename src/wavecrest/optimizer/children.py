"""Fresh processes of a measurement: one by itself, or pairs whose sides take turns on the device.

Both sides of a pair are loaded at the same time and then timed in turns of a tenth of a second, the other one stopped
meanwhile: what the host does over seconds meets both alike, and a process that spins or works on outside of its turns
gains nothing. Pairs for a GPU are loaded together, as many as processors and memory hold: loading takes longer than
timing. All are loaded before the first is timed. Where memory is short, one side runs after the other.

For a GPU, a pair whose sides both have the environment of the run is forked by a server that has imported what
both need (`measure.fork_server`). One that sets a variable starts as two new interpreters, and so do all for a CPU:
forked processes have one layout of memory, by which times on a CPU differ from process to process. Both sides of a pair
always start alike.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import torch
from pydantic import Field

from wavecrest import env, errors, hardware
from wavecrest.errors import EnvironmentProblem, MissingDependency, WavecrestError
from wavecrest.graphs.inductor import COMPILERS
from wavecrest.measure import timing
from wavecrest.measure.fork_server import AT_USE, Forked, ForkServer
from wavecrest.records import BucketError, QualityResult, decode, files

if TYPE_CHECKING:
    from torch import nn

    from wavecrest.measure.workload import Workload

# seconds that a child may take; where it is known what it should take, this many times that, and some more: a child
# that stood still held a run of 90 s for 200 s, until its starter was ended (one H200, 2026-11-27,
# evidence/nvidia-h200/2026-11-27_zoo_seventh_gpu_0.jsonl.gz)
CHILD_TIMEOUT = 1800.0
CHILD_FACTOR, CHILD_MORE = 4.0, 30.0
# seconds for a child that stands still to write where it does, and lines of that in an error
_TELLS, _TOLD = 2.0, 3
# seconds of a turn
TURN_SECONDS = 0.1
# where it was not seen what loading a model takes: a pair is loaded at the same time where free memory holds the model
# this many times on a CPU, twice as many on a GPU
MEMORY_FACTOR = 4
# what was seen, and this part more
MEMORY_SPARE = 1.1
# bytes that a process takes on a GPU, and on its host, beside its model
CONTEXT_BYTES = 2 << 30
# a child writes on this signal where it is, the latest call first, below this line of faulthandler's
STACK_SIGNAL, STACK_HEAD = signal.SIGUSR1, "(most recent call first):"
# the place that a child names when its times are taken
TIMED = -1
PLACE = struct.Struct(">i")
# seconds between looks at whether a child is alive
_LOOK = 0.5
# the module of a child
_SIDE = "wavecrest.optimizer.side"


@dataclass(frozen=True, slots=True)
class Task:
    """The work of one child process.

    Attributes:
        spec: the workload.
        device: torch device name.
        seconds: sampling time a bucket.
        plan: the plan file to apply before timing; None times the workload's own model.
        check: after timing, also run the accuracy gate and the workload's quality check.
        copied: `spec` is the folder of a copy of a model in memory (`measure.copies`).
        threads: of PyTorch until it is timed, at most; 0: all. Processes that load at the same time, each with as many
            threads as there are processors, wait for threads that have none.
    """

    spec: str
    device: str
    seconds: float
    plan: str | None = None
    check: bool = False
    copied: bool = False
    threads: int = 0


class SideReport(files.Model):
    """Result of a child process: samples in ms by bucket, and the checks that were asked for.

    Attributes:
        shapes: of the inputs that it was timed with, by bucket.
        sources: hashes of the workload's source files as it loaded them, by path.
        spent: seconds of its parts.
    """

    clock: str
    times: dict[str, list[float]]
    numerics: list[BucketError]
    quality: list[QualityResult]
    warnings: list[str]
    shapes: dict[str, dict[str, str]] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)
    spent: dict[str, float] = Field(default_factory=dict)


class Problem(files.Model):
    """An error that a child ended with: the name of its class in `errors`, or of its base there, and its text."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: WavecrestError) -> Problem:
        """The problem to hand to the parent."""
        named = (kind.__name__ for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
        return cls(kind=next(named), text=str(error))

    def error(self, name: str) -> WavecrestError:
        """The error again, with the name of the process in front."""
        found = getattr(errors, self.kind, None)
        text = f"{name}: {self.text}"
        if isinstance(found, type) and issubclass(found, WavecrestError) and found is not MissingDependency:
            return found(text)
        return EnvironmentProblem(text)


class Job(NamedTuple):
    """A task with the environment variables to set, or to unset where None, and the name that errors call it."""

    task: Task
    changes: Mapping[str, str | None]
    name: str


Jobs = Mapping[timing.Side, Job]


class Starter:
    """Starts the children of one run; ends with its block.

    They have the variables of this process as the run began, but for those that are read at each use (`AT_USE`): what a
    step sets would reach the original's processes too.

    Args:
        model: of the workload: the installed modules that its classes come from are imported once for all children.
        device: torch device name of the workload.
        compiles: children may compile the model: the compilers are imported once for all, too.
    """

    def __init__(self, model: nn.Module, device: str, *, compiles: bool = False) -> None:
        self._forks = device != "cpu"
        self._compilers = COMPILERS if compiles else ()
        names = {type(module).__module__ for module in model.modules()}
        self._imports = sorted(name for name in names if _is_installed(name))
        self._server: ForkServer | None = None
        self._before = env.current()

    def __enter__(self) -> Starter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.__exit__(None, None, None)
            self._server = None

    def begin(self) -> None:
        """Start the imports now, to have them when the first pair starts; without this they start then."""
        if self._forks and self._server is None:
            self._server = ForkServer(_SIDE, self._imports, self._undone, self._compilers)

    @property
    def problem(self) -> str:
        """Why children are new interpreters, or an empty string; waits for imports that have begun."""
        return self._server.problem if self._server is not None else ""

    @property
    def forks(self) -> bool:
        """Whether children are forked; waits for imports that have begun."""
        return self._forks and not self.problem

    @property
    def saved_seconds(self) -> float:
        """Seconds that a forked child takes less than a new interpreter, before it compiles; 0 where no imports have
        begun.
        """
        return 0.0 if self._server is None or self._server.problem else self._server.import_seconds

    def server_for(self, pairs: Sequence[Jobs]) -> ForkServer | None:
        """The server that forks these pairs; None where they start as new interpreters."""
        if any(job.changes for jobs in pairs for job in jobs.values()):
            return None
        self.begin()
        if self._server is None:
            return None
        return None if self._server.problem else self._server

    def as_begun(self, jobs: Jobs) -> Jobs:
        """The jobs, with the variables of the beginning for those that start as new interpreters."""
        undone = self._undone
        return {side: job._replace(changes={**undone, **job.changes}) for side, job in jobs.items()}

    @property
    def _undone(self) -> dict[str, str | None]:
        """The changes that make this process's variables those of the beginning."""
        now = env.current()
        names = {*self._before, *now} - {*AT_USE}
        return {name: self._before.get(name) for name in names if self._before.get(name) != now.get(name)}


def _is_installed(name: str) -> bool:
    """Whether a module is of an installed package: the user's own code runs anew in each child."""
    path = getattr(sys.modules.get(name), "__file__", None)
    return path is not None and any(part in {"site-packages", "dist-packages"} for part in Path(path).parts)


def timeout_of(expected: float) -> float:
    """Seconds that children may take, by those that they should take."""
    return CHILD_FACTOR * expected + CHILD_MORE


def order_of(pair: int) -> tuple[timing.Side, timing.Side]:
    """Which side of a pair is first: each in turn."""
    return ("base", "new") if pair % 2 == 0 else ("new", "base")


def run_child(job: Job, server: ForkServer | None = None, *, timeout: float | None = None) -> SideReport:
    """Run a task in a fresh process: forked by the server, or a new interpreter without one.

    Args:
        job: the task.
        server: forks the process.
        timeout: seconds that it may take; None: CHILD_TIMEOUT.

    Raises:
        WavecrestError: the error of `errors` that the child ended with.
        EnvironmentProblem: it died, with its last line; or it took too long, with the place where it was.
    """
    with _Child(job, server, timeout=timeout) as child:
        return child.report()


def run_pairs(
    pairs: Sequence[Jobs],
    first: int,
    *,
    memory: int = 0,
    starter: Starter | None = None,
    timeout: float | None = None,
) -> list[dict[timing.Side, SideReport]]:
    """Run both sides of every pair, each in a fresh process.

    Args:
        pairs: jobs by side.
        first: the number of the first pair; its number says which side of a pair is first.
        memory: bytes that both processes of a pair take beside what all take (`memory_of` of each).
        starter: of the run; None starts new interpreters.
        timeout: seconds that those loaded together may take; None: CHILD_TIMEOUT.

    Raises:
        WavecrestError: see `run_child`.
    """
    server = starter.server_for(pairs) if starter is not None else None
    if starter is not None:
        pairs = [starter.as_begun(jobs) for jobs in pairs]
    if any(job.task.device != "cpu" for pair in pairs for job in pair.values()):
        # candidates of earlier steps are in cycles, with all that they hold
        gc.collect()
        torch.cuda.empty_cache()
    found: list[dict[timing.Side, SideReport]] = []
    while len(found) < len(pairs):
        begin = len(found)
        jobs = pairs[begin]
        # checks that follow the times take memory of their own
        checks = any(job.task.check for job in jobs.values())
        count = min(pairs_together(job.task.device, memory) for job in jobs.values())
        if not count:
            sides = order_of(first + begin)
            found.append({side: run_child(jobs[side], server, timeout=timeout) for side in sides})
        else:
            together = pairs[begin : begin + (1 if checks else count)]
            found += _run_together(together, first + begin, server, timeout)
    return found


def _run_together(
    pairs: Sequence[Jobs], first: int, server: ForkServer | None, timeout: float | None
) -> list[dict[timing.Side, SideReport]]:
    """Load all sides of all pairs, then time one pair after the other."""
    if any(job.task.device != "cpu" for jobs in pairs for job in jobs.values()):
        share = max(1, torch.get_num_threads() // (2 * len(pairs)))
        pairs = [
            {side: job._replace(task=replace(job.task, threads=share)) for side, job in jobs.items()} for jobs in pairs
        ]
    with contextlib.ExitStack() as stack:
        groups = [
            {
                side: stack.enter_context(_Child(jobs[side], server, in_turns=True, timeout=timeout))
                for side in order_of(first + index)
            }
            for index, jobs in enumerate(pairs)
        ]
        everyone = [child for group in groups for child in group.values()]
        for child in everyone:
            child.meet()
        for child in everyone:
            child.signal(signal.SIGSTOP)
        for group in groups:
            take_turns(list(group.values()))
        # only now, as a process that ends takes time of the others
        for child in everyone:
            child.signal(signal.SIGCONT)
            child.allow()
        return [{side: child.report() for side, child in group.items()} for group in groups]


def pairs_together(device: str, memory: int) -> int:
    """How many pairs are loaded at the same time; 0: not even both sides of one.

    On a CPU one at most: loading keeps all processors busy.

    Args:
        device: torch device name.
        memory: as `run_pairs` takes it.
    """
    free = hardware.free_host_memory()
    if device == "cpu":
        return int(memory // 2 <= free)
    # what this process holds for later is given back before children start
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = min(free, torch.cuda.mem_get_info(device)[0] + held)
    return min(free // (memory + 2 * CONTEXT_BYTES), max(1, (os.cpu_count() or 1) // 2))


def memory_of(workload: Workload, result: nn.Module | None = None, calls: int = 0) -> int:
    """Bytes that a process with this workload takes.

    Args:
        workload: its loading took a peak on the GPU; where that was not seen, a few times its weights are expected.
        result: a model that shares tensors with the workload's, which a process may hold beside it.
        calls: bytes that a call takes beside weights, where they were measured.
    """
    weights = weight_bytes(workload.model, *([] if result is None else [result]))
    if workload.load_bytes:
        return int(MEMORY_SPARE * max(workload.load_bytes, weights + calls))
    return MEMORY_FACTOR * weights + calls


def weight_bytes(*models: nn.Module) -> int:
    """Bytes of models' parameters and buffers, each tensor once."""
    tensors = {id(tensor): tensor for model in models for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())


class Turns:
    """The turns of this process, a child whose parent has another one timed at the same time.

    Args:
        connection: to the parent.
        now: where time comes from.
    """

    def __init__(self, connection: socket.socket, now: timing.Clock = timing.HOST_CLOCK) -> None:
        # not for processes that this one starts
        connection.set_inheritable(False)
        self._connection, self._now = connection, now
        self._place, self._end = 0, 0.0

    def begin(self, place: int) -> None:
        """Wait for the first turn at a place, the number of a bucket: both sides are there then."""
        self._place = place
        self._wait()

    def pause(self) -> float:
        """Let the other side have its turn if this one's is over; the seconds that passed meanwhile."""
        begin = self._now()
        if begin < self._end:
            return 0.0
        self._wait()
        return self._now() - begin

    def end(self) -> None:
        """Say that the times are taken, and wait until those of the other side are."""
        self._place = TIMED
        self._wait()

    def _wait(self) -> None:
        self._connection.sendall(PLACE.pack(self._place))
        if not self._connection.recv(1):
            raise EnvironmentProblem("the process that started this one has ended")
        self._end = self._now() + TURN_SECONDS


class _Child:
    """A child process, which ends with the block."""

    def __init__(
        self, job: Job, server: ForkServer | None = None, *, in_turns: bool = False, timeout: float | None = None
    ) -> None:
        self.name = job.name
        self._timeout = CHILD_TIMEOUT if timeout is None else timeout
        # the bucket that it wants to go on with; None until it says so, TIMED at the end
        self.place: int | None = None
        self._stack = contextlib.ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._target, self._log = folder / "side.json", folder / "log"
        self._deadline = time.monotonic() + self._timeout
        arguments = [json.dumps(asdict(job.task)), str(self._target)]
        with contextlib.ExitStack() as theirs:
            passed: list[int] = []
            if in_turns:
                self._connection, other = socket.socketpair()
                self._stack.enter_context(self._connection).settimeout(_LOOK)
                passed = [theirs.enter_context(other).fileno()]
            log = theirs.enter_context(self._log.open("wb"))
            self._process: Forked | subprocess.Popen[bytes]
            if server is not None:
                self._process = server.start(arguments, log, passed)
            else:
                # a process group of its own, so that all of it can be stopped and ended
                self._process = subprocess.Popen(
                    [*env.python_command(_SIDE), *arguments, *map(str, passed)],
                    env=env.python_child(job.changes),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    pass_fds=passed,
                    process_group=0,
                )

    def __enter__(self) -> _Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._stack.close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def meet(self) -> None:
        """Wait until it can begin, or wants to go on.

        Raises:
            WavecrestError: it ended instead; see `run_child`.
        """
        data = b""
        while len(data) < PLACE.size:
            with contextlib.suppress(TimeoutError):
                more = self._connection.recv(PLACE.size - len(data))
                data += more
                if not more:
                    # it has closed its end, as it does when it dies
                    self.report()
                    raise EnvironmentProblem(f"{self.name} failed: it ended before its turns did")
            self._check_time()
        (self.place,) = PLACE.unpack(data)

    def take_turn(self) -> None:
        """Let it go on until its turn is over, and stop it then."""
        self.signal(signal.SIGCONT)
        self.allow()
        self.meet()
        self.signal(signal.SIGSTOP)

    def allow(self) -> None:
        """Answer that it may go on; where it has ended, `meet` finds out."""
        with contextlib.suppress(OSError):
            self._connection.sendall(b"t")

    def report(self) -> SideReport:
        """Wait for its end, and read its report.

        Raises:
            WavecrestError: see `run_child`.
        """
        try:
            code = self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._check_time()
            raise
        if code != 0 or not self._target.exists():
            raise self._problem()
        return SideReport.model_validate(decode.json_of(self._target.read_text()))

    def _check_time(self) -> None:
        if time.monotonic() >= self._deadline:
            raise EnvironmentProblem(f"{self.name} took more than {self._timeout:.0f} s{self._place_in_code()}")

    def _place_in_code(self) -> str:
        """Where it is, as it writes it on STACK_SIGNAL; nothing where it does not, or has not begun."""
        self.signal(signal.SIGCONT)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, STACK_SIGNAL)
        end = time.monotonic() + _TELLS
        lines: list[str] = []
        while not lines and time.monotonic() < end:
            time.sleep(_TELLS / 20)
            text = self._log.read_text(errors="replace").rpartition(STACK_HEAD)[2]
            lines = [line.strip() for line in text.splitlines() if line.startswith("  File ")]
        return f"; it was at: {' < '.join(lines[:_TOLD])}" if lines else ""

    def _problem(self) -> WavecrestError:
        path = problem_file(self._target)
        if path.exists():
            return Problem.model_validate(decode.json_of(path.read_text())).error(self.name)
        lines = self._log.read_text(errors="replace").strip().splitlines()
        last = lines[-1] if lines else f"exit code {self._process.returncode}"
        return EnvironmentProblem(f"{self.name} failed: {last}")


def problem_file(target: Path) -> Path:
    """The file of the error that a child ended with, beside that of its report."""
    return target.with_name("problem.json")


def take_turns(children: Sequence[_Child]) -> None:
    """Let children that are loaded and stopped be timed in turns: all at one bucket, then all at the next."""
    order = list(children)
    while places := [child.place for child in order if child.place is not None and child.place != TIMED]:
        first = min(places)
        for child in order:
            if child.place == first:
                child.take_turn()
        # ABBA, as a drift goes on within two turns
        order.reverse()
