"""Evaluate the cost model: compare its ranking of a tuning record's candidates with their measured times.

A record has a time for every admitted candidate: from the final round if it took part, else from the quick round.
Candidates that the model does not describe, such as PyTorch's, take no part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wavecrest import hardware, ops, records
from wavecrest.dispatch.tuned import Config, Work, cost_model
from wavecrest.dispatch.tuned.cost_model import CONSTANTS, Constants
from wavecrest.errors import InvalidArgument

# number of first places of a ranking that are looked at
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
    """A key judged by the model: time of the measured best over the time of other choices (1: as fast).

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
        InvalidArgument: its architecture is unknown.
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
        raise InvalidArgument(f"the record of {record.op} is of {name}, an unknown architecture")
    return hardware.ARCHS[name]


def judge(case: Case, arch: hardware.Arch, constants: Constants = CONSTANTS) -> Judged:
    """Compare the model's ranking of a key with the measured one; candidates without a predicted time come last."""
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
    """Summarize the keys of an op.

    Raises:
        InvalidArgument: there are no keys.
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
    """The geometric mean; 1 for an empty list."""
    found = [math.log(value) for value in values]
    return math.exp(sum(found) / len(found)) if found else 1.0


def held_out(
    cases: Sequence[Case], arch: hardware.Arch, trials: Sequence[Constants]
) -> tuple[list[float], list[float]]:
    """First choices with the constants that suit all keys best, and, for each key, those that suit the other keys best.

    The best constants have the largest mean, over ops, of each op's mean logarithm of `Judged.first`, so that an op
    with many keys does not decide alone.
    """
    table = [[math.log(judge(case, arch, trial).first) for case in cases] for trial in trials]
    ops = {name: [place for place, case in enumerate(cases) if case.op == name] for name in {one.op for one in cases}}

    def score(row: list[float], left: int | None) -> float:
        kept = [[row[place] for place in places if place != left] for places in ops.values()]
        return sum(sum(part) / len(part) for part in kept if part) / len(ops)

    best = max(table, key=lambda row: score(row, None))
    others = [max(table, key=lambda row, place=place: score(row, place))[place] for place in range(len(cases))]  # type: ignore[misc]
    return [math.exp(value) for value in best], [math.exp(value) for value in others]
