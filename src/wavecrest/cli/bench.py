"""`wavecrest bench`: time each bucket of a workload, or an op beside its peers, with an interval."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from wavecrest.cli import _bench_ops, _shared
from wavecrest.errors import InvalidArgument, OutputError

if TYPE_CHECKING:
    from wavecrest.bench.baseline import OnBucketProgress
    from wavecrest.records import BenchRecord, BucketBench, OpBenchRecord


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
        seconds: longest sampling time of a bucket; at least 30 samples are taken in any case.

    Raises:
        WorkloadError: the workload cannot be loaded or run.
        OutputError: `output` cannot be written; found before anything is measured.
        EnvironmentProblem: the device is not here, or runs out of memory.
    """
    if not seconds > 0:
        raise InvalidArgument(f"--seconds must be above zero, not {seconds:g}")
    from wavecrest import hardware, records
    from wavecrest.bench import baseline
    from wavecrest.measure.workload import load
    from wavecrest.records import files

    if output is not None:
        if output.is_dir():
            raise OutputError(f"{output} is a folder; give the name of a file in it")
        files.prepare_folder(output.parent)
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
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="W",
            help="A workload, file.py:function or package.module:function returning (model, inputs); or names of ops.",
        ),
    ] = None,
    hf: _shared.HfOption = None,
    all_ops: Annotated[bool, typer.Option("--all-ops", help="Every op, instead of naming them.")] = False,
    suite: Annotated[str | None, typer.Option(help="Ops: the cases, shared or quick. Default: shared.")] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Ops: some of eager,compile,liger,aiter, or none; of flash_decoding sdpa_flash,sdpa_cudnn too. "
            "Default: all that are installed, but the last two."
        ),
    ] = None,
    case: Annotated[str | None, typer.Option(help="Ops: only cases with this in their name.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Ops: every shape in this dtype.")] = None,
    device: _shared.DeviceOption = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Longest sampling time of a bucket or case; 30 samples are the least. Default: 5; ops 0.25."),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Ops: seconds after which no case is started; what is left out is named.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", "--out", metavar="FILE", help="Write the result here, as JSON; as .jsonl.gz, compressed."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Ops: draw the result (.svg or .png).")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Ops: show, draw or split a stored result.")
    ] = None,
    split: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Ops: one result file and plot an op, into this folder.")
    ] = None,
    json: _shared.JsonOption = False,
) -> None:
    """Measure a workload as it is (time, its interval, the first call, memory), or ops beside their peers."""
    for_ops = {
        "--all-ops": all_ops or None, "--suite": suite, "--peers": peers, "--case": case, "--dtype": dtype,
        "--budget": budget, "--plot": plot, "--from": source, "--split": split,
    }  # fmt: skip
    given = [name for name, value in for_ops.items() if value is not None]
    names = None if hf is not None else _ops_of(targets or [], all_ops, source, given)
    if names is not None:
        places = _bench_ops.Targets(output, plot, split)
        if source is not None:
            _from_file(source, places, json, [*given, *([] if seconds is None else ["--seconds"])], device)
            return
        _measure_ops(names, places, json, suite, peers, case, dtype, device, seconds, budget)
        return
    if given:
        raise InvalidArgument(f"{', '.join(given)} is for ops, and {hf or ' '.join(targets or [])} is a workload")
    if len(targets or []) > 1:
        raise InvalidArgument(f"one workload at a time, not {' '.join(targets or [])}")
    _measure_workload(targets[0] if targets else None, hf, device, 5.0 if seconds is None else seconds, output, json)


def _ops_of(targets: list[str], all_ops: bool, source: Path | None, given: list[str]) -> list[str] | None:
    """The ops named on the command line (empty: all), or None if it names a workload.

    Raises:
        InvalidArgument: neither, or a mix.
    """
    if source is not None and (targets or all_ops):
        raise InvalidArgument("--from shows a stored result as it is; leave out the names of ops")
    if source is not None or (all_ops and not targets):
        return []
    if all_ops:
        raise InvalidArgument("give names of ops, or --all-ops")
    # every workload has a colon, and no op does
    plain = [target for target in targets if ":" not in target]
    if not plain:
        if not targets and given:
            raise InvalidArgument(f"{given[0]} is for ops; give their names, or --all-ops")
        return None
    from wavecrest import ops

    known = ops.names()
    for target in plain:
        if target not in known:
            raise InvalidArgument(
                f"{target!r} is neither an op ({', '.join(known)}) nor a workload, which is written "
                "file.py:function or package.module:function"
            )
    if len(plain) < len(targets):
        raise InvalidArgument(f"either ops or one workload, not both: {' '.join(targets)}")
    return plain


def _from_file(source: Path, places: _bench_ops.Targets, json: bool, given: list[str], device: str | None) -> None:
    measuring = [name for name in given if name not in ("--from", "--plot", "--split")]
    measuring += [] if device is None else ["--device"]
    if measuring:
        raise InvalidArgument(f"--from measures nothing, so {', '.join(measuring)} has no meaning beside it")
    record = _bench_ops.load(source)
    places.prepare()
    _finish(record, places, json, source)


def _measure_ops(
    names: list[str],
    places: _bench_ops.Targets,
    json: bool,
    suite: str | None,
    peers: str | None,
    case: str | None,
    dtype: str | None,
    device: str | None,
    seconds: float | None,
    budget: float | None,
) -> None:
    from wavecrest.bench.ops import Settings
    from wavecrest.dispatch import registry

    plain = Settings()
    settings = Settings(
        suite=plain.suite if suite is None else suite,
        peers=plain.peers if peers is None else _peers_of(peers),
        matching=case or "",
        dtype=dtype,
        seconds=plain.seconds if seconds is None else seconds,
        budget=plain.budget if budget is None else budget,
    )
    places.prepare()
    with registry.coverage() as seen:
        record = _bench_ops.measure(names, settings, device, places)
    if not json:
        _shared.print_coverage(seen.by_op())
    _finish(record, places, json, None)


def _peers_of(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    return () if names == ("none",) else names


def _finish(record: OpBenchRecord, places: _bench_ops.Targets, json: bool, source: Path | None) -> None:
    if json:
        _shared.print_json(record)
    else:
        _bench_ops.show(record)
    for path in places.write(record, source):
        _shared.err.print(f"written to {path}", highlight=False, soft_wrap=True)
    _bench_ops.judge(record)


def _measure_workload(
    workload: str | None, hf: str | None, device: str | None, seconds: float, output: Path | None, json: bool
) -> None:
    from wavecrest.dispatch import registry

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("samples"))
    with Progress(*columns, console=_shared.err, transient=True) as progress:
        task = progress.add_task("loading", total=None)

        def on_progress(bucket: str, completed: int, planned: int) -> None:
            progress.update(
                task, description=f"bench {escape(bucket)}", completed=completed, total=max(completed, planned)
            )

        with registry.coverage() as seen:
            record = run(workload, hf=hf, device=device, seconds=seconds, output=output, on_progress=on_progress)
    if json:
        _shared.print_json(record)
    else:
        show(record)
        _shared.print_coverage(seen.by_op())
    if output is not None:
        _shared.err.print(f"written to {output}", highlight=False, soft_wrap=True)
