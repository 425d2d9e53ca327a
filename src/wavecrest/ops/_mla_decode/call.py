"""The arguments of attention over a latent cache: what they may be, and what follows from their shapes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.errors import InvalidArgument

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAX_LATENT, MAX_ROTARY = 512, 128
MAX_TOKENS = 16
# keys of a sequence are counted in 32 bits
MAX_LENGTH = 1 << 29
STYLES = ("neox", "gptj")


class Operands(NamedTuple):
    """The arguments in the order that the op's backends get them; properties are of checked arguments.

    T queries of each sequence are its last tokens, whose rows are in the cache.
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
    def tokens(self) -> int:
        """Queries of a sequence."""
        return self.q_nope.shape[1]

    @property
    def heads(self) -> int:
        """Heads."""
        return self.q_nope.shape[2]

    @property
    def rotary(self) -> int:
        """Columns of the rotary part."""
        return self.q_rope.shape[3]

    @property
    def latent(self) -> int:
        """Columns of a latent."""
        return self.latent_cache.shape[2] - self.q_rope.shape[3]

    @property
    def nope(self) -> int:
        """Columns of a query before it is absorbed; 0 where it comes absorbed."""
        return 0 if self.w_uk is None else self.w_uk.shape[1]

    @property
    def values(self) -> int:
        """Columns of a value; 0 where the result is a latent."""
        return 0 if self.w_uv is None else self.w_uv.shape[1]

    @property
    def page(self) -> int:
        """Tokens of a page; of a cache without pages, of a sequence."""
        return self.latent_cache.shape[1]

    @property
    def capacity(self) -> int:
        """Keys that a sequence may have."""
        return self.page if self.block_table is None else self.page * self.block_table.shape[1]

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        if self.softmax_scale is None:
            return float((self.nope + self.rotary) ** -0.5)
        return self.softmax_scale

    @property
    def capped(self) -> int:
        """1 where scores are capped, else 0; made by a branch, as torch.compile may not know the number."""
        return 1 if self.logit_cap > 0 else 0

    @property
    def style(self) -> str:
        """How the queries' rotary part is turned; "none": it comes turned."""
        return "none" if self.cos is None else self.rope_style

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """The shape of the result in latents."""
        return (self.batch, self.tokens, self.heads, self.latent)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return (*self.latent_shape[:3], self.values or self.latent)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """The shape of the logarithms."""
        return (self.batch, self.heads, self.tokens)

    @property
    def floats(self) -> tuple[Tensor | None, ...]:
        """What may need gradients."""
        return (self.q_nope, self.q_rope, self.latent_cache, self.w_uk, self.w_uv, self.cos, self.sin)


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else repr(value)


class Checks:
    """Raises InvalidArgument in an op's name."""

    def __init__(self, op: str, given: Operands) -> None:
        self.op, self.given = op, given

    def fail(self, text: str) -> InvalidArgument:
        """What is to be raised."""
        return InvalidArgument(f"{self.op}: {text}")

    def all(self, most_tokens: int) -> None:
        """Every argument."""
        self._queries(most_tokens)
        self._weights()
        self._sizes()
        self._places()
        self._options()
        self._tables()

    def _beside(self, name: str, value: Any, dims: int, form: str) -> None:
        """A tensor of q_nope's dtype and device."""
        q = self.given.q_nope
        if not isinstance(value, Tensor) or value.ndim != dims or value.dtype != q.dtype or value.device != q.device:
            raise self.fail(f"{name} must be {q.dtype} {form} on {q.device} as q_nope is, got {_describe(value)}")

    def _queries(self, most_tokens: int) -> None:
        q = self.given.q_nope
        if not isinstance(q, Tensor) or q.ndim != 4 or q.dtype not in FLOATS:
            raise self.fail(
                f"q_nope must be float32, float16, bfloat16 or float64 [B, T, H, columns], got {_describe(q)}"
            )
        if not 1 <= q.shape[1] <= most_tokens:
            raise self.fail(f"takes 1 to {most_tokens} queries of a sequence, got {_describe(q)}")
        if q.shape[2] == 0:
            raise self.fail(f"needs a head, got {_describe(q)}")
        self._beside("q_rope", self.given.q_rope, 4, "[B, T, H, Dr]")
        if self.given.q_rope.shape[:3] != q.shape[:3]:
            raise self.fail(
                f"q_nope {list(q.shape)} and q_rope {list(self.given.q_rope.shape)} must have one [B, T, H]"
            )
        self._beside("latent_cache", self.given.latent_cache, 3, "[B, S, R + Dr] or [pages, page, R + Dr]")

    def _weights(self) -> None:
        given = self.given
        if given.w_uk is not None:
            self._beside("w_uk", given.w_uk, 3, "[H, Dn, R]")
        if given.w_uv is not None:
            self._beside("w_uv", given.w_uv, 3, "[H, Dv, R]")

    def _sizes(self) -> None:
        given, q = self.given, self.given.q_nope
        if not 1 <= given.latent <= MAX_LATENT or not 1 <= given.rotary <= MAX_ROTARY:
            raise self.fail(
                f"takes 1 to {MAX_LATENT} columns of a latent and 1 to {MAX_ROTARY} rotary ones, got latent_cache "
                f"{list(given.latent_cache.shape)} and q_rope {list(given.q_rope.shape)}"
            )
        if given.w_uk is None and q.shape[3] != given.latent:
            raise self.fail(
                f"q_nope {list(q.shape)} must have the {given.latent} columns of a latent, or w_uk must be given"
            )
        heads, latent = given.heads, given.latent
        for name, weight, wanted in (("w_uk", given.w_uk, q.shape[3]), ("w_uv", given.w_uv, None)):
            if weight is None:
                continue
            middle = weight.shape[1] if wanted is None else wanted
            if tuple(weight.shape) != (heads, middle, latent) or middle == 0:
                raise self.fail(f"{name} must be [{heads}, {wanted or 'Dv'}, {latent}], got {_describe(weight)}")

    def integers(self, name: str, value: Any, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        """A tensor of whole numbers; None stands for any size."""
        if (
            not isinstance(value, Tensor)
            or value.dtype not in dtypes
            or value.ndim != len(shape)
            or any(size not in (None, found) for size, found in zip(shape, value.shape, strict=True))
            or value.device != self.given.q_nope.device
        ):
            # not before it is needed: torch.compile traces no text of sizes that it does not know
            wanted = ", ".join("…" if size is None else str(size) for size in shape)
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.fail(f"{name} must be {kinds} [{wanted}] on {self.given.q_nope.device}, got {_describe(value)}")

    def _places(self) -> None:
        given = self.given
        self.integers("seq_lens", given.seq_lens, (given.batch,), (torch.int32,))
        if given.block_table is not None:
            self.integers("block_table", given.block_table, (given.batch, None), (torch.int32,))
        elif given.latent_cache.shape[0] != given.batch:
            raise self.fail(
                f"q_nope {list(given.q_nope.shape)} and latent_cache {list(given.latent_cache.shape)} must have as "
                "many sequences; pages need a block_table"
            )
        if given.capacity > MAX_LENGTH:
            raise self.fail(f"sequences have up to {MAX_LENGTH} keys, not {given.capacity}")

    def _options(self) -> None:
        given = self.given
        for name, flag in (("return_lse", given.return_lse), ("batch_invariant", given.batch_invariant)):
            if not isinstance(flag, bool):
                raise self.fail(f"{name} must be True or False, got {flag!r}")
        if given.softmax_scale is None and given.w_uk is None:
            raise self.fail("softmax_scale must be given with absorbed queries, which do not tell it: 1 / √(Dn + Dr)")
        for name, number in (("softmax_scale", given.scale), ("logit_cap", given.logit_cap)):
            if not isinstance(number, (int, float)) or isinstance(number, bool) or not 0 <= number < math.inf:
                raise self.fail(f"{name} must be a finite number of at least 0, got {number!r}")

    def _tables(self) -> None:
        given = self.given
        if given.rope_style not in STYLES:
            raise self.fail(f"rope_style is neox or gptj, not {given.rope_style!r}")
        if (given.cos is None) != (given.sin is None):
            raise self.fail("cos and sin go together")
        if given.cos is None or given.sin is None:
            if given.positions is not None:
                raise self.fail("positions go with cos and sin")
            return
        q = given.q_rope
        for name, table in (("cos", given.cos), ("sin", given.sin)):
            fits = isinstance(table, Tensor) and table.dtype in FLOATS and table.ndim == 2 and table.device == q.device
            if not fits or table.shape[1] * 2 != q.shape[3] or table.shape[0] == 0 or table.shape != given.cos.shape:
                raise self.fail(
                    f"{name} must be floating-point [positions, {q.shape[3] // 2}] on {q.device}, half of q_rope's "
                    f"{q.shape[3]} columns, cos and sin alike, got {_describe(table)}"
                )
        if given.cos.dtype != given.sin.dtype:
            raise self.fail(f"cos and sin must be of one dtype, got {given.cos.dtype} and {given.sin.dtype}")
        if given.positions is not None:
            self.integers("positions", given.positions, (given.batch, given.tokens), (torch.int32, torch.int64))


def check(given: Operands) -> None:
    """Raise InvalidArgument unless the arguments are those of decoding, naming what is wrong."""
    Checks("mla_decode", given).all(MAX_TOKENS)
