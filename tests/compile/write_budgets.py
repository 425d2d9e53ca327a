"""Write the least waves per SIMD that are reached now into budget files; limits and exceptions stay as they are.

    python tests/compile/write_budgets.py [OP ...]      every op with a kernel if none is named

What is over a limit is printed: it needs a better kernel, or an exception written by hand with its reason. With
`--keep` a floor already in the file is only lowered, never raised: for a second version of Triton.
"""

from __future__ import annotations

import sys
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.compile.conftest import ARCHS, compile_rows, ops_with_kernels
from tests.compile.recorded import BUDGETS
from wavecrest.isa import budget
from wavecrest.isa.facts import Row


def floors(rows: list[Row], old: budget.Budget | None) -> dict[str, dict[str, float]]:
    """The commonest floor of each architecture for all cases, then the cases that differ from it."""
    reached: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.facts is None:
            raise SystemExit(f"{row.target} {row.case} {row.arch}: {row.reason}")
        before = None if old is None else old.waves_of(row)
        reached[row.case, row.arch] = row.facts.waves if before is None else min(before, row.facts.waves)
    common = {arch: Counter(v for (_, a), v in reached.items() if a == arch).most_common(1)[0][0] for arch in ARCHS}
    table = {"*": common}
    for case in dict.fromkeys(row.case for row in rows):
        other = {arch: reached[case, arch] for arch in ARCHS if reached.get((case, arch), common[arch]) != common[arch]}
        if other:
            table[case] = other
    # a case name that is a pattern for another one would set that one's floors too
    for name in table:
        matched = [case for case in {row.case for row in rows} if fnmatchcase(case, name) and case != name]
        if name != "*" and matched:
            raise SystemExit(f"the case name {name!r} is a pattern for {matched}")
    return table


def render(op: str, budget_: budget.Budget | None, waves: dict[str, dict[str, float]]) -> str:
    lines = [f"# What {op}'s machine code must keep to; see wavecrest.isa.budget for the format.", "", "[limits]"]
    limits = budget_.limits if budget_ is not None else budget.Limits.model_validate({})
    # most ops have no matrix instructions
    lines += [f"{name} = {value}" for name, value in limits.model_dump().items() if name != "matrix" or value]
    lines += ["", "# least waves per SIMD; of several patterns that match a case the last one counts", "[waves]"]
    for case, values in waves.items():
        inside = ", ".join(f"{arch} = {value:g}" for arch, value in values.items())
        lines.append(f'"{case}" = {{ {inside} }}')
    for one in budget_.exception if budget_ is not None else []:
        lines += ["", "[[exception]]"]
        values = one.model_dump(exclude_none=True)
        lines += [
            f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value}" for name, value in values.items()
        ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    keep = "--keep" in arguments
    ops = [name for name in arguments if name != "--keep"] or ops_with_kernels()
    rows = compile_rows(ops)
    over = []
    for op in ops:
        mine, path = [row for row in rows if row.target == op], BUDGETS / f"{op}.toml"
        old = budget.load(path) if path.is_file() else None
        path.write_text(render(op, old, floors(mine, old if keep else None)), encoding="utf-8")
        over += budget.check(budget.load(path), mine)
    sys.stdout.write("\n".join([*over, f"wrote {len(ops)} budgets, {len(over)} lines over them", ""]))
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
