"""A call of attention: its arguments, their checks, what follows from their shapes and strides, and its shape key."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name, needs_grad, row_bucket
from wavecrest.errors import InvalidArgument

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
EIGHT_BIT_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
EIGHT_BITS = (torch.int8, *EIGHT_BIT_FLOATS)
# dtypes of the result if k and v are 8-bit
OUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("bshd", "bhsd", "thd")
MAX_HEAD_DIM = 256
# positions, and what a window adds to them, are counted in 32 bits
MAX_LENGTH = 1 << 29
# more heads than any published model has: 232 (Falcon 180B) was the most on 2026-11-25
MANY_HEADS = 256

# the contiguous dimension, by the kernel's number for it
ANY, COLUMNS, TOKENS = 0, 1, 2
ORDERS = ("any", "columns", "tokens")
KEY_FIELDS = (
    "batch", "queries", "keys", "heads", "kv_heads", "d", "dv", "dtype", "packed", "left", "right", "diagonal",
    "bias", "alibi", "softcap", "sinks", "lse", "access", "device", "grad",
)  # fmt: skip

Window = tuple[int, int]


class FlashAttentionCall(NamedTuple):
    """softmax(q · kᵀ …) · v over the keys that a query sees; properties are of checked arguments.

    H query heads share the heads of k and v in groups of `group`. Sizes S are those of the longest sequence where
    sequences are packed.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    layout: str = "bshd"
    causal: bool = False
    window: Window = (-1, -1)
    softmax_scale: float | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    return_lse: bool = False
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    p_descale: float | None = None
    out_dtype: torch.dtype | None = None
    dropout_p: float = 0.0
    seed: int | None = None

    @property
    def quantized(self) -> bool:
        """True if k and v, and perhaps q, are 8-bit."""
        return self.k.dtype in EIGHT_BITS

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the result."""
        if self.out_dtype is not None:
            return self.out_dtype
        return torch.bfloat16 if self.q.dtype in EIGHT_BITS else self.q.dtype

    @property
    def wide(self) -> torch.dtype:
        """The dtype that 8-bit values are widened to: q's, or one of 16 bits for 8-bit q."""
        if self.q.dtype not in EIGHT_BITS:
            return self.q.dtype
        # a result of 32 bits keeps more of weights in float16
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float16

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The tensors that a gradient may be asked of."""
        descales = (self.q_descale, self.k_descale, self.v_descale)
        return (self.q, self.k, self.v, self.bias, self.alibi_slopes, self.sinks, *descales)

    @property
    def packed(self) -> bool:
        """True if sequences of several lengths lie behind one another."""
        return self.layout == "thd"

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.cu_seqlens_q.shape[0] - 1 if self.cu_seqlens_q is not None else self.q.shape[0]

    @property
    def heads(self) -> int:
        """Heads of q."""
        return self.q.shape[1 if self.layout != "bshd" else 2]

    @property
    def kv_heads(self) -> int:
        """Heads of k and v."""
        return self.k.shape[1 if self.layout != "bshd" else 2]

    @property
    def group(self) -> int:
        """Query heads that share a head of k and v."""
        return self.heads // self.kv_heads

    @property
    def seqlen_q(self) -> int:
        """Queries of a sequence, or of the longest."""
        return self.q.shape[2 if self.layout == "bhsd" else 1] if self.max_seqlen_q is None else self.max_seqlen_q

    @property
    def seqlen_k(self) -> int:
        """Keys of a sequence, or of the longest."""
        return self.k.shape[2 if self.layout == "bhsd" else 1] if self.max_seqlen_k is None else self.max_seqlen_k

    @property
    def head_dim(self) -> int:
        """The size of a query and of a key."""
        return self.q.shape[-1]

    @property
    def head_dim_v(self) -> int:
        """The size of a value, and of a result."""
        return self.v.shape[-1]

    @property
    def scale(self) -> float:
        """The factor of q · kᵀ."""
        return float(self.head_dim**-0.5) if self.softmax_scale is None else self.softmax_scale

    @property
    def left(self) -> int:
        """Keys before a query's own that it sees; −1: all."""
        return self.window[0]

    @property
    def right(self) -> int:
        """Keys after a query's own that it sees; −1: all."""
        return 0 if self.causal else self.window[1]

    @property
    def capped(self) -> int:
        """1 where scores are capped, else 0; made by a branch, as torch.compile may not know the number."""
        return 1 if self.softcap > 0 else 0

    @property
    def dropout(self) -> bool:
        """True if weights are dropped."""
        return self.dropout_p > 0

    @property
    def least_kept(self) -> int:
        """The least word of 32 bits whose weight is kept."""
        return min(int(self.dropout_p * 2**32), 2**32 - 1)

    @property
    def square(self) -> bool:
        """True if seqlen_q is seqlen_k, where PyTorch's causal mask is the same as wavecrest's."""
        return not self.packed and self.seqlen_q == self.seqlen_k

    @property
    def blind(self) -> bool:
        """True if lengths and window leave a query without a key; not known for packed sequences."""
        return self.seqlen_k == 0 or (self.right >= 0 and self.seqlen_k - self.seqlen_q + self.right < 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return (*self.q.shape[:-1], self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """The shape of the logarithms."""
        return (self.heads, self.q.shape[0]) if self.packed else (self.batch, self.heads, self.seqlen_q)

    def bhsd(self, tensor: Tensor) -> Tensor:
        """q, k or v as [B, H, S, D], packed sequences as one."""
        if self.layout == "bhsd":
            return tensor
        return (tensor.unsqueeze(0) if self.packed else tensor).transpose(1, 2)

    def broadcast_bias(self) -> Tensor | None:
        """The bias as [B, H, Sq, Sk], with strides of 0 where it is broadcast."""
        if self.bias is None:
            return None
        return self.bias.expand(self.batch, self.heads, self.seqlen_q, self.seqlen_k)


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else repr(value)


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check(call: FlashAttentionCall) -> None:
    """Raise InvalidArgument, naming the fault, unless the arguments are valid."""
    if call.layout not in LAYOUTS:
        raise InvalidArgument(f"flash_attention: layout takes {', '.join(LAYOUTS)}, not {call.layout!r}")
    q, form = call.q, f"[{', '.join(call.layout.upper())}]"
    for name, value in (("q", q), ("k", call.k), ("v", call.v)):
        known = isinstance(value, Tensor) and value.dtype in (*FLOATS, *EIGHT_BITS)
        if not known or value.ndim != len(call.layout):
            raise InvalidArgument(
                f"flash_attention: {name} must be float32, float16, bfloat16, float64, int8 or an 8-bit float {form}, "
                f"got {_describe(value)}"
            )
        fits = value.dtype == q.dtype or (q.dtype in FLOATS and value.dtype in EIGHT_BITS)
        if not fits or value.device != q.device:
            other = ", or 8-bit" if q.dtype in FLOATS else ""
            raise InvalidArgument(
                f"flash_attention: {name} must be {q.dtype} on {q.device} as q is{other}, got {_describe(value)}"
            )
        if not 1 <= value.shape[-1] <= MAX_HEAD_DIM:
            raise InvalidArgument(
                f"flash_attention: {name} must have a head_dim of 1 to {MAX_HEAD_DIM}, got {_describe(value)}"
            )
    if call.k.dtype != call.v.dtype:
        raise InvalidArgument(f"flash_attention: v must be {call.k.dtype} as k is, got {_describe(call.v)}")
    _check_sizes(call)
    _check_options(call)
    _check_sequences(call)
    _check_additions(call)
    _check_descales(call)
    _check_dropout(call)


def _check_sizes(call: FlashAttentionCall) -> None:
    q, k, v = call.q, call.k, call.v
    if k.shape[:-1] != v.shape[:-1]:
        raise InvalidArgument(f"flash_attention: k {list(k.shape)} and v {list(v.shape)} may differ in head_dim alone")
    if k.shape[-1] != q.shape[-1] or (not call.packed and k.shape[0] != q.shape[0]):
        raise InvalidArgument(
            f"flash_attention: q {list(q.shape)} and k {list(k.shape)} must have the same head_dim and batch"
        )
    if call.kv_heads == 0 or call.heads == 0 or call.heads % call.kv_heads != 0:
        raise InvalidArgument(
            f"flash_attention: the heads of q ({call.heads}) must be a multiple of those of k and v ({call.kv_heads})"
            f"{_other_layout(call)}"
        )


def _other_layout(call: FlashAttentionCall) -> str:
    """Advice where sequences and heads fit if they are read the other way round; else ""."""
    if call.packed or call.seqlen_k == 0 or call.seqlen_q % call.seqlen_k != 0:
        return ""
    form, other = ("[B, H, S, D]", "bhsd") if call.layout == "bshd" else ("[B, S, H, D]", "bshd")
    return f' in layout "{call.layout}"; if q, k and v are {form}, pass layout="{other}"'


def _check_options(call: FlashAttentionCall) -> None:
    for name, flag in (("causal", call.causal), ("return_lse", call.return_lse)):
        if not isinstance(flag, bool):
            raise InvalidArgument(f"flash_attention: {name} must be True or False, got {flag!r}")
    window = call.window
    if (
        not isinstance(window, tuple)
        or len(window) != 2
        or not all(isinstance(side, int) and not isinstance(side, bool) and side >= -1 for side in window)
    ):
        raise InvalidArgument(
            f"flash_attention: window must be two whole numbers (left, right) of at least -1, got {window!r}"
        )
    for name, number in (("softmax_scale", call.softmax_scale), ("softcap", call.softcap)):
        if number is None and name == "softmax_scale":
            continue
        if not isinstance(number, (int, float)) or isinstance(number, bool) or not 0 <= number < math.inf:
            raise InvalidArgument(f"flash_attention: {name} must be a finite number of at least 0, got {number!r}")


def _check_sequences(call: FlashAttentionCall) -> None:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    # anything, as callers may pass anything
    values: tuple[Any, ...] = (call.cu_seqlens_q, call.cu_seqlens_k, call.max_seqlen_q, call.max_seqlen_k)
    for name, value in zip(names, values, strict=True):
        if not call.packed and value is not None:
            raise InvalidArgument(f"flash_attention: {name} goes with layout thd, not {call.layout}")
    if call.packed:
        for name, starts in zip(names[:2], values[:2], strict=True):
            fits = isinstance(starts, Tensor) and starts.dtype == torch.int32 and starts.ndim == 1
            if not fits or starts.shape[0] == 0 or starts.device != call.q.device:
                raise InvalidArgument(
                    f"flash_attention: {name} must be int32 [B + 1] on {call.q.device}, got {_describe(starts)}"
                )
        if values[0].shape != values[1].shape:
            raise InvalidArgument(
                f"flash_attention: cu_seqlens_q and cu_seqlens_k must be of one size, got {_describe(values[0])} and "
                f"{_describe(values[1])}"
            )
        for name, length in zip(names[2:], values[2:], strict=True):
            if not _is_length(length):
                raise InvalidArgument(f"flash_attention: {name} must be a whole number of at least 0, got {length!r}")
    if call.seqlen_q > MAX_LENGTH or call.seqlen_k > MAX_LENGTH:
        raise InvalidArgument(
            f"flash_attention: sequences have up to {MAX_LENGTH} tokens, not {call.seqlen_q} and {call.seqlen_k}"
        )


def _check_additions(call: FlashAttentionCall) -> None:
    device, heads, batch = call.q.device, call.heads, call.batch
    slopes, sinks, bias = call.alibi_slopes, call.sinks, call.bias
    if slopes is not None:
        fits = isinstance(slopes, Tensor) and slopes.dtype == torch.float32 and slopes.device == device
        if not fits or tuple(slopes.shape) not in ((heads,), (batch, heads)):
            raise InvalidArgument(
                f"flash_attention: alibi_slopes must be float32 [{heads}] or [{batch}, {heads}] on {device}, got "
                f"{_describe(slopes)}"
            )
    if sinks is not None:
        fits = isinstance(sinks, Tensor) and sinks.dtype in FLOATS and sinks.device == device
        if not fits or tuple(sinks.shape) != (heads,):
            raise InvalidArgument(
                f"flash_attention: sinks must be floating-point [{heads}] on {device}, got {_describe(sinks)}"
            )
    if bias is not None:
        whole = (batch, heads, call.seqlen_q, call.seqlen_k)
        fits = isinstance(bias, Tensor) and bias.dtype in FLOATS and bias.device == device and 1 <= bias.ndim <= 4
        if not fits or not all(
            size in (1, wanted) for size, wanted in zip(bias.shape, whole[4 - bias.ndim :], strict=True)
        ):
            raise InvalidArgument(
                f"flash_attention: bias must be floating-point, of {list(whole)} or broadcast to it, on {device}, got "
                f"{_describe(bias)}"
            )


def _check_descales(call: FlashAttentionCall) -> None:
    for name, tensor, descale, heads in (
        ("q", call.q, call.q_descale, call.heads),
        ("k", call.k, call.k_descale, call.kv_heads),
        ("v", call.v, call.v_descale, call.kv_heads),
    ):
        if tensor.dtype not in EIGHT_BITS:
            if descale is not None:
                raise InvalidArgument(
                    f"flash_attention: {name}_descale goes with 8-bit {name}; leave it out for {tensor.dtype}"
                )
            continue
        if descale is None and tensor.dtype != torch.int8:
            continue
        fits = isinstance(descale, Tensor) and descale.dtype == torch.float32 and descale.device == tensor.device
        if not fits or tuple(descale.shape) not in ((), (1,), (heads,), (call.batch, heads)):  # type: ignore[union-attr]
            raise InvalidArgument(
                f"flash_attention: {name}_descale of {tensor.dtype} must be float32, one number, [{heads}] or "
                f"[{call.batch}, {heads}], on {tensor.device}, got {_describe(descale)}"
            )
    number = call.p_descale
    if number is not None:
        if not isinstance(number, (int, float)) or isinstance(number, bool) or not 0 < number < math.inf:
            raise InvalidArgument(f"flash_attention: p_descale must be a finite number above 0, got {number!r}")
        if call.q.dtype not in EIGHT_BITS:
            raise InvalidArgument(
                f"flash_attention: p_descale goes with 8-bit q, k and v; leave it out for q of {call.q.dtype}"
            )
    if call.out_dtype is not None:
        if call.quantized and call.out_dtype not in OUT_DTYPES:
            raise InvalidArgument(
                f"flash_attention: out_dtype takes float32, float16 or bfloat16, not {call.out_dtype!r}"
            )
        if not call.quantized and call.out_dtype != call.q.dtype:
            raise InvalidArgument(
                f"flash_attention: out_dtype goes with 8-bit k and v; leave it out for {call.q.dtype}, not "
                f"{call.out_dtype!r}"
            )


def _check_dropout(call: FlashAttentionCall) -> None:
    share, seed = call.dropout_p, call.seed
    if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 <= share < 1:
        raise InvalidArgument(f"flash_attention: dropout_p must be a number from 0 up to, not with, 1, got {share!r}")
    if seed is None:
        if share > 0:
            raise InvalidArgument("flash_attention: dropout_p above 0 needs a seed, a whole number from 0 below 2**64")
    elif not _is_length(seed) or seed >= 2**64:
        raise InvalidArgument(f"flash_attention: seed must be a whole number from 0 below 2**64, got {seed!r}")


class Walk(NamedTuple):
    """How a tensor [B, H, S, D] is indexed: what is contiguous, strides in units of `align`."""

    order: int
    align: int
    strides: tuple[int, int, int, int]


def walk(tensor: Tensor) -> Walk:
    """How q, k, v or bias is indexed as [B, H, S, D]; packed sequences are one, at a stride of 0."""
    # a stride says nothing where there is one element
    b, h, s, d = (stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if d == 1 or tensor.shape[3] == 1:
        align = _layout.alignment(0, (b, h, s))
        return Walk(COLUMNS, align, (b // align, h // align, s // align, 1))
    if s == 1:
        align = _layout.alignment(0, (b, h, d))
        return Walk(TOKENS, align, (b // align, h // align, 1, d // align))
    align = _layout.alignment(0, (b, h, s, d))
    return Walk(ANY, align, (b // align, h // align, s // align, d // align))


def access(call: FlashAttentionCall) -> str:
    """The contiguous dimension of q, k and v, the bytes of an access to them, up to 16, and whether one is expanded."""
    views = [call.bhsd(one) for one in (call.q, call.k, call.v)]
    walks = [walk(one) for one in views]
    again = any(size > 1 and step == 0 for one in views for size, step in zip(one.shape, one.stride(), strict=True))
    names = [ORDERS[one.order] for one in walks]
    together = names[0] if len(set(names)) == 1 else " ".join(names)
    width = min(16, min(one.align for one in walks) * call.k.element_size())
    return f"{together} {width}{' expanded' if again else ''}"


def _dtypes(call: FlashAttentionCall) -> str:
    """q's dtype; with 8-bit k and v also theirs, "p" for 8-bit weights, a chosen out_dtype; "dropout"."""
    words = [dtype_name(call.q)]
    if call.quantized:
        if call.q.dtype != call.k.dtype:
            words.append(f"kv {dtype_name(call.k)}")
        if call.p_descale is not None:
            words.append("p")
        if call.dtype != call._replace(out_dtype=None).dtype:
            words.append(f"to {str(call.dtype).removeprefix('torch.')}")
    if call.dropout:
        words.append("dropout")
    return " ".join(words)


def key_of(call: FlashAttentionCall) -> Key:
    """The shape key of a call; `left` and `right` −1 where nothing is hidden on that side."""
    return (
        row_bucket(call.batch),
        row_bucket(call.seqlen_q),
        row_bucket(call.seqlen_k),
        call.heads,
        call.kv_heads,
        call.head_dim,
        call.head_dim_v,
        _dtypes(call),
        call.packed,
        row_bucket(call.left),
        row_bucket(call.right),
        # words: inside torch.compile a comparison of lengths is no constant
        "blind" if call.blind else "square" if call.square else "other",
        None if call.bias is None else dtype_name(call.bias),
        call.alibi_slopes is not None,
        call.capped,
        call.sinks is not None,
        call.return_lse,
        access(call),
        call.q.device.type,
        needs_grad(*call.differentiable),
    )
