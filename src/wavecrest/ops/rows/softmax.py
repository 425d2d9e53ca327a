"""Softmax: y = exp(x − max(x)) / Σ exp(x − max(x)) over one dimension."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wavecrest.dispatch.op import Op
from wavecrest.errors import InvalidArgument
from wavecrest.ops.rows.backend import register
from wavecrest.ops.rows.call import RowCall, Spec

_op: Op[RowCall, Tensor] = register(Spec("softmax", "softmax"))
_run = _op.of_fields(RowCall)


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
    if dim == -1 or dim == getattr(x, "ndim", 0) - 1:
        return _run("softmax", x)
    dim = _dimension(x, dim)
    return _run("softmax", x.movedim(dim, -1)).movedim(-1, dim)
