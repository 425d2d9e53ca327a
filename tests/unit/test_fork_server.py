"""The server that forks children: each is as a new interpreter is after the same imports, and none outlives its run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from wavecrest import env
from wavecrest.errors import EnvironmentProblem
from wavecrest.measure import fork_server
from wavecrest.measure.fork_server import Forked, ForkServer

# a child: does what its first argument says, and writes what it sees into the file of its second
PROGRAM = """
import json, os, random, signal, sys, time
import numpy
calls = []
def main():
    what, target, *rest = sys.argv[1:]
    calls.append(what)
    seen = {
        "argv": sys.argv, "folder": os.getcwd(), "first": sys.path[0], "calls": calls, "group": os.getpgid(0),
        "pid": os.getpid(), "random": [random.random(), float(numpy.random.rand())],
        "environment": dict(os.environ), "open": os.listdir("/proc/self/fd"), "modules": sorted(sys.modules),
    }
    with open(target + ".part", "w") as file:
        json.dump(seen, file)
    os.rename(target + ".part", target)
    if rest:
        os.write(int(rest[0]), b"told")
    if what == "raise":
        raise ValueError("planted")
    if what == "exit":
        sys.exit(5)
    if what == "say":
        sys.exit("planted")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "sleep":
        time.sleep(600)
    return 0
"""
SLOW = "import time\ntime.sleep(1.0)\n"
THREAD = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), name='busy', daemon=True).start()\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "forked_program.py").write_text(PROGRAM)
    (tmp_path / "starts_a_thread.py").write_text(THREAD)
    (tmp_path / "slow_to_import.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [env.get("PYTHONPATH")])]))
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[ForkServer]:
    with ForkServer("forked_program", ["not_there"]) as server:
        assert server.problem == ""
        yield server


def _start(server: ForkServer, what: str, target: Path, passed: Sequence[int] = ()) -> Forked:
    with tempfile.TemporaryFile() as log:
        return server.start([what, str(target)], log, passed)


def _seen(target: Path) -> dict[str, Any]:
    end = time.monotonic() + 60
    while not target.exists() and time.monotonic() < end:
        time.sleep(0.01)
    found: dict[str, Any] = json.loads(target.read_text())
    return found


def test_children_are_as_new_as_interpreters(
    server: ForkServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read, write = os.pipe()
    first = _start(server, "go", tmp_path / "first", [write])
    assert os.read(read, 10) == b"told" and first.wait(60) == 0
    assert _start(server, "go", tmp_path / "second").wait(60) == 0
    os.close(read)
    os.close(write)
    one, two = _seen(tmp_path / "first"), _seen(tmp_path / "second")
    assert one["argv"][0] == "forked_program" and one["argv"][1:3] == ["go", str(tmp_path / "first")]
    assert one["folder"] == one["first"] == str(tmp_path)
    # what one child does to a module, another one does not see
    assert one["calls"] == two["calls"] == ["go"]
    assert set(one["random"]).isdisjoint(two["random"])
    assert one["group"] == one["pid"] == first.pid != two["pid"]
    # neither the server's connection nor what belongs to other children: input, outputs, the pipe, the listing itself
    assert len(one["open"]) == 5 and len(two["open"]) == 4
    assert one["environment"] == server.environment
    assert server.import_seconds > 0


def test_what_only_some_children_need_is_imported_and_not_counted(folder: Path, tmp_path: Path) -> None:
    """A new interpreter that does without it would not wait for it either."""
    begin = time.perf_counter()
    with ForkServer("forked_program", more=["slow_to_import", "not_there"]) as server:
        assert server.problem == ""
        assert 0 < server.import_seconds < time.perf_counter() - begin - 1.0
        assert _start(server, "go", tmp_path / "first").wait(60) == 0
    assert "slow_to_import" in _seen(tmp_path / "first")["modules"]


def test_a_child_has_the_users_variables_and_those_that_are_read_at_each_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the server sets it for itself
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    monkeypatch.setenv("KINETO_LOG_LEVEL", "1")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    with ForkServer("forked_program", changes={"PLANTED": "1"}) as server:
        assert server.environment["PLANTED"] == "1"
        monkeypatch.delenv("KINETO_LOG_LEVEL")
        monkeypatch.setenv("TRITON_CACHE_DIR", "here")
        assert _start(server, "go", folder / "seen").wait(60) == 0
        environment = _seen(folder / "seen")["environment"]
        assert environment == {
            **{name: value for name, value in server.environment.items() if name != "KINETO_LOG_LEVEL"},
            "TRITON_CACHE_DIR": "here",
        }


def test_folders_that_are_gone_or_no_text(server: ForkServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what is wrong, nothing stays open, and the server goes on."""
    bytes_ = os.fsencode(folder) + b"/\xff"
    os.mkdir(bytes_)
    monkeypatch.chdir(os.fsdecode(bytes_))
    assert _start(server, "go", folder / "seen").wait(60) == 0
    assert _seen(folder / "seen")["folder"] == os.fsdecode(bytes_)
    os.rmdir(bytes_)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EnvironmentProblem, match=r"no child can be forked: .*No such file or directory"):
        _start(server, "go", folder / "seen")
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.chdir(folder)
    assert _start(server, "go", folder / "other").wait(60) == 0


@pytest.mark.parametrize(("what", "code"), [("raise", 1), ("exit", 5), ("say", 1), ("kill", -signal.SIGKILL)])
def test_how_a_child_ended(server: ForkServer, folder: Path, what: str, code: int) -> None:
    with (folder / "log").open("w+b") as log:
        child = server.start([what, str(folder / "seen")], log)
        assert child.wait(60) == child.wait() == child.returncode == code
        log.seek(0)
        said = {"raise": "ValueError: planted", "say": "planted"}.get(what, "")
        assert log.read().decode().strip().endswith(said) and bool(said) == bool(log.tell())


def test_a_child_that_goes_on_is_waited_for_and_ended(server: ForkServer, folder: Path) -> None:
    child = _start(server, "sleep", folder / "seen")
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.1)
    # while it runs, another one comes and goes
    assert _start(server, "go", folder / "other").wait(60) == 0
    os.killpg(child.pid, signal.SIGKILL)
    assert child.wait(60) == -signal.SIGKILL


def test_no_child_outlives_the_server(folder: Path) -> None:
    with ForkServer("forked_program") as server:
        child = _start(server, "sleep", folder / "seen")
        _seen(folder / "seen")
    assert child.wait(60) == -signal.SIGKILL
    assert _is_gone(child.pid)


def test_no_server_and_no_child_outlive_their_starter(folder: Path) -> None:
    script = (
        "import sys, tempfile, time\nfrom wavecrest.measure.fork_server import ForkServer\n"
        "server = ForkServer('forked_program')\nserver.start(['sleep', sys.argv[1]], tempfile.TemporaryFile())\n"
        "time.sleep(600)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", script, str(folder / "seen")], env=env.python_child({}))
    pid = _seen(folder / "seen")["pid"]
    above = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    starter.kill()
    starter.wait()
    assert _is_gone(pid) and _is_gone(above)


def test_a_server_that_has_ended_is_an_error(server: ForkServer, folder: Path) -> None:
    server._process.kill()
    server._process.wait()
    with pytest.raises(EnvironmentProblem, match="no child can be forked: the server has ended"):
        _start(server, "go", folder / "seen")


def test_a_server_with_a_thread_or_a_gpu_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ForkServer("forked_program", ["starts_a_thread"]) as server:
        assert server.problem == "its imports start threads: busy"
        with pytest.raises(EnvironmentProblem, match="no child can be forked: its imports start threads: busy"):
            _start(server, "go", folder / "seen")
    with ForkServer("not_there") as server:
        assert server.problem == "the server ended while it imported"
    # other tests' libraries have threads in this process
    monkeypatch.setattr(fork_server.threading, "enumerate", lambda: [threading.main_thread()])
    monkeypatch.setattr(fork_server, "_GPU_FILES", ("/not there", str(folder)))
    with (folder / "gpu0").open("w"):
        assert fork_server._why_not() == f"its imports open {folder}/gpu0"
    assert fork_server._why_not() == ""


@pytest.mark.parametrize(("answer", "begun"), [(3, False), (0, True), (100, True)])
def test_files_of_an_nvidia_gpu_without_cuda_are_nvmls(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answer: int, begun: bool
) -> None:
    """NVML counts GPUs with the same files open; CUDA's driver says whether it was initialised."""

    class Driver:
        def __init__(self, *_: object, **__: object) -> None:
            self.cuDeviceGetCount = lambda _: answer

    monkeypatch.setattr(fork_server.threading, "enumerate", lambda: [threading.main_thread()])
    monkeypatch.setattr(fork_server, "_GPU_FILES", (str(folder),))
    with (folder / "nvidia0").open("w"):
        # the driver is not loaded in this process
        assert fork_server._why_not() == ""
        monkeypatch.setattr(fork_server.ctypes, "CDLL", Driver)
        assert fork_server._why_not() == (f"its imports open {folder}/nvidia0" if begun else "")


def _is_gone(pid: int) -> bool:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.02)
                continue
        return True
    return False
