"""Runs of `wavecrest optimize` that a signal ends at a random moment, then resumed: nothing lost, nothing left behind.

`python -m tests.cli.killed COUNT [SEED]` makes many trials; `test_killed.py` makes some in the suite. Most trials run
the program in a fork of this process, which has torch loaded, measure briefly and in one process. One of WHOLE runs the
real program with its child processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.optimizer.conftest import NoAnalysis
from wavecrest import __main__ as program
from wavecrest import env, records
from wavecrest.errors import EnvironmentProblem
from wavecrest.measure import timing
from wavecrest.optimizer import confirm
from wavecrest.optimizer.plan import Plan
from wavecrest.records import StepOutcome

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# one trial in this many runs the real program
WHOLE = 60
# seconds that a process may take to end after a signal, and its children after it
PATIENCE = 30.0
# of a whole program: before, Python itself starts and knows no handler
START = 0.4
# the files of a run that has ended
FINISHED = {"run.json", "plan.json", "report.html"}
WORKLOAD = """
import time

import torch
from torch import nn

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.pauses = (0.0001, 0.0001)

    def forward(self, x):
        time.sleep(0.0001 + sum(self.pauses))
        return self.linear(x)

def make():
    torch.manual_seed(0)
    return Slow(), torch.randn(4, 16)
"""
STEPS = """
from torch import nn

from wavecrest.optimizer.steps import Found, Prediction, Step

class First(Step):
    id = title = "first"
    level = 3
    place = 0

    def find(self, context):
        return Found(("model",), {})

    def predict(self, found, context):
        return Prediction(None, "planted")

    def apply(self, model, params):
        model.pauses = tuple(0.0 if at == self.place else one for at, one in enumerate(model.pauses))
        return model

class Second(First):
    id = title = "second"
    place = 1

class Wrong(First):
    id = title = "wrong"

    def apply(self, model, params):
        model.linear = nn.Linear(16, 16)
        return model
"""
NAMES = ("first", "wrong", "second")


@dataclass(frozen=True, slots=True)
class Place:
    """Files of the trials: the workload, an installed package with the steps, and the folders of runs."""

    root: Path

    def prepare(self) -> Place:
        """Write the files, and let this process find the steps."""
        (self.root / "work.py").write_text(WORKLOAD)
        (self.root / "killed_steps.py").write_text(STEPS)
        info = self.root / "killed_steps-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: killed-steps\nVersion: 1.0\n")
        lines = [f"{name} = killed_steps:{name.capitalize()}" for name in NAMES]
        (info / "entry_points.txt").write_text("\n".join(["[wavecrest.steps]", *lines, ""]))
        return self

    def arguments(self, run: Path, *more: str) -> list[str]:
        steps = [text for name in NAMES for text in ("--step", name)]
        spec, proof = str(self.root / "work.py") + ":make", str(run) + ".zip"
        return ["optimize", spec, "--level", "3", "--budget", "20s", *steps, "--bundle", proof, *more]


@contextlib.contextmanager
def planted(place: Place) -> Iterator[None]:
    """The steps of the trials in this process, short measurements, and none in fresh processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place.root)
        # for whole programs and their children
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(place.root), env.get("PYTHONPATH")])))
        import killed_steps

        found = {name: getattr(killed_steps, name.capitalize())() for name in NAMES}
        patch.setattr("wavecrest.optimizer.steps.ladder._steps", lambda: found)
        patch.setattr("wavecrest.optimizer.api.Analysis", NoAnalysis)
        patch.setattr("wavecrest.optimizer.measurer.LEAST_SECONDS", 0.1)
        patch.setattr("wavecrest.optimizer.measurer.RESOLUTION_SECONDS", 0.1)
        patch.setattr("wavecrest.optimizer.finish.MOST_SECONDS", 0.1)
        patch.setitem(timing.warm_up.__kwdefaults__, "seconds", 0.02)
        patch.setattr("wavecrest.measure.timing.WARM_UP_SECONDS", 0.02)
        patch.setattr("wavecrest.measure.timing.MIN_SECONDS", 0.05)

        def nowhere(*_: Any) -> Any:
            raise EnvironmentProblem("trials are short")

        patch.setattr("wavecrest.optimizer.finish._in_processes", nowhere)
        yield


class Started:
    """A run in a session of its own: its children are found by the session, whoever their parent is by then."""

    def __init__(self, arguments: list[str], *, whole: bool, place: Place, log: Path) -> None:
        self.log = log
        if whole:
            with log.open("w") as out:
                self.process: subprocess.Popen[bytes] | None = subprocess.Popen(
                    [sys.executable, "-m", "wavecrest", *arguments],
                    env=env.python_child({}), stdout=out, stderr=out, start_new_session=True,
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                )  # fmt: skip
            self.pid = self.process.pid
            time.sleep(START)
        else:
            self.process = None
            ready, tell = os.pipe()
            self.pid = os.fork()
            if self.pid == 0:
                _child(arguments, log, tell)
            os.close(tell)
            os.read(ready, 1)
            os.close(ready)

    def wait(self, seconds: float) -> int | None:
        """The exit code, minus the signal's number where one ended it; None while it goes on."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process is not None:
                code = self.process.poll()
            else:
                done, status = os.waitpid(self.pid, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if done else None
            if code is not None:
                return code
            time.sleep(0.005)
        return None

    def family(self) -> list[str]:
        """Processes of the session that run, by their command lines."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            # one that ends meanwhile
            with contextlib.suppress(OSError):
                state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(session) == self.pid and state not in "ZX":
                    found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        return found

    def clean(self) -> None:
        """End what is left of the session, which this trial has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _child(arguments: list[str], log: Path, tell: int) -> None:
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", closefd=False) for descriptor in (1, 2))
        torch.set_num_threads(1)
        sys.argv = ["wavecrest", *arguments]
        os.write(tell, b"1")
        code = program.main()
    finally:
        # nothing of the process that forked may run here
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def trial(place: Place, number: int, chance: random.Random, seconds: dict[bool, float]) -> str:
    """One run, ended once or twice, then resumed to its end; how it was ended.

    Raises:
        AssertionError: something was lost, damaged, or left behind.
    """
    whole = number % WHOLE == WHOLE - 1
    run, log = place.root / f"run{number}", place.root / f"log{number}"
    ended = []
    arguments = place.arguments(run, "-o", str(run))
    for _ in range(1 + (chance.random() < 0.3)):
        which = chance.choice(SIGNALS)
        started = Started(arguments, whole=whole, place=place, log=log)
        try:
            time.sleep(chance.uniform(0, seconds[whole]))
            before = time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.kill(started.pid, which)
            code = started.wait(PATIENCE)
            text = log.read_text(errors="replace")
            assert code is not None, f"it goes on {PATIENCE:.0f} s after {which.name}\n{text}"
            assert code in (0, -which, 128 + which), f"exit code {code} after {which.name}\n{text}"
            assert "Traceback" not in text, text
            if code:
                ended.append(f"{which.name} {'in a child' if len(started.family()) else ''}".strip())
            while started.family() and time.monotonic() - before < PATIENCE:
                time.sleep(0.02)
            assert not started.family(), f"left running after {which.name}: {started.family()}"
        finally:
            started.clean()
        steps = _check_files(run)
        arguments = place.arguments(run, "--resume", str(run)) if run.exists() else arguments
        _finish(place, run, arguments, whole, log, steps) if not ended or chance.random() < 0.7 else None
    steps = _check_files(run)
    arguments = place.arguments(run, "--resume", str(run)) if run.exists() else arguments
    _finish(place, run, arguments, whole, log, steps)
    return ("whole program: " if whole else "") + (" then ".join(ended) or "was done")


def _check_files(run: Path) -> list[StepOutcome]:
    """Every file is whole; the steps that the plan has."""
    for name in ("run.json", "plan.json"):
        if (run / name).exists():
            (records.load if name == "run.json" else Plan.load)(run / name)
    if (run / "report.html").exists():
        assert (run / "report.html").read_text().rstrip().endswith("</html>"), "report.html is cut short"
    return Plan.load(run / "plan.json").steps if (run / "plan.json").exists() else []


def _finish(place: Place, run: Path, arguments: list[str], whole: bool, log: Path, before: list[StepOutcome]) -> None:
    """Resume to the end, and look for what was there before."""
    started = Started(arguments, whole=whole, place=place, log=log)
    try:
        code, text = started.wait(300), log.read_text(errors="replace")
        assert code == 0, f"resumed with exit code {code}\n{text}"
    finally:
        started.clean()
    record, plan = records.load_as(run / "run.json", records.OptimizeRecord), Plan.load(run / "plan.json")
    assert record.result is not None and record.steps == plan.steps
    assert {path.name for path in run.iterdir()} == FINISHED, sorted(path.name for path in run.iterdir())
    assert not list(run.parent.glob(f".{run.name}*")), "a temporary bundle is left"
    after = {(step.id, step.attempt): step for step in plan.steps}
    for step in before:
        found = after.get((step.id, step.attempt))
        assert found is not None, f"the step {step.id} is lost"
        assert (found.ratio, found.ci, found.numerics) == (step.ratio, step.ci, step.numerics), (
            f"{step.id} was repeated"
        )
        timed = [row for row in record.samples if (row.step, row.attempt) == (step.id, step.attempt)]
        assert (step.ratio is None) == (not timed), f"the samples of {step.id}: {len(timed)}"
    assert [step.id for step in plan.steps if step.attempt == 1] == [*NAMES]
    found = confirm.run(run.with_name(run.name + ".zip"))
    assert found.outcome == "confirmed", found.reason


def _undisturbed(place: Place, whole: bool) -> float:
    """Seconds that a run takes when nothing ends it."""
    run, log = place.root / f"undisturbed{whole}", place.root / "log"
    begin = time.monotonic()
    started = Started(place.arguments(run, "-o", str(run)), whole=whole, place=place, log=log)
    code = started.wait(300)
    assert code == 0, f"exit code {code}\n{log.read_text()}"
    return time.monotonic() - begin - (START if whole else 0)


def run(count: int, seed: int, *, first: int = 0, tell: Any = None) -> tuple[Counter[str], dict[int, str]]:
    """Make trials; how they were ended, and by number what failed."""
    chance = random.Random(seed)
    ends: Counter[str] = Counter()
    failed: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as root:
        place = Place(Path(root)).prepare()
        with planted(place):
            seconds = {False: _undisturbed(place, False)}
            for number in range(first, first + count):
                if number % WHOLE == WHOLE - 1 and True not in seconds:
                    seconds[True] = _undisturbed(place, True)
                try:
                    ends[trial(place, number, chance, seconds)] += 1
                except Exception as error:
                    failed[number] = f"{type(error).__name__}: {error}"
                if tell is not None:
                    tell(number, failed.get(number, ""))
    return ends, failed


if __name__ == "__main__":
    began = time.perf_counter()

    def _tell(number: int, problem: str) -> None:
        sys.stdout.write(f"trial {number}, {time.perf_counter() - began:.0f} s: {problem or 'well'}\n")
        sys.stdout.flush()

    outcome, problems = run(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0, tell=_tell)
    for end, times in outcome.most_common():
        sys.stdout.write(f"{times:6} {end}\n")
    sys.stdout.write(f"{json.dumps({'failed': len(problems)})} {time.perf_counter() - began:.0f} s\n")
    sys.exit(1 if problems else 0)
