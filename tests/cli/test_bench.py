"""`wavecrest bench` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wavecrest import records, timing
from wavecrest.cli import main
from wavecrest.cli.bench import run

BODY = """
import torch
from torch import nn
from wavecrest import Buckets

def make():
    return nn.Linear(16, 16), Buckets(b1=torch.ones(1, 16), b8={"input": torch.ones(8, 16)})

def broken():
    return nn.Linear(16, 16), torch.ones(1, 3)
"""


@pytest.fixture
def workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "mine.py"
    path.write_text(BODY)
    return path


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Timings made up: a steady 12 ms unless a test sets a spread."""
    facts = {"ms": 12.0, "spread": 0.0}

    def measure(work: object, **_options: object) -> timing.Measurement:
        work()  # type: ignore[operator]
        values = tuple(facts["ms"] * (1 + facts["spread"] * (-1) ** index) for index in range(30))
        return timing.Measurement(values, values, 99.0, "host wall", timing.bootstrap_median(values))

    monkeypatch.setattr(timing, "measure", measure)
    return facts


def test_table(workload: Path, samples: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", f"{workload}:make"]) == 0
    text = capsys.readouterr().out
    assert "make · 272 parameters · float32" in text
    for part in ("b1", "b8", "args[0]", "1x16", "8x16", "12.00 ms", "12.00 ms to 12.00 ms", "99.00 ms", "spread 0.0%"):
        assert part in text, part
    assert "unstable" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_unstable_instead_of_a_number(
    workload: Path, samples: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    samples["spread"] = 0.4
    assert main.main(["bench", f"{workload}:make"]) == 0
    text = capsys.readouterr().out
    assert "unstable" in text and "30 samples" in text and "spread 40" in text
    assert "12.00 ms" not in text, "no number stands beside the word"
    assert "stop other programs" in text


def test_file_and_json(workload: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "a.json"
    assert main.main(["bench", f"{workload}:make", "--seconds", "0.01", "-o", str(target), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads(target.read_text())
    record = records.load_as(target, records.BenchRecord)
    assert [bench.bucket for bench in record.buckets] == ["b1", "b8"]
    assert record.buckets[1].shapes == {"input": "8x16 float32"}
    assert all(bench.measurement.n >= 30 for bench in record.buckets)
    assert "written to" in captured.err


def test_run_is_callable_from_python(workload: Path, samples: dict[str, float]) -> None:
    seen = []
    record = run(f"{workload}:make", device="cpu", on_progress=lambda *facts: seen.append(facts))
    assert record.workload == "make" and record.parameters == 272


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 1, "one workload"),
        (["{file}:make", "--hf", "folder"], 1, "one workload"),
        (["{file}:gone"], 1, "no function 'gone'"),
        (["{file}:broken"], 1, "bucket default raised RuntimeError"),
        (["{file}:make", "--seconds", "0"], 1, "--seconds must be above zero"),
        (["{file}:make", "--seconds", "nan"], 1, "--seconds must be above zero"),
        (["{file}:make", "--device", "cuda:99"], 3, "cuda:99 is not here"),
        (["{file}:make", "-o", "{folder}"], 1, "is a folder"),
        (["{file}:make", "-o", "{file}/a.json"], 1, "cannot write"),
        (["--hf", "{folder}/none"], 1, ""),
    ],
    ids=[
        "nothing", "both", "no-function", "wrong-inputs", "no-time", "nan", "no-gpu", "folder", "file-as-folder",
        "no-hf-folder",
    ],
)  # fmt: skip
def test_bad_calls(
    workload: Path, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [text.format(file=workload, folder=workload.parent) for text in arguments]
    assert main.main(["bench", *filled]) == code
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("error:") == 1
    assert not captured.out


def test_a_bad_output_is_found_before_anything_is_measured(workload: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "measure", lambda *args, **options: pytest.fail("measured first"))
    assert main.main(["bench", f"{workload}:make", "-o", f"{workload}/a.json"]) == 1
