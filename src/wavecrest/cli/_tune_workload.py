"""`wavecrest tune WORKLOAD`: tune the calls of a workload, and keep the rows only if they make it faster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.table import Table

from wavecrest.cli import _shared

if TYPE_CHECKING:
    from wavecrest.dispatch.tuned import Overlay
    from wavecrest.hardware import Device
    from wavecrest.records import CalledKey, WorkloadTuneRecord
    from wavecrest.tune.session import OnStep, Settings
    from wavecrest.tune.workers import Start

VERDICTS = {
    "kept": "[green]faster[/green]",
    "tie": "[yellow]a tie[/yellow]",
    "slower": "[red]slower[/red]",
    "nothing": "nothing to change",
}


def run(
    spec: str,
    target: Device,
    settings: Settings,
    *,
    overlay: Overlay | None,
    out: Path | None,
    starts: Sequence[Start] | None,
    on_step: OnStep | None,
) -> WorkloadTuneRecord:
    """Load a workload and tune it; with `out` write the record after each op.

    Args:
        spec: as for `wavecrest.measure.workload.load`.
        target: the device to build it on.
        settings, overlay, starts, on_step: as for `wavecrest.tune.model.tune`.
        out: the record's file.

    Raises:
        WorkloadError: the workload cannot be loaded, or is on another device.
        InvalidArgument: it calls nothing that can be tuned.
        OutputError: a file cannot be written; found before measuring.
    """
    from wavecrest import records
    from wavecrest.errors import OutputError
    from wavecrest.measure import workload
    from wavecrest.records import files
    from wavecrest.tune import model, session

    if out is not None:
        if out.is_dir():
            raise OutputError(f"{out} is a folder; give the name of a file in it")
        files.prepare_folder(out.parent)

    def written(record: WorkloadTuneRecord) -> None:
        if out is not None:
            records.save(record, out)

    loaded = workload.load(spec, device=target.torch_name)
    return model.tune(
        loaded, target, settings, overlay=overlay, starts=starts, on_record=written, on_step=on_step,
        # without a hash: the record is complete only when the rows are written
        record_name=session.NO_RECORD if out is None else session.place(out),
    )  # fmt: skip


def show(record: WorkloadTuneRecord) -> None:
    """Print a record for people."""
    out = _shared.out
    out.print(f"{escape(record.workload)} · {escape(record.header.device['name'])}", soft_wrap=True)
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), title="calls of one pass", title_justify="left")
    table.add_column("op", overflow="fold", min_width=8)
    table.add_column("calls", justify="right", no_wrap=True)
    table.add_column("before", overflow="fold")
    table.add_column("fastest", overflow="fold")
    for one in record.keys:
        before = f"{escape(one.backend)} [dim]{escape(one.source)}[/dim]{_time(one.before_us)}"
        if one.left:
            after = f"[dim]not tuned: {escape(one.left)}[/dim]"
        elif (one.winner, one.winner_config) == (one.backend, one.config):
            after = "the same"
        else:
            after = f"{escape(one.winner)}{_time(one.us)}"
        table.add_row(escape(one.op), f"{one.calls:,}", before, after)
    _shared.print_table(table)
    for one in record.keys:
        if one.note:
            out.print(f"[yellow]{escape(one.op)}[/yellow] {escape(one.case)}: {escape(one.note)}", soft_wrap=True)
    saved = _saved(record.keys)
    if saved:
        out.print(f"by the ops alone, calls times their gains: {_shared.format_time(saved / 1e3)} a pass less")
    for bucket in record.buckets:
        times = f"{_shared.format_time(bucket.base_ms)} before, {_shared.format_time(bucket.new_ms)} after"
        out.print(f"{escape(bucket.bucket)}: {times}, {bucket.ratio:.3f}× {escape(str(bucket.ci))}")
    if record.verdict:
        ratio = f" {record.ratio:.3f}× {escape(str(record.ci))}" if record.ci is not None else ""
        out.print(f"workload: {VERDICTS[record.verdict]}{ratio}: {escape(record.reason)}", soft_wrap=True)
        fate = "written to the user's database" if record.written else "not written, as they were not to be kept"
        out.print(f"rows: {fate if record.kept else 'dropped'}", soft_wrap=True)


def _time(us: float | None) -> str:
    return "" if us is None else f" {_shared.format_time(us / 1e3)}"


def _saved(keys: Sequence[CalledKey]) -> float:
    """µs that the ops alone would save in one pass, over keys whose time before is known."""
    return sum(one.calls * (one.before_us - one.us) for one in keys if one.before_us is not None and one.us is not None)
