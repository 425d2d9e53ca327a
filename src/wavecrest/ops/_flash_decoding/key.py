"""Decoding's shape key, and what a configuration sees of it."""

from __future__ import annotations

import wavecrest.ops._flash_decoding.config as _config
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name, needs_grad, row_bucket
from wavecrest.ops._flash_decoding.call import Operands

KEY_FIELDS = (
    "batch", "tokens", "heads", "kv_heads", "d", "dv", "capacity", "page", "dtype", "cache", "window", "alibi",
    "softcap", "sinks", "lse", "invariant", "access", "device", "grad", "scales",
)  # fmt: skip


def _name(given: Operands) -> str:
    return str(given.k_cache.dtype).removeprefix("torch.")


def _scales(given: Operands) -> str:
    """What has a scale of its own."""
    if given.k_scale is None:
        return "none"
    if not given.by_token:
        return "heads"
    return f"{given.groups} groups" if given.four_bits else "tokens"


def _access(given: Operands) -> str:
    """How columns lie, whether sequences begin behind hidden keys, and what is done before attention."""
    words = ["columns" if given.dense else "any"]
    if given.seq_starts is not None:
        words.append("starts")
    if given.k is not None:
        words.append("append")
    if given.cos is not None:
        words.append(f"{given.rotary_style}:{dtype_name(given.cos)}")
    return " ".join(words)


def key_of(given: Operands) -> Key:
    """The shape key of a call; `page` 0 where the cache has none, `batch` 0 where it must not choose anything."""
    return (
        0 if given.batch_invariant else row_bucket(given.batch),
        given.tokens,
        given.heads,
        given.kv_heads,
        given.columns,
        given.v_columns,
        row_bucket(given.capacity),
        0 if given.block_table is None else given.page,
        dtype_name(given.q),
        _name(given),
        given.window >= 0,
        given.alibi_slopes is not None,
        given.softcap > 0,
        given.sinks is not None,
        given.return_lse,
        given.batch_invariant,
        _access(given),
        given.q.device.type,
        needs_grad(given.q, given.k_cache, given.v_cache, given.sinks, given.alibi_slopes, given.cos, given.sin),
        _scales(given),
    )


def shape_of(key: Key) -> _config.Shape:
    """What a configuration is chosen by."""
    part = dict(zip(KEY_FIELDS, key, strict=True))
    bits = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16}
    pairs = 0 if part["invariant"] else part["batch"] * part["kv_heads"]
    rows = part["tokens"] * (part["heads"] // part["kv_heads"])
    columns = max(part["d"], part["dv"])
    left = part["window"] or "starts" in part["access"].split()
    more = part["alibi"] + part["softcap"] + left
    groups = int(part["scales"].split()[0]) if part["scales"].endswith("groups") else 0
    return _config.Shape(
        pairs, rows, part["capacity"], part["page"], columns, bits[part["dtype"]], part["cache"], more, groups
    )
