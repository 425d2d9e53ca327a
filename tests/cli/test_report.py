"""`wavecrest report`: finds the record, writes the page, and says plainly what is wrong otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wavecrest import records
from wavecrest.cli import main, report
from wavecrest.measure.timing import Interval
from wavecrest.records import OptimizeRecord, Result
from wavecrest.records.provenance import Header, Versions


def _record() -> OptimizeRecord:
    versions = Versions(
        wavecrest="0.1.0",
        python="3.11.7",
        torch="2.13.0",
        triton=None,
        transformers=None,
        numpy="2.3.5",
        platform="Linux",
    )
    header = Header(
        created="2026-03-02T09:41:07+00:00", command="wavecrest optimize m.py:make", commit=None, evidence="measured",
        device={"kind": "cpu", "name": "x86 host", "arch": "cpu-x86_64"}, versions=versions, environment={},
    )  # fmt: skip
    result = Result(verdict="faster", ratio=1.31, ci=Interval(1.29, 1.33), speed=[], numerics=[], quality=[])
    return OptimizeRecord(
        header=header, workload="net[/red]", spec="m.py:make", dtype="float32", parameters=10, level=2, min_gain=0.02,
        budget_seconds=60, baseline=[], result=result,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    records.save(_record(), tmp_path / "run.json")
    return tmp_path


def test_folder_gets_a_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["report", str(folder)]) == 0
    assert "Faster by 1.31×" in (folder / "report.html").read_text(encoding="utf-8")
    out = capsys.readouterr().out
    assert out.startswith("net[/red]: faster by 1.31× [1.29, 1.33]\n")
    assert str(folder / "report.html") in out


@pytest.mark.parametrize("target", ["other.html", "new/deep/other.html"])
def test_file_and_output(folder: Path, target: str) -> None:
    written = report.run(folder / "run.json", folder / target)
    assert written.path == str(folder / target)
    assert written.bytes == (folder / target).stat().st_size > 5000
    assert not (folder / "report.html").exists()


def test_output_folder_takes_the_default_name(folder: Path) -> None:
    (folder / "out").mkdir()
    assert report.run(folder, folder / "out").path == str(folder / "out" / "report.html")


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["report", str(folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["headline"] == "Faster by 1.31×"
    assert printed["interval"] == "[1.29, 1.33]"
    assert printed["first_line"].endswith("faster by 1.31× [1.29, 1.33]")
    assert printed["path"] == str(folder / "report.html")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["empty"], "no run.json in"),
        (["missing.json"], "no result file at"),
        (["damaged.json"], "is damaged"),
        (["foreign.json"], "has no format_version"),
        (["run.json", "-o", "run.json"], "would overwrite its own record"),
        (["run.json", "-o", "run.json/report.html"], "cannot write"),
        ([], "Missing argument"),
    ],
    ids=["empty folder", "missing", "damaged", "foreign", "onto itself", "folder is a file", "no argument"],
)
def test_mistakes_get_one_sentence(
    folder: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    Path("empty").mkdir()
    Path("damaged.json").write_text('{"kind": "optimize",', encoding="utf-8")
    Path("foreign.json").write_text("{}", encoding="utf-8")
    before = Path("run.json").read_bytes()
    assert main.main(["report", *arguments]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error:")
    assert message in err
    assert Path("run.json").read_bytes() == before


def test_record_of_another_command_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    bench = {key: document[key] for key in ("format_version", "header", "workload", "dtype", "parameters")}
    (folder / "run.json").write_text(json.dumps(bench | {"kind": "bench", "buckets": []}), encoding="utf-8")
    assert main.main(["report", str(folder)]) == 1
    assert "is a result of bench, not of optimize" in capsys.readouterr().err
