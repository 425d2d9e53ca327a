"""Write the record of kernels that test_recorded.py and test_budgets.py start from; see `recorded`.

python tests/compile/write_recorded.py [OP ...]      every op with a kernel if none is named
python tests/compile/write_recorded.py --keys        keys alone, where sources moved and machine code is as recorded

Without --keys every kernel is compiled anew if the code that reads machine code has changed: it may read other facts.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.compile import recorded
from tests.compile.conftest import compiled, ops_with_kernels


def main(arguments: list[str]) -> int:
    record = recorded.load()
    if record.triton not in ("", version("triton")):
        record = recorded.Recorded(triton="", ops={})
    changed, named = 0, [name for name in arguments if name != "--keys"]
    # /dev/null knows no kernel
    anew = record.reader != recorded.reader() and "--keys" not in arguments
    known = Path(os.devnull) if anew else recorded.FILE
    for op in named or ops_with_kernels():
        found = compiled([op], known=known)
        made = {(row.case, row.arch): row for row in found.rows}
        cases: dict[str, dict[str, recorded.Kernel]] = {}
        for place in found.places:
            before, row = record.of(op, place.case, place.arch), made.get((place.case, place.arch))
            if row is not None and row.facts is None:
                raise SystemExit(f"{op} {place.case} {place.arch}: {row.reason}")
            if row is not None:
                kernel = recorded.Kernel.of(place.key, row.facts)
            else:
                kernel = record.ops[op][place.case][place.arch]._replace(key=place.key)
            if before is not None and before[1:] != kernel[1:]:
                changed += 1
                if "--keys" in arguments:
                    raise SystemExit(f"{op} {place.case} {place.arch}: the machine code or its facts are others")
            cases.setdefault(place.case, {})[place.arch] = kernel
        record.ops[op], record.triton = cases, version("triton")
        recorded.save(record)
    if not named:
        # all of ALWAYS was compiled and read by it
        record.reader = recorded.reader()
        recorded.save(record)
    sys.stdout.write(f"{changed} kernels have other machine code, or other facts, than before\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
