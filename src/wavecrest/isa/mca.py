"""llvm-mca's model of a loop: cycles of one pass, and cycles in which the matrix unit is busy.

The model has one wave alone on its SIMD and no memory latency: it ranks configurations and gives no time.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wavecrest.errors import MissingDependency
from wavecrest.isa.assembly import Line

ITERATIONS = 100
# the first that knows gfx942
OLDEST = 17
# newest first: support for gfx950 and for buffer instructions came late (19 aborts on the latter)
_NAMES = tuple(f"llvm-mca-{version}" for version in range(30, OLDEST - 1, -1))
_PLACES = ("llvm-mca", "/opt/rocm/llvm/bin/llvm-mca")
# names of the matrix unit in the scheduling models of gfx90a, gfx942 and gfx950
_MATRIX_UNIT = "HWXDL"


@dataclass(frozen=True, slots=True)
class Tool:
    """An llvm-mca program and its version, such as "llvm-mca 22.1.8"."""

    path: str
    version: str


class Estimate(NamedTuple):
    """Estimate for one pass through the loop, in the tool's cycles."""

    cycles: float
    matrix_cycles: float


def find() -> Tool:
    """The newest llvm-mca that knows gfx942: by versioned name, then plain, then ROCm's.

    Raises:
        MissingDependency: no llvm-mca of version OLDEST or newer is installed.
    """
    for name in (*_NAMES, *_PLACES):
        path = shutil.which(name)
        if path is None:
            continue
        done = subprocess.run([path, "--version"], capture_output=True, text=True)
        version = re.search(r"LLVM version ((\d+)\S*)", done.stdout)
        if done.returncode == 0 and version is not None and int(version[2]) >= OLDEST:
            return Tool(path, f"llvm-mca {version[1]}")
    raise MissingDependency(f"llvm (for llvm-mca, {OLDEST} or newer)", "--mca", "apt install llvm-22, or the like")


def estimate(tool: Tool, arch: str, loop: Sequence[Line]) -> Estimate | str:
    """The model's figures for a loop, or the reason why it gives no figures.

    Args:
        tool: from `find`.
        arch: an AMD architecture; any other gives a reason.
        loop: the lines of the loop; labels and branches are left out, since the tool repeats what it gets.
    """
    if not arch.startswith("gfx"):
        return f"llvm-mca has no model of {arch}"
    body = [line.text for line in loop if line.opcode and not line.target]
    if not body:
        return "no loop"
    # the compiler's listings for gfx11 and later name the halves of 16-bit registers
    halves = [] if arch.startswith("gfx9") else ["-mattr=+real-true16"]
    command = [tool.path, "-mtriple=amdgcn", f"-mcpu={arch}", f"-iterations={ITERATIONS}", *halves]
    try:
        done = subprocess.run(command, input="\n".join(body) + "\n", capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return f"{tool.version} did not finish in 60 s"
    # an unknown processor is only a warning to the tool, and its figures would be those of another
    if "is not a recognized processor" in done.stderr:
        return f"{tool.version} does not know {arch}"
    if done.returncode < 0:
        return f"{tool.version} crashed (signal {-done.returncode}); a newer one may not"
    if done.returncode != 0:
        error = re.search(r"error: .*", done.stderr)
        return f"{tool.version}: {error[0] if error else f'exit code {done.returncode}'}"
    return _read(tool, done.stdout, matrix=any("mfma" in line or "wmma" in line for line in body))


def _read(tool: Tool, output: str, *, matrix: bool) -> Estimate | str:
    total = re.search(r"^Total Cycles:\s+(\d+)", output, re.MULTILINE)
    units = re.findall(r"^\[(\d+)(?:\.\d+)?\]\s+- (\w+)$", output, re.MULTILINE)
    pressure = re.search(r"^Resource pressure per iteration:\n(?:\[.*\n)(.*)$", output, re.MULTILINE)
    if total is None or not units or pressure is None:
        return f"{tool.version} prints another format"
    names, values = [name for _, name in units], pressure[1].split()
    if len(names) != len(values):
        return f"{tool.version} prints another format"
    busy = dict(zip(names, values, strict=True))
    if matrix and _MATRIX_UNIT not in busy:
        return f"{tool.version} models no matrix unit for this architecture"
    used = busy.get(_MATRIX_UNIT, "-")
    return Estimate(int(total[1]) / ITERATIONS, 0.0 if used == "-" else float(used))
