"""The definition of the gated activations, in PyTorch's operations."""

from __future__ import annotations

from torch import Tensor

import wavecrest.ops.common.activation as _activation
import wavecrest.ops.common.checks as _checks
from wavecrest.ops.gated.call import GatedCall


def reference(call: GatedCall) -> Tensor:
    """act(gate) · up in float32 (float64 for float64), rounded once."""
    gate, up = (call.gate, call.up) if call.up is not None else call.gate.chunk(2, dim=-1)
    activated = _activation.activated(_checks.widen(gate), call.function)
    return (activated * _checks.widen(up)).to(gate.dtype)
