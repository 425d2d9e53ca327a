"""A call of decoding: its arguments, their checks, and what follows from their shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.dispatch.keys import needs_grad
from wavecrest.errors import InvalidArgument
from wavecrest.ops.packed.cache import FLOATS, GROUPS, SCALE_DTYPES

# dtypes of a cache in 8 bits, with scales
EIGHT_BIT_FLOATS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
EIGHT_BITS = (torch.int8, *EIGHT_BIT_FLOATS)
# two quantized values of 4 bits a byte, with scales and shifts
FOUR_BITS = torch.uint8
MAX_HEAD_DIM = 256
STYLES = ("neox", "gptj")
# queries of a sequence in one call
MAX_TOKENS = 16


class FlashDecodingCall(NamedTuple):
    """Causal attention of the last T tokens of sequences over cached keys; properties are of checked arguments."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    seq_lens: Tensor
    block_table: Tensor | None = None
    window: int = -1
    softmax_scale: float | None = None
    alibi_slopes: Tensor | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    return_lse: bool = False
    batch_invariant: bool = False
    k_shift: Tensor | None = None
    v_shift: Tensor | None = None
    seq_starts: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    rotary_style: str = "neox"
    append_lens: Tensor | None = None
    advance: bool = False

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.q.shape[0]

    @property
    def seqlen_q(self) -> int:
        """Queries of a sequence."""
        return self.q.shape[1]

    @property
    def heads(self) -> int:
        """Heads of q."""
        return self.q.shape[2]

    @property
    def kv_heads(self) -> int:
        """Heads of the cache."""
        return self.k_cache.shape[2]

    @property
    def group(self) -> int:
        """Query heads that share a head of the cache."""
        return self.heads // self.kv_heads

    @property
    def head_dim(self) -> int:
        """The size of a query and of a key."""
        return self.q.shape[-1]

    @property
    def head_dim_v(self) -> int:
        """The size of a value, and of a result."""
        return self.v_cache.shape[-1] * (2 if self.four_bits else 1)

    @property
    def four_bits(self) -> bool:
        """True for a cache in 4 bits, two values a byte."""
        return self.k_cache.dtype == FOUR_BITS

    @property
    def by_token(self) -> bool:
        """True where each token and head has scales of its own."""
        return self.k_scale is not None and self.k_scale.ndim == 4

    @property
    def dense(self) -> bool:
        """True where the elements of a row, and its groups' scales, lie next to each other."""
        rows = (self.q, self.k_cache, self.v_cache, self.k, self.v, self.cos, self.sin)
        together = all(one is None or one.stride(-1) == 1 for one in rows)
        scales = (self.k_scale, self.v_scale, self.k_shift, self.v_shift)
        return together and (self.groups < 2 or all(one is None or one.stride(-1) == 1 for one in scales))

    @property
    def groups(self) -> int:
        """Groups of a row with a scale and a shift each, of a cache in 4 bits; 0 for others."""
        return self.k_scale.shape[-1] if self.four_bits and self.k_scale is not None else 0

    @property
    def prepares(self) -> bool:
        """True where something is rotated or written before attention."""
        return self.k is not None or self.cos is not None

    @property
    def new_lens(self) -> Tensor:
        """int32 [B]: new tokens end there, in places of the cache; with `advance` they begin there."""
        return self.seq_lens if self.append_lens is None else self.append_lens

    @property
    def style(self) -> str:
        """The rotary style; "none" without cos and sin."""
        return "none" if self.cos is None else self.rotary_style

    @property
    def page(self) -> int:
        """Tokens of a page; of a cache without pages, of a sequence."""
        return self.k_cache.shape[1]

    @property
    def capacity(self) -> int:
        """Keys that a sequence may have."""
        return self.page if self.block_table is None else self.page * self.block_table.shape[1]

    @property
    def scale(self) -> float:
        """The factor of q · kᵀ."""
        return float(self.head_dim**-0.5) if self.softmax_scale is None else self.softmax_scale

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return (self.batch, self.seqlen_q, self.heads, self.head_dim_v)


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else repr(value)


def _fail(text: str) -> InvalidArgument:
    return InvalidArgument(f"flash_decoding: {text}")


def check(call: FlashDecodingCall) -> None:
    """Raise InvalidArgument, naming the fault, unless the arguments are valid."""
    q = call.q
    if not isinstance(q, Tensor) or q.ndim != 4 or q.dtype not in FLOATS:
        raise _fail(f"q must be float32, float16, bfloat16 or float64 [B, T, H, D], got {_describe(q)}")
    if not 1 <= q.shape[1] <= MAX_TOKENS:
        raise _fail(f"takes 1 to {MAX_TOKENS} queries of a sequence, got {_describe(q)}; more are flash_attention's")
    for name, cache in (("k_cache", call.k_cache), ("v_cache", call.v_cache)):
        if not isinstance(cache, Tensor) or cache.ndim != 4 or cache.dtype not in (q.dtype, *EIGHT_BITS, FOUR_BITS):
            raise _fail(
                f"{name} must be [B, S, H, D] or [pages, page, H, D] of {q.dtype} or 8 bits, or [..., D / 2] of uint8, "
                f"got {_describe(cache)}"
            )
        if cache.device != q.device:
            raise _fail(f"{name} is on {cache.device}, q on {q.device}")
    k, v = call.k_cache, call.v_cache
    if k.shape[:3] != v.shape[:3] or k.dtype != v.dtype:
        raise _fail(f"k_cache {_describe(k)} and v_cache {_describe(v)} may differ in head_dim alone")
    packed = 2 if call.four_bits else 1
    d, dv = q.shape[3], call.head_dim_v
    if k.shape[3] * packed != d or not 1 <= d <= MAX_HEAD_DIM or not 1 <= dv <= MAX_HEAD_DIM:
        raise _fail(
            f"q {list(q.shape)}, k_cache {list(k.shape)} and v_cache {list(v.shape)} must have a head_dim of 1 to "
            f"{MAX_HEAD_DIM}, the same for q and k{'; a byte of uint8 holds two elements' if packed == 2 else ''}"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2] != 0 or q.shape[2] == 0:
        raise _fail(f"the heads of q ({q.shape[2]}) must be a multiple of those of the cache ({k.shape[2]})")
    _check_places(call)
    _check_options(call)
    _check_appended(call)


def _check_appended(call: FlashDecodingCall) -> None:
    """New keys and values like q's tokens, which no gradient follows into a cache; tables as `rope` takes them."""
    q, cos, sin = call.q, call.cos, call.sin
    if (call.k is None) != (call.v is None):
        raise _fail("k and v are written together: pass both or neither")
    for name, new, head_dim in (("k", call.k, call.head_dim), ("v", call.v, call.head_dim_v)):
        shape = (call.batch, call.seqlen_q, call.kv_heads, head_dim)
        if new is not None and not _is(new, call, (q.dtype,), (shape,)):
            raise _fail(f"{name} must be {q.dtype} {list(shape)} on {q.device}, got {_describe(new)}")
    if call.k is not None:
        written = {
            "k_cache": call.k_cache, "v_cache": call.v_cache,
            **({"k_scale": call.k_scale, "v_scale": call.v_scale} if call.by_token else {}),
            "k_shift": call.k_shift, "v_shift": call.v_shift,
        }  # fmt: skip
        for name, one in written.items():
            if one is not None and any(
                size > 1 and stride == 0 for size, stride in zip(one.shape, one.stride(), strict=True)
            ):
                raise _fail(f"{name} is written to, and must not be expanded: strides {list(one.stride())}")
        if needs_grad(call.k, call.v, *written.values()):
            raise _fail("k and v are written into caches without gradients: detach them, or call under torch.no_grad")
    if call.rotary_style not in STYLES:
        raise _fail(f"rotary_style is neox or gptj, not {call.rotary_style!r}")
    if (cos is None) != (sin is None):
        raise _fail("cos and sin go together: pass both or neither")
    for name, table in (("cos", cos), ("sin", sin)):
        if table is None or cos is None:
            continue
        fits = isinstance(table, Tensor) and table.ndim == 2 and table.shape[0] > 0 and table.dtype in FLOATS
        if not fits or not 1 <= table.shape[1] <= call.head_dim // 2 or table.device != q.device:
            raise _fail(
                f"{name} must be floating-point [positions, R / 2] on {q.device}, with R up to {call.head_dim}, "
                f"got {_describe(table)}"
            )
        if table.shape != cos.shape or table.dtype != cos.dtype:
            raise _fail(f"sin {_describe(table)} must be as cos, {_describe(cos)}")


def _integers(call: FlashDecodingCall, name: str, value: Any, shape: tuple[int | None, ...]) -> None:
    if (
        not isinstance(value, Tensor)
        or value.dtype != torch.int32
        or value.ndim != len(shape)
        or any(size not in (None, found) for size, found in zip(shape, value.shape, strict=True))
        or value.device != call.q.device
    ):
        # not before: torch.compile cannot trace the text of a size that changes
        wanted = ", ".join("…" if size is None else str(size) for size in shape)
        raise _fail(f"{name} must be int32 [{wanted}] on {call.q.device}, got {_describe(value)}")


def _check_places(call: FlashDecodingCall) -> None:
    _integers(call, "seq_lens", call.seq_lens, (call.q.shape[0],))
    if call.seq_starts is not None:
        _integers(call, "seq_starts", call.seq_starts, (call.q.shape[0],))
    if call.append_lens is not None:
        _integers(call, "append_lens", call.append_lens, (call.q.shape[0],))
        if call.k is None:
            raise _fail("append_lens says where k and v are written: pass these too")
    if not isinstance(call.advance, bool):
        raise _fail(f"advance must be True or False, got {call.advance!r}")
    if call.advance and (call.append_lens is None or call.append_lens is call.seq_lens):
        raise _fail("advance adds the new tokens to append_lens: pass them, and no seq_lens in the same memory")
    if call.block_table is not None:
        _integers(call, "block_table", call.block_table, (call.q.shape[0], None))
    elif call.k_cache.shape[0] != call.q.shape[0]:
        raise _fail(
            f"q {list(call.q.shape)} and k_cache {list(call.k_cache.shape)} must have the same batch; "
            "pages need a block_table"
        )


def _is(
    value: Any, call: FlashDecodingCall, dtypes: tuple[torch.dtype, ...], shapes: tuple[tuple[int, ...], ...]
) -> bool:
    """True for a tensor beside q of one of these dtypes and shapes."""
    if not isinstance(value, Tensor):
        return False
    return value.dtype in dtypes and tuple(value.shape) in shapes and value.device == call.q.device


def _check_options(call: FlashDecodingCall) -> None:
    for name, flag in (("return_lse", call.return_lse), ("batch_invariant", call.batch_invariant)):
        if not isinstance(flag, bool):
            raise _fail(f"{name} must be True or False, got {flag!r}")
    if not isinstance(call.window, int) or isinstance(call.window, bool) or call.window < -1:
        raise _fail(f"window must be the keys before its own that a query sees, or -1 for all, got {call.window!r}")
    for name, value in (("softmax_scale", call.scale), ("softcap", call.softcap)):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
            raise _fail(f"{name} must be a number of at least 0, got {value!r}")
    heads = call.heads
    slopes, sinks = call.alibi_slopes, call.sinks
    if slopes is not None and not _is(slopes, call, (torch.float32,), ((heads,), (call.batch, heads))):
        raise _fail(f"alibi_slopes must be float32 [{heads}] or [{call.batch}, {heads}], got {_describe(slopes)}")
    if sinks is not None and not _is(sinks, call, FLOATS, ((heads,),)):
        raise _fail(f"sinks must be floating-point [{heads}], got {_describe(sinks)}")
    _check_scales(call)


def _check_scales(call: FlashDecodingCall) -> None:
    """8 bits: one number, one a head or one a token and head; 4 bits: some a token and head, and shifts like them."""
    kv, dtype, eight = call.kv_heads, call.k_cache.dtype, call.k_cache.dtype in EIGHT_BITS
    scales = {"k_scale": call.k_scale, "v_scale": call.v_scale}
    shifts = {"k_shift": call.k_shift, "v_shift": call.v_shift}
    for name, scale in scales.items():
        if (scale is not None) != (eight or call.four_bits):
            raise _fail(f"{name} belongs to a cache of 8 bits or 4, and one of these needs it; this is {dtype}")
    for name, shift in shifts.items():
        if (shift is not None) != call.four_bits:
            raise _fail(f"{name} belongs to a cache of 4 bits, uint8, and one of 4 bits needs it; this is {dtype}")
    leading = tuple(call.k_cache.shape[:3])
    for name, scale in scales.items():
        whole = eight and _is(scale, call, (torch.float32,), ((), (1,), (kv,)))
        shapes = tuple((*leading, groups) for groups in (GROUPS if call.four_bits else (1,)))
        if scale is not None and not whole and not _is(scale, call, SCALE_DTYPES, shapes):
            least = f"float32, one number or [{kv}], or " if eight else ""
            counts = f"one of {list(GROUPS)}" if call.four_bits else "1"
            raise _fail(
                f"{name} must be {least}floating-point of up to 32 bits {list(leading)} and {counts}, "
                f"got {_describe(scale)}"
            )
    k_scale, v_scale = call.k_scale, call.v_scale
    if k_scale is None or v_scale is None:
        return
    if (k_scale.ndim == 4) != (v_scale.ndim == 4) or (k_scale.ndim == 4 and k_scale.shape != v_scale.shape):
        raise _fail(f"k_scale {_describe(k_scale)} and v_scale {_describe(v_scale)} must both be of tokens, and alike")
    for (name, shift), scale in zip(shifts.items(), (k_scale, v_scale), strict=True):
        if shift is not None and not _is(shift, call, (scale.dtype,), (tuple(scale.shape),)):
            raise _fail(f"{name} must be {scale.dtype} {list(scale.shape)} as its scale is, got {_describe(shift)}")
    if call.four_bits and (call.head_dim % (2 * call.groups) or call.head_dim_v % (2 * call.groups)):
        raise _fail(
            f"{call.groups} groups need a head_dim that is a multiple of {2 * call.groups}, "
            f"got {call.head_dim} and {call.head_dim_v}"
        )
