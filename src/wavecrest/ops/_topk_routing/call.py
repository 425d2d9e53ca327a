"""A call of the router: its arguments, their checks, and its shape key."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name, m_bucket, needs_grad
from wavecrest.errors import InvalidArgument

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SCORES = ("softmax", "sigmoid")
KEY_FIELDS = (
    "tokens", "experts", "topk", "dtype", "bias", "scores", "renormalize", "groups", "topk_groups", "device", "grad"
)  # fmt: skip


class TopkRoutingCall(NamedTuple):
    """The experts of tokens and their weights; see `wavecrest.ops.topk_routing` for the arguments."""

    logits: Tensor
    k: int
    bias: Tensor | None = None
    scores: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens."""
        return self.logits.shape[0]

    @property
    def experts(self) -> int:
        """Experts to choose from."""
        return self.logits.shape[1]

    @property
    def weights_dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return torch.float64 if self.logits.dtype == torch.float64 else torch.float32

    @property
    def needs_grad(self) -> bool:
        """True if autograd would record the call."""
        return needs_grad(self.logits, self.bias)


# weights and experts, [tokens, k]
Routing = tuple[Tensor, Tensor]


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else repr(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check(call: TopkRoutingCall) -> None:
    """Raise InvalidArgument, naming the fault, unless the arguments are valid."""
    logits, bias = call.logits, call.bias
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.dtype not in FLOATS or logits.shape[1] == 0:
        raise InvalidArgument(
            "topk_routing: logits must be float32, float16, bfloat16 or float64 [tokens, experts] with an expert, got "
            f"{_describe(logits)}"
        )
    experts = logits.shape[1]
    if bias is not None:
        fits = isinstance(bias, Tensor) and bias.dtype in FLOATS and bias.shape == (experts,)
        if not fits or bias.device != logits.device:
            raise InvalidArgument(
                f"topk_routing: bias must be floating-point [{experts}] on {logits.device}, got {_describe(bias)}"
            )
    if call.scores not in SCORES:
        raise InvalidArgument(f"topk_routing: scores are softmax or sigmoid, not {call.scores!r}")
    if not isinstance(call.renormalize, bool):
        raise InvalidArgument(f"topk_routing: renormalize must be True or False, got {call.renormalize!r}")
    scale = call.scale
    if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not math.isfinite(scale):
        raise InvalidArgument(f"topk_routing: scale must be a finite number, got {scale!r}")
    _check_counts(call, experts)


def _check_counts(call: TopkRoutingCall, experts: int) -> None:
    for name, count in (("k", call.k), ("num_groups", call.num_groups), ("topk_groups", call.topk_groups)):
        if not _is_count(count):
            raise InvalidArgument(f"topk_routing: {name} must be a whole number of at least 1, got {count!r}")
    if experts % call.num_groups != 0 or call.topk_groups > call.num_groups:
        raise InvalidArgument(
            f"topk_routing: {experts} experts must be a multiple of num_groups ({call.num_groups}), and topk_groups "
            f"({call.topk_groups}) at most these"
        )
    if call.k > experts // call.num_groups * call.topk_groups:
        raise InvalidArgument(
            f"topk_routing: k is {call.k}, and {call.topk_groups} of {call.num_groups} groups of {experts} experts "
            f"have {experts // call.num_groups * call.topk_groups}"
        )


def key_of(call: TopkRoutingCall) -> Key:
    """The shape key of a call: KEY_FIELDS."""
    return (
        m_bucket(call.num_tokens),
        call.experts,
        call.k,
        dtype_name(call.logits),
        None if call.bias is None else dtype_name(call.bias),
        call.scores,
        call.renormalize,
        call.num_groups,
        call.topk_groups,
        call.logits.device.type,
        call.needs_grad,
    )
