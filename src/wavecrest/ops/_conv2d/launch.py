"""The convolution's launch: how image and weight are walked, and what the kernel is compiled for."""

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
from wavecrest.ops._conv2d.call import Operands, Pair
from wavecrest.ops._conv2d.kernel import _conv2d_kernel
from wavecrest.ops.common.activation import ACTIVATIONS

# what is contiguous, as the kernel numbers it
ANY, CHANNELS, LINES = 0, 1, 2
TENSORS = 4


def x_order(x: Tensor) -> int:
    """CHANNELS, LINES or ANY: what lies side by side in x. One channel, or one pixel, lies beside nothing."""
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
    # of one channel both are true; the kernel then takes the stride of taps as 1, not that of channels
    if channels > 1 and dense(c, s, r):
        return CHANNELS
    if dense(s, r, c):
        return LINES
    return ANY


class Walk(NamedTuple):
    """How the kernel goes through x and weight; strides in units of `x_align` and `w_align`, K in `k_align`.

    `inner`: a place in K is (r, s, c), not (c, r, s). `unit`: what `k_units` counts, channels or all of K.
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
    """Strides, 0 where there is one element: it says nothing then, and may be of any alignment."""
    b, c, h, w = (stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    return b, c, h, w


def walk(given: Operands, flat: bool) -> Walk:
    """How a call's operands are walked, `flat` or tap by tap."""
    x_by, w_by = x_order(given.x), weight_order(given.weight)
    x_strides, w_strides = _strides(given.x), _strides(given.weight)
    if flat:
        # x by single elements; what is dense in weight is read along K
        inner = w_by == CHANNELS or (w_by == ANY and x_by == CHANNELS)
        align = _layout.alignment(given.K, (w_strides[0], 0, 0)) if w_by != ANY else 1
        if w_by != ANY:
            w_strides = (w_strides[0] // align, 0, 0, 0)
        return Walk(x_by, w_by, 1, align, align, inner, given.K, x_strides, w_strides)
    along = w_strides[1] == 1
    x_units = (x_strides[0], x_strides[2], x_strides[3]) if x_by == CHANNELS else (1, 0, 0)
    w_units = (w_strides[0], w_strides[2], w_strides[3]) if along else (1, 0, 0)
    x_align = _layout.alignment(given.channels, x_units)
    w_align = _layout.alignment(given.channels, w_units)
    return Walk(
        x_by, CHANNELS if along else ANY, x_align, w_align, max(x_align, w_align), True, given.channels,
        (x_strides[0] // x_align, x_strides[1] // (1 if x_by == CHANNELS else x_align),
         x_strides[2] // x_align, x_strides[3] // x_align),
        (w_strides[0] // w_align, w_strides[1] // (1 if along else w_align),
         w_strides[2] // w_align, w_strides[3] // w_align),
    )  # fmt: skip


# offsets from which on 32 bits are too few, with room for the rows of a tile that have no pixel
FAR = (1 << 31) - (1 << 16)


def _extent(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """The largest offset there is, and one more."""
    last = 1
    for size, stride in zip(sizes, strides, strict=True):
        last = last + (size - 1) * stride
    return last


def _wide(given: Operands) -> bool:
    """True if an offset may need more than 31 bits, also one of a pixel in the padding."""
    x, weight, shape = given.x, given.weight, given.shape
    above, below, left, right = given.pads
    padded = (x.shape[0], x.shape[1], x.shape[2] + above + below, x.shape[3] + left + right)
    far = _extent(padded, x.stride()) >= FAR or _extent(tuple(weight.shape), weight.stride()) >= FAR
    return far or shape[0] * shape[1] * shape[2] * shape[3] >= FAR


def launch(given: Operands, y: Tensor, config: Config, arch: Arch | None) -> _launcher.Launch:
    """The kernel for a checked call that has pixels."""
    flat = config["FLAT"] == 1
    how = walk(given, flat)
    (stride_h, stride_w), (dil_h, dil_w), (taps_r, taps_s) = given.strides, given.dilations, given.kernel
    above, below, left, right = given.pads
    block_k, out_w = config["BLOCK_K"], given.image[1]
    tiles_m = (given.M + config["BLOCK_M"] - 1) // config["BLOCK_M"]
    tiles_n = (given.N + config["BLOCK_N"] - 1) // config["BLOCK_N"]
    steps = (how.unit + block_k - 1) // block_k * (1 if flat else taps_r * taps_s)
    # a step over K in the numbers of its order
    middles, inners = (taps_s, given.channels) if how.inner else (taps_r, taps_s)
    n_align = _layout.alignment(given.N, (0, 0, 0))
    return _launcher.Launch(
        _conv2d_kernel,
        (tiles_m * tiles_n * given.groups,),
        (
            given.x, given.weight, given.x if given.bias is None else given.bias, y,
            given.M, given.N // n_align, how.unit // how.k_align, tiles_m, tiles_n, given.groups, steps,
            out_w, given.image[0] * out_w, given.x.shape[2], given.x.shape[3], taps_r, taps_s,
            stride_h, stride_w, above, left, dil_h, dil_w,
            block_k // inners // middles, block_k // inners % middles, block_k % inners,
            *how.x_strides, *how.w_strides, 0 if given.bias is None else given.bias.stride(0),
        ),
        {
            "X_ORDER": how.x_order,
            "W_ORDER": how.w_order,
            "X_ALIGN": how.x_align,
            "W_ALIGN": how.w_align,
            "K_ALIGN": how.k_align,
            "N_ALIGN": n_align,
            "CHANNELS_INNER": how.inner,
            "CHANNELS_LAST": given.channels_last,
            "POINT": taps_r * taps_s == 1,
            "PADDED": max(above, below, left, right) > 0,
            "EVEN_K": how.unit % block_k == 0,
            "WIDE": _wide(given),
            "BIAS": given.bias is not None,
            "ACTIVATION": 0 if given.activation is None else ACTIVATIONS[given.activation],
            "XCDS": 1 if arch is None else arch.xcds,
        },
        config,
    )  # fmt: skip


def bind(given: Operands, config: Config) -> Callable[..., Tensor]:
    """The function for all calls with arguments like these."""
    shape, dtype, device, layout = given.shape, given.x.dtype, given.x.device, given.memory_format
    if given.M == 0:
        return lambda *_args, **_kwargs: torch.empty(shape, dtype=dtype, device=device, memory_format=layout)
    made = launch(given, given.x, config, _target.arch())
    start, sizes = _launcher.starter(made, device), made.args[TENSORS:]

    def call(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Pair = 1,
        padding: Pair | str = 0,
        dilation: Pair = 1,
        groups: int = 1,
        activation: str | None = None,
    ) -> Tensor:
        y = torch.empty(shape, dtype=dtype, device=device, memory_format=layout)
        start(x, weight, x if bias is None else bias, y, *sizes)
        return y

    return call
