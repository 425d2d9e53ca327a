"""A small part of the emulated tests, in seconds and in every run: a clean kernel, planted races, a matrix kernel.

All others take minutes: scripts/emulate.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

from tests.emulated.test_planted import SAID

pytest.importorskip("triton", reason="kernels are compiled by triton")

Child = Callable[..., "subprocess.CompletedProcess[str]"]

RACES = ("wait for a buffer load", "wait for an LDS read", "wait before a barrier", "barrier")


@pytest.mark.slow
def test_races_are_found_and_a_clean_kernel_has_none(run_child: Child) -> None:
    done = run_child("tests.emulated.planted", "gfx942", "none", *RACES)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found.keys() == {"none", *RACES} and not found["none"], found["none"]
    for bug in RACES:
        assert all(part in found[bug] for part in SAID[bug]), (bug, found[bug])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "case"),
    [
        ("gfx950", "matmul float16"),
        # gfx90a has opcodes of its own for these
        ("gfx90a", "matmul bfloat16"),
        ("gfx90a", "matmul int8"),
        # no interpreter runs this one
        ("gfx950", "attention of its own kernel"),
    ],
)
def test_a_matrix_kernel_matches_pytorch(run_child: Child, arch: str, case: str) -> None:
    done = run_child("tests.emulated.cases", arch, case)
    assert done.returncode == 0, done.stderr[-2000:]
    row = json.loads(done.stdout)[case]
    assert not row["problem"], row["problem"]
    assert row["error"] <= row["allowed"] and row["matrix"] > 0, row
