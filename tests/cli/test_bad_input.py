"""Bad input to every command and to the Python API: one line that says what was wrong, the exit code, no traceback."""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wavecrest
from wavecrest import hardware, records
from wavecrest.cli.main import main
from wavecrest.errors import WavecrestError
from wavecrest.measure import timing
from wavecrest.measure.workload import from_example
from wavecrest.optimizer import api
from wavecrest.optimizer.plan import Plan
from wavecrest.records import StepOutcome, provenance

FACTORIES = """
import sys
import torch
from torch import nn

def good():
    torch.manual_seed(0)
    return nn.Linear(4, 4), torch.randn(2, 4)

def raises():
    raise RuntimeError("no [bold]weights[/x] \\x1b[2J here\\nand a second line")

def exits():
    sys.exit(0)

def interrupts_nothing():
    raise StopIteration

def returns_nothing():
    return None

def three():
    return 1, 2, 3

def function_as_model():
    return torch.relu, torch.randn(2, 4)

def text_as_input():
    return nn.Linear(4, 4), "words"

def list_of_texts():
    return nn.Linear(4, 4), ["words"]

def no_inputs():
    return nn.Linear(4, 4), ()

def empty():
    return nn.Linear(4, 4), torch.randn(0, 4)

def misfit():
    return nn.Linear(4, 4), torch.randn(2, 3)

def other_device():
    return nn.Linear(4, 4), torch.randn(2, 4, device="meta")

class Exits(nn.Linear):
    def forward(self, x):
        sys.exit(0)

def model_exits():
    return Exits(4, 4), torch.randn(2, 4)

class Closed(nn.Linear):
    def forward(self, x):
        raise KeyError("\\x1b]0;owned\\x07")

def model_raises():
    return Closed(4, 4), torch.randn(2, 4)

def needs_more(weights, path):
    return None

number = 5
"""


def _plan() -> dict[str, Any]:
    plan = Plan.start(from_example(nn.Linear(4, 4), torch.zeros(2, 4)), hardware.cpu(), {"default": {"args[0]": "2x4"}})
    found: dict[str, Any] = json.loads(plan.model_dump_json())
    return found


def _bench(times: tuple[float, ...] = (1.0, 1.1, 1.2)) -> dict[str, Any]:
    measured = timing.Measurement(times, times, 2.0, "host wall", timing.Interval(1.0, 1.2))
    bucket = records.BucketBench(bucket="b", measurement=measured, shapes={"x": "2x4"}, peak_memory_bytes=None)
    record = records.BenchRecord(
        header=provenance.header(hardware.cpu()), workload="w", dtype="float32", parameters=1, buckets=[bucket]
    )
    found: dict[str, Any] = json.loads(record.model_dump_json())
    return found


def _run() -> dict[str, Any]:
    record = records.OptimizeRecord(
        header=provenance.header(hardware.cpu()), workload="w", spec=None, dtype="float32", parameters=1, level=1,
        min_gain=0.02, budget_seconds=1.0, baseline=[],
        steps=[StepOutcome(id="a", title="t", level=1, verdict="tie", reason="r")],
    )  # fmt: skip
    found: dict[str, Any] = json.loads(record.model_dump_json())
    return found


def _step(step_id: str, **params: Any) -> dict[str, Any]:
    row = StepOutcome(id=step_id, title="t", level=3, verdict="kept", reason="r", params=params)
    return {"steps": [json.loads(row.model_dump_json())], "stack": [step_id]}


def _variable(name: str, value: str) -> dict[str, Any]:
    return {"environment": [{"name": name, "value": value, "ratio": 1.1}]}


# file name -> content: text, bytes, or a document
FILES: dict[str, Callable[[], Any]] = {
    "work.py": lambda: FACTORIES,
    "syntax.py": lambda: "def make(:\n",
    "raises.py": lambda: "raise ValueError('at import')\n",
    "leaves.py": lambda: "import sys\nsys.exit(0)\n",
    "wants.py": lambda: "import a_package_that_is_not_there\n",
    "null.py": lambda: b"def make():\x00\n",
    "latin.py": lambda: "# käse\n".encode("latin-1"),
    "empty.json": lambda: "",
    "cut.json": lambda: '{"format_version": 1, "kind":',
    "list.json": lambda: "[]",
    "object.json": lambda: "{}",
    "bom.json": lambda: b"\xef\xbb\xbf{}",
    "binary.json": lambda: bytes(range(256)),
    "deep.json": lambda: "[" * 100_000,
    "bigint.json": lambda: '{"format_version": ' + "9" * 5000 + "}",
    "nan.json": lambda: '{"format_version": NaN}',
    "surrogate.json": lambda: '{"format_version": 1, "kind": "plan", "created": "\\ud800"}',
    "twice.json": lambda: '{"format_version": 1, "format_version": 1}',
    "newer.json": lambda: {"format_version": 99, "kind": "plan"},
    "true.json": lambda: {"format_version": True, "kind": "plan"},
    "below.json": lambda: {"format_version": -3, "kind": "plan"},
    "plan.json": _plan,
    "bench.json": _bench,
    "unstable.json": lambda: _bench((1.0, 5.0, 9.0, 1.0)),
    "run.json": _run,
    "pickled.json": lambda: {**_plan(), "pickle": "gASV"},
    "min_gain.json": lambda: json.dumps({**_plan(), "min_gain": math.nan}),
    "many.json": lambda: {**_plan(), "min_gain": 7},
    "shell.json": lambda: {**_plan(), **_variable("A=1; touch owned; B", "1")},
    "browser.json": lambda: {**_plan(), **_variable("BROWSER", "/bin/sh -c 'touch owned' %s")},
    "preload.json": lambda: {**_plan(), **_variable("LD_PRELOAD", "/tmp/x.so")},
    "unknown_step.json": lambda: {**_plan(), **_step("magic")},
    "no_step.json": lambda: {**_plan(), "stack": ["replace_norm"]},
    "hub.json": lambda: {**_plan(), **_step("attention:sdpa", implementation="evil-org/evil-kernel")},
    "params.json": lambda: {**_plan(), **_step("replace_norm", nonsense=1)},
    "precision.json": lambda: {**_plan(), **_step("precision:bf16")},
    "other_arch.json": lambda: {**_plan(), "fingerprint": {**_plan()["fingerprint"], "arch": "gfx942"}},
    "no_key.json": lambda: {
        **_plan(),
        "dispatch": [
            {"op": "gemm", "key": "{", "backend": "torch", "config": {}, "source": "", "reason": "", "calls": 1}
        ],
    },
    "other_bench.json": lambda: {**_bench(), "workload": "another"},
    "shapes.csv": lambda: "op,M,N\nrms_norm,x,4\n",
    "unknown_op.csv": lambda: "op,M,N,dtype\nmagic,4,4,float32\n",
    "calls.jsonl": lambda: "{\n",
    "notes.txt": lambda: "no table\n",
    "table.csv": lambda: "a,b\n1,2\n",
    "junk.db": lambda: b"SQLite format 3\x00" + b"junk" * 100,
    "budget.toml": lambda: "a = [",
    "proof.zip": lambda: b"PK\x03\x04 no archive",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("input")
    for name, make in FILES.items():
        content = make()
        held = content if isinstance(content, bytes) else content.encode() if isinstance(content, str) else None
        (made / name).write_bytes(json.dumps(content).encode() if held is None else held)
    (made / "empty").mkdir()
    (made / "hf").mkdir()
    (made / "hf" / "config.json").write_text("{")
    os.mkfifo(made / "fifo")
    with sqlite3.connect(made / "foreign.db") as connection:
        connection.execute("create table t (a)")
    connection.close()
    return made


# arguments, exit code, text of the one line; {d} is the folder of FILES
ROWS: list[tuple[str, int, str]] = [
    ("optimise", 1, "No such command 'optimise'. Did you mean 'optimize'?"),
    ("nonsense", 1, "No such command 'nonsense'"),
    ("--nonsense", 1, "No such option: --nonsense"),
    ("optimize", 1, "give one workload: file.py:function, package.module:function, or --hf DIR"),
    ("optimize {d}/work.py", 1, "a workload is written file.py:function or package.module:function, not"),
    ("optimize {d}/work.py:", 1, "a workload is written file.py:function or package.module:function, not"),
    ("optimize :make", 1, "a workload is written file.py:function or package.module:function, not ':make"),
    ("optimize nope.py:make", 1, "no file nope.py"),
    ("optimize {d}/empty:make", 1, "failed: No module named"),
    ("optimize {d}/notes.txt:make", 1, "failed: No module named"),
    ("optimize no_such_module:make", 1, "importing no_such_module failed: No module named 'no_such_module"),
    ("optimize {d}/work.py:gone", 1, "has no function 'gone"),
    ("optimize {d}/work.py:number", 1, "number: number is not a function"),
    ("optimize {d}/work.py:raises", 1, "raises raised RuntimeError: no [bold]weights[/x] \\x1b[2J here"),
    ("optimize {d}/work.py:exits", 1, "exits calls sys.exit(0); it must return (model, inputs)"),
    ("optimize {d}/work.py:interrupts_nothing", 1, "interrupts_nothing raised StopIteration: (no message)"),
    ("optimize {d}/work.py:returns_nothing", 1, "returns_nothing returned NoneType; it must return (model, in"),
    ("optimize {d}/work.py:three", 1, "three returned tuple; it must return (model, inputs) or a Workload"),
    ("optimize {d}/work.py:function_as_model", 1, "the workload's model is a builtin_function_or_method, not"),
    ("optimize {d}/work.py:text_as_input", 1, "example inputs are a str; give a tensor, a tuple, a dict of ke"),
    ("optimize {d}/work.py:list_of_texts", 1, "bucket default: there is no tensor in the example inputs"),
    ("optimize {d}/work.py:no_inputs", 1, "bucket default: there is no tensor in the example inputs"),
    ("optimize {d}/work.py:empty", 1, "bucket default: args[0] is empty (shape (0, 4))"),
    ("optimize {d}/work.py:other_device", 1, "bucket default: args[0] is on meta but the model is on cpu; mov"),
    ("optimize {d}/work.py:needs_more", 1, "needs_more raised TypeError: needs_more() missing 2 required posi"),
    ("optimize {d}/work.py:misfit", 1, "bucket default: the model raised RuntimeError: mat1 and mat2 shapes cannot"),
    ("optimize {d}/work.py:model_exits", 1, "the model calls sys.exit(0); a model must return"),
    ("optimize {d}/work.py:model_raises", 1, "bucket default: the model raised KeyError: '\\x1b]0;owned\\x07"),
    ("optimize {d}/syntax.py:make", 1, "raised SyntaxError: invalid syntax (syntax.py, line 1)"),
    ("optimize {d}/raises.py:make", 1, "raised ValueError: at import"),
    ("optimize {d}/leaves.py:make", 1, "raised SystemExit: 0"),
    ("optimize {d}/wants.py:make", 1, "failed: No module named 'a_package_that_is_not_there"),
    # a ValueError before Python 3.11.4
    ("optimize {d}/null.py:make", 1, "Error: source code string cannot contain null bytes"),
    ("optimize {d}/work.py:good {d}/work.py:good", 1, "Got unexpected extra argument(s) ("),
    ("optimize {d}/work.py:good --hf {d}/hf", 1, "give one workload: file.py:function, package.module:functio"),
    ("optimize --hf {d}/none", 1, "is not a Hugging Face model folder: it has no config.json"),
    ("optimize --hf {d}/empty", 1, "is not a Hugging Face model folder: it has no config.json"),
    ("optimize --hf {d}/hf", 1, "It looks like the config file at"),
    ("optimize --hf {d}/notes.txt", 1, "is not a Hugging Face model folder: it has no config.json"),
    ("optimize {d}/work.py:good --level 0", 1, "level must be 1 to 5, not 0"),
    ("optimize {d}/work.py:good --level 6", 1, "level must be 1 to 5, not 6"),
    ("optimize {d}/work.py:good --level x", 1, "Invalid value for '--level': Input should be a valid integer,"),
    ("optimize {d}/work.py:good --min-gain -1", 1, "a percentage must not be negative: '-1"),
    ("optimize {d}/work.py:good --min-gain 3", 1, "3 is ambiguous: write 3% or 0.03"),
    ("optimize {d}/work.py:good --min-gain nan", 1, "a percentage must not be negative: 'nan"),
    ("optimize {d}/work.py:good --min-gain 200%", 1, "min_gain must be at least 0 and below 1 (2% is 0.02), n"),
    ("optimize {d}/work.py:good --budget abc", 1, "a duration is written like 90s, 15m or 1h, not 'abc"),
    ("optimize {d}/work.py:good --budget -5", 1, "a duration is written like 90s, 15m or 1h, not '-5"),
    ("optimize {d}/work.py:good --budget 0", 1, "the budget must be positive and finite, not 0.0 s"),
    ("optimize {d}/work.py:good --budget 1e9", 1, "a duration is written like 90s, 15m or 1h, not '1e9"),
    ("optimize {d}/work.py:good --precision int8", 1, "precision is one of tf32, bf16, fp16, not 'int8"),
    ("optimize {d}/work.py:good --device tpu", 1, "good built its model on cpu, but tpu was asked for; give t"),
    ("optimize {d}/work.py:good --device cuda:99", 1, "good built its model on cpu, but cuda:99 was asked for"),
    ("optimize {d}/work.py:good --processes 0", 1, "processes must be at least 1, not 0"),
    ("optimize {d}/work.py:good --step magic --budget 1s -o {d}/empty", 1, "no step magic at level 5; there a"),
    ("optimize {d}/work.py:good -o {d}/notes.txt", 1, "cannot write to the output folder"),
    ("optimize {d}/work.py:good -o {d}/notes.txt/run", 1, "cannot write to the output folder"),
    ("optimize {d}/work.py:good -o /dev/null/run", 1, "cannot write to the output folder /dev/null/run: Not a"),
    ("optimize {d}/work.py:good -o {0}", 1, "Invalid value for '--out' / '-o': Value error, embedded null byt"),
    ("optimize {d}/work.py:good --bundle {d}/empty", 1, "it is a folder; give the name of a file"),
    ("optimize {d}/work.py:good --bundle {d}/notes.txt/b.zip", 1, "cannot write to the output folder"),
    ("optimize {d}/work.py:good --resume {d}/notes.txt", 1, "cannot write to the output folder"),
    ("bench", 1, "give one workload: file.py:function, package.module:function, or --hf DIR"),
    ("bench {d}/work.py:misfit", 1, "bucket default: the model raised RuntimeError: mat1 and mat2 shapes cannot"),
    ("bench {d}/work.py:model_exits", 1, "the model calls sys.exit(0); a model must return"),
    ("bench {d}/work.py:model_raises", 1, "bucket default: the model raised KeyError: '\\x1b]0;owned\\x07"),
    ("bench {d}/work.py:good --seconds nan", 1, "--seconds must be above zero, not nan"),
    ("bench {d}/work.py:good -o {d}/empty", 1, "is a folder; give the name of a file in it"),
    ("bench rms_nrom", 1, "rms_nrom' is neither an op (add_layer_norm, add_layer_norm_quantize, add_rms_norm,"),
    ("bench rms_norm --peers x", 1, "no peer 'x'; there are eager, compile, liger, aiter, sdpa_flash, sdpa_cu"),
    ("bench rms_norm --budget x", 1, "a duration is written like 90s, 15m or 1h, not 'x'"),
    ("bench --from {d}/deep.json", 1, "is damaged: nested more than 64 deep"),
    ("bench --from {d}/plan.json", 1, "is not a wavecrest result file: kind 'plan"),
    ("bench --from {d}/fifo", 1, "it is no regular file, but a device, a FIFO or a socket"),
    ("profile {d}/work.py:misfit", 1, "bucket default: the model raised RuntimeError: mat1 and mat2 shapes ca"),
    ("profile {d}/work.py:model_exits", 1, "bucket default: the model raised WorkloadError: the model calls s"),
    ("profile {d}/work.py:good --calls 0", 1, "profile_workload needs at least one call, not 0"),
    ("profile {d}/work.py:good --calls -1", 1, "profile_workload needs at least one call, not -1"),
    ("profile {d}/work.py:good -o {d}/notes.txt", 1, "cannot write to the output folder"),
    ("verify", 1, "give what to check: --plan FILE or --bundle FILE"),
    ("verify {d}/work.py:good", 1, "give what to check: --plan FILE or --bundle FILE"),
    ("verify --plan {d}/plan.json", 1, "give one workload: file.py:function, package.module:function, or --hf"),
    ("verify {d}/work.py:good --plan {d}/plan.json --bundle {d}/proof.zip", 1, "give what to check: --plan FI"),
    ("verify {d}/work.py:good --plan {d}/none.json", 1, "no plan at"),
    ("verify {d}/work.py:good --plan {d}/cut.json", 1, "is damaged: not JSON at line 1: Expecting value"),
    ("verify {d}/work.py:good --plan {d}/browser.json", 1, "is damaged: environment.0: BROWSER=/bin/sh -c 'to"),
    ("verify {d}/work.py:good --plan {d}/preload.json", 1, "is damaged: environment.0: LD_PRELOAD=/tmp/x.so i"),
    ("verify {d}/work.py:good --plan {d}/other_arch.json", 2, "the plan was measured on gfx942 ("),
    ("verify {d}/work.py:good --plan {d}/plan.json --processes 0", 1, "Invalid value for '--processes': Input"),
    ("verify {d}/work.py:good --plan {d}/plan.json --seconds 0", 1, "--seconds must be positive and finite, n"),
    ("verify {d}/work.py:good --plan {d}/plan.json --seconds nan", 1, "--seconds must be positive and finite,"),
    ("verify {d}/work.py:model_exits --plan {d}/plan.json --device cuda:99", 1, "model_exits built its model"),
    ("verify --bundle {d}/proof.zip", 1, "is damaged: File is not a zip file"),
    ("verify --bundle {d}/none.zip", 1, "no proof bundle at"),
    ("verify --bundle {d}/empty", 1, "it is no regular file, but a folder"),
    ("verify --bundle {d}/fifo", 1, "it is no regular file, but a device, a FIFO or a socket"),
    ("verify --bundle {d}/plan.json", 1, "is damaged: File is not a zip file"),
    ("plan show", 1, "Missing argument 'PLAN'"),
    ("plan show {d}/none.json", 1, "no plan at"),
    ("plan show {d}/empty", 1, "it is no regular file, but a folder"),
    ("plan show {d}/fifo", 1, "it is no regular file, but a device, a FIFO or a socket"),
    ("plan show {d}/empty.json", 1, "is damaged: not JSON at line 1: Expecting value"),
    ("plan show {d}/cut.json", 1, "is damaged: not JSON at line 1: Expecting value"),
    ("plan show {d}/list.json", 1, "is not a wavecrest plan: it has no format_version"),
    ("plan show {d}/object.json", 1, "is not a wavecrest plan: it has no format_version"),
    ("plan show {d}/bom.json", 1, "is damaged: it begins with a byte order mark; save it as UTF-8 without one"),
    ("plan show {d}/binary.json", 1, "is damaged: not UTF-8 text: invalid start byte at byte 128"),
    ("plan show {d}/deep.json", 1, "is damaged: nested more than 64 deep"),
    ("plan show {d}/bigint.json", 1, "is damaged: it has a whole number beyond 64 bits"),
    ("plan show {d}/nan.json", 1, "is damaged: NaN is no number of JSON"),
    ("plan show {d}/surrogate.json", 1, "is damaged: '\\ud800' holds half of a surrogate pair, which is no ch"),
    ("plan show {d}/twice.json", 1, "is damaged: 'format_version' is there twice"),
    ("plan show {d}/newer.json", 1, "has format 99, this wavecrest (0.1.0) reads up to 1; upgrade wavecrest"),
    ("plan show {d}/true.json", 1, "is not a wavecrest plan: it has no format_version"),
    ("plan show {d}/below.json", 1, "is not a wavecrest plan: it has no format_version"),
    ("plan show {d}/bench.json", 1, "is not a wavecrest plan: kind 'bench"),
    ("plan show {d}/pickled.json", 1, "is damaged: pickle: Extra inputs are not permitted"),
    ("plan show {d}/min_gain.json", 1, "is damaged: NaN is no number of JSON"),
    ("plan show {d}/many.json", 1, "is damaged: min_gain: Input should be less than 1"),
    ("plan show {d}/shell.json", 1, "is damaged: environment.0: A=1; touch owned; B=1 is not in this wavecres"),
    ("plan show {d}/precision.json", 1, "is damaged: the step precision:bf16 is in force, and precision says"),
    ("plan show x{0}y", 1, "Invalid value for 'PLAN': Value error, embedded null byte"),
    ("plan diff {d}/plan.json", 1, "Missing argument 'B'"),
    ("plan diff {d}/plan.json {d}/cut.json", 1, "is damaged: not JSON at line 1: Expecting value"),
    ("plan check {d}/unknown_step.json", 1, "no step 'magic' in this wavecrest; the plan comes from another v"),
    ("plan check {d}/no_step.json", 1, "the plan is damaged: stack names 'replace_norm', which no kept step h"),
    ("plan check {d}/hub.json", 1, "parameters of step attention:sdpa: owners: Field required"),
    ("plan check {d}/params.json", 1, "parameters of step replace_norm: sites: Field required"),
    ("plan check {d}/plan.json --device tpu", 1, "unknown device 'tpu': use cpu, cuda, cuda:N, hip or hip:N"),
    ("compare {d}/bench.json", 1, "Missing argument 'B'"),
    ("compare {d}/bench.json {d}/none.json", 1, "no result file at"),
    ("compare {d}/bench.json {d}/deep.json", 1, "is damaged: nested more than 64 deep"),
    ("compare {d}/bench.json {d}/run.json", 1, "is a result of optimize, not of bench"),
    ("compare {d}/bench.json {d}/other_bench.json", 1, "measured another: these do not compare"),
    ("compare {d}/bench.json {d}/bench.json --fail-over 3", 1, "3 is ambiguous: write 3% or 0.03"),
    ("compare {d}/bench.json {d}/bench.json --fail-over x", 1, "a percentage is written like 3% or 0.03, not"),
    ("compare {d}/bench.json {d}/unstable.json --fail-over 3%", 2, "unstable, so not judged: b; measure again"),
    ("explain", 1, "Missing argument 'OP'"),
    ("explain magic", 1, "no op named 'magic';"),
    ("explain rms_norm M=0", 1, "M=0: must be a whole number from 1 to 999,999,999,999"),
    ("explain rms_norm M=-1", 1, "M=-1: must be a whole number from 1 to 999,999,999,999"),
    ("explain rms_norm M=x", 1, "M=x: must be a whole number from 1 to 999,999,999,999"),
    ("explain rms_norm M=99999999999999999999 N=4", 1, "M=99999999999999999999: must be a whole number from 1"),
    ("explain rms_norm Q=4", 1, "Q=4' is no size or dtype that rms_norm takes: give '16 4096 bfloat16' or 'M="),
    ("explain rms_norm M=4 M=5", 1, "M=5': M is already 4; give '16 4096 bfloat16' or 'M=16 N=4096 dtype=bflo"),
    ("explain rms_norm dtype=int3", 1, "dtype=int3: rms_norm takes float64, float32, float16, bfloat16"),
    ("explain rms_norm --arch magic", 1, "unknown architecture 'magic': known are gfx90a, gfx942, gfx950, gfx"),
    ("explain rms_norm --device tpu", 1, "unknown device 'tpu': use cpu, cuda, cuda:N, hip or hip:N"),
    ("tune", 1, "Missing argument 'OP'"),
    ("tune magic", 1, "no op named 'magic';"),
    ("tune rms_norm --budget soon", 1, "a duration is written like 90s, 15m or 1h, not 'soon"),
    ("tune rms_norm --seconds 0", 1, "--seconds must be above zero, not 0"),
    ("tune rms_norm --workers 0", 1, "--workers must be at least 1, not 0"),
    ("tune rms_norm --candidates 0", 1, "--candidates must be at least 1, not 0"),
    ("tune rms_norm --executor magic", 1, "no executor 'magic'; there are here, local, ray"),
    ("tune rms_norm --import no_such_module", 1, "--import no_such_module: No module named 'no_such_module"),
    ("tune rms_norm --config nonsense", 1, "--config: 'nonsense' in config is not NAME=NUMBER: write it as in"),
    ("tune rms_norm --backends magic", 1, "rms_norm has no backend 'magic' to tune; it has triton, torch"),
    ("tune rms_norm --suite magic", 1, "no suite 'magic'; there are shared, quick"),
    ("tune rms_norm --table {d}/t.csv", 1, "--table is for a GPU: dispatch reads its rows for calls there alo"),
    ("tune rms_norm --matching 9x9x9", 1, "no case of suite 'shared' has '9x9x9' in its name"),
    ("tune {d}/none.csv", 1, "no file of shapes at"),
    ("tune {d}/shapes.csv", 1, "is not a file of shapes: line 2: M=x: must be a whole number from 1 to 999,999,9"),
    ("tune {d}/unknown_op.csv", 1, "is not a file of shapes: line 2: no op named 'magic';"),
    ("tune {d}/calls.jsonl", 1, "is no file of misses: line 1: not JSON at line 1: Expecting property name en"),
    ("tune {d}/work.py:gone", 1, "has no function 'gone"),
    ("db show magic", 1, "no op named 'magic';"),
    ("db import {d}/none.csv", 1, "No such file or directory"),
    ("db import {d}/notes.txt", 1, "notes.txt is no table of 16-bit matrix products: no column cu_num, M, N,"),
    ("db import {d}/table.csv", 1, "table.csv is no table of 16-bit matrix products: no column cu_num, M, N,"),
    ("db import {d}/deep.json", 1, "is damaged: nested more than 64 deep"),
    ("db merge {d}/none.db", 1, "no database at"),
    ("db merge {d}/junk.db", 1, "file is not a database; move it away, or set WAVECREST_DATABASE"),
    ("db merge {d}/foreign.db", 1, "is another program's database: set WAVECREST_DATABASE to a file of its ow"),
    ("db check {d}/junk.db", 1, "file is not a database; move it away, or set WAVECREST_DATABASE"),
    ("db check {d}/notes.txt", 1, "file is not a database; move it away, or set WAVECREST_DATABASE"),
    ("optimize {d}/work{0}.py:make", 1, "make' has a null byte in its name, which no file has"),
    ("tune {d}/work.py:misfit", 1, "bucket default: the model raised RuntimeError: mat1 and mat2 shapes cannot"),
    ("db check {d}/fifo", 1, "it is no regular file; set WAVECREST_DATABASE to a file of its own"),
    ("db export {d}/notes.txt/x --format magic", 1, "a file of another program is for one architecture: give"),
    ("db leave-one-out {d}/none.json", 1, "no result file at"),
    ("db leave-one-out {d}/bench.json", 1, "is a result of bench, not of tune"),
    ("isa show", 1, "Missing argument 'OP'"),
    ("isa show softmax --budget {d}/none.toml", 1, "no budget at"),
    ("isa show softmax --budget {d}/budget.toml", 1, "is damaged: Invalid value (at end of document)"),
    ("isa run magic", 1, "no op named 'magic';"),
    ("isa run softmax --shapes x", 1, "--shapes takes rows x columns, such as 3x1000,37x33, not 'x"),
    ("isa run softmax --workers 0", 1, "--workers and --resident take numbers of at least 1"),
    ("report", 1, "Missing argument 'RUN'"),
    ("report {d}/none", 1, "no result file at"),
    ("report {d}/empty", 1, "`wavecrest optimize W -o"),
    ("report {d}/deep.json", 1, "is damaged: nested more than 64 deep"),
    ("report {d}/bench.json", 1, "is a result of bench, not of optimize"),
    ("report {d}/run.json -o {d}/run.json", 1, "the report would overwrite its own record"),
    ("report {d}/run.json -o {d}/notes.txt/x.html", 1, "cannot write to the output folder"),
    ("doctor --device tpu", 1, "unknown device 'tpu': use cpu, cuda, cuda:N, hip or hip:N"),
    ("doctor --device cuda:99", 3, "device cuda:99 is not here: torch 2.13.0+cpu (cuda None) sees 0 GPUs"),
    ("doctor extra", 1, "Got unexpected extra argument(s) (extra)"),
    ("tune {d}/fifo.csv", 1, "no file of shapes at"),
    ("report {d}/fifo", 1, "it is no regular file, but a device, a FIFO or a socket"),
    ("compare {d}/fifo {d}/bench.json", 1, "it is no regular file, but a device, a FIFO or a socket"),
    ("optimize {d}/fifo.py:make", 1, "no file"),
    ("bench {d}/work.py:text_as_input", 1, "example inputs are a str; give a tensor, a tuple, a dict of keywo"),
    ("profile {d}/work.py:list_of_texts", 1, "bucket default: there is no tensor in the example inputs"),
    ("verify {d}/work.py:good --plan {d}/unknown_step.json", 1, "no step 'magic' in this wavecrest"),
    ("verify {d}/work.py:good --plan {d}/params.json", 1, "parameters of step replace_norm: sites: Field requ"),
    ("verify {d}/work.py:good --plan {d}/hub.json", 1, "parameters of step attention:sdpa"),
    ("verify {d}/work.py:good --plan {d}/no_key.json", 1, "the plan's dispatch row of gemm is damaged: not JS"),
    ("plan check {d}/no_key.json", 1, "the plan's dispatch row of gemm is damaged: not JSON"),
    ("db check {d}/none.db", 1, "no database at"),
    ("db export {d}/x --format magic --arch gfx942", 1, "magic"),
]


def arguments(text: str, folder: Path) -> list[str]:
    return [part.replace("{d}", str(folder)).replace("{0}", "\0").replace("~", " ") for part in text.split()]


def _files(folder: Path) -> list[str]:
    found = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return sorted(name for name in found if not name.startswith("empty/runs") and "__pycache__" not in name)


@pytest.mark.parametrize(("text", "code", "message"), ROWS, ids=[row[0] or "nothing" for row in ROWS])
def test_one_line_and_the_exit_code(
    folder: Path,
    tmp_path: Path,
    text: str,
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WAVECREST_DATABASE", str(tmp_path / "user.db"))
    monkeypatch.chdir(folder / "empty")
    before = _files(folder)
    assert main(arguments(text, folder)) == code
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, captured.err
    assert message in lines[0], lines[0]
    assert "Traceback" not in captured.err and "\x1b" not in captured.err
    # nothing half-written: no file, or those of a run that had begun
    assert _files(folder) == before


@pytest.mark.parametrize(
    "text", ["", "plan", "db", "isa", "--help", "optimize --help"], ids=lambda text: text or "bare"
)
def test_a_question_is_answered_with_help(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(text.split()) == 0
    captured = capsys.readouterr()
    assert "Usage:" in captured.out and not captured.err


MODEL = nn.Linear(4, 4).eval()
X = torch.zeros(2, 4)
# what is called -> text of the error, which is of a named class
CALLS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no module": (lambda _: wavecrest.optimize("model", X), "is a str, not a torch.nn.Module"),
    "a function": (lambda _: wavecrest.optimize(torch.relu, X), "not a torch.nn.Module"),
    "inputs of text": (lambda _: wavecrest.optimize(MODEL, "x"), "example inputs are a str"),
    "no inputs": (lambda _: wavecrest.optimize(MODEL, ()), "no tensor in the example inputs"),
    "inputs of None": (lambda _: wavecrest.optimize(MODEL, None), "example inputs are a NoneType"),
    "an empty tensor": (lambda _: wavecrest.optimize(MODEL, X[:0]), "is empty"),
    "no buckets": (lambda _: wavecrest.optimize(MODEL, wavecrest.Buckets()), "no example inputs"),
    "another device": (lambda _: wavecrest.optimize(MODEL, X.to("meta")), "is on meta but the model is on cpu"),
    "shapes that do not fit": (lambda _: wavecrest.optimize(MODEL, torch.zeros(2, 3), budget=1), "raised RuntimeError"),
    "level": (lambda _: wavecrest.optimize(MODEL, X, level=9), "level must be 1 to 5"),
    "min_gain": (lambda _: wavecrest.optimize(MODEL, X, min_gain=2.0), "min_gain must be"),
    "NaN": (lambda _: wavecrest.optimize(MODEL, X, min_gain=math.nan), "min_gain must be"),
    "no budget": (lambda _: wavecrest.optimize(MODEL, X, budget=0), "the budget must be positive"),
    "an endless budget": (lambda _: wavecrest.optimize(MODEL, X, budget=math.inf), "positive and finite"),
    "precision": (lambda _: wavecrest.optimize(MODEL, X, precision="int8"), "precision is one of"),
    "a file as folder": (lambda d: wavecrest.optimize(MODEL, X, out=d / "notes.txt"), "cannot write"),
    "a folder as bundle": (lambda d: wavecrest.optimize(MODEL, X, bundle=d), "is a folder"),
    "resume without a folder": (lambda _: wavecrest.optimize(MODEL, X, resume=True), "resume needs the folder"),
    "unknown step": (lambda _: _only("magic"), "no step magic"),
    "a file that is no plan": (lambda d: Plan.load(d / "bench.json"), "is not a wavecrest plan"),
    "no plan": (lambda d: Plan.load(d / "none.json"), "no plan at"),
    "a plan of another model": (lambda d: Plan.load(d / "plan.json").apply(nn.Linear(5, 5)), "with other modules"),
    "a plan of another chip": (lambda d: Plan.load(d / "other_arch.json").apply(MODEL), "measured on gfx942"),
    "a plan with a variable": (lambda d: Plan.load(d / "preload.json"), "table of variables to try"),
    "a plan with a hub kernel": (lambda d: Plan.load(d / "hub.json").apply(MODEL), "parameters of step"),
    "a plan with a bad key": (lambda d: Plan.load(d / "no_key.json").apply(MODEL), "dispatch row of gemm is damaged"),
    "a plan saved into a file": (lambda d: _plan_of(d).save(d / "notes.txt" / "p.json"), "cannot write"),
    "a report into a file": (lambda d: _report(d / "notes.txt" / "r.html"), "cannot write"),
    "an op of no name": (lambda _: wavecrest.ops.get("magic"), "no op named 'magic'"),
    "widths that differ": (lambda _: wavecrest.ops.rms_norm(X, torch.ones(5)), "weight"),
    "whole numbers": (lambda _: wavecrest.ops.rms_norm(X.long(), X[0].long()), ""),
    "a tensor of no dimension": (lambda _: wavecrest.ops.softmax(torch.tensor(1.0)), ""),
    "an unknown device": (lambda _: hardware.detect("tpu"), "unknown device 'tpu'"),
    "a device that is not here": (lambda _: hardware.detect("cuda:99"), "cuda:99 is not here"),
}  # fmt: skip


def _only(*steps: str) -> Any:
    return api.run(from_example(MODEL, X), api.Options(budget=0.1, steps=steps))


def _plan_of(folder: Path) -> Plan:
    return Plan.load(folder / "plan.json")


def _report(path: Path) -> None:
    api.Report(records.OptimizeRecord.model_validate(_run())).save(path)


@pytest.mark.parametrize("name", CALLS)
def test_the_api_raises_a_named_error(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavecrest.optimizer.measurer.LEAST_SECONDS", 0.05)
    call, message = CALLS[name]
    with pytest.raises(WavecrestError) as caught:
        call(folder)
    assert type(caught.value) is not WavecrestError
    assert message in str(caught.value) and str(caught.value).strip()
