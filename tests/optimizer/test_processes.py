"""Signals, kills, closed outputs, a second run: one line, an exit code, and files to go on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.optimizer.conftest import Run
from tests.optimizer.planted import Interrupts, TakeHalfOut, TakePauseOut
from wavecrest import env, records
from wavecrest.cli.main import main
from wavecrest.errors import OutputError, OutputWarning, PlanError, WorkloadError
from wavecrest.measure.workload import from_example, load
from wavecrest.optimizer import api
from wavecrest.records import files

WORKLOAD = """
import time
from pathlib import Path

import torch
from torch import nn

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        Path(__file__).with_name("called").touch()
        time.sleep(0.02)
        return self.linear(x)

def slow():
    torch.manual_seed(0)
    return Slow(), torch.randn(4, 16)

class Ends(nn.Linear):
    def forward(self, x):
        raise SystemExit(0)

def ends():
    return Ends(4, 4), torch.zeros(2, 4)

def ends_early():
    import sys
    sys.exit(0)
"""


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "wl.py"
    path.write_text(WORKLOAD)
    return path


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """The program in a process of its own; a shell in the background has SIGINT ignored, and children inherit that."""
    return subprocess.Popen(
        [sys.executable, "-m", "wavecrest", *arguments],
        env=env.python_child({}, options.pop("folders", [])),
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def until(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    if not condition():
        process.kill()
        raise AssertionError(process.communicate()[1])


@pytest.mark.parametrize("after", [0.15, 0.6, 1.5])
def test_an_interrupt_while_modules_are_imported_is_one_line(after: float) -> None:
    process = start("explain", "gemm")
    # the program itself, which Python's own start takes some time to reach
    maps = Path(f"/proc/{process.pid}/maps")
    until(lambda: "_signal" in (text := maps.read_text()) or "pydantic" in text or len(text) > 10_000, process)
    time.sleep(after)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.skip("the command had ended")
    assert process.returncode in (130, -signal.SIGINT), err
    assert process.returncode == -signal.SIGINT or err.splitlines() == ["interrupted"], err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_torch_is_imported_raises_nothing_in_it(tmp_path: Path, number: signal.Signals) -> None:
    # like torch's own C++ code, whose std::terminate ends the process where Python that it calls raises
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("from torch import inner\n")
    (tmp_path / "torch" / "inner.py").write_text(
        "import os, time\n"
        "try:\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "    time.sleep(30)\n"
        "except BaseException:\n"
        "    os.abort()\n"
    )
    process = start("explain", "gemm", folders=[str(tmp_path)])
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + number, "interrupted\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_run_that_is_ended_while_it_measures_can_be_resumed(
    workload: Path, tmp_path: Path, number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run, spec = tmp_path / "run", f"{workload}:slow"
    steps = ["--level", "1", "--budget", "30s"]
    process = start("optimize", spec, *steps, "-o", str(run))
    until((tmp_path / "called").exists, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in err, err
    assert code == -9 or (f"--resume {run}" in err and not (run / files.LOCK).exists())
    assert records.load_as(run / "run.json", records.OptimizeRecord).result is None
    assert main(["plan", "show", str(run / "plan.json")]) == 0
    assert "was interrupted; resume it" in capsys.readouterr().out
    # the lock of a process that was killed holds nobody up
    result = api.run(load(spec), api.Options(level=1, budget=0.1, steps=()), out=run, resume=True)
    assert result.record.result is not None and not (run / files.LOCK).exists()


def test_a_run_that_was_killed_while_the_workload_loaded_begins(run: Run, tmp_path: Path) -> None:
    result = run(TakePauseOut(), out=tmp_path, resume=True)
    assert any("nothing to resume" in note for note in result.record.notes)
    assert result.record.result is not None


def test_a_kill_between_the_two_files_repeats_the_step(run: Run, tmp_path: Path) -> None:
    """run.json has a step that plan.json does not have: what was kept is not known, so the step is not done."""
    Interrupts.armed = True
    with pytest.raises(KeyboardInterrupt):
        run(TakeHalfOut(), Interrupts(), out=tmp_path)
    before = (tmp_path / "plan.json").read_text()
    first = run(TakeHalfOut(), TakePauseOut(), out=tmp_path, resume=True)
    (tmp_path / "plan.json").write_text(before)
    again = run(TakeHalfOut(), TakePauseOut(), out=tmp_path, resume=True)
    assert [step.id for step in again.record.steps] == [step.id for step in first.record.steps] == ["half", "gain"]
    assert again.plan.stack == first.plan.stack and again.model.pause == 0
    samples = [(row.step, row.attempt) for row in again.record.samples]
    assert len(set(samples)) == len(samples)


def test_an_older_plan_in_the_folder_is_not_resumed(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(TakePauseOut(), out=tmp_path)
    assert records.load_as(tmp_path / "run.json", records.OptimizeRecord).steps

    def killed(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("wavecrest.optimizer.api.run_ladder", killed)
    with pytest.raises(MemoryError):
        run(TakePauseOut(), out=tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["steps"] == []
    assert records.load_as(tmp_path / "run.json", records.OptimizeRecord).steps == []


def test_two_runs_in_one_folder(run: Run, tmp_path: Path) -> None:
    with (
        files.locked(tmp_path),
        pytest.raises(OutputError, match=f"is in use by process {os.getpid()}; wait for it, or give another folder"),
    ):
        run(TakePauseOut(), out=tmp_path)
    assert not (tmp_path / "run.json").exists()
    # the file of a process that is gone
    (tmp_path / files.LOCK).write_text("1\n")
    assert run(TakePauseOut(), out=tmp_path).record.result is not None
    assert not (tmp_path / files.LOCK).exists()


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text(
        "import os, pathlib, sys, time\npathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\ntime.sleep(60)\n"
    )
    script = (
        "import subprocess, sys\nfrom wavecrest import env\n"
        "subprocess.run([*env.python_command('sleeps'), sys.argv[1]], env=env.python_child({}))\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    target = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", script, str(target)], env={**env.current(), "PYTHONPATH": path})
    end = time.monotonic() + 60
    while not (target.exists() and target.read_text()) and time.monotonic() < end:
        time.sleep(0.02)
    child = int(target.read_text())
    assert _lives(child)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 10
    while _lives(child) and time.monotonic() < end:
        time.sleep(0.02)
    assert not _lives(child)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_child_of_a_parent_that_is_gone_does_not_start() -> None:
    command = [sys.executable, "-m", "wavecrest.measure.child", "1", "timeit"]
    done = subprocess.run(command, env=env.python_child({}), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and not done.stdout


@pytest.mark.parametrize("function", ["ends", "ends_early"])
@pytest.mark.parametrize("command", ["bench", "optimize"])
def test_user_code_that_calls_exit_is_an_error(
    workload: Path, tmp_path: Path, function: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["-o", str(tmp_path / "run")] if command == "optimize" else []
    assert main([command, f"{workload}:{function}", *out]) == 1
    assert "sys.exit(0)" in capsys.readouterr().err
    with pytest.raises(WorkloadError, match=r"calls sys\.exit\(0\)"):
        load(f"{workload}:{function}").run("default")


def test_a_report_that_cannot_be_made_ends_no_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise TypeError("'float' object is not iterable")

    monkeypatch.setattr("wavecrest.optimizer.ledger.report.write", broken)
    result = run(TakePauseOut(), out=tmp_path)
    assert result.record.result is not None and result.record.result.verdict == "faster"
    assert "the report cannot be made (TypeError: 'float'" in result.unwritten
    assert "no report: TypeError" in records.load_as(tmp_path / "run.json", records.OptimizeRecord).notes[-1]


def test_a_full_disk_ends_no_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = files._write, 0

    def full(path: Path, held: bytes) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise OutputError(f"cannot write {path}: No space left on device")
        write(path, held)

    monkeypatch.setattr(files, "_write", full)
    result = run(TakePauseOut(), out=tmp_path)
    assert result.record.result is not None and result.model.pause == 0
    assert "No space left on device" in result.unwritten
    calls = -1000
    with pytest.warns(OutputWarning, match="No space"):
        monkeypatch.setattr(api, "run", lambda *_, **__: result)
        api.optimize(*_model())


def _model() -> tuple[Any, Any]:
    import torch

    return torch.nn.Linear(2, 2), torch.zeros(1, 2)


def test_resume_needs_a_folder() -> None:
    with pytest.raises(ValueError, match="resume needs the folder"):
        api.run(from_example(*_model()), resume=True)


def test_a_damaged_run_is_not_resumed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(PlanError, match="damaged"):
        run(TakePauseOut(), out=tmp_path, resume=True)
    assert (tmp_path / "plan.json").read_text() == "{"


def test_outputs_that_are_closed_or_full_are_named() -> None:
    command = f"{sys.executable} -m wavecrest"
    options: dict[str, Any] = {"env": env.python_child({}), "capture_output": True, "text": True, "timeout": 60}
    for shell, code, reason in (
        (f"{command} --version >&-", 1, "standard output or standard error is closed"),
        (f"{command} --version >/dev/full", 1, "cannot write to standard output: No space left on device"),
        (f"{command} --version | true", 0, ""),
        (f'd=$(mktemp -d); cd "$d"; rmdir "$d"; {command} plan show x.json', 1, "no plan at x.json"),
    ):
        done = subprocess.run(["sh", "-c", shell], **options)
        assert done.returncode == code and reason in done.stderr, (shell, done)
        assert len(done.stderr.splitlines()) <= 1, done.stderr


class TestOutputFiles:
    def test_a_symlink_stays_and_its_target_is_written(self, tmp_path: Path) -> None:
        target, link = tmp_path / "deep" / "target", tmp_path / "link"
        target.parent.mkdir()
        link.symlink_to(target)
        for text in ("one", "two"):
            files.write_text(link, text)
            assert link.is_symlink() and target.read_text() == text
        assert os.listdir(target.parent) == ["target"]

    def test_the_permissions_of_a_file_stay(self, tmp_path: Path) -> None:
        path = tmp_path / "private"
        path.touch(0o600)
        files.write_text(path, "x")
        assert path.stat().st_mode & 0o777 == 0o600

    def test_devices_are_written_into_and_stay(self, tmp_path: Path) -> None:
        files.write_text(Path("/dev/null"), "x" * 100_000)
        assert Path("/dev/null").is_char_device()
        with pytest.raises(OutputError, match="cannot write /dev/full: No space left"):
            files.write_text(Path("/dev/full"), "x")
        assert Path("/dev/full").is_char_device()

    def test_a_fifo_is_written_into_where_somebody_reads(self, tmp_path: Path) -> None:
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        with pytest.raises(OutputError, match="No such device or address"):
            files.write_text(fifo, "x")
        with subprocess.Popen(["cat", str(fifo)], stdout=subprocess.PIPE) as reader:
            end = time.monotonic() + 30
            while time.monotonic() < end:
                try:
                    files.write_text(fifo, "x" * 50_000)
                    break
                except OutputError:
                    time.sleep(0.02)
            assert reader.stdout is not None and reader.stdout.read() == b"x" * 50_000
        assert fifo.is_fifo()

    def test_folders_and_sockets_are_refused(self, tmp_path: Path) -> None:
        import socket

        with socket.socket(socket.AF_UNIX) as held:
            held.bind(str(tmp_path / "s"))
            for path, kind in ((tmp_path, "folder"), (tmp_path / "s", "socket")):
                with pytest.raises(OutputError, match=kind):
                    files.write_text(path, "x")

    def test_text_that_no_file_can_hold_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(OutputError, match="surrogate"):
            files.write_text(tmp_path / "x", "\ud800")
        with pytest.raises(OutputError, match="null"):
            files.write_text(Path("a\0b"), "x")
        assert os.listdir(tmp_path) == []

    def test_a_loop_of_symlinks_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "a").symlink_to(tmp_path / "b")
        (tmp_path / "b").symlink_to(tmp_path / "a")
        with pytest.raises(OutputError, match="cannot write"):
            files.write_text(tmp_path / "a", "x")


def test_what_a_kill_in_the_middle_of_a_write_leaves_is_taken_away(run: Run, tmp_path: Path) -> None:
    for name in ("run.json", "plan.json", "report.html"):
        (tmp_path / f".{name}.x7_ab").write_text("half of it")
    (tmp_path / ".mine").touch()
    run(TakePauseOut(), out=tmp_path, resume=True)
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "plan.json", "report.html", ".mine"}


@pytest.mark.slow
# at once: it comes while the thread that sends it is being started, too
@pytest.mark.parametrize("again", [0.0, 0.001])
def test_an_interrupt_inside_a_callback_of_the_import_system_is_one_line(again: float) -> None:
    """Python prints what such a callback raises and goes on: the signal is sent again behind it."""
    code = """
import os, signal, sys, time, types, weakref
import wavecrest.__main__ as program

program.AGAIN = float(sys.argv[1])
# a test run in the background of a shell has it ignored
signal.signal(signal.SIGINT, signal.default_int_handler)

def run():
    space = {"os": os, "signal": signal}
    body = "def cb(_ref):\\n    os.kill(os.getpid(), signal.SIGINT)\\n    for _ in range(100): pass"
    exec(compile(body, "<frozen importlib._bootstrap>", "exec"), space)
    class Lock: pass
    lock = Lock()
    ref = weakref.ref(lock, space["cb"])
    del lock
    time.sleep(20)
    return 0

sys.modules["wavecrest.cli.main"] = types.SimpleNamespace(main=run)
sys.exit(program.main())
"""
    command = [sys.executable, "-c", code, str(again)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
