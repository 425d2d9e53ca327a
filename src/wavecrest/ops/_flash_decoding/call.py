"""The arguments of decoding: what they may be, and what follows from their shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.dispatch.keys import needs_grad
from wavecrest.errors import InvalidArgument

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# what a cache may hold in 8 bits, with scales
EIGHT_BIT_FLOATS = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
EIGHT_BITS = (torch.int8, *EIGHT_BIT_FLOATS)
# two codes of 4 bits a byte, with scales and shifts; groups of columns that have their own
FOUR_BITS = torch.uint8
GROUPS = (1, 2, 4, 8)
# of scales and shifts that tokens have
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_COLUMNS = 256
STYLES = ("neox", "gptj")
# queries of a sequence in one call
MAX_TOKENS = 16


class Operands(NamedTuple):
    """The arguments in the order that the op's backends get them; properties are of checked arguments.

    T queries of each sequence are its last tokens, whose keys are in the cache.
    """

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

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.q.shape[0]

    @property
    def tokens(self) -> int:
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
    def columns(self) -> int:
        """Columns of q and k."""
        return self.q.shape[-1]

    @property
    def v_columns(self) -> int:
        """Columns of v and of the result."""
        return self.v_cache.shape[-1] * (2 if self.four_bits else 1)

    @property
    def four_bits(self) -> bool:
        """True for a cache of two codes a byte."""
        return self.k_cache.dtype == FOUR_BITS

    @property
    def by_token(self) -> bool:
        """True where each token and head has scales of its own."""
        return self.k_scale is not None and self.k_scale.ndim == 4

    @property
    def dense(self) -> bool:
        """True where columns, and groups of them, lie next to each other."""
        rows = (self.q, self.k_cache, self.v_cache, self.k, self.v, self.cos, self.sin)
        columns = all(one is None or one.stride(-1) == 1 for one in rows)
        scales = (self.k_scale, self.v_scale, self.k_shift, self.v_shift)
        return columns and (self.groups < 2 or all(one is None or one.stride(-1) == 1 for one in scales))

    @property
    def groups(self) -> int:
        """Groups of columns that have their own scale and shift, of a cache of 4 bits; 0 for others."""
        return self.k_scale.shape[-1] if self.four_bits and self.k_scale is not None else 0

    @property
    def prepares(self) -> bool:
        """True where something is turned or written before attention."""
        return self.k is not None or self.cos is not None

    @property
    def style(self) -> str:
        """How columns are turned; "none": they are not."""
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
        return float(self.columns**-0.5) if self.softmax_scale is None else self.softmax_scale

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return (self.batch, self.tokens, self.heads, self.v_columns)


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else repr(value)


def _fail(text: str) -> InvalidArgument:
    return InvalidArgument(f"flash_decoding: {text}")


def check(given: Operands) -> None:
    """Raise InvalidArgument unless the arguments are those of decoding, naming what is wrong."""
    q = given.q
    if not isinstance(q, Tensor) or q.ndim != 4 or q.dtype not in FLOATS:
        raise _fail(f"q must be float32, float16, bfloat16 or float64 [B, T, H, D], got {_describe(q)}")
    if not 1 <= q.shape[1] <= MAX_TOKENS:
        raise _fail(f"takes 1 to {MAX_TOKENS} queries of a sequence, got {_describe(q)}; more are flash_attention's")
    for name, cache in (("k_cache", given.k_cache), ("v_cache", given.v_cache)):
        if not isinstance(cache, Tensor) or cache.ndim != 4 or cache.dtype not in (q.dtype, *EIGHT_BITS, FOUR_BITS):
            raise _fail(
                f"{name} must be [B, S, H, D] or [pages, page, H, D] of {q.dtype} or 8 bits, or [..., D / 2] of uint8, "
                f"got {_describe(cache)}"
            )
        if cache.device != q.device:
            raise _fail(f"{name} is on {cache.device}, q on {q.device}")
    k, v = given.k_cache, given.v_cache
    if k.shape[:3] != v.shape[:3] or k.dtype != v.dtype:
        raise _fail(f"k_cache {_describe(k)} and v_cache {_describe(v)} must agree in all but their columns")
    codes = 2 if given.four_bits else 1
    d, dv = q.shape[3], given.v_columns
    if k.shape[3] * codes != d or not 1 <= d <= MAX_COLUMNS or not 1 <= dv <= MAX_COLUMNS:
        raise _fail(
            f"q {list(q.shape)}, k_cache {list(k.shape)} and v_cache {list(v.shape)} must have 1 to {MAX_COLUMNS} "
            f"columns, q and k as many{'; a byte of uint8 is two' if codes == 2 else ''}"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2] != 0 or q.shape[2] == 0:
        raise _fail(f"{q.shape[2]} heads of q are no multiple of the {k.shape[2]} of the cache")
    _check_places(given)
    _check_options(given)
    _check_appended(given)


def _check_appended(given: Operands) -> None:
    """New keys and values like q's tokens, which no gradient follows into a cache; tables as `rope` takes them."""
    q, cos, sin = given.q, given.cos, given.sin
    if (given.k is None) != (given.v is None):
        raise _fail("k and v are written together: pass both or neither")
    for name, new, columns in (("k", given.k, given.columns), ("v", given.v, given.v_columns)):
        shape = (given.batch, given.tokens, given.kv_heads, columns)
        if new is not None and not _is(new, given, (q.dtype,), (shape,)):
            raise _fail(f"{name} must be {q.dtype} {list(shape)} on {q.device}, got {_describe(new)}")
    if given.k is not None:
        written = {
            "k_cache": given.k_cache, "v_cache": given.v_cache,
            **({"k_scale": given.k_scale, "v_scale": given.v_scale} if given.by_token else {}),
            "k_shift": given.k_shift, "v_shift": given.v_shift,
        }  # fmt: skip
        for name, one in written.items():
            if one is not None and any(
                size > 1 and stride == 0 for size, stride in zip(one.shape, one.stride(), strict=True)
            ):
                raise _fail(f"{name} is written to, and must not be expanded: strides {list(one.stride())}")
        if needs_grad(given.k, given.v, *written.values()):
            raise _fail("k and v are written into caches without gradients: detach them, or call under torch.no_grad")
    if given.rotary_style not in STYLES:
        raise _fail(f"rotary_style is neox or gptj, not {given.rotary_style!r}")
    if (cos is None) != (sin is None):
        raise _fail("cos and sin go together: pass both or neither")
    for name, table in (("cos", cos), ("sin", sin)):
        if table is None or cos is None:
            continue
        fits = isinstance(table, Tensor) and table.ndim == 2 and table.shape[0] > 0 and table.dtype in FLOATS
        if not fits or not 1 <= table.shape[1] <= given.columns // 2 or table.device != q.device:
            raise _fail(
                f"{name} must be floating-point [positions, R / 2] on {q.device}, of up to {given.columns} columns R, "
                f"got {_describe(table)}"
            )
        if table.shape != cos.shape or table.dtype != cos.dtype:
            raise _fail(f"sin {_describe(table)} must be as cos, {_describe(cos)}")


def _integers(given: Operands, name: str, value: Any, shape: tuple[int | None, ...]) -> None:
    wanted = ", ".join("…" if size is None else str(size) for size in shape)
    if (
        not isinstance(value, Tensor)
        or value.dtype != torch.int32
        or value.ndim != len(shape)
        or any(size not in (None, found) for size, found in zip(shape, value.shape, strict=True))
        or value.device != given.q.device
    ):
        raise _fail(f"{name} must be int32 [{wanted}] on {given.q.device}, got {_describe(value)}")


def _check_places(given: Operands) -> None:
    _integers(given, "seq_lens", given.seq_lens, (given.q.shape[0],))
    if given.seq_starts is not None:
        _integers(given, "seq_starts", given.seq_starts, (given.q.shape[0],))
    if given.block_table is not None:
        _integers(given, "block_table", given.block_table, (given.q.shape[0], None))
    elif given.k_cache.shape[0] != given.q.shape[0]:
        raise _fail(
            f"q {list(given.q.shape)} and k_cache {list(given.k_cache.shape)} must have as many sequences; "
            "pages need a block_table"
        )


def _is(value: Any, given: Operands, dtypes: tuple[torch.dtype, ...], shapes: tuple[tuple[int, ...], ...]) -> bool:
    """True for a tensor beside q of one of these dtypes and shapes."""
    if not isinstance(value, Tensor):
        return False
    return value.dtype in dtypes and tuple(value.shape) in shapes and value.device == given.q.device


def _check_options(given: Operands) -> None:
    for name, flag in (("return_lse", given.return_lse), ("batch_invariant", given.batch_invariant)):
        if not isinstance(flag, bool):
            raise _fail(f"{name} must be True or False, got {flag!r}")
    if not isinstance(given.window, int) or isinstance(given.window, bool) or given.window < -1:
        raise _fail(f"window must be the keys before its own that a query sees, or -1 for all, got {given.window!r}")
    for name, value in (("softmax_scale", given.scale), ("softcap", given.softcap)):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
            raise _fail(f"{name} must be a number of at least 0, got {value!r}")
    heads = given.heads
    slopes, sinks = given.alibi_slopes, given.sinks
    if slopes is not None and not _is(slopes, given, (torch.float32,), ((heads,), (given.batch, heads))):
        raise _fail(f"alibi_slopes must be float32 [{heads}] or [{given.batch}, {heads}], got {_describe(slopes)}")
    if sinks is not None and not _is(sinks, given, FLOATS, ((heads,),)):
        raise _fail(f"sinks must be floating-point [{heads}], got {_describe(sinks)}")
    _check_scales(given)


def _check_scales(given: Operands) -> None:
    """8 bits: one number, one a head or one a token and head; 4 bits: some a token and head, and shifts like them."""
    kv, dtype, eight = given.kv_heads, given.k_cache.dtype, given.k_cache.dtype in EIGHT_BITS
    scales = {"k_scale": given.k_scale, "v_scale": given.v_scale}
    shifts = {"k_shift": given.k_shift, "v_shift": given.v_shift}
    for name, scale in scales.items():
        if (scale is not None) != (eight or given.four_bits):
            raise _fail(f"{name} belongs to a cache of 8 bits or 4, and one of these needs it; this is {dtype}")
    for name, shift in shifts.items():
        if (shift is not None) != given.four_bits:
            raise _fail(f"{name} belongs to a cache of 4 bits, uint8, and one of 4 bits needs it; this is {dtype}")
    leading = tuple(given.k_cache.shape[:3])
    for name, scale in scales.items():
        whole = eight and _is(scale, given, (torch.float32,), ((), (1,), (kv,)))
        shapes = tuple((*leading, groups) for groups in (GROUPS if given.four_bits else (1,)))
        if scale is not None and not whole and not _is(scale, given, SCALE_DTYPES, shapes):
            least = f"float32, one number or [{kv}], or " if eight else ""
            counts = f"one of {list(GROUPS)}" if given.four_bits else "1"
            raise _fail(
                f"{name} must be {least}floating-point of up to 32 bits {list(leading)} and {counts}, "
                f"got {_describe(scale)}"
            )
    k_scale, v_scale = given.k_scale, given.v_scale
    if k_scale is None or v_scale is None:
        return
    if (k_scale.ndim == 4) != (v_scale.ndim == 4) or (k_scale.ndim == 4 and k_scale.shape != v_scale.shape):
        raise _fail(f"k_scale {_describe(k_scale)} and v_scale {_describe(v_scale)} must both be of tokens, and alike")
    for (name, shift), scale in zip(shifts.items(), (k_scale, v_scale), strict=True):
        if shift is not None and not _is(shift, given, (scale.dtype,), (tuple(scale.shape),)):
            raise _fail(f"{name} must be {scale.dtype} {list(scale.shape)} as its scale is, got {_describe(shift)}")
    if given.four_bits and (given.columns % (2 * given.groups) or given.v_columns % (2 * given.groups)):
        raise _fail(
            f"{given.groups} groups of columns need {2 * given.groups} or a multiple of it, "
            f"got {given.columns} and {given.v_columns}"
        )
