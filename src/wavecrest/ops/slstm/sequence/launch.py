"""The launch of slstm_sequence."""

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
from wavecrest.ops.slstm.call import SlstmCall, SlstmStepCall
from wavecrest.ops.slstm.sequence.config import block_d
from wavecrest.ops.slstm.sequence.kernel import _slstm_sequence_kernel

# by name, what the kernel gets of a call and of the memory that it writes
FIELDS = (*SlstmCall._fields, "y", "h", "c", "n", "m")
TENSORS = (
    "x", "r", "bias", "h_initial", "c_initial", "n_initial", "m_initial", "seq_starts", "seq_lens", "resets", "y", "h",
    "c", "n", "m",
)  # fmt: skip


def row_units(call: SlstmCall | SlstmStepCall) -> int:
    """The stride of the weights' rows in units of head_dim where it is one of them or those of four gates, else 0."""
    stride = call.r.stride(2)
    return next((units for units in (1, 4) if stride == units * call.head_dim and call.r.stride(3) == 1), 0)


def planned(call: SlstmCall, config: Config, arch: Arch | None) -> list[_launcher.Launch]:
    """The launch of a call, without memory for what it writes."""
    device = call.x.device if torch.compiler.is_compiling() else torch.device("meta")
    shape = (call.batch, call.heads, call.head_dim)
    y = torch.empty((call.batch, call.tokens, *shape[1:]), dtype=call.x.dtype, device=device)
    last = torch.empty(shape, dtype=torch.float32, device=device) if call.return_last_states else None
    values = (*call, y, *[last] * 4)
    contiguous = unit_stride(call.x, call.r)
    x_strides, r_strides = strides(call.x, 5), strides(call.r, 4)
    align = _layout.alignment(0, x_strides[:4], r_strides[:3]) if contiguous else 1
    sizes = (
        0, call.batch, call.tokens, call.heads, *(one // align for one in x_strides[:4]), x_strides[4],
        *(one // align for one in r_strides[:3]), r_strides[3], *strides(call.bias, 3),
        *(part for one in call.initial for part in strides(one, 3)), *strides(call.seq_starts, 1),
        *strides(call.seq_lens, 1), *strides(call.resets, 2),
    )  # fmt: skip
    constants: dict[str, Any] = {
        "PADDED": call.form == "padded", "STARTS": call.seq_starts is not None, "LENS": call.seq_lens is not None,
        "RESETS": call.resets is not None, "EXPONENTIAL": call.forget_gate == "exp", "BIAS": call.bias is not None,
        "INITIAL": call.h_initial is not None, "LAST": call.return_last_states, "CONTIGUOUS": contiguous,
        "ALIGN": align, "UNITS": row_units(call) if contiguous else 0, "D": call.head_dim,
        "PRECISION": _target.products(call.x.dtype, arch), "BLOCK_D": block_d(call.head_dim),
    }  # fmt: skip
    grid = (call.heads * _layout.ceil_div(call.batch, config["BLOCK_B"]),)
    tensors = picker(FIELDS, values, TENSORS)(values)
    return [_launcher.Launch(_slstm_sequence_kernel, grid, (*tensors, *sizes), constants, config)]


def bind(call: SlstmCall, config: Config) -> Callable[[SlstmCall], Tensor | tuple[Tensor, ...]]:
    """The function that launches the kernel for calls with the signature of this one."""
    device, shape = call.x.device, (call.batch, call.heads, call.head_dim)
    tokens, dtype, last = call.tokens, call.x.dtype, call.return_last_states
    # the part of padded rows that no program writes is 0
    make = torch.empty if call.form == "whole" else torch.zeros
    # placeholders with the None pattern of a real call: x stands for each result
    values = (*call, call.x, *[call.x if last else None] * 4)
    start = _launcher.starter(planned(call, config, _target.arch())[0], device)
    tensors_of = picker(FIELDS, values, TENSORS)
    some = call.batch > 0

    def run(call: SlstmCall) -> Tensor | tuple[Tensor, ...]:
        y = make((shape[0], tokens, *shape[1:]), dtype=dtype, device=device)
        if not last:
            if some:
                start(*tensors_of((*call, y, None, None, None, None)))
            return y
        states = [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(4)]
        if some:
            start(*tensors_of((*call, y, *states)))
        return (y, *states)

    return run
