"""The shape key of an attention call, and the part of it that configurations are chosen by."""

from __future__ import annotations

import wavecrest.ops._flash_attention.config as _config
import wavecrest.ops._flash_attention.launch as _launch
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name, needs_grad, row_bucket
from wavecrest.ops._flash_attention.call import FlashAttentionCall

KEY_FIELDS = (
    "batch", "queries", "keys", "heads", "kv_heads", "d", "dv", "dtype", "packed", "left", "right", "diagonal",
    "bias", "alibi", "softcap", "sinks", "lse", "access", "device", "grad",
)  # fmt: skip


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
        _launch.access(call),
        call.q.device.type,
        needs_grad(*call.differentiable),
    )


def shape_of(key: Key) -> _config.Shape:
    """The parts of a key that a configuration depends on."""
    part = dict(zip(KEY_FIELDS, key, strict=True))
    words = part["dtype"].split()
    bits = 32 if words[0] in ("float32", "float64") else 16 if words[0] in ("float16", "bfloat16") else 8
    dropout = "dropout" in words
    more = [part["bias"] is not None, part["alibi"], part["softcap"] == 1, part["left"] >= 0, dropout].count(True)
    kv_dtype = words[0] if bits == 8 else words[2] if "kv" in words else None
    return _config.Shape(
        part["queries"],
        max(part["d"], part["dv"]),
        bits,
        part["right"] >= 0,
        more,
        kv_dtype,
        dropout,
        part["left"] >= 0,
    )
