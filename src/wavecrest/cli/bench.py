"""`wavecrest bench`: time each bucket of a workload, or an op beside its peers, with an interval."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from wavecrest.cli import _bench_kernels, _bench_ops, _shared
from wavecrest.cli.optimize import parse_duration
from wavecrest.errors import InvalidArgument, OutputError

if TYPE_CHECKING:
    from wavecrest.bench.baseline import OnBucketProgress
    from wavecrest.bench.ops import Settings
    from wavecrest.measure.workload import Workload
    from wavecrest.optimizer.plan import Plan
    from wavecrest.records import BenchRecord, BucketBench, OpBenchRecord

# a size or a dtype by name ("M=1,16", "M=1:64:*2"), or bare numbers; the path of a workload has a dot or a slash
_SIZES = re.compile(r"\w+=[^./]*|\d[\d,:*]*")


def run(
    workload: str | None = None,
    *,
    hf: str | None = None,
    device: str | None = None,
    seconds: float = 5.0,
    output: Path | None = None,
    compiled: bool = False,
    plans: Sequence[Path] = (),
    on_progress: OnBucketProgress | None = None,
) -> BenchRecord:
    """Measure every bucket of a workload; with `output` write the record there.

    Args:
        workload: file.py:function or package.module:function.
        hf: a local Hugging Face model folder, instead.
        device: as for `wavecrest.hardware.detect`.
        seconds: longest sampling time of a bucket; at least 30 samples are taken in any case.
        compiled: also measure `torch.compile` of the model beside it.
        plans: also measure these plans, applied to the model.

    Raises:
        WorkloadError: the workload cannot be loaded or run.
        PlanError: a file is not a plan.
        OutputError: `output` cannot be written; found before anything is measured.
        EnvironmentProblem: the device is not here, or runs out of memory.
    """
    if not seconds > 0:
        raise InvalidArgument(f"--seconds must be above zero, not {seconds:g}")
    from wavecrest import hardware, records
    from wavecrest.bench import baseline, sides
    from wavecrest.measure.workload import load
    from wavecrest.optimizer.plan import Plan
    from wavecrest.records import files

    if output is not None:
        if output.is_dir():
            raise OutputError(f"{output} is a folder; give the name of a file in it")
        files.prepare_folder(output.parent)
    made = {str(path): partial(_applied, Plan.load(path)) for path in plans}
    target = None if device is None else hardware.detect(device).torch_name
    loaded = load(_shared.spec_of(workload, hf), device=target)
    record = baseline.record(
        loaded,
        hardware.detect(loaded.device),
        seconds_per_bucket=seconds,
        on_progress=on_progress,
    )
    forms: dict[str, sides.Make] = {**({"torch.compile": sides.compiled} if compiled else {}), **made}
    record.sides = [sides.beside(loaded, name, make, seconds=seconds) for name, make in forms.items()]
    if output is not None:
        records.save(record, output)
    return record


def _applied(plan: Plan, workload: Workload) -> Any:
    from wavecrest.measure.workload import Buckets

    return plan.apply(workload.model, Buckets(workload.buckets))


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
        f"{escape(record.workload)} · {record.parameters:,} parameters · {escape(record.dtype)} · "
        f"{escape(device['name'])} ({escape(device['arch'])}) · torch {escape(str(versions.torch))}"
    )
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("bucket", overflow="fold", min_width=8)
    for title in ("median\n95 % interval", "mean ± std\nspread", "first call", "memory"):
        table.add_column(title, justify="right", no_wrap=True)
    for bench in record.buckets:
        table.add_row(*_row(bench))
    _shared.print_table(table)
    for bench in record.buckets:
        out.print(f"[dim]{escape(bench.bucket)}: {escape(_shared.shapes_line(bench.shapes))}[/dim]")
    _show_rates(record)
    clocks = sorted({bench.measurement.clock for bench in record.buckets})
    out.print(f"[dim]clock: {escape(', '.join(clocks))}; memory: what one call adds at its peak[/dim]")
    if any(bench.measurement.unstable for bench in record.buckets):
        out.print(
            "[yellow]unstable[/yellow]: the samples differ by more than a tenth of their mean, so no time is given; "
            "stop other programs, or try a longer --seconds"
        )


def _show_rates(record: BenchRecord) -> None:
    """Print samples and tokens a second, of the model as it is and of its other forms."""
    out = _shared.out
    shown = [bench for bench in record.buckets if bench.samples and not bench.measurement.unstable]
    if not record.sides:
        for bench in shown:
            out.print(f"{escape(bench.bucket)}: {_per_second(bench, bench.measurement.median)}")
        return
    by_bucket = {bench.bucket: bench for bench in record.buckets}
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("beside the model as it is", overflow="fold", min_width=16)
    for title in ("model", "this form", "faster\n95 % interval"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("of this form", justify="right", overflow="fold")
    for side in record.sides:
        for pair in side.buckets:
            ratio = f"{pair.ratio:.2f}×\n[dim]{pair.ci.low:.2f}–{pair.ci.high:.2f}[/dim]"
            times = (_shared.format_time(pair.base_ms), _shared.format_time(pair.new_ms))
            name = f"{escape(side.name)}\n[dim]{escape(pair.bucket)}[/dim]"
            table.add_row(name, *times, ratio, _per_second(by_bucket[pair.bucket], pair.new_ms))
    if any(side.buckets for side in record.sides):
        _shared.print_table(table)
    for side in record.sides:
        if side.problem:
            out.print(f"[yellow]{escape(side.name)}[/yellow]: no time: {escape(side.problem)}", soft_wrap=True)
        else:
            facts = f"first answers after {side.first_s:.1f} s, difference from the model's {side.error:.1e}"
            out.print(f"[dim]{escape(side.name)}: {facts}[/dim]")


def _per_second(bench: BucketBench, ms: float) -> str:
    rates = {"samples": bench.samples, "tokens": bench.tokens}
    found = {name: 1e3 * count / ms for name, count in rates.items() if count}
    return ", ".join(f"{rate:,.{0 if rate >= 100 else 1}f} {name}/s" for name, rate in found.items())


def command(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="W",
            help="A workload, file.py:function or package.module:function returning (model, inputs); names of ops, or "
            "xlstm, mlstm or slstm for all their kernels by name; then sizes and dtype in place of the suite's, such "
            "as M=4096 N=1024:8192:*2 dtype=bf16,fp16: one value, several, or a range first:last, with a step or "
            "*factor.",
        ),
    ] = None,
    hf: _shared.HfOption = None,
    kernels: _shared.KernelsOption = None,
    all_ops: Annotated[bool, typer.Option("--all-ops", help="Every op, instead of naming them.")] = False,
    suite: Annotated[str | None, typer.Option(help="Ops: the cases, shared or quick. Default: shared.")] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Ops: a list with commas of eager, compile, liger and aiter, for flash_decoding also sdpa_flash and "
            "sdpa_cudnn; or none. Default: all that are installed, without the last two."
        ),
    ] = None,
    case: Annotated[str | None, typer.Option(help="Ops: only cases with this in their name.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Ops: every shape in this dtype.")] = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            "--csv",
            metavar="FILE",
            help="Ops: the sizes in this file, whose first line names the columns: op (not needed beside one name of "
            "an op), sizes and dtype.",
        ),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="A workload: also torch.compile of it, beside it.")
    ] = False,
    plan: Annotated[
        list[Path] | None,
        typer.Option("--plan", metavar="FILE", help="A workload: also with this plan, beside it (repeatable)."),
    ] = None,
    device: _shared.DeviceOption = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Longest sampling time of a bucket or case; 30 samples are the least. Default: 5; ops 0.25."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Ops: time after which no case is started, such as 90s or 10m; the output names the cases left out. "
            "Default: 10m on a CPU, no limit on a GPU.",
        ),
    ] = None,
    case_seconds: Annotated[
        float | None,
        typer.Option(
            help="Ops: seconds of a case; peers that do not fit are left out and samples are fewer, and the output "
            "says so. Default: 60 on a CPU, no limit on a GPU."
        ),
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
        "--csv": csv, "--budget": budget, "--case-seconds": case_seconds, "--plot": plot, "--from": source,
        "--split": split,
    }  # fmt: skip
    given = [name for name, value in for_ops.items() if value is not None]
    targets, words = _split(targets or [])
    if words or csv is not None:
        _check_sizes(targets, words, given)
    if targets and targets[0] in _bench_kernels.FAMILIES:
        if hf is not None or compiled or plan or len(targets) > 1:
            raise InvalidArgument(f"{targets[0]} is all kernels of a family: give it alone, with sizes behind it")
        _bench_kernels.check(targets[0], given)
        of_kernels: dict[str, Any] = {
            "words": words, "seconds": seconds, "matching": case, "dtype": dtype, "case_seconds": case_seconds,
            "budget": None if budget is None else parse_duration(budget),
        }  # fmt: skip
        known = {name: value for name, value in of_kernels.items() if value is not None}
        _bench_kernels.command(targets[0], known, device, _bench_ops.Targets(output), json)
        return
    names = None if hf is not None else _ops_of(targets, all_ops, source, csv, given)
    if names is not None:
        of_models = [*(["--compile"] if compiled else []), *(["--plan"] if plan else [])]
        if of_models:
            raise InvalidArgument(f"{', '.join(of_models)} is for a workload; ops are beside their --peers")
        places = _bench_ops.Targets(output, plot, split)
        if source is not None:
            _from_file(source, places, json, [*given, *([] if seconds is None else ["--seconds"])], device)
            return
        from wavecrest.bench.ops import Settings

        asked = {
            "suite": suite, "peers": None if peers is None else _peers_of(peers), "matching": case, "dtype": dtype,
            "seconds": seconds, "budget": None if budget is None else parse_duration(budget), "words": words or None,
            "shapes": csv, "case_seconds": case_seconds,
        }  # fmt: skip
        settings = Settings(**{name: value for name, value in asked.items() if value is not None})  # type: ignore[arg-type]
        _measure_ops(names, places, json, settings, device)
        return
    if given:
        raise InvalidArgument(f"{', '.join(given)} is for ops, and {hf or ' '.join(targets)} is a workload")
    if len(targets) > 1:
        raise InvalidArgument(f"one workload at a time, not {' '.join(targets)}")
    forms = {"compiled": compiled, "plans": plan or ()}
    seconds = 5.0 if seconds is None else seconds
    _measure_workload(targets[0] if targets else None, hf, device, seconds, output, json, forms)


def _split(targets: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """The names and workloads of a command line, and the words after them that give sizes and dtype."""
    first = next((place for place, word in enumerate(targets) if _SIZES.fullmatch(word)), len(targets))
    return targets[:first], tuple(targets[first:])


def _check_sizes(targets: list[str], words: tuple[str, ...], given: list[str]) -> None:
    """Raise unless sizes, from words or a file, are of ops and are all that selects cases."""
    asked = "--csv" if not words else words[0]
    if words and targets and targets[0] in _bench_kernels.FAMILIES:
        others = [name for name in given if name == "--dtype" and any(word.startswith("dtype=") for word in words)]
        if others:
            raise InvalidArgument(f"{', '.join(others)} and a word give the dtype; leave one out")
        return
    if words and (not targets or any(":" in target for target in targets)):
        raise InvalidArgument(f"{asked} is a size of an op: give its name first, as in gemm M=4096 N=4096 K=4096")
    others = [name for name in given if name in ("--suite", "--case", "--dtype", "--csv", "--from") and name != asked]
    if others:
        raise InvalidArgument(f"{asked} says which cases there are, so {', '.join(others)} has no meaning beside it")


def _ops_of(
    targets: list[str], all_ops: bool, source: Path | None, csv: Path | None, given: list[str]
) -> list[str] | None:
    """The ops named on the command line (empty: all), or None if it names a workload.

    Raises:
        InvalidArgument: neither, or a mix.
    """
    if source is not None and (targets or all_ops):
        raise InvalidArgument("--from shows a stored result as it is; leave out the names of ops")
    if source is not None or (csv is not None and not targets) or (all_ops and not targets):
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
    if record.suite in _bench_kernels.FAMILIES and (places.plot or places.split):
        raise InvalidArgument(f"{source} is of kernels by name, which have a table and no plot")
    places.prepare()
    _finish(record, places, json, source)


def _measure_ops(
    names: list[str], places: _bench_ops.Targets, json: bool, settings: Settings, device: str | None
) -> None:
    from wavecrest.dispatch import registry

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
    elif record.suite in _bench_kernels.FAMILIES:
        _bench_kernels.show(record)
    else:
        _bench_ops.show(record)
    for path in places.write(record, source):
        _shared.err.print(f"written to {escape(str(path))}", highlight=False, soft_wrap=True)
    _bench_ops.judge(record)


def _measure_workload(
    workload: str | None,
    hf: str | None,
    device: str | None,
    seconds: float,
    output: Path | None,
    json: bool,
    forms: dict[str, Any],
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
            record = run(
                workload, hf=hf, device=device, seconds=seconds, output=output, on_progress=on_progress, **forms
            )
    if json:
        _shared.print_json(record)
    else:
        show(record)
        _shared.print_coverage(seen.by_op())
    if output is not None:
        _shared.err.print(f"written to {escape(str(output))}", highlight=False, soft_wrap=True)
