"""Compile every kernel of a run before anything is timed, in child processes that fill Triton's cache.

Sizes are run-time integers in most kernels, so one kernel serves many shapes: each is compiled once.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from wavecrest import env, records
from wavecrest.dispatch.call import AnyCall
from wavecrest.dispatch.op import AnyOp
from wavecrest.errors import EnvironmentProblem, Unsupported
from wavecrest.hardware import Arch
from wavecrest.isa import Launch, compiler
from wavecrest.measure.timing import Clock
from wavecrest.records import decode
from wavecrest.tune import compile_worker
from wavecrest.tune.candidates import Candidate
from wavecrest.tune.workers import importable

# a kernel that is not compiled after this long is refused
TIMEOUT = 120.0

# two launches with the same identity share one compiled kernel
Identity = tuple[Any, ...]
# (done, planned), after each kernel
OnKernel = Callable[[int, int], None]


def identity(launch: Launch) -> Identity:
    """Equal for launches that run the same machine code.

    Triton compiles a kernel for the types of its arguments, for whether addresses are multiples of 16, for whether
    specialized integers are 1 or multiples of 16, and for its constants and options.
    """
    kinds = tuple(_kind(value, parameter) for value, parameter in zip(launch.args, launch.kernel.params, strict=False))
    options = tuple(sorted(launch.options().items(), key=lambda pair: pair[0]))
    return (launch.kernel.__module__, launch.kernel.__name__, kinds, options)


def _kind(value: Any, parameter: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        return ("tensor", value.dtype, value.data_ptr() % 16 == 0)
    if hasattr(value, "block_shape"):
        return ("described", value.base.dtype, tuple(value.block_shape))
    if type(value) is int:
        wide = not -(2**31) <= value < 2**31
        return ("int", wide) if parameter.do_not_specialize else ("int", wide, value == 1, value % 16 == 0)
    return (type(value).__name__,)


@dataclass(slots=True)
class Kernels:
    """The kernels of a run: a job for each, and which of them a candidate of a case needs."""

    arch: str
    # why nothing is compiled ahead; empty if kernels are
    note: str = ""
    jobs: dict[Identity, dict[str, Any]] = field(default_factory=dict)
    errors: dict[Identity, str] = field(default_factory=dict)
    # bytes of scratch memory a lane, for kernels that were compiled and report it
    scratch: dict[Identity, int] = field(default_factory=dict)
    _needed: dict[tuple[str, Candidate], tuple[Identity, ...]] = field(default_factory=dict)

    def add(self, op: AnyOp, case: str, call: AnyCall, candidates: Iterable[Candidate], arch: Arch) -> None:
        """Add the kernels of a case's candidates; a backend without `launches` compiles at its first call."""
        found: list[Any] | None = None
        for candidate in candidates:
            launches = op.study.kernel(candidate.backend).launches
            if launches is None or candidate.config is None:
                continue
            try:
                found = compile_worker.described(call) if found is None else found
                made = launches(call, candidate.config, arch)
            except Unsupported:
                # its reason comes up again, and is recorded, when the candidate is run
                continue
            names = tuple(identity(launch) for launch in made)
            self._needed[case, candidate] = names
            for index, name in enumerate(names):
                if name not in self.jobs:
                    self.jobs[name] = {
                        "op": op.name, "backend": candidate.backend, "config": dict(candidate.config.kwargs),
                        "args": found, "index": index, "arch": arch.name,
                    }  # fmt: skip

    def error(self, case: str, candidate: Candidate) -> str | None:
        """Why a kernel that a candidate needs cannot be compiled; None if all can, as far as is known."""
        for name in self._needed.get((case, candidate), ()):
            if name in self.errors:
                return self.errors[name]
        return None

    def spilled(self, case: str, candidate: Candidate) -> int | None:
        """The most scratch memory of a candidate's kernels, in bytes a lane; None if it is unknown for one of them."""
        found = [self.scratch.get(name) for name in self._needed.get((case, candidate), ())]
        known = [one for one in found if one is not None]
        return max(known) if known and len(known) == len(found) else None

    def spills_more(self, case: str, candidates: Sequence[Candidate]) -> dict[int, str]:
        """Candidates that spill more than the default, by their index, with the reasons."""
        default = next((one for one in candidates if one.role == "default"), None)
        least = None if default is None else self.spilled(case, default)
        if least is None:
            return {}
        own = {place: self.spilled(case, one) for place, one in enumerate(candidates)}
        return {
            place: f"spills: {bytes} bytes of scratch memory a lane, the default {least}"
            for place, bytes in own.items()
            if bytes is not None and bytes > least
        }


def kernels(on_cpu: bool, arch: Arch | None) -> Kernels:
    """An empty set of kernels for a device; its `note` says why none can be compiled ahead."""
    if on_cpu:
        return Kernels("", note="the CPU runs no compiled kernels")
    if arch is None:
        return Kernels("", note="wavecrest has no record of the architecture")
    try:
        compiler.require_compiler()
    except EnvironmentProblem as error:
        return Kernels("", note=str(error))
    return Kernels(arch.name)


class Answers(Protocol):
    """Answers compile jobs: a child process, or a stand-in for one in tests."""

    def ask(self, job: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The answer to a job."""

    def close(self) -> None:
        """Stop, at once."""


class CompileWorker:
    """A child process that compiles; a new one is started after it died or was given up."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        # open for as long as the worker lives
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._closed = False

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "wavecrest.tune.compile_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # a child that compiles does not receive Ctrl-C: this process closes it
            start_new_session=True,
            env=env.child(importable()),
        )

    def ask(self, job: dict[str, Any], timeout: float) -> dict[str, Any]:
        """The answer to a job, or the reason why it was not compiled."""
        if self._closed:
            return {"error": "was not compiled: the run ended"}
        self._errors.seek(0)
        self._errors.truncate()
        child = self._child = self._child or self._start()
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(json.dumps(job) + "\n")
            child.stdin.flush()
            ready, _, _ = select.select([child.stdout], [], [], timeout)
            line = child.stdout.readline() if ready else ""
        except (BrokenPipeError, ValueError):
            ready, line = [child.stdout], ""
        if line:
            reply: dict[str, Any] = decode.json_of(line, finite=False)
            return reply
        self._stop()
        if self._closed:
            return {"error": "was not compiled: the run ended"}
        if not ready:
            return {"error": f"was not compiled within {timeout:.0f} s"}
        self._errors.seek(0)
        said = [text.strip() for text in self._errors if text.strip()]
        return {"error": f"the compiler ended with code {child.returncode}: {said[-1] if said else 'without a word'}"}

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()

    def close(self) -> None:
        """Stop, at once; from another thread than the one that asks, too."""
        self._closed = True
        self._stop()


def compile_all(
    wanted: Kernels,
    workers: int,
    *,
    deadline: float,
    on_kernel: OnKernel | None = None,
    start: Callable[[], Answers] = CompileWorker,
    now: Clock = time.perf_counter,
) -> records.TuneCompilation:
    """Compile all kernels; those that cannot be are noted in `wanted.errors`.

    Args:
        wanted: from `kernels`.
        workers: child processes.
        deadline: of `now`, after which no kernel is begun; the others compile when they are first run.
        on_kernel: called after each.
        start: makes a worker.
        now: the clock of the deadline.

    Raises:
        EnvironmentProblem: the children find no compiler.
    """
    if wanted.note:
        return records.TuneCompilation(note=wanted.note)
    begin = now()
    workers = max(1, min(workers, len(wanted.jobs)))
    queue, lock = deque(wanted.jobs.items()), threading.Lock()
    done: list[Identity] = []
    fatal: list[str] = []
    stop = threading.Event()
    answering = [start() for _ in range(workers)]

    def serve(own: Answers) -> None:
        while not stop.is_set() and now() < deadline:
            with lock:
                if not queue:
                    return
                name, job = queue.popleft()
            reply = own.ask(job, TIMEOUT)
            with lock:
                if stop.is_set():
                    return
                if reply.get("fatal"):
                    fatal.append(reply["error"])
                    stop.set()
                    return
                done.append(name)
                if "error" in reply:
                    wanted.errors[name] = reply["error"]
                elif "scratch" in reply:
                    wanted.scratch[name] = reply["scratch"]

    threads = [threading.Thread(target=serve, args=(own,), daemon=True) for own in answering]
    try:
        for thread in threads:
            thread.start()
        shown = 0
        while any(thread.is_alive() for thread in threads) or shown != len(done):
            for thread in threads:
                thread.join(0.05)
            if len(done) != shown:
                shown = len(done)
                if on_kernel is not None:
                    on_kernel(shown, len(wanted.jobs))
    finally:
        stop.set()
        for own in answering:
            own.close()
    if fatal:
        raise EnvironmentProblem(f"nothing can be compiled: {fatal[0]}")
    return records.TuneCompilation(
        kernels=len(done),
        failed=_failed(wanted),
        left=len(wanted.jobs) - len(done),
        workers=workers,
        seconds=round(now() - begin, 3),
    )


def _failed(wanted: Kernels) -> dict[str, str]:
    """Backend and configuration of the kernels that failed, with the errors."""
    lines: dict[str, str] = {}
    for name, error in wanted.errors.items():
        job = wanted.jobs[name]
        config = " ".join(f"{key}={value}" for key, value in job["config"].items())
        lines[f"{job['backend']} {config} #{len(lines)}"] = error
    return lines
