"""GPU architectures as kernels and the optimizer need them, and detection of the one present.

AMD is recognised by `torch.version.hip` and the device's gcnArchName alone: no environment variable, path or
product name takes part.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from wavecrest import INSTALL_TORCH
from wavecrest.errors import EnvironmentProblem, InvalidArgument, MissingDependency


@dataclass(frozen=True, slots=True)
class Arch:
    """One GPU architecture, described by its largest part on sale (`part`).

    Peaks are dense vendor datasheet figures: a ceiling to compare with, not a measurement.
    Units: TFLOP/s for peaks (of integers Top/s), GB/s for `bandwidth`, KiB for `lds_kib` (LDS or shared memory
    a workgroup may use), GHz for `clock` (the clock of the peaks), MiB for `l2_mib` (per die). `xcds`: dies with an L2
    cache of their own; workgroups are assigned to them round-robin.
    """

    name: str
    vendor: str
    part: str
    wave_size: int
    lds_kib: int
    compute_units: int
    bandwidth: float
    peak_fp32: float
    peak_16bit: float
    peak_fp8: float | None
    fp8: str | None
    peak_int8: float
    clock: float
    l2_mib: float
    source: str
    xcds: int = 1

    def peak(self, dtype: str) -> float:
        """Dense matrix peak in TFLOP/s for a torch dtype name such as "bfloat16"."""
        if dtype == "int8":
            return self.peak_int8
        if dtype in ("bfloat16", "float16"):
            return self.peak_16bit
        if dtype.startswith("float8") and self.peak_fp8 is not None:
            return self.peak_fp8
        return self.peak_fp32

    @property
    def rounds_bf16(self) -> bool:
        """True where an instruction rounds float32 to bfloat16, as compiled by triton 3.6 and 3.9."""
        return self.vendor == "nvidia" or self.name == "gfx950"


_AMD = "AMD datasheet"
_NVIDIA = "NVIDIA datasheet"

ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("gfx90a", "amd", "MI250X, one GCD", 64, 64, 110, 1638, 47.9, 191.5, None, None, 191.5, 1.7, 8, _AMD),
        Arch("gfx942", "amd", "MI300X", 64, 64, 304, 5300, 163.4, 1307.4, 2614.9, "e4m3fnuz", 2614.9, 2.1, 4, _AMD, 8),
        Arch("gfx950", "amd", "MI355X", 64, 160, 256, 8000, 157.3, 2516.6, 5033.2, "e4m3fn", 5033.2, 2.4, 4, _AMD, 8),
        Arch("gfx1100", "amd", "Radeon RX 7900 XTX", 32, 64, 96, 960, 61.4, 122.8, None, None, 122.8, 2.498, 6, _AMD),
        Arch("gfx1151", "amd", "Radeon 8060S", 32, 64, 40, 256, 29.7, 59.4, None, None, 59.4, 2.9, 2, _AMD),
        Arch("gfx1201", "amd", "Radeon RX 9070 XT", 32, 64, 64, 640, 48.7, 195.0, 389.0, "e4m3fn", 389, 2.97, 8, _AMD),
        Arch("sm_80", "nvidia", "A100 80GB", 32, 163, 108, 2039, 19.5, 312.0, None, None, 624.0, 1.41, 40, _NVIDIA),
        Arch("sm_90", "nvidia", "H200", 32, 227, 132, 4800, 67.0, 989.4, 1978.9, "e4m3fn", 1978.9, 1.83, 50, _NVIDIA),
        Arch("sm_100", "nvidia", "B200", 32, 227, 148, 8000, 80.0, 2250.0, 4500.0, "e4m3fn", 4500, 1.856, 126, _NVIDIA),
    )
}


@dataclass(frozen=True, slots=True)
class Device:
    """The detected device: `kind` is "cpu" or "cuda" (torch's word for ROCm devices too)."""

    kind: str
    index: int
    arch: str
    name: str
    compute_units: int
    memory_bytes: int
    driver: str

    @property
    def vendor(self) -> str:
        """Either "amd", "nvidia" or "cpu"."""
        if self.kind == "cpu":
            return "cpu"
        return "amd" if self.arch.startswith("gfx") else "nvidia"

    @property
    def torch_name(self) -> str:
        """The name that `torch.device` takes."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.index}"

    @property
    def known(self) -> Arch | None:
        """The architecture record, or None for the CPU and for unknown architectures."""
        return ARCHS.get(self.arch)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for records."""
        return asdict(self)


def base_arch(gcn_arch_name: str) -> str:
    """The architecture of a gcnArchName: "gfx942:sramecc+:xnack-" gives "gfx942"."""
    return gcn_arch_name.split(":", 1)[0]


@cache
def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def cpu() -> Device:
    """The host processor as a device; `compute_units` counts the logical cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Device("cpu", 0, f"cpu-{platform.machine()}", _cpu_model(), cores, _memory_bytes(), platform.release())


def _gpu(index: int) -> Device:
    import torch

    props = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        arch, driver = base_arch(props.gcnArchName), f"hip {torch.version.hip}"
    else:
        major, minor = torch.cuda.get_device_capability(index)
        arch, driver = f"sm_{major}{minor}", f"cuda {torch.version.cuda}"
    return Device("cuda", index, arch, props.name, props.multi_processor_count, props.total_memory, driver)


def detect(device: str | None = None) -> Device:
    """The device to work on.

    Args:
        device: "cpu", "cuda", "cuda:1", "hip" or "hip:1"; None takes the current GPU if there is one, else the CPU.

    Raises:
        InvalidArgument: the name has another form.
        EnvironmentProblem: a GPU was requested and torch sees no GPU of that number.
        MissingDependency: torch is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingDependency("torch", "wavecrest.hardware.detect", INSTALL_TORCH) from error
    if device is None:
        return _gpu(torch.cuda.current_device()) if torch.cuda.is_available() else cpu()
    kind, _, ordinal = device.partition(":")
    if kind == "cpu" and not ordinal:
        return cpu()
    if kind not in ("cuda", "hip") or (ordinal and not ordinal.isdigit()):
        raise InvalidArgument(f"unknown device {device!r}: use cpu, cuda, cuda:N, hip or hip:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(ordinal) if ordinal else 0
    if index >= count:
        build = f"hip {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"
        raise EnvironmentProblem(f"device {device} is not here: torch {torch.__version__} ({build}) sees {count} GPUs")
    if kind == "hip" and torch.version.hip is None:
        raise EnvironmentProblem(f"device {device} asked for, but this torch is a CUDA build; use cuda:{index}")
    return _gpu(index)
