"""`wavecrest report`: turn the record of an optimize run into one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from wavecrest import records
from wavecrest.cli import _shared
from wavecrest.errors import OutputError, RecordError
from wavecrest.records import files

RECORD_NAME = "run.json"
REPORT_NAME = "report.html"


class Written(files.Model):
    """Where the report lies and what its first line says."""

    path: str
    bytes: int
    workload: str
    headline: str
    interval: str
    first_line: str


def find_record(run: Path) -> Path:
    """The record of a run: `run` itself, or run.json in the folder `run`.

    Raises:
        RecordError: there is neither.
    """
    if not run.is_dir():
        return run
    if not (run / RECORD_NAME).is_file():
        raise RecordError(f"no {RECORD_NAME} in {run}; `wavecrest optimize W -o {run}` writes one")
    return run / RECORD_NAME


def run(run: Path, output: Path | None = None) -> Written:
    """Write the report of a run.

    Args:
        run: the folder that `wavecrest optimize` wrote, or a run.json file.
        output: the HTML file, or a folder for report.html; None puts report.html beside the record.

    Raises:
        RecordError: no record there, or one that is damaged or not of an optimize run.
        OutputError: the file cannot be written.
    """
    from wavecrest import report

    source = find_record(run)
    record = records.load_as(source, records.OptimizeRecord)
    target = output or source.with_name(REPORT_NAME)
    if target.is_dir():
        target = target / REPORT_NAME
    if target.resolve() == source.resolve():
        raise OutputError(f"the report would overwrite its own record {source}; give another file with -o")
    files.prepare_folder(target.parent)
    report.write(record, target)
    head = report.headline(record)
    return Written(
        path=str(target),
        bytes=target.stat().st_size,
        workload=record.workload,
        headline=head.title,
        interval=head.interval,
        first_line=report.first_line(record),
    )


def command(
    run_folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder that `wavecrest optimize` wrote, or a run.json file.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The HTML file. Default: report.html beside the record."),
    ] = None,
    json: _shared.JsonOption = False,
) -> None:
    """Write a run's report: one HTML file with every step, plot and number, that opens offline."""
    written = run(run_folder, output)
    if json:
        _shared.print_json(written)
        return
    _shared.out.print(f"[bold]{escape(written.first_line)}[/]", soft_wrap=True)
    _shared.out.print(f"{escape(written.path)}  ({written.bytes / 1024:,.0f} KiB)", soft_wrap=True)
