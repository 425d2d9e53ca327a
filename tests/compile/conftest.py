from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from wavecrest.dispatch import registry
from wavecrest.isa.facts import Row

pytest.importorskip("triton", reason="cross-compiling needs triton")

ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm_90")
BUDGETS = Path(__file__).parent / "budgets"
RECORDED = Path(__file__).with_name("recorded.json")
KERNELS = Path(__file__).with_name("kernels.py")


def ops_with_kernels() -> list[str]:
    return [name for name in registry.names() if "triton" in registry.get(name).backends]


def compile_rows(targets: list[str], archs: tuple[str, ...] = ARCHS) -> list[Row]:
    """The rows of targets, compiled in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("everything.py")
    done = subprocess.run(
        [sys.executable, str(script), ",".join(archs), *targets], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return TypeAdapter(list[Row]).validate_json(done.stdout)


@pytest.fixture(scope="session")
def rows(request: pytest.FixtureRequest) -> dict[str, list[Row]]:
    """The rows of every op that a test of this session asks for, compiled together, once."""
    asked = {item.callspec.params.get("op") for item in request.session.items if hasattr(item, "callspec")}
    targets = [op for op in ops_with_kernels() if op in asked]
    found: dict[str, list[Row]] = {op: [] for op in targets}
    for row in compile_rows(targets) if targets else []:
        found[row.target].append(row)
    return found


@pytest.fixture(scope="session")
def examples() -> dict[tuple[str, str], Row]:
    """The rows of kernels.py by case and architecture."""
    return {(row.case, row.arch): row for row in compile_rows([f"{KERNELS}:cases"])}
