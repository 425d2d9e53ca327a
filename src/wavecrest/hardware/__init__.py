"""GPU architectures as kernels and the optimizer need them, and detection of the one present."""

from wavecrest.hardware.archs import ARCHS, Arch, Device, base_arch, cpu, detect
from wavecrest.hardware.memory import free_host_memory
from wavecrest.hardware.onednn import onednn_multiplies

__all__ = ["ARCHS", "Arch", "Device", "base_arch", "cpu", "detect", "free_host_memory", "onednn_multiplies"]
