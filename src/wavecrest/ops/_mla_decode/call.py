"""A call of attention over a latent cache: its arguments, their checks, and the sizes that follow from their shapes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.dispatch.keys import needs_grad
from wavecrest.errors import InvalidArgument

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAX_LATENT_DIM, MAX_HEAD_DIM_ROPE = 512, 128
# queries of a sequence that mla_decode takes
MAX_TOKENS = 16
# keys of a sequence, which are counted in 32 bits
MAX_LENGTH = 1 << 29
STYLES = ("neox", "gptj")


class MlaDecodeCall(NamedTuple):
    """Attention of the last queries of each sequence; see `wavecrest.ops.mla_decode` for the arguments.

    Properties are of a checked call.
    """

    q_nope: Tensor
    q_rope: Tensor
    latent_cache: Tensor
    seq_lens: Tensor
    block_table: Tensor | None = None
    w_uk: Tensor | None = None
    w_uv: Tensor | None = None
    softmax_scale: float | None = None
    logit_cap: float = 0.0
    cos: Tensor | None = None
    sin: Tensor | None = None
    positions: Tensor | None = None
    rope_style: str = "neox"
    return_lse: bool = False
    batch_invariant: bool = False

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.q_nope.shape[0]

    @property
    def seqlen_q(self) -> int:
        """Queries of a sequence."""
        return self.q_nope.shape[1]

    @property
    def heads(self) -> int:
        """Heads of the queries."""
        return self.q_nope.shape[2]

    @property
    def head_dim_rope(self) -> int:
        """Dr, the columns of the rotary part."""
        return self.q_rope.shape[3]

    @property
    def latent_dim(self) -> int:
        """R, the columns of a latent."""
        return self.latent_cache.shape[2] - self.q_rope.shape[3]

    @property
    def head_dim_nope(self) -> int:
        """Dn, the columns of a query's part without rotation; 0 for absorbed queries."""
        return 0 if self.w_uk is None else self.w_uk.shape[1]

    @property
    def head_dim_v(self) -> int:
        """Dv, the columns of a value; 0 where the result is a latent."""
        return 0 if self.w_uv is None else self.w_uv.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens of a page; the length of the cache where it has no pages."""
        return self.latent_cache.shape[1]

    @property
    def max_seqlen_k(self) -> int:
        """The most keys that a sequence can have."""
        return self.page_size if self.block_table is None else self.page_size * self.block_table.shape[1]

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        if self.softmax_scale is None:
            return float((self.head_dim_nope + self.head_dim_rope) ** -0.5)
        return self.softmax_scale

    @property
    def capped(self) -> int:
        """1 where scores are capped, else 0; made by a branch, as torch.compile may not know the number."""
        return 1 if self.logit_cap > 0 else 0

    @property
    def style(self) -> str:
        """The style in which the kernel rotates the queries' rotary part; "none" if the caller has rotated it."""
        return "none" if self.cos is None else self.rope_style

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """[B, T, H, R], the shape of absorbed queries and of the result before w_uv."""
        return (self.batch, self.seqlen_q, self.heads, self.latent_dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return (*self.latent_shape[:3], self.head_dim_v or self.latent_dim)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """[B, H, T], the shape of the log-sum-exp."""
        return (self.batch, self.heads, self.seqlen_q)

    @property
    def needs_grad(self) -> bool:
        """True if autograd would record the call."""
        return needs_grad(self.q_nope, self.q_rope, self.latent_cache, self.w_uk, self.w_uv, self.cos, self.sin)


# [B, T, H, R] or [B, T, H, Dv]; with `return_lse` also [B, H, T]
MlaResult = Tensor | tuple[Tensor, Tensor]


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else repr(value)


class Checks:
    """The checks of a call, whose errors name the op."""

    def __init__(self, op: str, call: MlaDecodeCall) -> None:
        self.op, self.call = op, call

    def fail(self, text: str) -> InvalidArgument:
        """The error to raise."""
        return InvalidArgument(f"{self.op}: {text}")

    def all(self, most_queries: int) -> None:
        """Raise InvalidArgument unless every argument is right; a sequence may have 1 to `most_queries` queries."""
        self._queries(most_queries)
        self._weights()
        self._sizes()
        self._places()
        self._options()
        self._tables()

    def _floating(self, name: str, value: Any, dims: int, form: str) -> None:
        """Raise unless a value is a tensor of q_nope's dtype and device."""
        q = self.call.q_nope
        if not isinstance(value, Tensor) or value.ndim != dims or value.dtype != q.dtype or value.device != q.device:
            raise self.fail(f"{name} must be {q.dtype} {form} on {q.device} as q_nope is, got {_describe(value)}")

    def _queries(self, most_queries: int) -> None:
        q = self.call.q_nope
        if not isinstance(q, Tensor) or q.ndim != 4 or q.dtype not in FLOATS:
            raise self.fail(
                f"q_nope must be float32, float16, bfloat16 or float64 [B, T, H, head_dim], got {_describe(q)}"
            )
        if not 1 <= q.shape[1] <= most_queries:
            raise self.fail(f"takes 1 to {most_queries} queries of a sequence, got {_describe(q)}")
        if q.shape[2] == 0:
            raise self.fail(f"needs a head, got {_describe(q)}")
        self._floating("q_rope", self.call.q_rope, 4, "[B, T, H, Dr]")
        if self.call.q_rope.shape[:3] != q.shape[:3]:
            raise self.fail(f"q_nope {list(q.shape)} and q_rope {list(self.call.q_rope.shape)} must have one [B, T, H]")
        self._floating("latent_cache", self.call.latent_cache, 3, "[B, S, R + Dr] or [pages, page, R + Dr]")

    def _weights(self) -> None:
        call = self.call
        if call.w_uk is not None:
            self._floating("w_uk", call.w_uk, 3, "[H, Dn, R]")
        if call.w_uv is not None:
            self._floating("w_uv", call.w_uv, 3, "[H, Dv, R]")

    def _sizes(self) -> None:
        call, q = self.call, self.call.q_nope
        if not 1 <= call.latent_dim <= MAX_LATENT_DIM or not 1 <= call.head_dim_rope <= MAX_HEAD_DIM_ROPE:
            raise self.fail(
                f"takes 1 to {MAX_LATENT_DIM} columns of a latent and 1 to {MAX_HEAD_DIM_ROPE} rotary ones, got "
                f"latent_cache {list(call.latent_cache.shape)} and q_rope {list(call.q_rope.shape)}"
            )
        if call.w_uk is None and q.shape[3] != call.latent_dim:
            raise self.fail(
                f"q_nope {list(q.shape)} must have the {call.latent_dim} columns of a latent, or w_uk must be given"
            )
        heads, latent_dim = call.heads, call.latent_dim
        for name, weight, wanted in (("w_uk", call.w_uk, q.shape[3]), ("w_uv", call.w_uv, None)):
            if weight is None:
                continue
            middle = weight.shape[1] if wanted is None else wanted
            if tuple(weight.shape) != (heads, middle, latent_dim) or middle == 0:
                raise self.fail(f"{name} must be [{heads}, {wanted or 'Dv'}, {latent_dim}], got {_describe(weight)}")

    def integers(self, name: str, value: Any, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        """Raise unless a value is an integer tensor of this shape, where None stands for any size."""
        if (
            not isinstance(value, Tensor)
            or value.dtype not in dtypes
            or value.ndim != len(shape)
            or any(size not in (None, found) for size, found in zip(shape, value.shape, strict=True))
            or value.device != self.call.q_nope.device
        ):
            # not before it is needed: torch.compile traces no text of sizes that it does not know
            wanted = ", ".join("…" if size is None else str(size) for size in shape)
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.fail(f"{name} must be {kinds} [{wanted}] on {self.call.q_nope.device}, got {_describe(value)}")

    def _places(self) -> None:
        call = self.call
        self.integers("seq_lens", call.seq_lens, (call.batch,), (torch.int32,))
        if call.block_table is not None:
            self.integers("block_table", call.block_table, (call.batch, None), (torch.int32,))
        elif call.latent_cache.shape[0] != call.batch:
            raise self.fail(
                f"q_nope {list(call.q_nope.shape)} and latent_cache {list(call.latent_cache.shape)} must have the "
                "same number of sequences; pages need a block_table"
            )
        if call.max_seqlen_k > MAX_LENGTH:
            raise self.fail(f"sequences have up to {MAX_LENGTH} keys, not {call.max_seqlen_k}")

    def _options(self) -> None:
        call = self.call
        for name, flag in (("return_lse", call.return_lse), ("batch_invariant", call.batch_invariant)):
            if not isinstance(flag, bool):
                raise self.fail(f"{name} must be True or False, got {flag!r}")
        if call.softmax_scale is None and call.w_uk is None:
            raise self.fail("softmax_scale must be given with absorbed queries, which do not tell it: 1 / √(Dn + Dr)")
        for name, number in (("softmax_scale", call.scale), ("logit_cap", call.logit_cap)):
            if not isinstance(number, (int, float)) or isinstance(number, bool) or not 0 <= number < math.inf:
                raise self.fail(f"{name} must be a finite number of at least 0, got {number!r}")

    def _tables(self) -> None:
        call = self.call
        if call.rope_style not in STYLES:
            raise self.fail(f"rope_style is neox or gptj, not {call.rope_style!r}")
        if (call.cos is None) != (call.sin is None):
            raise self.fail("cos and sin go together")
        if call.cos is None or call.sin is None:
            if call.positions is not None:
                raise self.fail("positions go with cos and sin")
            return
        q = call.q_rope
        for name, table in (("cos", call.cos), ("sin", call.sin)):
            fits = isinstance(table, Tensor) and table.dtype in FLOATS and table.ndim == 2 and table.device == q.device
            if not fits or table.shape[1] * 2 != q.shape[3] or table.shape[0] == 0 or table.shape != call.cos.shape:
                raise self.fail(
                    f"{name} must be floating-point [positions, {q.shape[3] // 2}] on {q.device}, half of q_rope's "
                    f"{q.shape[3]} columns, cos and sin alike, got {_describe(table)}"
                )
        if call.cos.dtype != call.sin.dtype:
            raise self.fail(f"cos and sin must be of one dtype, got {call.cos.dtype} and {call.sin.dtype}")
        if call.positions is not None:
            self.integers("positions", call.positions, (call.batch, call.seqlen_q), (torch.int32, torch.int64))


def check(call: MlaDecodeCall) -> None:
    """Raise InvalidArgument, naming the fault, unless the arguments are valid."""
    Checks("mla_decode", call).all(MAX_TOKENS)
