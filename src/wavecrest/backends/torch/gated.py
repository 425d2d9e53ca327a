"""Gated activations by PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from wavecrest.backends.torch.common import PRIORITY
from wavecrest.ops.gated.backend import gelu_op, silu_op
from wavecrest.ops.gated.call import GatedCall


def _bind(call: GatedCall) -> Callable[[GatedCall], Tensor]:
    """The function for calls with the signature of this one."""
    act: Callable[[Tensor], Tensor] = F.silu if call.activation == "silu" else F.gelu
    if call.approximate != "none":
        act = partial(F.gelu, approximate=call.approximate)

    def packed(call: GatedCall) -> Tensor:
        gate, up = call.gate.chunk(2, dim=-1)
        return act(gate) * up

    def two(call: GatedCall) -> Tensor:
        assert call.up is not None
        return act(call.gate) * call.up

    return packed if call.up is None else two


def _run(call: GatedCall) -> Tensor:
    return _bind(call)(call)


for _op in (silu_op, gelu_op):
    _op.attach("torch", _run, priority=PRIORITY, bind=_bind)
