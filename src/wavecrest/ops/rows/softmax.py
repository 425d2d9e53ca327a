"""Softmax: y = exp(x − max(x)) / Σ exp(x − max(x)) over one dimension."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wavecrest.errors import InvalidArgument
from wavecrest.ops.rows import backend as _row_op


def _operands(x: Tensor) -> _row_op.Operands:
    return _row_op.Operands("softmax", x)


_op = _row_op.register("softmax", _operands, kind="softmax")


def _dimension(x: Any, dim: Any) -> int:
    if not isinstance(x, Tensor):
        raise InvalidArgument(f"softmax: takes a tensor, got {type(x).__name__}")
    if not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise InvalidArgument(f"softmax: dim must be from {-x.ndim} to {x.ndim - 1} for {list(x.shape)}, got {dim!r}")
    return dim


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """y = exp(x − max(x)) / Σ exp(x − max(x)) over `dim`, in float32 and rounded once.

    A row of −inf alone, or with +inf or NaN in it, is NaN, as in PyTorch.

    Args:
        x: at least one dimension, any strides, float32, float16, bfloat16 or float64.
        dim: the dimension summed over.

    Returns:
        A tensor of x's shape and dtype: contiguous for the last dimension, otherwise a view of a tensor that is
        contiguous with `dim` last.

    Raises:
        InvalidArgument: a shape, dtype or dim is outside this.
    """
    if dim in (-1, getattr(x, "ndim", 0) - 1):
        last: Tensor = _op(x)
        return last
    dim = _dimension(x, dim)
    moved: Tensor = _op(x.movedim(dim, -1))
    return moved.movedim(-1, dim)
