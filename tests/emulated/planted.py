"""Bugs planted in the machine code of a kernel, and what the watch says of each: JSON, {bug: message, "" if none}.

`python -m tests.emulated.planted gfx942 [--each | BUG …]`, without TRITON_INTERPRET. Softmax over four waves has what
can go wrong: scalar and buffer loads, values that waves pass on through LDS, stores. Its assembly is edited and
assembled again. With --each, every s_waitcnt and every s_barrier is taken out, one at a time.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton._C.libtriton import amd, llvm

from tests.emulated import kernels
from wavecrest.errors import EmulationError
from wavecrest.isa.emulate import EmulatedDriver, Program, emulated

Edit = Callable[[list[str]], None]

ROWS, COLUMNS = 2, 1000


def assemble(text: str, arch: str) -> bytes:
    """A code object, from the assembly that Triton printed."""
    # a kernel from Triton's cache has not set LLVM up
    llvm.init_targets()
    with tempfile.TemporaryDirectory() as folder:
        source, linked = Path(folder, "kernel.o"), Path(folder, "kernel.hsaco")
        source.write_bytes(amd.assemble_amdgcn(text, arch, ""))
        amd.link_hsaco(str(source), str(linked))
        return linked.read_bytes()


def found(lines: list[str], pattern: str, after: str = "") -> int:
    """The number of the first line that matches, after the first one that matches `after`."""
    start = found(lines, after) + 1 if after else 0
    return next(number for number in range(start, len(lines)) if re.match(r"\s+" + pattern, lines[number]))


def without(pattern: str, after: str = "") -> Edit:
    def edit(lines: list[str]) -> None:
        del lines[found(lines, pattern, after)]

    return edit


def appended(pattern: str, text: str) -> Edit:
    """Every line that matches gets `text` at its end."""

    def edit(lines: list[str]) -> None:
        for number, line in enumerate(lines):
            if re.match(r"\s+" + pattern, line):
                lines[number] = line + text

    return edit


def before_the_barrier(lines: list[str]) -> None:
    barrier = found(lines, "s_barrier")
    del lines[max(number for number in range(barrier) if "s_waitcnt" in lines[number])]


def unchanged(_lines: list[str]) -> None:
    pass


def random_rows() -> Tensor:
    return torch.randn(ROWS, COLUMNS).half()


def spaced(extra: int) -> Tensor:
    """An output whose rows are `extra` elements apart."""
    return torch.empty(ROWS, COLUMNS + extra, dtype=torch.float16)[:, :COLUMNS]


def whole() -> Tensor:
    return torch.empty(ROWS, COLUMNS, dtype=torch.float16)


Bug = tuple[Edit, Callable[[], Tensor], Callable[[], Tensor]]
BUGS: dict[str, Bug] = {
    "none": (unchanged, random_rows, whole),
    "none, rows apart": (unchanged, random_rows, lambda: spaced(8)),
    "wait for a scalar load": (without("s_waitcnt", "s_load"), random_rows, whole),
    "wait for a buffer load": (without("s_waitcnt vmcnt"), random_rows, whole),
    "wait for an LDS read": (without("s_waitcnt", "ds_read"), random_rows, whole),
    "wait before a barrier": (before_the_barrier, random_rows, whole),
    "barrier": (without("s_barrier"), random_rows, whole),
    "second barrier": (without("s_barrier", "s_barrier"), random_rows, whole),
    "LDS address one word on": (appended("ds_write_b32", " offset:4"), random_rows, whole),
    "LDS write": (without("ds_write_b32"), random_rows, whole),
    "store one element on": (appended("buffer_store_short", " offset:2"), random_rows, whole),
    "store one element on, rows apart": (appended("buffer_store_short", " offset:2"), random_rows, lambda: spaced(8)),
    "values of the input": (unchanged, whole, whole),
    "register": (without(r"v_mov_b32_e32 v\d+, 0xff800000"), random_rows, whole),
}


def message(driver: EmulatedDriver, edit: Edit, x: Tensor, out: Tensor) -> str:
    """The error that a launch of the edited kernel raises, or an empty string."""
    kernel: Any = kernels.softmax
    options: dict[str, Any] = {"BLOCK": 1024, "num_warps": 4}
    # one stride: rows apart are apart in both
    stride = out.stride(0)
    rows = torch.zeros(ROWS, stride, dtype=x.dtype)[:, :COLUMNS].copy_(x) if stride != x.stride(0) else x
    compiled = kernel.warmup(rows, out, COLUMNS, stride, grid=(ROWS,), **options)
    lines = compiled.asm["amdgcn"].splitlines()
    edit(lines)
    program = Program(assemble("\n".join(lines) + "\n", driver.arch), "softmax")
    arguments = [("x_ptr", "*fp16", rows), ("out_ptr", "*fp16", out), ("n", "i32", COLUMNS), ("stride", "i32", stride)]
    try:
        driver.launch(program, (ROWS,), arguments, compiled.metadata)
    except EmulationError as error:
        return str(error)
    return ""


def each(driver: EmulatedDriver) -> dict[str, str]:
    """Every s_waitcnt and s_barrier taken out, one at a time."""
    numbers: list[int] = []

    def look(lines: list[str]) -> None:
        numbers.extend(number for number, line in enumerate(lines) if re.match(r"\s+s_(waitcnt|barrier)", line))

    message(driver, look, random_rows(), whole())

    results: dict[str, str] = {}
    for number in numbers:
        taken: list[str] = []

        def take(lines: list[str], number: int = number, taken: list[str] = taken) -> None:
            taken.append(lines.pop(number).strip())

        text = message(driver, take, random_rows(), whole())
        results[f"line {number}: {taken[0]}"] = text
    return results


def main(arch: str, *options: str) -> None:
    torch.manual_seed(0)
    with emulated(arch, check=True) as driver:
        if options == ("--each",):
            found_by_name = each(driver)
        else:
            chosen = {name: BUGS[name] for name in options or BUGS}
            found_by_name = {name: message(driver, edit, x(), out()) for name, (edit, x, out) in chosen.items()}
    json.dump(found_by_name, sys.stdout, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
