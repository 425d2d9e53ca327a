"""Two-dimensional convolution as an implicit GEMM, with bias and activation."""

from __future__ import annotations

from torch import Tensor

from wavecrest.ops._conv2d.backend import op as _op
from wavecrest.ops._conv2d.call import Conv2dCall, Pair

__all__ = ["conv2d"]

_run = _op.of_fields(Conv2dCall)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """act(conv(x, weight) + bias + residual): sums in float32 (float64 for float64), rounded once.

    Args:
        x: [B, C, H, W], contiguous, channels_last or of any other strides, which are read in place; float32, float16,
            bfloat16 or float64. B may be 0.
        weight: [O, C / groups, R, S] of x's dtype, any strides.
        bias: [O] of any of these dtypes, or None.
        stride: input pixels from one result to the next, a number or (along H, along W).
        padding: zeros around each image, a number or (along H, along W); "valid" (none) or "same" (at a
            stride of 1 the result keeps H and W; an odd number has one more zero below and on the right).
        dilation: input pixels from one tap of the kernel to the next, a number or (along H, along W).
        groups: divides C and O; outputs of a group see the channels of their group alone.
        activation: None, "relu", "leaky_relu" (0.01 · x below 0), "silu", "gelu" or "gelu_tanh".
        residual: [B, O, OH, OW] of x's dtype, any strides; added before the activation, as residual networks do.

    Returns:
        [B, O, OH, OW] of x's dtype with OH = (H + padding · 2 − dilation · (R − 1) − 1) // stride + 1; channels_last
        where x or weight is, else contiguous.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this, or the kernel larger than the padded input.
    """
    # lists as tuples: calls are looked up by their arguments
    if isinstance(stride, list):
        stride = tuple(stride)
    if isinstance(padding, list):
        padding = tuple(padding)
    if isinstance(dilation, list):
        dilation = tuple(dilation)
    return _run(x, weight, bias, stride, padding, dilation, groups, activation, residual)
