"""The launch of the kernel for sm_90 (`kernel_hopper.py`), and the calls and configurations that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.hopper as _hopper
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.target as _target
import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._flash_attention.call import FlashAttentionCall
from wavecrest.ops._flash_attention.config import Shape
from wavecrest.ops._flash_attention.kernel_hopper import (
    CAPPED,
    LEFT_EDGE,
    RIGHT_EDGE,
    SLOPED,
    _hopper_attention_kernel,
)
from wavecrest.ops._flash_attention.launch import LEAST_BLOCK, slot

DESCRIPTORS = 4
# consumer warp groups, each with separate rows
GROUPS = 2
# bytes of a program's shared memory for tiles; barriers have the rest of 227 KiB
SHARED_BYTES = 226 << 10
# bytes of the L2 cache of 50 MiB that k and v of the heads that run together may take
SECTION_BYTES = 16 << 20


def refusal(call: FlashAttentionCall, access: str) -> str | None:
    """The reason why this kernel refuses a call that the portable one takes."""
    reason = _hopper.refusal()
    if reason is not None:
        return reason
    if call.q.dtype not in (torch.float16, torch.bfloat16) or call.quantized:
        return "takes float16 and bfloat16"
    for name, asked in (
        ("packed sequences", call.packed),
        ("bias", call.bias is not None),
        ("dropout", call.dropout),
        ("a head_dim of v that is not that of q", call.head_dim_v != call.head_dim),
        ("calls without keys", call.seqlen_k == 0),
    ):
        if asked:
            return f"does not know {name}"
    if access != "columns 16":
        return "copies tiles with contiguous columns, every other stride a multiple of 16 bytes and not 0"
    return None


def default(shape: Shape) -> Config:
    """128 queries, 64 of a group: sums and scores of 128 keys are 128 registers of 240. Two stages."""
    if shape.head_dim > 128:
        return made_of(128, 64, 2, 1)
    return made_of(128, 128, 2, 1)


def made_of(rows: int, keys: int, stages: int, turns: int) -> Config:
    """The configuration of a tile; `turns`: 1 where the groups take turns."""
    # warps of the group that the launch counts; the kernel adds the other groups, and has stages of its own
    return Config(BLOCK_M=rows, BLOCK_N=keys, STAGES=stages, TURNS=turns, num_warps=4, num_stages=1)


def launch(
    call: FlashAttentionCall, o: Tensor, lse: Tensor | None, config: Config, arch: Arch | None
) -> _launcher.Launch:
    """The kernel for a checked call that `refusal` does not refuse and that has queries."""
    tiles = _layout.ceil_div(call.seqlen_q, config["BLOCK_M"])
    all_heads = call.heads * call.batch
    units = 132 if arch is None else arch.compute_units
    section = all_heads
    if call.right >= 0:
        kept = 2 * call.seqlen_k * call.head_dim * call.k.element_size()
        fits = call.group * max(1, SECTION_BYTES // kept)
        # two turns, one there and one back, give each program as much; with one, programs wait for the longest tile
        # (H200, 2026-11-29, 16 heads of 256, 4,096 tokens: 404 µs in place of 717)
        section = min(all_heads, max(fits, 2 * units // tiles))
    return _launcher.Launch(
        _hopper_attention_kernel,
        (min(tiles * all_heads, units),),
        (
            *descriptors(call, o, config["BLOCK_M"] // GROUPS, config["BLOCK_N"]), *tensors(call, lse),
            call.scale, float(call.softcap), call.seqlen_q, call.seqlen_k, call.heads, call.group, section, tiles,
            all_heads, *edges(call), *slot(call.sinks, 1), *slot(call.alibi_slopes, 2),
        ),
        {
            "KIND": kind(call),
            "SINKS": call.sinks is not None,
            "LSE": call.return_lse,
            "OWN": shared_bytes(call, config) + 2 * config["BLOCK_M"] * width(call) <= SHARED_BYTES,
            "BLOCK_D": width(call),
            "REST": rest(call),
        },
        config,
    )  # fmt: skip


def kind(call: FlashAttentionCall) -> int:
    """The sum of the kernels' constants for what a call does to scores."""
    asked = (
        (LEFT_EDGE, call.left >= 0),
        (RIGHT_EDGE, call.right >= 0),
        (CAPPED, call.capped > 0),
        (SLOPED, call.alibi_slopes is not None),
    )
    return sum(one.value for one, there in asked if there)


def edges(call: FlashAttentionCall) -> tuple[int, int]:
    """The window's edges; one this wide hides no key."""
    most = call.seqlen_q + call.seqlen_k
    return min(call.left, most), min(call.right, most)


def shared_bytes(call: FlashAttentionCall, config: Config) -> int:
    """Bytes of shared memory of q, and of the stages of k and v."""
    return 2 * width(call) * (config["BLOCK_M"] + 2 * config["STAGES"] * config["BLOCK_N"])


def width(call: FlashAttentionCall) -> int:
    """Columns of the tiles: head_dim, or the next power of two."""
    return max(LEAST_BLOCK, _layout.power_of_two(call.head_dim))


def rest(call: FlashAttentionCall) -> int:
    """Columns behind the first half of a tile that are multiplied, a power of two; 0: all of them, in one product."""
    half = width(call) // 2
    behind = max(LEAST_BLOCK, _layout.power_of_two(call.head_dim - half))
    # queries of narrow heads may be in registers, which have no halves
    return behind if half >= 64 and behind < half else 0


def descriptors(call: FlashAttentionCall, o: Tensor, rows: int, keys: int) -> tuple[Any, ...]:
    """The descriptors of q, k, v and o: tiles of `rows` queries and of `keys` keys."""
    return tuple(
        _triton.tile_descriptor(call.bhsd(one), [1, 1, count, width(call)])
        for one, count in ((call.q, rows), (call.k, keys), (call.v, keys), (o, rows))
    )


def tensors(call: FlashAttentionCall, lse: Tensor | None) -> tuple[Tensor, ...]:
    """The tensors without descriptors; q, which is not read through them, in the place of an absent one."""
    q = call.q
    return (
        q if lse is None else lse,
        q if call.sinks is None else call.sinks,
        q if call.alibi_slopes is None else call.alibi_slopes,
    )


def bind(
    call: FlashAttentionCall,
    config: Config,
    portable: Callable[[FlashAttentionCall], Any],
    backend: str = "triton_hopper",
    launch: Callable[..., _launcher.Launch] = launch,
) -> Callable[[FlashAttentionCall], Tensor | tuple[Tensor, Tensor]]:
    """The function that launches a kernel for sm_90 for calls with the signature of this one.

    `portable`: the other kernel's, for a call whose tensors do not begin at multiples of 16 bytes, as descriptors must;
    `backend` and its `launch`: this kernel's, or another's with the same tensors.
    """
    device, arch = call.q.device, _target.arch()
    some = call.batch * call.seqlen_q * call.q.numel() > 0
    shape, dtype, lse_shape = call.shape, call.dtype, call.lse_shape if call.return_lse else None
    start: Callable[..., None] | None = None

    def run(call: FlashAttentionCall) -> Tensor | tuple[Tensor, Tensor]:
        nonlocal start
        q, k, v = call.q, call.k, call.v
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
        if addresses % 16 != 0 and not _launcher.aligned("flash_attention", addresses, backend):
            result: Tensor | tuple[Tensor, Tensor] = portable(call)
            return result
        o = torch.empty(shape, dtype=dtype, device=device)
        lse = None if lse_shape is None else torch.empty(lse_shape, dtype=torch.float32, device=device)
        if some:
            if start is None:
                made = launch(call, o, lse, config, arch)
                start = _launcher.starter(made, device, num_descriptors=DESCRIPTORS)
            start(q, k, v, o, *tensors(call, lse))
        return o if lse is None else (o, lse)

    return run
