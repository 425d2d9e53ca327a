"""Code that kernels for sm_90 (backends `triton_hopper`) share: where they run, barriers."""

from __future__ import annotations

import torch

import wavecrest.ops.common.target as _target
import wavecrest.ops.common.triton as _triton
from wavecrest.ops.common.triton import gl, gluon, hopper

# registers a thread of the two consumer warp groups: of the 504 that 3 groups have, the producer, the first, keeps 24
MULTIPLIES = gl.constexpr(240)


def refusal(in_graphs: bool = False) -> str | None:
    """Why no call runs such a kernel here and now; `in_graphs`: a call inside torch.compile is one operation."""
    if _triton.no_gluon is not None:
        return _triton.no_gluon
    if torch.compiler.is_compiling() and not in_graphs:
        return "its descriptors are made by a launch, which torch.compile does not trace"
    arch = _target.arch()
    if arch is None or arch.name != "sm_90" or _triton.interpreted:
        return "is for sm_90: it multiplies with Hopper's instructions"
    return None


@gluon.jit
def barriers(number: gl.constexpr, count: gl.constexpr):  # type: ignore[no-untyped-def]
    """Barriers that each are passed when `count` groups of warps have arrived."""
    made = gl.allocate_shared_memory(gl.int64, [number, 1], hopper.mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        hopper.mbarrier.init(made.index(i), count=count)
    return made
