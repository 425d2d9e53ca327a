"""A call of the causal convolution: its arguments, and their checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.dispatch.keys import needs_grad
from wavecrest.errors import InvalidArgument

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
ACTIVATIONS = (None, "silu")
MOST_TAPS = 16
# tokens and rows are counted in 32 bits
MAX_SIZE = 1 << 29


class CausalConv1dCall(NamedTuple):
    """x [B, S, C] under weight [C, K]; see `wavecrest.ops.causal_conv1d` for the arguments."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    initial: Tensor | None = None
    seq_lens: Tensor | None = None
    activation: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of a row."""
        return self.x.shape[1]

    @property
    def channels(self) -> int:
        """Channels, each of which is a convolution of its own."""
        return self.x.shape[2]

    @property
    def taps(self) -> int:
        """Tokens that a result is made of."""
        return self.weight.shape[1]

    @property
    def needs_grad(self) -> bool:
        """True if autograd would record the call."""
        return needs_grad(self.x, self.weight, self.bias, self.initial)


def _fail(name: str, wanted: str, value: Any) -> InvalidArgument:
    found = f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else repr(value)
    return InvalidArgument(f"causal_conv1d: {name} must be {wanted}, got {found}")


def check(call: CausalConv1dCall) -> None:
    """Raise InvalidArgument, naming the fault, unless the arguments are valid."""
    x, weight = call.x, call.weight
    if not isinstance(x, Tensor) or x.ndim != 3 or x.dtype not in FLOATS or x.shape[2] == 0:
        raise _fail("x", "float32, float16, bfloat16 or float64 [B, S, C] with a channel at least", x)
    if max(x.shape) > MAX_SIZE:
        raise _fail("x", f"of sizes up to {MAX_SIZE}", x)
    given: Any = weight
    fits = isinstance(given, Tensor) and given.ndim == 2 and given.dtype in FLOATS and given.device == x.device
    if not fits or given.shape[0] != x.shape[2] or not 1 <= given.shape[1] <= MOST_TAPS:
        raise _fail("weight", f"floating [{x.shape[2]}, K] on {x.device} with K from 1 to {MOST_TAPS}", weight)
    if call.bias is not None:
        _check_part("bias", call.bias, (x.shape[2],), FLOATS, x)
    if call.initial is not None:
        _check_part("initial", call.initial, (x.shape[0], given.shape[1] - 1, x.shape[2]), (x.dtype,), x)
    if call.seq_lens is not None:
        _check_part("seq_lens", call.seq_lens, (x.shape[0],), (torch.int32,), x)
    if call.activation not in ACTIVATIONS:
        raise InvalidArgument(f"causal_conv1d: activation is None or silu, not {call.activation!r}")


def _check_part(name: str, value: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], x: Tensor) -> None:
    fits = isinstance(value, Tensor) and value.dtype in dtypes and value.device == x.device
    if not fits or tuple(value.shape) != shape:
        wanted = " or ".join(str(one).removeprefix("torch.") for one in dtypes)
        raise _fail(name, f"{wanted} {list(shape)} on {x.device}", value)
