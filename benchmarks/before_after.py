"""Times of ops in two checkouts: a record of both, and how the ratios after / before spread.

    python benchmarks/before_after.py make FILE --commit BEFORE --before A.json … --after B.json …
    python benchmarks/before_after.py show FILE

The JSON files are those of `wavecrest bench OP … --suite shared --peers none --out`, run in turn on one machine:
before, after, before, after. A case's time is its fastest run, as a slow one has a cause of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from wavecrest.records import files
from wavecrest.records.renamed import current_backend

Times = dict[tuple[str, str, str], list[float]]


def times(paths: list[Path]) -> tuple[Times, list[dict[str, Any]]]:
    """Microseconds by op, case and implementation, one a run, and the headers of the runs."""
    found: Times = {}
    headers = []
    for path in paths:
        document = json.loads(path.read_text(encoding="utf-8"))
        headers.append(document["header"])
        for op in document["ops"]:
            for case in op["cases"]:
                for one in case["impls"]:
                    if one["ms"] is not None:
                        key = op["op"], case["case"], current_backend(one["name"])
                        found.setdefault(key, []).append(round(1e3 * one["ms"], 3))
    return found, headers


def make(path: Path, commit: str, before: list[Path], after: list[Path]) -> None:
    """Write the record of what both have."""
    (old, _), (new, headers) = times(before), times(after)
    rows = [
        {"op": key[0], "case": key[1], "implementation": key[2], "before_us": old[key], "after_us": new[key]}
        for key in sorted(old.keys() & new.keys())
    ]
    header = max(headers, key=lambda one: str(one["created"]))
    commands = sorted({one["command"].partition(" --out ")[0] for one in headers})
    record = {"kind": "before_after", "header": header, "before": commit, "commands": commands, "rows": rows}
    files.write_document(path, record)


def show(path: Path) -> str:
    """The geometric mean and the spread of the ratios, and of the runs before against each other."""
    rows = files.read_json(path, what="record")["rows"]
    ratios = sorted(min(row["after_us"]) / min(row["before_us"]) for row in rows)
    itself = sorted(max(row["before_us"]) / min(row["before_us"]) for row in rows if len(row["before_us"]) > 1)
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    low, high = ratios[int(0.05 * len(ratios))], ratios[int(0.95 * len(ratios))]
    return (
        f"{len(rows)} cases of {len({row['op'] for row in rows})} ops: geometric mean {mean:.4f}, "
        f"5 to 95 % {low:.3f} to {high:.3f}; before against itself: median {statistics.median(itself):.4f}, "
        f"95 % {itself[int(0.95 * len(itself))]:.3f}\n"
    )


def main() -> None:
    """Make or show a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("make")
    made.add_argument("file", type=Path)
    made.add_argument("--commit", required=True, help="the commit before")
    made.add_argument("--before", type=Path, nargs="+", required=True)
    made.add_argument("--after", type=Path, nargs="+", required=True)
    commands.add_parser("show").add_argument("file", type=Path)
    given = parser.parse_args()
    if given.command == "make":
        make(given.file, given.commit, given.before, given.after)
    sys.stdout.write(show(given.file))


if __name__ == "__main__":
    main()
