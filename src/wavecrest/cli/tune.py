"""`wavecrest tune OP`: measure the fastest correct backend and configuration for each shape, for dispatch to read."""

from __future__ import annotations

import importlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from wavecrest.cli import _ranks, _shared, _tune_workload
from wavecrest.cli.optimize import parse_duration
from wavecrest.errors import InvalidArgument, Regression

if TYPE_CHECKING:
    from wavecrest.dispatch.tuned import Config, Overlay
    from wavecrest.hardware import Device
    from wavecrest.records import TuneCandidate, TunedKey, TuneRecord, WorkloadTuneRecord
    from wavecrest.tune.session import OnStep, Settings
    from wavecrest.tune.workers import Start

# where keys are tuned
EXECUTORS = ("here", "local", "ray")
# files that list calls: untuned calls, shapes
_FILES = (".jsonl", ".csv")
# number of reasons shown of each kind; the record has all
SHOWN = 5


def run(
    op: str,
    settings: Settings,
    *,
    device: str | None = None,
    out: Path | None = None,
    table: Path | None = None,
    keep: bool | None = None,
    resume: bool = False,
    executor: str = "local",
    children: int | None = None,
    on_step: OnStep | None = None,
) -> TuneRecord:
    """Tune an op; with `out` and `table` write the record and the measured rows, after each key.

    Args:
        op: its name.
        settings: see `wavecrest.tune.session.Settings`.
        device: as for `wavecrest.hardware.detect`.
        out: the record's file.
        table: a CSV of measured rows as in `wavecrest/dispatch/tuned/data`: rows of the same keys are replaced.
        keep: write the rows into the user's database too; None: on a GPU, if no `table` is given.
        resume: keep the keys of an existing record at `out`.
        executor: "local": in child processes, one for each GPU like the device; "ray": the same on each GPU of a Ray
            cluster; "here": in this process, which a candidate that crashes or hangs takes with it.
        children: number of workers, the processes that run candidates; None: one per GPU, and on the CPU one (ray:
            one per core).
        on_step: called while the work goes on.

    Raises:
        InvalidArgument: an unknown op, suite, backend or executor; fewer GPUs than children; a table without a GPU, or
            of another one.
        OutputError, TableError, RecordError: a file cannot be written or is damaged; found before measuring.
        EnvironmentProblem: the device is not here, or was lost; no child process is left.
        MissingDependency: ray is not installed.
    """
    _check(settings)
    from wavecrest.tune import session

    target, overlay = _target(device, table, keep)
    starts = _starts(executor, target, children, one=_is_one(device))
    targets = session.Targets(out, table, overlay)
    return session.tune(op, target, settings, targets, resume=resume, starts=starts, on_step=on_step)


def run_file(
    path: Path,
    settings: Settings,
    *,
    device: str | None = None,
    out: Path | None = None,
    table: Path | None = None,
    keep: bool | None = None,
    resume: bool = False,
    executor: str = "local",
    children: int | None = None,
    on_step: OnStep | None = None,
) -> list[TuneRecord]:
    """Tune the calls or shapes that a file lists, with one record per op.

    Args:
        path: NAME.jsonl, written by `registry.record_misses` or through WAVECREST_MISSES; or NAME.csv, see
            `wavecrest.bench.shapes.read`.
        settings: see `wavecrest.tune.session.Settings`; the budget is that of all ops together.
        device, table, keep, resume, executor, children, on_step: as for `run`; a table takes the rows of one op.
        out: the record's file; with several ops each has its own, "<stem>_<op>.json" beside it.

    Raises:
        TableError: the file is damaged; the message names the lines.
        InvalidArgument: nothing in it can be tuned here; the message says why.
        OutputError, EnvironmentProblem, MissingDependency: as for `run`.
    """
    _check(settings)
    from wavecrest.records import files
    from wavecrest.tune import session

    target, overlay = _target(device, table, keep)
    begin = time.perf_counter()
    planned = _listed(path, target)
    if table is not None and len(planned) > 1:
        raise InvalidArgument(f"--table is for one op, and {path} has {', '.join(planned)}: tune them one by one")
    starts = _starts(executor, target, children, one=_is_one(device))
    found = []
    for name, given in planned.items():
        file = out if out is None or len(planned) == 1 else files.beside(out, name)
        rest = max(1e-3, settings.budget - (time.perf_counter() - begin))
        mine = replace(settings, suite="shapes" if path.suffix == ".csv" else "misses", budget=rest)
        targets = session.Targets(file, table, overlay)
        found.append(session.tune(name, target, mine, targets, resume=resume, starts=starts, on_step=on_step, **given))
    return found


def run_workload(
    spec: str,
    settings: Settings,
    *,
    device: str | None = None,
    out: Path | None = None,
    keep: bool | None = None,
    executor: str = "local",
    children: int | None = None,
    on_step: OnStep | None = None,
) -> WorkloadTuneRecord:
    """Tune the calls of a workload; the rows are kept only if they make the workload faster.

    Args:
        spec: as for `wavecrest.measure.workload.load`.
        settings: see `wavecrest.tune.session.Settings`; the budget is that of all keys together.
        out: the record's file.
        device, keep, executor, children, on_step: as for `run`.

    Raises:
        WorkloadError: it cannot be loaded.
        InvalidArgument: it calls nothing that can be tuned here; the message says why.
        OutputError, EnvironmentProblem, MissingDependency: as for `run`.
    """
    _check(settings)
    target, overlay = _target(device, None, keep)
    starts = _starts(executor, target, children, one=_is_one(device))
    return _tune_workload.run(spec, target, settings, overlay=overlay, out=out, starts=starts, on_step=on_step)


def _listed(path: Path, target: Device) -> dict[str, dict[str, Any]]:
    """By op, the arguments of `session.tune` that select the calls."""
    from wavecrest import ops
    from wavecrest.bench import shapes
    from wavecrest.dispatch.tuned import untuned_calls as files
    from wavecrest.tune import untuned_calls

    if path.suffix == ".csv":
        listed = shapes.read(path, target.torch_name, fp8=target.known.fp8 if target.known else None)
        if not listed:
            raise InvalidArgument(f"{path} has nothing to tune: it has no row")
        return {name: {"cases": own.cases, "sources": own.sources} for name, own in listed.items()}
    planned: dict[str, dict[str, Any]] = {}
    reasons: list[str] = []
    for name, untuned in untuned_calls.by_op(files.read(path)).items():
        cases, left = untuned_calls.cases(ops.get(name), untuned, target.arch, target.torch_name)
        reasons += left.values()
        if cases:
            planned[name] = {"cases": cases, "left": left}
    if not planned:
        why = "; ".join(dict.fromkeys(reasons)) or "it has no line"
        raise InvalidArgument(f"{path} has nothing to tune here: {why}")
    return planned


def _is_one(device: str | None) -> bool:
    """True if a device name has a number, as cuda:1 does and cuda does not."""
    return device is not None and ":" in device


def _starts(executor: str, target: Device, children: int | None, *, one: bool) -> Sequence[Start] | None:
    """The functions that start the workers, one for each device; None to tune in this process."""
    if children is not None and children < 1:
        raise InvalidArgument(f"--children must be at least 1, not {children}")
    if executor == "here":
        return None
    if executor == "local":
        from wavecrest.tune import workers

        return workers.local(target, children, one=one)
    if executor == "ray":
        from wavecrest.integrations import ray

        return ray.workers_of(target, children)
    raise InvalidArgument(f"no executor {executor!r}; there are {', '.join(EXECUTORS)}")


def _check(settings: Settings) -> None:
    options = (("--seconds", settings.seconds), ("--budget", settings.budget), ("--timeout", settings.timeout))
    for option, value in options:
        if not value > 0:
            raise InvalidArgument(f"{option} must be above zero, not {value:g}")
    if settings.candidates is not None and settings.candidates < 1:
        raise InvalidArgument(f"--candidates must be at least 1, not {settings.candidates}")
    if settings.workers is not None and settings.workers < 1:
        raise InvalidArgument(f"--workers must be at least 1, not {settings.workers}")
    if settings.in_a_row < 1:
        raise InvalidArgument(f"--in-a-row must be at least 1, not {settings.in_a_row}")
    for name in settings.modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise InvalidArgument(f"--import {name}: {error}") from error


def _configs(texts: list[str] | None) -> tuple[Config, ...] | None:
    """The configurations of `--config`; None without the option."""
    from wavecrest.dispatch.tuned import table

    if not texts:
        return None
    try:
        found = [table.parse_config(text) for text in texts]
    except table.Malformed as error:
        raise InvalidArgument(f"--config: {error}") from error
    return tuple(one for one in found if one is not None)


def _target(device: str | None, table: Path | None, keep: bool | None) -> tuple[Device, Overlay | None]:
    """The device, and the user's database if rows are to be kept in it."""
    from wavecrest import hardware
    from wavecrest.dispatch.tuned import Overlay

    target = hardware.detect(device)
    on_gpu = target.kind != "cpu"
    if not on_gpu and (table is not None or keep):
        option = "--keep" if table is None else "--table"
        raise InvalidArgument(f"{option} is for a GPU: dispatch reads its rows for calls there alone")
    overlay = Overlay.of_user()
    if keep and overlay is None:
        raise InvalidArgument("--keep has no file to write: WAVECREST_DATABASE is off")
    wanted = (on_gpu and table is None) if keep is None else keep
    return target, overlay if wanted else None


def show(record: TuneRecord) -> None:
    """Print a record for people."""
    out, header, compiled = _shared.out, record.header, record.compilation
    out.print(
        f"{escape(record.op)} · suite {escape(record.suite)} · {escape(header.device['name'])} "
        f"({escape(header.device['arch'])}) · torch {escape(str(header.versions.torch))} · triton "
        f"{escape(str(header.versions.triton))}"
    )
    ahead = f"none, {compiled.note}" if compiled.note else f"{compiled.kernels} in {compiled.seconds:.0f} s"
    late = f", {compiled.left} left for their first call" if compiled.left else ""
    many = "es" if record.children > 1 else ""
    beside = f", in {record.children} child process{many}" if record.children else ""
    spent = f"{record.seconds:.0f} s in all{beside}"
    out.print(f"[dim]compiled before: {escape(ahead)}{late}; {spent}[/dim]")
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("case", overflow="fold", min_width=8)
    table.add_column("winner", overflow="fold", min_width=12)
    # the ratio stands below PyTorch's time, which keeps the table within 50 columns
    for title in ("time", "PyTorch"):
        table.add_column(title, justify="right", no_wrap=True)
    for key in record.keys:
        table.add_row(*_row(key))
    _shared.print_table(table)
    for line in notes(record):
        out.print(line, soft_wrap=True)


def _row(key: TunedKey) -> list[str]:
    if key.backend is None or key.us is None:
        return [escape(key.case), "[red]none[/red]", "–", "–"]
    config = " ".join(f"{name}={value}" for name, value in key.config.items())
    native = "–" if key.native_us is None else _shared.format_time(key.native_us / 1e3)
    if key.ratio is not None and key.ci is not None and key.backend != "torch":
        native += f"\n{key.ratio:.2f}× {key.ci}"
    return [
        escape(key.case),
        f"{escape(key.backend)}\n[dim]{escape(config)}[/dim]" if config else escape(key.backend),
        _shared.format_time(key.us / 1e3),
        escape(native),
    ]


def notes(record: TuneRecord) -> list[str]:
    """Lines below the table: the outcome of the candidates, and the keys without a result."""
    tried = [candidate for key in record.keys for candidate in key.candidates]
    counts = Counter(candidate.status for candidate in tried)
    words = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    won = Counter(key.backend for key in record.keys if key.backend is not None)
    lines = [
        f"{len(tried)} candidates of {len(record.keys)} keys: {words or 'none'}",
        "won by " + (", ".join(f"{escape(name)} {count}" for name, count in sorted(won.items())) or "none"),
    ]
    for status, style in (("wrong", "red"), ("impossible", "red"), ("failed", "yellow")):
        found = [(key, one) for key in record.keys for one in key.candidates if one.status == status]
        lines += [
            f"[{style}]{status}[/{style}]: {escape(key.case)}, {escape(_named(one))}: {escape(one.reason)}"
            for key, one in found[:SHOWN]
        ]
        if len(found) > SHOWN:
            lines.append(f"[{style}]{status}[/{style}]: {len(found) - SHOWN} more, see the record")
    lines += [f"[red]no winner[/red]: {escape(key.case)}: {escape(key.problem)}" for key in record.keys if key.problem]
    lines += [f"[yellow]a child ended[/yellow]: {escape(text)}" for text in record.endings[:SHOWN]]
    if len(record.endings) > SHOWN:
        lines.append(f"[yellow]a child ended[/yellow]: {len(record.endings) - SHOWN} more times, see the record")
    reasons: dict[str, list[str]] = {}
    for case, reason in record.left.items():
        reasons.setdefault(reason, []).append(case)
    for reason, cases in reasons.items():
        few = ", ".join(cases[:3]) + (f" and {len(cases) - 3} more" if len(cases) > 3 else "")
        lines.append(f"[yellow]not tuned[/yellow]: {escape(few)}: {escape(reason)}")
    return lines


def _named(candidate: TuneCandidate) -> str:
    return " ".join([candidate.backend, *(f"{name}={value}" for name, value in candidate.config.items())])


def judge(record: TuneRecord) -> None:
    """Raise if a key has no winner, or if the default is wrong.

    Raises:
        Regression: names the cases.
    """
    bad = [f"{key.case}: {key.problem}" for key in record.keys if key.backend is None]
    bad += [
        f"{key.case}: the default {_named(one)} is {one.status}: {one.reason}"
        for key in record.keys
        for one in key.candidates
        if one.role == "default" and one.status in ("wrong", "failed")
    ]
    if bad:
        raise Regression(f"{len(bad)} without a valid result: {'; '.join(bad[:3])}{' …' if len(bad) > 3 else ''}")


def command(
    op: Annotated[
        str,
        typer.Argument(
            metavar="OP",
            help="The op's name; a file of untuned calls, NAME.jsonl (WAVECREST_MISSES); one of shapes, NAME.csv; or "
            "a workload, FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION, whose calls are tuned, and kept if it is faster.",
        ),
    ],
    suite: Annotated[str, typer.Option(help="The cases, shared or quick.")] = "shared",
    matching: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only cases with this in their name. Default: all.")
    ] = None,
    backends: Annotated[
        str | None,
        typer.Option(help="Only these backends beside PyTorch, such as triton,triton_gemv. Default: all."),
    ] = None,
    device: _shared.DeviceOption = None,
    budget: Annotated[str, typer.Option(help="Time after which no key is begun, such as 90s or 10m.")] = "10m",
    seconds: Annotated[
        float, typer.Option(help="Longest sampling time of a key's final; 60 rounds are the least.")
    ] = 0.4,
    in_a_row: Annotated[
        int,
        typer.Option(
            "--in-a-row",
            metavar="N",
            help="Time N calls in a row in one captured graph, each on tensors of its own, as a captured model makes "
            "them; 1: a call alone, without a graph.",
        ),
    ] = 1,
    workers: Annotated[
        int | None,
        typer.Option(help="Number of processes that compile kernels, before any is timed. Default: all cores but one."),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            "--candidates",
            metavar="N",
            help="Try only the default configuration and the N that the cost model ranks first. Default: all.",
        ),
    ] = None,
    configs: Annotated[
        list[str] | None,
        typer.Option(
            "--config",
            metavar="TEXT",
            help="Try this configuration, such as 'BLOCK_N=8 BLOCK_K=512 SPLIT_K=1 num_warps=2 num_stages=6', beside "
            "PyTorch, and no other. Repeatable.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            help="Write the record here after each key, as JSON; as .jsonl.gz, compressed.",
        ),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="Write the rows that dispatch reads into this table; needs --out."),
    ] = None,
    keep: Annotated[
        bool | None,
        typer.Option(
            "--keep/--no-keep",
            help="Whether to write the rows into the user's database, which dispatch reads before the package's. "
            "Default: on a GPU, where there is no --table.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the keys that the record at --out has.")] = False,
    executor: Annotated[
        str,
        typer.Option(
            help="Where keys are tuned: local (a child process a GPU), ray (the same on every GPU of a cluster), here."
        ),
    ] = "local",
    children: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of processes that run candidates. Default: one a GPU; on the CPU one."),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(help="Seconds without a message from a child process after which its candidate is given up."),
    ] = 60.0,
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="Import this first: ops of your own. Repeatable."),
    ] = None,
    kernels: _shared.KernelsOption = None,
    json: _shared.JsonOption = False,
) -> None:
    """Find the fastest correct backend and configuration for each shape of an op, PyTorch among them.

    Kernels are compiled first, in parallel; every candidate is held against the op's definition before it is timed; a
    tie keeps the default, or else PyTorch. Under torchrun rank 0 tunes, on every GPU that it sees.
    """
    if not _ranks.tunes(op):
        return
    from wavecrest.tune.session import Settings

    settings = Settings(
        suite=suite,
        matching=matching or "",
        backends=None if backends is None else tuple(part.strip() for part in backends.split(",") if part.strip()),
        budget=parse_duration(budget),
        seconds=seconds,
        workers=workers,
        candidates=count,
        in_a_row=in_a_row,
        configs=_configs(configs),
        timeout=timeout,
        modules=tuple(modules or ()),
        kernels=tuple(str(Path(one).resolve()) if one.endswith(".py") else one for one in kernels or ()),
    )
    asked = _Asked(device, out, table, keep, resume, executor, children)
    workload: WorkloadTuneRecord | None = None
    try:
        with _shown_steps() as on_step:
            if ":" in op:
                _require_workload_options(asked, matching)
                workload = _tune_workload_of(op, settings, asked, on_step)
                found = workload.tunes
            elif op.endswith(_FILES):
                found = _tune_file(Path(op), settings, asked, on_step)
            else:
                found = [_tune_op(op, settings, asked, on_step)]
    except KeyboardInterrupt:
        if out is not None:
            _shared.err.print(
                f"what was found is in {escape(str(out))}; --resume goes on", highlight=False, soft_wrap=True
            )
        raise
    if workload is not None:
        _shared.print_json(workload) if json else _tune_workload.show(workload)
    for record in found if workload is None else ():
        _shared.print_json(record) if json else show(record)
    for path in (out, table):
        if path is not None:
            _shared.err.print(f"written to {escape(str(path))}", highlight=False, soft_wrap=True)
    for record in found:
        judge(record)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options of a command that say where it tunes and what it writes; see `run`."""

    device: str | None
    out: Path | None
    table: Path | None
    keep: bool | None
    resume: bool
    executor: str
    children: int | None


@contextmanager
def _shown_steps() -> Iterator[OnStep]:
    """A progress display, and the function that tells it of each step."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=_shared.err, transient=True) as progress:
        task = progress.add_task("loading", total=None)

        def on_step(what: str, done: int, planned: int) -> None:
            if done == 0:
                # cases, kernels and keys take different times each
                progress.reset(task)
            progress.update(task, description=escape(what), completed=done, total=planned)

        yield on_step


def _tune_op(op: str, settings: Settings, asked: _Asked, on_step: OnStep) -> TuneRecord:
    """The cases of one op's suite."""
    return run(
        op, settings, device=asked.device, out=asked.out, table=asked.table, keep=asked.keep, resume=asked.resume,
        executor=asked.executor, children=asked.children, on_step=on_step,
    )  # fmt: skip


def _tune_file(path: Path, settings: Settings, asked: _Asked, on_step: OnStep) -> list[TuneRecord]:
    """The calls or shapes that a file lists."""
    return run_file(
        path, settings, device=asked.device, out=asked.out, table=asked.table, keep=asked.keep, resume=asked.resume,
        executor=asked.executor, children=asked.children, on_step=on_step,
    )  # fmt: skip


def _tune_workload_of(spec: str, settings: Settings, asked: _Asked, on_step: OnStep) -> WorkloadTuneRecord:
    """The calls that a workload makes."""
    return run_workload(
        spec, settings, device=asked.device, out=asked.out, keep=asked.keep, executor=asked.executor,
        children=asked.children, on_step=on_step,
    )  # fmt: skip


def _require_workload_options(asked: _Asked, matching: str | None) -> None:
    """Raise InvalidArgument for an option that a workload does not take."""
    given = {"--table": asked.table is not None, "--resume": asked.resume, "--matching": bool(matching)}
    for option in (name for name, is_given in given.items() if is_given):
        raise InvalidArgument(f"{option} is for an op, not for a workload")
