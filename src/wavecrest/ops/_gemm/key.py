"""The product's shape key, and what a configuration sees of it."""

from __future__ import annotations

import torch

import wavecrest.ops._gemm.config as _config
import wavecrest.ops._gemm.launch as _launch
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import needs_grad, row_bucket
from wavecrest.ops._gemm.call import GATED, Operands, kinds

KEY_FIELDS = (
    "rows", "columns", "k", "a", "b", "form", "group", "scales", "bias", "activation", "residual", "out", "precision",
    "batch", "order", "device", "leading", "grad",
)  # fmt: skip


def dtype_text(dtype: torch.dtype) -> str:
    """A dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def _form(given: Operands) -> str:
    """How b is stored, with what keeps backends from 4-bit codes."""
    text = given.form
    if given.zero is not None:
        text += " zeros"
    if given.form == "int4" and given.b.stride(-1) % 16 != 0:
        text += " unaligned"
    if given.tail is not None:
        text += f" tail {given.tails}"
    return text


def key_of(given: Operands) -> Key:
    """The shape key of a call."""
    a_kind, b_kind = kinds(given)
    a_order, b_order = _launch.orders(given)
    walked = _launch.leading(given)
    if walked <= 3 and _launch.cannot_walk(given) is not None:
        # strides of a batch, the residual or the norm that the kernels decline, which the choice must know
        walked = 0
    tensors = (
        given.a, given.b, given.bias, given.scale_a, given.scale_b, given.residual, given.out_scale, given.norm_weight,
        given.tail,
    )  # fmt: skip
    return (
        row_bucket(given.M),
        given.N,
        given.K,
        dtype_text(given.a.dtype),
        dtype_text(given.b.dtype),
        _form(given),
        given.group,
        f"{a_kind} {b_kind}",
        None if given.bias is None else given.bias_along,
        given.activation,
        given.residual is not None,
        dtype_text(given.dtype),
        given.precision,
        0 if given.flat else row_bucket(given.batches),
        f"{('any', 'k', 'm')[a_order]} {('any', 'k', 'n')[b_order]} {_launch.access_bytes(given)}",
        given.a.device.type,
        walked,
        needs_grad(*tensors),
    )


def shape_of(key: Key) -> _config.Shape:
    """What a configuration is chosen by."""
    part = dict(zip(KEY_FIELDS, key, strict=True))
    bits = {"float32": 32, "float16": 16, "bfloat16": 16}
    a_bits = bits.get(part["a"], 8)
    b_bits = 4 if part["form"].startswith("int4") else bits.get(part["b"], 8)
    step = 128 if "block" in part["scales"] else part["group"]
    access = int(part["order"].split()[-1])
    described = access == 16 and part["form"] == "plain" and part["a"][:4] == part["b"][:4] and part["leading"] == 1
    normed = part["scales"].startswith("norm")
    described = described and part["batch"] == 0 and part["k"] > 0 and not normed
    ieee = a_bits == 32 and part["precision"] == "ieee"
    return _config.Shape(
        part["rows"], part["columns"], part["k"], a_bits, b_bits, max(1, part["batch"]), step,
        part["activation"] in GATED, described, ieee, access, normed, "tail" in part["form"],
    )  # fmt: skip
