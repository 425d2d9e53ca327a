"""`wavecrest compare A B`: is B slower than A? The regression guard for continuous integration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import pydantic
import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from wavecrest.cli import _shared
from wavecrest.errors import RecordError, Refused, Regression

if TYPE_CHECKING:
    from wavecrest.measure.timing import Measurement
    from wavecrest.records import BenchRecord

Verdict = Literal["faster", "slower", "tie", "unstable"]
_STYLES: dict[Verdict, str] = {"faster": "green", "slower": "red", "tie": "default", "unstable": "yellow"}


class BucketChange(pydantic.BaseModel):
    """One bucket: medians in ms, `ratio` of A's time to B's (above 1: B is faster) with its 95 % interval.

    `ratio`, `low` and `high` are None where one of the two measurements is unstable. `regression` says that B is slower
    by more than the limit with the whole interval.
    """

    bucket: str
    a_ms: float | None
    b_ms: float | None
    ratio: float | None
    low: float | None
    high: float | None
    verdict: Verdict
    regression: bool


class CompareRecord(pydantic.BaseModel):
    """`wavecrest compare`."""

    kind: Literal["compare"] = "compare"
    a: str
    b: str
    workload: str
    fail_over: float | None
    buckets: list[BucketChange]
    warnings: list[str]
    outcome: Literal["ok", "regression", "not judged"]
    reason: str


def run(a: Path, b: Path, *, fail_over: float | None = None) -> CompareRecord:
    """Compare two files that `bench` wrote.

    Args:
        a: the base.
        b: the file compared with it.
        fail_over: largest slowdown that passes, 0.03 for 3 %; None compares without judging.

    Raises:
        RecordError: a file is damaged, foreign or of another kind, or the two do not measure the same thing.
    """
    from wavecrest import records

    old, new = records.load_as(a, records.BenchRecord), records.load_as(b, records.BenchRecord)
    warnings = _check_match(old, new, a, b)
    latest = {bench.bucket: bench for bench in new.buckets}
    changes = []
    for bench in old.buckets:
        base, other = bench.measurement, latest[bench.bucket].measurement
        changes.append(_change(bench.bucket, base, other, fail_over))
    unstable = [change.bucket for change in changes if change.verdict == "unstable"]
    slower = [change for change in changes if change.regression]
    outcome: Literal["ok", "regression", "not judged"] = "ok"
    reason = "compared without a limit" if fail_over is None else f"no bucket is slower by more than {fail_over:.1%}"
    if slower:
        outcome = "regression"
        names = ", ".join(f"{change.bucket} ({_slowdown(change)})" for change in slower)
        reason = f"slower by more than {fail_over:.1%}: {names}"
    elif unstable and fail_over is not None:
        outcome = "not judged"
        reason = f"unstable, so not judged: {', '.join(unstable)}; measure again on a quiet machine, or longer"
    return CompareRecord(
        a=str(a),
        b=str(b),
        workload=old.workload,
        fail_over=fail_over,
        buckets=changes,
        warnings=warnings,
        outcome=outcome,
        reason=reason,
    )


def _change(bucket: str, base: Measurement, other: Measurement, fail_over: float | None) -> BucketChange:
    from wavecrest.measure import timing

    if base.unstable or other.unstable:
        return BucketChange(
            bucket=bucket,
            a_ms=None if base.unstable else base.median,
            b_ms=None if other.unstable else other.median,
            ratio=None,
            low=None,
            high=None,
            verdict="unstable",
            regression=False,
        )
    ratio, ci = timing.bootstrap_unpaired(base.samples, other.samples)
    verdict: Verdict = "faster" if ci.low > 1 else "slower" if ci.high < 1 else "tie"
    return BucketChange(
        bucket=bucket,
        a_ms=base.median,
        b_ms=other.median,
        ratio=ratio,
        low=ci.low,
        high=ci.high,
        verdict=verdict,
        regression=fail_over is not None and ci.high < 1 / (1 + fail_over),
    )


def _slowdown(change: BucketChange) -> str:
    if change.ratio is None or change.high is None:
        return "unstable"
    return f"{1 / change.ratio - 1:.1%}, at least {1 / change.high - 1:.1%}"


def _check_match(old: BenchRecord, new: BenchRecord, a: Path, b: Path) -> list[str]:
    """Raise if the two do not measure the same thing; return the other differences."""
    if old.workload != new.workload:
        raise RecordError(f"{a} measured {old.workload}, {b} measured {new.workload}: these do not compare")
    later = {bench.bucket: bench for bench in new.buckets}
    missing = [bench.bucket for bench in old.buckets if bench.bucket not in later]
    if missing:
        raise RecordError(f"{b} lacks the bucket {', '.join(missing)} of {a}; measure the same buckets")
    for bench in old.buckets:
        other = later[bench.bucket]
        if bench.shapes != other.shapes:
            raise RecordError(f"bucket {bench.bucket} has other input shapes in {b} than in {a}")
        if bench.measurement.clock != other.measurement.clock:
            raise RecordError(
                f"bucket {bench.bucket}: {a} has {bench.measurement.clock} times, {b} {other.measurement.clock} times"
            )
    warnings = []
    extra = [bucket for bucket in later if all(bench.bucket != bucket for bench in old.buckets)]
    if extra:
        warnings.append(f"not compared, as {a} has no such bucket: {', '.join(extra)}")
    facts = [("dtype", old.dtype, new.dtype), ("parameters", old.parameters, new.parameters)]
    for field in ("name", "arch", "compute_units", "driver"):
        facts.append((f"device {field}", old.header.device.get(field), new.header.device.get(field)))
    before, after = old.header.versions.model_dump(), new.header.versions.model_dump()
    facts += [(name, before[name], after[name]) for name in before if name != "wavecrest"]
    names = sorted({*old.header.environment, *new.header.environment})
    facts += [(name, old.header.environment.get(name), new.header.environment.get(name)) for name in names]
    warnings += [
        f"{what} differs: {first or 'unset'} in A, {second or 'unset'} in B"
        for what, first, second in facts
        if first != second
    ]
    return warnings


def show(record: CompareRecord) -> None:
    """Print a comparison for people."""
    out = _shared.out
    out.print(f"{escape(record.workload)}: B = {escape(record.b)} against A = {escape(record.a)}", soft_wrap=True)
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("bucket", overflow="fold", min_width=8)
    for title in ("A", "B", "speed-up", "95 % interval"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for change in record.buckets:
        style = _STYLES[change.verdict]
        ratio = f"{change.ratio:.3f}×" if change.ratio is not None else "–"
        interval = f"{change.low:.3f} to {change.high:.3f}" if change.ratio is not None else "–"
        times = ["unstable" if ms is None else _shared.format_time(ms) for ms in (change.a_ms, change.b_ms)]
        over = "\nover the limit" if change.regression else ""
        table.add_row(escape(change.bucket), *times, ratio, interval, f"[{style}]{change.verdict}[/{style}]{over}")
    _shared.print_table(table)
    for warning in record.warnings:
        out.print(f"[yellow]![/yellow] {escape(warning)}")
    out.print("[dim]The interval covers the noise inside each run, not what differs between two runs.[/dim]")
    if record.outcome == "ok":
        out.print(escape(record.reason))


def command(
    a: Annotated[Path, typer.Argument(metavar="A", help="The base: a file written by `wavecrest bench -o`.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The file compared with it.")],
    fail_over: Annotated[
        str | None,
        typer.Option("--fail-over", metavar="SHARE", help="Return 2 if a bucket of B is slower by more, such as 3%."),
    ] = None,
    json: _shared.JsonOption = False,
) -> None:
    """Compare two results of `bench`, bucket by bucket: faster, slower, or a tie.

    With --fail-over it returns 2 if a bucket's whole interval lies beyond the limit, or if it is unstable.
    """
    limit = None if fail_over is None else _shared.parse_percent(fail_over)
    record = run(a, b, fail_over=limit)
    if json:
        _shared.print_json(record)
    else:
        show(record)
    if record.outcome == "regression":
        raise Regression(record.reason)
    if record.outcome == "not judged":
        raise Refused(record.reason)
