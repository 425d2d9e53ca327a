"""The gated MLP of Llama-like models over wavecrest's fused activation ops."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wavecrest.errors import StepRefused
from wavecrest.nn.deferred_norm import InOne
from wavecrest.nn.fused_weights import FusedSlice, FusedWeights
from wavecrest.nn.hooks import plain
from wavecrest.nn.precision import by_autocast
from wavecrest.ops import gelu_and_mul, linear, silu_and_mul

# (name, definition) of the activations the ops know
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class GatedMLP(nn.Module):
    """y = down_proj(act(gate_proj(x)) · up_proj(x)), x and y of shape [..., hidden].

    If gate and up are the halves of one fused layer, and a kernel of wavecrest is measured for the GEMM with the gated
    activation in it, that kernel makes the product.
    """

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module, activation: str) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise StepRefused(f"no fused op for the activation {activation!r}; there are {', '.join(ACTIVATIONS)}")
        self.gate_proj = gate_proj
        self.up_proj = up_proj
        self.down_proj = down_proj
        self.activation = activation
        self._gated, self._normed = InOne(), InOne()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] to [..., hidden]."""
        fused = self.halves()
        hidden = None if fused is None else self._in_one(x, fused)
        if hidden is None:
            gate, up = self.gate_proj(x), self.up_proj(x)
            if self.activation == "silu":
                hidden = silu_and_mul(gate, up)
            else:
                hidden = gelu_and_mul(gate, up, "tanh" if self.activation == "gelu_tanh" else "none")
        out: Tensor = self.down_proj(hidden)
        return out

    def _in_one(self, x: Tensor, fused: FusedWeights) -> Tensor | None:
        """The product where the GEMM makes it, by a kernel with a measured row; None where it does not."""
        activation, norm = f"{self.activation}_and_mul", fused.norm
        if norm is not None and self._normed.of(x, fused.weight, fused.bias, activation, norm):
            return linear(
                x, fused.weight, fused.bias, activation=activation, norm_weight=norm.weight, norm_eps=norm.eps_of(x)
            )
        if not self._gated.of(x, fused.weight, fused.bias, activation):
            return None
        x = x if norm is None else norm.normed(x)
        return linear(*by_autocast(x, fused.weight, fused.bias), activation=activation)

    def halves(self) -> FusedWeights | None:
        """The layer whose halves are gate and up, in this order; None where they are no such halves."""
        gate, up = self.gate_proj, self.up_proj
        if not (plain(gate, FusedSlice) and plain(up, FusedSlice)) or gate.fused is not up.fused:
            return None
        halves = gate.start == 0 and gate.stop == up.start and up.stop == len(gate.fused.weight) == 2 * gate.stop
        return gate.fused if halves and gate.is_linear else None

    @classmethod
    def from_module(cls, module: nn.Module) -> GatedMLP:
        """Ours from a module with gate_proj, up_proj, down_proj and act_fn, proven on a random probe.

        Raises:
            StepRefused: the activation is unknown, or the module computes something else than the gated form.
        """
        gate, up, down = (module.get_submodule(name) for name in ("gate_proj", "up_proj", "down_proj"))
        weight = gate.weight
        assert isinstance(weight, Tensor)
        generator = torch.Generator().manual_seed(0)
        probe = torch.randn(4, weight.shape[1], generator=generator, device="cpu").to(weight.device, weight.dtype)
        act_fn = module.act_fn
        with torch.no_grad():
            sample = torch.linspace(-6, 6, 97)
            # compared in float32: exact gelu and its tanh form differ by 5e-4 at most
            seen = act_fn(sample)  # type: ignore[operator]
            activation = next(
                (name for name, f in ACTIVATIONS.items() if torch.allclose(seen, f(sample), rtol=1e-5, atol=1e-6)), None
            )
            if activation is None:
                raise StepRefused(f"the activation {type(act_fn).__name__} is not one of {', '.join(ACTIVATIONS)}")
            made = cls(gate, up, down, activation)
            expected, got = module(probe), made(probe)
        if not isinstance(expected, Tensor) or expected.shape != got.shape:
            raise StepRefused(f"{type(module).__name__} does not return one tensor of the gated form's shape")
        scale = expected.abs().max().clamp_min(1e-6)
        limit = 1e-5 if weight.dtype in (torch.float32, torch.float64) else 2e-2
        if not bool(((expected - got).abs().max() / scale) <= limit):
            raise StepRefused(f"{type(module).__name__} computes something else than down(act(gate(x)) · up(x))")
        return made
