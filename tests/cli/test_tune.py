"""`wavecrest tune` as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.toy import ToyOp
from wavecrest import hardware, records
from wavecrest.cli import main
from wavecrest.cli import tune as cli
from wavecrest.dispatch import lookup, registry
from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.tuned import Config, database
from wavecrest.dispatch.tuned.row import here
from wavecrest.errors import InvalidArgument
from wavecrest.integrations import ray
from wavecrest.measure import interleaved, timing
from wavecrest.tune import session, workers


def space(_key: Any, _arch: Any) -> list[Config]:
    return [Config(BLOCK=1), Config(BLOCK=2)]


TIMES = {"torch": 0.02, "kernel 1": 0.015, "kernel 2": 0.01}


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyOp]:
    """y = 2x with a kernel of two configurations, and made-up times for what runs."""
    ran: list[str] = []

    def native(x: Tensor) -> Tensor:
        ran.append("torch")
        return x + x

    def kernel(x: Tensor, *, config: Config) -> Tensor:
        ran.append(f"kernel {config['BLOCK']}")
        return 2 * x

    made = ToyOp(
        "double",
        reference=lambda x: 2 * x,
        key=lambda x: (x.shape[0], x.device.type),
        key_fields=("rows", "device"),
        inputs=lambda M, N, dtype, device: (torch.randn(M, N, dtype=dtype, device=device),),
        cost=lambda x: Cost(flops=x.numel(), bytes=2 * x.nbytes),
        default_config=lambda key: Config(BLOCK=1),
        bench_cases=lambda suite, device: {f"{suite} {M}": lambda M=M: (torch.randn(M, 8),) for M in (4, 16)},
    )
    made.native("torch", native, priority=10)
    made.kernel("kernel", kernel, priority=5, space=space)

    def measured(works: Any, *, min_rounds: int, **_options: Any) -> interleaved.Interleaved:
        names = []
        for work in works:
            work()
            names.append(ran[-1])
        series = tuple(tuple(TIMES[name] * (1 + index / 1000) for index in range(min_rounds)) for name in names)
        return interleaved.Interleaved(series, "made up")

    monkeypatch.setattr(interleaved, "measure", measured)
    # what is looked up once a process is not to be the stand-in's
    here()
    # an architecture is known, so that the space is asked
    monkeypatch.setattr(hardware, "detect", lambda device=None: replace(hardware.cpu(), arch="sm_90"))
    monkeypatch.setenv("COLUMNS", "80")
    yield made
    del registry.STATE.ops["double"]


def test_table(op: ToyOp, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["tune", "double", "--executor", "here"]) == 0
    text = capsys.readouterr().out
    for part in (
        "double · suite shared · ", "(sm_90)", "compiled before: none, the CPU runs no compiled kernels", "shared 4",
        "shared 16", "kernel", "BLOCK=2", "10.29 µs", "20.59 µs", "2.00× [2.000, 2.000]",
        "6 candidates of 2 keys: 4 timed, 2 won",
        "won by kernel 2",
    ):  # fmt: skip
        assert part in text, f"{part!r} is not in\n{text}"
    assert max(map(len, text.splitlines())) <= 80


def test_files_and_json(op: ToyOp, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "a.json"
    options = ["--suite", "quick", "--matching", "16", "--out", str(out), "--json"]
    assert main.main(["tune", "double", "--executor", "here", *options]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads(out.read_text()) and f"written to {out}" in captured.err
    record = records.load_as(out, records.TuneRecord)
    assert [key.case for key in record.keys] == ["quick 16"] and record.suite == "quick"
    assert record.budget_seconds == 600.0


def test_options_reach_the_run(op: ToyOp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}
    record = cli.run("double", session.Settings(), executor="here")

    def tuned(*args: Any, **options: Any) -> records.TuneRecord:
        asked.update(options, args=args)
        return record

    monkeypatch.setattr(session, "tune", tuned)
    options = ["--suite", "quick", "--matching", "4", "--backends", "torch, kernel", "--budget", "90s"]
    options += ["--seconds", "0.5", "--workers", "3", "--candidates", "7", "--timeout", "9", "--import", "json"]
    options += ["--import", "wave", "--out", str(tmp_path / "a.json"), "--resume"]
    options += ["--config", "BLOCK=2 num_warps=4", "--config", "BLOCK=8"]
    assert main.main(["tune", "double", *options]) == 0
    name, device, settings, targets = asked["args"]
    assert name == "double" and device.arch == "sm_90"
    configs = (Config(BLOCK=2, num_warps=4), Config(BLOCK=8))
    wanted = session.Settings(
        "quick", "4", ("torch", "kernel"), 90.0, 0.5, 3, 7, 9.0, ("json", "wave"), configs=configs
    )
    assert settings == wanted
    assert targets == session.Targets(tmp_path / "a.json", None) and asked["resume"] is True
    # on the CPU there is one child, if no more are asked for
    assert asked["starts"] == [workers.Child]
    for more, starts in ((["--children", "3"], [workers.Child] * 3), (["--executor", "here"], None)):
        assert main.main(["tune", "double", *more]) == 0 and asked["starts"] == starts
    monkeypatch.setattr(ray, "workers_of", lambda device, count: [device.arch, count])
    assert main.main(["tune", "double", "--executor", "ray", "--children", "5"]) == 0
    assert asked["starts"] == ["sm_90", 5]


def test_a_configuration_that_is_none(op: ToyOp, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["tune", "double", "--config", "BLOCK"]) == 1
    assert "--config: 'BLOCK' in config is not NAME=NUMBER: write it as in" in capsys.readouterr().err


@pytest.mark.slow
def test_a_crash_in_a_child_is_said(standins: None, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--import", "tests.unit.tune_standins", "--matching", "rows 4", "--backends", "crash", "--device", "cpu"]
    assert main.main(["tune", "planted", *options, "--seconds", "0.01"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "in 1 child process", "failed: rows 4, crash: ended its process with SIGSEGV", "won by torch 1",
        "a child ended: rows 4: ended its process with SIGSEGV",
    ):  # fmt: skip
        assert part in text, text


def test_a_file_of_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "shapes.csv", tmp_path / "a.json"
    path.write_text("op,M,N,dtype\nrms_norm,3,40,float32\nsoftmax,5,16,bf16\n")
    options = ["--executor", "here", "--backends", "torch", "--device", "cpu", "--seconds", "0.001", "--out", str(out)]
    assert main.main(["tune", str(path), *options]) == 0
    found = [records.load_as(tmp_path / f"a_{op}.json", records.TuneRecord) for op in ("rms_norm", "softmax")]
    assert [[key.case for key in record.keys] for record in found] == [["3x40 fp32"], ["5x16 bf16"]]
    assert {record.suite for record in found} == {"shapes"} and not out.exists()
    assert main.main(["tune", str(path), *options, "--resume"]) == 0
    again = records.load_as(tmp_path / "a_softmax.json", records.TuneRecord)
    assert again.keys == found[1].keys and again.seconds < 5
    path.write_text("op,M\n")
    capsys.readouterr()
    assert main.main(["tune", str(path), *options]) == 1
    assert "has nothing to tune: it has no row" in " ".join(capsys.readouterr().err.split())


WORKLOAD = """
import torch
from wavecrest.dispatch import registry

class Model(torch.nn.Module):
    def forward(self, x):
        return registry.get("double")(x) + registry.get("double")(x)

def work():
    return Model(), torch.ones(4, 8)
"""


@pytest.mark.parametrize(
    ("interval", "parts"),
    [
        ((1.5, 1.7), ("workload: faster 1.600×", "rows: not written, as they were not to be kept")),
        ((0.9, 1.1), ("workload: a tie 1.000×", "what ran before stays", "rows: dropped")),
        ((0.8, 0.9), ("workload: slower 0.850×", "rows: dropped")),
    ],
)
def test_a_workload(
    op: ToyOp, interval: tuple[float, float], parts: tuple[str, ...], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its calls are tuned, then it is timed in turn: what is said, and what the record has."""
    path, out = tmp_path / "model.py", tmp_path / "new" / "a.json"
    path.write_text(WORKLOAD)
    # as a call on a GPU, of a key that calls are made from
    op.redefine(key=lambda x: (x.shape[0], "cuda"))
    op.restudy(call_of_key=lambda parts, device: (torch.ones(4, 8, device=device),))
    middle = sum(interval) / 2
    pair = timing.Paired((middle,) * 10, (1.0,) * 10, middle, timing.Interval(*interval), "made up")
    monkeypatch.setattr(timing, "measure_pair", lambda *_works, **_options: pair)
    monkeypatch.setattr(timing, "block_speedup", lambda _pairs: (pair.ratio, pair.ci))
    with registry.measured_in(database.Database(tmp_path, "sm_90")):
        options = [f"{path}:work", "--executor", "here", "--out", str(out)]
        assert main.main(["tune", *options]) == 0
        text = capsys.readouterr().out
        lines = " ".join(text.split())
        for part in ("calls of one pass", "double 2 torch default", "kernel", "default:", *parts):
            assert part in lines, f"{part!r} is not in\n{text}"
        assert main.main(["tune", *options, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["kind"] == "tune-workload"
    record = records.load_as(out, records.WorkloadTuneRecord)
    assert record.workload == f"{path}:work" and [one.calls for one in record.keys] == [2]
    assert record.ci is not None and (record.ci.low, record.ci.high) == interval


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model.py:work", "--resume"], "--resume is for an op, not for a workload"),
        (["model.py:work", "--matching", "4"], "--matching is for an op"),
        (["model.py:work", "--table", "double.csv", "--out", "a.json"], "--table is for an op"),
        (["model.py:work", "--keep"], "--keep is for a GPU"),
        (["model.py:play"], "model.py has no function 'play'"),
        (["nothing.py:work"], "no file nothing.py"),
        (["model.py:work", "--out", "."], ". is a folder; give the name of a file in it"),
        (["model.py:work"], "Model calls nothing that can be tuned here: double rows are for calls on a GPU"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_workloads_that_are_none(
    op: ToyOp, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(WORKLOAD)
    assert main.main(["tune", *options, "--executor", "here"]) == 1
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.split()) and captured.out == ""
    assert {path.name for path in tmp_path.iterdir()} <= {"model.py", "__pycache__"}


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["nothing"], 1, "no op named 'nothing'; there are"),
        (["double", "--suite", "large"], 1, "no suite 'large'; there are shared, quick"),
        (["double", "--matching", "9"], 1, "no case of suite 'shared' has '9' in its name"),
        (["double", "--backends", "triton"], 1, "double has no backend 'triton' to tune; it has torch, kernel"),
        (["double", "--budget", "soon"], 1, "a duration is written like 90s, 15m or 1h"),
        (["double", "--budget", "0"], 1, "--budget must be above zero"),
        (["double", "--seconds", "-1"], 1, "--seconds must be above zero"),
        (["double", "--workers", "0"], 1, "--workers must be at least 1"),
        (["double", "--candidates", "0"], 1, "--candidates must be at least 1"),
        (["double", "--children", "0"], 1, "--children must be at least 1"),
        (["double", "--timeout", "0"], 1, "--timeout must be above zero"),
        (["double", "--executor", "slurm"], 1, "no executor 'slurm'; there are here, local, ray"),
        (["double", "--import", "no_such_module"], 1, "--import no_such_module: No module named 'no_such_module'"),
        (["double", "--resume"], 1, "nothing to resume without a record"),
        (["double", "--table", "double.csv", "--out", "a.json"], 1, "--table is for a GPU"),
        ([], 1, "Missing argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input(
    op: ToyOp, options: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main.main(["tune", *options]) == code
    captured = capsys.readouterr()
    assert message in captured.err.replace("\n", " ") and captured.out == ""
    assert not list(tmp_path.iterdir())


def test_on_a_gpu_a_table_is_written(op: ToyOp, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # as a GPU looks until something runs on it
    device = replace(hardware.cpu(), arch="sm_90")
    monkeypatch.setattr(hardware, "detect", lambda name=None: _Gpu(device))
    out, table = tmp_path / "a.json", tmp_path / "sm_90" / "double.csv"
    assert main.main(["tune", "double", "--executor", "here", "--out", str(out), "--table", str(table)]) == 0
    rows = database.read(table, ("rows",))
    assert {key: row.config for key, row in rows.items()} == {(4,): Config(BLOCK=2), (16,): Config(BLOCK=2)}


def test_a_file_of_one_op_may_have_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = replace(hardware.cpu(), arch="sm_90")
    path, out, table = tmp_path / "shapes.csv", tmp_path / "a.json", tmp_path / "sm_90" / "softmax.csv"
    path.write_text("op,M,N,dtype\nsoftmax,5,16,float32\nsoftmax,7,16,float32\n")
    options = ["--executor", "here", "--backends", "torch", "--seconds", "0.001", "--out", str(out)]
    options += ["--table", str(table)]
    monkeypatch.setattr(hardware, "detect", lambda name=None: _Gpu(device))
    assert main.main(["tune", str(path), *options]) == 0
    rows = database.read(table, lookup.fields_of(registry.get("softmax")))
    assert len(rows) == 2 and {row.backend for row in rows.values()} == {"torch"}
    path.write_text("op,M,N,dtype\nsoftmax,5,16,float32\nrms_norm,7,16,float32\n")
    monkeypatch.setattr(hardware, "detect", lambda name=None: _Gpu(device))
    with pytest.raises(InvalidArgument, match=r"--table is for one op, and .* has softmax, rms_norm"):
        cli.run_file(path, session.Settings(), out=tmp_path / "b.json", table=table, executor="here")
    assert database.read(table, lookup.fields_of(registry.get("softmax"))) == rows


class _Gpu:
    """A device whose kind is asked once for the table, and that then is a CPU."""

    def __init__(self, device: hardware.Device) -> None:
        self._device, self._asked = device, 0

    def __getattr__(self, name: str) -> Any:
        if name == "kind" and self._asked == 0:
            self._asked += 1
            return "cuda"
        return getattr(self._device, name)


def liar(x: Tensor, *, config: Config) -> Tensor:
    return 2.5 * x


@pytest.mark.parametrize(
    ("plant", "code", "parts"),
    [
        # what is tried and wrong is named; what runs without a table must be right
        (lambda op: _attach(op, lambda x, *, config: (2 if config["BLOCK"] == 1 else 3) * x), 0,
         ["wrong: shared 4, kernel BLOCK=2: result 0 has error"]),
        (lambda op: _attach(op, liar), 2,
         ["the default kernel BLOCK=1 is wrong", "wrong: shared 4, kernel BLOCK=1: result 0 has error"]),
        (lambda op: (_attach(op, liar), op.native('torch', lambda x: 3 * x, priority=10)), 2,
         ["no winner: shared 4: no candidate was found right", "won by none"]),
        (lambda op: [op.native(name, liar, refuse=lambda x: 'no', priority=5) for name in ("torch", "kernel")], 0,
         ["not tuned: shared 4", "no backend takes it: torch no; kernel no"]),
    ],
    ids=["tried", "default", "all", "declined"],
)  # fmt: skip
def test_what_is_wrong_is_said(
    op: ToyOp, plant: Callable[[ToyOp], Any], code: int, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plant(op)
    assert main.main(["tune", "double", "--executor", "here"]) == code
    captured = capsys.readouterr()
    for part in parts:
        assert part in captured.out or part in captured.err.replace("\n", " "), captured


def _attach(op: ToyOp, run: Callable[..., Tensor]) -> None:
    ran = op.backends["kernel"].run

    def recorded(x: Tensor, *, config: Config) -> Tensor:
        ran(op.of(x), config=config)
        return run(x, config=config)

    op.kernel("kernel", recorded, priority=5, space=space)


def test_what_is_left_is_said(op: ToyOp, capsys: pytest.CaptureFixture[str]) -> None:
    record = cli.run("double", session.Settings(), executor="here")
    record.left = {"a": "no time left of the budget", "b": "no time left of the budget", "c": "has the key of a"}
    cli.show(record)
    text = capsys.readouterr().out
    assert "not tuned: a, b: no time left of the budget" in text and "not tuned: c: has the key of a" in text


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_found(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    # a shell that starts the tests in the background has SIGINT ignored, and children inherit that
    process = subprocess.Popen(
        [sys.executable, "-m", "wavecrest", "tune", "rms_norm", "--device", "cpu", "--seconds", "2", "--out", str(out)],
        env=os.environ | {"TRITON_INTERPRET": "0"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    end = time.perf_counter() + 120
    while not out.exists() and time.perf_counter() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume goes on" in said
    record = records.load_as(out, records.TuneRecord)
    assert record.problem == "interrupted" and record.keys and record.left
