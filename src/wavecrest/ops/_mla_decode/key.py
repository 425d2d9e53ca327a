"""The shape key of attention over a latent cache, and what a configuration is chosen by."""

from __future__ import annotations

import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name, row_bucket
from wavecrest.ops._mla_decode.call import MlaDecodeCall
from wavecrest.ops._mla_decode.config import Shape

KEY_FIELDS = (
    "batch", "tokens", "heads", "latent", "rotary", "nope", "values", "capacity", "page", "dtype", "style", "table",
    "positions", "capped", "lse", "invariant", "access", "device", "grad",
)  # fmt: skip


def strided_columns(call: MlaDecodeCall) -> bool:
    """True if the columns of a tensor, weights aside, do not lie next to each other."""
    tensors = (call.q_nope, call.q_rope, call.latent_cache, call.cos, call.sin)
    return any(one is not None and one.stride(-1) != 1 and one.shape[-1] > 1 for one in tensors)


def strided_weights(call: MlaDecodeCall) -> bool:
    """True if neither the rows nor the columns of a weight lie next to each other."""
    return any(one is not None and 1 not in one.stride()[1:] for one in (call.w_uk, call.w_uv))


def key_of(call: MlaDecodeCall) -> Key:
    """The shape key of a call: KEY_FIELDS; `page` is 0 where the cache has no pages."""
    return (
        row_bucket(call.batch),
        row_bucket(call.seqlen_q),
        call.heads,
        call.latent_dim,
        call.head_dim_rope,
        call.head_dim_nope,
        call.head_dim_v,
        row_bucket(call.max_seqlen_k),
        0 if call.block_table is None else call.page_size,
        dtype_name(call.q_nope),
        call.style,
        None if call.cos is None else dtype_name(call.cos),
        None if call.positions is None else dtype_name(call.positions),
        call.capped,
        call.return_lse,
        call.batch_invariant,
        "apart" if strided_columns(call) else "weights apart" if strided_weights(call) else "columns",
        call.q_nope.device.type,
        call.needs_grad,
    )


def shape_of(key: Key) -> Shape:
    """The parts of a key that a configuration depends on."""
    part = dict(zip(KEY_FIELDS, key, strict=True))
    bits = 32 if part["dtype"] in ("float32", "float64") else 16
    batch = 0 if part["invariant"] else part["batch"]
    width = max(16, _layout.power_of_two(part["latent"]))
    extras = (part["capped"] == 1) + (part["style"] != "none")
    rope_width = max(16, _layout.power_of_two(part["rotary"]))
    return Shape(batch, part["tokens"] * part["heads"], part["capacity"], width, bits, part["page"], extras, rope_width)
