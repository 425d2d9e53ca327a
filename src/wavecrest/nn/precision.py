"""The precision of float32 calls that `wavecrest.settings` asks for."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from wavecrest.ops import PackedWeight
from wavecrest.settings import STATE

T = TypeVar("T", Tensor, Tensor | None)

ROUNDED = {"bf16": torch.bfloat16, "fp16": torch.float16}


def rounded(x: Any) -> torch.dtype | None:
    """The 16-bit dtype that a call of x is computed in by the setting; None: x's own."""
    return ROUNDED.get(STATE.precision) if isinstance(x, Tensor) and x.dtype == torch.float32 else None


def of_gemm(x: Any) -> str:
    """The argument `precision` of a GEMM of x."""
    return "tf32" if STATE.precision == "tf32" and isinstance(x, Tensor) and x.dtype == torch.float32 else "ieee"


def in_16_bits(x: T, dtype: torch.dtype) -> T:
    """A float32 tensor in another dtype; any other, and a packed weight, as it is."""
    if not isinstance(x, Tensor) or isinstance(x, PackedWeight) or x.dtype != torch.float32:
        return x
    return x.to(dtype)
