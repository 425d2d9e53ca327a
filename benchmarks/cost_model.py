"""What the analytic cost model is worth, from tuning records: its choices against all candidates that were timed.

    python benchmarks/cost_model.py                                     # the records of one H200 in this folder
    python benchmarks/cost_model.py --keys FILE …                       # every key of these records
    python benchmarks/cost_model.py --trials 150                        # constants by leave-one-key-out as well

No GPU is needed. Prints tables in Markdown: shares of the measured best (1: as fast), see `wavecrest.tune.modelled`.
`--trials` draws so many sets of constants around the shipped ones (each times e^x, x normal with deviation 0.25, seed
0) and takes the set that suits all keys, or for each key the set that suits the others, best.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from wavecrest import hardware, records
from wavecrest.dispatch.tuned.cost_model import CONSTANTS, Constants
from wavecrest.errors import InvalidArgument
from wavecrest.tune import modelled

RECORDS = Path(__file__).with_name("results") / "nvidia-h200"
DEVIATION = 0.25


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _drawn(count: int) -> list[Constants]:
    """The shipped constants, and others around them."""
    draw = random.Random(0)
    names = [one.name for one in dataclasses.fields(Constants)]
    found = [CONSTANTS]
    for _ in range(count):
        factors = {name: math.exp(draw.gauss(0, DEVIATION)) for name in names}
        found.append(Constants(**{name: getattr(CONSTANTS, name) * factors[name] for name in names}))
    return found


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    for row in (names, ["---"] * len(names), *rows):
        sys.stdout.write(f"| {' | '.join(row)} |\n")
    sys.stdout.write("\n")


def main() -> None:
    """Read the records, write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("records", nargs="*", type=Path, help="files of `wavecrest tune`; default: all of one H200")
    parser.add_argument("--keys", action="store_true", help="a line a key as well")
    parser.add_argument("--trials", type=int, default=0, help="sets of constants to draw")
    options = parser.parse_args()
    paths = options.records or sorted(RECORDS.glob("tune_*.json"))
    found = [records.load_as(path, records.TuneRecord) for path in paths]
    arch = hardware.ARCHS[found[0].header.device["arch"]]
    cases = []
    for record in found:
        try:
            cases += modelled.cases(record)
        except InvalidArgument as error:
            sys.stderr.write(f"left out: {error}\n")
    judged = [modelled.judge(case, arch) for case in cases]
    if options.keys:
        _table(
            ("op", "key", "first", "best of 5", "default", "runs", "predicted over measured"),
            [
                (one.op, one.name, *map(_share, (one.first, one.top, one.default, one.taken, one.predicted)))
                for one in judged
            ],
        )
    by_op = {op: [one for one in judged if one.op == op] for op in dict.fromkeys(one.op for one in judged)}
    made = [modelled.summary(op, rows) for op, rows in {**by_op, "all": judged}.items()]
    names = ("op", "keys", "first", "worst", "best of 5", "worst", "default", "worst", "runs", "worst")
    _table(
        (*names, "predicted over measured"),
        [(one.op, str(one.keys), *map(_share, dataclasses.astuple(one)[2:])) for one in made],
    )
    if options.trials:
        sets = zip(
            ("that suit all keys", "of each key, that suit the others"),
            modelled.held_out(cases, arch, _drawn(options.trials)),
            strict=True,
        )
        _table(
            ("constants", "first, geometric mean", "worst"),
            [(name, _share(modelled.geomean(values)), _share(min(values))) for name, values in sets],
        )


if __name__ == "__main__":
    main()
