"""benchmarks/guide: what its rows measure, what becomes of rows that did not fit, and the tables made of a record."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import guide, parts

from wavecrest import hardware
from wavecrest.measure import interleaved
from wavecrest.records import files, provenance

CPU = guide.Site("cpu", True)


class Kept(parts.Report):
    """A report that keeps its messages."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.messages: list[dict[str, Any]] = []

    def _write(self, message: dict[str, Any]) -> None:
        self.messages.append(message)


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times made up: eager 3 ms, ours 2 ms."""

    def measure(works: list[Any], **_options: Any) -> interleaved.Interleaved:
        assert len(works) == 2
        return interleaved.Interleaved(((3.0,) * 40, (2.0,) * 40), "host wall")

    monkeypatch.setattr(interleaved, "measure", measure)


def run(part: str, rows: list[dict[str, Any]], ended: str = "done") -> dict[str, Any]:
    header = provenance.header(hardware.cpu(), command="python -m benchmarks.guide").model_dump(mode="json")
    return {"part": part, "ended": ended, "seconds": 1.0, "summary": None, "rows": rows, "header": header}


def timed(case: str, eager: float, ours: float, flops: int = 0, rounds: int = 40) -> dict[str, Any]:
    ratio = eager / ours
    return {
        "case": case, "flops": flops, "eager_ms": eager, "ms": ours, "ratio": ratio, "ci": [ratio, ratio],
        "rounds": rounds,
    }  # fmt: skip


def test_the_sizes_are_the_guides() -> None:
    gpu = guide.Site("cuda:0", False)
    assert [case.cells for case in guide.cases("matmul", gpu)] == [(f"{n}x{n}",) for n in (1024, 2048, 4096, 8192)]
    assert guide.cases("matmul", gpu)[0].flops == 2 * 1024**3
    assert [case.cells for case in guide.cases("conv2d", gpu)] == [
        ("224x224", "32", "3→64", "3x3"), ("112x112", "32", "64→128", "3x3"), ("56x56", "32", "128→256", "3x3"),
        ("28x28", "32", "256→512", "3x3"),
    ]  # fmt: skip
    assert [case.cells for case in guide.cases("attention", gpu)] == [
        (str(length), "32", "8") for length in (128, 256, 512, 1024, 2048)
    ]


@pytest.mark.parametrize("table", ["matmul", "conv2d", "attention"])
def test_a_row_is_eager_beside_ours_on_the_same_numbers(table: str, timer: None) -> None:
    case = guide.cases(table, CPU)[0]
    torch.manual_seed(0)
    eager, ours = case.make()
    torch.testing.assert_close(ours(), eager())
    row = guide.measured(case, CPU, seconds=0.1, limit=1.0)
    assert row["ratio"] == 1.5 and (row["eager_ms"], row["ms"], row["rounds"]) == (3.0, 2.0, 40)
    # an answer that is wrong has no time
    wrong = guide.Case("x", ("x",), lambda: (eager, lambda: 1.1 * eager()))
    assert "ms" not in guide.measured(wrong, CPU, seconds=0.1, limit=1.0)


def test_a_row_that_fails_leaves_the_others(timer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def cases(_table: str, _site: guide.Site) -> list[guide.Case]:
        def failing() -> Any:
            raise torch.OutOfMemoryError("too large\nmore")

        fine = lambda: (lambda: torch.ones(2), lambda: torch.ones(2))  # noqa: E731
        return [guide.Case("1", ("a",), failing), guide.Case("2", ("b",), fine)]

    monkeypatch.setattr(guide, "cases", cases)
    report = Kept()
    args = argparse.Namespace(device="cpu", tiny=True, command="c", seconds=0.1, case_seconds=1.0)
    guide._ops("matmul", report, args)
    rows = {one["row"]["case"]: one["row"] for one in report.messages if "row" in one}
    assert rows["rows"]["rows"] == [["1", "a"], ["2", "b"]]
    assert rows["1"]["problem"] == "OutOfMemoryError: too large" and rows["2"]["ms"] == 2.0


def test_tables_name_what_did_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = {"case": "rows", "rows": [["1024", "1024x1024"], ["2048", "2048x2048"], ["4096", "4096x4096"]]}
    model = {"case": "model", "batch": 4, "dtype": "float32", "count": 4, "unit": "images"}
    eager = {"case": "eager", "ms": 8.0, "ours_ms": 4.0, "ratio": 2.0, "ci": [1.9, 2.1], "beside": "wavecrest"}
    runs = [
        run("matmul", [planned, timed("1024", 2.0, 1.0, 10**9), timed("2048", 3.0, 2.0, 10**9, 3)],
            "stopped after 9 s, at 4096"),
        run("attention", [], "not started: no time left of the budget"),
        run("resnet-50", [model, eager]),
        run("bert-base", [], "not started: transformers is not installed"),
    ]  # fmt: skip
    path = tmp_path / "a.jsonl.gz"
    files.write_document(path, {"samples": "full", "runs": runs})
    assert guide.main(["--from", str(path)]) == 0
    text = capsys.readouterr().out
    for line in (
        "| 1024x1024 | 0.5 | 1 | 2.00× [2.00, 2.00] |",
        "| 2048x2048 | 0.333 | 0.5 | 1.50× [1.50, 1.50], 3 rounds alone |",
        "| 4096x4096 | – | no time: stopped after 9 s, at 4096 | – |",
        "| – | – | – | – | no time: not started: no time left of the budget | – |",
        "| resnet-50 | 4 | float32 | 500 images/s | 1,000 images/s | 2.00× [1.90, 2.10] |",
        "| bert-base | – | – | – | no time: not started: transformers is not installed | – |",
    ):
        assert line in text.splitlines(), line
    assert text.count("### ") == 3 and "**Measured** on " in text


def test_two_versions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "old.jsonl.gz", tmp_path / "new.jsonl.gz"]
    for path, ms in zip(paths, (2.0, 1.5), strict=True):
        planned = {"case": "rows", "rows": [["512", "512", "32", "8"]]}
        files.write_document(path, {"runs": [run("attention", [planned, timed("512", 3.0, ms)])]})
    assert guide.main(["--from", str(paths[1]), "--against", str(paths[0])]) == 0
    text = capsys.readouterr().out
    assert "| attention 512 | 2 ms | 1.5 ms | -25.0% |" in text and "| matmul 4096 | – | – | – |" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --out, the file for results, or --from"),
        (["--only", "gemm", "--out", "a"], "no table 'gemm'; there are matmul, conv2d"),
        (["--out", "a", "--seconds", "0"], "must be above zero"),
        (["--from", "{folder}/none.json"], "no record of the guide's tables at"),
        (["--from", "{folder}/other.json"], "is no record of benchmarks.guide"),
    ],
)
def test_bad_calls(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"runs": []}))
    with pytest.raises(SystemExit):
        guide.main([text.format(folder=tmp_path) for text in arguments])
    assert message in " ".join(capsys.readouterr().err.split())
