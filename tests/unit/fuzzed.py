"""Mutated files of every kind that wavecrest reads: each is read, or refused by a named error, and nothing else.

`python -m tests.unit.fuzzed COUNT [SEED]` runs many; `test_fuzz.py` runs some in the suite.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wavecrest import hardware, records
from wavecrest.bench import shapes
from wavecrest.dispatch.tuned import aiter_csv, published, table, tunable_op, untuned_calls
from wavecrest.errors import WavecrestError
from wavecrest.measure import timing
from wavecrest.measure.workload import from_example
from wavecrest.models.xlstm.config import xLSTMLargeConfig
from wavecrest.optimizer import bundle
from wavecrest.optimizer.plan import Plan
from wavecrest.optimizer.recompute import recompute
from wavecrest.profile import trace
from wavecrest.records import StepOutcome, archive, provenance

MODEL = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
FIELDS = ("op", "rows", "columns")
# values that break readers which were not written for them
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1 << 62, 1 << 80, 0.5, 1e308, "", "\x1b[2J", "[/x]", "../../x", "NaN", "Infinity", "a\0b", [],
    {}, [[]], {"a": 1}, "9" * 30, "\ud800", ["x"] * 9,
)  # fmt: skip
JUNK = (b"\xff", b"\x00", b"\xef\xbb\xbf", b'"', b"{", b"[" * 200, b"NaN", b"1e999", b"," * 9, b"\\ud800", b"\r\n")


def _plan() -> str:
    plan = Plan.start(from_example(MODEL, torch.zeros(2, 4)), hardware.cpu(), {"default": {"args[0]": "2x4"}})
    outcome = StepOutcome(
        id="replace_norm", title="t", level=4, verdict="kept", reason="r", params={"sites": ["1"], "routes": []}
    )
    row = {"op": "rms_norm", "key": "[1, 2]", "backend": "torch", "config": {"BLOCK_N": 64}, "source": "exact"}
    setting = {"name": "OMP_WAIT_POLICY", "value": "active", "ratio": 1.1}
    more = {"steps": [outcome], "stack": ["replace_norm"], "environment": [setting]}
    return Plan.model_validate(
        {**plan.model_dump(), **more, "dispatch": [{**row, "reason": "", "calls": 1}]}
    ).model_dump_json()


def _record() -> str:
    return records.OptimizeRecord(
        header=provenance.header(hardware.cpu()), workload="m", spec=None, dtype="float32", parameters=1, level=1,
        min_gain=0.02, budget_seconds=1.0, baseline=[],
        steps=[StepOutcome(id="a", title="t", level=1, verdict="tie", reason="r")],
    ).model_dump_json()  # fmt: skip


def _measured_record() -> str:
    """A record with samples, whose figures can be computed again."""
    held = records.OptimizeRecord.model_validate_json(_record())
    interval = timing.Interval(1.0, 1.0)
    times = [1.0] * 6
    measured = timing.Measurement(tuple(times), tuple(times), 1.0, "host wall", interval)
    held.baseline = [records.BucketBench(bucket="b", measurement=measured, shapes={}, peak_memory_bytes=None)]
    held.steps = [
        StepOutcome(id="replace_norm", title="t", level=4, verdict="kept", reason="r", ratio=1.0, ci=interval),
        StepOutcome(id="environment", title="t", level=1, verdict="tie", reason="r"),
    ]
    names = (
        ("resolution", 1),
        ("replace_norm", 1),
        ("result", 1),
        ("result", 2),
        ("result", 3),
        ("environment A=b", 1),
    )
    held.samples = [
        records.Samples(step=name, attempt=attempt, bucket="b", base=times, new=times) for name, attempt in names
    ]
    held.resolution = {"b": 0.0}
    held.gate = records.GateSummary(seed=1, rules=[], buckets=[records.GateBucket(bucket="b", values=["example"])])
    speed = records.BucketSpeed(bucket="b", base_ms=1.0, new_ms=1.0, ratio=1.0, ci=interval, blocks=3, clock="c")
    held.result = records.Result(
        verdict="faster", ratio=1.0, ci=interval, unit="phases", drift=0.0, speed=[speed], numerics=[], quality=[]
    )
    return held.model_dump_json()


def _manifest() -> str:
    hashes = {name: hashlib.sha256(_members()[name]).hexdigest() for name in (bundle.RUN, bundle.PLAN)}
    return bundle.Manifest(
        created="now", wavecrest="0", source="s", members=hashes, sources={"w.py": "0" * 64}, weights="0" * 64,
        inputs=[bundle.InputHashes(bucket="b", example={"x": "0" * 64}, drawn=[("noise", "0" * 64)])], seed=1,
    ).model_dump_json()  # fmt: skip


@cache
def _members() -> dict[str, bytes]:
    return {bundle.RUN: _measured_record().encode(), bundle.PLAN: _plan().encode()}


def _use_manifest(path: Path) -> None:
    packed = path.with_suffix(".zip")
    archive.write(packed, {bundle.MANIFEST: path.read_bytes(), **_members()})
    bundle.read(packed)


def _use_samples(path: Path) -> None:
    record = records.load_as(path, records.OptimizeRecord)
    recompute(record, Plan.of_value(json.loads(_members()[bundle.PLAN]), "plan"))


def _use_archive(path: Path) -> None:
    """The bytes of an archive, which the text stands for."""
    packed = path.with_suffix(".zip")
    packed.write_bytes(path.read_bytes().decode(errors="replace").encode("latin-1", errors="replace"))
    bundle.read(packed)


def _archive() -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "b.zip")
        archive.write(path, {bundle.MANIFEST: _manifest().encode(), **_members()})
        return path.read_bytes().decode("latin-1")


def _use_plan(path: Path) -> None:
    Plan.load(path).apply(MODEL)


CONFIG = {"embedding_dim": 64, "num_heads": 4, "num_blocks": 2, "vocab_size": 97, "qk_dim_factor": 0.5, "eps": 1e-6}
# name of the file -> (its text, what reads it)
FILES: dict[str, tuple[Callable[[], str], Callable[[Path], object]]] = {
    "plan.json": (_plan, _use_plan),
    "run.json": (_record, records.load),
    "bundle.json": (_manifest, _use_manifest),
    "samples.json": (_measured_record, _use_samples),
    "archive.txt": (_archive, _use_archive),
    "trace.json": (lambda: json.dumps({"traceEvents": [{"name": "a", "ts": 1, "dur": 2}]}), trace.load),
    "config.json": (lambda: json.dumps(CONFIG), lambda path: xLSTMLargeConfig.from_folder(path.parent)),
    "config.yaml": (
        lambda: "".join(f"{name}: {value}\n" for name, value in CONFIG.items()),
        lambda path: xLSTMLargeConfig.from_folder(path.parent),
    ),
    "op.csv": (
        lambda: ",".join((*FIELDS, *table.COLUMNS)) + "\na,1,2,torch,BLOCK=64,1.5,2.5,r.json\n",
        lambda path: table.read(path, FIELDS),
    ),
    "prior.csv": (
        lambda: ",".join((*FIELDS, *published.COLUMNS)) + "\na,1,2,torch,words,somebody\n",
        lambda path: published.read(path, FIELDS),
    ),
    "tunable.csv": (
        lambda: "Validator,PT_VERSION,2.5\nGemmTunableOp_float_TN,tn_1_2_3,Default,0.5\n", tunable_op.read,
    ),
    "aiter.csv": (
        lambda: ",".join(aiter_csv.COLUMNS) + "\n" + ",".join(["1"] * len(aiter_csv.COLUMNS)) + "\n",
        lambda path: list(aiter_csv.read([path])),
    ),
    "misses.jsonl": (
        lambda: json.dumps({"op": "a", "arch": "b", "key": {"rows": 1}, "backend": "c", "source": "d"}) + "\n",
        untuned_calls.read,
    ),
    "shapes.csv": (lambda: "op,M,N,K,dtype\ngemm,1,2,3,bf16\n", lambda path: shapes.read(path, "cpu")),
}  # fmt: skip


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    for name in list(value) if isinstance(value, dict) else range(len(value)):
        found.append((value, name))
        if isinstance(value[name], dict | list):
            _places(value[name], found)
    return found


def mutated(text: str, chance: random.Random) -> bytes:
    """The bytes of a file with one to four changes: of its values where it is JSON, else of its bytes."""
    if text.startswith("{") and chance.random() < 0.6:
        document = json.loads(text)
        for _ in range(chance.randint(1, 4)):
            places = _places(document, [])
            if not places:
                break
            within, name = chance.choice(places)
            kind = chance.randrange(4)
            if kind == 0:
                del within[name]
            elif kind == 1 and isinstance(within, dict):
                within[str(chance.choice(ODD))] = within[name]
            else:
                within[name] = copy.deepcopy(chance.choice(ODD))
        return json.dumps(document).encode()
    held = bytearray(text.encode())
    for _ in range(chance.randint(1, 4)):
        at, kind = chance.randrange(len(held) + 1), chance.randrange(4)
        if kind == 0:
            del held[at : at + chance.randint(1, 20)]
        elif kind == 1:
            held[at:at] = chance.choice(JUNK)
        elif kind == 2 and at < len(held):
            held[at] ^= 1 << chance.randrange(8)
        else:
            held[at:at] = str(chance.choice(ODD)).encode(errors="replace")
    return bytes(held)


def run(count: int, seed: int) -> tuple[Counter[str], dict[str, bytes]]:
    """Read `count` mutated files; how each ended, and one file for each kind of unnamed error."""
    chance = random.Random(seed)
    texts = {name: make() for name, (make, _) in FILES.items()}
    ends: Counter[str] = Counter()
    raw: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            name = list(FILES)[number % len(FILES)]
            path = Path(folder, name)
            held = mutated(texts[name], chance)
            path.write_bytes(held)
            try:
                FILES[name][1](path)
                ends["read"] += 1
            except WavecrestError as error:
                ends[type(error).__name__] += 1
            except Exception as error:
                kind = f"{name}: {type(error).__name__}: {str(error)[:120]}"
                ends[f"unnamed: {name} {type(error).__name__}"] += 1
                raw.setdefault(kind, held)
            path.unlink()
    return ends, raw


if __name__ == "__main__":
    began = time.perf_counter()
    outcome, unnamed = run(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    for end, times in outcome.most_common():
        sys.stdout.write(f"{times:8} {end}\n")
    for text, bytes_ in unnamed.items():
        sys.stdout.write(f"{text}\n    {bytes_[:300]!r}\n")
    sys.stdout.write(f"{time.perf_counter() - began:.0f} s\n")
    sys.exit(1 if unnamed else 0)
