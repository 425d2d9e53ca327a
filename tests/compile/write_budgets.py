"""Write the least waves per SIMD that are reached now into budget files; limits and exceptions stay as they are.

    python tests/compile/write_budgets.py [OP ...]      every op with a kernel if none is named

What is over a limit is printed: it needs a better kernel, or an exception written by hand with its reason. With
`--keep` a floor already in the file is only lowered, never raised: for a second version of Triton.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.compile.conftest import compile_rows, ops_with_kernels
from tests.compile.recorded import BUDGETS
from wavecrest.errors import WavecrestError
from wavecrest.isa import budget


def main(arguments: list[str]) -> int:
    keep = "--keep" in arguments
    ops = [name for name in arguments if name != "--keep"] or ops_with_kernels()
    rows = compile_rows(ops)
    over = []
    for op in ops:
        mine, path = [row for row in rows if row.target == op], BUDGETS / f"{op}.toml"
        old = budget.load(path) if path.is_file() else None
        try:
            path.write_text(budget.written(op, mine, old, keep=keep), encoding="utf-8")
        except WavecrestError as error:
            raise SystemExit(str(error)) from None
        over += budget.check(budget.load(path), mine)
    sys.stdout.write("\n".join([*over, f"wrote {len(ops)} budgets, {len(over)} lines over them", ""]))
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
