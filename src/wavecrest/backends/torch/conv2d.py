"""Convolution by PyTorch: cuDNN, MIOpen or oneDNN."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from wavecrest.backends.torch.common import PRIORITY, activated, other_dtype
from wavecrest.dispatch.custom_op import operation_of
from wavecrest.ops._conv2d.backend import op
from wavecrest.ops._conv2d.call import Conv2dCall, Pair, with_pairs

# below `torch`: it copies image and weight
BY_COPY_PRIORITY = PRIORITY - 6


def _finished(y: Tensor, call: Conv2dCall) -> Tensor:
    """The residual and the activation, each an operation of its own."""
    if call.residual is not None:
        y = y + call.residual
    return y if call.activation is None else activated(y, call.activation, 0.01)


def _bind(call: Conv2dCall) -> Callable[[Conv2dCall], Tensor]:
    stride, padding, dilation, groups = call[3:7]
    # the op's memory format, which is PyTorch's own, also where its library has no channels_last (MIOpen)
    layout, more = call.memory_format, call.residual is not None or call.activation is not None

    def run(call: Conv2dCall) -> Tensor:
        y = F.conv2d(call.x, call.weight, call.bias, stride, padding, dilation, groups)
        return (_finished(y, call) if more else y).contiguous(memory_format=layout)

    return run


def _run(call: Conv2dCall) -> Tensor:
    return _bind(call)(call)


def _refuse(call: Conv2dCall) -> str | None:
    return other_dtype(call.x, bias=call.bias)


def _bind_by_copy(call: Conv2dCall) -> Callable[[Conv2dCall], Tensor]:
    stride, padding, dilation, groups = call[3:7]
    layout, last = call.memory_format, torch.channels_last

    def run(call: Conv2dCall) -> Tensor:
        x, weight = call.x.contiguous(memory_format=last), call.weight.contiguous(memory_format=last)
        y = F.conv2d(x, weight, call.bias, stride, padding, dilation, groups)
        return _finished(y, call).contiguous(memory_format=layout)

    return run


def _run_by_copy(call: Conv2dCall) -> Tensor:
    return _bind_by_copy(call)(call)


def _refuse_by_copy(call: Conv2dCall) -> str | None:
    if call.channels_last:
        return "has the image, or the weight, in that layout already"
    return _refuse(call)


def _opt_in_by_copy(_call: Conv2dCall) -> str:
    return "copies image and weight: it runs where a measured row names it"


def _bind_fused(call: Conv2dCall) -> Callable[[Conv2dCall], Tensor]:
    stride, padding, dilation, groups = _numbers(with_pairs(call))

    def run(call: Conv2dCall) -> Tensor:
        # in a graph the operation, which has shapes for fake tensors
        work = _in_graph if torch.compiler.is_compiling() else _fused
        return work(
            Conv2dCall(call.x, call.weight, call.bias, stride, padding, dilation, groups, "relu", call.residual)
        )

    return run


def _numbers(call: Conv2dCall) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], int]:
    """Stride, padding, dilation and groups of a call from `with_pairs`."""
    return call[3:7]  # type: ignore[return-value]


def _fused(call: Conv2dCall) -> Tensor:
    """relu(conv(x, weight) + bias + residual), in one kernel of cuDNN."""
    x, weight, bias, residual = call.x, call.weight, call.bias, call.residual
    stride, padding, dilation, groups = _numbers(call)
    if residual is None:
        return torch.cudnn_convolution_relu(x, weight, bias, stride, padding, dilation, groups)
    return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, stride, padding, dilation, groups)


def _fused_on_cpu(call: Conv2dCall) -> Tensor:
    y = F.conv2d(call.x, call.weight, call.bias, *_numbers(call))
    y = F.relu(y if call.residual is None else y + call.residual)
    return y.contiguous(memory_format=torch.channels_last)


def _fused_fake(call: Conv2dCall) -> Tensor:
    stride, padding, dilation, groups = _numbers(call)
    y = torch.ops.aten.convolution(call.x, call.weight, call.bias, stride, padding, dilation, False, [0, 0], groups)
    return torch.empty_like(y, memory_format=torch.channels_last)


_in_graph = operation_of(
    "conv2d_relu", Conv2dCall, _fused, _fused_fake, on_cpu=_fused_on_cpu, narrowed={"padding": Pair}
)


def _run_fused(call: Conv2dCall) -> Tensor:
    return _bind_fused(call)(call)


def _refuse_fused(call: Conv2dCall) -> str | None:
    if not call.x.is_cuda or torch.version.hip is not None:
        return "is cuDNN's, on an NVIDIA GPU"
    if call.activation != "relu":
        return "ends in relu alone"
    if call.x.dtype not in (torch.float16, torch.bfloat16) or call.groups != 1:
        return "takes float16 and bfloat16, in one group"
    above, below, left, right = call.pads
    if above != below or left != right or call.M == 0:
        return "pads both sides alike, and takes no empty batch"
    last = torch.channels_last
    residual = call.residual is None or call.residual.is_contiguous(memory_format=last)
    if not (call.x.is_contiguous(memory_format=last) and call.weight.is_contiguous(memory_format=last) and residual):
        return "takes channels_last image, weight and residual"
    if call.needs_grad:
        return "has no gradients"
    return _refuse(call)


def _opt_in_fused(_call: Conv2dCall) -> str:
    return (
        "has no measured rows yet: it runs where one names it, and in models that the step compile:epilogues compiles"
    )


op.attach(
    "cudnn_relu",
    _run_fused,
    refuse=_refuse_fused,
    opt_in=_opt_in_fused,
    priority=PRIORITY + 1,
    bind=_bind_fused,
)
op.attach(
    "torch_channels_last",
    _run_by_copy,
    refuse=_refuse_by_copy,
    opt_in=_opt_in_by_copy,
    priority=BY_COPY_PRIORITY,
    bind=_bind_by_copy,
)
op.attach("torch", _run, refuse=_refuse, priority=PRIORITY, bind=_bind)
