"""Keys and values of earlier tokens in 8 or 4 bits, as `flash_decoding` reads them: the memory of a model's layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.target as _target
from wavecrest.dispatch.tracing import constant_in_graphs
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.nn.stand_in import StandIn
from wavecrest.ops._flash_decoding.call import FOUR_BITS, MAX_HEAD_DIM, MAX_TOKENS, FlashDecodingCall
from wavecrest.ops.common.quantized import float8_of, kernel_refusal
from wavecrest.ops.packed.cache import GROUPS, dequantize, quantize_cache, quantize_cache_8bit

FORMATS = ("fp8", "int8", "int4")
# tokens of a page, where only a window is kept: a multiple of the kernel's tiles
PAGE = 64
# the fewest values of a group in 4 bits. Groups of 32 have 0.78 of the error of groups of 128 (‖x̂ − x‖ / ‖x‖ of 4,096
# normally distributed rows, 2026-11-26), with every 32nd column 8 times as large 0.52; a value takes 5 bits, not 4.25
LEAST_GROUP = 32
# of scales and shifts: values are rounded with the rounded scale, so that float32 has the same error (in those cases
# 0.0257 in fp8 and 0.0065 in int8)
SCALE_DTYPE = torch.float16


def check_format(format: Any) -> str:
    """The format.

    Raises:
        InvalidArgument: another one than FORMATS has.
    """
    if format not in FORMATS:
        raise InvalidArgument(f"a key-value cache is stored as {', '.join(FORMATS)}, not {format!r}")
    return str(format)


# Dynamo would trace the detection of the GPU, which it cannot
@constant_in_graphs
def fp8_type(kind: str) -> torch.dtype:
    """The 8-bit float of a device, "cuda" or another type: e4m3fnuz on gfx942, else e4m3fn.

    Raises:
        Unsupported: kernels cannot round to it there.
    """
    dtype = float8_of(_target.arch() if kind == "cuda" else None)
    refusal = kernel_refusal(dtype) if kind == "cuda" else None
    if refusal is not None:
        raise Unsupported(f"a key-value cache in fp8: {refusal}; take int8 or int4")
    return dtype


def groups_of(head_dim: int, head_dim_v: int) -> int:
    """The groups of a row in 4 bits.

    Raises:
        Unsupported: a head_dim is odd.
    """
    fitting = [one for one in GROUPS if head_dim % (2 * one) == 0 and head_dim_v % (2 * one) == 0]
    if not fitting:
        raise Unsupported(
            f"a key-value cache in int4 needs an even head_dim, got {head_dim} and {head_dim_v}; take fp8 or int8"
        )
    return max((one for one in fitting if min(head_dim, head_dim_v) >= one * LEAST_GROUP), default=1)


class KVStore:
    """Keys and values of a layer, each token and head with scales of its own; tensors [B, slots, Hk, …].

    Token n of a sequence is in slot n, or where only a window is kept in slot n modulo their number: a block table
    then maps all pages of a sequence onto these.

    Attributes:
        format: one of FORMATS.
        capacity: tokens that a sequence may have.
        slots: tokens that are kept.
        pages: of a sequence where only a window is kept, else 0.
        shapes: of keys and of values without tokens, [B, Hk, 0, D] and [B, Hk, 0, Dv].
        k, v: quantized values.
        k_scale, v_scale: float16 [B, slots, Hk, 1], or of 4 bits [B, slots, Hk, groups].
        k_shift, v_shift: likewise of 4 bits, else None.
        table: int32 [B, pages], or None where all tokens are kept.
    """

    def __init__(
        self,
        format: str,
        batch: int,
        capacity: int,
        heads: int,
        head_dim: int,
        head_dim_v: int,
        device: torch.device | str,
        window: int | None = None,
    ) -> None:
        """An empty store.

        Args:
            format: one of FORMATS.
            batch, capacity, heads, head_dim, head_dim_v: sequences, their tokens at most, heads, sizes of a key and a
                value.
            device: of the memory.
            window: keys that a query sees, its own among them; None: all.

        Raises:
            InvalidArgument: the format is unknown.
            Unsupported: the device or a head_dim does not go with the format.
        """
        self.format, self.capacity = check_format(format), capacity
        # of keys and values of no tokens yet
        self.shapes = (batch, heads, 0, head_dim), (batch, heads, 0, head_dim_v)
        if max(head_dim, head_dim_v) > MAX_HEAD_DIM:
            raise Unsupported(
                f"a quantized key-value cache holds a head_dim of at most {MAX_HEAD_DIM}, as flash_decoding; "
                f"got {max(head_dim, head_dim_v)}"
            )
        self.slots, self.pages = capacity, 0
        if window is not None:
            # of the tokens that queries of one call see, the first may lie in the middle of a page
            pages = -(-(window + MAX_TOKENS - 2) // PAGE) + 1
            if pages * PAGE < capacity:
                self.slots, self.pages = pages * PAGE, pages
        groups = groups_of(head_dim, head_dim_v) if format == "int4" else 1
        four = format == "int4"
        kind = torch.device(device).type
        dtype = FOUR_BITS if four else torch.int8 if format == "int8" else fp8_type(kind)

        def room(size: int, of: torch.dtype) -> Tensor:
            # not zeros of an 8-bit float: these have fewer operations
            made = torch.zeros(batch, self.slots, heads, size * of.itemsize, dtype=torch.uint8, device=device)
            return made.view(of)

        self.k, self.v = (
            room(head_dim // 2 if four else head_dim, dtype),
            room(head_dim_v // 2 if four else head_dim_v, dtype),
        )
        self.k_scale, self.v_scale = room(groups, SCALE_DTYPE), room(groups, SCALE_DTYPE)
        self.k_shift = room(groups, SCALE_DTYPE) if four else None
        self.v_shift = room(groups, SCALE_DTYPE) if four else None
        self.table: Tensor | None = None
        if self.pages:
            page = torch.arange(-(-capacity // PAGE), dtype=torch.int32, device=device) % self.pages
            first = torch.arange(batch, dtype=torch.int32, device=device)[:, None] * self.pages
            self.table = (first + page).contiguous()

    def tensors(self) -> list[Tensor]:
        """Everything that is written to, [B, slots, Hk, …] each."""
        found = (self.k, self.v, self.k_scale, self.v_scale, self.k_shift, self.v_shift)
        return [one for one in found if one is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, the block table among them."""
        return sum(one.nbytes for one in self.tensors()) + (0 if self.table is None else self.table.nbytes)

    def clear(self) -> None:
        """Zeros everywhere, in place."""
        for one in self.tensors():
            one.view(torch.uint8).zero_()

    def select(self, rows: Tensor) -> None:
        """Replace each sequence by the one at `rows`, int64 [B], in place."""
        for one in self.tensors():
            # PyTorch has no index_select of 8-bit floats
            held = one.view(torch.uint8)
            held.copy_(held.index_select(0, rows.to(held.device)))

    def _paged(self, one: Tensor | None) -> Tensor | None:
        return one if one is None or not self.pages else one.view(-1, PAGE, *one.shape[2:])

    def call(self, q: Tensor, k: Tensor, v: Tensor, ends: Tensor) -> FlashDecodingCall:
        """The call of q [B, T, Hq, D] over the tokens before `ends`, int32 [B], which first writes k and v of q's."""
        k_cache, v_cache = self._paged(self.k), self._paged(self.v)
        assert k_cache is not None and v_cache is not None
        return FlashDecodingCall(
            q, k_cache, v_cache, ends, self.table, k_scale=self._paged(self.k_scale),
            v_scale=self._paged(self.v_scale), k_shift=self._paged(self.k_shift), v_shift=self._paged(self.v_shift),
            k=k, v=v,
        )  # fmt: skip

    def write(self, k: Tensor, v: Tensor, start: Tensor) -> None:
        """Quantize and store any number of tokens, with the bits that `flash_decoding` gives them.

        Args:
            k, v: [B, T, Hk, D] and [B, T, Hk, Dv].
            start: the place of the first one, an integer tensor without dimensions.
        """
        count = min(k.shape[1], self.slots)
        # of more tokens than are kept, the last
        places = (start + torch.arange(k.shape[1] - count, k.shape[1], device=k.device)) % self.slots
        for x, cache, scale, shift in (
            (k, self.k, self.k_scale, self.k_shift),
            (v, self.v, self.v_scale, self.v_shift),
        ):
            x = x[:, k.shape[1] - count :]
            if shift is not None:
                quantized, scales, shifts = quantize_cache(x, scale.shape[-1], dtype=scale.dtype)
                shift.index_copy_(1, places, shifts)
            else:
                quantized, scales = quantize_cache_8bit(x, cache.dtype, dtype=scale.dtype)
            scale.index_copy_(1, places, scales)
            cache.view(torch.uint8).index_copy_(1, places, quantized.view(torch.uint8))

    def read(self, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The first `count` tokens dequantized, [B, Hk, count, D] and [B, Hk, count, Dv].

        Of a window, tokens before the last `slots` hold other tokens' values: no query sees them.
        """
        made = []
        for cache, scale, shift in ((self.k, self.k_scale, self.k_shift), (self.v, self.v_scale, self.v_shift)):
            held, scales, shifts = (self._first(one, count) for one in (cache, scale, shift))
            assert held is not None and scales is not None
            if shifts is not None:
                rows = dequantize(held, scales, shifts, torch.float32)
            else:
                rows = held.float() * scales.float()
            made.append(rows.to(dtype).transpose(1, 2))
        return made[0], made[1]

    def _first(self, one: Tensor | None, count: int) -> Tensor | None:
        if one is None or count <= self.slots:
            return one if one is None else one[:, :count]
        places = torch.arange(count, device=one.device) % self.slots
        return one.view(torch.uint8).index_select(1, places).view(one.dtype)


class Cached(StandIn):
    """Keys, or values, that a quantized cache gives a model in the place of a tensor: new ones, and its memory.

    `attend` writes the new ones and reads the memory. Whatever else is done with it is an error that says what to do.

    Attributes:
        store: the memory.
        k, v: of the new tokens, [B, Hk, T, D] and [B, Hk, T, Dv], not in the memory yet.
        end: the number of tokens with these, an integer tensor without dimensions.
    """

    misused = (
        "keys and values of a quantized cache can be read by wavecrest's attention alone: call "
        "wavecrest.integrations.transformers.use_attention(model), or use a cache of transformers"
    )

    def __init__(self, store: KVStore, k: Tensor, v: Tensor, end: Tensor) -> None:
        """Hold new keys and values."""
        self.store, self.k, self.v, self.end = store, k, v, end

    def plain(self, seen: int) -> tuple[Tensor, Tensor]:
        """The first `seen` keys and values as tensors [B, Hk, seen, …], the new ones unrounded; these are then stored.

        Where all of `seen` are new, nothing is dequantized.
        """
        count = self.k.shape[2]
        start = self.end - count
        keys, values = self.k, self.v
        if seen != count:
            # before new ones are written, which may take the place of a window's oldest
            keys, values = self.store.read(seen, self.k.dtype)
            places = start + torch.arange(count, device=start.device)
            keys, values = keys.index_copy(2, places, self.k), values.index_copy(2, places, self.v)
        self.store.write(self.k.transpose(1, 2), self.v.transpose(1, 2), start)
        return keys, values
