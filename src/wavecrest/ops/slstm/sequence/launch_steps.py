"""slstm_sequence as a launch for each token, for heads whose weights no program can keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.custom_op import configured_operation_of
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.mlstm.launch_norm import picker, strides, unit_stride
from wavecrest.ops.slstm.call import SlstmCall
from wavecrest.ops.slstm.reference import inside_of
from wavecrest.ops.slstm.sequence.kernel_steps import _slstm_steps_kernel
from wavecrest.ops.slstm.sequence.launch import row_units

# what a configuration holds, in the order in which a graph has its values
PARAMETERS = ("BLOCK_B", "BLOCK_N", "BLOCK_K", "STAGES", "num_warps", "num_stages")
# by name, what the kernel gets for a token
TENSORS = ("x", "r", "bias", "h", "places", "y", "h_new", "c", "n", "m")
# places are numbers of 4 bytes: with this many a row, those of each token begin at a multiple of 16 bytes, as a launch
# without Triton's look-up asks for
PLACES_ALIGN = 4


def has_places(call: SlstmCall) -> bool:
    """True if a kernel needs a number for each token and row: rows are padded, or have resets."""
    return call.form != "whole" or call.resets is not None


def places_of(call: SlstmCall) -> Tensor:
    """A number for each token and row, int32 [S, B or a little more]: 0 outside of the row, 2 after a reset, else 1."""
    width = PLACES_ALIGN * _layout.ceil_div(call.batch, PLACES_ALIGN)
    found = call.x.new_zeros((call.tokens, width), dtype=torch.int32)
    own = found[:, : call.batch].fill_(1)
    if call.resets is not None:
        own.add_(call.resets.t())
    inside = inside_of(call)
    if inside is not None:
        own.mul_(inside.t())
    return found


def first_states(call: SlstmCall) -> list[Tensor]:
    """Memory for h, c, n and m, float32 [B, NH, D], with the first states."""
    shape = (call.batch, call.heads, call.head_dim)
    made = [torch.empty(shape, dtype=torch.float32, device=call.x.device) for _ in call.initial]
    return [own.zero_() if one is None else own.copy_(one) for own, one in zip(made, call.initial, strict=True)]


def planned(call: SlstmCall, config: Config, arch: Arch | None) -> list[_launcher.Launch]:
    """The launch of a token, without memory for states; all are the same."""
    if call.tokens == 0 or call.batch == 0:
        return []
    x, meta = call.x[:, 0], torch.device("meta")
    state = torch.empty((call.batch, call.heads, call.head_dim), dtype=torch.float32, device=meta)
    y = torch.empty_like(state, dtype=call.x.dtype)
    places = torch.empty(call.batch, dtype=torch.int32, device=meta) if has_places(call) else None
    values = (x, call.r, call.bias, state, places, y, *[state] * 4)
    contiguous = unit_stride(x, call.r)
    x_strides, r_strides = strides(x, 4), strides(call.r, 4)
    align = _layout.alignment(0, x_strides[:3], r_strides[:3]) if contiguous else 1
    tiles = _layout.ceil_div(call.head_dim, config["BLOCK_N"])
    sizes = (
        call.batch, call.heads, tiles, *(one // align for one in x_strides[:3]), x_strides[3],
        *(one // align for one in r_strides[:3]), r_strides[3], *strides(call.bias, 3),
        call.tokens * call.heads * call.head_dim,
    )  # fmt: skip
    constants: dict[str, Any] = {
        "PLACES": places is not None, "EXPONENTIAL": call.forget_gate == "exp", "BIAS": call.bias is not None,
        "CONTIGUOUS": contiguous, "ALIGN": align, "UNITS": row_units(call) if contiguous else 0, "D": call.head_dim,
        "PRECISION": _target.products(call.x.dtype, arch),
    }  # fmt: skip
    grid = (tiles * call.heads * _layout.ceil_div(call.batch, config["BLOCK_B"]),)
    tensors = picker(TENSORS, values, TENSORS)(values)
    return [_launcher.Launch(_slstm_steps_kernel, grid, (*tensors, *sizes), constants, config)]


def bind(call: SlstmCall, config: Config) -> Callable[[SlstmCall], Tensor | tuple[Tensor, ...]]:
    """The function that launches the kernel, a token at a time, for calls with the signature of this one."""
    if torch.compiler.is_compiling():
        # in a graph all launches are one operation: written out they would be as many as there are tokens
        values = [config.kwargs[name] for name in PARAMETERS]
        return lambda call: result_of(call, _in_graph(call, values))
    launches = planned(call, config, _target.arch())
    start = _launcher.starter(launches[0], call.x.device) if launches else None
    padded, last = has_places(call), call.return_last_states
    # placeholders with the None pattern of a real call: x stands for each result
    given = (call.x, call.r, call.bias, call.x, call.x if padded else None, *[call.x] * 5)
    tensors_of = picker(TENSORS, given, TENSORS)

    def run(call: SlstmCall) -> Tensor | tuple[Tensor, ...]:
        y = call.x.new_empty((call.batch, call.tokens, call.heads, call.head_dim))
        h, c, n, m = first_states(call)
        if start is not None:
            new, r, bias = torch.empty_like(h), call.r, call.bias
            places = places_of(call).unbind(0) if padded else (None,) * call.tokens
            for x_now, place, y_now in zip(call.x.unbind(1), places, y.unbind(1), strict=True):
                start(*tensors_of((x_now, r, bias, h, place, y_now, new, c, n, m)))
                h, new = new, h
        return (y, h, c, n, m) if last else y

    return run


def result_of(call: SlstmCall, found: list[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """The result of a call from that of an operation in a graph."""
    return tuple(found) if call.return_last_states else found[0]


def _run(call: SlstmCall, values: list[int]) -> list[Tensor]:
    found = bind(call, Config(**dict(zip(PARAMETERS, values, strict=True))))(call)
    return list(found) if isinstance(found, tuple) else [found]


def fake(call: SlstmCall) -> list[Tensor]:
    """Memory of the shapes and dtypes of a call's results, for calls of fake tensors."""
    y = call.x.new_empty((call.batch, call.tokens, call.heads, call.head_dim))
    if not call.return_last_states:
        return [y]
    states = [call.x.new_empty((call.batch, call.heads, call.head_dim), dtype=torch.float32) for _ in range(4)]
    return [y, *states]


_in_graph = configured_operation_of("slstm_steps", SlstmCall, _run, fake)
