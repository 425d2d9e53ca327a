"""Native PyTorch as a backend of every op: a candidate for each shape, the path of the CPU and of gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from wavecrest import registry
from wavecrest.errors import InvalidArgument

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


def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.layer_norm(h, h.shape[-1:], weight, bias, eps), h


def _add_layer_norm_supports(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> str | None:
    return _other_dtype(x, weight=weight, bias=bias)


def _softmax(x: Tensor) -> Tensor:
    return F.softmax(x, dim=-1)


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


def _rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, style: str = "neox") -> Tensor:
    if positions is not None:
        # as the op defines it: indexing itself would raise, end the GPU's context, or count from the end
        inside = positions.clamp(0, cos.shape[0] - 1)
        cos, sin = cos[inside].masked_fill((inside != positions).unsqueeze(-1), float("nan")), sin[inside]
    elif cos.ndim == 2:
        cos, sin = cos[: x.shape[-3]], sin[: x.shape[-3]]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    half = cos.shape[-1]
    if style == "neox":
        first, second = x[..., :half], x[..., half : 2 * half]
        parts = [first * cos - second * sin, second * cos + first * sin]
    else:
        first, second = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
        parts = [torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)]
    y = torch.cat((*parts, x[..., 2 * half :]), dim=-1).to(x.dtype)
    # in the order of x's strides, as the kernel writes it
    return y if x.is_contiguous() else torch.empty_like(x).copy_(y)


def _rope_supports(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, style: str = "neox"
) -> str | None:
    for tensor in (x, cos):
        if tensor.element_size() == 1:
            return f"does not multiply {registry.dtype_name(tensor)}"
    return None


def _memcpy(x: Tensor, mode: str = "copy", programs: int | None = None, value: int = 0) -> Tensor:
    if mode == "copy":
        return x.clone()
    # Dynamo does not trace the offset; there it is the view that refuses
    if not torch.compiler.is_compiling() and x.storage_offset() * x.element_size() % 4 != 0:
        raise InvalidArgument(f"memcpy: x starts at element {x.storage_offset()} of its storage, inside a 32-bit word")
    words = x.detach().view(-1).view(torch.int32)
    if mode == "read":
        # as int64, which is what PyTorch sums integers in
        return words.sum()
    signed = value - (1 << 32) if value >= 1 << 31 else value
    return torch.full_like(words, signed).view(x.dtype).view(x.shape)


def _memcpy_supports(x: Tensor, mode: str = "copy", programs: int | None = None, value: int = 0) -> str | None:
    return None if programs is None else "chooses the number of programs by itself"


registry.get("rms_norm").attach("torch", _rms_norm, supports=_rms_norm_supports, priority=PRIORITY)
registry.get("add_rms_norm").attach("torch", _add_rms_norm, supports=_add_rms_norm_supports, priority=PRIORITY)
registry.get("layer_norm").attach("torch", _layer_norm, supports=_layer_norm_supports, priority=PRIORITY)
registry.get("silu_and_mul").attach("torch", _silu_and_mul, supports=_any, priority=PRIORITY)
registry.get("gelu_and_mul").attach("torch", _gelu_and_mul, supports=_any, priority=PRIORITY)
registry.get("memcpy").attach("torch", _memcpy, supports=_memcpy_supports, priority=PRIORITY)
registry.get("rope").attach("torch", _rope, supports=_rope_supports, priority=PRIORITY)
registry.get("add_layer_norm").attach("torch", _add_layer_norm, supports=_add_layer_norm_supports, priority=PRIORITY)
registry.get("softmax").attach("torch", _softmax, supports=_any, priority=PRIORITY)
# PyTorch has no op for these: its form is the definition, written in its operations
for _name in (
    "quantize_int8",
    "quantize_fp8",
    "dequantize",
    "rms_norm_quantize",
    "add_rms_norm_quantize",
    "layer_norm_quantize",
    "add_layer_norm_quantize",
):
    _op = registry.get(_name)
    _op.attach("torch", _op.reference, supports=_any, priority=PRIORITY)
