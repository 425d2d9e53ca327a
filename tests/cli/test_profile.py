"""`wavecrest profile` from the command line and from Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wavecrest import records
from wavecrest.cli import _shared, main
from wavecrest.cli import profile as command

SOURCE = """
import torch
from torch import nn

from wavecrest.measure.workload import Buckets


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(32, 32)

    def forward(self, x):
        y = torch.softmax(self.proj(x), -1)
        if y.sum().item() < 0:
            y = y + 1
        return y * 2


def make():
    return Model(), Buckets(one=torch.randn(1, 32), many=torch.randn(64, 32))


def broken():
    return Model(), torch.randn(1, 31)
"""
BREAK_LINE = 1 + SOURCE.splitlines().index("        if y.sum().item() < 0:")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    made = records.Ceilings(source="measured on this device", bandwidth=20.0, peak={"float32": 0.5})
    monkeypatch.setattr("wavecrest.profile.measure_ceilings", lambda device, dtype: made)


def _width(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    for console in (_shared.out, _shared.err):
        monkeypatch.setattr(console, "_width", columns)


def test_run_writes_the_record_and_a_trace_a_bucket(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    record = command.run(f"{file}:make", out=out, calls=1)
    assert records.load_as(out / "profile.json", records.ProfileRecord) == record
    assert sorted(path.name for path in out.iterdir()) == ["profile.json", "trace_many.json", "trace_one.json"]
    assert [bucket.bucket for bucket in record.buckets] == ["one", "many"]
    assert record.graphs == 2
    breaks = [(entry.file, entry.line) for entry in record.breaks if entry.kind == "break"]
    assert breaks == [(str(file), BREAK_LINE)]
    assert any(entry.kind == "recompile" for entry in record.breaks)
    assert record.ceilings is not None and record.header.evidence == "measured"


def test_no_breaks_is_said_in_the_record(file: Path) -> None:
    record = command.run(f"{file}:make", breaks=False, calls=1)
    assert record.breaks == [] and "--no-breaks" in record.breaks_note


@pytest.mark.parametrize("columns", [80, 140])
def test_output_fits_the_terminal(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    _width(monkeypatch, columns)
    assert main.main(["profile", f"{file}:make", "--calls", "1"]) == 0
    text = capsys.readouterr().out
    # paths are never broken, so that a terminal can open them
    assert max(len(line) for line in text.splitlines() if str(file) not in line) <= columns
    assert f"break {file}:{BREAK_LINE}" in text
    for word in ("one", "many", "gemm", "normalisation", "█", "addmm", "roofline", "measured on this device"):
        assert word in text, word
    row = next(line for line in text.splitlines() if line.startswith("addmm"))
    assert "32x32" in row and row.split()[-1] in ("mem", "cmp") and "%" in row.split()[-2]
    assert "other: (outside any op)" in text
    assert "graph breaks  1," in text and "2 graphs a call" in text


def test_json_is_the_record_alone(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["profile", f"{file}:make", "--calls", "1", "--no-breaks", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "profile"
    assert records.ProfileRecord.model_validate(document).workload == "Model"


def test_idle_time_and_launches_are_shown_where_there_is_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _width(monkeypatch, 80)
    op = records.OpTime(
        name="aten::addmm", category="gemm", shapes="8x8 bfloat16", calls=2, ms=3.0, share=1.0, kernels=["Cijk_Ailk"]
    )
    bucket = records.BucketProfile(
        bucket="[b1]",
        wall_ms=4.0,
        kernel_ms=3.0,
        idle_ms=1.0,
        launches=17,
        categories=[records.CategoryTime(category="gemm", ms=3.0, share=1.0, calls=2)],
        ops=[op] * (command.TOP + 2),
        uncategorized=[],
    )
    command._print_bucket(bucket)
    text = capsys.readouterr().out
    assert "[b1]  wall 4.00 ms, kernels 3.00 ms, idle 25%, 17 launches" in text
    assert "and 2 more" in text and "other:" not in text
    assert text.count("addmm") == command.TOP
    command._print_bucket(bucket.model_copy(update={"idle_ms": None}))
    assert "[b1]  wall 4.00 ms (3.00 ms while traced)" in capsys.readouterr().out


BAD = [
    ("nothing", [], 1, "give one workload"),
    ("both", ["x.py:make", "--hf", "dir"], 1, "give one workload"),
    ("no-such-file", ["nowhere.py:make"], 1, "nowhere.py"),
    ("model-raises", ["{file}:broken", "--calls", "1"], 1, "bucket default"),
    ("no-calls", ["{file}:make", "--calls", "0"], 1, "at least one call"),
    ("unknown-device", ["{file}:make", "--device", "tpu"], 1, "tpu"),
    ("unwritable", ["{file}:make", "-o", "{file}/out"], 1, "cannot write"),
]


@pytest.mark.parametrize(("arguments", "code", "message"), [c[1:] for c in BAD], ids=[c[0] for c in BAD])
def test_bad_input_is_one_clear_line(
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    _width(monkeypatch, 300)
    assert main.main(["profile", *(argument.format(file=file) for argument in arguments)]) == code
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err
    assert captured.out == ""
