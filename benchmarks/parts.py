"""Parts of a benchmark, each a process of its own with a time limit, and a result file that grows with every row.

The rows that a part wrote before it ran out of time, or before a compiler aborted its process, stay in the file with
the reason. A part whose process died goes on after the case that it died of. A later run can do the missing parts.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wavecrest.errors import RecordError, WavecrestError
from wavecrest.records import files

# processes of one part that may die before it ends
DEATHS = 12
# a part is not started with fewer seconds than these
LEAST_SECONDS = 5.0

Row = dict[str, Any]


@dataclass(slots=True)
class Report:
    """Messages from the process of a part to the process that started it.

    `died`: cases that earlier processes of the part died of; `done`: cases whose rows are written; `began`: when the
    process was started, by `time.time`.
    """

    stream: int
    died: Collection[str] = ()
    done: Collection[str] = ()
    began: float = field(default_factory=time.time)

    def at(self, case: str) -> bool:
        """Say that a case begins; False where an earlier process died of it, and it must not be tried again."""
        if case in self.died:
            return False
        self._write({"at": case})
        return True

    def has(self, case: str) -> bool:
        """True where an earlier process has reported the case."""
        return case in self.done

    def row(self, case: str, **values: Any) -> None:
        """Report a case: it is in the file before this returns, whatever happens next."""
        self._write({"row": {"case": case, **values}})

    def header(self, values: Row) -> None:
        """Report machine and versions."""
        self._write({"header": values})

    def _write(self, message: Row) -> None:
        os.write(self.stream, (json.dumps(message) + "\n").encode())


@dataclass(frozen=True, slots=True)
class Part:
    """A part: its work, seconds that it may take, and a function of its rows (`summary`, in the file beside them).

    Parts of one `group` that follow each other run at the same time: those that compile, not those that are timed.
    """

    name: str
    limit: float
    work: Callable[[Report, argparse.Namespace], None]
    group: str = ""
    summary: Callable[[list[Row]], Row] | None = None


@dataclass(slots=True)
class Run:
    """One run of a part so far; the file stores it as a dictionary."""

    part: str
    header: Row | None = None
    rows: list[Row] = field(default_factory=list)
    summary: Row | None = None
    seconds: float = 0.0
    ended: str = "under way"

    def to_dict(self) -> Row:
        """The dictionary that the file stores."""
        return {
            "part": self.part, "ended": self.ended, "seconds": round(self.seconds, 1), "summary": self.summary,
            "rows": self.rows, "header": self.header,
        }  # fmt: skip


class File:
    """The result file: runs of parts, those of earlier calls first; written whole after every change."""

    def __init__(self, path: Path) -> None:
        """Read what is there.

        Raises:
            RecordError: it is not such a file.
        """
        self.path = path
        self._lock = threading.Lock()
        self._runs: list[Any] = []
        self._samples = "full"
        if path.exists():
            try:
                found = files.read_json(path, what="file of parts")
                self._runs = list(found["runs"])
                # runs that kept every n-th sample alone, as all did until 2026-11-24
                self._samples = found.get("samples", "thinned")
            except (RecordError, KeyError, TypeError) as error:
                raise RecordError(f"{path} is no file of parts ({error}); move it away or name another") from error

    def add(self, run: Run) -> Callable[[], None]:
        """Take a run in; returns what to call after each change of it."""
        with self._lock:
            place = len(self._runs)
            self._runs.append(None)

        def write() -> None:
            with self._lock:
                self._runs[place] = run.to_dict()
                kept = [one for one in self._runs if one is not None]
                files.write_document(self.path, {"samples": self._samples, "runs": kept})

        write()
        return write

    def done(self) -> set[str]:
        """The parts that a run has done to the end."""
        return {one["part"] for one in self._runs if one["ended"] == "done"}


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _brief(row: Row) -> str:
    """A row in a line: lists, which are samples, left out."""
    return " ".join(f"{name}={value}" for name, value in row.items() if not isinstance(value, (list, dict)))


def _reason(code: int, last: str) -> str:
    """Why a process ended as it did."""
    name = f"exit code {code}"
    if code < 0:
        name = f"signal {-code}"
        if -code in {one.value for one in signal.Signals}:
            name = signal.Signals(-code).name
    return f"its process ended with {name}: {last}" if last else f"its process ended with {name}"


def _last_line(log: Any) -> str:
    """The last line that is not empty of a log, which goes to our own stderr."""
    log.seek(0)
    text = log.read().decode(errors="replace")
    sys.stderr.write(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


# leaders of the groups of processes that run now
_RUNNING: set[int] = set()


def _terminated(number: int, _frame: object) -> None:
    """End all parts: their groups get no signal that is sent to this process, as by `timeout`."""
    for pid in list(_RUNNING):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    raise SystemExit(128 + number)


def _process(command: list[str], seconds: float, on_message: Callable[[Row], None]) -> str | None:
    """One process of a part, to its end; returns why it did not end well, or None.

    It leads a group of its own, which is ended as a whole: compilers are processes too.
    """
    with tempfile.TemporaryFile() as log:
        started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
        _RUNNING.add(started.pid)
        late = threading.Event()

        def stop() -> None:
            late.set()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)

        timer = threading.Timer(seconds, stop)
        timer.start()
        try:
            assert started.stdout is not None
            for line in started.stdout:
                on_message(json.loads(line))
            code = started.wait()
        finally:
            timer.cancel()
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()
            _RUNNING.discard(started.pid)
        last = _last_line(log)
    if late.is_set():
        return "stopped"
    return None if code == 0 else _reason(code, last)


def run_part(part: Part, command: list[str], limit: float, file: File) -> Run:
    """Run a part to its end, in one process or several; each row is written to the file when it arrives."""
    run, died, at = Run(part.name), [], ""
    write = file.add(run)
    begin = time.monotonic()

    def on_message(message: Row) -> None:
        nonlocal at
        if "at" in message:
            at = message["at"]
            return
        if "header" in message:
            run.header = message["header"]
        else:
            run.rows.append(message["row"])
            _say(f"{part.name}: {_brief(message['row'])}")
        run.seconds = time.monotonic() - begin
        write()

    while True:
        known = {"died": died, "done": [row["case"] for row in run.rows], "began": time.time()}
        left = max(0.1, limit - (time.monotonic() - begin))
        reason = _process([*command, "--process", part.name, "--known", json.dumps(known)], left, on_message)
        if reason is None:
            run.ended = "done"
        elif reason == "stopped":
            run.ended = f"stopped after {limit:.0f} s" + (f", at {at}" if at else "")
        elif not at or at in died or len(died) >= DEATHS:
            run.ended = reason
        else:
            died.append(at)
            run.rows.append({"case": at, "problem": reason})
            _say(f"{part.name}: {at}: {reason}")
            write()
            continue
        run.seconds = time.monotonic() - begin
        if part.summary is not None:
            run.summary = part.summary(run.rows)
        write()
        _say(f"{part.name}: {run.ended}, {run.seconds:.0f} s {_brief(run.summary or {})}")
        return run


def _grouped(parts: Sequence[Part]) -> list[list[Part]]:
    found: list[list[Part]] = []
    for part in parts:
        if found and part.group and found[-1][0].group == part.group:
            found[-1].append(part)
        else:
            found.append([part])
    return found


def inside(part: Part, args: argparse.Namespace) -> None:
    """Do the work of a part in its own process, with `args.known`.

    Rows leave by what was stdout; whatever else is printed goes to stderr.
    """
    stream = os.dup(1)
    os.dup2(2, 1)
    known = json.loads(args.known)
    report = Report(stream, known["died"], known["done"], known["began"])
    part.work(report, args)


def main(about: str, module: str, parts: Sequence[Part], argv: Sequence[str] | None = None) -> int:
    """Run parts as the command line says; returns an exit code: 1 where a part did not end well.

    Args:
        about: the script's docstring.
        module: the script as `python -m` takes it: how the parts' processes are started.
        parts: all there are, in the order in which they run.
        argv: None: this process's.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in parts]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}; all where none is named")
    parser.add_argument("--out", type=Path, help="result file; what it has already is kept")
    parser.add_argument("--device", default=None, help="where to run; the GPU if there is one, else the CPU")
    parser.add_argument("--small", action="store_true", help="sizes for a trial on a CPU")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for all parts together")
    parser.add_argument("--process", help=argparse.SUPPRESS)
    parser.add_argument("--known", default="{}", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    wrong = [name for name in args.parts if name not in names]
    if wrong:
        parser.error(f"no part {wrong[0]!r}; there are {', '.join(names)}")
    if args.process is not None:
        inside(next(part for part in parts if part.name == args.process), args)
        return 0
    if args.out is None:
        parser.error("--out is missing: the file for results")
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        file = File(args.out)
    except (OSError, WavecrestError) as error:
        parser.error(str(error))
    command = [sys.executable, "-m", module, "--out", str(args.out)]
    command += ["--small"] * args.small + (["--device", args.device] if args.device else [])
    return run_all([part for part in parts if not args.parts or part.name in args.parts], command, args.budget, file)


def run_all(parts: Sequence[Part], command: list[str], budget: float, file: File) -> int:
    """Run parts within a budget of seconds; 1 where one ended badly.

    `command` starts a part's process, which calls `inside`.
    """
    if threading.current_thread() is not threading.main_thread():
        return _run_all(parts, command, budget, file)
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        return _run_all(parts, command, budget, file)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_all(parts: Sequence[Part], command: list[str], budget: float, file: File) -> int:
    deadline, well = time.monotonic() + budget, True
    for group in _grouped(parts):
        left = deadline - time.monotonic()
        if left < LEAST_SECONDS:
            for part in group:
                file.add(Run(part.name, ended="not started: no time left of the budget"))
                _say(f"{part.name}: not started: no time left of the budget")
            well = False
            continue
        with ThreadPoolExecutor(len(group)) as pool:
            limits = [min(part.limit, left) for part in group]
            runs = list(pool.map(run_part, group, itertools.repeat(command), limits, itertools.repeat(file)))
        well = well and all(run.ended == "done" for run in runs)
    return 0 if well else 1
