"""Faults of Triton's interpreter: a warning before kernels run there with small floats, or with masks it refuses."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.triton as _triton
from wavecrest.errors import InterpreterWarning
from wavecrest.ops.common.quantized import LARGEST
from wavecrest.ops.common.triton import tl, triton

SMALL_FLOATS = (torch.bfloat16, *(dtype for dtype in LARGEST if dtype.is_floating_point))

if _triton.interpreted and _triton.unavailable is None:

    @triton.jit
    def _square_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        x = tl.load(x_ptr + at)
        tl.store(out_ptr + at, (tl.dot(x, x) + 0.006).to(out_ptr.dtype.element_ty))

    @triton.jit
    def _masked_kernel(x_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, BLOCK)
        tl.store(x_ptr + at, 1, mask=(at < BLOCK // 2) & (tl.program_id(0) == 0))


@functools.cache
def computes_small_floats() -> bool:
    """True if the interpreter multiplies and rounds bfloat16 as hardware does: that of triton 3.6 does not."""
    x = torch.eye(16, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    _square_kernel[(1,)](x, out, BLOCK=16)
    # 0.006 is nearer to the bfloat16 above it
    return torch.equal(out, (torch.eye(16) + 0.006).to(torch.bfloat16))


@functools.cache
def takes_scalar_masks() -> bool:
    """True if a comparison of scalars can mask a block: the interpreter of triton 3.9 raises."""
    try:
        _masked_kernel[(1,)](torch.zeros(16, dtype=torch.int32), BLOCK=16)
    # what it raises differs by version
    except Exception as error:
        _warn_of_masks(str(error))
        return False
    return True


@functools.cache
def _warn_of_masks(reason: str) -> None:
    warnings.warn(
        f"TRITON_INTERPRET=1: the interpreter of triton {triton.__version__} refuses masks made of comparisons of "
        f"scalars ({reason}): kernels that quantize or split rows raise, and others may; take triton 3.6, or a GPU",
        InterpreterWarning,
        stacklevel=2,
    )


def warn_of(tensors: Iterable[Any]) -> None:
    """Warn, once a process, of masks that the interpreter refuses, and of small floats that it gets wrong."""
    takes_scalar_masks()
    if any(isinstance(one, Tensor) and one.dtype in SMALL_FLOATS for one in tensors) and not computes_small_floats():
        _warn()


@functools.cache
def _warn() -> None:
    warnings.warn(
        f"TRITON_INTERPRET=1: the interpreter of triton {triton.__version__} multiplies the bits of bfloat16 and "
        "truncates what it rounds to bfloat16 and 8-bit floats, so that results of these types are wrong; take float32 "
        "or float16 there, or a GPU",
        InterpreterWarning,
        stacklevel=2,
    )
