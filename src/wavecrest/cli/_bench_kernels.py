"""`wavecrest bench xlstm`: measure the kernels of a family by every name, show them in one table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from wavecrest.cli import _bench_ops, _shared
from wavecrest.errors import InvalidArgument, Regression

if TYPE_CHECKING:
    from wavecrest.bench.ops import OnOp
    from wavecrest.records import ImplTiming, OpBenchRecord, OpCase

# as `wavecrest.bench.xlstm.FAMILIES`, which loads torch
FAMILIES = ("xlstm", "mlstm", "slstm")
# options of ops that these have no use for
_NOT_HERE = ("--all-ops", "--suite", "--peers", "--csv", "--plot", "--from", "--split")


def check(family: str, given: list[str]) -> None:
    """Raise InvalidArgument for options that are of ops alone."""
    wrong = [name for name in given if name in _NOT_HERE]
    if wrong:
        raise InvalidArgument(f"{family} is all kernels of a family, so {', '.join(wrong)} has no meaning beside it")


def command(family: str, asked: dict[str, Any], device: str | None, places: _bench_ops.Targets, json: bool) -> None:
    """Measure a family, print and write the result.

    Raises:
        Regression: a kernel is wrong.
    """
    places.prepare()
    record = measure(family, asked, device, places.keep)
    if json:
        _shared.print_json(record)
    else:
        show(record)
    for path in places.write(record):
        _shared.err.print(f"written to {escape(str(path))}", highlight=False, soft_wrap=True)
    judge(record)


def measure(family: str, asked: dict[str, Any], device: str | None, on_op: OnOp | None = None) -> OpBenchRecord:
    """The record of a family, with a bar on stderr; `asked` are fields of `Settings`."""
    from wavecrest import hardware
    from wavecrest.bench import xlstm
    from wavecrest.bench.ops import Settings

    settings = Settings(**({"budget": xlstm.BUDGET, "case_seconds": xlstm.CASE_SECONDS} | asked))
    _bench_ops.check_times(settings)
    target = hardware.detect(device)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("cases"))
    with Progress(*columns, console=_shared.err, transient=True) as progress:
        task = progress.add_task("loading", total=None)

        def on_case(op: str, case: str, index: int, total: int) -> None:
            progress.update(task, description=f"{op} {escape(case)}", completed=index, total=total)

        return xlstm.bench(family, target, settings, on_case=on_case, on_op=on_op)


def show(record: OpBenchRecord) -> None:
    """Print a record for people: one table, whose first row of a case is the one that dispatch chose."""
    out, header = _shared.out, record.header
    out.print(
        f"kernels of {escape(record.suite)} · {escape(header.device['name'])} ({escape(header.device['arch'])}) · "
        f"{escape(header.created[:10])}",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("kernel", overflow="fold", min_width=20)
    table.add_column("median", justify="right", no_wrap=True)
    table.add_column("95 % interval", justify="right", no_wrap=True)
    table.add_column("beside\nchosen", justify="right", no_wrap=True)
    reasons: dict[str, None] = {}
    for bench in record.ops:
        for case in bench.cases:
            sizes = " ".join(f"{name}={value}" for name, value in case.sizes.items())
            table.add_row(f"[bold]{escape(bench.op)}[/bold] {escape(sizes)} {escape(_form(case))}", "", "", "")
            if case.problem:
                table.add_row(f"  [yellow]not measured[/yellow]: {escape(case.problem)}", "", "", "")
            for place, impl in enumerate(case.impls):
                mark = "→" if place == 0 else " "
                names = "\n  ".join(impl.name.split(", "))
                table.add_row(f"{mark} {escape(names)}", *_times(impl, case.impls[0].ms))
                if impl.problem:
                    reasons[f"{bench.op} {impl.name}: {impl.problem}"] = None
            if case.cut:
                reasons[f"{bench.op} {case.case}: {case.cut}"] = None
        if bench.problem:
            reasons[f"{bench.op}: {bench.problem}"] = None
    _shared.print_table(table)
    for reason in reasons:
        out.print(f"[dim]{escape(reason)}[/dim]", soft_wrap=True)
    out.print(
        "[dim]→ what dispatch chose, which is what auto runs; names below each other run the same; beside chosen: a "
        "kernel's time over that of the chosen one (above 1: slower). B rows, H heads, S tokens, D columns of a head, "
        "v of an mLSTM has 2 D[/dim]",
        soft_wrap=True,
    )


def _form(case: OpCase) -> str:
    """A case's dtype, and what follows it in the name."""
    return case.case.split(" ", 1)[-1]


def _times(impl: ImplTiming, chosen: float | None) -> tuple[str, str, str]:
    if impl.ms is None or impl.ci is None:
        wrong = impl.problem.startswith("wrong")
        return ("[red]wrong[/red]" if wrong else "–", "", "")
    beside = "" if chosen is None else f"{impl.ms / chosen:.2f}×"
    low, high = _shared.format_time(impl.ci.low), _shared.format_time(impl.ci.high)
    return _shared.format_time(impl.ms), f"{low} to {high}", beside


def judge(record: OpBenchRecord) -> None:
    """Raise if a kernel is wrong anywhere, or a measurement ended early.

    Raises:
        Regression: names the kernels and cases.
    """
    wrong = [
        f"{bench.op} {case.case} {impl.name}: {impl.problem}"
        for bench in record.ops
        for case in bench.cases
        for impl in case.impls
        if impl.problem.startswith(("wrong", "raised"))
    ]
    wrong += [f"{bench.op} {bench.problem}" for bench in record.ops if bench.problem]
    if wrong:
        raise Regression(f"{len(wrong)} without a valid result: {'; '.join(wrong[:3])}{' …' if len(wrong) > 3 else ''}")
