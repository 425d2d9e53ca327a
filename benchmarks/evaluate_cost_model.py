"""Judge the analytic cost model by tuning records: its choices against all candidates that were timed.

    python benchmarks/evaluate_cost_model.py                            # the records of one H200 in evidence/
    python benchmarks/evaluate_cost_model.py --keys FILE …              # every key of these records
    python benchmarks/evaluate_cost_model.py --trials 150               # constants by leave-one-key-out as well

No GPU is needed. Prints tables in Markdown: shares of the measured best (1: as fast). A record has a time for every
candidate that was found right: that of the final round where it was in it, else that of the quick round. Candidates
that the model does not describe, such as PyTorch's, take no part.

`--trials N` draws N sets of constants around the shipped ones (each times e^x, x normal with deviation 0.25, seed 0).
It takes the set that suits all keys best, and for each key the set that suits all other keys best.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from wavecrest import hardware, ops, records
from wavecrest.dispatch.tuned import Config, Work, cost_model
from wavecrest.dispatch.tuned.cost_model import CONSTANTS, Constants
from wavecrest.errors import InvalidArgument

RECORDS = Path(__file__).resolve().parents[1] / "evidence" / "nvidia-h200"
DEVIATION = 0.25
# number of first choices of a ranking that are judged
TOP = 5


@dataclass(frozen=True, slots=True)
class Timed:
    """A candidate of a key: its launches, and what they took in µs."""

    backend: str
    config: Config
    us: float
    default: bool
    works: tuple[Work, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A key with its candidates, in the order of trial."""

    op: str
    name: str
    candidates: tuple[Timed, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """A key by the model: the time of the measured best over those of others (1: as fast).

    Args:
        op, name: the key's.
        first: of the model's first choice.
        top: of the best of its first `TOP`.
        default: of the default configuration; None where it was not timed.
        taken: of what dispatch runs in the default's place (`cost_model.propose`), the default where it stays.
        predicted: the predicted time of the first choice over its measured one.
    """

    op: str
    name: str
    first: float
    top: float
    default: float | None
    taken: float | None
    predicted: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Geometric means and worst of the keys of an op; None where no default was timed."""

    op: str
    keys: int
    first: float
    worst_first: float
    top: float
    worst_top: float
    default: float | None
    worst_default: float | None
    taken: float | None
    worst_taken: float | None
    predicted: float


def cases(record: records.TuneRecord) -> list[Case]:
    """The keys of a record that have described candidates with a time.

    Raises:
        InvalidArgument: its architecture is not known.
    """
    op = ops.get(record.op)
    arch = _arch(record)
    found = []
    for key in record.keys:
        timed = []
        for one in key.candidates:
            backend, ms = op.backends.get(one.backend), one.ms or one.quick_ms
            work = op.study.kernel(one.backend).work
            if backend is None or work is None or not one.config or not ms:
                continue
            if one.status in ("timed", "won", "dropped"):
                config = Config(**one.config)
                works = work(tuple(key.key.values()), config, arch)
                timed.append(Timed(one.backend, config, ms * 1e3, one.role == "default", works))
        if timed:
            found.append(Case(record.op, key.case, tuple(timed)))
    return found


def _arch(record: records.TuneRecord) -> hardware.Arch:
    name = record.header.device["arch"]
    if name not in hardware.ARCHS:
        raise InvalidArgument(f"the record of {record.op} is of {name}, of which nothing is known")
    return hardware.ARCHS[name]


def judge(case: Case, arch: hardware.Arch, constants: Constants = CONSTANTS) -> Judged:
    """The model's ranking of a key against the measured one; what it gives no time for comes last."""
    best = min(one.us for one in case.candidates)
    times = [cost_model.predict(one.works, arch, constants) for one in case.candidates]
    us = [math.inf if time is None else time.us for time in times]
    order = sorted(range(len(us)), key=lambda index: us[index])
    ranked = [case.candidates[index] for index in order]
    place = next((index for index, one in enumerate(case.candidates) if one.default), None)
    default = taken = None
    if place is not None:
        standard = case.candidates[place]
        default = best / standard.us
        # reserved backends run where a measured row names them
        rival = next(index for index in order if case.candidates[index].backend == standard.backend)
        won = us[place] >= cost_model.LEAD * us[rival]
        taken = best / case.candidates[rival if won else place].us
    return Judged(
        case.op, case.name, best / ranked[0].us, best / min(one.us for one in ranked[:TOP]), default, taken,
        us[order[0]] / ranked[0].us,
    )  # fmt: skip


def summary(op: str, judged: Sequence[Judged]) -> Summary:
    """Summary of the keys of an op.

    Raises:
        InvalidArgument: `judged` is empty.
    """
    if not judged:
        raise InvalidArgument(f"no key of {op} has a candidate with a time that the cost model describes")
    first, top = [one.first for one in judged], [one.top for one in judged]
    default = [one.default for one in judged if one.default is not None]
    taken = [one.taken for one in judged if one.taken is not None]
    return Summary(
        op, len(judged), geomean(first), min(first), geomean(top), min(top),
        geomean(default) if default else None, min(default, default=None),
        geomean(taken) if taken else None, min(taken, default=None), geomean([one.predicted for one in judged]),
    )  # fmt: skip


def geomean(values: Iterable[float]) -> float:
    """The geometric mean; 1 of nothing."""
    found = [math.log(value) for value in values]
    return math.exp(sum(found) / len(found)) if found else 1.0


def held_out(
    cases: Sequence[Case], arch: hardware.Arch, trials: Sequence[Constants]
) -> tuple[list[float], list[float]]:
    """First choices with the constants that suit all keys best, and of each key with those that suit the others best.

    What suits best is the largest mean over ops of their keys' mean logarithm of `Judged.first`, so that an op with
    many keys does not decide.
    """
    table = [[math.log(judge(case, arch, trial).first) for case in cases] for trial in trials]
    ops = {name: [place for place, case in enumerate(cases) if case.op == name] for name in {one.op for one in cases}}

    def score(row: list[float], left: int | None) -> float:
        kept = [[row[place] for place in places if place != left] for places in ops.values()]
        return sum(sum(part) / len(part) for part in kept if part) / len(ops)

    best = max(table, key=lambda row: score(row, None))
    others = [max(table, key=lambda row, place=place: score(row, place))[place] for place in range(len(cases))]  # type: ignore[misc]
    return [math.exp(value) for value in best], [math.exp(value) for value in others]


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
    paths = options.records or sorted(RECORDS.glob("*_tune_*.jsonl.gz"))
    found = [records.load_as(path, records.TuneRecord) for path in paths]
    arch = hardware.ARCHS[found[0].header.device["arch"]]
    known: list[Case] = []
    for record in found:
        try:
            known += cases(record)
        except InvalidArgument as error:
            sys.stderr.write(f"left out: {error}\n")
    judged = [judge(case, arch) for case in known]
    if options.keys:
        _table(
            ("op", "key", "first", "best of 5", "default", "runs", "predicted over measured"),
            [
                (one.op, one.name, *map(_share, (one.first, one.top, one.default, one.taken, one.predicted)))
                for one in judged
            ],
        )
    by_op = {op: [one for one in judged if one.op == op] for op in dict.fromkeys(one.op for one in judged)}
    made = [summary(op, rows) for op, rows in {**by_op, "all": judged}.items()]
    names = ("op", "keys", "first", "worst", "best of 5", "worst", "default", "worst", "runs", "worst")
    _table(
        (*names, "predicted over measured"),
        [(one.op, str(one.keys), *map(_share, dataclasses.astuple(one)[2:])) for one in made],
    )
    if options.trials:
        sets = zip(
            ("that suit all keys", "of each key, that suit the others"),
            held_out(known, arch, _drawn(options.trials)),
            strict=True,
        )
        _table(
            ("constants", "first, geometric mean", "worst"),
            [(name, _share(geomean(values)), _share(min(values))) for name, values in sets],
        )


if __name__ == "__main__":
    main()
