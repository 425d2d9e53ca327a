"""A row of a neighbouring size for a call whose key has no measured row.

Two keys are neighbours where they differ in sizes alone (`Op.key_sizes`); their distance is the sum of the binary
logarithms of the sizes' ratios. The fallback, which runs where nothing is measured, keeps a call unless the
measurements leave no doubt: each of the `WITNESSES` nearest rows within `LIMIT` must have beaten it by `LEAD`, and the
row that is taken must have a configuration that fits the call. `wavecrest db leave-one-out` measures what near rows
gain and lose; the numbers come from it (docs/database.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from wavecrest.dispatch.tuned.row import Row, RowKey

# a factor of eight in one size, or of two in each of three
LIMIT = 3.0
# times faster than what would run otherwise
LEAD = 1.05
# rows that must agree
WITNESSES = 2


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A row and how far away it is."""

    distance: float
    row: Row


@dataclass(frozen=True, slots=True)
class Found:
    """The row that is taken for a key, or None; `reason` says why, or why not ("" where there is no neighbour)."""

    row: Row | None
    reason: str


def distance(one: RowKey, other: RowKey, sizes: tuple[int, ...]) -> float | None:
    """Distance of two keys (sum of log2 size ratios); None if they differ outside the fields `sizes`."""
    total = 0.0
    for place, (a, b) in enumerate(zip(one, other, strict=True)):
        if a == b and type(a) is type(b):
            continue
        # a size of 0 is unknown or absent
        if place not in sizes or type(a) is not int or type(b) is not int or a <= 0 or b <= 0:
            return None
        total += abs(math.log2(a / b))
    return total


def neighbours(rows: Iterable[Row], key: RowKey, sizes: tuple[int, ...]) -> list[Neighbour]:
    """The rows of other keys within `LIMIT`, nearest first, without rows measured by others: they have no baseline."""
    found = []
    for row in rows:
        if row.evidence.origin or row.key == key:
            continue
        away = distance(key, row.key, sizes)
        if away is not None and away <= LIMIT:
            found.append(Neighbour(away, row))
    # of equally near rows the smaller call: it has less room for programs that wait
    return sorted(found, key=lambda one: (one.distance, one.row.us))


def choose(
    near: list[Neighbour],
    fallback: str,
    baseline: Callable[[Row], float | None],
    misfit: Callable[[Row], str],
) -> Found:
    """The row to take for a key that has no measured row.

    Args:
        near: from `neighbours`.
        fallback: the backend that runs where nothing is measured.
        baseline: its time in a row's run, in µs; None where it is not known.
        misfit: why a row cannot run this call; "" where it can.
    """
    if not near:
        return Found(None, "")
    first = near[0].row
    if first.backend == fallback and first.config is None and not misfit(first):
        return Found(first, f"the nearest measured row runs {fallback} too")
    if len(near) < WITNESSES:
        return Found(None, "one measured row near it is no proof")
    for one in near[:WITNESSES]:
        before = baseline(one.row)
        if before is None:
            return Found(None, f"{fallback} was not timed beside a measured row near it")
        if before < LEAD * one.row.us:
            lead = f"{before / one.row.us:.2f} times"
            return Found(None, f"the lead over {fallback} at a measured row near it is {lead}, less than {LEAD}")
    problems = []
    for one in near:
        before = baseline(one.row)
        if before is None or before < LEAD * one.row.us:
            continue
        problem = misfit(one.row)
        if not problem:
            return Found(one.row, f"{one.distance:.1f} octaves away, {before / one.row.us:.2f} times {fallback} there")
        problems.append(problem)
    return Found(None, f"no measured row near it fits: {problems[0]}")
