"""A call of the rotary embedding: its arguments, their checks, and its shape key."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name, m_bucket, needs_grad
from wavecrest.errors import InvalidArgument

STYLES = ("neox", "gptj")
POSITION_DTYPES = (torch.int32, torch.int64)
KEY_FIELDS = (
    "tokens",
    "heads",
    "columns",
    "rotated",
    "dtype",
    "table",
    "positions",
    "style",
    "device",
    "leading",
    "same_strides",
    "grad",
)


class RopeCall(NamedTuple):
    """x [..., S, H, D] with the first R columns of each head rotated; see `wavecrest.ops.rope` for the arguments."""

    x: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor | None = None
    style: str = "neox"

    @property
    def tokens(self) -> tuple[int, ...]:
        """The sizes [..., S] that say how many tokens there are."""
        return tuple(self.x.shape[:-2])

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        count = 1
        for size in self.x.shape[:-2]:
            count = count * size
        return count

    @property
    def leading(self) -> int:
        """Dimensions of tokens that remain after merging those with one common stride."""
        return _layout.leading(*token_rows(self, result_like(self.x)))

    @property
    def same_strides(self) -> bool:
        """True if cos and sin have the same strides."""
        cos, sin = self.cos, self.sin
        pairs = zip(cos.shape, cos.stride(), sin.stride(), strict=True)
        return all(size == 1 or one == other for size, one, other in pairs)

    @property
    def needs_grad(self) -> bool:
        """True if autograd would record the call."""
        return needs_grad(self.x, self.cos, self.sin)


def result_like(x: Tensor) -> Tensor:
    """The result without memory: its strides are x's wherever x has no gaps and no overlaps."""
    return torch.empty_like(x, device="meta")


def token_rows(call: RopeCall, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x, the result y, and each token's position or row of cos, as tensors whose leading sizes are the tokens."""
    tokens = call.tokens
    if call.positions is not None:
        own = call.positions.expand(tokens).unsqueeze(-1)
    else:
        table = call.cos if call.cos.ndim > 2 else call.cos.narrow(0, 0, tokens[-1])
        own = table.expand(*tokens, call.cos.shape[-1])
    # by methods: PyTorch for CPUs does not index a tensor that claims to be on a GPU
    return call.x.select(-1, 0), y.select(-1, 0), own


def check(call: RopeCall) -> None:
    """Raise InvalidArgument, naming the fault, unless the arguments are valid."""
    x, cos = call.x, call.cos
    _checks.check_rows("rope", x)
    if x.ndim < 3:
        raise InvalidArgument(f"rope: x must be [..., tokens, heads, head_dim], got {list(x.shape)}")
    if call.style not in STYLES:
        raise InvalidArgument(f"rope: style is neox or gptj, not {call.style!r}")
    if not isinstance(cos, Tensor) or cos.ndim < 2 or not cos.dtype.is_floating_point:
        found = f"{cos.dtype} {list(cos.shape)}" if isinstance(cos, Tensor) else type(cos).__name__
        raise InvalidArgument(
            f"rope: cos must be a floating-point tensor [positions, R/2] or [..., S, R/2], got {found}"
        )
    _checks.check_same("rope", "sin", call.sin, cos)
    if cos.device != x.device:
        raise InvalidArgument(f"rope: cos and sin are on {cos.device}, x on {x.device}")
    if not 1 <= cos.shape[-1] <= x.shape[-1] // 2:
        raise InvalidArgument(
            f"rope: {cos.shape[-1]} columns of cos turn {2 * cos.shape[-1]} of x, which has {x.shape[-1]}; tables that "
            "hold every angle twice are passed as cos[..., : R // 2]"
        )
    if call.positions is not None:
        _check_positions(x, cos, call.positions)
    elif cos.ndim > 2:
        if not _broadcasts(tuple(cos.shape[:-1]), call.tokens):
            raise InvalidArgument(
                f"rope: cos {list(cos.shape)} has a row a token: it must be {[*call.tokens, 'R/2']} or broadcast to it"
            )
    elif cos.shape[0] < x.shape[-3]:
        raise InvalidArgument(f"rope: x has {x.shape[-3]} tokens a sequence, cos and sin {cos.shape[0]} positions")


def _check_positions(x: Tensor, cos: Tensor, positions: Any) -> None:
    if not isinstance(positions, Tensor) or positions.dtype not in POSITION_DTYPES:
        found = str(positions.dtype) if isinstance(positions, Tensor) else type(positions).__name__
        raise InvalidArgument(f"rope: positions must be an int32 or int64 tensor, got {found}")
    if cos.ndim != 2 or cos.shape[0] == 0:
        raise InvalidArgument(f"rope: positions choose rows of a table [positions, R/2], cos is {list(cos.shape)}")
    tokens = tuple(x.shape[:-2])
    if not _broadcasts(tuple(positions.shape), tokens):
        raise InvalidArgument(f"rope: positions {list(positions.shape)} must be {list(tokens)} or broadcast to it")
    if positions.device != x.device:
        raise InvalidArgument(f"rope: positions are on {positions.device}, x on {x.device}")


def _broadcasts(shape: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
    """True if a shape is that of the tokens [..., S], its last size S and those before it broadcast."""
    if not 1 <= len(shape) <= len(tokens) or shape[-1] != tokens[-1]:
        return False
    pairs = zip(shape[:-1], tokens[len(tokens) - len(shape) : -1], strict=True)
    return all(size in (1, wanted) for size, wanted in pairs)


def key_of(call: RopeCall) -> Key:
    """The shape key of a call: KEY_FIELDS."""
    x, cos, positions = call.x, call.cos, call.positions
    return (
        m_bucket(call.num_tokens),
        x.shape[-2],
        x.shape[-1],
        2 * cos.shape[-1],
        dtype_name(x),
        dtype_name(cos),
        None if positions is None else dtype_name(positions),
        call.style,
        x.device.type,
        call.leading,
        call.same_strides,
        call.needs_grad,
    )
