"""Attention as models call it, over the ops `flash_attention` and `flash_decoding`: by transformers' interface, or as
PyTorch's.

Under transformers' interface a dense mask [B, 1, Sq, Sk] would be read by every layer, and hides from a kernel what it
need not compute. So where queries see the keys up to their own, or a window of them, a mask is *compact*: one flag a
key, the rest in its shape. Of a few queries behind many keys it is *lengths*: where the keys of each sequence end, and
where they begin, as numbers on the device, so that a compiled or captured step serves every position.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from wavecrest.dispatch.decision import Decision
from wavecrest.dispatch.keys import dtype_name
from wavecrest.dispatch.tracing import constant_in_graphs
from wavecrest.errors import InvalidArgument, Unsupported
from wavecrest.nn.append import Appended, Unrotated
from wavecrest.nn.kv_store import Cached
from wavecrest.nn.precision import by_autocast
from wavecrest.ops._flash_attention.backend import op as _flash_attention
from wavecrest.ops._flash_attention.call import FLOATS, MAX_HEAD_DIM, FlashAttentionCall
from wavecrest.ops._flash_decoding.backend import op as _flash_decoding
from wavecrest.ops._flash_decoding.call import MAX_TOKENS, FlashDecodingCall

# dtypes that mark a compact mask [B, 1, W, Sk]: the last query is aligned with key Sk − 1, keys after that are not
# used, and a query sees the W keys up to its own. Of KEYS the bytes are flags, 1 for a key that is hidden; of WINDOW
# they are not read, nothing more is hidden. PyTorch computes with neither type, so that a model that works on its
# masks gets an error, not wrong answers
KEYS, WINDOW = torch.float8_e5m2, torch.float8_e4m3fn
# a mask of lengths [B, 1, ROWS + window, 4 or 8], a window of −1 for none, is a WINDOW with more rows than columns, as
# no other has (for Inductor there are these two types on every GPU, and no third). Its bytes are int32, the place
# behind the last key of each sequence, which is the last query's own, and of 8 bytes also that of the first one seen
ROWS = 10
# models ask for dropout by PyTorch's generator
NO_SEED = "dropout without the seed that flash_attention needs"


class AttentionFallback(UserWarning):
    """A call of attention in a model that the op does not take runs in PyTorch, or reads a mask that is written out.

    Also one whose backend, chosen when the model was optimized, refuses it: it runs on dispatch's choice.
    The message has the reason.
    """


@dataclass(frozen=True, slots=True)
class Call:
    """One call of attention that a model made, and what it ran on: a decision, or PyTorch for the reason given."""

    module: str
    queries: int
    keys: int
    decision: Decision | None
    reason: str


class _Seen(NamedTuple):
    """Keys that queries see: of the first `keys` keys, those that `causal`, `window` and `bias` leave."""

    keys: int
    causal: bool
    window: tuple[int, int]
    bias: Tensor | None


_logger = logging.getLogger("wavecrest.attention")
_watchers: list[list[Call]] = []
_warned: set[str] = set()


@contextlib.contextmanager
def watching() -> Iterator[list[Call]]:
    """The calls of `attend` made inside, outside of compiled code."""
    calls: list[Call] = []
    _watchers.append(calls)
    try:
        yield calls
    finally:
        # by identity: two lists without calls are equal
        _watchers[:] = [one for one in _watchers if one is not calls]


def compact_mask(hidden: Tensor | None, window: int, keys: int, device: torch.device | str) -> Tensor:
    """A compact mask: each query sees the `window` keys up to its own, of `keys`, but those that are `hidden`.

    Args:
        hidden: bool [B, keys], or None for none.
        window: at least 1; `keys` where nothing is cut off.
        keys: the last query's own key is the last of them.
        device: of the mask, where nothing is hidden.

    Raises:
        InvalidArgument: the sizes do not fit.
    """
    if not 1 <= window <= keys or (hidden is not None and hidden.shape[-1] != keys):
        raise InvalidArgument(
            f"compact_mask: a window of {window} in {keys} keys, hidden {getattr(hidden, 'shape', 0)}"
        )
    if hidden is None:
        return torch.zeros(1, 1, 1, 1, dtype=WINDOW, device=device).expand(1, 1, window, keys)
    # by way of bytes: Inductor (torch 2.13) writes C++ that does not compile for a view of bool as another type
    return hidden.to(torch.uint8).view(KEYS)[:, None, None, :].expand(-1, 1, window, keys)


def lengths_mask(ends: Tensor, starts: Tensor | None = None, window: int = -1) -> Tensor:
    """A mask of lengths: each query sees the keys up to its own, the last query the last of a sequence's.

    Args:
        ends: int32 [B], how many keys of a cache are used, the queries' own among them; on the device, not checked.
        starts: int32 [B], the place of the first key that is not hidden; None: none is hidden.
        window: keys before its own that a query sees; −1: all.

    Raises:
        InvalidArgument: the tensors are not int32 [B], or the window is less than −1.
    """
    for one in (ends,) if starts is None else (ends, starts):
        if one.dtype != torch.int32 or one.ndim != 1 or one.shape != ends.shape:
            raise InvalidArgument(f"lengths_mask: takes int32 [B], got {one.dtype} {list(one.shape)}")
    if window < -1:
        raise InvalidArgument(f"lengths_mask: a window of {window}; −1 means no window")
    numbers = torch.stack((ends,) if starts is None else (ends, starts), dim=-1)
    return _bytes(numbers).view(WINDOW)[:, None, None, :].expand(-1, 1, ROWS + window, -1)


def is_lengths(mask: Tensor) -> bool:
    """True for a mask that `lengths_mask` has made."""
    return mask.dtype == WINDOW and mask.shape[2] > mask.shape[3]


def _bytes(numbers: Tensor) -> Tensor:
    """int32 [B, n] as uint8 [B, 4 · n], the lowest byte first."""
    if not torch.compiler.is_compiling():
        return numbers.view(torch.uint8)
    # Inductor lays out what it makes as it likes, and no view of another size may follow (torch 2.11)
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=numbers.device)
    return ((numbers[:, :, None] >> shifts) & 255).to(torch.uint8).flatten(1)


def _numbers(found: Tensor) -> Tensor:
    """The inverse of `_bytes`: uint8 [B, 4 · n] as int32 [B, n]."""
    if not torch.compiler.is_compiling():
        return found.view(torch.int32)
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=found.device)
    # the bytes have no bits in common
    return (found.reshape(found.shape[0], -1, 4).to(torch.int32) << shifts).sum(-1, dtype=torch.int32)


def as_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a bool mask is True, −inf elsewhere, in a floating dtype."""
    return torch.zeros((), dtype=dtype, device=visible.device).masked_fill(~visible, float("-inf"))


def _lengths(mask: Tensor) -> tuple[Tensor, Tensor | None, int]:
    """(ends, starts, window) of `lengths_mask`."""
    numbers = _numbers(mask[:, 0, 0].view(torch.uint8))
    return numbers[:, 0], numbers[:, 1] if numbers.shape[1] > 1 else None, mask.shape[2] - ROWS


def _visible(mask: Tensor, queries: int, keys: int) -> Tensor:
    """A mask of lengths written out, bool [B, 1, queries, keys]."""
    ends, starts, window = _lengths(mask)
    own = ends[:, None, None, None] - queries + torch.arange(queries, device=mask.device)[:, None]
    j = torch.arange(keys, device=mask.device)
    visible = j <= own
    if window >= 0:
        visible = visible & (j >= own - window)
    return visible if starts is None else visible & (j >= starts[:, None, None, None])


def _seen(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool | None) -> _Seen:
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        causal = queries > 1 and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        # what comes after is the room that a static cache has left
        return _Seen(queries if causal and keys > queries else keys, causal, (-1, -1), None)
    if is_lengths(mask):
        mask = _visible(mask, queries, keys)
    if mask.dtype in (KEYS, WINDOW):
        width, keys = mask.shape[2], mask.shape[3]
        bias = as_bias(mask[:, :, :1].view(torch.uint8) == 0, query.dtype) if mask.dtype == KEYS else None
        return _Seen(keys, True, (width - 1, 0) if width < keys else (-1, -1), bias)
    return _Seen(keys, False, (-1, -1), as_bias(mask, query.dtype) if mask.dtype == torch.bool else mask)


def attend(
    module: nn.Module,
    query: Tensor | Unrotated,
    key: Tensor | Cached | Appended,
    value: Tensor | Cached | Appended,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    **_more: Any,
) -> tuple[Tensor, None]:
    """Attention under transformers' interface (`AttentionInterface`), without the weights that "eager" returns.

    What a model passes beside this is not looked at: a `sliding_window` is in the mask too, where it hides anything.

    Args:
        module: asked for `is_causal` where neither mask nor argument say.
        query: [B, H, Sq, D] of a floating dtype; or what a step that appends here has in its place.
        key, value: [B, Hkv, Sk, D or Dv], their heads not repeated; or what a quantized cache, or a step that appends
            here, gives for them.
        attention_mask: None (causal at the upper left, or nothing hidden), compact, of lengths (which runs
            `flash_decoding`), bool, or added to the scores.
        dropout: of the weights.
        scaling: of q · kᵀ, None: 1 / √D.
        is_causal: of a call without a mask.
        position_bias: added to the scores, broadcast to [B, H, Sq, Sk].
        softcap: as for the op, None: none.
        s_aux: sinks [H].
        cache: of continuous batching, which is refused.

    Returns:
        [B, Sq, H, Dv] contiguous, and None.

    Raises:
        InvalidArgument: shapes or dtypes are not those of attention.
        Unsupported: a paged cache; dropout, or a head_dim above 256, together with softcap or sinks.
    """
    if cache is not None:
        raise Unsupported("attention of transformers' continuous batching keeps its keys in pages: use sdpa for it")
    if isinstance(key, Appended):
        assert isinstance(query, Unrotated)
        reason = "a mask that flash_decoding does not take"
        if attention_mask is not None and is_lengths(attention_mask):
            reason = _undecoded(query.x, key.v, dropout, position_bias)
            if not reason:
                step = key.call(query, _lengths(attention_mask)[0])
                return _decoded(module, step, attention_mask, scaling, float(softcap or 0.0), s_aux), None
        warn_fallback(reason, "rotates and appends in launches of their own")
        query, key, value = key.plain(query)
    assert isinstance(query, Tensor) and not isinstance(value, Appended)
    if isinstance(key, Tensor):
        cast = by_autocast(query, key, value)
        query, key, value = cast
    undecoded = ""
    if attention_mask is not None and is_lengths(attention_mask):
        undecoded = _undecoded(query, value.v if isinstance(value, Cached) else value, dropout, position_bias)
        if not undecoded:
            return _decode(module, query, key, value, attention_mask, scaling, float(softcap or 0.0), s_aux), None
    notes = [f"its mask is written out for {undecoded}"] if undecoded else []
    if isinstance(key, Cached):
        key, value = _dequantized(query, key, attention_mask, undecoded, notes)
    assert isinstance(value, Tensor)
    seen = _seen(module, query, key, attention_mask, is_causal)
    if seen.keys != key.shape[2]:
        key, value = key[:, :, : seen.keys], value[:, :, : seen.keys]
    bias = seen.bias
    if position_bias is not None:
        added = position_bias[..., : seen.keys]
        bias = added if bias is None else added + bias
    # in the scores' dtype: PyTorch takes no other
    bias = None if bias is None else bias.to(query.dtype)
    call = FlashAttentionCall(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), "bshd", seen.causal, seen.window, scaling,
        bias, None, float(softcap or 0.0), s_aux,
    )  # fmt: skip
    reason = _refuse(call, dropout, attention_mask)
    _note(type(module).__name__, call, reason, notes)
    if reason:
        return _by_torch(call, dropout, reason), None
    result = _flash_attention(call)
    assert isinstance(result, Tensor)
    return result, None


def _dequantized(
    query: Tensor, cached: Cached, mask: Tensor | None, undecoded: str, notes: list[str]
) -> tuple[Tensor, Tensor]:
    """Keys and values of a quantized cache as tensors, for a call that `flash_decoding` does not take.

    Those of a prompt are its own, unrounded. Others are copied out of the cache, which is said once and noted.
    """
    queries, seen = query.shape[2], cached.store.capacity
    if mask is None:
        # without one, several queries see their own keys alone
        seen = queries if queries > 1 else seen
    elif not is_lengths(mask):
        seen = mask.shape[3]
    if seen != queries:
        reason = undecoded
        if not reason and queries > MAX_TOKENS:
            reason = f"{queries} queries behind earlier tokens, where flash_decoding takes {MAX_TOKENS}"
        reason = reason or "a mask that flash_decoding does not take"
        notes.append(f"its cache is dequantized for {reason}")
        warn_fallback(reason, "reads a dequantized copy of a quantized cache")
    return cached.plain(seen)


def _decode(
    module: nn.Module,
    query: Tensor,
    key: Tensor | Cached,
    value: Tensor | Cached,
    mask: Tensor,
    scaling: float | None,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention under a mask of lengths, over the cache as it lies."""
    ends, _, _ = _lengths(mask)
    if isinstance(key, Cached):
        # new keys and values are rounded and written first
        call = key.store.call(query.transpose(1, 2), key.k.transpose(1, 2), key.v.transpose(1, 2), ends)
    else:
        assert isinstance(value, Tensor)
        call = FlashDecodingCall(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), ends)
    return _decoded(module, call, mask, scaling, softcap, sinks)


def _decoded(
    module: nn.Module,
    call: FlashDecodingCall,
    mask: Tensor,
    scaling: float | None,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """The result of a call with the window and the starts of a mask of lengths, and the options of a model."""
    _, starts, window = _lengths(mask)
    call = call._replace(window=window, softmax_scale=scaling, softcap=softcap, sinks=sinks, seq_starts=starts)
    if _watchers and not torch.compiler.is_compiling():
        decision = _flash_decoding.decide(call)
        for calls in _watchers:
            calls.append(Call(type(module).__name__, call.seqlen_q, call.capacity, decision, decision.reason))
    result = _flash_decoding(call)
    assert isinstance(result, Tensor)
    return result


def _undecoded(query: Tensor, value: Tensor, dropout: float, position_bias: Tensor | None) -> str:
    """The reason why flash_decoding does not take a call under a mask of lengths, or ""."""
    if dropout > 0:
        return "dropout, which flash_decoding does not have"
    if position_bias is not None:
        return "a bias of positions, which flash_decoding does not have"
    head_dim = max(query.shape[3], value.shape[3])
    if head_dim > MAX_HEAD_DIM:
        return f"a head_dim of {head_dim}, above the {MAX_HEAD_DIM} that the op takes"
    return ""


def _refuse(call: FlashAttentionCall, dropout: float, mask: Tensor | None) -> str:
    """The reason why the op does not take a call, or ""."""
    if dropout > 0:
        return NO_SEED
    head_dim = max(call.head_dim, call.head_dim_v)
    if head_dim > MAX_HEAD_DIM:
        return f"a head_dim of {head_dim}, above the {MAX_HEAD_DIM} that the op takes"
    if mask is None and call.causal and call.seqlen_q > call.seqlen_k:
        return "a causal mask aligned at the upper left of fewer keys than queries"
    return ""


def _note(name: str, call: FlashAttentionCall, reason: str, notes: Sequence[str] = ()) -> None:
    if torch.compiler.is_compiling():
        return
    for calls in _watchers:
        decision = None if reason else _flash_attention.decide(call)
        why = reason if decision is None else decision.reason
        if decision is not None:
            why = "; ".join([why, *notes])
        calls.append(Call(name, call.seqlen_q, call.seqlen_k, decision, why))


# Dynamo runs this while it traces, so that a warning is no break of the graph
@constant_in_graphs
def warn_fallback(reason: str, done: str = "runs in PyTorch") -> None:
    """Say, once for a reason, that attention of a model does not run on the op."""
    if reason not in _warned:
        _warned.add(reason)
        _logger.info("attention %s for %s", done, reason)
        warnings.warn(f"attention {done} for {reason}", AttentionFallback, stacklevel=4)


def warn_written_out(reason: str) -> None:
    """Say, once for a reason, that a mask of a few queries behind many keys is written out."""
    warn_fallback(reason, "reads a written-out mask and the whole cache")


def _by_torch(call: FlashAttentionCall, dropout: float, reason: str) -> Tensor:
    """PyTorch's attention of a call that the op does not take."""
    if call.softcap > 0 or call.sinks is not None:
        raise Unsupported(f"attention with softcap or sinks and {reason}: set the model's attention to eager for it")
    warn_fallback(reason)
    q, k, v = (call.bhsd(one) for one in (call.q, call.k, call.v))
    options: dict[str, Any] = {"scale": call.softmax_scale, "dropout_p": dropout, "enable_gqa": call.group > 1}
    if call.causal and call.left < 0 and call.bias is None and call.seqlen_q >= call.seqlen_k:
        options["is_causal"] = True
    elif call.causal:
        i = torch.arange(call.seqlen_q, device=q.device)[:, None] + (call.seqlen_k - call.seqlen_q)
        j = torch.arange(call.seqlen_k, device=q.device)[None, :]
        visible = (j <= i) if call.left < 0 else (j <= i) & (j >= i - call.left)
        options["attn_mask"] = visible if call.bias is None else call.bias + as_bias(visible, q.dtype)
    else:
        options["attn_mask"] = call.bias
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).contiguous()


class RouteSDPA(TorchFunctionMode):
    """Calls of `torch.nn.functional.scaled_dot_product_attention` made inside run `sdpa`.

    Those that other functions of PyTorch make (`multi_head_attention_forward`) do not.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return sdpa(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    layout: str = "bshd",
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, its arguments and meaning, over the op.

    In autocast it computes in its dtype, as PyTorch's does. What the op does not take PyTorch runs, with an
    `AttentionFallback` for the reason. A query that sees nothing has 0.

    Args:
        layout: "bshd" or "bhsd", the order of the result in memory. A model's next operation wants the first.

    Returns:
        [B, H, Sq, Dv] with the strides of a contiguous [B, Sq, H, Dv], or contiguous with "bhsd".
    """
    query, key, value, attn_mask = by_autocast(query, key, value, attn_mask)
    call = sdpa_call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, layout=layout)
    if isinstance(call, str):
        for calls in () if torch.compiler.is_compiling() else _watchers:
            calls.append(Call("scaled_dot_product_attention", query.shape[-2], key.shape[-2], None, call))
        warn_fallback(call)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    _note("scaled_dot_product_attention", call, "")
    result = _flash_attention(call)
    assert isinstance(result, Tensor)
    return result if layout == "bhsd" else result.transpose(1, 2)


def sdpa_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    layout: str = "bshd",
) -> FlashAttentionCall | str:
    """The call of the op that a call of `scaled_dot_product_attention` is; or why it is left to PyTorch.

    Args:
        layout: as `sdpa` takes it.
    """
    reason = _left_to_pytorch(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if reason:
        return reason
    keys = query.shape[2] if is_causal and key.shape[2] > query.shape[2] else key.shape[2]
    if keys != key.shape[2]:
        # PyTorch's causal mask is aligned at the upper left: no query sees these
        key, value = key[:, :, :keys], value[:, :, :keys]
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = as_bias(attn_mask, query.dtype)
    q, k, v = (query, key, value) if layout == "bhsd" else (one.transpose(1, 2) for one in (query, key, value))
    causal = is_causal and query.shape[2] > 1
    return FlashAttentionCall(q, k, v, layout, causal=causal, softmax_scale=scale, bias=bias)


def _left_to_pytorch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> str:
    """The reason why the op does not take a call of PyTorch's attention, or ""; also where PyTorch will raise."""
    if any(one.ndim != 4 or one.is_nested for one in (query, key, value)):
        return "tensors that are not [B, H, S, D]"
    if query.dtype not in FLOATS or key.dtype != query.dtype or value.dtype != query.dtype:
        return f"{dtype_name(query)}, {dtype_name(key)} and {dtype_name(value)}"
    if dropout > 0:
        return NO_SEED
    head_dim = max(query.shape[3], value.shape[3])
    if head_dim > MAX_HEAD_DIM:
        return f"a head_dim of {head_dim}, above the {MAX_HEAD_DIM} that the op takes"
    heads = key.shape[1] == query.shape[1] or (enable_gqa and query.shape[1] % max(key.shape[1], 1) == 0)
    if key.shape[:3] != value.shape[:3] or key.shape[0] != query.shape[0] or not heads:
        return "batches or heads that are broadcast"
    if mask is not None and type(mask) not in (Tensor, nn.Parameter):
        return f"a mask of class {type(mask).__name__}"
    if is_causal and (mask is not None or query.shape[2] > key.shape[2]):
        return "a causal mask aligned at the upper left of fewer keys than queries, or beside another mask"
    if mask is not None and (mask.dtype not in (torch.bool, query.dtype) or not 1 <= mask.ndim <= 4):
        return f"a mask {dtype_name(mask)} {list(mask.shape)}"
    if scale is not None and not 0 <= scale < math.inf:
        return f"a scale of {scale}"
    return ""
