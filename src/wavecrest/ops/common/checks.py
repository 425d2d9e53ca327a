"""Checks of arguments that ops share, the refusal that all Triton kernels share, and the precision of references."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.triton as _triton
from wavecrest.errors import InvalidArgument

KERNEL_DTYPES = ("float32", "float16", "bfloat16")


def widen(x: Tensor) -> Tensor:
    """float32, or float64 where the tensor has it: the precision of every reference."""
    return x if x.dtype == torch.float64 else x.float()


def check_rows(op: str, x: Any) -> None:
    """Raise InvalidArgument unless `x` is a floating-point tensor with at least one dimension."""
    if not isinstance(x, Tensor):
        raise InvalidArgument(f"{op}: takes a tensor, got {type(x).__name__}")
    if x.ndim == 0 or not x.dtype.is_floating_point:
        raise InvalidArgument(f"{op}: takes a floating-point tensor [..., N], got {x.dtype} {list(x.shape)}")


def check_vector(op: str, name: str, vector: Any, x: Tensor) -> None:
    """Raise InvalidArgument unless a weight or bias is a floating-point tensor [N] beside `x`."""
    if not isinstance(vector, Tensor) or vector.shape != x.shape[-1:] or not vector.dtype.is_floating_point:
        found = f"{vector.dtype} {list(vector.shape)}" if isinstance(vector, Tensor) else type(vector).__name__
        raise InvalidArgument(f"{op}: {name} must be a floating-point tensor [{x.shape[-1]}], got {found}")
    if vector.device != x.device:
        raise InvalidArgument(f"{op}: {name} is on {vector.device}, x on {x.device}")


def check_same(op: str, name: str, other: Any, x: Tensor) -> None:
    """Raise InvalidArgument unless `other` has the shape, dtype and device of `x`."""
    if not isinstance(other, Tensor) or other.shape != x.shape or other.dtype != x.dtype or other.device != x.device:
        found = (
            f"{other.dtype} {list(other.shape)} on {other.device}"
            if isinstance(other, Tensor)
            else type(other).__name__
        )
        raise InvalidArgument(f"{op}: {name} must be {x.dtype} {list(x.shape)} on {x.device}, got {found}")


def check_eps(op: str, eps: Any) -> None:
    """Raise InvalidArgument unless `eps` is a number ≥ 0."""
    if not isinstance(eps, (float, int)) or not eps >= 0:
        raise InvalidArgument(f"{op}: eps must be a number of at least 0, got {eps!r}")


def kernel_refusal(dtype: str, device: str, dims: int, grad: bool) -> str | None:
    """Why no Triton kernel takes a call of this dtype, device, number of leading dimensions and need of gradients."""
    if _triton.unavailable is not None:
        return _triton.unavailable
    if device != "cuda" and not (device == "cpu" and (_triton.interpreted or _triton.emulated is not None)):
        return f"runs on a GPU; these tensors are on {device}"
    if grad:
        return "has no backward; a call that needs gradients runs in PyTorch"
    if dtype not in KERNEL_DTYPES:
        return f"takes {', '.join(KERNEL_DTYPES)}, not {dtype}"
    if dims > 3:
        return f"takes up to 3 leading dimensions without a common stride, not {dims}"
    return None
