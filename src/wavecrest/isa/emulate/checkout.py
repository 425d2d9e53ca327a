"""tinygrad's emulator, from the user's checkout: it gives the opcodes their meaning.

It is in tinygrad's repository and not in its package, so TINYGRAD_DIR names a `git clone`; wavecrest ships
no part of it.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from wavecrest import env
from wavecrest.errors import EnvironmentProblem, MissingDependency

URL = "https://github.com/tinygrad/tinygrad"
# the newest commit the tests were run with; docs/emulation.md lists all
TESTED = "a9069c1"
NEEDED = ("test/mockgpu/amd/emu.py", "test/mockgpu/amd/pcode.py", "tinygrad/renderer/amd")
# the names used from test.mockgpu.amd.emu
_NAMES = (
    *("decode_inst", "_op_name", "_get_runner", "SGPR_COUNT", "F32_INLINE", "ttmp", "EXEC_LO"),
    *("PC_LO_IDX", "PC_HI_IDX", "SCRATCH_STRIDE_IDX", "ir3", "ir4"),
)


def folder() -> Path:
    """The checkout that TINYGRAD_DIR names.

    Raises:
        MissingDependency: the variable is not set.
        EnvironmentProblem: the folder is not a checkout with the emulator.
    """
    named = env.get("TINYGRAD_DIR")
    if not named:
        raise MissingDependency(
            "tinygrad (a checkout)", "the emulator", f"git clone {URL} && export TINYGRAD_DIR=$PWD/tinygrad"
        )
    path = Path(named).expanduser().resolve()
    missing = [part for part in NEEDED if not (path / part).exists()]
    if missing:
        raise EnvironmentProblem(
            f"TINYGRAD_DIR is {path}, which has no {missing[0]}; it must name a checkout of {URL} (commit {TESTED} is "
            "tested; the package from PyPI does not have the emulator)"
        )
    return path


def check_clang() -> None:
    """tinygrad compiles opcodes with clang, or with what CC names, which must then be clang.

    Raises:
        MissingDependency: clang is not installed.
        EnvironmentProblem: CC names another compiler.
    """
    name = env.get("CC") or "clang"
    if shutil.which(name) is None:
        raise MissingDependency("clang", "the emulator (tinygrad compiles opcodes with it)", "apt install clang")
    if "clang" not in subprocess.run([name, "--version"], capture_output=True, text=True).stdout:
        raise EnvironmentProblem(f"CC={name}: the emulator needs clang; unset CC or set it to clang")


def commit() -> str:
    """The commit of the checkout, or "unknown" where git cannot say."""
    try:
        git = ["git", "-C", str(folder())]
        done = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


@contextmanager
def _importable(path: Path) -> Iterator[None]:
    """`path` first on sys.path, and its package `test` not hidden by another of that name (Python has one)."""
    hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "test"}
    for name in hidden:
        del sys.modules[name]
    sys.path.insert(0, str(path))
    try:
        yield
    finally:
        sys.path.remove(str(path))
        for name in [name for name in sys.modules if name.split(".")[0] == "test"]:
            del sys.modules[name]
        sys.modules.update(hidden)


@cache
def load() -> Any:
    """tinygrad's module `test.mockgpu.amd.emu`.

    Raises:
        MissingDependency: no checkout or no clang.
        EnvironmentProblem: the checkout does not work here.
    """
    path = folder()
    check_clang()
    with _importable(path):
        try:
            emulator = importlib.import_module("test.mockgpu.amd.emu")
        except Exception as error:
            raise EnvironmentProblem(
                f"tinygrad's emulator in {path} cannot be imported ({type(error).__name__}: {error}); commit {TESTED} "
                "is tested"
            ) from error
    found = Path(sys.modules["tinygrad"].__file__ or "").resolve()
    if path not in found.parents:
        raise EnvironmentProblem(f"another tinygrad was imported first, from {found.parent}; the emulator needs {path}")
    lacking = [name for name in _NAMES if not hasattr(emulator, name)]
    if lacking:
        raise EnvironmentProblem(
            f"the tinygrad in {path} (commit {commit()[:7]}) has no {', '.join(lacking)} in its emulator: it is too "
            f"old or too new; commit {TESTED} is tested"
        )
    return emulator
