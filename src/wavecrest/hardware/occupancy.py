"""Occupancy: the number of waves of a kernel that fit on one SIMD, and the resource that limits it.

AMD's figures are those of LLVM's AMDGPU backend (AMDGPUUsage.html, AMDGPUBaseInfo.cpp), NVIDIA's those of the CUDA
programming guide's table of compute capabilities. tests/compile compares the register limits with LLVM's own figure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from wavecrest.hardware import Arch

Limit = Literal["", "vgpr", "sgpr", "lds", "workgroups", "threads"]
# most threads of a workgroup, on AMD and NVIDIA alike
MOST_THREADS = 1024


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit that shares local memory: a compute unit, a pair of them (WGP mode), or a streaming multiprocessor.

    `registers` are 32-bit registers a lane of one SIMD, handed out in steps of `granule` a wave; `waves` the most a
    SIMD holds; `lds` bytes of the unit, handed out in steps of `lds_granule`, with `lds_reserved` more a workgroup;
    `workgroups` the most the unit holds.
    """

    simds: int
    waves: int
    registers: int
    granule: int
    lds: int
    lds_granule: int
    lds_reserved: int = 0
    workgroups: int | None = None


class Occupancy(NamedTuple):
    """Waves per SIMD (a fraction if a workgroup leaves SIMDs idle), the hardware's maximum, and the limiting resource.

    `registers` are the waves per SIMD that registers alone allow: the figure LLVM prints.
    """

    waves: float
    most: int
    limit: Limit
    registers: int


def unit(arch: Arch, *, wgp: bool = True) -> Unit:
    """The unit of an architecture; `wgp` says whether gfx11 and gfx12 run in WGP mode, as compilers do by default."""
    if arch.vendor == "nvidia":
        # 65,536 registers in steps of 256 a warp, 4 schedulers; the system keeps 1 KiB of shared memory a block
        return Unit(4, 16, 512, 8, (arch.lds_kib + 1) * 1024, 128, 1024, 32)
    if arch.name.startswith("gfx9"):
        # VGPRs and AGPRs are one file from gfx90a on
        return Unit(4, 8, 512, 8, arch.lds_kib * 1024, 1280 if arch.name == "gfx950" else 512)
    # wave32 of the parts with 1.5 times the registers (gfx1100, gfx1101, gfx1151, gfx12)
    units = 2 if wgp else 1
    return Unit(2 * units, 16, 1536, 24, units * arch.lds_kib * 1024, 512)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _sgpr_waves(arch: Arch, sgpr: int, most: int) -> int:
    """Waves per SIMD that scalar registers allow: 800 a SIMD on gfx9, no limit from gfx10 on."""
    if not arch.name.startswith("gfx9") or sgpr <= 100:
        return most
    return min(most, 7)


def occupancy(arch: Arch, *, vgpr: int, sgpr: int, lds: int, warps: int, wgp: bool = True) -> Occupancy:
    """The waves per SIMD of a kernel.

    Args:
        arch: the architecture.
        vgpr: vector registers a lane, AGPRs included where they are one file.
        sgpr: scalar registers a wave (not used on NVIDIA and from gfx10 on).
        lds: bytes of local (shared) memory a workgroup.
        warps: waves a workgroup.
        wgp: whether gfx11 and gfx12 run in WGP mode.

    Returns:
        Zero waves if not even one workgroup can be launched.
    """
    one = unit(arch, wgp=wgp)
    by_vgpr = min(one.waves, one.registers // max(_round_up(vgpr, one.granule), one.granule))
    by_sgpr = _sgpr_waves(arch, sgpr, one.waves)
    registers = min(by_vgpr, by_sgpr)
    groups: dict[Limit, int] = {
        "": one.waves * one.simds // warps,
        "vgpr": by_vgpr * one.simds // warps,
        "sgpr": by_sgpr * one.simds // warps,
    }
    if lds > arch.lds_kib * 1024:
        groups["lds"] = 0
    elif lds > 0:
        groups["lds"] = one.lds // (_round_up(lds, one.lds_granule) + one.lds_reserved)
    if one.workgroups is not None:
        groups["workgroups"] = one.workgroups
    if warps * arch.wave_size > MOST_THREADS:
        groups["threads"] = 0
    # the first of the smallest: no limit before a limit that just fits
    limit = min(groups, key=lambda name: groups[name])
    return Occupancy(groups[limit] * warps / one.simds, one.waves, limit, registers)
