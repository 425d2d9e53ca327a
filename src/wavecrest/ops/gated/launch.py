"""The gated kernel's arguments and launches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.ops.common.activation import ACTIVATIONS
from wavecrest.ops.gated.call import GatedCall
from wavecrest.ops.gated.kernel import _gated_kernel


def launch(call: GatedCall, y: Tensor, config: Config) -> _launcher.Launch:
    """The kernel's launch: y is memory for the result."""
    gate, up, columns = call.gate, call.up, call.columns
    if up is None:
        rows, leading, size1, size2, (strides_g,) = _layout.layout(gate)
        up, strides_u, up_offset = gate, strides_g, columns * gate.stride(-1)
    else:
        rows, leading, size1, size2, (strides_g, strides_u) = _layout.layout(gate, up)
        up_offset = 0
    blocks_m = (rows + config["BLOCK_M"] - 1) // config["BLOCK_M"]
    blocks_n = (columns + config["BLOCK_N"] - 1) // config["BLOCK_N"]
    return _launcher.Launch(
        _gated_kernel,
        (blocks_m * blocks_n,),
        (
            gate,
            up,
            y,
            rows,
            columns,
            blocks_n,
            size1,
            size2,
            *strides_g,
            gate.stride(-1),
            *strides_u,
            up.stride(-1),
            up_offset,
        ),
        {
            "ACTIVATION": ACTIVATIONS[call.function],
            "LEADING": leading,
            "EVEN": columns % config["BLOCK_N"] == 0,
        },
        config,
    )


def bind(call: GatedCall, config: Config) -> Callable[[GatedCall], Tensor]:
    """The function that launches the kernel for calls with the signature of this one."""
    made = launch(call, call.gate, config)
    start = _launcher.starter(made, call.gate.device)
    shape = (*call.gate.shape[:-1], call.columns)
    has_elements = call.gate.numel() > 0

    def run(call: GatedCall) -> Tensor:
        gate, up = call.gate, call.up
        y = torch.empty(shape, dtype=gate.dtype, device=gate.device)
        if has_elements:
            start(gate, gate if up is None else up, y)
        return y

    return run
