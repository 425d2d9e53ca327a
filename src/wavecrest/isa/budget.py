"""Budgets: limits on the machine code of an op's cases, as TOML files beside the tests.

    # for every case: most spills and scratch bytes, least share of bytes that accesses of 16 bytes move, least share
    # of matrix instructions in the hot loop
    [limits]
    spills = 0
    scratch = 0
    wide_loads = 0.75
    wide_stores = 0.75
    matrix = 0.0

    # least waves per SIMD; of several patterns that match a case the last one counts
    [waves]
    "*" = { gfx942 = 8 }
    "N=16384" = { gfx942 = 4 }

    [[exception]]
    cases = "N=1000"
    archs = "gfx11*"
    wide_loads = 0.0
    why = "rows of 2,000 bytes start at no multiple of 16"

A name or pattern that matches nothing is an error, so that a budget cannot outlive the cases it was written for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pydantic
from pydantic import Field

from wavecrest import hardware
from wavecrest.errors import InvalidArgument, RecordError, Unsupported
from wavecrest.isa.facts import KernelFacts, Row, wide_share
from wavecrest.records import decode, files
from wavecrest.records.files import Model


class Limits(Model):
    """For one case: most spilled registers and scratch bytes, least share of bytes in 16-byte accesses.

    `matrix`: the least share of matrix instructions in the hot loop; 0 asks for none.

    The shipped 0.75 leaves a quarter to data that a row has one of, such as a scale, or shares, such as a weight.
    """

    spills: int = 0
    scratch: int = 0
    wide_loads: float = Field(0.75, ge=0, le=1)
    wide_stores: float = Field(0.75, ge=0, le=1)
    matrix: float = Field(0.0, ge=0, le=1)


class Exemption(Model):
    """Limits that differ for some cases or architectures (patterns as in file names), with the reason."""

    cases: str = "*"
    archs: str = "*"
    spills: int | None = None
    scratch: int | None = None
    wide_loads: float | None = Field(None, ge=0, le=1)
    wide_stores: float | None = Field(None, ge=0, le=1)
    matrix: float | None = Field(None, ge=0, le=1)
    why: str = Field(min_length=10)

    @pydantic.model_validator(mode="after")
    def _says_something(self) -> Exemption:
        if not self.changes():
            raise ValueError("changes no limit")
        return self

    def covers(self, row: Row) -> bool:
        """Whether it covers this case on this architecture."""
        return fnmatchcase(row.case, self.cases) and fnmatchcase(row.arch, self.archs)

    def changes(self) -> dict[str, float]:
        """The limits it sets."""
        return self.model_dump(exclude_none=True, exclude={"cases", "archs", "why"})


class Budget(Model):
    """A budget file."""

    limits: Limits = Field(default_factory=lambda: Limits.model_validate({}))
    waves: dict[str, dict[str, float]]
    exception: list[Exemption] = Field(default_factory=list)

    def limits_of(self, row: Row) -> Limits:
        """The limits of one case on one architecture; a later exception goes before an earlier one."""
        values = self.limits.model_dump()
        for exemption in self.exception:
            if exemption.covers(row):
                values |= exemption.changes()
        return Limits(**values)

    def waves_of(self, row: Row) -> float | None:
        """The least waves per SIMD of one case on one architecture, or None if the file names no limit."""
        floor = None
        for pattern, floors in self.waves.items():
            if fnmatchcase(row.case, pattern):
                floor = floors.get(row.arch, floor)
        return floor


def matrix_share(facts: KernelFacts) -> float:
    """The share of matrix instructions in the hot loop; 0 without a loop."""
    if facts.hot is None or facts.hot.instructions == 0:
        return 0.0
    return sum(facts.hot.matrix.values()) / facts.hot.instructions


def load(path: Path) -> Budget:
    """Read a budget file.

    Raises:
        RecordError: it is missing, not TOML, or not a budget.
    """
    text = decode.read_text(path, what="budget")
    try:
        return Budget.model_validate(decode.toml_of(text))
    except decode.Undecodable as problem:
        raise RecordError(f"the budget {path} is damaged: {problem}") from None
    except pydantic.ValidationError as problem:
        raise RecordError(f"the budget {path} is not valid: {files.first_problem(problem)}") from None


def _over(facts: KernelFacts, limits: Limits, arch: hardware.Arch) -> list[str]:
    """The limits that one kernel breaks."""
    found = []
    spills = facts.spills + (facts.sgpr_spills or 0)
    if spills > limits.spills:
        found.append(f"{spills} spills, at most {limits.spills}")
    if facts.scratch > limits.scratch:
        found.append(f"{facts.scratch} bytes of scratch, at most {limits.scratch}")
    if facts.lds > arch.lds_kib * 1024:
        found.append(f"{facts.lds} bytes of LDS, the architecture has {arch.lds_kib * 1024}")
    products = matrix_share(facts)
    if products < limits.matrix:
        found.append(f"{products:.3f} of the hot loop are matrix instructions, at least {limits.matrix}")
    for what, accesses, least in (
        ("loads", facts.kernel.loads, limits.wide_loads),
        ("stores", facts.kernel.stores, limits.wide_stores),
    ):
        share = wide_share(accesses)
        if 0 in accesses:
            found.append(f"{what} of a width that is not known")
        # without accesses of a kind there is nothing to limit
        elif share is not None and share < least:
            found.append(f"{share:.2f} of the bytes in {what} of 16 bytes, at least {least}")
    return found


def check(budget: Budget, rows: Sequence[Row]) -> list[str]:
    """The violations of a budget, one line each; empty if there are no violations.

    Args:
        budget: from `load`.
        rows: every case of the op on the architectures to check.
    """
    return [line for row in rows for line in over(budget, row)] + unused(budget, rows)


def over(budget: Budget, row: Row) -> list[str]:
    """The limits of its budget that one kernel breaks, one line each."""
    where = f"{row.target} {row.case} on {row.arch}"
    if row.facts is None:
        return [f"{where}: {row.reason}"]
    found = [f"{where}: {line}" for line in _over(row.facts, budget.limits_of(row), hardware.ARCHS[row.arch])]
    least = budget.waves_of(row)
    if least is None:
        found.append(f"{where}: no least number of waves in the budget; it reaches {row.facts.waves:g}")
    elif row.facts.waves < least:
        limit = f", limited by {row.facts.limit}" if row.facts.limit else ""
        found.append(f"{where}: {row.facts.waves:g} waves per SIMD, at least {least:g}{limit}")
    return found


def unused(budget: Budget, rows: Sequence[Row]) -> list[str]:
    """The patterns and architectures of a budget that match no row of `rows`."""
    found = []
    for pattern, floors in budget.waves.items():
        if not any(fnmatchcase(row.case, pattern) for row in rows):
            found.append(f"waves: no case is named {pattern!r}")
        found += [f"waves of {pattern!r}: no architecture {arch!r}" for arch in floors if arch not in hardware.ARCHS]
    for exemption in budget.exception:
        if not any(exemption.covers(row) for row in rows):
            found.append(f"exception: no case is named {exemption.cases!r} on {exemption.archs!r}")
    return found


def written(name: str, rows: Sequence[Row], old: Budget | None = None, *, keep: bool = False) -> str:
    """The text of a budget file that asks for the waves per SIMD that are reached now.

    Args:
        name: the op's.
        rows: its cases, all compiled.
        old: the budget before; its limits and exceptions stay as they are.
        keep: a floor of `old` is only lowered, never raised: for a second version of Triton.

    Raises:
        Unsupported: a case does not compile.
        InvalidArgument: the name of a case is a pattern for another one, whose floors it would set.
    """
    waves = _floors(rows, old if keep else None)
    lines = [f"# What {name}'s machine code must keep to; see wavecrest.isa.budget for the format.", "", "[limits]"]
    limits = old.limits if old is not None else Limits.model_validate({})
    # most ops have no matrix instructions
    lines += [f"{limit} = {value}" for limit, value in limits.model_dump().items() if limit != "matrix" or value]
    lines += ["", "# least waves per SIMD; of several patterns that match a case the last one counts", "[waves]"]
    for case, values in waves.items():
        inside = ", ".join(f"{arch} = {value:g}" for arch, value in values.items())
        lines.append(f'"{case}" = {{ {inside} }}')
    for one in old.exception if old is not None else []:
        lines += ["", "[[exception]]"]
        lines += [
            f'{field} = "{value}"' if isinstance(value, str) else f"{field} = {value}"
            for field, value in one.model_dump(exclude_none=True).items()
        ]
    return "\n".join(lines) + "\n"


def _floors(rows: Sequence[Row], old: Budget | None) -> dict[str, dict[str, float]]:
    """The commonest floor of each architecture for all cases, then the cases that differ from it."""
    reached: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.facts is None:
            raise Unsupported(f"{row.target} {row.case} {row.arch}: {row.reason}")
        before = None if old is None else old.waves_of(row)
        reached[row.case, row.arch] = row.facts.waves if before is None else min(before, row.facts.waves)
    archs = list(dict.fromkeys(row.arch for row in rows))
    common = {arch: Counter(v for (_, a), v in reached.items() if a == arch).most_common(1)[0][0] for arch in archs}
    table = {"*": common}
    for case in dict.fromkeys(row.case for row in rows):
        other = {arch: reached[case, arch] for arch in archs if reached.get((case, arch), common[arch]) != common[arch]}
        if other:
            table[case] = other
    for name in table:
        matched = [case for case in {row.case for row in rows} if fnmatchcase(case, name) and case != name]
        if name != "*" and matched:
            raise InvalidArgument(f"the case name {name!r} is a pattern for {matched}")
    return table
