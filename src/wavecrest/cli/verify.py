"""`wavecrest verify`: check a plan again, numerics and speed, in fresh processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from wavecrest.cli import _shared

if TYPE_CHECKING:
    from wavecrest.records import VerifyRecord


def run(spec: str, plan: Path, *, processes: int = 3, seconds: float = 5.0, device: str | None = None) -> VerifyRecord:
    """Check a plan in fresh processes; see `wavecrest.optimizer.verify.run`."""
    from wavecrest.optimizer import verify

    return verify.run(spec, plan, processes=processes, seconds=seconds, device=device)


def command(
    plan: Annotated[Path, typer.Option("--plan", help="The plan file to check.")],
    workload: _shared.WorkloadArgument = None,
    hf: _shared.HfOption = None,
    processes: Annotated[int, typer.Option("--processes", min=1, help="How many fresh processes a side.")] = 3,
    seconds: Annotated[float, typer.Option("--seconds", help="Sampling time a bucket and process.")] = 5.0,
    device: _shared.DeviceOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the result as JSON to this file.")] = None,
    json: _shared.JsonOption = False,
) -> int:
    """Check a plan again: answers and speed, in fresh processes.

    Exits with 2 if a process gives wrong answers, or if the optimized model is slower than the original.
    """
    from wavecrest import records

    spec = _shared.spec_of(workload, hf)
    with _shared.err.status(f"verifying in {processes} fresh processes a side"):
        record = run(spec, plan, processes=processes, seconds=seconds, device=device)
    if out is not None:
        records.save(record, out)
    if json:
        _shared.print_json(record)
        return 0 if record.passed else 2
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("process", "bucket", "original", "optimized", "speed-up", "answers"):
        table.add_column(name)
    for result in record.processes:
        for row in result.speed:
            wrong = [error for error in result.numerics if error.bucket == row.bucket and not error.passed]
            table.add_row(
                str(result.process),
                escape(row.bucket),
                f"{row.base_ms:.3f} ms",
                f"{row.new_ms:.3f} ms",
                f"{row.ratio:.3f}×",
                "[red]wrong[/]" if wrong else "[green]ok[/]",
            )
        for text in result.warnings:
            _shared.err.print(f"[yellow]process {result.process}:[/] {escape(text)}")
    _shared.out.print(table)
    if record.drift is not None and record.processes[1:]:
        _shared.out.print(f"[dim]the original changed by {record.drift:+.1%} from the first process to the last[/]")
    style = "green" if record.passed else "red"
    _shared.out.print(f"[{style}]{'passed' if record.passed else 'failed'}[/]: {escape(record.reason)}")
    return 0 if record.passed else 2
