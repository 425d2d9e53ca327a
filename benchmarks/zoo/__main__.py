"""The models of the zoo: eager, torch.compile, by hand, and `wavecrest optimize` with its default settings.

    PYTHONPATH=src python -m benchmarks.zoo --out evidence/<machine>/<date>_zoo_models.jsonl.gz \\
        [--models bert-base,vit-b16] [--budget 90s] [--seconds 2] [--total 570s]

Every model runs in a process of its own; one that dies, or runs out of its time, is a run with that as its end. The
file grows with every row. A second call goes on with the models that are not done, so that a machine that is there for
ten minutes at a time can measure all of them.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import parts
from benchmarks.zoo.measure import measure, summary
from benchmarks.zoo.registry import Entry, entries

from wavecrest import hardware
from wavecrest.cli.optimize import parse_duration
from wavecrest.errors import WavecrestError
from wavecrest.records import provenance

# a model's limit beyond its budget: imports, weights, the peers' compilations and the comparisons
SHARE, BESIDE = 1.15, 180.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zoo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", help="names, joined by commas; all that the device has a size for without it")
    parser.add_argument("--list", action="store_true", help="print the models and end")
    parser.add_argument("--out", type=Path, help="record; models that are done in it are left alone")
    parser.add_argument("--again", action="store_true", help="measure models that are done once more")
    parser.add_argument("--device", help="where to run; the GPU if there is one, else the CPU")
    parser.add_argument("--tiny", action="store_true", help="small variants of the models, for tests")
    parser.add_argument("--budget", type=parse_duration, default=300.0, help="of wavecrest, a model (default 300s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="sampling time of a pair (default 2)")
    parser.add_argument(
        "--autotune", type=parse_duration, default=0.0, metavar="TIME", help="also max-autotune, given up after TIME"
    )
    parser.add_argument("--limit", type=parse_duration, help="of a model, in all (default: by --budget)")
    parser.add_argument("--total", type=parse_duration, default=math.inf, help="of this call; the rest is not started")
    for hidden in ("--process", "--known", "--scratch", "--command"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser


def _limit(args: argparse.Namespace) -> float:
    return float(args.limit or SHARE * args.budget + args.autotune + BESIDE)


def _part(entry: Entry, limit: float) -> parts.Part:
    return parts.Part(entry.name, limit, partial(measure, entry), summary=summary)


def _chosen(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Entry]:
    known = entries()
    if args.models:
        names = args.models.split(",")
        wrong = [name for name in names if name not in known]
        if wrong:
            parser.error(f"no model {wrong[0]!r}; there are {', '.join(known)}")
        return [known[name] for name in names]
    on_cpu = (args.device or hardware.detect().torch_name) == "cpu"
    return [entry for entry in known.values() if args.tiny or entry.cpu or not on_cpu]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the models as the command line says; 1 where one of them did not end well."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.process:
        parts.inside(_part(entries()[args.process], math.inf), args)
        return 0
    if args.list:
        for entry in entries().values():
            sys.stdout.write(f"{entry.name:22} {entry.library:13} {entry.about}\n")
        return 0
    if args.out is None:
        parser.error("--out is missing: the file for results")
    chosen = _chosen(parser, args)
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        file = parts.File(args.out)
    except (OSError, WavecrestError) as error:
        parser.error(str(error))
    done = set() if args.again else file.done()
    open_ = [entry for entry in chosen if entry.name not in done]
    for entry in open_:
        if entry.missing:
            file.add(parts.Run(entry.name, ended=f"not started: {entry.missing}"))
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "benchmarks.zoo", *_passed(args), "--scratch", scratch]
        runnable = [_part(entry, _limit(args)) for entry in open_ if not entry.missing]
        well = parts.run_all(runnable, command, args.total, file) == 0
    return 0 if well and all(not entry.missing for entry in open_) else 1


def _passed(args: argparse.Namespace) -> list[str]:
    """The options that a model's process gets, and the command as the record names it."""
    numbers = {"--budget": f"{args.budget}s", "--seconds": args.seconds, "--autotune": f"{args.autotune}s"}
    found = [text for name, value in numbers.items() for text in (name, str(value))]
    found += ["--tiny"] * args.tiny + (["--device", args.device] if args.device else [])
    # the program's name says nothing of a package
    return [*found, "--command", f"python -m benchmarks.zoo {provenance.command_line().partition(' ')[2]}"]


if __name__ == "__main__":
    sys.exit(main())
