"""The bandwidth test: copy a tensor, read it, or write one, with as many workgroups as asked for.

Each mode gives something that can be checked, so that no access can be left out: a copy, the sum of all 32-bit words
(an integer, the same in any order), a filled tensor.
"""

from __future__ import annotations

from torch import Tensor

from wavecrest.ops._memcpy.backend import op as _op
from wavecrest.ops._memcpy.call import MemcpyCall

__all__ = ["memcpy"]

_run = _op.of_fields(MemcpyCall)


def memcpy(x: Tensor, mode: str = "copy", programs: int | None = None, value: int = 0) -> Tensor:
    """Move the bytes of a tensor through the memory of its device once, to measure its bandwidth.

    Args:
        x: contiguous, of any dtype but complex, a multiple of 16 bytes.
        mode: "copy" reads and writes; "read" only reads, "write" only writes (x gives shape, dtype and device).
        programs: workgroups of the Triton kernel, each of which takes every `programs`-th tile; None: one a tile.
            The result does not depend on it.
        value: the 32-bit pattern that "write" fills with, 0 to 2³² − 1 or as a signed number; 0 in other modes.

    Returns:
        "copy": a tensor equal to x, bit by bit. "read": the sum of x's 32-bit words, each as a signed number, as an
        int64 tensor [] (modulo 2⁶⁴). "write": a tensor like x, each of its 32-bit words `value`.

    Raises:
        InvalidArgument: an argument is outside this, or x starts inside a 32-bit word of its storage.
    """
    return _run(x, mode, programs, value)
