"""Attention's shape key, and what a configuration sees of it."""

from __future__ import annotations

import wavecrest.ops._flash_attention.config as _config
import wavecrest.ops._flash_attention.launch as _launch
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name, needs_grad, row_bucket
from wavecrest.ops._flash_attention.call import Operands

KEY_FIELDS = (
    "batch", "queries", "keys", "heads", "kv_heads", "d", "dv", "dtype", "packed", "left", "right", "diagonal",
    "bias", "alibi", "softcap", "sinks", "lse", "access", "device", "grad",
)  # fmt: skip


def _dtypes(given: Operands) -> str:
    """q's dtype; with 8-bit k and v also theirs, whether weights are too, the result's if it is chosen; dropout."""
    words = [dtype_name(given.q)]
    if given.quantized:
        if given.q.dtype != given.k.dtype:
            words.append(f"kv {dtype_name(given.k)}")
        if given.p_descale is not None:
            words.append("p")
        if given.dtype != given._replace(out_dtype=None).dtype:
            words.append(f"to {str(given.dtype).removeprefix('torch.')}")
    if given.dropout:
        words.append("dropout")
    return " ".join(words)


def key_of(given: Operands) -> Key:
    """The shape key of a call; `left` and `right` −1 where nothing is hidden on that side."""
    return (
        row_bucket(given.batch),
        row_bucket(given.queries),
        row_bucket(given.keys),
        given.heads,
        given.kv_heads,
        given.columns,
        given.v_columns,
        _dtypes(given),
        given.packed,
        row_bucket(given.left),
        row_bucket(given.right),
        # words: inside torch.compile a comparison of lengths is no constant
        "blind" if given.blind else "square" if given.square else "other",
        None if given.bias is None else dtype_name(given.bias),
        given.alibi_slopes is not None,
        given.capped,
        given.sinks is not None,
        given.return_lse,
        _launch.access(given),
        given.q.device.type,
        needs_grad(*given.differentiable),
    )


def shape_of(key: Key) -> _config.Shape:
    """What a configuration is chosen by."""
    part = dict(zip(KEY_FIELDS, key, strict=True))
    words = part["dtype"].split()
    bits = 32 if words[0] in ("float32", "float64") else 16 if words[0] in ("float16", "bfloat16") else 8
    dropout = "dropout" in words
    more = [part["bias"] is not None, part["alibi"], part["softcap"] == 1, part["left"] >= 0, dropout].count(True)
    codes = words[0] if bits == 8 else words[2] if "kv" in words else None
    return _config.Shape(part["queries"], max(part["d"], part["dv"]), bits, part["right"] >= 0, more, codes, dropout)
