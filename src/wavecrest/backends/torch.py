"""Native PyTorch as a backend of every op: a candidate for each shape, the path of the CPU and of gradients."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from wavecrest import registry

PRIORITY = 10


def _other_dtype(x: Tensor, **vectors: Tensor | None) -> str | None:
    """PyTorch's norms promote or refuse a weight of another dtype; ours keep its precision."""
    for name, vector in vectors.items():
        if vector is not None and vector.dtype != x.dtype:
            return f"takes a {name} of x's dtype ({registry.dtype_name(x)}), not {registry.dtype_name(vector)}"
    return None


def _rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _rms_norm_supports(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> str | None:
    return _other_dtype(x, weight=weight)


def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.rms_norm(h, h.shape[-1:], weight, eps), h


def _add_rms_norm_supports(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> str | None:
    return _other_dtype(x, weight=weight)


def _layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _layer_norm_supports(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> str | None:
    return _other_dtype(x, weight=weight, bias=bias)


def _silu_and_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return F.silu(gate) * up


def _gelu_and_mul(gate: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def _any(*_args: object, **_kwargs: object) -> None:
    return None


registry.get("rms_norm").attach("torch", _rms_norm, supports=_rms_norm_supports, priority=PRIORITY)
registry.get("add_rms_norm").attach("torch", _add_rms_norm, supports=_add_rms_norm_supports, priority=PRIORITY)
registry.get("layer_norm").attach("torch", _layer_norm, supports=_layer_norm_supports, priority=PRIORITY)
registry.get("silu_and_mul").attach("torch", _silu_and_mul, supports=_any, priority=PRIORITY)
registry.get("gelu_and_mul").attach("torch", _gelu_and_mul, supports=_any, priority=PRIORITY)
