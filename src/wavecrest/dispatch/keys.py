"""The parts of shape keys and signatures: buckets of row counts, names of dtypes, whether gradients are needed."""

from __future__ import annotations

import torch
from torch import Tensor


def m_bucket(rows: int) -> int:
    """The bucket of a row count, one scheme for all ops: exact up to 8, then powers of two, one above 65,536.

    Inside torch.compile it is 0, for any count: a bucket of a symbolic size would compile once per bucket.
    """
    if torch.compiler.is_compiling():
        return 0
    return row_bucket(rows)


def row_bucket(rows: int) -> int:
    """The bucket of a row count, inside torch.compile too: a symbolic count compiles anew at the buckets' borders.

    For ops whose best backend depends on the row count so much that one choice for all would be wrong.
    """
    if rows <= 8:
        return rows
    bucket = 16
    while bucket < rows and bucket < 131072:
        bucket *= 2
    return bucket


def needs_grad(*tensors: Tensor | None) -> bool:
    """True if autograd would record a call with these tensors; part of every key, as kernels have no backward."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


_DTYPE_NAMES: dict[torch.dtype, str] = {
    value: str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)
}


def name_of(dtype: torch.dtype) -> str:
    """A dtype without the "torch." prefix."""
    return _DTYPE_NAMES[dtype]


def dtype_name(tensor: Tensor) -> str:
    """A tensor's dtype without the "torch." prefix."""
    return _DTYPE_NAMES[tensor.dtype]
