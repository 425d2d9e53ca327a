"""The launch of the causal convolution."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.ops._causal_conv1d.call import CausalConv1dCall
from wavecrest.ops._causal_conv1d.kernel import _causal_conv1d_kernel


def _tensors(call: CausalConv1dCall, y: Tensor) -> tuple[Tensor, ...]:
    """The tensors that the kernel gets; x stands for those that a call does not have."""
    x, bias, initial, lens = call.x, call.bias, call.initial, call.seq_lens
    return (
        x,
        call.weight,
        x if bias is None else bias,
        x if initial is None else initial,
        x if lens is None else lens,
        y,
    )


def _between(x: Tensor) -> tuple[int, int]:
    """Elements from row to row and from token to token, 0 where there is one."""
    return x.stride(0) if x.shape[0] > 1 else 0, x.stride(1) if x.shape[1] > 1 else 0


def launch(call: CausalConv1dCall, y: Tensor, config: Config) -> _launcher.Launch:
    """The kernel's launch for a call that has tokens."""
    x, first = call.x, call.initial
    x_strides = x.stride()
    first_strides = (0, 0, 1) if first is None else first.stride()
    contiguous = call.channels == 1 or (x_strides[2] == 1 and first_strides[2] == 1)
    between, first_between = _between(x), (0, 0) if first is None else _between(first)
    align = _layout.alignment(call.channels, between, first_between) if contiguous else 1
    tiles = _layout.ceil_div(call.tokens, config["BLOCK_S"])
    return _launcher.Launch(
        _causal_conv1d_kernel,
        (_layout.ceil_div(call.channels, config["BLOCK_C"]) * tiles * x.shape[0],),
        (
            *_tensors(call, y), call.tokens, tiles, between[0] // align, between[1] // align, x_strides[2],
            *call.weight.stride(), 0 if call.bias is None else call.bias.stride(0), first_between[0] // align,
            first_between[1] // align, first_strides[2], 0 if call.seq_lens is None else call.seq_lens.stride(0),
        ),
        {
            "C": call.channels, "K": call.taps, "BIAS": call.bias is not None, "INITIAL": first is not None,
            "LENS": call.seq_lens is not None, "SILU": call.activation == "silu", "CONTIGUOUS": contiguous,
            "ALIGN": align,
        },
        config,
    )  # fmt: skip


def bind(call: CausalConv1dCall, config: Config) -> Callable[[CausalConv1dCall], Tensor]:
    """The function that launches the kernel for calls with the signature of this one."""
    shape, dtype, device, some = call.x.shape, call.x.dtype, call.x.device, call.x.numel() > 0
    where = device if torch.compiler.is_compiling() else torch.device("meta")
    start = _launcher.starter(launch(call, torch.empty(shape, dtype=dtype, device=where), config), device)

    def run(call: CausalConv1dCall) -> Tensor:
        y = torch.empty(shape, dtype=dtype, device=device)
        if some:
            start(*_tensors(call, y))
        return y

    return run
