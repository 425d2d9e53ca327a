"""Convolution by PyTorch: cuDNN, MIOpen or oneDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wavecrest.backends.torch.common import PRIORITY, activated, other_dtype
from wavecrest.dispatch import registry
from wavecrest.ops._conv2d.call import Operands as Convolution


def _conv2d_bind(*args: Any, **kwargs: Any) -> Callable[..., Tensor]:
    given = Convolution(*args, **kwargs)
    # these alone, as what is bound is kept: not the tensors of one call
    stride, padding, dilation, groups, activation = given[3:]
    # the op's memory format, which is PyTorch's own, also where its library has no channels_last (MIOpen)
    layout = given.memory_format

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None, *_args: Any, **_kwargs: Any) -> Tensor:
        y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
        if activation is not None:
            y = activated(y, activation, 0.01)
        return y.contiguous(memory_format=layout)

    return call


def _conv2d_run(*args: Any, **kwargs: Any) -> Tensor:
    return _conv2d_bind(*args, **kwargs)(*args, **kwargs)


def _conv2d_last(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    given = Convolution(x, weight, *args, **kwargs)
    last = torch.channels_last
    y = _conv2d_run(*given._replace(x=x.contiguous(memory_format=last), weight=weight.contiguous(memory_format=last)))
    return y.contiguous(memory_format=given.memory_format)


def _conv2d_last_supports(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> str | None:
    if Convolution(x, weight, *args, **kwargs).channels_last:
        return "has the image, or the weight, in that layout already"
    return _conv2d_supports(x, weight, *args, **kwargs)


def _conv2d_last_reserved(*_args: Any, **_kwargs: Any) -> str:
    return "copies image and weight: it runs where a measured row names it"


def _conv2d_supports(x: Tensor, weight: Tensor, bias: Tensor | None = None, *_args: Any, **_kwargs: Any) -> str | None:
    return other_dtype(x, bias=bias)


registry.get("conv2d").attach(
    "torch_channels_last",
    _conv2d_last,
    supports=_conv2d_last_supports,
    reserved=_conv2d_last_reserved,
    priority=PRIORITY - 6,
)
registry.get("conv2d").attach("torch", _conv2d_run, supports=_conv2d_supports, priority=PRIORITY, bind=_conv2d_bind)
