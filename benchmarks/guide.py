"""The benchmark tables of the AITER guide by one command: GEMMs, convolutions, attention, ResNet, BERT; eager and ours.

    PYTHONPATH=src python -m benchmarks.guide --out evidence/<machine>/<date>_guide_tables.jsonl.gz [--budget 20m]
    PYTHONPATH=src python -m benchmarks.guide --from FILE [--against OLDER]

The first measures and prints the tables as Markdown; the second prints them from a record, with a comparison of two
versions. Every table and model is a process of its own with a time limit; rows that did not fit are in the tables with
the reason. A second call with one file goes on with what is not done. The sizes are the guide's on a GPU, in float16;
on a CPU the batch is one and the dtype float32. No figure is the guide's.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from benchmarks import parts
from benchmarks.parts import Report, Row
from benchmarks.zoo import measure as zoo
from benchmarks.zoo.registry import entries
from torch import Tensor

import wavecrest
from wavecrest import hardware
from wavecrest.cli.optimize import parse_duration
from wavecrest.errors import RecordError, WavecrestError
from wavecrest.measure import interleaved, numerics, timing
from wavecrest.records import files, provenance

# the guide's rows: sides of square matrices; side, channels in and out of convolutions 3 × 3; lengths of sequences
SQUARES = (1024, 2048, 4096, 8192)
IMAGES = ((224, 3, 64), (112, 64, 128), (56, 128, 256), (28, 256, 512))
LENGTHS = (128, 256, 512, 1024, 2048)
HEADS, HEAD_DIM, BATCH = 8, 64, 32
MODELS = ("resnet-50", "resnet-152", "bert-base", "bert-large")
# of a trial: sizes that take no time
TINY_SQUARES, TINY_IMAGES, TINY_LENGTHS = (16, 32), ((8, 3, 4), (6, 4, 4)), (8, 16)
# factor by which ours may exceed the error limits of a GEMM against eager, which is rounded itself
SLACK = 10.0
# the rows that the guide compares two versions by
VERSIONS = (("matmul", "4096"), ("conv2d", "56"), ("attention", "512"), ("resnet-50", ""), ("bert-base", ""))
# the row that says which rows a table has
PLANNED = "rows"
# seconds of a part beyond its rows: start and imports
BESIDE = 30.0


@dataclass(frozen=True, slots=True)
class Case:
    """A row: its name, its cells in front, the two calls, and the operations of one (0: no TFLOP/s is shown)."""

    name: str
    cells: tuple[str, ...]
    make: Callable[[], tuple[Callable[[], Tensor], Callable[[], Tensor]]]
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Site:
    """Where and in which sizes."""

    device: str
    tiny: bool

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all tensors."""
        return torch.float32 if self.device == "cpu" else torch.float16

    @property
    def batch(self) -> int:
        """Images and sequences of a call."""
        return 1 if self.device == "cpu" else BATCH

    def noise(self, *shape: int) -> Tensor:
        """Normal values."""
        return torch.randn(shape, dtype=torch.float32).to(self.device, self.dtype)


def _matmul(site: Site, side: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    a, b = site.noise(side, side), site.noise(side, side)
    return partial(torch.matmul, a, b), partial(wavecrest.matmul, a, b)


def _conv2d(site: Site, side: int, channels: int, out: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    x, weight = site.noise(site.batch, channels, side, side), site.noise(out, channels, 3, 3)
    return partial(F.conv2d, x, weight, padding=1), partial(wavecrest.conv2d, x, weight, padding=1)


def _attention(site: Site, length: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    q, k, v = (site.noise(site.batch, HEADS, length, HEAD_DIM) for _ in range(3))
    return partial(F.scaled_dot_product_attention, q, k, v), partial(wavecrest.attention, q, k, v)


def cases(table: str, site: Site) -> list[Case]:
    """The rows of a table of ops, the cheapest first: what does not fit into the time is the last of them."""
    if table == "matmul":
        squares = TINY_SQUARES if site.tiny else SQUARES
        return [Case(str(n), (f"{n}x{n}",), partial(_matmul, site, n), 2 * n**3) for n in squares]
    if table == "conv2d":
        return [
            Case(str(side), (f"{side}x{side}", str(site.batch), f"{c}→{o}", "3x3"), partial(_conv2d, site, side, c, o))
            for side, c, o in (TINY_IMAGES if site.tiny else IMAGES)
        ]
    lengths = TINY_LENGTHS if site.tiny else LENGTHS
    return [Case(str(n), (str(n), str(site.batch), str(HEADS)), partial(_attention, site, n)) for n in lengths]


def measured(case: Case, site: Site, *, seconds: float, limit: float) -> Row:
    """Eager and ours of a row in turn, ours compared with eager before; a wrong answer has no time."""
    eager, ours = case.make()
    compared = numerics.compare(ours(), eager())
    allowed = numerics.tolerance("gemm", str(site.dtype).removeprefix("torch."))
    facts = {"flops": case.flops, "error": float(f"{compared.relative:.2g}")}
    if not compared.within(numerics.Tolerance(SLACK * allowed.relative, SLACK * allowed.worst)):
        return {**facts, "problem": f"the answer differs from eager's by {compared.relative:.2g}"}
    taken = interleaved.measure([eager, ours], device=site.device, seconds=seconds, limit=limit)
    series = [[float(f"{sample:.5g}") for sample in one] for one in taken.samples]
    ratio, ci = timing.bootstrap_speedup([(series[0], series[1])])
    return {
        **facts, "eager_ms": statistics.median(series[0]), "ms": statistics.median(series[1]),
        "ratio": float(f"{ratio:.5g}"), "ci": [float(f"{end:.5g}") for end in (ci.low, ci.high)],
        "rounds": taken.rounds, "clock": taken.clock, "eager_samples": series[0], "samples": series[1],
    }  # fmt: skip


def _ops(table: str, report: Report, args: argparse.Namespace) -> None:
    device = hardware.detect(args.device)
    site = Site(device.torch_name, args.tiny)
    report.header(provenance.header(device, command=args.command).model_dump(mode="json"))
    planned = cases(table, site)
    if not report.has(PLANNED):
        report.row(PLANNED, rows=[[case.name, *case.cells] for case in planned])
    with torch.no_grad():
        for case in planned:
            if report.has(case.name) or not report.at(case.name):
                continue
            torch.manual_seed(0)
            try:
                report.row(case.name, **measured(case, site, seconds=args.seconds, limit=args.case_seconds))
            # one row that fails, by memory for instance, leaves the others
            except Exception as error:
                first = (str(error).strip().splitlines() or [""])[0]
                report.row(case.name, problem=f"{type(error).__name__}: {first}"[:300])


def _model(name: str, report: Report, args: argparse.Namespace) -> None:
    zoo.measure(entries()[name], report, args, only=("eager",))


TABLES: dict[str, tuple[str, tuple[str, ...], Callable[[str, Report, argparse.Namespace], None]]] = {
    "matmul": ("Matrix multiplication (TFLOP/s)", ("matrix size",), _ops),
    "conv2d": ("Convolution (ms)", ("input size", "batch", "channels", "kernel"), _ops),
    "attention": ("Attention (ms)", ("sequence length", "batch", "heads"), _ops),
    **dict.fromkeys(MODELS, ("End-to-end models", ("model", "batch", "dtype"), _model)),
}


def _part(name: str, args: argparse.Namespace) -> parts.Part:
    rows = 1 if name in MODELS else len(cases(name, Site("cpu", args.tiny)))
    limit = args.model_budget + 2 * BESIDE if name in MODELS else rows * 2 * args.case_seconds
    return parts.Part(name, BESIDE + limit, partial(TABLES[name][2], name), summary=zoo.summary)


# --- tables


def runs_of(path: Path) -> dict[str, Row]:
    """The newest run of each part in a record; one that was done goes before one that was not.

    Raises:
        RecordError: it is damaged, or not of this benchmark.
    """
    document = files.read_json(path, what="record of the guide's tables")
    if not isinstance(document, dict) or not isinstance(document.get("runs"), list):
        raise RecordError(f"{path} is no record of benchmarks.guide: it has no runs")
    found: dict[str, Row] = {}
    for run in document["runs"]:
        before = found.get(run["part"])
        if before is None or run["ended"] == "done" or before["ended"] != "done":
            found[run["part"]] = run
    if not set(found) & set(TABLES):
        raise RecordError(f"{path} is no record of benchmarks.guide: it has none of {', '.join(TABLES)}")
    return found


def page(runs: dict[str, Row], against: dict[str, Row] | None = None) -> str:
    """The tables as Markdown; `against`: with a comparison of each metric with an older record."""
    header = _header(runs)
    found = [f"**Measured** on {_machine(header)}, `{header['command']}`." if header else "Nothing was measured."]
    for title in dict.fromkeys(TABLES[name][0] for name in TABLES if name in runs):
        found.append(f"### {title}")
        found.append("\n".join(_table([runs[name] for name in TABLES if TABLES[name][0] == title and name in runs])))
    found.append(
        "Speed-up: eager's time over ours with its 95 % interval, both in turn in one process; above 1 ours is faster."
    )
    if against is not None:
        found += ["### Two versions", "\n".join(_versions(against, runs))]
    return "\n\n".join(found) + "\n"


def _header(runs: dict[str, Row]) -> Row | None:
    return next((run["header"] for run in runs.values() if run["header"] is not None), None)


def _machine(header: Row) -> str:
    versions = header["versions"]
    return (
        f"{header['device']['name']} ({header['device']['arch']}), {header['created'][:10]}, "
        f"torch {versions['torch']}, wavecrest {_version(header)}"
    )


def _version(header: Row) -> str:
    return f"{header['versions']['wavecrest']} ({header['commit'] or 'no commit'})"


def _table(runs: list[Row]) -> Iterator[str]:
    columns = (*TABLES[runs[0]["part"]][1], "PyTorch", "wavecrest", "speed-up")
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for run in runs:
        rows = list(_model_rows(run) if run["part"] in MODELS else _op_rows(run))
        for cells in rows:
            yield f"| {' | '.join(_cell(text) for text in cells)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _op_rows(run: Row) -> Iterator[list[str]]:
    done = {row["case"]: row for row in run["rows"]}
    # a process that never began has said nothing of its rows
    nothing = [["all", *("–" for _ in TABLES[run["part"]][1])]]
    for name, *cells in done.get(PLANNED, {"rows": nothing})["rows"]:
        row = done.get(name, {"problem": run["ended"]})
        if "ms" not in row:
            yield [*cells, "–", f"no time: {row['problem']}", "–"]
            continue
        if row["flops"]:
            figures = [f"{row['flops'] / row[side] / 1e9:.3g}" for side in ("eager_ms", "ms")]
        else:
            figures = [f"{row[side]:.3g}" for side in ("eager_ms", "ms")]
        few = "" if row["rounds"] >= timing.MIN_SAMPLES else f", {row['rounds']} rounds alone"
        yield [*cells, *figures, f"{_speedup(row)}{few}"]


def _speedup(row: Row) -> str:
    return f"{row['ratio']:.2f}× [{row['ci'][0]:.2f}, {row['ci'][1]:.2f}]"


def _model_rows(run: Row) -> Iterator[list[str]]:
    rows = {row["case"]: row for row in run["rows"]}
    about, eager = rows.get("model", {}), rows.get("eager", {})
    cells = [run["part"], str(about.get("batch", "–")), about.get("dtype", "–")]
    if "ms" not in eager:
        reason = eager.get("problem") or rows.get(zoo.WAVECREST, {}).get("problem") or run["ended"]
        yield [*cells, "–", f"no time: {reason}", "–"]
        return
    rates = [f"{about['count'] / eager[name] * 1e3:,.4g} {about['unit']}/s" for name in ("ms", "ours_ms")]
    yield [*cells, *rates, _speedup(eager) if eager["beside"] == zoo.WAVECREST else "–"]


def _versions(before: dict[str, Row], after: dict[str, Row]) -> Iterator[str]:
    """A line a metric of both records: two runs at two times, so what differs need not be the version's doing."""
    headers = [_header(runs) for runs in (before, after)]
    names = ["–" if header is None else _version(header) for header in headers]
    yield f"| metric | {names[0]} | {names[1]} | change of time |"
    yield "|---|---|---|---|"
    for part, case in VERSIONS:
        times = [_time(runs.get(part), case) for runs in (before, after)]
        shown = ["–" if ms is None else f"{ms:.3g} ms" for ms in times]
        change = "–" if times[0] is None or times[1] is None else f"{times[1] / times[0] - 1:+.1%}"
        yield f"| {part}{f' {case}' if case else ''} | {shown[0]} | {shown[1]} | {change} |"
    if None not in headers and headers[0]["device"]["name"] != headers[1]["device"]["name"]:  # type: ignore[index]
        yield ""
        yield "The two records are of different devices."


def _time(run: Row | None, case: str) -> float | None:
    for row in [] if run is None else run["rows"]:
        if row["case"] == (case or "eager"):
            found = row.get("ms" if case else "ours_ms")
            return None if found is None else float(found)
    return None


# --- the command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.guide", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"tables and models, joined by commas, of {', '.join(TABLES)}")
    parser.add_argument("--out", type=Path, help="record; what is done in it is left alone")
    parser.add_argument("--from", dest="source", type=Path, help="print the tables of this record; measures nothing")
    parser.add_argument("--against", type=Path, help="a record of an older version, to compare with")
    parser.add_argument("--device", help="where to run; the GPU if there is one, else the CPU")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for tests")
    parser.add_argument("--budget", dest="total", type=parse_duration, default=math.inf, help="of this call, as 20m")
    parser.add_argument("--case-seconds", type=float, default=60.0, help="of a row of ops, more or less (default 60)")
    parser.add_argument(
        "--model-budget", type=parse_duration, default=300.0, help="of `wavecrest optimize`, a model (default 300s)"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="sampling time of a row (default 1)")
    for hidden in ("--process", "--known", "--scratch", "--command"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or print as the command line says; 1 where a part did not end well."""
    parser = _parser()
    args = parser.parse_args(argv)
    # the zoo's names for what a model's process may take
    args.budget, args.autotune = args.model_budget, 0.0
    if args.process:
        parts.inside(_part(args.process, args), args)
        return 0
    names = args.only.split(",") if args.only else list(TABLES)
    if wrong := [name for name in names if name not in TABLES]:
        parser.error(f"no table {wrong[0]!r}; there are {', '.join(TABLES)}")
    if (args.out is None) == (args.source is None):
        parser.error("give --out, the file for results, or --from, a file to print")
    if min(args.case_seconds, args.seconds) <= 0:
        parser.error("--case-seconds and --seconds must be above zero")
    try:
        older = None if args.against is None else runs_of(args.against)
        well = True if args.source is not None else _measure(args, names)
        sys.stdout.write(page(runs_of(args.source or args.out), older))
    except (OSError, WavecrestError) as error:
        parser.error(str(error))
    return 0 if well else 1


def _measure(args: argparse.Namespace, names: list[str]) -> bool:
    args.out.parent.mkdir(parents=True, exist_ok=True)
    file = parts.File(args.out)
    done = file.done()
    wanted = [name for name in names if name not in done]
    on_cpu = hardware.detect(args.device).kind == "cpu"
    runnable = []
    for name in wanted:
        entry = entries().get(name)
        missing = "" if entry is None else entry.missing
        if entry is not None and not missing and on_cpu and not args.tiny and entry.cpu is None:
            missing = "the zoo has no size of it for a CPU"
        if missing:
            file.add(parts.Run(name, ended=f"not started: {missing}"))()
        else:
            runnable.append(_part(name, args))
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "benchmarks.guide", *_passed(args), "--scratch", scratch]
        well = parts.run_all(runnable, command, args.total, file) == 0
    return well and len(runnable) == len(wanted)


def _passed(args: argparse.Namespace) -> list[str]:
    """The options that the process of a part gets, and the command as the record names it."""
    numbers = {"--model-budget": args.model_budget, "--seconds": args.seconds, "--case-seconds": args.case_seconds}
    found = [text for name, value in numbers.items() for text in (name, str(value))]
    found += ["--tiny"] * args.tiny + (["--device", args.device] if args.device else [])
    # the program's name says nothing of a module
    return [*found, "--command", f"python -m benchmarks.guide {provenance.command_line().partition(' ')[2]}"]


if __name__ == "__main__":
    sys.exit(main())
