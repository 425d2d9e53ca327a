"""`wavecrest profile`: where the time goes, and where Dynamo splits the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from wavecrest.cli import _shared

if TYPE_CHECKING:
    from wavecrest.records import BucketProfile, OpTime, ProfileRecord

# rows of the table of ops; profile.json has them all
TOP = 12
# the length of bars, by the width of a terminal from which they have it
BARS = {80: 24, 60: 10}


def run(
    spec: str,
    *,
    device: str | None = None,
    out: Path | None = None,
    breaks: bool = True,
    calls: int = 5,
) -> ProfileRecord:
    """Profile every bucket of a workload; with `breaks`, also trace it with Dynamo.

    Args:
        spec: file.py:function, package.module:function or hf:DIR.
        device: torch device name to build the workload on.
        out: folder for profile.json and one Chrome trace a bucket; None writes nothing.
        calls: steady calls to trace, a bucket.

    Raises:
        WorkloadError: the workload cannot be loaded or run.
        EnvironmentProblem: the device is not here.
        OutputError: `out` cannot be written.
    """
    from wavecrest import hardware, profile, records
    from wavecrest.graphs.breaks import find_breaks
    from wavecrest.measure import workload
    from wavecrest.records import files

    if device is not None:
        device = hardware.detect(device).torch_name
    if out is not None:
        files.prepare_folder(out)
    loaded = workload.load(spec, device=device)
    ceilings = profile.measure_ceilings(loaded.device, loaded.dtype)
    buckets = profile.profile_workload(loaded, calls=calls, ceilings=ceilings, traces=out)
    if breaks:
        graphs, found, note = find_breaks(loaded.model, loaded.buckets)
    else:
        graphs, found, note = 0, [], "not looked for (--no-breaks)"
    record = profile.record(loaded, buckets, ceilings=ceilings, graphs=graphs, breaks=found, breaks_note=note)
    if out is not None:
        records.save(record, out / "profile.json")
    return record


def command(
    workload: _shared.WorkloadArgument = None,
    hf: _shared.HfOption = None,
    device: _shared.DeviceOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for profile.json and the Chrome traces.")
    ] = None,
    breaks: Annotated[bool, typer.Option("--breaks/--no-breaks", help="Also look for graph breaks.")] = True,
    calls: Annotated[int, typer.Option("--calls", help="Steady calls to trace for each bucket.")] = 5,
    json: _shared.JsonOption = False,
) -> int:
    """Show where the time goes: categories, idle time, top shapes against the roofline, graph breaks, and the causes.

    Times are per call. Wall time is measured without the profiler, the rest comes from its trace. -o writes traces to
    open in Perfetto or chrome://tracing.
    """
    with _shared.err.status("profiling"):
        record = run(_shared.spec_of(workload, hf), device=device, out=out, breaks=breaks, calls=calls)
    if json:
        _shared.print_json(record)
        return 0
    print_record(record)
    if out is not None:
        _shared.err.print(
            f"[dim]wrote {escape(str(out))}/profile.json and the Chrome traces beside it[/]", soft_wrap=True
        )
    return 0


def print_record(record: ProfileRecord) -> None:
    """The record for people."""
    console = _shared.out
    device = record.header.device
    console.print(f"[bold]{escape(record.workload)}[/]  {escape(str(device['name']))} ({escape(str(device['arch']))})")
    for bucket in record.buckets:
        _print_bucket(bucket)
    _print_ceilings(record)
    _print_breaks(record)
    _print_causes(record)


def _print_bucket(bucket: BucketProfile) -> None:
    console = _shared.out
    console.print()
    if bucket.idle_ms is None:
        console.print(
            f"[bold]{escape(bucket.bucket)}[/]  wall {ms(bucket.wall_ms)} ({ms(bucket.kernel_ms)} while traced)"
        )
    else:
        idle = bucket.idle_ms / bucket.wall_ms if bucket.wall_ms else 0.0
        console.print(
            f"[bold]{escape(bucket.bucket)}[/]  wall {ms(bucket.wall_ms)}, kernels {ms(bucket.kernel_ms)}, "
            f"idle {idle:.0%}, {bucket.launches} launches"
        )
    categories = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    bar = next((size for width, size in BARS.items() if console.width >= width), 0)
    categories.add_column(no_wrap=True)
    if bar:
        categories.add_column(no_wrap=True, min_width=bar)
    for _ in range(3):
        categories.add_column(no_wrap=True, justify="right")
    for entry in bucket.categories:
        bars = [f"[cyan]{'█' * max(1, round(entry.share * bar))}[/]"] if bar else []
        cells = [f"{entry.share:.1%}", ms(entry.ms), _count(entry.calls, "call")]
        categories.add_row(escape(entry.category), *bars, *cells)
    _shared.print_table(categories)
    if bucket.uncategorized:
        shown = ", ".join(bucket.uncategorized[:6]) + (", …" if len(bucket.uncategorized) > 6 else "")
        console.print(f"[dim]other: {escape(shown)}[/]")
    _print_ops(bucket.ops)


def _print_ops(ops: list[OpTime]) -> None:
    console = _shared.out
    wide = console.width >= 110
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("op", overflow="ellipsis", no_wrap=True, max_width=44 if wide else 20)
    # they get the width that the figures leave, and no size of them is parted
    sizes = max((len(word) for op in ops[:TOP] for word in op.shapes.split()), default=0)
    table.add_column("shapes", overflow="fold", min_width=sizes)
    for header in ("calls", "time", "share", "roofline"):
        table.add_column(header, justify="right", no_wrap=True)
    if wide:
        table.add_column("kernel", overflow="ellipsis", no_wrap=True, max_width=30)
    for op in ops[:TOP]:
        name = op.name.removeprefix("aten::")
        cells = [escape(name), escape(op.shapes), str(op.calls), ms(op.ms), f"{op.share:.1%}", _roofline(op)]
        table.add_row(*cells, *([escape(op.kernels[0] if op.kernels else "")] if wide else []))
    console.print()
    _shared.print_table(table)
    if len(ops) > TOP:
        rest = sum(op.share for op in ops[TOP:])
        console.print(f"[dim]and {len(ops) - TOP} more with {rest:.1%} of the time[/]")


def _roofline(op: OpTime) -> str:
    if op.roofline_percent is None:
        return "–"
    limit = {"compute": "cmp", "cache": "cache"}.get(op.bound or "", "mem")
    return f"{op.roofline_percent:.0f}% {limit}{'' if op.below_ceiling else ' !'}"


def ms(value: float) -> str:
    """A time in ms with three significant digits or so."""
    return f"{value:.1f} ms" if value >= 100 else f"{value:.2f} ms" if value >= 1 else f"{value:.3f} ms"


def _print_ceilings(record: ProfileRecord) -> None:
    if record.ceilings is None:
        _shared.out.print("\n[dim]roofline: no ceiling is known for this device[/]")
        return
    peaks = ", ".join(f"{escape(name)} {peak:.3g} TFLOP/s" for name, peak in record.ceilings.peak.items())
    _shared.out.print(
        f"\n[dim]roofline, {escape(record.ceilings.source)}: {record.ceilings.bandwidth:.0f} GB/s, {peaks}; "
        "cmp and mem: bound by compute or memory; above 100% an op reads from a cache; "
        "!: so far above that the ceiling is not valid[/]"
    )


def _print_breaks(record: ProfileRecord) -> None:
    console = _shared.out
    console.print()
    if record.breaks_note:
        console.print(f"[yellow]graph breaks:[/] {escape(record.breaks_note)}")
    if not record.breaks:
        if not record.breaks_note:
            console.print(f"graph breaks: none, {_count(record.graphs, 'graph')} a call")
        return
    splits = sum(1 for entry in record.breaks if entry.kind == "break")
    recompiles = len(record.breaks) - splits
    console.print(f"[bold]graph breaks[/]  {splits}, recompiles {recompiles}, {_count(record.graphs, 'graph')} a call")
    for entry in record.breaks:
        style = "red" if entry.kind == "break" else "yellow"
        console.print(f"  [{style}]{entry.kind}[/] {escape(entry.file)}:{entry.line}", soft_wrap=True)
        console.print(Padding(f"[dim]{escape(entry.reason)}[/]", (0, 0, 0, 4)))


def _print_causes(record: ProfileRecord) -> None:
    """The causes of time, and the backends that ran attention."""
    from wavecrest.profile.causes import sdpa_backends

    console = _shared.out
    console.print()
    for bucket in record.buckets:
        backends = ", ".join(f"{name} {_count(calls, 'call')}" for name, calls in sdpa_backends(bucket).items())
        if backends:
            console.print(f"SDPA's backends, {escape(bucket.bucket)}: {backends}")
    if not record.causes:
        console.print("causes: none is known that costs 2 % of a call; the roofline says what is left")
        return
    console.print("[bold]causes[/]  what costs time in the model as it is")
    for cause in record.causes:
        console.print(Padding(f"[yellow]•[/] {escape(cause.text)}", (0, 0, 0, 2)))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
