"""A script of parts that end in every way, for test_parts.py."""

from __future__ import annotations

import argparse
import os
import sys
import time

from benchmarks import parts
from benchmarks.parts import Part, Report


def fine(report: Report, args: argparse.Namespace) -> None:
    # what a library prints must not end up among the rows
    sys.stdout.write("a library says hello\n")
    sys.stdout.flush()
    report.header({"device": args.device, "small": args.small})
    report.row("one", ratio=2.0, samples=[1, 2, 3])


def dies(report: Report, args: argparse.Namespace) -> None:
    for case in ("a", "b", "c", "d"):
        if report.has(case) or not report.at(f"try {case}"):
            continue
        if case == "b":
            sys.stderr.write("the compiler is not amused\n")
            sys.stderr.flush()
            os.abort()
        if case == "c":
            raise ValueError("this one raises")
        report.row(case, pid=os.getpid())


def born_dead(report: Report, args: argparse.Namespace) -> None:
    raise SystemExit(3)


def hangs(report: Report, args: argparse.Namespace) -> None:
    report.row("before")
    report.at("the long one")
    time.sleep(3600)


def meets(report: Report, args: argparse.Namespace) -> None:
    # each waits for the other, so that one after the other would never end
    args.out.with_suffix(f".{os.getpid()}").touch()
    while len(list(args.out.parent.glob(f"{args.out.stem}.[0-9]*"))) < 2:
        time.sleep(0.02)
    report.row("met")


def tells(report: Report, args: argparse.Namespace) -> None:
    args.out.with_suffix(".pid").write_text(str(os.getpid()))
    time.sleep(3600)


PARTS = [
    Part("fine", 30.0, fine, summary=lambda rows: {"cases": len(rows)}),
    Part("dies", 30.0, dies),
    Part("dead", 30.0, born_dead),
    Part("hangs", 3.0, hangs),
    Part("tells", 600.0, tells),
    Part("meets-1", 20.0, meets, group="meet"),
    Part("meets-2", 20.0, meets, group="meet"),
]

if __name__ == "__main__":
    raise SystemExit(parts.main(__doc__ or "", "tests.unit.parts_trial", PARTS))
