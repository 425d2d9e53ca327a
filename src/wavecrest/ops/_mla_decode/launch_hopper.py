"""The launch of sm_90's kernel over a latent cache, and the calls that it takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops._mla_decode.launch as _launch
import wavecrest.ops.common.hopper as _hopper
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops._mla_decode.call import MlaDecodeCall, MlaResult
from wavecrest.ops._mla_decode.config import HOPPER_KEYS
from wavecrest.ops._mla_decode.kernel_hopper import _hopper_mla_kernel

# columns of a latent, of the half that a group of warps sums, and of the rotary part
LATENT_DIM, HALF, HEAD_DIM_ROPE = 512, 256, 64


def refusal(call: MlaDecodeCall) -> str | None:
    """The reason why sm_90's kernel cannot run a call that the portable kernel takes."""
    reason = _hopper.refusal()
    if reason is not None:
        return reason
    if call.q_nope.dtype not in (torch.float16, torch.bfloat16):
        return "takes float16 and bfloat16"
    if call.latent_dim != LATENT_DIM or call.head_dim_rope != HEAD_DIM_ROPE:
        return f"takes latents of {LATENT_DIM} columns and {HEAD_DIM_ROPE} rotary ones"
    if call.capped:
        return "does not know a logit_cap"
    if call.cos is not None:
        return "takes rotary parts that are turned"
    if call.max_seqlen_k == 0 or 0 in call.latent_cache.shape:
        return "does not know calls without keys"
    if call.block_table is not None and (call.page_size == 0 or call.page_size % HOPPER_KEYS != 0):
        return f"copies tiles of {HOPPER_KEYS} keys, which must lie in one page"
    if any(stride % 8 != 0 for stride in _launch.strides(call.latent_cache, 2)):
        return "copies tiles whose strides are multiples of 16 bytes"
    return None


def _descriptors(block_n: int, call: MlaDecodeCall) -> tuple[Any, ...]:
    """Tensor descriptors of half a latent's columns, and of the rotary part, for tiles of `block_n` keys."""
    cache = call.latent_cache
    return (
        _triton.tile_descriptor(cache, [1, block_n, HALF]),
        _triton.tile_descriptor(cache, [1, block_n, HEAD_DIM_ROPE]),
    )


def _input_fields(call: MlaDecodeCall) -> tuple[str, ...]:
    # without pages the kernel does not read the table
    return ("q_rope", "seq_lens", "seq_lens" if call.block_table is None else "block_table")


def _make_launch(
    call: MlaDecodeCall,
    tensors: tuple[Any, ...],
    q: Tensor,
    config: Config,
    split: _launch.KeySplit,
    _arch: Arch | None,
) -> _launcher.Launch:
    q_strides, rope_strides = _launch.strides(q, 3), _launch.strides(call.q_rope, 3)
    q_align, block_n = _layout.alignment(0, q_strides, rope_strides), config["BLOCK_N"]
    if call.block_table is not None and call.page_size % block_n != 0:
        raise InvalidArgument(
            f"mla_decode: BLOCK_N={block_n}: a tile of keys must lie in one page, of {call.page_size}"
        )
    return _launcher.Launch(
        _hopper_mla_kernel,
        (split.blocks * split.splits * call.batch,),
        (
            *tensors, float(call.scale), call.seqlen_q, call.heads, call.page_size, *split,
            *(one // q_align for one in (*q_strides, *rope_strides)), *_launch.strides(call.block_table, 1),
            call.seq_lens.stride(0),
        ),
        {
            "PAGED": call.block_table is not None, "LSE": call.return_lse, "SPLIT": split.splits > 1,
            "Q_ALIGN": q_align,
        },
        Config(**{name: config[name] for name in ("BLOCK_N", "STAGES", "num_warps", "num_stages")}),
    )  # fmt: skip


def _kernel(config: Config) -> _launch.AttendKernel:
    return _launch.AttendKernel(_input_fields, _make_launch, partial(_descriptors, config["BLOCK_N"]))


def launches(call: MlaDecodeCall, config: Config, arch: Arch | None) -> list[_launcher.Launch]:
    """The launches of a call, in order, over buffers without memory."""
    return _launch.launches(call, config, arch, _kernel(config))


def bind(
    call: MlaDecodeCall, config: Config, portable: Callable[[MlaDecodeCall], MlaResult]
) -> Callable[[MlaDecodeCall], MlaResult]:
    """The function that launches the kernels for calls with the signature of this one.

    `portable`: the portable kernel's. It runs a call whose cache does not begin at a multiple of 16 bytes, which
    descriptors cannot describe; where a cache begins is not part of the signature.
    """
    bound: Callable[[MlaDecodeCall], MlaResult] | None = None

    def run(call: MlaDecodeCall) -> MlaResult:
        nonlocal bound
        address = call.latent_cache.data_ptr()
        if address % 16 != 0 and not _launcher.aligned("mla_decode", address, "triton_hopper"):
            return portable(call)
        if bound is None:
            bound = _launch.bind(call, config, _kernel(config))
        return bound(call)

    return run
