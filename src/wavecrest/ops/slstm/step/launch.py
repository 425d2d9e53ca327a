"""The launch of slstm_step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.mlstm.launch_norm import picker, strides, unit_stride
from wavecrest.ops.slstm.call import SlstmStepCall
from wavecrest.ops.slstm.sequence.launch import row_units
from wavecrest.ops.slstm.step.kernel import _slstm_step_kernel

# by name, what the kernel gets of a call and of the memory that it writes
FIELDS = (*SlstmStepCall._fields, "y", "h_new", "c_new", "n_new", "m_new")
TENSORS = ("x", "r", "bias", "h", "c", "n", "m", "y", "h_new", "c_new", "n_new", "m_new")


def planned(call: SlstmStepCall, config: Config, arch: Arch | None) -> list[_launcher.Launch]:
    """The launch of a call, without memory for what it writes."""
    device = call.x.device if torch.compiler.is_compiling() else torch.device("meta")
    shape = (call.batch, call.heads, call.head_dim)
    y = torch.empty(shape, dtype=call.x.dtype, device=device)
    values = (*call, y, *[torch.empty(shape, dtype=torch.float32, device=device)] * 4)
    contiguous = unit_stride(call.x, call.r)
    x_strides, r_strides = strides(call.x, 4), strides(call.r, 4)
    align = _layout.alignment(0, x_strides[:3], r_strides[:3]) if contiguous else 1
    tiles = _layout.ceil_div(call.head_dim, config["BLOCK_N"])
    sizes = (
        call.batch, call.heads, tiles, *(one // align for one in x_strides[:3]), x_strides[3],
        *(one // align for one in r_strides[:3]), r_strides[3], *strides(call.bias, 3),
        *(part for one in (call.h, call.c, call.n, call.m) for part in strides(one, 3)),
    )  # fmt: skip
    constants: dict[str, Any] = {
        "EXPONENTIAL": call.forget_gate == "exp", "BIAS": call.bias is not None, "CONTIGUOUS": contiguous,
        "ALIGN": align, "UNITS": row_units(call) if contiguous else 0, "D": call.head_dim,
        "PRECISION": _target.products(call.x.dtype, arch),
    }  # fmt: skip
    grid = (tiles * call.heads * _layout.ceil_div(call.batch, config["BLOCK_B"]),)
    tensors = picker(FIELDS, values, TENSORS)(values)
    return [_launcher.Launch(_slstm_step_kernel, grid, (*tensors, *sizes), constants, config)]


def bind(call: SlstmStepCall, config: Config) -> Callable[[SlstmStepCall], tuple[Tensor, ...]]:
    """The function that launches the kernel for calls with the signature of this one."""
    device, dtype, shape = call.x.device, call.x.dtype, (call.batch, call.heads, call.head_dim)
    # placeholders with the None pattern of a real call: x stands for each result
    values = (*call, *[call.x] * 5)
    start = _launcher.starter(planned(call, config, _target.arch())[0], device)
    tensors_of = picker(FIELDS, values, TENSORS)
    some = call.batch > 0

    def run(call: SlstmStepCall) -> tuple[Tensor, ...]:
        y = torch.empty(shape, dtype=dtype, device=device)
        states = [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(4)]
        if some:
            start(*tensors_of((*call, y, *states)))
        return (y, *states)

    return run
