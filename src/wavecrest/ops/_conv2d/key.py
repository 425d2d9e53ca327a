"""The shape key of a convolution, and what a configuration is chosen by."""

from __future__ import annotations

from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name, row_bucket
from wavecrest.ops._conv2d.call import Conv2dCall
from wavecrest.ops._conv2d.config import Shape
from wavecrest.ops._conv2d.launch import weight_order, x_order

KEY_FIELDS = (
    "pixels", "outputs", "channels", "r", "s", "groups", "stride", "dilation", "dtype", "x", "weight", "result",
    "bias", "activation", "device", "grad",
)  # fmt: skip
# the contiguous dimension of a tensor, by the kernel's number for it
_ORDERS = ("any", "channels", "lines")


def key_of(call: Conv2dCall) -> Key:
    """The shape key of a call: KEY_FIELDS."""
    (stride_h, stride_w), (dil_h, dil_w) = call.strides, call.dilations
    taps_r, taps_s = call.kernel
    return (
        row_bucket(call.M),
        call.weight.shape[0],
        call.x.shape[1],
        taps_r,
        taps_s,
        call.groups,
        f"{stride_h}x{stride_w}",
        f"{dil_h}x{dil_w}",
        dtype_name(call.x),
        _ORDERS[x_order(call.x)],
        _ORDERS[weight_order(call.weight)],
        "channels_last" if call.channels_last else "contiguous",
        None if call.bias is None else dtype_name(call.bias),
        _epilogue(call),
        call.x.device.type,
        call.needs_grad,
    )


def _epilogue(call: Conv2dCall) -> str | None:
    """The activation, with "add_" in front where a residual is added before it ("add" without an activation)."""
    if call.residual is None:
        return call.activation
    return "add" if call.activation is None else f"add_{call.activation}"


def shape_of(key: Key) -> Shape:
    """The parts of a key that a configuration depends on."""
    part = dict(zip(KEY_FIELDS, key, strict=True))
    groups, bits = part["groups"], 32 if part["dtype"] in ("float32", "float64") else 16
    return Shape(
        part["pixels"], part["outputs"] // groups, part["channels"] // groups, part["r"] * part["s"], groups, bits
    )
