"""Gated activations by PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from wavecrest.backends.torch.common import PRIORITY
from wavecrest.dispatch import registry


def _silu_and_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return F.silu(gate) * up


def _gelu_and_mul(gate: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


registry.get("silu_and_mul").attach("torch", _silu_and_mul, priority=PRIORITY)
registry.get("gelu_and_mul").attach("torch", _gelu_and_mul, priority=PRIORITY)
