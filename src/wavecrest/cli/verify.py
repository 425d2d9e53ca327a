"""`wavecrest verify`: check a plan, or a proof bundle, again: numerics and speed, in fresh processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from wavecrest.cli import _shared
from wavecrest.errors import InvalidArgument

if TYPE_CHECKING:
    from wavecrest.records import BundleRecord, VerifyRecord

# fresh processes a side for a plan, unless told otherwise
PROCESSES = 3
# exit codes by outcome of a bundle
CODES = {"confirmed": 0, "not confirmed": 2, "other machine": 3}
STYLES = {"confirmed": "green", "not confirmed": "red", "other machine": "yellow"}
MARKS = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[dim]·[/]"}


def run(spec: str, plan: Path, *, processes: int = 3, seconds: float = 5.0, device: str | None = None) -> VerifyRecord:
    """Check a plan in fresh processes; see `wavecrest.optimizer.verify.run`."""
    from wavecrest.optimizer import verify

    return verify.run(spec, plan, processes=processes, seconds=seconds, device=device)


def run_bundle(
    bundle: Path,
    spec: str | None = None,
    *,
    processes: int | None = None,
    seconds: float = 5.0,
    device: str | None = None,
    on_phase: Callable[[str], None] | None = None,
) -> BundleRecord:
    """Check a proof bundle; see `wavecrest.optimizer.confirm.run`."""
    from wavecrest.optimizer import confirm

    return confirm.run(bundle, spec, processes=processes, seconds=seconds, device=device, on_phase=on_phase)


def command(
    plan: Annotated[Path | None, typer.Option("--plan", help="The plan file to check.")] = None,
    bundle: Annotated[
        Path | None, typer.Option("--bundle", metavar="FILE", help="The proof bundle to check; W is then optional.")
    ] = None,
    workload: _shared.WorkloadArgument = None,
    hf: _shared.HfOption = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", min=1, help="Fresh processes a side. Default: 3; for a bundle until they decide."),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Sampling time a bucket and process.")] = 5.0,
    device: _shared.DeviceOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the result as JSON to this file.")] = None,
    json: _shared.JsonOption = False,
) -> int:
    """Check a plan again: answers and speed, in fresh processes. Or check a proof bundle.

    Exits with 2 if a process gives wrong answers, or if the optimized model is slower than the original. For a bundle
    0 is confirmed, 2 not confirmed, 3 other machine: what does not depend on the machine holds. Without W its figures
    are computed again from its samples, with W the answers and the speed are checked too.
    """
    from wavecrest import records

    if (plan is None) == (bundle is None):
        raise InvalidArgument("give what to check: --plan FILE or --bundle FILE")
    if not 0 < seconds < float("inf"):
        raise InvalidArgument(f"--seconds must be positive and finite, not {seconds}")
    record: VerifyRecord | BundleRecord
    if bundle is not None:
        spec = None if workload is None and hf is None else _shared.spec_of(workload, hf)
        with _shared.err.status("checking the bundle") as status:
            record = run_bundle(
                bundle,
                spec,
                processes=processes,
                seconds=seconds,
                device=device,
                on_phase=lambda text: status.update(escape(text)),
            )
        code = CODES[record.outcome]
    else:
        assert plan is not None
        count = processes or PROCESSES
        with _shared.err.status(f"verifying in {count} fresh processes a side"):
            record = run(_shared.spec_of(workload, hf), plan, processes=count, seconds=seconds, device=device)
        code = 0 if record.passed else 2
    if out is not None:
        records.save(record, out)
    if json:
        _shared.print_json(record)
    elif isinstance(record, records.BundleRecord):
        print_bundle(record)
    else:
        print_plan(record)
    return code


def print_plan(record: VerifyRecord) -> None:
    """The processes and the verdict."""
    print_processes(record)
    style = "green" if record.passed else "red"
    _shared.out.print(f"[{style}]{'passed' if record.passed else 'failed'}[/]: {escape(record.reason)}")


def print_processes(record: VerifyRecord) -> None:
    """A row for each process and bucket."""
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
    _shared.print_table(table)
    if record.drift is not None and record.processes[1:]:
        _shared.out.print(f"[dim]the original changed by {record.drift:+.1%} from the first process to the last[/]")


def print_bundle(record: BundleRecord) -> None:
    """The claim, what was checked and what was not, and the outcome."""
    out = _shared.out
    out.print(f"bundle  {escape(record.bundle)}  [dim]sha256 {escape(record.content)}…[/]")
    out.print(f"claims  {escape(record.claim)}  [dim]({escape(record.workload)})[/]")
    if record.verified is not None:
        print_processes(record.verified)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in record.checks:
        text = row.detail if row.passed is not None else f"not checked: {row.detail}"
        table.add_row(MARKS[row.passed], escape(row.what), escape(text))
    _shared.print_table(table)
    out.print(f"[{STYLES[record.outcome]}]{record.outcome}[/]: {escape(record.reason)}")
