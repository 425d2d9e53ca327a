"""The shape key of attention over a latent cache, and what a configuration sees of it."""

from __future__ import annotations

import wavecrest.ops._mla_decode.config as _config
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name, needs_grad, row_bucket
from wavecrest.ops._mla_decode.call import Operands

KEY_FIELDS = (
    "batch", "tokens", "heads", "latent", "rotary", "nope", "values", "capacity", "page", "dtype", "style", "table",
    "positions", "capped", "lse", "invariant", "access", "device", "grad",
)  # fmt: skip


def columns_apart(given: Operands) -> bool:
    """True if columns of something do not lie next to each other."""
    tensors = (given.q_nope, given.q_rope, given.latent_cache, given.cos, given.sin)
    return any(one is not None and one.stride(-1) != 1 and one.shape[-1] > 1 for one in tensors)


def weights_apart(given: Operands) -> bool:
    """True if neither rows nor columns of a weight lie side by side."""
    return any(one is not None and 1 not in one.stride()[1:] for one in (given.w_uk, given.w_uv))


def key_of(given: Operands) -> Key:
    """The shape key of a call; `page` 0 where the cache has none."""
    return (
        row_bucket(given.batch),
        row_bucket(given.tokens),
        given.heads,
        given.latent,
        given.rotary,
        given.nope,
        given.values,
        row_bucket(given.capacity),
        0 if given.block_table is None else given.page,
        dtype_name(given.q_nope),
        given.style,
        None if given.cos is None else dtype_name(given.cos),
        None if given.positions is None else dtype_name(given.positions),
        given.capped,
        given.return_lse,
        given.batch_invariant,
        "apart" if columns_apart(given) else "weights apart" if weights_apart(given) else "columns",
        given.q_nope.device.type,
        needs_grad(*given.floats),
    )


def shape_of(key: Key) -> _config.Shape:
    """What a configuration is chosen by."""
    part = dict(zip(KEY_FIELDS, key, strict=True))
    bits = 32 if part["dtype"] in ("float32", "float64") else 16
    batch = 0 if part["invariant"] else part["batch"]
    width = max(16, _layout.power_of_two(part["latent"]))
    more = (part["capped"] == 1) + (part["style"] != "none")
    return _config.Shape(batch, part["tokens"] * part["heads"], part["capacity"], width, bits, part["page"], more)
