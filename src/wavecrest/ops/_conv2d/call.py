"""A call of a convolution: its arguments, their checks, and the sizes that follow from their shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavecrest.dispatch.keys import needs_grad
from wavecrest.errors import InvalidArgument
from wavecrest.ops.common.activation import ACTIVATIONS

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
PADDINGS = ("same", "valid")

Pair = int | tuple[int, int]


def pair(value: Pair) -> tuple[int, int]:
    """(along H, along W) of a number for both, or of two."""
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def like_channels_last(x: Tensor) -> bool:
    """True if PyTorch takes a tensor's strides for channels_last: those of C, W, H and B grow in this order.

    False where all sizes but the batch are 1 and strides do not tell.
    """
    _, channels, height, width = x.shape
    stride_b, stride_c, stride_h, stride_w = x.stride()
    if x.numel() == 0 or stride_c == 0:
        return False
    inside = stride_c * channels <= stride_w and stride_w * width <= stride_h and stride_h * height <= stride_b
    return inside and stride_h * height != stride_c


class Conv2dCall(NamedTuple):
    """act(conv(x, weight) + bias + residual); see `wavecrest.ops.conv2d` for the arguments.

    Properties are of a checked call. As an implicit GEMM each group has M rows (pixels of the result), N columns (its
    outputs) and a depth of K.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    stride: Pair = 1
    padding: Pair | str = 0
    dilation: Pair = 1
    groups: int = 1
    activation: str | None = None
    residual: Tensor | None = None

    @property
    def strides(self) -> tuple[int, int]:
        """Input pixels from one output pixel to the next, along H and W."""
        return pair(self.stride)

    @property
    def dilations(self) -> tuple[int, int]:
        """Input pixels from one tap of the kernel to the next, along H and W."""
        return pair(self.dilation)

    @property
    def kernel(self) -> tuple[int, int]:
        """Taps along H and W."""
        return self.weight.shape[2], self.weight.shape[3]

    @property
    def pads(self) -> tuple[int, int, int, int]:
        """Zeros around an image: above, below, left, right. "same" has the odd one below and on the right."""
        if self.padding == "valid":
            return 0, 0, 0, 0
        if self.padding == "same":
            (dil_h, dil_w), (taps_r, taps_s) = self.dilations, self.kernel
            down, across = dil_h * (taps_r - 1), dil_w * (taps_s - 1)
            return down // 2, down - down // 2, across // 2, across - across // 2
        pad_h, pad_w = pair(self.padding)  # type: ignore[arg-type]
        return pad_h, pad_h, pad_w, pad_w

    @property
    def image(self) -> tuple[int, int]:
        """H and W of the result; below 1 where the kernel is larger than the padded input."""
        above, below, left, right = self.pads
        (stride_h, stride_w), (dil_h, dil_w), (taps_r, taps_s) = self.strides, self.dilations, self.kernel
        height = self.x.shape[2] + above + below - dil_h * (taps_r - 1) - 1
        width = self.x.shape[3] + left + right - dil_w * (taps_s - 1) - 1
        return height // stride_h + 1, width // stride_w + 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the result."""
        height, width = self.image
        return self.x.shape[0], self.weight.shape[0], height, width

    @property
    def channels(self) -> int:
        """Input channels of a group."""
        return self.weight.shape[1]

    @property
    def M(self) -> int:
        """Pixels of the result."""
        height, width = self.image
        return self.x.shape[0] * height * width

    @property
    def N(self) -> int:
        """Outputs of a group."""
        return self.weight.shape[0] // self.groups

    @property
    def K(self) -> int:
        """Depth of the implicit GEMM: channels of a group times taps."""
        taps_r, taps_s = self.kernel
        return self.channels * taps_r * taps_s

    @property
    def channels_last(self) -> bool:
        """True if the result is channels_last: where x or weight is, which is PyTorch's rule."""
        return like_channels_last(self.x) or like_channels_last(self.weight)

    @property
    def needs_grad(self) -> bool:
        """True if autograd would record the call."""
        return needs_grad(self.x, self.weight, self.bias, self.residual)

    @property
    def memory_format(self) -> torch.memory_format:
        """The memory format of the result."""
        return torch.channels_last if self.channels_last else torch.contiguous_format


def with_pairs(call: Conv2dCall) -> Conv2dCall:
    """The same call with pairs (along H, along W) as stride, padding and dilation; both sides must be padded alike."""
    above, _, left, _ = call.pads
    return call._replace(stride=call.strides, padding=(above, left), dilation=call.dilations)


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else type(value).__name__


def _is_pair(value: Any, least: int) -> bool:
    numbers = value if isinstance(value, tuple) and len(value) == 2 else (value, value)
    return all(isinstance(one, int) and not isinstance(one, bool) and one >= least for one in numbers)


def check(call: Conv2dCall) -> None:
    """Raise InvalidArgument, naming the fault, unless the arguments are valid."""
    x, weight = call.x, call.weight
    for name, value, form in (("x", x, "B, C, H, W"), ("weight", weight, "O, C / groups, R, S")):
        if not isinstance(value, Tensor) or value.ndim != 4 or value.dtype not in FLOATS:
            raise InvalidArgument(
                f"conv2d: {name} must be float32, float16, bfloat16 or float64 [{form}], got {_describe(value)}"
            )
    if weight.dtype != x.dtype or weight.device != x.device:
        raise InvalidArgument(f"conv2d: weight must be {x.dtype} on {x.device} as x is, got {_describe(weight)}")
    if 0 in x.shape[1:] or 0 in weight.shape:
        raise InvalidArgument(
            f"conv2d: only the batch may be of size 0, got x {list(x.shape)} and weight {list(weight.shape)}"
        )
    _check_options(call)
    outputs, channels = weight.shape[0], x.shape[1]
    if channels % call.groups != 0 or outputs % call.groups != 0:
        raise InvalidArgument(f"conv2d: {call.groups} groups do not divide {channels} channels and {outputs} outputs")
    if call.channels != channels // call.groups:
        raise InvalidArgument(
            f"conv2d: weight {list(weight.shape)} takes {call.channels} channels a group, x {list(x.shape)} in "
            f"{call.groups} groups has {channels // call.groups}"
        )
    bias = call.bias
    if bias is not None:
        fits = isinstance(bias, Tensor) and bias.shape == (outputs,) and bias.dtype in FLOATS
        if not fits or bias.device != x.device:
            raise InvalidArgument(
                f"conv2d: bias must be floating-point [{outputs}] on {x.device}, got {_describe(bias)}"
            )
    if min(call.image) < 1:
        above, below, left, right = call.pads
        (dil_h, dil_w), (taps_r, taps_s) = call.dilations, call.kernel
        raise InvalidArgument(
            f"conv2d: the kernel covers {dil_h * (taps_r - 1) + 1} × {dil_w * (taps_s - 1) + 1} pixels, more than the "
            f"padded input has ({x.shape[2] + above + below} × {x.shape[3] + left + right})"
        )
    residual = call.residual
    if residual is not None:
        fits = isinstance(residual, Tensor) and residual.shape == call.shape and residual.dtype == x.dtype
        if not fits or residual.device != x.device:
            raise InvalidArgument(
                f"conv2d: residual must be {x.dtype} {list(call.shape)} on {x.device}, got {_describe(residual)}"
            )


def _check_options(call: Conv2dCall) -> None:
    for name, value in (("stride", call.stride), ("dilation", call.dilation)):
        if not _is_pair(value, 1):
            raise InvalidArgument(f"conv2d: {name} must be a whole number of at least 1, or two, got {value!r}")
    if isinstance(call.padding, str):
        if call.padding not in PADDINGS:
            raise InvalidArgument(f"conv2d: padding takes same, valid or numbers, not {call.padding!r}")
        if call.padding == "same" and call.strides != (1, 1):
            raise InvalidArgument(f"conv2d: padding 'same' goes with a stride of 1, not {call.stride!r}")
    elif not _is_pair(call.padding, 0):
        raise InvalidArgument(
            f"conv2d: padding must be a whole number of at least 0, or two, or same or valid, got {call.padding!r}"
        )
    if not isinstance(call.groups, int) or isinstance(call.groups, bool) or call.groups < 1:
        raise InvalidArgument(f"conv2d: groups must be a whole number of at least 1, got {call.groups!r}")
    if call.activation is not None and call.activation not in ACTIVATIONS:
        raise InvalidArgument(f"conv2d: activation takes {', '.join(ACTIVATIONS)}, not {call.activation!r}")
