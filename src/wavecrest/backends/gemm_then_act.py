"""PyTorch's product, then our kernel of a gated activation, which reads what PyTorch's own two operations read in one.

A product of some thousand rows is fastest by the vendor's library, which has no gated activations: PyTorch runs two
operations over strided halves behind it. In xLSTM 7B they took 4.4 of the 44.5 ms of a prompt of 2,048 tokens (H200,
2026-11-22, part `kernels` of evidence/nvidia-h200/2026-11-24_xlstm-peers_xlstm_7b.jsonl.gz).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wavecrest.dispatch import registry
from wavecrest.dispatch.keys import needs_grad
from wavecrest.dispatch.op import Op
from wavecrest.ops._gemm.call import GATED, Operands

# above PyTorch's own two operations
PRIORITY = 11
NAME = "torch_and_mul"
_PRODUCT = registry.get("gemm")
# activation: the op, and its option
OPS: dict[str, tuple[Op, tuple[str, ...]]] = {
    "silu_and_mul": (registry.get("silu_and_mul"), ()),
    "gelu_and_mul": (registry.get("gelu_and_mul"), ("none",)),
    "gelu_tanh_and_mul": (registry.get("gelu_and_mul"), ("tanh",)),
}


def _product(given: Operands) -> tuple[Any, ...]:
    """The arguments of the product alone."""
    return tuple(given._replace(activation=None))


def _supports(*args: Any) -> str | None:
    given = Operands(*args)
    if given.activation not in GATED:
        return "is for gated activations"
    if given.residual is not None or given.out_scale is not None:
        return "adds no residual and makes no 8-bit results"
    if given.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return "makes float16, bfloat16 or float32"
    if given.integers:
        return "rounds before the activation, which sums of int8 are not in PyTorch"
    if needs_grad(given.a, given.b, given.bias, given.scale_a, given.scale_b, given.norm_weight):
        return "has no gradients"
    return _PRODUCT.backends["torch"].supports(*_product(given))


def _reserved(*args: Any) -> str | None:
    return "runs two operations of PyTorch on a CPU, as torch does" if args[0].device.type == "cpu" else None


def _gemm(*args: Any) -> Tensor:
    given = Operands(*args)
    assert given.activation is not None
    op, options = OPS[given.activation]
    both = _PRODUCT.backends["torch"].run(*_product(given))
    result: Tensor = op(both, None, *options)
    return result


_PRODUCT.attach(NAME, _gemm, supports=_supports, reserved=_reserved, priority=PRIORITY, as_native=True)
