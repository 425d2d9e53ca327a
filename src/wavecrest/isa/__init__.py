"""Static facts of compiled kernels, read from their machine code without a GPU.

`compiler` cross-compiles a launch with Triton, `assembly` reads the listing, `facts` collects registers, spills and
occupancy, `survey` does this for every case of an op, `budget` holds the result to limits, `mca` asks llvm-mca for a
model of the hot loop. `run` and `emulate` execute AMD machine code on the CPU.
"""

from __future__ import annotations

from wavecrest.ops.common.launcher import Launch

__all__ = ["Launch"]
