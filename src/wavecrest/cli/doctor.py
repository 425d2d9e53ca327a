"""`wavecrest doctor`: report the machine, the versions, and settings that help or hurt; changes nothing."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from wavecrest import INSTALL_TORCH
from wavecrest.cli import _shared
from wavecrest.errors import EnvironmentProblem

if TYPE_CHECKING:
    from wavecrest.doctor import DoctorReport

_MARKS = {"problem": "[red]✗[/red]", "warn": "[yellow]![/yellow]", "info": "[blue]·[/blue]", "ok": "[green]✓[/green]"}


def run(device: str | None = None) -> DoctorReport:
    """Look at the machine and return the findings.

    Raises:
        EnvironmentProblem: torch is missing, or cannot compute on the device.
        InvalidArgument: an unknown device name.
    """
    try:
        import torch
    except (ImportError, OSError) as error:
        raise EnvironmentProblem(f"torch cannot be imported ({error}); install it with: {INSTALL_TORCH}") from error
    from wavecrest import env, hardware
    from wavecrest.doctor import DoctorReport, collect, run_checks
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
        findings=run_checks(context),
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
        details.add_row("source", f"[dim]{escape(finding.source)}[/dim]")
        out.print(Padding(details, (0, 0, 0, 2)))
    counts = [(report.count("problem"), "problem"), (report.count("warn"), "warning"), (report.count("info"), "note")]
    summary = ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts if count)
    out.print()
    out.print(f"{summary or 'nothing to report'}. Nothing was changed.")


def command(device: _shared.DeviceOption = None, json: _shared.JsonOption = False) -> None:
    """Look over this machine: device, versions, and what in the environment helps, hurts or does nothing.

    Advises and never changes anything. Returns 0 even with warnings, 3 if PyTorch cannot run here.
    """
    with _shared.err.status("looking at the machine"):
        report = run(device)
    if json:
        _shared.print_json(report)
    else:
        show(report)
