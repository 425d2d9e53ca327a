"""Clocks of a GPU that is not there, as the packages of the vendors would tell them."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from wavecrest.hardware import Device, clocks, cpu
from wavecrest.hardware.clocks import Clocks, held_down, reader, watching

NVIDIA = Device("cuda", 0, "sm_90", "pretended", 132, 1 << 30, "cuda")
AMD = Device("cuda", 0, "gfx942", "pretended", 304, 1 << 30, "hip")


def nvml(*, mhz: int, bits: int) -> SimpleNamespace:
    """NVML by its Python package, for one GPU."""

    def handle(address: bytes) -> str:
        assert address == b"0000:c1:00.0"
        return "gpu"

    return SimpleNamespace(
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByPciBusId=handle,
        nvmlDeviceGetMaxClockInfo=lambda gpu, kind: 1980,
        nvmlDeviceGetClockInfo=lambda gpu, kind: mhz,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: bits,
    )


def amdsmi(*, mhz: int, activity: int) -> SimpleNamespace:
    """AMD SMI by its Python package, for one GPU."""
    return SimpleNamespace(
        AmdSmiClkType=SimpleNamespace(GFX=0),
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handle_from_bdf=lambda address: address,
        amdsmi_get_clock_info=lambda gpu, kind: {"clk": mhz, "max_clk": 2100},
        amdsmi_get_gpu_activity=lambda gpu: {"gfx_activity": activity},
    )


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a package in the place of the vendor's."""

    def put(name: str, module: Any) -> None:
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(clocks, "_pci", lambda index: "0000:c1:00.0")

    return put


@pytest.mark.parametrize(
    ("mhz", "bits", "told"),
    [
        (1305, 0x4, "the GPU runs at 1,305 of 1,980 MHz, held down by its power limit"),
        (1305, 0x60, "held down by its temperature and its temperature (by the hardware)"),
        (1305, 0x2, ""),
        (1980, 0x4, ""),
        (345, 0x1, ""),
    ],
    ids=["power", "heat", "set by its owner", "full clock", "idle"],
)
def test_nvidia(package: Any, mhz: int, bits: int, told: str) -> None:
    package("pynvml", nvml(mhz=mhz, bits=bits))
    with watching(reader(NVIDIA)) as seen:
        time.sleep(0)
    assert bool(seen) == (bits != 1)
    assert held_down(seen).endswith(told) and bool(held_down(seen)) == bool(told)


def test_amd(package: Any) -> None:
    package("amdsmi", amdsmi(mhz=1400, activity=90))
    with watching(reader(AMD)) as seen:
        pass
    assert held_down(seen) == "the GPU runs at 1,400 of 2,100 MHz"
    package("amdsmi", amdsmi(mhz=130, activity=0))
    with watching(reader(AMD)) as seen:
        pass
    assert not seen


def test_without_the_package_or_an_answer_there_are_no_clocks(package: Any) -> None:
    assert reader(cpu()) is None
    package("pynvml", None)
    assert reader(NVIDIA) is None
    broken = nvml(mhz=1, bits=0)
    broken.nvmlDeviceGetClockInfo = lambda gpu, kind: 1 / 0
    package("pynvml", broken)
    assert reader(NVIDIA) is None
    with watching(None) as seen:
        pass
    assert not seen and not held_down(seen)


def test_a_gpu_that_stops_answering_ends_the_readings() -> None:
    def read() -> Clocks:
        raise RuntimeError("GPU is lost")

    with watching(read) as seen:
        pass
    assert not seen


def test_the_middle_reading_counts() -> None:
    low, full = Clocks(900, 2000, ("its power limit",)), Clocks(2000, 2000, ())
    assert not held_down([full, low, full]) and held_down([low, full, low]).startswith("the GPU runs at 900 of")
