"""`wavecrest compare` as continuous integration runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wavecrest import hardware, records
from wavecrest.cli import _shared, main
from wavecrest.cli.compare import run
from wavecrest.errors import InvalidArgument
from wavecrest.measure import timing
from wavecrest.records import provenance


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "80")

    def make(name: str, *, noise: float = 0.02, seed: int = 0, **times: float) -> str:
        buckets = []
        for index, (bucket, ms) in enumerate(times.items()):
            values = tuple(np.random.default_rng([seed, index]).normal(ms, ms * noise, 60).clip(ms / 10).tolist())
            measured = timing.Measurement(values, values, ms, "host wall", timing.bootstrap_median(values))
            shapes = {"args[0]": "1x8 float32"}
            buckets.append(
                records.BucketBench(bucket=bucket, measurement=measured, shapes=shapes, peak_memory_bytes=None)
            )
        record = records.BenchRecord(
            header=provenance.header(hardware.cpu(), command="wavecrest bench"),
            workload="m",
            dtype="float32",
            parameters=8,
            buckets=buckets,
        )
        path = tmp_path / f"{name}.json"
        records.save(record, path)
        return str(path)

    return make


def _edit(path: str, change: Any) -> None:
    document = json.loads(Path(path).read_text())
    change(document)
    Path(path).write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("ms", "verdict", "code"),
    [(10.0, "tie", 0), (8.0, "faster", 0), (10.3, "slower", 0), (10.9, "slower", 2), (20.0, "slower", 2)],
    ids=["same", "faster", "slower-within-the-limit", "slower", "twice"],
)
def test_guard(write: Any, capsys: pytest.CaptureFixture[str], ms: float, verdict: str, code: int) -> None:
    a, b = write("a", b1=10.0, seed=1), write("b", b1=ms, seed=2)
    assert main.main(["compare", a, b, "--fail-over", "5%"]) == code
    captured = capsys.readouterr()
    assert verdict in captured.out
    assert max(map(len, captured.out.splitlines()[1:])) <= 80
    assert ("error: slower by more than 5.0%: b1" in captured.err) == (code == 2)


def test_one_slow_bucket_among_fast_ones_fails(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write("a", b1=10.0, b8=10.0), write("b", b1=5.0, b8=12.0, seed=1)
    assert main.main(["compare", a, b, "--fail-over", "0.03"]) == 2
    captured = capsys.readouterr()
    assert "b8 (" in captured.err and "b1" not in captured.err
    assert "over the limit" in captured.out


def test_the_interval_decides_not_the_median(write: Any) -> None:
    # 3.5 % slower by the median, but the noise leaves less than 3 % possible
    a, b = write("a", b1=10.0, noise=0.09, seed=3), write("b", b1=10.35, noise=0.09, seed=4)
    change = run(Path(a), Path(b), fail_over=0.03).buckets[0]
    assert change.ratio is not None and change.high is not None and change.low is not None
    assert change.low < change.ratio < change.high
    assert change.regression == (change.high < 1 / 1.03)
    assert not change.regression


def test_no_false_alarms(write: Any) -> None:
    alarms = 0
    for seed in range(40):
        a, b = write("a", b1=10.0, noise=0.05, seed=seed), write("b", b1=10.0, noise=0.05, seed=seed + 1000)
        alarms += run(Path(a), Path(b), fail_over=0.03).outcome != "ok"
    assert alarms == 0


def test_without_a_limit_nothing_fails(write: Any) -> None:
    assert main.main(["compare", write("a", b1=10.0), write("b", b1=20.0)]) == 0


def test_unstable_is_neither_judged_nor_passed(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write("a", b1=10.0), write("b", b1=10.0, noise=0.5)
    assert main.main(["compare", a, b]) == 0
    assert main.main(["compare", a, b, "--fail-over", "3%"]) == 2
    captured = capsys.readouterr()
    assert "unstable, so not judged: b1" in captured.err
    change = run(Path(a), Path(b)).buckets[0]
    assert (change.verdict, change.ratio, change.b_ms) == ("unstable", None, None)
    assert change.a_ms == pytest.approx(10.0, rel=0.02)


def test_json(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["compare", write("a", b1=10.0), write("b", b1=20.0), "--json", "--fail-over", "3%"]) == 2
    record = json.loads(capsys.readouterr().out)
    assert record["outcome"] == "regression" and record["fail_over"] == pytest.approx(0.03)
    assert record["buckets"][0]["ratio"] == pytest.approx(0.5, abs=0.01)


def test_a_bucket_missing_in_b_is_an_error(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["compare", write("a", b1=10.0, b8=10.0), write("b", b1=10.0)]) == 1
    assert "lacks the bucket b8" in capsys.readouterr().err


def test_a_bucket_missing_in_a_is_said(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["compare", write("a", b1=10.0), write("b", b1=10.0, b8=10.0)]) == 0
    assert "no such bucket: b8" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(workload="other"), "measured m,"),
        (lambda d: d["buckets"][0]["shapes"].update({"args[0]": "2x8 float32"}), "other input shapes"),
        (lambda d: d["buckets"][0]["measurement"].update(clock="device events"), "device events times"),
        (lambda d: d.pop("buckets"), "damaged: "),
        (lambda d: d.update(format_version=99), "upgrade wavecrest"),
        (lambda d: d.update(kind="profile"), "damaged: "),
        (lambda d: d.update(kind="asv"), "not a wavecrest result file"),
    ],
    ids=["workload", "shapes", "clock", "damaged", "newer", "other-kind", "foreign"],
)
def test_files_that_do_not_belong_together(
    write: Any, capsys: pytest.CaptureFixture[str], change: Any, message: str
) -> None:
    a, b = write("a", b1=10.0), write("b", b1=10.0)
    _edit(b, change)
    assert main.main(["compare", a, b, "--fail-over", "3%"]) == 1
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["header"]["device"].update(name="H200"), "device name differs"),
        (lambda d: d["header"]["versions"].update(torch="1.0"), "torch differs"),
        (lambda d: d["header"]["environment"].update(AMD_LOG_LEVEL="3"), "AMD_LOG_LEVEL differs: unset in A, 3 in B"),
        (lambda d: d.update(dtype="bfloat16"), "dtype differs: float32 in A, bfloat16 in B"),
        (lambda d: d.update(parameters=9), "parameters differs: 8 in A, 9 in B"),
    ],
    ids=["machine", "version", "environment", "dtype", "parameters"],
)
def test_what_else_differs_is_said(write: Any, change: Any, message: str) -> None:
    a, b = write("a", b1=10.0), write("b", b1=10.0)
    assert run(Path(a), Path(b)).warnings == []
    _edit(b, change)
    (warning,) = run(Path(a), Path(b)).warnings
    assert message in warning


@pytest.mark.parametrize(
    ("text", "value"), [("3%", 0.03), ("0.03", 0.03), (" 2.5 % ", 0.025), ("0", 0.0), ("150%", 1.5)]
)
def test_percent(text: str, value: float) -> None:
    assert _shared.parse_percent(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["3", "1", "-1%", "x", "", "%", "nan", "inf%"])
def test_bad_percent(text: str) -> None:
    with pytest.raises(InvalidArgument):
        _shared.parse_percent(text)


def test_bad_percent_on_the_command_line(write: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["compare", write("a", b1=1.0), write("b", b1=1.0), "--fail-over", "3"]) == 1
    assert "ambiguous: write 3% or 0.03" in capsys.readouterr().err
