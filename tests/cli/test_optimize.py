"""The optimize, verify and plan commands as a user runs them: exit codes, one clear line, files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wavecrest import records
from wavecrest.cli.main import main
from wavecrest.optimizer import measurer
from wavecrest.optimizer.trial import OUT_OF_BUDGET
from wavecrest.optimizer.verdict import no_gain_verdict

FACTORIES = """
import time
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent

def good():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), torch.randn(4, 16)

def raises():
    raise RuntimeError("no weights here\\nand a second line")

def not_a_module():
    return torch.relu, torch.randn(4, 16)

def empty_inputs():
    return nn.Linear(16, 16), torch.randn(0, 16)

def no_inputs():
    return nn.Linear(16, 16), ()

def wrong_device():
    return nn.Linear(16, 16), torch.randn(4, 16, device="meta")

def returns_nothing():
    return None

def model_raises():
    return nn.Linear(16, 16), torch.randn(4, 8)

number = 5

def note():
    # a verdict is written, and the next step is measured
    path = HERE.joinpath("run", "run.json")
    if path.exists() and '"verdict"' in path.read_text():
        HERE.joinpath("measuring").touch()

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        if not torch.compiler.is_compiling():
            note()
        time.sleep(0.02)
        return self.linear(x)

def slow():
    torch.manual_seed(0)
    return Slow(), torch.randn(4, 16)
"""


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    path = tmp_path / "work.py"
    path.write_text(FACTORIES)
    return path


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nothing_there", "has no function 'nothing_there'"),
        ("number", "is not a function"),
        ("raises", "raised RuntimeError: no weights here"),
        ("not_a_module", "not a torch.nn.Module"),
        ("empty_inputs", "args[0] is empty (shape (0, 16))"),
        ("no_inputs", "no tensor in the example inputs"),
        ("wrong_device", "args[0] is on meta but the model is on cpu"),
        ("returns_nothing", "it must return (model, inputs) or a Workload"),
        ("model_raises", "bucket default: the model raised RuntimeError"),
    ],
)
def test_bad_workloads(
    factory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, message: str
) -> None:
    assert main(["optimize", f"{factory}:{function}", "-o", str(tmp_path / "run"), "--device", "cpu"]) == 1
    assert message in one_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--level", "7"], "level must be 1 to 5"),
        (["--level", "x"], "Invalid value for '--level'"),
        (["--min-gain", "lots"], "a percentage is written like 3%"),
        (["--budget", "soon"], "a duration is written like 90s"),
        (["--precision", "int3"], "precision is one of"),
        (["--hf", "somewhere"], "give one workload"),
        (["--nonsense"], "No such option"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_options(
    factory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["optimize", f"{factory}:good", "-o", str(tmp_path / "run"), *arguments]) == 1
    assert message in one_line(capsys)


def test_missing_device_is_an_environment_problem(factory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", f"{factory}:good", "--device", "cuda:97"]) in (1, 3)
    assert "cuda:97" in one_line(capsys)


def test_unwritable_output_is_found_before_any_work(
    factory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert main(["optimize", f"{factory}:good", "-o", str(blocker / "run")]) == 1
    assert "cannot write to the output folder" in one_line(capsys)


def test_unknown_module_and_bad_spec(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", "no_such_package.module:function"]) == 1
    assert "importing no_such_package.module failed" in one_line(capsys)
    assert main(["optimize", "justaword"]) == 1
    assert "file.py:function" in one_line(capsys)


@pytest.mark.slow
def test_run_verify_plan_report(
    factory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurer, "LEAST_SECONDS", 0.5)
    run, spec = tmp_path / "run", f"{factory}:good"
    assert main(["optimize", spec, "-o", str(run), "--level", "3", "--step", "fuse_qkv", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    verdict = printed["result"]["verdict"]
    held = records.load_as(run / "run.json", records.OptimizeRecord)
    # nothing to change: optimal, unless the original's own times say that this machine was too noisy to know
    assert [step.verdict for step in held.steps] == ["skipped"] and "kept" not in printed["result"]["reason"]
    assert (verdict, printed["result"]["reason"]) == no_gain_verdict(held, OUT_OF_BUDGET)
    noisy = any(row.measurement.unstable for row in held.baseline)
    assert printed["kind"] == "optimize" and (verdict == "already optimal" or noisy)
    assert printed == json.loads((run / "run.json").read_text())
    assert (run / "report.html").stat().st_size > 1000

    assert main(["plan", "show", str(run / "plan.json")]) == 0
    assert verdict in capsys.readouterr().out
    assert main(["plan", "check", str(run / "plan.json")]) == 0
    assert "replay" in capsys.readouterr().out
    assert main(["plan", "diff", str(run / "plan.json"), str(run / "plan.json")]) == 0
    assert "decide the same" in capsys.readouterr().out

    arguments = ["verify", spec, "--plan", str(run / "plan.json"), "--processes", "1", "--seconds", "0.5", "--json"]
    code = main(arguments)
    verified = json.loads(capsys.readouterr().out)
    assert code == 0 and verified["passed"] and len(verified["processes"]) == 1


@pytest.mark.slow
def test_ctrl_c_says_how_to_resume_and_resumes(
    factory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, spec = tmp_path / "run", f"{factory}:slow"
    steps = ["--level", "2", "--step", "environment", "--step", "compile:default", "--budget", "60s"]
    arguments = [sys.executable, "-m", "wavecrest", "optimize", spec, *steps, "-o", str(run)]
    # as a user has it: the interrupt ends Inductor's own processes as well
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_COMPILE_THREADS"}
    # a shell that starts the tests in the background has SIGINT ignored, and children inherit that
    process = subprocess.Popen(
        arguments,
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    # the first verdict (of the environment) is written, and the model is measured beside the compiled one: while
    # PyTorch (2.13) compiles, an interrupt can be lost in it
    deadline = time.monotonic() + 120
    while not (tmp_path / "measuring").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "interrupted after" in err and f"--resume {run}" in err and "Traceback" not in err
    before = json.loads((run / "run.json").read_text())
    assert before["steps"] and before["result"] is None
    assert "interrupted" in (run / "report.html").read_text().lower()

    capsys.readouterr()
    # how long is measured is not what is tested
    monkeypatch.setattr(measurer, "LEAST_SECONDS", 0.5)
    assert main(["optimize", spec, *steps, "--resume", str(run), "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["steps"][0] == before["steps"][0] and after["result"] is not None


def test_plan_from_another_machine_is_refused(
    factory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, spec = tmp_path / "run", f"{factory}:good"
    assert main(["optimize", spec, "-o", str(run), "--step", "fuse_qkv", "--json"]) == 0
    plan = json.loads((run / "plan.json").read_text())
    plan["fingerprint"]["arch"] = "gfx942"
    foreign = tmp_path / "foreign.json"
    foreign.write_text(json.dumps(plan))
    capsys.readouterr()
    assert main(["plan", "check", str(foreign)]) == 2
    assert "refuse" in capsys.readouterr().out
    assert main(["verify", spec, "--plan", str(foreign)]) == 2
    assert "measured on gfx942" in one_line(capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "damaged: not JSON"),
        ("[]", "no format_version"),
        ('{"format_version": 99, "kind": "plan"}', "upgrade wavecrest"),
        ('{"format_version": 1, "kind": "bench"}', "not a wavecrest plan"),
        ('{"format_version": 1, "kind": "plan", "created": 3}', "damaged"),
        ('{"format_version": 1, "kind": "plan", "pickle": "gASV"}', "damaged"),
    ],
    ids=["cut short", "foreign", "newer", "other kind", "wrong field", "unknown field"],
)
def test_bad_plan_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert main(["plan", "show", str(path)]) == 1
    assert message in one_line(capsys)


def test_missing_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "show", str(tmp_path / "none.json")]) == 1
    assert "no plan at" in one_line(capsys)
