"""`wavecrest optimize`: make a model faster, one measured step at a time, and prove it."""

from __future__ import annotations

import re
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from wavecrest.cli import _ranks, _shared
from wavecrest.errors import InvalidArgument, OutputError

if TYPE_CHECKING:
    from wavecrest.dispatch.decision import OpCoverage
    from wavecrest.measure.workload import Workload
    from wavecrest.optimizer.api import OptimizeResult
    from wavecrest.records import OptimizeRecord, StepOutcome

STYLES = {"kept": "green", "reverted": "yellow", "tie": "yellow", "refused": "red", "skipped": "dim"}
# columns of a terminal that has room for a bar and the time of the current piece
WIDE = 60
MARKS = {"kept": "✓", "reverted": "✗", "tie": "=", "refused": "!", "skipped": "·"}


def run(
    spec: str,
    *,
    level: int = 5,
    min_gain: float = 0.02,
    budget: float = 900.0,
    device: str | None = None,
    precision: str | None = None,
    quantize: str | None = None,
    quality: str | None = None,
    out: Path | None = None,
    resume: bool = False,
    processes: int = 3,
    steps: tuple[str, ...] | None = None,
    skip: tuple[str, ...] = (),
    display: Display | None = None,
    bundle: Path | None = None,
) -> tuple[OptimizeResult, Workload]:
    """Load a workload and run the ladder; see `wavecrest.optimize`."""
    from wavecrest.measure import workload
    from wavecrest.optimizer import api as optimizer
    from wavecrest.records import files

    options = optimizer.Options(level, min_gain, budget, precision, processes, steps, skip, quantize, quality)
    with nullcontext() if out is None else files.new_folder(out):
        loaded = workload.load(spec, device=device)
        return optimizer.run(loaded, options, out=out, resume=resume, progress=display, bundle=bundle), loaded


class _Left(ProgressColumn):
    """The time to come, where it is known."""

    def render(self, task: Task) -> Text:
        """ "5 min left", or nothing."""
        from wavecrest.optimizer.options import minutes

        end = task.fields.get("end")
        return Text("" if end is None else f"{minutes(max(0.0, end - task.get_time()))} left", style="cyan")


class Display:
    """A spinner with the current piece of work, the time to come, and one line per verdict."""

    def __init__(self) -> None:
        # on a narrow terminal the text gets the room
        bar = [BarColumn(bar_width=20), TimeElapsedColumn()] if _shared.err.width >= WIDE else []
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            *bar,
            _Left(),
            console=_shared.err,
            transient=True,
            expand=True,
        )
        self._task = self._progress.add_task("loading the workload", total=None)

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def phase(self, text: str) -> None:
        """A new piece of work."""
        self._progress.reset(self._task, description=escape(_shared.visible(text)), total=None)

    def update(self, done: int, planned: int) -> None:
        """Progress inside it; measuring may go on beyond the planned minimum."""
        self._progress.update(self._task, completed=min(done, planned), total=planned)

    def remaining(self, seconds: float) -> None:
        """The time to come, which counts down from now on."""
        self._progress.update(self._task, end=self._progress.get_time() + seconds)

    def outcome(self, step: StepOutcome) -> None:
        """One line per verdict, above the spinner; steps with nothing to do are in the summary."""
        if step.verdict == "skipped":
            return
        ratio = f" {step.ratio:.3f}× {step.ci}" if step.ratio is not None and step.ci is not None else ""
        again = " (again)" if step.attempt > 1 else ""
        style = STYLES[step.verdict]
        self._progress.console.print(
            f"  [{style}]{MARKS[step.verdict]} {step.verdict:<8}[/] {escape(step.title)}{again}{ratio}"
            + ("" if step.verdict == "kept" else f" [dim]{escape(_short(step.reason))}[/]")
        )


def command(
    workload: _shared.WorkloadArgument = None,
    hf: _shared.HfOption = None,
    generate: Annotated[
        str | None,
        typer.Option(
            "--generate",
            metavar="W",
            help="A function returning (model, inputs, options of generate()), instead of W: tokens/s end to end.",
        ),
    ] = None,
    level: Annotated[
        int,
        typer.Option(
            "--level",
            help="Highest level tried: 1 environment, 2 compile, 3 surgery, 4 kernels, 5 graph capture.",
        ),
    ] = 5,
    min_gain: Annotated[str, typer.Option("--min-gain", help="Gain that must be proven to keep a step.")] = "2%",
    budget: Annotated[str, typer.Option("--budget", help="Time for the whole ladder, such as 90s, 15m or 1h.")] = "15m",
    device: _shared.DeviceOption = None,
    precision: Annotated[
        str | None, typer.Option("--precision", help="Also try tf32, bf16 or fp16; it changes the answers.")
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            "--quantize", metavar="FORMATS", help="Also try linear layers in these formats, such as int4,int8."
        ),
    ] = None,
    quality: Annotated[
        str | None, typer.Option("--quality", help="How far the quantized model may be off, such as 0.5%.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the results. Default: runs/NAME-TIME.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="Go on with an interrupted run's folder.")
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", help="Fresh processes a side when trying environment variables.")
    ] = 3,
    step: Annotated[list[str] | None, typer.Option("--step", metavar="ID", help="Only this step (repeatable).")] = None,
    skip: Annotated[list[str] | None, typer.Option("--skip", metavar="ID", help="Not this step (repeatable).")] = None,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", metavar="FILE", help="Also write a proof bundle, which `verify --bundle` checks."),
    ] = None,
    json: _shared.JsonOption = False,
) -> int:
    """Make a model faster, one measured step at a time, and prove it.

    Every step is predicted, applied to a copy, held to an accuracy gate and measured interleaved against the model
    before it; it stays only if the gain is proven. Writes run.json, plan.json and report.html.

    Under torchrun: a model that its function divided over the ranks, on every rank alike.
    """
    spec = _shared.spec_of(workload, hf, generate)
    # what is wrong with the command line is told before torch is imported
    share, seconds = _shared.parse_percent(min_gain), parse_duration(budget)
    _shared.check_file(spec)
    folder = resume or out or Path("runs") / f"{_slug(spec)}-{datetime.now():%Y%m%d-%H%M%S}"
    own = _ranks.rank()
    if own is not None:
        alone = {"--resume": resume, "--generate": generate, "--quantize": quantize, "--quality": quality}
        if given := next((name for name, value in alone.items() if value is not None), None):
            raise InvalidArgument(f"{given} is for a run of one process, and torchrun started several")
        options = {
            "level": level, "min_gain": share, "budget": seconds, "precision": precision, "processes": processes,
            "steps": tuple(step) if step else None, "skip": tuple(skip or ()),
        }  # fmt: skip
        written = {"out": folder} if bundle is None else {"out": folder, "bundle": bundle}
        return _divided(own, spec, options, device, written, json)
    from wavecrest.optimizer.api import OptimizeInterrupted

    try:
        with Display() as display:
            result, loaded = run(
                spec,
                level=level,
                min_gain=share,
                budget=seconds,
                device=device,
                precision=precision,
                quantize=quantize,
                quality=quality,
                out=folder,
                resume=resume is not None,
                processes=processes,
                steps=tuple(step) if step else None,
                skip=tuple(skip or ()),
                display=display,
                bundle=bundle,
            )
            if generate is not None:
                throughput = _throughput(result, loaded, folder, display)
    except OptimizeInterrupted as interrupted:
        # typer turns a KeyboardInterrupt into a bare exit code
        raise _shared.Interrupted(str(interrupted)) from None
    if json:
        _shared.print_json(result.record)
    else:
        print_summary(result.record, folder)
        if generate is not None:
            _shared.out.print("\n".join(map(escape, throughput)), soft_wrap=True)
        if bundle is not None and bundle.is_file():
            _shared.out.print(f"[dim]proof bundle:[/] {escape(str(bundle))}", soft_wrap=True)
    if result.unwritten:
        _shared.print_error(result.unwritten)
        return OutputError.exit_code
    return 0


def _divided(
    own: int, spec: str, options: dict[str, Any], device: str | None, written: dict[str, Path], json: bool
) -> int:
    """The command on one rank of a job; rank 0 prints and writes."""
    found = _ranks.optimize(own, spec, options, device, written, Display)
    if found.local is not None:
        _shared.print_json(found.local.record) if json else print_summary(found.local.record, written["out"])
    _ranks.finish(own, found)
    if found.local is not None and found.local.unwritten:
        _shared.print_error(found.local.unwritten)
        return OutputError.exit_code
    return 0


def _throughput(result: OptimizeResult, loaded: Workload, folder: Path, display: Display) -> list[str]:
    """Measure whole generations, and write and tell what came of it."""
    from wavecrest.integrations import generate

    assert isinstance(loaded, generate.Generation)
    display.phase("tokens/s, end to end")
    found = loaded.throughput(result.model)
    generate.write(found, folder)
    return found.lines()


def print_summary(record: OptimizeRecord, folder: Path | None) -> None:
    """The verdict table and the result."""
    from wavecrest.report import first_line, proof

    console = _shared.out
    console.print()
    console.print(f"[bold]{escape(first_line(record))}[/]", soft_wrap=True)
    for bench in record.baseline:
        floor = record.resolution.get(bench.bucket)
        resolved = "" if floor is None else f"; differences below {floor:.1%} are not resolved here"
        console.print(f"baseline  {escape(bench.bucket)}  {bench.measurement.describe()}[dim]{resolved}[/]")
    wide = console.width >= 100
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("step", overflow="fold")
    if wide:
        table.add_column("predicted", justify="right")
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("95 % CI", no_wrap=True)
    if wide:
        table.add_column("error/limit", justify="right")
    table.add_column("verdict", no_wrap=True)
    table.add_column("why", overflow="fold", ratio=1)
    for step in record.steps:
        if step.verdict == "skipped":
            continue
        cells = [escape(step.title) + (" (again)" if step.attempt > 1 else "")]
        if wide:
            cells.append(f"{step.predicted:.2f}×" if step.predicted else "–")
        cells.append(f"{step.ratio:.3f}×" if step.ratio else "–")
        cells.append(str(step.ci) if step.ci else "–")
        if wide:
            cells.append(proof.worst_error(step.numerics))
        style = STYLES[step.verdict]
        cells += [f"[{style}]{step.verdict}[/]", f"[dim]{escape(_short(step.reason, 200 if wide else 60))}[/]"]
        table.add_row(*cells)
    _shared.print_table(table)
    skipped = sum(step.verdict == "skipped" for step in record.steps)
    if skipped:
        console.print(f"[dim]{skipped} step{'' if skipped == 1 else 's'} skipped; the report has the reason of each[/]")
    _shared.print_coverage(_coverage(record))
    console.print()
    _print_result(record)
    if folder is not None:
        console.print(
            f"[dim]plan and report:[/] {escape(str(folder / 'plan.json'))}  {escape(str(folder / 'report.html'))}"
        )


def _coverage(record: OptimizeRecord) -> list[OpCoverage]:
    """The record's decisions by op."""
    from wavecrest.dispatch.decision import OpCoverage

    found: dict[str, OpCoverage] = {}
    for row in record.coverage:
        found.setdefault(row.op, OpCoverage(row.op)).add(row.source, row.calls)
    return list(found.values())


def _print_result(record: OptimizeRecord) -> None:
    from wavecrest.report import proof

    console, result = _shared.out, record.result
    if result is None:
        return
    one_process = result.unit == "phases"
    for row in result.speed:
        ci = "" if one_process else f" {row.ci}"
        console.print(f"{escape(row.bucket)}  {row.base_ms:.3f} ms → {row.new_ms:.3f} ms  {row.ratio:.2f}×{ci}")
    if result.drift is not None:
        console.print(f"[dim]the original changed by {result.drift:+.1%} from its first measurement to its last[/]")
    for check in result.quality:
        mark = "[green]✓[/]" if check.passed else "[red]✗[/]"
        console.print(f"{mark} {escape(check.name)}: {check.value:.7g} (limit {check.limit:g}) {escape(check.detail)}")
    for line in proof.lines(record):
        console.print(f"[dim]{escape(line)}[/]")
    why = f"[dim]{escape(result.reason)}[/]"
    if result.verdict == "faster":
        console.print(
            f"[bold green]result  {result.ratio:.2f}× faster[/]{'' if one_process else f' {result.ci}'}  {why}"
        )
    else:
        console.print(f"[bold]result  {result.verdict}[/]  {why}")


def _short(text: str, limit: int = 90) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _slug(spec: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", Path(spec.rpartition("/")[2]).name).strip("-").lower() or "run"


def parse_duration(text: str) -> float:
    """Seconds from "90s", "15m", "1h" or a plain number of seconds."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if match is None:
        raise InvalidArgument(f"a duration is written like 90s, 15m or 1h, not {text!r}")
    return float(match.group(1)) * {"": 1, "s": 1, "m": 60, "h": 3600}[match.group(2)]
