"""Gated activations by PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from wavecrest.backends.torch.common import PRIORITY
from wavecrest.ops.gated.backend import gelu_op, silu_op
from wavecrest.ops.gated.call import GatedCall


def _silu_and_mul(call: GatedCall) -> Tensor:
    gate, up = (call.gate, call.up) if call.up is not None else call.gate.chunk(2, dim=-1)
    return F.silu(gate) * up


def _gelu_and_mul(call: GatedCall) -> Tensor:
    gate, up = (call.gate, call.up) if call.up is not None else call.gate.chunk(2, dim=-1)
    return F.gelu(gate, approximate=call.approximate) * up


silu_op.attach("torch", _silu_and_mul, priority=PRIORITY)
gelu_op.attach("torch", _gelu_and_mul, priority=PRIORITY)
