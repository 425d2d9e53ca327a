"""`wavecrest bench` as a user runs it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops.op_harness import call_of
from tests.toy import planted
from wavecrest import hardware, records
from wavecrest.bench import ops, sides, suites
from wavecrest.bench.rates import RECURRENCES, rates, tokens
from wavecrest.cli import _bench_ops, main
from wavecrest.cli.bench import run
from wavecrest.dispatch import registry
from wavecrest.dispatch.op import AnyOp
from wavecrest.measure import interleaved, timing
from wavecrest.measure.workload import load
from wavecrest.optimizer.plan import Plan

BODY = """
import torch
from torch import nn
from wavecrest import Buckets

def make():
    return nn.Linear(16, 16), Buckets(b1=torch.ones(1, 16), b8={"input": torch.ones(8, 16)})

def broken():
    return nn.Linear(16, 16), torch.ones(1, 3)
"""
IDS = """
class Ids(nn.Module):
    def forward(self, input):
        return input.float()
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
    assert "Linear · 272 parameters · float32" in text
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
    assert record.workload == "Linear" and record.parameters == 272


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 1, "one workload"),
        (["{file}:make", "--hf", "folder"], 1, "one workload"),
        (["{file}:gone"], 1, "no function 'gone'"),
        (["{file}:broken"], 1, "bucket default: the model raised RuntimeError"),
        (["{file}:make", "--seconds", "0"], 1, "--seconds must be above zero"),
        (["{file}:make", "--seconds", "nan"], 1, "--seconds must be above zero"),
        (["{file}:make", "--device", "cuda:99"], 3, "cuda:99 is not here"),
        (["{file}:make", "-o", "{folder}"], 1, "is a folder"),
        (["{file}:make", "-o", "{file}/a.json"], 1, "cannot write"),
        (["--hf", "{folder}/none"], 1, ""),
        (["{file}:make", "{file}:make"], 1, "one workload at a time"),
        (["{file}:make", "--suite", "quick"], 1, "--suite is for ops"),
        (["--hf", "{folder}", "--plot", "a.svg", "--case", "1"], 1, "--case, --plot is for ops"),
        (["rms_nrom"], 1, "'rms_nrom' is neither an op (add_"),
        (["rms_nrom"], 1, "nor a workload, which is written file.py:function or package.module:function"),
        (["rms_norm", "{file}:make"], 1, "either ops or one workload"),
        (["rms_norm", "--all-ops"], 1, "give names of ops, or --all-ops"),
        (["--peers", "eager"], 1, "--peers is for ops; give their names, or --all-ops"),
        (["rms_norm", "--peers", "egaer"], 1, "no peer 'egaer'; there are eager, compile, liger, aiter, sdpa_flash"),
        (["rms_norm", "--suite", "all"], 1, "no suite 'all'; there are shared, quick"),
        (["rms_norm", "--case", "9x9"], 1, "has '9x9' in its name"),
        (["rms_norm", "--dtype", "int4"], 1, "--dtype takes"),
        (["rms_norm", "--seconds", "0"], 1, "--seconds must be above zero"),
        (["rms_norm", "--budget", "-1"], 1, "a duration is written like 90s"),
        (["rms_norm", "--budget", "0s"], 1, "--budget must be above zero"),
        (["rms_norm", "--case-seconds", "0"], 1, "--case-seconds must be above zero"),
        (["M=16"], 1, "M=16 is a size of an op: give its name first, as in gemm M=4096"),
        (["{file}:make", "M=16"], 1, "M=16 is a size of an op"),
        (["rms_norm", "M=16", "--suite", "quick"], 1, "M=16 says which cases there are, so --suite has no meaning"),
        (["rms_norm", "--csv", "{folder}/a.csv", "--dtype", "bf16"], 1, "--csv says which cases there are, so --dtype"),
        (["rms_norm", "M=4:1"], 1, "M=4:1: a range goes up, by a step of at least 1 or a factor of at least 2"),
        (["rms_norm", "M=4:a"], 1, "M=4:a: a range is first:last, first:last:step or first:last:*factor"),
        (["rms_norm", "M=1:99999"], 1, "M=1:99999: 1,001 calls; at most 1,000 at once"),
        (["rms_norm", "K=4"], 1, "'K=4' is no size or dtype that rms_norm takes"),
        (["rms_norm", "N=0"], 1, "N=0: must be a whole number from 1"),
        (["rms_norm", "dtype=int4"], 1, "dtype=int4: rms_norm takes float64, float32"),
        (["--csv", "{folder}/a.csv"], 1, "no file of shapes at"),
        (["rms_norm", "--compile", "--plan", "a.json"], 1, "--compile, --plan is for a workload; ops are beside"),
        (["{file}:make", "--plan", "{folder}/none.json"], 1, "no plan at"),
        (["rms_norm", "--device", "cuda:99"], 3, "cuda:99 is not here"),
        (["rms_norm", "--out", "{folder}"], 1, "is a folder"),
        (["rms_norm", "--plot", "{folder}/a.pdf"], 1, "ending in .svg or .png"),
        (["rms_norm", "--split", "{file}"], 1, "cannot write"),
        (["--from", "{folder}/none.json"], 1, "no result file"),
        (["--from", "{file}"], 1, "damaged"),
        (["--from", "{file}", "rms_norm"], 1, "leave out the names"),
        (["--from", "{file}", "--suite", "quick", "--device", "cpu"], 1, "so --suite, --device has no meaning"),
    ],
    ids=[
        "nothing", "both", "no-function", "wrong-inputs", "no-time", "nan", "no-gpu", "folder", "file-as-folder",
        "no-hf-folder", "two-workloads", "suite-of-workload", "plot-of-hf", "unknown-op", "unknown-workload", "mix",
        "all-and-some", "peers-of-nothing", "unknown-peer", "unknown-suite", "no-case", "bad-dtype", "no-time-ops",
        "no-budget", "empty-budget", "no-case-time", "sizes-alone", "sizes-of-workload", "sizes-and-suite",
        "csv-and-dtype", "range-down", "range-of-words", "too-many", "unknown-size", "no-size", "unknown-dtype",
        "no-csv", "forms-of-ops", "no-plan", "no-gpu-ops", "folder-ops", "pdf", "split-into-file", "from-nothing",
        "from-foreign", "from-and-op", "from-and-suite",
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
    monkeypatch.setattr(interleaved, "measure", lambda *args, **options: pytest.fail("measured first"))
    for option, value in (("-o", f"{workload}/a.json"), ("--split", str(workload)), ("--plot", "a.pdf")):
        assert main.main(["bench", "rms_norm", option, value]) == 1


# --- other forms of a model


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings of pairs made up: the model 12 ms, another form 8 ms."""

    def measure_pair(base: Any, new: Any, **_options: Any) -> timing.Paired:
        base(), new()
        return timing.Paired((12.0,) * 9, (8.0,) * 9, 1.5, timing.Interval(1.4, 1.6), "host wall", 7)

    monkeypatch.setattr(timing, "measure_pair", measure_pair)


def test_samples_and_tokens_a_second(
    workload: Path, samples: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    workload.write_text(BODY.replace("Buckets(", "Buckets(ids=torch.ones(6, 5, dtype=torch.int64), "))
    workload.write_text(workload.read_text().replace("nn.Linear(16, 16), Buckets", "Ids(), Buckets") + IDS)
    assert main.main(["bench", f"{workload}:make"]) == 0
    text = capsys.readouterr().out
    assert "b8: 667 samples/s\n" in text, "8 samples in 12 ms"
    assert "ids: 500 samples/s, 2,500 tokens/s\n" in text


def test_a_model_beside_compile_and_a_plan(
    workload: Path, samples: dict[str, float], pairs: None, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    loaded = load(f"{workload}:make")
    plan, target = workload.parent / "plan.json", workload.parent / "a.json"
    Plan.start(loaded, hardware.cpu(), {name: {} for name in loaded.buckets}).save(plan)
    monkeypatch.setattr(sides, "compiled", lambda workload: workload.model)
    arguments = [f"{workload}:make", "--compile", "--plan", str(plan), "-o", str(target)]
    assert main.main(["bench", *arguments]) == 0
    text = capsys.readouterr().out
    assert "torch.compile" in text and "1.50×" in text and "1.40–1.60" in text and "8.000 ms" in text
    assert "1,000 samples/s" in " ".join(text.split()), "8 samples in 8 ms"
    assert max(map(len, text.splitlines())) <= 80
    record = records.load_as(target, records.BenchRecord)
    assert [side.name for side in record.sides] == ["torch.compile", str(plan)]
    for side in record.sides:
        assert not side.problem and side.error == 0.0 and [pair.bucket for pair in side.buckets] == ["b1", "b8"]


def test_a_form_that_fails_or_answers_otherwise_has_no_time(workload: Path, pairs: None) -> None:
    def raising(_workload: Any) -> Any:
        raise RuntimeError("no compiler\nmore")

    loaded = load(f"{workload}:make")
    assert sides.beside(loaded, "a", raising, seconds=1.0).problem == "RuntimeError: no compiler"
    other = sides.beside(loaded, "b", lambda workload: lambda input: workload.model(input)[:, :3], seconds=1.0)
    assert other.problem == "ValueError: its answer has other shapes than the model's" and not other.buckets
    off = sides.beside(loaded, "c", lambda workload: lambda input: 1.5 * workload.model(input), seconds=1.0)
    assert off.error == pytest.approx(0.5, rel=1e-3) and off.buckets[0].ratio == 1.5


# --- ops


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Times made up: ours 20 µs, then 30 µs, 40 µs and so on; a copy 10 µs."""
    facts = {"ours": 0.020}
    monkeypatch.setenv("COLUMNS", "100")

    def measure(works: list[Any], **_options: Any) -> interleaved.Interleaved:
        peers = [0.030 + 0.010 * index for index in range(len(works) - 2)]
        times = [facts["ours"], *peers, 0.010] if len(works) > 1 else [0.010]
        return interleaved.Interleaved(tuple((value,) * 40 for value in times), "device events")

    monkeypatch.setattr(interleaved, "measure", measure)
    return facts


@pytest.mark.usefixtures("users_copy")
def test_ops_table(
    rounds: dict[str, float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    arguments = ["bench", "rms_norm", "silu_and_mul", "--suite", "quick", "--peers", "eager,liger", "--device", "cpu"]
    assert main.main(arguments) == 0
    text = capsys.readouterr().out
    assert "suite quick" in text and "peers: eager (torch" in text
    for part in (
        "rms_norm · copy of 64.0 MiB: 13,422 GB/s",
        "silu_and_mul",
        "20.00 µs",
        "50 %",
        "1.50×",
        "peak unknown",
    ):
        assert part in text, part
    # the peer's own column, then the best peer's
    assert re.search(r"20\.00 µs .* 1\.50×\s+1\.50×\s*\n.*20\.00–20\.00.*1\.50–1\.50", text)
    assert "best peers: geometric mean 1.50× [1.500, 1.500] over 3 cases" in text
    assert "slower in none" in text and "ours ran by backend torch" in text
    assert "no liger: not installed; it needs pip install" in text
    assert max(map(len, [line for line in text.splitlines() if "×" in line and "bf16" in line])) <= 80


def test_sizes_of_the_users(
    rounds: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    target = tmp_path / "a.json"
    words = ["gemm", "M=8:32:*2", "N=16,24", "k=32", "dtype=fp32"]
    assert main.main(["bench", *words, "--peers", "eager", "--device", "cpu", "-o", str(target)]) == 0
    captured = capsys.readouterr()
    (found,) = records.load_as(target, records.OpBenchRecord).ops
    assert [case.case for case in found.cases] == [f"{M}x{N}x32 fp32" for M in (8, 16, 32) for N in (16, 24)]
    assert found.cases[1].sizes == {"M": 8, "N": 24, "K": 32} and found.cases[1].flops == 2 * 8 * 24 * 32
    # 2 · 8 · 24 · 32 operations and 4 · (8 · 32 + 24 · 32 + 8 · 24) bytes in 20 µs, whose peaks nothing says
    assert "0.61 GFLOP/s" in captured.out and "0.24 GB/s" in captured.out and "peak unknown" in captured.out
    assert "MxNxK" in captured.out and "gemm 8x24x32 fp32: 20.00 µs (" in captured.err
    table = [line for line in captured.out.splitlines() if "20.00" in line]
    assert len(table) == 12 and max(map(len, table)) <= 80


def test_rates_of_a_known_device_have_a_share_of_its_peak(
    rounds: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "a.json"
    assert main.main(["bench", "gemm", "M=64", "N=64", "K=64", "dtype=fp32", "--peers", "none", "-o", str(target)]) == 0
    record = records.load_as(target, records.OpBenchRecord)
    record.peak_gbps, record.peaks_from, record.ops[0].cases[0].peak_tflops = (
        4800.0,
        "NVIDIA datasheet, H200",
        0.0524288,
    )
    records.save(record, target)
    capsys.readouterr()
    assert main.main(["bench", "--from", str(target)]) == 0
    text = capsys.readouterr().out
    # 2 · 64³ operations in 20 µs; the 48 KiB of its tensors at 4,800 GB/s take 0.01 µs
    assert "26.2 GFLOP/s" in text and "50% of peak" in text and " 2.46 GB/s" not in text
    assert "peaks: 4,800 GB/s, 0.1 TFLOP/s float32 (NVIDIA datasheet, H200, dense)" in text
    assert "cases limited by arithmetic (1): 50.0% (64x64x64 fp32) to 50.0% (64x64x64 fp32) of the datasheet" in text


@pytest.mark.parametrize("name", RECURRENCES)
def test_a_recurrence_has_the_time_of_a_token(name: str) -> None:
    op = registry.get(name)
    given = {size: 7 if size == "S" else 2 for size in op.study.sizes}
    call = op.study.inputs(*given.values(), torch.float32, "cpu")
    row = ops._describe(op, suites.Case("a", lambda: call, given), call)
    count = given.get("S", 1)
    assert tokens(name, row) == count and tokens("rms_norm", row) is None
    # large enough for a line on bandwidth, which says nothing here
    row.tensor_bytes = 1 << 30
    row.impls = [records.ImplTiming(name="wavecrest", ms=0.014 * count)]
    bench = records.OpBench(op=name, copy_gbps=1.0, copy_bytes=1, cases=[row])
    assert _bench_ops.summary(bench, 4800.0) == ["a token takes 14.00 µs (a) to 14.00 µs (a)"]


@pytest.mark.gpu
def test_on_a_gpu_a_gemm_has_a_share_of_the_peak_and_a_norm_of_the_bandwidth(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    for words, unit in ((["gemm", "M=4096", "dtype=bf16"], "TFLOP/s"), (["rms_norm", "M=8192"], "GB/s")):
        assert main.main(["bench", *words, "--peers", "eager", "--seconds", "0.1", "-o", str(target)]) == 0
        record = records.load_as(target, records.OpBenchRecord)
        case = record.ops[0].cases[0]
        assert case.impls[0].ms is not None and record.peaks_from
        (rate,) = rates(case, case.impls[0].ms, record.peak_gbps)
        assert rate.unit == unit and rate.share is not None and 0.1 < rate.share < 1.05


def test_sizes_from_a_file(rounds: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, target = tmp_path / "shapes.csv", tmp_path / "a.json"
    file.write_text("rows,columns,dtype\n3,40,fp32\n4,48,\n")
    arguments = ["--peers", "none", "--device", "cpu", "-o", str(target)]
    assert main.main(["bench", "rms_norm", "--csv", str(file), *arguments]) == 0
    record = records.load_as(target, records.OpBenchRecord)
    assert record.suite == "shapes.csv" and [case.case for case in record.ops[0].cases] == ["3x40 fp32", "4x48 bf16"]
    capsys.readouterr()
    file.write_text("M,N\n")
    assert main.main(["bench", "rms_norm", "--csv", str(file), *arguments]) == 1
    assert "shapes.csv has nothing to measure: it has no row" in capsys.readouterr().err
    file.write_text("op,M,N\nsoftmax,3,40\nrms_norm,4,x\n")
    assert main.main(["bench", "--csv", str(file), *arguments]) == 1
    assert "line 3: N=x: must be a whole number" in capsys.readouterr().err
    assert main.main(["bench", "rms_norm", "--csv", str(file), *arguments]) == 1
    assert "line 2: is of softmax, and asked for are rms_norm" in capsys.readouterr().err


def test_ops_that_are_slower_are_named(rounds: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    rounds["ours"] = 0.060
    assert main.main(["bench", "rms_norm", "--suite", "quick", "--peers", "eager", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "0.50–0.50" in text and "slower in 3: 16x1024 bf16, 64x4096 bf16, 7x1000 fp32" in text


def test_a_cell_says_why_a_peer_has_no_time() -> None:
    cells = {"wrong: result 0": "[red]wrong[/red]", "does not offer this op": "–"}
    for problem, cell in cells.items():
        assert _bench_ops._peer_cell(records.ImplTiming(name="liger", problem=problem), 1.0) == cell
    assert _bench_ops._peer_cell(records.ImplTiming(name="liger", ms=3.0), 2.0) == "1.50×"


@pytest.mark.usefixtures("users_copy")
def test_large_tensors_and_wide_rows_have_their_own_line(
    rounds: dict[str, float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = registry.get("rms_norm").study

    def made(rows: int, columns: int) -> Any:
        return lambda: call_of("rms_norm", torch.ones(rows, columns))

    def cases(suite: str, device: str) -> dict[str, Any]:
        return {"small": made(2, 8), "large": made(1 << 14, 1 << 10), "wide": made(1, 65536)}

    monkeypatch.setattr("wavecrest.ops.rows.study.studies", lambda: {"rms_norm": replace(study, bench_cases=cases)})
    assert main.main(["bench", "rms_norm", "--peers", "none", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    # 128 MiB in 20 µs beside 128 MiB in 10 µs, and half as fast as the copy of as many bytes
    assert "tensors of 64 MiB and more (1): at least 50.0 % of copy (large), 50.0 % of a copy of as many" in text
    assert "rows of 65,536 columns and more (1): at least 0.2 % of copy (wide)" in text
    assert "best peers" not in text


def test_ops_files(rounds: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    out, folder = tmp_path / "new" / "ops.json", tmp_path / "split"
    arguments = ["rms_norm", "layer_norm", "--suite", "quick", "--peers", "eager", "--device", "cpu", "--json"]
    assert main.main(["bench", *arguments, "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())
    record = records.load_as(out, records.OpBenchRecord)
    assert [bench.op for bench in record.ops] == ["rms_norm", "layer_norm"]
    assert main.main(["bench", "--from", str(out), "--split", str(folder), "--plot", str(tmp_path / "all.png")]) == 0
    captured = capsys.readouterr()
    assert "rms_norm · copy of" in captured.out and "layer_norm · copy of" in captured.out
    names = sorted(file.name for file in folder.iterdir())
    assert names == ["bench_layer_norm.json", "bench_layer_norm.svg", "bench_rms_norm.json", "bench_rms_norm.svg"]
    assert all(name in captured.err.replace("\n", "") for name in [*names, "all.png"])
    part = records.load_as(folder / "bench_layer_norm.json", records.OpBenchRecord)
    assert part.ops == record.ops[1:] and part.header == record.header
    assert "bench_layer_norm.json" in (folder / "bench_layer_norm.svg").read_text()
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_interrupted_leaves_the_ops_that_are_done(
    rounds: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wavecrest.bench import ops

    real, done = ops._bench_op, []

    def until_the_second(op: AnyOp, *args: Any) -> records.OpBench:
        done.append(op.name)
        if len(done) == 2:
            raise KeyboardInterrupt
        return real(op, *args)

    monkeypatch.setattr(ops, "_bench_op", until_the_second)
    target = tmp_path / "a.json"
    arguments = ["rms_norm", "layer_norm", "--suite", "quick", "--peers", "none", "--device", "cpu", "-o", str(target)]
    assert main.main(["bench", *arguments]) == 130
    assert [bench.op for bench in records.load_as(target, records.OpBenchRecord).ops] == ["rms_norm"]


def test_all_ops_are_all(rounds: dict[str, float], tmp_path: Path) -> None:
    arguments = ["--all-ops", "--suite", "quick", "--peers", "none", "--device", "cpu", "--case", "16x1024"]
    assert main.main(["bench", *arguments, "-o", str(tmp_path / "a.json")]) == 0
    record = records.load_as(tmp_path / "a.json", records.OpBenchRecord)
    own = {name for name in registry.names() if registry.get(name).study.bench_cases is not None}
    assert {bench.op for bench in record.ops} | own == set(registry.names())


def test_a_wrong_result_is_no_success(
    rounds: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    op = registry.get("rms_norm")
    monkeypatch.setattr(op, "backends", dict(op.backends))
    monkeypatch.setattr(op, "_order", op._order)
    planted(op, "broken", lambda call: 2 * call.x, priority=99)
    target = tmp_path / "a.json"
    arguments = ["rms_norm", "--suite", "quick", "--peers", "eager", "--device", "cpu", "-o", str(target)]
    assert main.main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out.count("wrong") >= 3 and "best peers" not in captured.out
    assert "3 without a valid result: rms_norm 16x1024 bf16: wrong: result 0 has error" in captured.err
    assert target.exists(), "what was found is kept"
