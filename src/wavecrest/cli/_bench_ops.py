"""`wavecrest bench OP`: measure ops beside their peers, show and write the result."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from wavecrest.cli import _shared
from wavecrest.errors import InvalidArgument, OutputError, Regression

if TYPE_CHECKING:
    from wavecrest.bench.ops import OnCase, OnOp, OnRow, Settings
    from wavecrest.bench.rates import Rate
    from wavecrest.records import ImplTiming, OpBench, OpBenchRecord, OpCase

# thresholds of "a large tensor" and "a wide row" in the summary
LARGE_BYTES = 64 << 20
WIDE_COLUMNS = 65536
# on a CPU, where one large GEMM takes seconds: seconds after which no case is begun, and seconds of a case
CPU_BUDGET, CPU_CASE_SECONDS = 600.0, 60.0


@dataclass(frozen=True, slots=True)
class Targets:
    """Where results are written; None: nowhere."""

    output: Path | None = None
    plot: Path | None = None
    split: Path | None = None

    def prepare(self) -> None:
        """Check that everything can be written, before anything is measured."""
        from wavecrest.bench import plot
        from wavecrest.records import files

        for path in (self.output, self.plot):
            if path is not None:
                if path.is_dir():
                    raise OutputError(f"{path} is a folder; give the name of a file in it")
                files.prepare_folder(path.parent)
        if self.plot is not None:
            plot.check(self.plot)
        if self.split is not None:
            plot.check(Path("plot.svg"))
            files.prepare_folder(self.split)

    def keep(self, record: OpBenchRecord) -> None:
        """Write the record of the ops so far, if a record is wanted."""
        from wavecrest import records

        if self.output is not None:
            records.save(record, self.output)

    def write(self, record: OpBenchRecord, source: Path | None = None) -> list[Path]:
        """Write everything; returns the paths. `source` is the file that the record was read from."""
        from wavecrest import records
        from wavecrest.bench import ops, plot

        written = []
        if self.output is not None:
            records.save(record, self.output)
            written.append(self.output)
        if self.plot is not None:
            plot.draw(record, self.plot, source=_named(self.output or source))
            written.append(self.plot)
        for name, part in ops.by_op(record).items() if self.split is not None else ():
            assert self.split is not None
            file = self.split / f"bench_{name}.json"
            records.save(part, file)
            written.append(file)
            if any(impl.ms for case in part.ops[0].cases for impl in case.impls):
                plot.draw(part, file.with_suffix(".svg"), source=_named(file))
                written.append(file.with_suffix(".svg"))
        return written


def _named(path: Path | None) -> str:
    from wavecrest.records import provenance

    return "" if path is None else provenance.shown_path(str(path))


def check_times(settings: Settings) -> None:
    """Raise InvalidArgument unless all times are above zero."""
    times = {"--seconds": settings.seconds, "--budget": settings.budget, "--case-seconds": settings.case_seconds}
    for option, value in times.items():
        if not value > 0:
            raise InvalidArgument(f"{option} must be above zero, not {value:g}")


def run_ops(
    names: list[str],
    settings: Settings,
    *,
    device: str | None = None,
    on_case: OnCase | None = None,
    on_row: OnRow | None = None,
    on_op: OnOp | None = None,
) -> OpBenchRecord:
    """Measure ops beside their peers.

    Args:
        names: ops by name; empty takes all, or those of a file of shapes.
        settings: see `wavecrest.bench.ops.Settings`; on a CPU a budget or a time a case without a limit gets one.
        device: as for `wavecrest.hardware.detect`.
        on_case: called before each case.
        on_row: called after each case.
        on_op: called after each op with the record so far.

    Raises:
        InvalidArgument: an unknown op, suite, peer, size or dtype, or times that are not above zero.
        TableError: a file of shapes cannot be read.
        EnvironmentProblem: the device is not here.
    """
    check_times(settings)
    from wavecrest import hardware, ops
    from wavecrest.bench.ops import bench_ops

    target = hardware.detect(device)
    if target.kind == "cpu":
        budget, case = settings.budget, settings.case_seconds
        settings = replace(
            settings,
            budget=CPU_BUDGET if math.isinf(budget) else budget,
            case_seconds=CPU_CASE_SECONDS if math.isinf(case) else case,
        )
    every = [] if settings.shapes is not None else ops.names()
    return bench_ops(names or every, target, settings, on_case=on_case, on_row=on_row, on_op=on_op)


def measure(names: list[str], settings: Settings, device: str | None, places: Targets) -> OpBenchRecord:
    """`run_ops` with a bar and a line a case on stderr; a killed run keeps the ops that are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("cases"))
    with Progress(*columns, console=_shared.err, transient=True) as progress:
        task = progress.add_task("loading", total=None)

        def on_case(op: str, case: str, index: int, total: int) -> None:
            progress.update(task, description=f"{op} {escape(case)}", completed=index, total=total)

        def on_row(op: str, row: OpCase, seconds: float) -> None:
            progress.console.print(f"[dim]{op} {escape(row.case)}: {escape(_brief(row))} ({seconds:.1f} s)[/dim]")

        return run_ops(names, settings, device=device, on_case=on_case, on_row=on_row, on_op=places.keep)


def _brief(row: OpCase) -> str:
    """A case in a few words, for the line when it is done."""
    if row.problem or not row.impls:
        return row.problem
    ours = row.impls[0]
    return _shared.format_time(ours.ms) if ours.ms is not None else ours.problem


def load(path: Path) -> OpBenchRecord:
    """A stored record (`--from`)."""
    from wavecrest import records

    return records.load_as(path, records.OpBenchRecord)


def show(record: OpBenchRecord) -> None:
    """Print a record for people."""
    out, header = _shared.out, record.header
    peers = ", ".join(f"{name} ({version})" for name, version in record.peers.items()) or "none"
    out.print(
        f"{escape(_origin(record))} · {escape(header.device['name'])} ({escape(header.device['arch'])}) · "
        f"{escape(header.created[:10])} · peers: {escape(peers)}",
        soft_wrap=True,
    )
    out.print(f"[dim]{escape(_peaks(record))}[/dim]", soft_wrap=True)
    for name, reason in record.missing.items():
        out.print(f"[yellow]no {escape(name)}[/yellow]: {escape(reason)}", soft_wrap=True)
    for bench in record.ops:
        _show_op(bench, [*record.peers], record.peak_gbps)
    out.print(
        "[dim]ours: median time, with its 95 % interval; rate: of what limits the case, memory or arithmetic, and its\n"
        "share of the peak (both rates where a peak is unknown); copy: percent of the bandwidth of the large copy,\n"
        "and of a copy of as many bytes; a peer: its time over ours (above 1: ours is faster); best: the fastest\n"
        "peer, with its 95 % interval[/dim]",
        soft_wrap=True,
    )


def _origin(record: OpBenchRecord) -> str:
    """Where the cases are from: a suite, or the sizes of the command line or of a file."""
    asked = any(case.sizes for bench in record.ops for case in bench.cases)
    return record.suite if asked else f"suite {record.suite}"


def _peaks(record: OpBenchRecord) -> str:
    """The peaks that rates are compared with, and where they are from."""
    if record.peak_gbps is None:
        return "peak unknown: no datasheet figures for this device; copy is of the rate measured here"
    found = {case.dtype: case.peak_tflops for bench in record.ops for case in bench.cases if case.peak_tflops}
    tera = "".join(f", {peak:,.1f} TFLOP/s {dtype}" for dtype, peak in found.items())
    return f"peaks: {record.peak_gbps:,.0f} GB/s{tera} ({record.peaks_from}, dense)"


def _show_op(bench: OpBench, peers: list[str], peak_gbps: float | None) -> None:
    out = _shared.out
    copied = f"copy of {_shared.format_bytes(bench.copy_bytes)}: {bench.copy_gbps:,.0f} GB/s"
    clock = f" · {escape(bench.clock)}" if bench.clock else ""
    out.print(f"\n[bold]{escape(bench.op)}[/bold] · {copied}{clock}")
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    sizes = next((case.sizes for case in bench.cases if case.sizes), {})
    table.add_column("x".join(sizes) or "case", overflow="fold", min_width=10)
    for title in ("ours", "rate", "copy", *map(escape, peers), "best"):
        table.add_column(title, justify="right", no_wrap=True)
    for case in bench.cases:
        table.add_row(*_row(bench, case, peers, peak_gbps))
    _shared.print_table(table)
    for line in _notes(bench, peak_gbps):
        out.print(line, soft_wrap=True)


def _row(bench: OpBench, case: OpCase, peers: list[str], peak_gbps: float | None) -> list[str]:
    from wavecrest.bench.ops import percent
    from wavecrest.bench.rates import rates

    by_name = {impl.name: impl for impl in case.impls}
    ours = case.impls[0] if case.impls else None
    if ours is None or ours.ms is None or ours.ci is None:
        wrong = ours is not None and ours.problem.startswith("wrong")
        word = "[red]wrong[/red]" if wrong else "[yellow]none[/yellow]"
        return [escape(case.case), word, "", "", *("" for _ in peers), ""]
    share = percent(bench, case, ours)
    same = f"{100 * case.copy_ms / ours.ms:.0f} %" if case.copy_ms else "–"
    best = "–"
    if case.ratio is not None and case.ci is not None:
        slower = case.ci.high < 1
        best = f"{case.ratio:.2f}×\n{case.ci.low:.2f}–{case.ci.high:.2f}"
        best = f"[yellow]{best}[/yellow]" if slower else best
    return [
        escape(case.case),
        f"{_shared.format_time(ours.ms)}\n[dim]{_span(ours.ci.low, ours.ci.high)}[/dim]",
        _rates(rates(case, ours.ms, peak_gbps), case.dtype),
        f"{'–' if share is None else f'{share:.0f} %'}\n[dim]{same}[/dim]",
        *(_peer_cell(by_name.get(peer), ours.ms) for peer in peers),
        best,
    ]


def _span(low: float, high: float) -> str:
    """An interval in the unit of its lower end, as "12.31–12.40"."""
    first, unit = _shared.format_time(low).split(" ")
    factor = {"µs": 1e3, "ms": 1.0, "s": 1e-3}[unit]
    digits = len(first.partition(".")[2])
    return f"{first}–{high * factor:.{digits}f}"


def _rates(found: list[Rate], dtype: str) -> str:
    """One rate with its share of the peak, or two without."""
    shown = [_rate(rate, dtype) for rate in found]
    if len(found) == 1:
        share = found[0].share
        return shown[0] if share is None else f"{shown[0]}\n[dim]{share:.0%} of peak[/dim]"
    return "\n".join(shown)


def _rate(rate: Rate, dtype: str) -> str:
    """ "3,912 GB/s", "612 TFLOP/s", "45.1 GFLOP/s"; operations on integers are Top/s and Gop/s."""
    value, unit = rate.value, rate.unit
    if unit != "GB/s":
        value, unit = (value * 1e3, "GFLOP/s") if value < 1 else (value, unit)
        unit = unit.replace("FLOP", "op") if dtype.startswith(("int", "uint")) else unit
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}"


def _peer_cell(impl: ImplTiming | None, ours: float) -> str:
    if impl is None:
        return "–"
    if impl.ms is None:
        return "[red]wrong[/red]" if impl.problem.startswith("wrong") else "–"
    return f"{impl.ms / ours:.2f}×"


def _notes(bench: OpBench, peak_gbps: float | None) -> list[str]:
    """Lines below the table: why a cell is empty, which backend ran, and the op in three numbers."""
    reasons: dict[str, list[str]] = {}
    for case in bench.cases:
        if case.problem:
            reasons.setdefault(f"not measured: {case.problem}", []).append(case.case)
        if case.cut:
            reasons.setdefault(f"cut: {case.cut}", []).append(case.case)
        for impl in case.impls:
            if impl.problem:
                reasons.setdefault(f"{impl.name}: {impl.problem}", []).append(case.case)
    lines = [
        f"[dim]{escape(reason)}{'' if len(cases) == len(bench.cases) else escape(f' ({_few(cases)})')}[/dim]"
        for reason, cases in reasons.items()
    ]
    backends = {case.backend for case in bench.cases if case.backend}
    if backends - {"triton"}:
        lines.append(f"[dim]ours ran by backend {escape(', '.join(sorted(backends)))}[/dim]")
    if bench.problem:
        lines.append(f"[red]{escape(bench.problem)}[/red]")
    return lines + summary(bench, peak_gbps)


def _few(cases: list[str]) -> str:
    return ", ".join(cases[:3]) + (f" and {len(cases) - 3} more" if len(cases) > 3 else "")


def summary(bench: OpBench, peak_gbps: float | None = None) -> list[str]:
    """The op in a few numbers: against the best peers, and its lowest rates by what limits the cases.

    `peak_gbps` is the record's.
    """
    from wavecrest.bench.ops import percent
    from wavecrest.bench.rates import of_arithmetic, tokens

    lines = []
    if bench.geomean is not None and bench.ci is not None:
        judged = [case for case in bench.cases if case.ci is not None]
        slower = [case.case for case in judged if case.ci is not None and case.ci.high < 1]
        lines.append(
            f"best peers: geometric mean {bench.geomean:.2f}× {escape(str(bench.ci))} over {len(judged)} "
            f"case{'' if len(judged) == 1 else 's'}; "
            + (f"slower in {len(slower)}: {escape(_few(slower))}" if slower else "slower in none")
        )
    each, busy, copied = [], [], []
    for case in bench.cases:
        ms = case.impls[0].ms if case.impls else None
        if ms is not None and (count := tokens(bench.op, case)) is not None:
            each.append((ms / count, case.case))
        elif ms is not None and (rate := of_arithmetic(case, ms, peak_gbps)) is not None and rate.share is not None:
            busy.append((rate.share, case.case))
        else:
            copied.append(case)
    if each:
        (least, where), (most, elsewhere) = min(each), max(each)
        lines.append(
            f"a token takes {_shared.format_time(least)} ({escape(where)}) to {_shared.format_time(most)} "
            f"({escape(elsewhere)})"
        )
    if busy:
        (least, where), (most, elsewhere) = min(busy), max(busy)
        lines.append(
            f"cases limited by arithmetic ({len(busy)}): {least:.1%} ({escape(where)}) to {most:.1%} "
            f"({escape(elsewhere)}) of the datasheet's peak"
        )
    shares = {
        "of 64 MiB and more": [case for case in copied if case.tensor_bytes >= LARGE_BYTES],
        f"with rows of {WIDE_COLUMNS:,} columns and more": [case for case in copied if case.columns >= WIDE_COLUMNS],
    }
    for what, cases in shares.items():
        timed = [
            (share, 100 * (case.copy_ms or 0.0) / (case.impls[0].ms or 1.0), case.case)
            for case in cases
            if case.impls and (share := percent(bench, case, case.impls[0])) is not None
        ]
        if timed:
            (share, _, where), (_, same, elsewhere) = min(timed), min(timed, key=lambda row: row[1])
            lines.append(
                f"tensors {what} ({len(timed)}): at least {share:.1f} % of copy ({escape(where)}), "
                f"{same:.1f} % of a copy of as many bytes ({escape(elsewhere)})"
            )
    return lines


def judge(record: OpBenchRecord) -> None:
    """Raise if wavecrest's implementation is wrong anywhere, or a measurement ended early.

    Raises:
        Regression: names the ops and cases.
    """
    wrong = [
        f"{bench.op} {case.case}: {case.impls[0].problem}"
        for bench in record.ops
        for case in bench.cases
        if case.impls and case.impls[0].problem
    ]
    wrong += [f"{bench.op} {bench.problem}" for bench in record.ops if bench.problem]
    if wrong:
        raise Regression(f"{len(wrong)} without a valid result: {'; '.join(wrong[:3])}{' …' if len(wrong) > 3 else ''}")
