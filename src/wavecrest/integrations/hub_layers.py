"""Layers of a Hugging Face kernels repository, over wavecrest's ops; `kernels_hub.build` copies this file into one.

`kernels` puts the forward of such a class into a model's own module: no constructor, no members, no methods beside it.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from wavecrest import ops


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, with the weight and the eps of the module that it serves."""

    weight: Tensor
    can_torch_compile = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map [..., N] to [..., N], rounded once from float32."""
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        return ops.rms_norm(hidden_states, self.weight, eps)  # type: ignore[arg-type]


class SwiGLUMLP(nn.Module):
    """down(silu(gate(x)) · up(x)), the activation and the product in one kernel."""

    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to [..., hidden]."""
        made: Tensor = self.down_proj(ops.silu_and_mul(self.gate_proj(x), self.up_proj(x)))  # type: ignore[operator]
        return made


class GeGLUMLP(nn.Module):
    """down(gelu(gate(x)) · up(x)) with the tanh form of GELU, the activation and the product in one kernel."""

    can_torch_compile = True

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to [..., hidden]."""
        gate, up = self.gate_proj(x), self.up_proj(x)  # type: ignore[operator]
        made: Tensor = self.down_proj(ops.gelu_and_mul(gate, up, "tanh"))  # type: ignore[operator]
        return made


class RotaryPosEmb(nn.Module):
    """Rotation of queries and keys by tables cos and sin [B or 1, S, R] whose halves are the same, as transformers'."""

    can_torch_compile = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """Map q and k, [B, H, S, D] with `unsqueeze_dim` 1 and [B, S, H, D] with 2, to the same shapes."""
        half = cos.shape[-1] // 2
        cos, sin = cos[..., :half], sin[..., :half]
        if unsqueeze_dim == 1:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = ops.rope(q, cos, sin), ops.rope(k, cos, sin)
        return (q.transpose(1, 2), k.transpose(1, 2)) if unsqueeze_dim == 1 else (q, k)


class TanhGELU(nn.Module):
    """The tanh form of GELU that models write out in eight or nine operations, as PyTorch's one kernel."""

    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        """Map a tensor to one of its shape."""
        return F.gelu(input, approximate="tanh")
