"""AMD machine code on the CPU: what Triton compiles for an AMD GPU, executed instruction by instruction.

`with emulated("gfx942"): …` runs Triton kernels with CPU tensors. It proves function, not speed: caches, timing and
the order of memory accesses between compute units are not modelled. docs/emulation.md has the requirements.
"""

from wavecrest.isa.emulate.driver import ARCHS, EmulatedDriver, Launched, check_available, emulated
from wavecrest.isa.emulate.opcodes import version
from wavecrest.isa.emulate.program import Program, Stats

__all__ = ["ARCHS", "EmulatedDriver", "Launched", "Program", "Stats", "check_available", "emulated", "version"]
