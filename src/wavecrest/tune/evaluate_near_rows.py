"""Evaluate near rows: decide each key of a tuning record by the rows of all other keys.

A record has a time for every candidate of every key, so the chosen candidate has one too: from the final round if it
took part, else from the quick round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from wavecrest import ops, records
from wavecrest.dispatch import lookup
from wavecrest.dispatch.op import AnyOp
from wavecrest.dispatch.tuned import Config, Row, near
from wavecrest.tune import session
from wavecrest.tune.candidates import NATIVE

Choice = tuple[str, Config | None]


@dataclass(frozen=True, slots=True)
class Left:
    """A key decided without its own row: times over that of the measured best (1 is the best)."""

    case: str
    taken: bool
    chosen: float
    default: float
    reason: str


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of the keys of one op.

    Args:
        keys: number of keys; `taken`: number of keys where a near row chose something other than the default.
        chosen, default: geometric means of the times over the measured best.
        slower: keys where the choice is slower than the default by more than a percent.
        worst: the largest of those ratios.
    """

    op: str
    keys: int
    taken: int
    chosen: float
    default: float
    slower: int
    worst: float


def decide(record: records.TuneRecord) -> list[Left]:
    """Decide every key of a record that has a winner and a timed default."""
    op = ops.get(record.op)
    fields = lookup.fields_of(op)
    keys = [key for key in record.keys if key.backend is not None and key.us is not None]
    rows = [session.row_of(key, fields, record.suite, record.header) for key in keys]
    found = []
    for row, key in zip(rows, keys, strict=True):
        times = _times(key)
        fallback = _fallback(op, key)
        if fallback not in times:
            continue
        # a key is not its own neighbour
        chosen = _chosen(op, row, rows, times, _taking(key), fallback[0], fields)
        choice: Choice = fallback if chosen.row is None else (chosen.row.backend, chosen.row.config)
        best = min(times.values())
        found.append(Left(key.case, choice != fallback, times[choice] / best, times[fallback] / best, chosen.reason))
    return found


def summary(op: str, found: Sequence[Left]) -> Summary:
    """Summarize the keys of an op."""
    lost = [one.chosen / one.default for one in found if one.taken]
    return Summary(
        op, len(found), len(lost), _geomean([one.chosen for one in found]), _geomean([one.default for one in found]),
        sum(ratio > 1.01 for ratio in lost), max(lost, default=1.0),
    )  # fmt: skip


def _geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 1.0


def _times(key: records.TunedKey) -> dict[Choice, float]:
    """The time of each admitted candidate, in ms."""
    return {
        (one.backend, Config(**one.config) if one.config else None): time
        for one in key.candidates
        if one.status in ("timed", "won", "dropped") and (time := one.ms or one.quick_ms)
    }


def _fallback(op: AnyOp, key: records.TunedKey) -> Choice:
    """The choice without measurements: the backend of the highest priority that takes the call."""
    taking = _taking(key)
    first = next((backend.name for backend in op.by_priority() if backend.name in taking), NATIVE)
    role = "native" if first == NATIVE else "default"
    found = next((one for one in key.candidates if one.role == role and one.backend == first), None)
    return first, Config(**found.config) if found is not None and found.config else None


def _taking(key: records.TunedKey) -> tuple[str, ...]:
    """The backends that took the call."""
    return tuple(dict.fromkeys(one.backend for one in key.candidates if one.status != "refused"))


def _chosen(
    op: AnyOp,
    row: Row,
    rows: Sequence[Row],
    times: dict[Choice, float],
    taking: tuple[str, ...],
    fallback: str,
    fields: tuple[str, ...],
) -> near.Found:
    sizes = tuple(place for place, name in enumerate(fields) if name in op.key_sizes)

    def misfit(other: Row) -> str:
        # the candidates are the configurations that the spaces gave for this key
        return "" if (other.backend, other.config) in times else "no candidate of this key"

    # a call on a GPU that needs no gradients
    parts: dict[str, Any] = dict.fromkeys(op.key_fields) | {"device": "cuda", "grad": False}
    parts |= dict(zip(fields, row.key, strict=True))
    key = tuple(parts[name] for name in op.key_fields)
    found = [
        near.Neighbour(one.distance, lookup.carried(op, key, one.row, fields))
        for one in near.neighbours(rows, row.key, sizes)
    ]
    return near.choose(found, fallback, partial(lookup.baseline, op, taking, fallback), misfit)
