"""`wavecrest bench W`: how long each bucket of a workload takes, and how sure that is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from wavecrest.cli import _shared
from wavecrest.errors import InvalidArgument, OutputError

if TYPE_CHECKING:
    from wavecrest.bench.baseline import OnBucketProgress
    from wavecrest.records import BenchRecord, BucketBench


def run(
    workload: str | None = None,
    *,
    hf: str | None = None,
    device: str | None = None,
    seconds: float = 5.0,
    output: Path | None = None,
    on_progress: OnBucketProgress | None = None,
) -> BenchRecord:
    """Measure every bucket of a workload; with `output` write the record there.

    Args:
        workload: file.py:function or package.module:function.
        hf: a local Hugging Face model folder, instead.
        device: as for `wavecrest.hardware.detect`.
        seconds: longest sampling time of a bucket; at least 30 samples are taken whatever it says.

    Raises:
        WorkloadError: the workload cannot be loaded or run.
        OutputError: `output` cannot be written; found before anything is measured.
        EnvironmentProblem: the device is not here, or runs out of memory.
    """
    if not seconds > 0:
        raise InvalidArgument(f"--seconds must be above zero, not {seconds:g}")
    from wavecrest import hardware, records
    from wavecrest.bench import baseline
    from wavecrest.workload import load

    if output is not None:
        if output.is_dir():
            raise OutputError(f"{output} is a folder; give the name of a file in it")
        records.prepare_folder(output.parent)
    target = None if device is None else hardware.detect(device).torch_name
    loaded = load(_shared.spec_of(workload, hf), device=target)
    record = baseline.record(
        loaded,
        hardware.detect(loaded.device),
        seconds_per_bucket=seconds,
        on_progress=on_progress,
    )
    if output is not None:
        records.save(record, output)
    return record


def _row(bench: BucketBench) -> tuple[str, str, str, str, str]:
    measured = bench.measurement
    if measured.unstable:
        median, mean = f"[yellow]unstable[/yellow]\n[dim]{measured.n} samples[/dim]", "–"
    else:
        low, high = _shared.format_time(measured.ci.low), _shared.format_time(measured.ci.high)
        median = f"{_shared.format_time(measured.median)}\n[dim]{low} to {high}[/dim]"
        mean = f"{_shared.format_time(measured.mean)} ± {_shared.format_time(measured.std)}"
    return (
        escape(bench.bucket),
        median,
        f"{mean}\n[dim]spread {measured.spread:.1%}[/dim]",
        _shared.format_time(measured.cold_start),
        _shared.format_bytes(bench.peak_memory_bytes),
    )


def show(record: BenchRecord) -> None:
    """Print a record for people."""
    device, versions = record.header.device, record.header.versions
    out = _shared.out
    out.print(
        f"{escape(record.workload)} · {record.parameters:,} parameters · {record.dtype} · {escape(device['name'])} "
        f"({device['arch']}) · torch {versions.torch}"
    )
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("bucket", overflow="fold", min_width=8)
    for title in ("median\n95 % interval", "mean ± std\nspread", "first call", "memory"):
        table.add_column(title, justify="right", no_wrap=True)
    for bench in record.buckets:
        table.add_row(*_row(bench))
    out.print(table)
    for bench in record.buckets:
        out.print(f"[dim]{escape(bench.bucket)}: {escape(_shared.shapes_line(bench.shapes))}[/dim]")
    clocks = sorted({bench.measurement.clock for bench in record.buckets})
    out.print(f"[dim]clock: {', '.join(clocks)}; memory: what one call adds at its peak[/dim]")
    if any(bench.measurement.unstable for bench in record.buckets):
        out.print(
            "[yellow]unstable[/yellow]: the samples differ by more than a tenth of their mean, so no time is given; "
            "stop other programs, or try a longer --seconds"
        )


def command(
    workload: _shared.WorkloadArgument = None,
    hf: _shared.HfOption = None,
    device: _shared.DeviceOption = None,
    seconds: Annotated[float, typer.Option(help="Longest sampling time of a bucket; 30 samples are the least.")] = 5.0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the result here, for `compare`.")
    ] = None,
    json: _shared.JsonOption = False,
) -> None:
    """Measure a workload as it is: time, its interval and spread, the first call, and memory, per bucket."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("samples"))
    with Progress(*columns, console=_shared.err, transient=True) as progress:
        task = progress.add_task("loading", total=None)

        def on_progress(bucket: str, completed: int, planned: int) -> None:
            progress.update(
                task, description=f"bench {escape(bucket)}", completed=completed, total=max(completed, planned)
            )

        record = run(workload, hf=hf, device=device, seconds=seconds, output=output, on_progress=on_progress)
    if json:
        _shared.print_json(record)
    else:
        show(record)
    if output is not None:
        _shared.err.print(f"written to {output}", highlight=False, soft_wrap=True)
