"""What the kernels and the optimizer need to know of a GPU, and which one is here."""

from wavecrest.hardware.archs import ARCHS, Arch, Device, base_arch, cpu, detect

__all__ = ["ARCHS", "Arch", "Device", "base_arch", "cpu", "detect"]
