"""Convolution by PyTorch: cuDNN, MIOpen or oneDNN."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from wavecrest.backends.torch.common import PRIORITY, activated, other_dtype
from wavecrest.ops._conv2d.backend import op
from wavecrest.ops._conv2d.call import Conv2dCall

# below `torch`: it copies image and weight
BY_COPY_PRIORITY = PRIORITY - 6


def _bind(call: Conv2dCall) -> Callable[[Conv2dCall], Tensor]:
    stride, padding, dilation, groups, activation = call[3:]
    # the op's memory format, which is PyTorch's own, also where its library has no channels_last (MIOpen)
    layout = call.memory_format

    def run(call: Conv2dCall) -> Tensor:
        y = F.conv2d(call.x, call.weight, call.bias, stride, padding, dilation, groups)
        if activation is not None:
            y = activated(y, activation, 0.01)
        return y.contiguous(memory_format=layout)

    return run


def _run(call: Conv2dCall) -> Tensor:
    return _bind(call)(call)


def _refuse(call: Conv2dCall) -> str | None:
    return other_dtype(call.x, bias=call.bias)


def _bind_by_copy(call: Conv2dCall) -> Callable[[Conv2dCall], Tensor]:
    stride, padding, dilation, groups, activation = call[3:]
    layout, last = call.memory_format, torch.channels_last

    def run(call: Conv2dCall) -> Tensor:
        x, weight = call.x.contiguous(memory_format=last), call.weight.contiguous(memory_format=last)
        y = F.conv2d(x, weight, call.bias, stride, padding, dilation, groups)
        if activation is not None:
            y = activated(y, activation, 0.01)
        return y.contiguous(memory_format=layout)

    return run


def _run_by_copy(call: Conv2dCall) -> Tensor:
    return _bind_by_copy(call)(call)


def _refuse_by_copy(call: Conv2dCall) -> str | None:
    if call.channels_last:
        return "has the image, or the weight, in that layout already"
    return _refuse(call)


def _opt_in_by_copy(_call: Conv2dCall) -> str:
    return "copies image and weight: it runs where a measured row names it"


op.attach(
    "torch_channels_last",
    _run_by_copy,
    refuse=_refuse_by_copy,
    opt_in=_opt_in_by_copy,
    priority=BY_COPY_PRIORITY,
    bind=_bind_by_copy,
)
op.attach("torch", _run, refuse=_refuse, priority=PRIORITY, bind=_bind)
