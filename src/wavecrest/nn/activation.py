"""Activations as modules."""

from __future__ import annotations

from torch import Tensor, nn

from wavecrest.ops import gelu_and_mul, silu_and_mul, softmax


class SiluAndMul(nn.Module):
    """silu(gate) · up; see `wavecrest.ops.silu_and_mul`."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """gate and up [..., N], or one packed [..., 2N], to [..., N]."""
        return silu_and_mul(gate, up)


class GeluAndMul(nn.Module):
    """gelu(gate) · up; see `wavecrest.ops.gelu_and_mul`."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """gate and up [..., N], or one packed [..., 2N], to [..., N]."""
        return gelu_and_mul(gate, up, self.approximate)

    def extra_repr(self) -> str:
        return f"approximate={self.approximate!r}"


class Softmax(nn.Module):
    """Softmax over one dimension; see `wavecrest.ops.softmax`."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """x to a tensor of its shape."""
        return softmax(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"
