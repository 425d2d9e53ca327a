"""Every op's kernel with its shipped configurations compiles for every architecture, without spilling. No GPU needed.

The compiler runs in a process of its own, since kernels defined for the interpreter cannot be compiled.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wavecrest import hardware, registry

pytest.importorskip("triton", reason="cross-compiling needs triton")

ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm_90")
SCRIPT = Path(__file__).with_name("cross_compile.py")


@functools.cache
def rows(arch: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, str(SCRIPT), arch], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("op", registry.names())
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_within_the_budget(arch: str, op: str) -> None:
    mine = [row for row in rows(arch) if row["op"] == op]
    assert len(mine) >= 3, "compile_cases names fewer than three widths"
    for row in mine:
        assert row["spills"] == 0, row
        assert row["scratch"] == 0, row
        assert row["shared"] <= hardware.ARCHS[arch].lds_kib * 1024, row
        # rows of a multiple of 16 columns keep the alignment that 16-byte accesses need
        if row["columns"] % 16 == 0:
            assert row["wide_loads"] > 0 and row["wide_stores"] > 0, row


@pytest.mark.parametrize("arch", ARCHS)
def test_both_paths_are_compiled(arch: str) -> None:
    for op in ("rms_norm", "add_rms_norm", "layer_norm"):
        passes = {row["constants"]["ONE_PASS"] for row in rows(arch) if row["op"] == op}
        assert passes == {True, False}, op
