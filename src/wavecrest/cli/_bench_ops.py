"""`wavecrest bench OP`: measure ops beside their peers, show and write the result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from wavecrest.cli import _shared
from wavecrest.errors import InvalidArgument, OutputError, Regression

if TYPE_CHECKING:
    from wavecrest.bench.ops import OnCase, OnOp, Settings
    from wavecrest.records import ImplTiming, OpBench, OpBenchRecord, OpCase

# thresholds of "a large tensor" and "a wide row" in the summary
LARGE_BYTES = 64 << 20
WIDE_COLUMNS = 65536


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


def run_ops(
    names: list[str],
    settings: Settings,
    *,
    device: str | None = None,
    on_case: OnCase | None = None,
    on_op: OnOp | None = None,
) -> OpBenchRecord:
    """Measure ops beside their peers.

    Args:
        names: ops by name; empty takes all.
        settings: see `wavecrest.bench.ops.Settings`.
        device: as for `wavecrest.hardware.detect`.
        on_case: called before each case.
        on_op: called after each op with the record so far.

    Raises:
        InvalidArgument: an unknown op, suite, peer or dtype, or times that are not above zero.
        EnvironmentProblem: the device is not here.
    """
    for option, value in (("--seconds", settings.seconds), ("--budget", settings.budget)):
        if not value > 0:
            raise InvalidArgument(f"{option} must be above zero, not {value:g}")
    from wavecrest import hardware, ops
    from wavecrest.bench.ops import bench_ops

    return bench_ops(names or ops.names(), hardware.detect(device), settings, on_case=on_case, on_op=on_op)


def measure(names: list[str], settings: Settings, device: str | None, places: Targets) -> OpBenchRecord:
    """`run_ops` with a progress bar on stderr; a killed run keeps the ops that are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("cases"))
    with Progress(*columns, console=_shared.err, transient=True) as progress:
        task = progress.add_task("loading", total=None)

        def on_case(op: str, case: str, index: int, total: int) -> None:
            progress.update(task, description=f"{op} {escape(case)}", completed=index, total=total)

        return run_ops(names, settings, device=device, on_case=on_case, on_op=places.keep)


def load(path: Path) -> OpBenchRecord:
    """A stored record (`--from`)."""
    from wavecrest import records

    return records.load_as(path, records.OpBenchRecord)


def show(record: OpBenchRecord) -> None:
    """Print a record for people."""
    out, header = _shared.out, record.header
    peers = ", ".join(f"{name} ({version})" for name, version in record.peers.items()) or "none"
    out.print(
        f"suite {record.suite} · {escape(header.device['name'])} ({header.device['arch']}) · {header.created[:10]} · "
        f"peers: {escape(peers)}",
        soft_wrap=True,
    )
    for name, reason in record.missing.items():
        out.print(f"[yellow]no {name}[/yellow]: {escape(reason)}", soft_wrap=True)
    for bench in record.ops:
        _show_op(bench, [*record.peers])
    out.print(
        "[dim]ours: median time; copy: percent of the bandwidth of the large copy; same: of a copy of as many bytes;\n"
        "a peer: its time over ours (above 1: ours is faster); best: the fastest peer, with its 95 % interval[/dim]",
        soft_wrap=True,
    )


def _show_op(bench: OpBench, peers: list[str]) -> None:
    out = _shared.out
    out.print(
        f"\n[bold]{bench.op}[/bold] · copy of {_shared.format_bytes(bench.copy_bytes)}: {bench.copy_gbps:,.0f} GB/s"
        f"{f' · {bench.clock}' if bench.clock else ''}"
    )
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("case", overflow="fold", min_width=16)
    for title in ("ours", "copy", "same", *peers, "best"):
        table.add_column(title, justify="right", no_wrap=True)
    for case in bench.cases:
        table.add_row(*_row(bench, case, peers))
    out.print(table)
    for line in _notes(bench):
        out.print(line, soft_wrap=True)


def _row(bench: OpBench, case: OpCase, peers: list[str]) -> list[str]:
    from wavecrest.bench.ops import percent

    by_name = {impl.name: impl for impl in case.impls}
    ours = case.impls[0] if case.impls else None
    if ours is None or ours.ms is None:
        wrong = ours is not None and ours.problem.startswith("wrong")
        word = "[red]wrong[/red]" if wrong else "[yellow]none[/yellow]"
        return [escape(case.case), word, "", "", *("" for _ in peers), ""]
    share = percent(bench, case, ours)
    same = f"{100 * case.copy_ms / ours.ms:.0f} %" if case.copy_ms else "–"
    best = "–"
    if case.ratio is not None and case.ci is not None:
        slower = case.ci.high < 1
        best = f"{case.ratio:.2f}× [{case.ci.low:.2f}, {case.ci.high:.2f}]"
        best = f"[yellow]{escape(best)}[/yellow]" if slower else escape(best)
    return [
        escape(case.case),
        _shared.format_time(ours.ms),
        "–" if share is None else f"{share:.0f} %",
        same,
        *(_peer_cell(by_name.get(peer), ours.ms) for peer in peers),
        best,
    ]


def _peer_cell(impl: ImplTiming | None, ours: float) -> str:
    if impl is None:
        return "–"
    if impl.ms is None:
        return "[red]wrong[/red]" if impl.problem.startswith("wrong") else "–"
    return f"{impl.ms / ours:.2f}×"


def _notes(bench: OpBench) -> list[str]:
    """Lines below the table: why a cell is empty, which backend ran, and the op in three numbers."""
    reasons: dict[str, list[str]] = {}
    for case in bench.cases:
        if case.problem:
            reasons.setdefault(f"not measured: {case.problem}", []).append(case.case)
        for impl in case.impls:
            if impl.problem:
                reasons.setdefault(f"{impl.name}: {impl.problem}", []).append(case.case)
    lines = [
        f"[dim]{escape(reason)}{'' if len(cases) == len(bench.cases) else escape(f' ({_few(cases)})')}[/dim]"
        for reason, cases in reasons.items()
    ]
    backends = {case.backend for case in bench.cases if case.backend}
    if backends - {"triton"}:
        lines.append(f"[dim]ours ran by backend {', '.join(sorted(backends))}[/dim]")
    if bench.problem:
        lines.append(f"[red]{escape(bench.problem)}[/red]")
    return lines + summary(bench)


def _few(cases: list[str]) -> str:
    return ", ".join(cases[:3]) + (f" and {len(cases) - 3} more" if len(cases) > 3 else "")


def summary(bench: OpBench) -> list[str]:
    """The op in a few numbers: against the best peers, and the lowest percentages where memory is the limit."""
    from wavecrest.bench.ops import percent

    lines = []
    if bench.geomean is not None and bench.ci is not None:
        judged = [case for case in bench.cases if case.ci is not None]
        slower = [case.case for case in judged if case.ci is not None and case.ci.high < 1]
        lines.append(
            f"best peers: geometric mean {bench.geomean:.2f}× {escape(str(bench.ci))} over {len(judged)} cases; "
            + (f"slower in {len(slower)}: {escape(_few(slower))}" if slower else "slower in none")
        )
    shares = {
        "of 64 MiB and more": [case for case in bench.cases if case.tensor_bytes >= LARGE_BYTES],
        f"with rows of {WIDE_COLUMNS:,} columns and more": [
            case for case in bench.cases if case.columns >= WIDE_COLUMNS
        ],
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
