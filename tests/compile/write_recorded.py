"""Write the record of kernels that test_recorded.py and test_budgets.py start from; see `recorded`.

python tests/compile/write_recorded.py [OP ...]      every op with a kernel if none is named
python tests/compile/write_recorded.py --keys        keys alone, where sources moved and machine code is as recorded
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.compile import recorded
from tests.compile.conftest import compiled, ops_with_kernels


def main(arguments: list[str]) -> int:
    record = recorded.load()
    if record.triton not in ("", version("triton")):
        record = recorded.Recorded(triton="", budgets={}, ops={})
    changed, named = 0, [name for name in arguments if name != "--keys"]
    for op in named or ops_with_kernels():
        found = compiled([op], known=recorded.FILE)
        codes = {(row.case, row.arch): row.facts.code_hash if row.facts else row.reason for row in found.rows}
        cases: dict[str, dict[str, tuple[str, str]]] = {}
        for place in found.places:
            before = record.of(op, place.case, place.arch)
            code = codes.get((place.case, place.arch)) or (before or ("", ""))[1]
            if before is not None and before[1] != code:
                changed += 1
                if "--keys" in arguments:
                    raise SystemExit(f"{op} {place.case} {place.arch}: the machine code is another")
            cases.setdefault(place.case, {})[place.arch] = (place.key, code)
        record.ops[op], record.budgets[op] = cases, recorded.budget(op)
        record.triton = version("triton")
        recorded.save(record)
    if not named:
        # all of ALWAYS was compiled and read by it
        record.reader = recorded.reader()
        recorded.save(record)
    sys.stdout.write(f"{changed} kernels have other machine code than before\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
