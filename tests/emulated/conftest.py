"""One process an architecture and kind, started when first asked for, architectures side by side.

Kernels defined for Triton's interpreter cannot be compiled, so the processes run without TRITON_INTERPRET.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from wavecrest.errors import EnvironmentProblem

ARCHS = ("gfx90a", "gfx942", "gfx950")
ROOT = Path(__file__).parents[2]


@functools.cache
def missing() -> str | None:
    """Why nothing can be emulated here, or None."""
    try:
        from wavecrest.isa.emulate import machine, opcodes

        opcodes.tables("cdna")
        machine.load()
    except EnvironmentProblem as problem:
        return str(problem)
    return None


@functools.cache
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(ARCHS))


def child(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        env=environment | {"PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )


@functools.cache
def started(kind: str, arch: str) -> Future[Any]:
    def run() -> Any:
        command = {
            "kernels": ("tests.emulated.cases", arch),
            "ops": ("wavecrest", "isa", "run", "all", "--arch", arch, "--check", "--json"),
        }[kind]
        done = child(*command)
        # 2: something is wrong, which the result says
        assert done.returncode in (0, 2), done.stderr[-4000:]
        return json.loads(done.stdout)

    return pool().submit(run)


@pytest.fixture
def emulated() -> Callable[[str, str], Any]:
    """`emulated("kernels" or "ops", arch)`: what that process printed."""
    if (reason := missing()) is not None:
        pytest.skip(f"no emulator: {reason}")

    def result(kind: str, arch: str) -> Any:
        for other in ARCHS:
            started(kind, other)
        return started(kind, arch).result()

    return result


@pytest.fixture
def run_child() -> Callable[..., subprocess.CompletedProcess[str]]:
    if (reason := missing()) is not None:
        pytest.skip(f"no emulator: {reason}")
    return child
