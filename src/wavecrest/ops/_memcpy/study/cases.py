"""Cases of memcpy: example calls to compile, benchmark and emulate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from wavecrest import hardware
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._memcpy.call import MODES, MemcpyCall
from wavecrest.ops._memcpy.config import configured
from wavecrest.ops._memcpy.launch import launch
from wavecrest.ops.common.launcher import Launch


def inputs(M: int, N: int, dtype: torch.dtype, device: str) -> MemcpyCall:
    """A copy of [M, N], which must be a multiple of 16 bytes."""
    return MemcpyCall(torch.randn(M, N, dtype=dtype, device=device))


def bench_cases(suite: str, device: str) -> dict[str, Callable[[], MemcpyCall]]:
    """Every mode at 1 MiB; unless the suite is quick also at 64 MiB and 1 GiB, with rising numbers of workgroups."""
    mebibytes = (1,) if suite == "quick" else (1, 64, 1024)

    def make(size: int, mode: str, programs: int | None = None) -> MemcpyCall:
        # random, as zeros can move faster than data
        return MemcpyCall(torch.randn(size << 19, dtype=torch.bfloat16, device=device), mode, programs)

    cases: dict[str, Callable[[], MemcpyCall]]
    cases = {f"{mode} {size} MiB": partial(make, size, mode) for size in mebibytes for mode in MODES}
    if suite != "quick":
        units = hardware.detect(device).compute_units
        for each in (1, 2, 4, 8, 16):
            cases[f"copy 1024 MiB programs={each * units}"] = partial(make, 1024, "copy", each * units)
    return cases


def emulate_cases(arch: str) -> dict[str, Callable[[], MemcpyCall]]:
    """Every mode, also by fewer workgroups than there are tiles."""

    def make(mode: str, programs: int | None) -> MemcpyCall:
        return MemcpyCall(torch.randint(-(1 << 20), 1 << 20, (3, 6000), dtype=torch.int32), mode, programs)

    return {f"{mode} programs={programs}": partial(make, mode, programs) for mode in MODES for programs in (None, 2)}


def compile_cases(arch: Arch, config: Config | None = None) -> dict[str, Launch]:
    """The launches that are held to a budget, by name."""
    cases = {}
    made = config or configured(arch.wave_size)
    for mode in MODES:
        for label, words, programs in (("", 1 << 20, None), (" ragged", 1020, None), (" programs", 1 << 20, 304)):
            x = torch.empty(words, dtype=torch.int32, device="meta")
            y = torch.empty((), dtype=torch.int64, device="meta") if mode == "read" else x
            cases[mode + label] = launch(MemcpyCall(x, mode, programs), x, y, made)
    return cases
