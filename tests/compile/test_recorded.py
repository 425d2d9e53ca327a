"""Machine code is what was recorded: a change that is not meant to change it, such as a move, shows here. No GPU.

After a change that is meant to: python tests/compile/write_recorded.py [OP ...]
"""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest

from tests.compile.conftest import RECORDED, ops_with_kernels
from wavecrest.isa.facts import Row


@pytest.mark.parametrize("op", ops_with_kernels())
def test_machine_code_is_as_recorded(op: str, rows: dict[str, list[Row]]) -> None:
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    if version("triton") != recorded["triton"]:
        pytest.skip(f"recorded with triton {recorded['triton']}, this is {version('triton')}")
    now = {(row.case, row.arch): row.facts.code_hash for row in rows[op] if row.facts is not None}
    before = {(case, arch): code for case, archs in recorded["ops"][op].items() for arch, code in archs.items()}
    assert now.keys() == before.keys(), "other cases: run write_recorded.py"
    changed = sorted(place for place, code in now.items() if code != before[place])
    assert not changed, f"{len(changed)} of {len(now)} kernels changed: {changed[:8]}"
