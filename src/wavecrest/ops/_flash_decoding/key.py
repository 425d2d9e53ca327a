"""The shape key of a decoding call, and the part of it that configurations are chosen by."""

from __future__ import annotations

import wavecrest.ops._flash_decoding.config as _config
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name, needs_grad, row_bucket
from wavecrest.ops._flash_decoding.call import FlashDecodingCall

KEY_FIELDS = (
    "batch", "tokens", "heads", "kv_heads", "d", "dv", "capacity", "page", "dtype", "cache", "window", "alibi",
    "softcap", "sinks", "lse", "invariant", "access", "device", "grad", "scales",
)  # fmt: skip


def _name(call: FlashDecodingCall) -> str:
    return str(call.k_cache.dtype).removeprefix("torch.")


def _scales(call: FlashDecodingCall) -> str:
    """Granularity of the cache's scales: none, one a head, one a token, or one a group of a token."""
    if call.k_scale is None:
        return "none"
    if not call.by_token:
        return "heads"
    return f"{call.groups} groups" if call.four_bits else "tokens"


def _access(call: FlashDecodingCall) -> str:
    """Contiguity of rows, "starts" if sequences begin after hidden keys, and the work that is done before attention."""
    words = ["columns" if call.dense else "any"]
    if call.seq_starts is not None:
        words.append("starts")
    if call.k is not None:
        words.append("append")
    if call.cos is not None:
        words.append(f"{call.rotary_style}:{dtype_name(call.cos)}")
    return " ".join(words)


def key_of(call: FlashDecodingCall) -> Key:
    """The shape key of a call; `page` 0 where the cache has none, `batch` 0 where it must not choose anything."""
    return (
        0 if call.batch_invariant else row_bucket(call.batch),
        call.seqlen_q,
        call.heads,
        call.kv_heads,
        call.head_dim,
        call.head_dim_v,
        row_bucket(call.capacity),
        0 if call.block_table is None else call.page,
        dtype_name(call.q),
        _name(call),
        call.window >= 0,
        call.alibi_slopes is not None,
        call.softcap > 0,
        call.sinks is not None,
        call.return_lse,
        call.batch_invariant,
        _access(call),
        call.q.device.type,
        needs_grad(call.q, call.k_cache, call.v_cache, call.sinks, call.alibi_slopes, call.cos, call.sin),
        _scales(call),
    )


def shape_of(key: Key) -> _config.Shape:
    """The parts of a key that a configuration depends on."""
    part = dict(zip(KEY_FIELDS, key, strict=True))
    bits = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16}
    pairs = 0 if part["invariant"] else part["batch"] * part["kv_heads"]
    rows = part["tokens"] * (part["heads"] // part["kv_heads"])
    head_dim = max(part["d"], part["dv"])
    left = part["window"] or "starts" in part["access"].split()
    more = part["alibi"] + part["softcap"] + left
    groups = int(part["scales"].split()[0]) if part["scales"].endswith("groups") else 0
    return _config.Shape(
        pairs, rows, part["capacity"], part["page"], head_dim, bits[part["dtype"]], part["cache"], more, groups
    )
