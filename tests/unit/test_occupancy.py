"""Waves per SIMD at the borders where they change; tests/compile compares the register limits with LLVM's."""

from __future__ import annotations

import pytest

from wavecrest.hardware import ARCHS
from wavecrest.hardware.occupancy import occupancy


@pytest.mark.parametrize(
    ("arch", "vgpr", "waves"),
    [
        # 512 registers in steps of 8: 64 for eight waves
        ("gfx942", 0, 8), ("gfx942", 64, 8), ("gfx942", 65, 7), ("gfx942", 72, 7), ("gfx942", 73, 6),
        ("gfx942", 128, 4), ("gfx942", 129, 3), ("gfx942", 256, 2), ("gfx942", 257, 1), ("gfx942", 512, 1),
        ("gfx90a", 168, 3), ("gfx90a", 169, 2), ("gfx950", 80, 6), ("gfx950", 81, 5),
        # 1536 in steps of 24
        ("gfx1100", 96, 16), ("gfx1100", 97, 12), ("gfx1100", 120, 12), ("gfx1100", 121, 10), ("gfx1201", 256, 5),
        ("gfx1201", 240, 6), ("gfx1201", 241, 5),
        # 65,536 a multiprocessor of four schedulers
        ("sm_90", 32, 16), ("sm_90", 33, 12), ("sm_90", 64, 8), ("sm_90", 128, 4), ("sm_90", 255, 2),
    ],
)  # fmt: skip
def test_registers(arch: str, vgpr: int, waves: int) -> None:
    found = occupancy(ARCHS[arch], vgpr=vgpr, sgpr=20, lds=0, warps=4)
    assert (found.waves, found.registers) == (waves, waves)
    assert found.limit == ("" if waves == found.most else "vgpr")


@pytest.mark.parametrize(("sgpr", "waves", "limit"), [(100, 8, ""), (101, 7, "sgpr")])
def test_scalar_registers_of_gfx9(sgpr: int, waves: int, limit: str) -> None:
    found = occupancy(ARCHS["gfx942"], vgpr=32, sgpr=sgpr, lds=0, warps=1)
    assert (found.waves, found.limit) == (waves, limit)
    assert occupancy(ARCHS["gfx1100"], vgpr=32, sgpr=106, lds=0, warps=1).limit == ""


@pytest.mark.parametrize(
    ("arch", "lds", "warps", "waves", "limit"),
    [
        ("gfx942", 65536, 8, 2, "lds"),
        ("gfx942", 32768, 8, 4, "lds"),
        ("gfx942", 16384, 8, 8, ""),
        # in steps of 512 bytes: 16,385 take 16,896, of which three fit
        ("gfx942", 16385, 8, 6, "lds"),
        # one workgroup of two waves leaves two SIMDs idle
        ("gfx942", 65536, 2, 0.5, "lds"),
        ("gfx942", 65537, 4, 0, "lds"),
        ("gfx950", 65537, 8, 4, "lds"),
        ("gfx950", 163840, 16, 4, "lds"),
        # in steps of 1,280 bytes: 54,272 take 55,040, of which two fit
        ("gfx950", 54272, 4, 2, "lds"),
        # two compute units of 64 KiB share their LDS, but one workgroup has 64 KiB at most
        ("gfx1100", 65536, 4, 2, "lds"),
        ("gfx1100", 65537, 4, 0, "lds"),
        # the system takes 1 KiB of 228 a block
        ("sm_90", 113 * 1024, 4, 2, "lds"),
        ("sm_90", 114 * 1024, 4, 1, "lds"),
        ("sm_90", 228 * 1024, 4, 0, "lds"),
    ],
)
def test_local_memory(arch: str, lds: int, warps: int, waves: float, limit: str) -> None:
    found = occupancy(ARCHS[arch], vgpr=32, sgpr=20, lds=lds, warps=warps)
    assert (found.waves, found.limit) == (waves, limit)


def test_compute_unit_mode_halves_the_memory_and_the_simds() -> None:
    one = occupancy(ARCHS["gfx1100"], vgpr=32, sgpr=20, lds=40960, warps=4, wgp=False)
    two = occupancy(ARCHS["gfx1100"], vgpr=32, sgpr=20, lds=40960, warps=4, wgp=True)
    assert (one.waves, two.waves) == (2, 3)


def test_whole_workgroups_only() -> None:
    # registers allow 5 waves on each of 4 SIMDs: 20 waves hold one workgroup of 16, not one and a quarter
    found = occupancy(ARCHS["gfx942"], vgpr=96, sgpr=20, lds=0, warps=16)
    assert (found.registers, found.waves, found.limit) == (5, 4, "vgpr")


def test_workgroups_of_a_multiprocessor() -> None:
    found = occupancy(ARCHS["sm_90"], vgpr=16, sgpr=0, lds=0, warps=1)
    assert (found.waves, found.limit) == (8, "workgroups")


@pytest.mark.parametrize(("arch", "warps"), [("gfx942", 32), ("gfx1100", 64), ("sm_90", 64)])
def test_too_many_threads_cannot_be_launched(arch: str, warps: int) -> None:
    assert occupancy(ARCHS[arch], vgpr=16, sgpr=16, lds=0, warps=warps)[::2] == (0, "threads")
    assert occupancy(ARCHS[arch], vgpr=16, sgpr=16, lds=0, warps=warps // 2).waves > 0
