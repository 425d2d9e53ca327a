"""Calls of the sLSTM ops: their arguments, what follows from them, and their checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.errors import InvalidArgument

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
FORGET_GATES = ("sigmoid", "exp")
# the gates in the order of x, r and bias
GATES = ("i", "f", "z", "o")
STATES = ("h", "c", "n", "m")
# tokens and rows are counted in 32 bits
MAX_SIZE = 1 << 29


class SlstmCall(NamedTuple):
    """A call of slstm_sequence; shapes and dtypes are those of its arguments. Properties are of checked calls."""

    x: Tensor
    r: Tensor
    bias: Tensor | None = None
    h_initial: Tensor | None = None
    c_initial: Tensor | None = None
    n_initial: Tensor | None = None
    m_initial: Tensor | None = None
    return_last_states: bool = False
    forget_gate: str = "sigmoid"
    seq_starts: Tensor | None = None
    seq_lens: Tensor | None = None
    resets: Tensor | None = None

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return self.x.shape[0]

    @property
    def tokens(self) -> int:
        """Tokens of a row."""
        return self.x.shape[1]

    @property
    def heads(self) -> int:
        """Heads."""
        return self.x.shape[3]

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.x.shape[4]

    @property
    def form(self) -> str:
        """Where sequences lie: "whole" rows or "padded" ones."""
        return "whole" if self.seq_starts is None and self.seq_lens is None else "padded"

    @property
    def wide(self) -> torch.dtype:
        """The dtype of states and of all arithmetic."""
        return torch.float64 if self.x.dtype == torch.float64 else torch.float32

    @property
    def initial(self) -> tuple[Tensor | None, ...]:
        """The first states h, c, n and m."""
        return self.h_initial, self.c_initial, self.n_initial, self.m_initial

    @property
    def floats(self) -> tuple[Tensor | None, ...]:
        """The float tensors: those that may need gradients."""
        return self[:7]


class SlstmStepCall(NamedTuple):
    """A call of slstm_step; shapes and dtypes are those of its arguments. Properties are of checked calls."""

    x: Tensor
    r: Tensor
    h: Tensor
    c: Tensor
    n: Tensor
    m: Tensor
    bias: Tensor | None = None
    forget_gate: str = "sigmoid"

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return self.x.shape[0]

    @property
    def heads(self) -> int:
        """Heads."""
        return self.x.shape[2]

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.x.shape[3]

    @property
    def floats(self) -> tuple[Tensor | None, ...]:
        """The float tensors: those that may need gradients."""
        return self[:7]

    def sequence(self) -> SlstmCall:
        """The same call as a sequence of one token; its x is a view."""
        return SlstmCall(self.x.unsqueeze(1), self.r, self.bias, self.h, self.c, self.n, self.m, True, self.forget_gate)


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else repr(value)


class _Checks:
    """Raises InvalidArgument in an op's name; `form`: the dimensions of x in words."""

    def __init__(self, op: str, x: Any, form: str) -> None:
        self.op, self.x = op, x
        if not isinstance(x, Tensor) or x.ndim != form.count(",") + 1 or x.dtype not in FLOATS:
            raise self.fail(f"x must be float32, float16, bfloat16 or float64 [{form}], got {_describe(x)}")
        if x.shape[-3] != len(GATES) or x.shape[-2] == 0 or x.shape[-1] == 0:
            raise self.fail(
                f"x must be [{form}] with the gates i, f, z and o, at least one head and a head_dim of at least 1, got "
                f"{_describe(x)}"
            )
        if max(x.shape) > MAX_SIZE:
            raise self.fail(f"takes sizes up to {MAX_SIZE}, got {_describe(x)}")

    def fail(self, text: str) -> InvalidArgument:
        return InvalidArgument(f"{self.op}: {text}")

    def floating(self, name: str, value: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
        fits = isinstance(value, Tensor) and value.dtype in dtypes and value.device == self.x.device
        if not fits or tuple(value.shape) != shape:
            wanted = " or ".join(str(one).removeprefix("torch.") for one in dtypes)
            raise self.fail(f"{name} must be {wanted} {list(shape)} on {self.x.device}, got {_describe(value)}")

    def weights(self, r: Any, bias: Any) -> None:
        heads, dim = self.x.shape[-2:]
        if isinstance(r, Tensor) and r.dtype != self.x.dtype:
            raise self.fail(
                f"r must have x's dtype {self.x.dtype}, as matrix units multiply it with h in that dtype, got "
                f"{_describe(r)}; convert one of them"
            )
        self.floating("r", r, (len(GATES), heads, dim, dim))
        if bias is not None:
            self.floating("bias", bias, (len(GATES), heads, dim))

    def states(self, names: tuple[str, ...], values: tuple[Any, ...]) -> None:
        # a state in 16 bits would lose small steps of n and m beside large ones
        dtypes = (torch.float32, torch.float64) if self.x.dtype == torch.float64 else (torch.float32,)
        for name, value in zip(names, values, strict=True):
            self.floating(name, value, (self.x.shape[0], *self.x.shape[-2:]), dtypes)

    def forget_gate(self, value: Any) -> None:
        if value not in FORGET_GATES:
            raise self.fail(f"forget_gate is sigmoid or exp, not {value!r}")


def check(call: SlstmCall) -> None:
    """Raise InvalidArgument, naming the fault, unless the arguments are valid for slstm_sequence."""
    checks = _Checks("slstm_sequence", call.x, "B, S, 4, NH, D")
    x = call.x
    checks.weights(call.r, call.bias)
    checks.forget_gate(call.forget_gate)
    if not isinstance(call.return_last_states, bool):
        raise checks.fail(f"return_last_states must be True or False, got {call.return_last_states!r}")
    for name, value in (("seq_starts", call.seq_starts), ("seq_lens", call.seq_lens)):
        given: Any = value
        if given is not None:
            fits = isinstance(given, Tensor) and given.dtype == torch.int32 and given.device == x.device
            if not fits or tuple(given.shape) != (x.shape[0],):
                raise checks.fail(f"{name} must be int32 {[x.shape[0]]} on {x.device}, got {_describe(given)}")
    resets: Any = call.resets
    if resets is not None:
        fits = isinstance(resets, Tensor) and resets.dtype == torch.bool and resets.device == x.device
        if not fits or tuple(resets.shape) != tuple(x.shape[:2]):
            raise checks.fail(f"resets must be bool {list(x.shape[:2])} on {x.device}, got {_describe(resets)}")
    if any(one is not None for one in call.initial):
        checks.states(tuple(f"{name}_initial" for name in STATES), call.initial)


def check_step(call: SlstmStepCall) -> None:
    """Raise InvalidArgument, naming the fault, unless the arguments are valid for slstm_step."""
    checks = _Checks("slstm_step", call.x, "B, 4, NH, D")
    checks.weights(call.r, call.bias)
    checks.forget_gate(call.forget_gate)
    checks.states(STATES, (call.h, call.c, call.n, call.m))
