"""GPU architectures as kernels and the optimizer need them, and detection of the one present."""

from wavecrest.hardware.archs import ARCHS, Arch, Device, base_arch, cpu, detect

__all__ = ["ARCHS", "Arch", "Device", "base_arch", "cpu", "detect"]
