"""What the compiler makes of a kernel, read from its machine code on any machine: no GPU takes part.

`compiler` cross-compiles a launch with Triton, `assembly` reads the listing, `occupancy` says how many waves fit,
`survey` does this for every case of an op, `budget` holds the result to limits, `mca` asks llvm-mca for a model of the
hot loop.
"""

from __future__ import annotations

from wavecrest.ops.common.launcher import Launch

__all__ = ["Launch"]
