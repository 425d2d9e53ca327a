"""The rotary kernel's arguments and launches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.ops._rope.call import RopeCall, result_like, token_rows
from wavecrest.ops._rope.kernel import _rope_kernel


def launch(call: RopeCall, y: Tensor, config: Config) -> _launcher.Launch:
    """The kernel's launch: y is memory for the result, with the strides of `result_like(x)`."""
    x, cos, positions = call.x, call.cos, call.positions
    merged = _layout.layout(*token_rows(call, y))
    # the innermost run of tokens last, also where it is the only one
    x_tokens, y_tokens, own = (
        strides if merged.leading == 3 else (strides[1], strides[2], strides[0]) for strides in merged.strides
    )
    inner = merged.size2 if merged.leading == 3 else merged.rows
    heads, head_dim, half = x.shape[-2], x.shape[-1], cos.shape[-1]
    rest = head_dim - 2 * half
    stride_xh, stride_yh = (x.stride(-2), y.stride(-2)) if heads > 1 else (0, 0)
    c_tokens = own if positions is None else (0, 0, cos.stride(0))
    p_tokens = (0, 0, 0) if positions is None else own
    unit = _layout.alignment(half, (rest, stride_xh, stride_yh), x_tokens, y_tokens, c_tokens)
    blocks_t = (inner + config["BLOCK_T"] - 1) // config["BLOCK_T"]
    blocks_h = (heads + config["BLOCK_H"] - 1) // config["BLOCK_H"]
    block_r = _layout.power_of_two(half)
    outer = merged.rows // inner if inner else 0
    return _launcher.Launch(
        _rope_kernel,
        (outer * blocks_t * blocks_h,),
        (
            x,
            y,
            cos,
            call.sin,
            # not read without positions, but a tensor all the same
            cos if positions is None else positions,
            inner,
            merged.size1,
            blocks_t,
            blocks_h,
            heads,
            cos.shape[0],
            half // unit,
            rest // unit,
            *_units(unit, *x_tokens, stride_xh),
            x.stride(-1),
            *_units(unit, *y_tokens, stride_yh),
            y.stride(-1),
            *_units(unit, *c_tokens),
            cos.stride(-1),
            *p_tokens,
        ),
        {
            "INTERLEAVED": call.style == "gptj",
            "POSITIONS": positions is not None,
            "LEADING": merged.leading,
            "ALIGN": unit,
            "EVEN_H": heads % config["BLOCK_H"] == 0,
            "EVEN_R": half == block_r,
            "BLOCK_R": block_r,
            "BLOCK_REST": _layout.power_of_two(rest) if rest else 0,
        },
        config,
    )


def _units(unit: int, *strides: int) -> tuple[int, ...]:
    return tuple(stride // unit for stride in strides)


def bind(call: RopeCall, config: Config) -> Callable[[RopeCall], Tensor]:
    """The function that launches the kernel for calls with the signature of this one."""
    made = launch(call, result_like(call.x), config)
    start = _launcher.starter(made, call.x.device)
    has_elements = call.x.numel() > 0

    def run(call: RopeCall) -> Tensor:
        x, cos, positions = call.x, call.cos, call.positions
        y = torch.empty_like(x)
        if has_elements:
            start(x, y, cos, call.sin, cos if positions is None else positions)
        return y

    return run
