"""The convolution's launch: how image and weight are indexed (strides), and what the kernel is compiled for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._conv2d.call import Conv2dCall
from wavecrest.ops._conv2d.kernel import _conv2d_kernel
from wavecrest.ops.common.activation import ACTIVATIONS

# the contiguous dimension, by the kernel's number for it
ANY, CHANNELS, LINES = 0, 1, 2


def x_order(x: Tensor) -> int:
    """CHANNELS, LINES or ANY, by x's contiguous dimension; one of size 1 counts only if no other is contiguous."""
    if x.stride(1) == 1 and x.shape[1] > 1:
        return CHANNELS
    if x.stride(3) == 1 and x.shape[3] > 1:
        return LINES
    return CHANNELS if x.stride(1) == 1 else LINES if x.stride(3) == 1 else ANY


def weight_order(weight: Tensor) -> int:
    """CHANNELS or LINES where a filter is dense in the order r, s, c or c, r, s; else ANY."""
    _, channels, taps_r, taps_s = weight.shape
    _, stride_c, stride_r, stride_s = weight.stride()

    def dense(*dims: tuple[int, int]) -> bool:
        inside = 1
        for size, stride in dims:
            if size > 1 and stride != inside:
                return False
            inside = inside * size
        return True

    c, r, s = (channels, stride_c), (taps_r, stride_r), (taps_s, stride_s)
    # with one channel both are true: LINES, where the kernel takes the stride of taps as 1, not that of channels
    if channels > 1 and dense(c, s, r):
        return CHANNELS
    if dense(s, r, c):
        return LINES
    return ANY


class Walk(NamedTuple):
    """How the kernel reads x and weight; strides in units of `x_align` and `w_align`, K in units of `k_align`.

    `inner`: K runs over (r, s, c), not (c, r, s). `unit`: the size that a step divides, channels or all of K.
    """

    x_order: int
    w_order: int
    x_align: int
    w_align: int
    k_align: int
    inner: bool
    unit: int
    x_strides: tuple[int, int, int, int]
    w_strides: tuple[int, int, int, int]


def _strides(x: Tensor) -> tuple[int, int, int, int]:
    """The strides, 0 along dimensions of one element, where a stride says nothing and may have any alignment."""
    b, c, h, w = (stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    return b, c, h, w


def walk(call: Conv2dCall, flat: bool) -> Walk:
    """How a call's x and weight are read: `flat`, along all of K, or tap by tap."""
    x_by, w_by = x_order(call.x), weight_order(call.weight)
    x_strides, w_strides = _strides(call.x), _strides(call.weight)
    if flat:
        # x by single elements; what is dense in weight is read along K
        inner = w_by == CHANNELS or (w_by == ANY and x_by == CHANNELS)
        align = _layout.alignment(call.K, (w_strides[0], 0, 0)) if w_by != ANY else 1
        if w_by != ANY:
            w_strides = (w_strides[0] // align, 0, 0, 0)
        return Walk(x_by, w_by, 1, align, align, inner, call.K, x_strides, w_strides)
    along = w_strides[1] == 1
    x_units = (x_strides[0], x_strides[2], x_strides[3]) if x_by == CHANNELS else (1, 0, 0)
    w_units = (w_strides[0], w_strides[2], w_strides[3]) if along else (1, 0, 0)
    x_align = _layout.alignment(call.channels, x_units)
    w_align = _layout.alignment(call.channels, w_units)
    return Walk(
        x_by, CHANNELS if along else ANY, x_align, w_align, max(x_align, w_align), True, call.channels,
        (x_strides[0] // x_align, x_strides[1] // (1 if x_by == CHANNELS else x_align),
         x_strides[2] // x_align, x_strides[3] // x_align),
        (w_strides[0] // w_align, w_strides[1] // (1 if along else w_align),
         w_strides[2] // w_align, w_strides[3] // w_align),
    )  # fmt: skip


# offsets from here on need more than 32 bits; leaves room for the rows of a tile that have no pixel
FAR = (1 << 31) - (1 << 16)


def _extent(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """One more than the largest offset."""
    last = 1
    for size, stride in zip(sizes, strides, strict=True):
        last = last + (size - 1) * stride
    return last


def _wide(call: Conv2dCall) -> bool:
    """True if an offset may need more than 31 bits, also one of a pixel in the padding."""
    x, weight, shape = call.x, call.weight, call.shape
    above, below, left, right = call.pads
    padded = (x.shape[0], x.shape[1], x.shape[2] + above + below, x.shape[3] + left + right)
    far = _extent(padded, x.stride()) >= FAR or _extent(tuple(weight.shape), weight.stride()) >= FAR
    return far or shape[0] * shape[1] * shape[2] * shape[3] >= FAR


def launch(call: Conv2dCall, y: Tensor, config: Config, arch: Arch | None) -> _launcher.Launch:
    """The kernel's launch for a call that has pixels: y is memory for the result."""
    flat = config["FLAT"] == 1
    how = walk(call, flat)
    (stride_h, stride_w), (dil_h, dil_w), (taps_r, taps_s) = call.strides, call.dilations, call.kernel
    above, below, left, right = call.pads
    block_k, out_w = config["BLOCK_K"], call.image[1]
    tiles_m = (call.M + config["BLOCK_M"] - 1) // config["BLOCK_M"]
    tiles_n = (call.N + config["BLOCK_N"] - 1) // config["BLOCK_N"]
    steps = (how.unit + block_k - 1) // block_k * (1 if flat else taps_r * taps_s)
    # a step over K in the numbers of its order
    middles, inners = (taps_s, call.channels) if how.inner else (taps_r, taps_s)
    n_align = _layout.alignment(call.N, (0, 0, 0))
    return _launcher.Launch(
        _conv2d_kernel,
        (tiles_m * tiles_n * call.groups,),
        (
            call.x, call.weight, call.x if call.bias is None else call.bias, y,
            call.M, call.N // n_align, how.unit // how.k_align, tiles_m, tiles_n, call.groups, steps,
            out_w, call.image[0] * out_w, call.x.shape[2], call.x.shape[3], taps_r, taps_s,
            stride_h, stride_w, above, left, dil_h, dil_w,
            block_k // inners // middles, block_k // inners % middles, block_k % inners,
            *how.x_strides, *how.w_strides, 0 if call.bias is None else call.bias.stride(0),
        ),
        {
            "X_ORDER": how.x_order,
            "W_ORDER": how.w_order,
            "X_ALIGN": how.x_align,
            "W_ALIGN": how.w_align,
            "K_ALIGN": how.k_align,
            "N_ALIGN": n_align,
            "CHANNELS_INNER": how.inner,
            "CHANNELS_LAST": call.channels_last,
            "POINT": taps_r * taps_s == 1,
            "PADDED": max(above, below, left, right) > 0,
            "EVEN_K": how.unit % block_k == 0,
            "WIDE": _wide(call),
            "BIAS": call.bias is not None,
            "ACTIVATION": 0 if call.activation is None else ACTIVATIONS[call.activation],
            "XCDS": 1 if arch is None else arch.xcds,
        },
        config,
    )  # fmt: skip


def bind(call: Conv2dCall, config: Config) -> Callable[[Conv2dCall], Tensor]:
    """The function that launches the kernel for calls with the signature of this one."""
    shape, dtype, device, layout = call.shape, call.x.dtype, call.x.device, call.memory_format
    if call.M == 0:
        return lambda _call: torch.empty(shape, dtype=dtype, device=device, memory_format=layout)
    made = launch(call, call.x, config, _target.arch())
    start = _launcher.starter(made, device)

    def run(call: Conv2dCall) -> Tensor:
        x, bias = call.x, call.bias
        y = torch.empty(shape, dtype=dtype, device=device, memory_format=layout)
        start(x, call.weight, x if bias is None else bias, y)
        return y

    return run
