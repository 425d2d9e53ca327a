"""The compact summary of a machine: a line for each case of its benchmarks and tuning runs, from the raw records.

    python -m benchmarks.summary            # writes benchmarks/results/<machine>.jsonl for each machine of evidence/

docs/generate.py makes docs/speed.md and docs/tuned.md of these files alone. A file is JSON lines. A line with `kind` is
a run: its record as rows of tables name it (path in evidence/, "@", hash of the content), its header, its totals. The
lines after it are its cases. Times are in µs, intervals are of 95 %.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wavecrest import records
from wavecrest.bench import ops as bench_ops
from wavecrest.bench import rates
from wavecrest.cli import _bench_ops
from wavecrest.measure.timing import Interval
from wavecrest.records import files
from wavecrest.tune import session

ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = ROOT / "evidence"
RESULTS = ROOT / "benchmarks" / "results"

Line = dict[str, Any]


def machines() -> list[str]:
    """The machines that something was timed on."""
    folders = [path for path in EVIDENCE.iterdir() if path.is_dir()]
    return sorted(path.name for path in folders if any(_paths(path, kind) for kind in ("bench", "tune")))


def text(machine: str) -> str:
    """The summary of a machine.

    Raises:
        RecordError: a record is damaged.
    """
    folder = EVIDENCE / machine
    lines = [line for path in _paths(folder, "bench") for line in _bench(path)]
    lines += [line for path in _paths(folder, "tune") for line in _tuned(path)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def _paths(folder: Path, command: str) -> list[Path]:
    """The records of a command by subject, of each the newest."""
    found = sorted(folder.glob(f"*_{command}_*{files.LINES}"))
    newest = {path.name.partition("_")[2]: path for path in found}
    return [newest[name] for name in sorted(newest)]


def _shown(command: str) -> str:
    """A command without the scratch folder of whoever ran it."""
    return re.sub(r"(?<!\S)\.exp/\S*/", "…/", command)


def _header(path: Path, record: records.OpBenchRecord | records.TuneRecord) -> Line:
    header = record.header
    return {
        "kind": record.kind, "record": session.named(path), "device": header.device["name"], "created": header.created,
        "commit": header.commit, "torch": header.versions.torch, "triton": header.versions.triton,
        "command": _shown(header.command),
    }  # fmt: skip


def _us(ms: float | None) -> float | None:
    return None if ms is None else round(ms * 1e3, 4)


def _interval(ci: Interval | None, scale: float = 1.0) -> list[float] | None:
    return None if ci is None else [round(ci.low * scale, 4), round(ci.high * scale, 4)]


def _bench(path: Path) -> Iterator[Line]:
    record = records.load_as(path, records.OpBenchRecord)
    for bench in record.ops:
        sizes = "x".join(next((case.sizes for case in bench.cases if case.sizes), ()))
        yield {
            **_header(path, record), "op": bench.op, "peers": record.peers, "clock": bench.clock,
            "copy_gbps": round(bench.copy_gbps, 2), "summary": _bench_ops.summary(bench, record.peak_gbps),
            **({"sizes": sizes} if sizes else {}),
        }  # fmt: skip
        for case in bench.cases:
            if not case.impls or case.impls[0].ms is None:
                yield {"case": case.case, "problem": case.problem or "our implementation was not timed"}
                continue
            ours, *others = case.impls
            share = bench_ops.percent(bench, case, ours)
            yield {
                "case": case.case, "backend": case.backend, "us": _us(ours.ms), "ci": _interval(ours.ci, 1e3),
                "rounds": case.rounds, "copy_us": _us(case.copy_ms),
                "percent_of_copy": None if share is None else round(share, 4),
                "peers": {impl.name: [_us(impl.ms), _interval(impl.ci, 1e3)] for impl in others},
                "ratio": None if case.ratio is None else round(case.ratio, 4), "ratio_ci": _interval(case.ci),
                **_limit(bench.op, case, ours.ms, record.peak_gbps),
            }  # fmt: skip


def _limit(op: str, case: records.OpCase, ms: float, peak_gbps: float | None) -> Line:
    """A case that bandwidth does not limit: the tokens of a recurrence, or the rate of arithmetic."""
    if (count := rates.tokens(op, case)) is not None:
        return {"tokens": count}
    rate = rates.of_arithmetic(case, ms, peak_gbps)
    if rate is None or rate.share is None:
        return {}
    return {"tflops": round(rate.value, 4), "percent_of_peak": round(100 * rate.share, 4)}


def _tuned(path: Path) -> Iterator[Line]:
    record = records.load_as(path, records.TuneRecord)
    yield {
        **_header(path, record), "op": record.op, "clock": next((key.clock for key in record.keys if key.clock), ""),
        "kernels": record.compilation.kernels, "candidates": sum(len(key.candidates) for key in record.keys),
        "cases": len(record.keys), "seconds": record.seconds,
    }  # fmt: skip
    for key in record.keys:
        name = _product(key) if record.op == "gemm" else key.case
        if key.us is None:
            yield {"case": name, "problem": key.problem}
            continue
        # the fastest that was found right, also where it was dropped early; its time is then that of the quick round
        own = [
            (one.ms or one.quick_ms or 0.0, one.backend)
            for one in key.candidates
            if one.backend.startswith("triton") and one.status in ("timed", "won", "dropped") and one.quick_ms
        ]
        least, backend = min(own, default=(None, None))
        (won,) = (one for one in key.candidates if one.status == "won")
        yield {
            "case": name, "backend": key.backend, "config": key.config, "us": round(key.us, 4),
            "ci": _interval(won.ci, 1e3), "rounds": key.rounds,
            "native_us": None if key.native_us is None else round(key.native_us, 4),
            "ratio": None if key.ratio is None else round(key.ratio, 4), "ratio_ci": _interval(key.ci),
            "own_backend": backend, "own_us": _us(least),
        }  # fmt: skip


def _product(key: records.TunedKey) -> str:
    """M×N×K and kind of a GEMM: the case's name, or, as a recorded untuned call has no name, made from the key."""
    if not key.case.startswith("rows="):
        return key.case
    part = key.key
    kinds = {"bfloat16": "bf16", "int8": "weight int8", "float8_e4m3fn": "weight fp8"}
    gated = str(part["activation"] or "").endswith("_and_mul")
    words = [kinds.get(str(part["b"]), str(part["b"]))]
    words += [word for word, there in (
        ("norm", str(part["scales"]).startswith("norm")), ("bias", part["bias"]), ("gated", gated),
        ("residual", part["residual"]),
    ) if there]  # fmt: skip
    return f"{part['rows']}x{int(part['columns'] or 0) * (1 + gated)}x{part['k']} {' '.join(words)}"


def main() -> None:
    """Write the summaries."""
    RESULTS.mkdir(exist_ok=True)
    for machine in machines():
        files.write_text(RESULTS / f"{machine}.jsonl", text(machine))


if __name__ == "__main__":
    main()
