from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compile import recorded
from tests.compile.recorded import Compiled
from wavecrest.dispatch import registry
from wavecrest.isa.facts import Row

pytest.importorskip("triton", reason="cross-compiling needs triton")

ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm_90")
KERNELS = Path(__file__).with_name("kernels.py")


def ops_with_kernels() -> list[str]:
    return [name for name in registry.names() if "triton" in registry.get(name).backends]


def compiled(targets: list[str], archs: tuple[str, ...] = ARCHS, known: Path | None = None) -> Compiled:
    """The kernels of targets, compiled in a process without the interpreter; all, or those not known."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("everything.py")
    options = [] if known is None else ["--known", str(known)]
    done = subprocess.run(
        [sys.executable, str(script), ",".join(archs), *options, *targets],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return Compiled.model_validate_json(done.stdout)


def compile_rows(targets: list[str], archs: tuple[str, ...] = ARCHS) -> list[Row]:
    """The rows of targets, all compiled."""
    return compiled(targets, archs).rows


@pytest.fixture(scope="session")
def kernels(request: pytest.FixtureRequest) -> dict[str, Compiled]:
    """The kernels of every op that a test of this session asks for: what is not as recorded is compiled, once."""
    asked = {item.callspec.params.get("op") for item in request.session.items if hasattr(item, "callspec")}
    targets = [op for op in ops_with_kernels() if op in asked]
    made = compiled(targets, known=recorded.FILE) if targets else Compiled(places=[], rows=[])
    return {
        op: Compiled(
            places=[place for place in made.places if place.op == op],
            rows=[row for row in made.rows if row.target == op],
        )
        for op in targets
    }


@pytest.fixture(scope="session")
def examples() -> dict[tuple[str, str], Row]:
    """The rows of kernels.py by case and architecture."""
    return {(row.case, row.arch): row for row in compile_rows([f"{KERNELS}:cases"])}
