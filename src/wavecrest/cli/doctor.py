"""`wavecrest doctor`: report the machine, the versions, and settings that help or hurt; changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from wavecrest import INSTALL_TORCH
from wavecrest.cli import _shared
from wavecrest.errors import EnvironmentProblem, Regression

if TYPE_CHECKING:
    from wavecrest.doctor import DoctorReport
    from wavecrest.records import SmokeRow
    from wavecrest.tune.smoke import OnRow

_MARKS = {"problem": "[red]✗[/red]", "warn": "[yellow]![/yellow]", "info": "[blue]·[/blue]", "ok": "[green]✓[/green]"}
_OUTCOMES = {
    "ok": "[green]ok[/green]",
    "wrong": "[red]wrong[/red]",
    "failed": "[red]failed[/red]",
    "refused": "[dim]refused[/dim]",
}


def run(device: str | None = None, model: str | None = None) -> DoctorReport:
    """Look at the machine, and at what a model meets on it, and return the findings.

    Args:
        device: torch's name of it; None: a GPU if there is one.
        model: `file.py:function`, as for `wavecrest bench`; it runs once.

    Raises:
        EnvironmentProblem: torch is missing, or cannot compute on the device.
        InvalidArgument: an unknown device name.
        WorkloadError: the model cannot be loaded.
    """
    try:
        import torch
    except (ImportError, OSError) as error:
        raise EnvironmentProblem(f"torch cannot be imported ({error}); install it with: {INSTALL_TORCH}") from error
    from wavecrest import env, hardware
    from wavecrest.doctor import DoctorReport, collect, in_order, run_checks
    from wavecrest.doctor.context import kernel_driver, read_file
    from wavecrest.records import provenance

    found = hardware.detect(device)
    try:
        total = float(torch.ones(8, device=found.torch_name).sum())
    except RuntimeError as error:
        raise EnvironmentProblem(f"torch {torch.__version__} cannot compute on {found.name}: {error}") from error
    if total != 8:
        raise EnvironmentProblem(f"torch {torch.__version__} adds eight ones to {total} on {found.name}")
    context = collect(found)
    findings = run_checks(context)
    if model is not None:
        from wavecrest.doctor import model as models
        from wavecrest.measure import workload

        seen = models.look(workload.load(model, device=found.torch_name))
        findings = in_order([*findings, *models.findings(seen, context)])
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else None
    rocm = f"ROCm {context.rocm}" if context.rocm else (f"HIP {context.hip}" if context.hip else None)
    return DoctorReport(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        device=found.to_dict(),
        versions=provenance.versions(),
        platform_release=rocm or cuda,
        kernel_driver=kernel_driver(found.vendor, read_file),
        compiler=context.compiler,
        threads=context.threads,
        environment={row.name: context.environment[row.name] for row in env.table() if row.name in context.environment},
        findings=findings,
    )


def _machine(report: DoctorReport) -> Table:
    device, versions = report.device, report.versions
    units = "processors" if device["kind"] == "cpu" else "CUs"
    memory = device["memory_bytes"] / 2**30
    rows = {
        "device": f"{device['name']} · {device['arch']} · {device['compute_units']} {units} · {memory:.0f} GiB",
        "platform": " · ".join(filter(None, (report.platform_release, report.kernel_driver, versions.platform))),
        "versions": f"wavecrest {versions.wavecrest} · python {versions.python} · torch {versions.torch or 'missing'}"
        f" · triton {versions.triton or 'missing'} · transformers {versions.transformers or 'missing'}",
        "CPU": f"PyTorch threads {report.threads} · C++ compiler {report.compiler or 'missing'}",
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(name, escape(text))
    return table


def show(report: DoctorReport) -> None:
    """Print a report for people."""
    out = _shared.out
    out.print(_machine(report))
    for finding in report.findings:
        out.print()
        out.print(Padding(f"{_MARKS[finding.level]} {escape(finding.what)}", (0, 0, 0, 0)))
        if finding.level == "ok":
            continue
        details = Table.grid(padding=(0, 2))
        details.add_column(style="dim", no_wrap=True)
        details.add_column(overflow="fold")
        details.add_row("why", escape(finding.why))
        details.add_row("do", escape(finding.action))
        if finding.measure:
            details.add_row("measure", escape(finding.measure))
        details.add_row("source", f"[dim]{escape(finding.source)}[/dim]")
        out.print(Padding(details, (0, 0, 0, 2)))
    counts = [(report.count("problem"), "problem"), (report.count("warn"), "warning"), (report.count("info"), "note")]
    summary = ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts if count)
    out.print()
    out.print(f"{summary or 'nothing to report'}. Nothing was changed.")
    if report.smoke:
        out.print()
        _show_smoke(report.smoke)


def run_smoke(device: str | None = None, *, on_row: OnRow | None = None) -> list[SmokeRow]:
    """Run one small call of every op on the device, beside its oracle.

    Args:
        device: as for `run`.
        on_row: called after each call.

    Raises:
        InvalidArgument: an unknown device name.
    """
    from wavecrest import hardware
    from wavecrest.tune import smoke

    return smoke.run(hardware.detect(device).torch_name, on_row=on_row)


def _show_smoke(rows: Sequence[SmokeRow]) -> None:
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1))
    for title in ("op", "backend", "result"):
        table.add_column(title, no_wrap=True)
    table.add_column("", overflow="fold")
    for row in rows:
        if row.outcome != "refused":
            note = "runs here" if row.picked and not row.reason else row.reason
            table.add_row(escape(row.op), escape(row.backend), _OUTCOMES[row.outcome], escape(note))
    _shared.print_table(table)
    refusals: dict[str, list[str]] = {}
    for row in rows:
        if row.outcome == "refused":
            refusals.setdefault(row.reason, []).append(f"{row.op} {row.backend}")
    for reason, names in refusals.items():
        _shared.out.print(f"[dim]refused ({escape(reason)}): {escape(', '.join(names))}[/dim]", highlight=False)
    counts = ", ".join(
        f"{sum(row.outcome == outcome for row in rows)} {outcome}"
        for outcome in _OUTCOMES
        if any(row.outcome == outcome for row in rows)
    )
    _shared.out.print(
        f"one small call in {escape(rows[0].dtype)} of every op, beside its oracle: {counts}", soft_wrap=True
    )


def command(
    device: _shared.DeviceOption = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Also run one small call of every op here, beside its oracle.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(metavar="WORKLOAD", help="Also look at what a model (FILE.py:FUNCTION) meets here; it runs once."),
    ] = None,
    json: _shared.JsonOption = False,
) -> None:
    """Look over this machine: device, versions, and what in the environment helps, hurts or does nothing.

    Advises and never changes anything. Returns 0 even with warnings, 3 if PyTorch cannot run here; with --smoke 2 if an
    op is wrong.
    """
    with _shared.err.status("looking at the machine"):
        report = run(device, model)
    if smoke:
        with _shared.err.status("running the ops") as status:

            def on_row(row: SmokeRow) -> None:
                status.update(f"{escape(row.op)} on {escape(row.backend)}: {row.outcome}")

            report = report.model_copy(update={"smoke": run_smoke(device, on_row=on_row)})
    if json:
        _shared.print_json(report)
    else:
        show(report)
    bad = [row for row in report.smoke or () if row.outcome in ("wrong", "failed")]
    if bad:
        names = ", ".join(f"{row.op} on {row.backend}" for row in bad)
        raise Regression(f"{len(bad)} of {len(report.smoke or ())} calls are not what the op defines: {names}")
