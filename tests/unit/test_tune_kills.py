"""A tuner that is killed at any point: what it had found is on the disk, whole, and resuming ends where it would have.

The tuner is a fork of a process with workers that are scripts, so that two hundred of them take seconds.
"""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.toy import ToyCall
from wavecrest import hardware, records
from wavecrest.bench import suites
from wavecrest.dispatch import lookup, registry
from wavecrest.dispatch.tuned import Overlay, database
from wavecrest.records import provenance
from wavecrest.tune import session

KILLS = 200
KEYS = 5
# an architecture is known, so that spaces are asked, and everything runs on the CPU
DEVICE = replace(hardware.cpu(), arch="sm_90")

pytestmark = pytest.mark.usefixtures("standins")


class Quick:
    """A worker that knows all answers, and takes a little for each."""

    def __init__(self) -> None:
        self.coming: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        if "key" not in message:
            versions = provenance.versions()
            names = ("wavecrest", "torch", "triton")
            found = {name: getattr(versions, name) for name in names}
            self.coming = [{"event": "ready", "name": DEVICE.name, "versions": found}]
            return
        rows = message["key"][0]
        crashed = {"event": "step", "phase": "first", "who": [2], "seconds": 0.0}
        if rows % 3 == 0 and not message["ended"]:
            reason = {"event": "ended", "reason": "ended its process with SIGSEGV", "outside": False}
            self.coming = [crashed, reason]
            return
        self.coming = [{"event": "done", "key": answer(message)}]

    def next(self, timeout: float) -> dict[str, Any]:
        time.sleep(0.001)
        return self.coming.pop(0)

    def stop(self) -> None:
        pass


def answer(message: dict[str, Any]) -> dict[str, Any]:
    key = dict(zip(registry.get("planted").key_fields, message["key"], strict=True))
    rows = message["key"][0]
    won = {"backend": "kernel", "config": {"BLOCK": 3}, "status": "won", "ms": float(rows), "samples": [0.5] * 50}
    tried = [{"backend": "torch", "role": "native"}, won]
    tried += [{"backend": name, "status": "failed", "reason": reason} for name, reason in message["ended"] and [
        ("library", message["ended"][0][1])]]  # fmt: skip
    return {
        "case": message["case"], "key": key, "backend": "kernel", "config": {"BLOCK": 3}, "us": 1e3 * rows,
        "native_us": 2e3 * rows, "candidates": tried,
    }  # fmt: skip


def targets(folder: Path) -> session.Targets:
    return session.Targets(folder / "a.json", folder / "planted.csv", Overlay(folder / "rows.db"))


def tune(folder: Path) -> records.TuneRecord:
    cases = [suites.Case(f"rows {rows}", lambda rows=rows: ToyCall(torch.ones(rows, 8))) for rows in range(1, KEYS + 1)]
    return session.tune(
        "planted", DEVICE, session.Settings(), targets(folder), resume=True, cases=cases,
        starts=[Quick, Quick],
    )  # fmt: skip


def found(folder: Path) -> dict[str, records.TunedKey]:
    path = folder / "a.json"
    return {key.case: key for key in records.load_as(path, records.TuneRecord).keys} if path.exists() else {}


def rows(folder: Path) -> tuple[set[int], set[int]]:
    """The keys in the table, and those in the user's database: both are whole, or reading raises."""
    fields = lookup.fields_of(registry.get("planted"))
    table, kept = folder / "planted.csv", Overlay(folder / "rows.db")
    written = database.read(table, fields) if table.exists() else {}
    assert kept.check() == []
    entries = kept.entries() if kept.path.exists() else []
    return {int(key[0] or 0) for key in written}, {int(entry.row.key[0] or 0) for entry in entries}


def forked(folder: Path) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        # what the collector looks at in a fork is copied, page by page
        gc.disable()
        try:
            tune(folder)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def killed_after(pid: int, seconds: float) -> int:
    """The status of a process that is killed after so long, unless it has ended."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where there is such a place: a kill loses nothing that the system has, and a disk only takes longer."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a fork of a process that uses a GPU cannot use it")
def test_two_hundred_kills_lose_and_corrupt_nothing(folder: Path) -> None:
    # forks of a process that holds nothing else take a fraction of the time that forks of the tests' take
    code = f"""
from pathlib import Path
import tests.unit.tune_standins
from tests.unit import test_tune_kills
test_tune_kills.kill(Path({str(folder)!r}), test_tune_kills.random.Random(7))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def kill(folder: Path, seeded: random.Random) -> None:
    """Kill tuners two hundred times; what is wrong then is an AssertionError."""
    # what every process asks git and the packages, and imports when it is first needed, once
    tune(folder / "here")
    # how long a whole run takes here, so that kills fall all over it; the shortest of some: with a span of one run that
    # the machine had delayed nearly all of the others ended before they were killed, and 200 kills took half an hour
    span = math.inf
    for turn in range(5):
        begin = time.perf_counter()
        assert os.waitpid(forked(folder / f"whole {turn}"), 0)[1] == 0
        span = min(span, time.perf_counter() - begin)
    wanted = found(folder / "whole 0")
    assert list(wanted) == [f"rows {count}" for count in range(1, KEYS + 1)]
    killed = ended = runs = 0
    while killed < KILLS:
        place = folder / str(runs)
        runs += 1
        before: dict[str, records.TunedKey] = {}
        while True:
            status = killed_after(forked(place), seeded.uniform(0, 1.1 * span))
            now = found(place)
            assert before.items() <= now.items(), "a finished key is lost, or another"
            assert now.items() <= wanted.items()
            table, kept = rows(place)
            done = {int(key.removeprefix("rows ")) for key in now}
            # written behind the record, from it
            assert table <= done and kept <= table and len(done - kept) <= KEYS
            before = now
            if not os.WIFSIGNALED(status):
                assert os.WEXITSTATUS(status) == 0
                ended += 1
                break
            killed += 1
            if killed >= KILLS:
                break
    assert killed == KILLS and ended > 3
    # the last one is resumed to the end, whatever its state
    assert os.waitpid(forked(place), 0)[1] == 0
    assert found(place) == wanted and rows(place) == (set(range(1, KEYS + 1)),) * 2
    record = records.load_as(place / "a.json", records.TuneRecord)
    assert not record.left and not record.unfinished and not record.problem
