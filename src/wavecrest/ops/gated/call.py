"""A call of a gated activation: its arguments, their checks, and its shape key."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name, m_bucket, needs_grad
from wavecrest.errors import InvalidArgument

APPROXIMATE = ("none", "tanh")
# the parts of a key; that of gelu_and_mul has `approximate` too
KEY_FIELDS = ("rows", "columns", "dtype", "packed", "device", "leading", "grad")


class GatedCall(NamedTuple):
    """act(gate) · up over gate and up [..., N]; up None: gate is a packed [gate | up] of 2 · N columns.

    `activation`: "silu" or "gelu". `approximate`: "none" or, for gelu, "tanh".
    """

    activation: str
    gate: Tensor
    up: Tensor | None = None
    approximate: str = "none"

    @property
    def function(self) -> str:
        """The name in `ACTIVATIONS` of what is applied to the gate."""
        return "gelu_tanh" if self.approximate == "tanh" else self.activation

    @property
    def columns(self) -> int:
        """N, the last dimension of the result."""
        return self.gate.shape[-1] if self.up is not None else self.gate.shape[-1] // 2

    @property
    def leading(self) -> int:
        """Leading dimensions that remain after merging those with one common stride."""
        return _layout.leading(self.gate) if self.up is None else _layout.leading(self.gate, self.up)

    @property
    def needs_grad(self) -> bool:
        """True if autograd would record the call."""
        return needs_grad(self.gate, self.up)


def check(op: str, call: GatedCall) -> None:
    """Raise InvalidArgument unless gate and up match, or gate alone has an even last dimension."""
    gate = call.gate
    _checks.check_rows(op, gate)
    if call.up is not None:
        _checks.check_same(op, "up", call.up, gate)
    elif gate.shape[-1] % 2 != 0:
        raise InvalidArgument(f"{op}: a packed [gate | up] needs an even last dimension, got {list(gate.shape)}")
    if call.approximate not in APPROXIMATE:
        raise InvalidArgument(f"{op}: approximate takes none or tanh, not {call.approximate!r}")


def key_of(call: GatedCall) -> Key:
    """The shape key of a call: KEY_FIELDS, and `approximate` of a gelu."""
    key: Key = (
        m_bucket(_layout.row_count(call.gate)),
        call.columns,
        dtype_name(call.gate),
        call.up is None,
        call.gate.device.type,
        call.leading,
        call.needs_grad,
    )
    return (*key, call.approximate) if call.activation == "gelu" else key
