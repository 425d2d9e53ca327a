"""The precision of calls that `wavecrest.settings`, or PyTorch's autocast, asks for."""

from __future__ import annotations

from typing import Any, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from wavecrest.ops import PackedWeight
from wavecrest.settings import STATE

T = TypeVar("T", Tensor, Tensor | None)
First = TypeVar("First")
Others = TypeVarTuple("Others")

# dtypes that autocast casts
CAST = (torch.float32, torch.float16, torch.bfloat16)
# settings that are a `precision` of gemm too
OF_GEMM = ("tf32", "tf32x3")
ROUNDED = {"bf16": torch.bfloat16, "fp16": torch.float16}


# other devices have no autocast, and asking about them is an error
AUTOCAST = ("cpu", "cuda")


def in_autocast(x: Any) -> bool:
    """Whether PyTorch's autocast is on for the device of x."""
    return isinstance(x, Tensor) and x.device.type in AUTOCAST and torch.is_autocast_enabled(x.device.type)


def by_autocast(x: First, *others: *Others) -> tuple[First, *Others]:
    """The arguments of a GEMM, a convolution or attention as PyTorch's autocast gives them to its own.

    Inside of autocast for x's device, floats but float64 in its dtype. Packed weights, 8-bit values and all that is no
    tensor stay as they are.
    """
    if not in_autocast(x):
        return x, *others
    given: tuple[Any, ...] = x, *others
    dtype = torch.get_autocast_dtype(given[0].device.type)
    return tuple(one.to(dtype) if _is_cast(one) else one for one in given)


def _is_cast(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, PackedWeight) and x.dtype in CAST


def rounded(x: Any) -> torch.dtype | None:
    """The 16-bit dtype that a call of x is computed in by the setting; None: x's own."""
    return ROUNDED.get(STATE.precision) if isinstance(x, Tensor) and x.dtype == torch.float32 else None


def of_gemm(x: Any) -> str:
    """The argument `precision` of a GEMM of x."""
    asked = STATE.precision in OF_GEMM and isinstance(x, Tensor) and x.dtype == torch.float32
    return STATE.precision if asked else "ieee"


def in_16_bits(x: T, dtype: torch.dtype) -> T:
    """A float32 tensor in another dtype; any other, and a packed weight, as it is."""
    if not isinstance(x, Tensor) or isinstance(x, PackedWeight) or x.dtype != torch.float32:
        return x
    return x.to(dtype)
