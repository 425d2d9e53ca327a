"""Write the hashes of kernels' machine code that test_recorded.py compares with.

python tests/compile/write_recorded.py [OP ...]      every op with a kernel if none is named
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.compile.conftest import RECORDED, compile_rows, ops_with_kernels


def main(ops: list[str]) -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.is_file() else {"ops": {}}
    for op in ops or ops_with_kernels():
        cases: dict[str, dict[str, str]] = {}
        for row in compile_rows([op]):
            if row.facts is None:
                raise SystemExit(f"{row.target} {row.case} {row.arch}: {row.reason}")
            cases.setdefault(row.case, {})[row.arch] = row.facts.code_hash
        recorded["ops"][op] = cases
    write(version("triton"), recorded["ops"])


def write(triton: str, ops: dict[str, dict[str, dict[str, str]]]) -> None:
    """A case a line, so that a change shows as the cases it touches."""
    blocks = []
    for op, cases in sorted(ops.items()):
        lines = [f"{json.dumps(case)}: {json.dumps(archs)}" for case, archs in sorted(cases.items())]
        blocks.append(f"{json.dumps(op)}: {{\n" + ",\n".join(lines) + "\n}")
    text = f'{{"triton": {json.dumps(triton)}, "ops": {{\n' + ",\n".join(blocks) + "\n}}\n"
    RECORDED.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
