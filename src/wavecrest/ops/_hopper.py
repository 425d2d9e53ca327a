"""What the kernels for sm_90 (backends `triton_hopper`) share: where they run, and the barriers of their groups."""

from __future__ import annotations

import torch

import wavecrest.ops._rows as _rows
import wavecrest.ops._triton as _triton
from wavecrest.ops._triton import gl, gluon, hopper

# registers a thread of what multiplies: of the 504 that 3 groups have the first, which copies, has 24 left
MULTIPLIES = gl.constexpr(240)


def refusal() -> str | None:
    """Why no call runs such a kernel here and now."""
    if _triton.no_gluon is not None:
        return _triton.no_gluon
    if torch.compiler.is_compiling():
        return "its descriptors are made by a launch, which torch.compile does not trace"
    arch = _rows.arch()
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
