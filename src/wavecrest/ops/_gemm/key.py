"""The shape key of a GEMM, and what a configuration is chosen by."""

from __future__ import annotations

import wavecrest.ops._gemm.config as _config
import wavecrest.ops._gemm.launch as _launch
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import name_of, row_bucket
from wavecrest.ops._gemm.call import FAST_ACCUM, FLOAT8, GATED, NIBBLES, GemmCall, kinds

KEY_FIELDS = (
    "rows", "columns", "k", "a", "b", "form", "group", "scales", "bias", "activation", "residual", "out", "precision",
    "batch", "order", "device", "leading", "grad",
)  # fmt: skip


def _form(call: GemmCall) -> str:
    """The storage of b, with the properties that make backends refuse 4-bit values and 8-bit floats."""
    text = call.form
    if call.zero is not None:
        text += " zeros"
    float8 = call.a.dtype in FLOAT8 and call.b.dtype in FLOAT8 and call.b.stride(-2) == 1
    if (call.form in NIBBLES or float8) and call.b.stride(-1) % 16 != 0:
        text += " unaligned"
    if call.tail is not None:
        text += f" tail {call.tails}"
    return text


def key_of(call: GemmCall) -> Key:
    """The shape key of a call."""
    a_kind, b_kind = kinds(call)
    a_order, b_order = _launch.orders(call)
    walked = _launch.leading(call)
    if walked <= 3 and _launch.refuse_strides(call) is not None:
        # the kernels refuse the strides of the batch, the residual or the norm, which the choice must know
        walked = 0
    return (
        row_bucket(call.M),
        call.N,
        call.K,
        name_of(call.a.dtype),
        name_of(call.b.dtype),
        _form(call),
        call.group,
        f"{a_kind} {b_kind}",
        None if call.bias is None else call.bias_along,
        call.activation,
        call.residual is not None,
        name_of(call.dtype),
        call.precision,
        0 if call.flat else row_bucket(call.batches),
        f"{('any', 'k', 'm')[a_order]} {('any', 'k', 'n')[b_order]} {_launch.access_bytes(call)}",
        call.a.device.type,
        walked,
        call.needs_grad,
    )


def shape_of(key: Key) -> _config.Shape:
    """The parts of a key that a configuration depends on."""
    part = dict(zip(KEY_FIELDS, key, strict=True))
    bits = {"float32": 32, "float16": 16, "bfloat16": 16}
    a_bits = bits.get(part["a"], 8)
    b_bits = 4 if part["form"].startswith(NIBBLES) else bits.get(part["b"], 8)
    step = 128 if "block" in part["scales"] else part["group"]
    if part["form"].startswith("mxfp4") and part["a"] != "float16":
        # its scales multiply values, not sums
        step = 0
    access = int(part["order"].split()[-1])
    plain = part["form"] == "plain" and part["a"][:4] == part["b"][:4]
    normed = part["scales"].startswith("norm")
    walked = part["leading"] == 1 and part["batch"] == 0 and part["k"] > 0
    has_descriptors = access == 16 and plain and walked and not normed
    thrice = a_bits == 32 and part["precision"] == "tf32x3"
    ieee = a_bits == 32 and part["precision"] != "tf32"
    unit_sums = part["a"].startswith("float8") and part["b"].startswith("float8") and part["precision"] != FAST_ACCUM
    return _config.Shape(
        part["rows"], part["columns"], part["k"], a_bits, b_bits, max(1, part["batch"]), step,
        part["activation"] in GATED, has_descriptors, ieee, thrice, access, normed, "tail" in part["form"],
        unit_sums,
    )  # fmt: skip
