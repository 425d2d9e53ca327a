"""Clock of a GPU while it works, and what holds it down, as NVML or AMD SMI tell: both are optional Python packages."""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from wavecrest.hardware.archs import Device

# seconds between two readings
INTERVAL = 0.01
# NVML's bits of what holds a clock down; of a GPU without work, and of clocks that somebody has set, nothing is said
NVML_IDLE = 0x1
NVML_REASONS = {
    0x4: "its power limit",
    0x8: "a slowdown by the hardware",
    0x20: "its temperature",
    0x40: "its temperature (by the hardware)",
    0x80: "the power supply's brake",
}
# clocks below this share of the highest are held down
HELD_DOWN = 0.95

_logger = logging.getLogger("wavecrest.clocks")

Reader = Callable[[], "Clocks | None"]


class Clocks(NamedTuple):
    """Clock of the compute units and the highest that they have, in MHz, and what holds it down; None: not told."""

    mhz: int
    most_mhz: int
    reasons: tuple[str, ...] | None


def reader(device: Device) -> Reader | None:
    """A function that reads the clocks of a GPU; None without a GPU, the vendor's package, or an answer of it.

    What it returns is None while the GPU has nothing to do.
    """
    if device.kind == "cpu":
        return None
    package, make = ("amdsmi", _amd) if device.vendor == "amd" else ("pynvml", _nvidia)
    try:
        library = importlib.import_module(package)
        read = make(library, _pci(device.index))
        read()
    # the errors of these packages have no base in common
    except Exception as error:
        _logger.info("no clocks of %s: %s", device.name, error)
        return None
    return read


def _pci(index: int) -> str:
    """The bus address of a GPU: its number is torch's, which counts visible devices alone."""
    import torch

    at: Any = torch.cuda.get_device_properties(index)
    return f"{at.pci_domain_id:04x}:{at.pci_bus_id:02x}:{at.pci_device_id:02x}.0"


def _nvidia(nvml: Any, address: str) -> Reader:
    nvml.nvmlInit()
    handle = nvml.nvmlDeviceGetHandleByPciBusId(address.encode())
    most = int(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))

    def read() -> Clocks | None:
        bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        if bits & NVML_IDLE:
            return None
        reasons = tuple(text for bit, text in NVML_REASONS.items() if bits & bit)
        return Clocks(int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)), most, reasons)

    return read


def _amd(smi: Any, address: str) -> Reader:
    smi.amdsmi_init()
    handle = smi.amdsmi_get_processor_handle_from_bdf(address)
    most = int(smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX)["max_clk"])

    def read() -> Clocks | None:
        if not int(smi.amdsmi_get_gpu_activity(handle)["gfx_activity"]):
            return None
        # AMD SMI's bits differ between generations: what holds the clock down is not told
        return Clocks(int(smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX)["clk"]), most, None)

    return read


@contextlib.contextmanager
def watching(read: Reader | None) -> Iterator[list[Clocks]]:
    """Readings every INTERVAL seconds by a thread of their own while the block runs; none without a reader."""
    seen: list[Clocks] = []
    if read is None:
        yield seen
        return
    done = threading.Event()

    def watch() -> None:
        while True:
            try:
                found = read()
            except Exception as error:
                _logger.info("no more clocks: %s", error)
                return
            if found is not None:
                seen.append(found)
            if done.wait(INTERVAL):
                return

    thread = threading.Thread(target=watch, name="wavecrest clocks", daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def held_down(seen: Sequence[Clocks]) -> str:
    """Why readings are those of a GPU whose clock is held down, as a sentence; empty if they are not.

    The middle reading counts. Where the vendor tells reasons, a low clock without one is a choice, of its owner or of
    a GPU with little work, and is not named.
    """
    if not seen:
        return ""
    middle = sorted(seen, key=lambda one: one.mhz)[len(seen) // 2]
    if middle.mhz >= HELD_DOWN * middle.most_mhz:
        return ""
    text = f"the GPU runs at {middle.mhz:,} of {middle.most_mhz:,} MHz"
    if middle.reasons is None:
        return text
    told = dict.fromkeys(reason for one in seen for reason in one.reasons or ())
    return f"{text}, held down by {' and '.join(told)}" if told else ""
