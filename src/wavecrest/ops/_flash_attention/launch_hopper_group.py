"""The launch of sm_90's kernel with programs of one group of warps (`kernel_hopper_group.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import wavecrest.ops._flash_attention.launch_hopper as _hopper
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._flash_attention.call import FlashAttentionCall
from wavecrest.ops._flash_attention.config import Shape
from wavecrest.ops._flash_attention.kernel_hopper_group import _hopper_group_attention_kernel
from wavecrest.ops._flash_attention.launch import slot

# queries of a program: 16 rows of each of its 4 warps
ROWS = 64
MOST_HEAD_DIM = 128
# rows of keys are multiples of as many columns, 64 bytes: each tile of 64 queries copies them anew, and the copy engine
# took 1.6 times the time of `triton_hopper` with a head_dim of 40 (H200, 2026-11-29)
COLUMNS = 32


def refusal(call: FlashAttentionCall, access: str) -> str | None:
    """The reason why this kernel refuses a call that the portable one takes."""
    reason = _hopper.refusal(call, access)
    if reason is None and call.head_dim > MOST_HEAD_DIM:
        return f"takes head_dim up to {MOST_HEAD_DIM}: one group of warps has no registers for more"
    if reason is None and call.head_dim % COLUMNS != 0:
        return f"takes a head_dim that is a multiple of {COLUMNS}: other rows are slow to copy as often as it does"
    return reason


def default(shape: Shape) -> Config:
    """64 keys a step; 128 where nothing is hidden and there are many, as sums are then scaled half as often.

    With a head_dim of 64 four programs share a multiprocessor's registers, or three with 128 keys (H200, 2026-11-29: 64
    keys are faster up to 256 tokens and with a diagonal, 128 keys from 384 tokens).
    """
    return made_of(128 if shape.head_dim <= 64 and not shape.causal and shape.seqlen_q > 256 else 64)


def made_of(keys: int) -> Config:
    """The configuration of a tile."""
    # stages are the kernel's own
    return Config(BLOCK_M=ROWS, BLOCK_N=keys, num_warps=4, num_stages=1)


def launch(
    call: FlashAttentionCall, o: Tensor, lse: Tensor | None, config: Config, _arch: Arch | None
) -> _launcher.Launch:
    """The kernel for a checked call that `refusal` does not refuse and that has queries."""
    rows, keys = config["BLOCK_M"], config["BLOCK_N"]
    tiles = _layout.ceil_div(call.seqlen_q, rows)
    width = _hopper.width(call)
    return _launcher.Launch(
        _hopper_group_attention_kernel,
        (tiles * call.heads * call.batch,),
        (
            *_hopper.descriptors(call, o, rows, keys), *_hopper.tensors(call, lse),
            call.scale, float(call.softcap), call.seqlen_q, call.seqlen_k, call.heads, call.group, tiles,
            *_hopper.edges(call), *slot(call.sinks, 1), *slot(call.alibi_slopes, 2),
        ),
        {
            "KIND": _hopper.kind(call),
            "SINKS": call.sinks is not None,
            "LSE": call.return_lse,
            # with more keys, or a wider q, registers for it would cost a program a multiprocessor
            "HELD": width <= 64 and keys <= 64,
            "BLOCK_D": width,
            "REST": _hopper.rest(call),
        },
        config,
    )  # fmt: skip


def bind(
    call: FlashAttentionCall, config: Config, portable: Callable[[FlashAttentionCall], Any]
) -> Callable[[FlashAttentionCall], Tensor | tuple[Tensor, Tensor]]:
    """The function that launches the kernel for calls with the signature of this one: `launch_hopper.bind`."""
    return _hopper.bind(call, config, portable, "triton_hopper_group", launch)
