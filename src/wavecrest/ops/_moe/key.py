"""The shape key of the mixture-of-experts layer, and what a configuration is chosen by."""

from __future__ import annotations

from torch import Tensor

from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name, row_bucket
from wavecrest.ops._moe.call import BLOCK, UNIT, MoeCall, scale_kind
from wavecrest.ops._moe.config import Shape

KEY_FIELDS = (
    "tokens", "experts", "topk", "hidden", "intermediate", "dtype", "ids", "activation", "interleaved", "b1", "b2",
    "weights", "w1_scale", "w2_scale", "w1", "w2", "x", "device", "grad",
)  # fmt: skip


def order_of(matrix: Tensor) -> str:
    """Which of the last two dimensions is contiguous: "columns" (the last), "rows", or "any"."""
    rows, columns = matrix.shape[-2:]
    if matrix.stride(-1) == 1 or columns == 1:
        return "columns"
    return "rows" if matrix.stride(-2) == 1 or rows == 1 else "any"


def _kind(call: MoeCall, second: bool) -> str | None:
    """The kind of the scales of w1 or of w2, with the columns of a group and whether it has a zero point, or None."""
    kind, columns = scale_kind(call, second)
    if kind == "group":
        return f"group {columns}" if call.w1_zero is None else f"group {columns} zeros"
    return None if kind == "none" else kind


def key_of(call: MoeCall) -> Key:
    """The shape key of a call: KEY_FIELDS."""
    return (
        row_bucket(call.num_tokens),
        call.experts,
        call.k,
        call.hidden,
        call.intermediate,
        dtype_name(call.x),
        dtype_name(call.topk_ids),
        call.activation,
        call.interleaved,
        None if call.b1 is None else dtype_name(call.b1),
        None if call.b2 is None else dtype_name(call.b2),
        dtype_name(call.w1),
        _kind(call, False),
        _kind(call, True),
        order_of(call.w1),
        order_of(call.w2),
        order_of(call.x),
        call.x.device.type,
        call.needs_grad,
    )


def shape_of(key: Key) -> Shape:
    """The parts of a key that a configuration depends on."""
    part = dict(zip(KEY_FIELDS, key, strict=True))
    bits = 32 if part["dtype"] in ("float32", "float64") else 16
    made = Shape(part["tokens"], part["experts"], part["topk"], part["hidden"], part["intermediate"], bits)
    kinds = {str(part["w1_scale"]), str(part["w2_scale"])}
    if part["weights"] == "uint8":
        made = made._replace(least=UNIT)
    if "e8m0" in kinds:
        # they multiply values, where x's dtype has all of these
        return made._replace(step=UNIT) if part["dtype"] == "float16" else made
    groups = [int(kind.split()[1]) for kind in kinds if kind.startswith("group")]
    return made._replace(step=max(UNIT, min(groups)) if groups else BLOCK if "block" in kinds else 0)
