"""The launch of the kernel for sm_90 (`hopper_kernel.py`), and the calls and configurations that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.hopper as _hopper
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops._mla_decode import config as _config
from wavecrest.ops._mla_decode import launch as _launch
from wavecrest.ops._mla_decode.call import Operands
from wavecrest.ops._mla_decode.kernel_hopper import _hopper_mla_kernel

# columns of a latent, half of which a group of warps sums, and of the rotary part; rows of a program
LATENT, HALF, ROTARY, ROWS = 512, 256, 64, 64
# keys of a tile, and tiles in shared memory beside the queries, 144 of 227 KiB. Two of 64 keys take 10 % longer: copies
# are waited for (H200, 2026-11-22)
KEYS, STAGES = 32, 4


def refusal(given: Operands) -> str | None:
    """Why a call that the portable kernel takes is none for this one."""
    reason = _hopper.refusal()
    if reason is not None:
        return reason
    if given.q_nope.dtype not in (torch.float16, torch.bfloat16):
        return "takes float16 and bfloat16"
    if given.latent != LATENT or given.rotary != ROTARY:
        return f"takes latents of {LATENT} columns and {ROTARY} rotary ones"
    if given.capped:
        return "does not know a logit_cap"
    if given.cos is not None:
        return "takes rotary parts that are turned"
    if given.capacity == 0 or 0 in given.latent_cache.shape:
        return "does not know calls without keys"
    if given.block_table is not None and (given.page == 0 or given.page % KEYS != 0):
        return f"copies tiles of {KEYS} keys, which must lie in one page"
    if any(stride % 8 != 0 for stride in _launch.strides(given.latent_cache, 2)):
        return "copies tiles whose strides are multiples of 16 bytes"
    return None


def _made(shape: _config.Shape, arch: Arch | None, finer: int) -> Config:
    splits, least = 0, _config.INVARIANT_KEYS
    if shape.batch > 0:
        units = 132 if arch is None else arch.compute_units
        programs = shape.batch * _layout.ceil_div(shape.rows, ROWS)
        splits, least = finer * _config.splits_for(programs, shape.capacity, units), _config.LEAST_KEYS
    # warps of the group that the launch counts; the kernel adds the others, and its stages are its own
    return Config(BLOCK_M=ROWS, BLOCK_N=KEYS, STAGES=STAGES, SPLITS=splits, KEYS=least, num_warps=4, num_stages=1)


def default(shape: _config.Shape, arch: Arch | None) -> Config:
    """As many splits as fill all compute units, of which a program takes one."""
    return _made(shape, arch, 1)


def space(shape: _config.Shape, arch: Arch) -> Iterator[Config]:
    """The configurations worth trying, each once, the default first: more splits."""
    for finer in (1, 2) if shape.batch > 0 else (1,):
        yield _made(shape, arch, finer)


def _descriptors(given: Operands, keys: int) -> tuple[Any, ...]:
    cache = given.latent_cache
    return (_triton.described_tiles(cache, [1, keys, HALF]), _triton.described_tiles(cache, [1, keys, ROTARY]))


def _kernel(keys: int) -> _launch.Kernel:
    """The kernel for tiles of so many keys."""

    def tensors(given: Operands, q: Tensor, memory: _launch.Memory) -> tuple[Any, ...]:
        table = given.seq_lens if given.block_table is None else given.block_table
        return (
            *_descriptors(given, keys), q, given.q_rope, given.seq_lens, table, memory.o, memory.lse, memory.parts,
            memory.meta,
        )  # fmt: skip

    def launch(
        given: Operands, q: Tensor, memory: _launch.Memory, config: Config, split: _launch.Split, _arch: Arch | None
    ) -> _launcher.Launch:
        q_strides, rope_strides = _launch.strides(q, 3), _launch.strides(given.q_rope, 3)
        q_align = _layout.alignment(0, q_strides, rope_strides)
        if given.block_table is not None and given.page % keys != 0:
            raise InvalidArgument(f"mla_decode: BLOCK_N={keys}: a tile of keys must lie in one page, of {given.page}")
        return _launcher.Launch(
            _hopper_mla_kernel,
            (split.blocks * split.splits * given.batch,),
            (
                *tensors(given, q, memory), float(given.scale), given.tokens, given.heads, given.page, *split,
                *(one // q_align for one in (*q_strides, *rope_strides)), *_launch.strides(given.block_table, 1),
                given.seq_lens.stride(0),
            ),
            {
                "PAGED": given.block_table is not None, "LSE": given.return_lse, "SPLIT": split.splits > 1,
                "Q_ALIGN": q_align,
            },
            Config(**{name: config[name] for name in ("BLOCK_N", "STAGES", "num_warps", "num_stages")}),
        )  # fmt: skip

    return _launch.Kernel(10, 2, tensors, launch)


def described(given: Operands, config: Config, arch: Arch | None) -> list[_launcher.Launch]:
    """The launches of a call, without memory for what they write."""
    return _launch.described(given, config, arch, _kernel(config["BLOCK_N"]))


def bind(given: Operands, config: Config, portable: Callable[..., Any]) -> Callable[..., Any]:
    """The function for all calls with arguments like these.

    `portable`: the other kernel's, for a call whose cache does not begin at a multiple of 16 bytes, as descriptors do.
    """
    made: Callable[..., Any] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal made
        now = Operands(*args, **kwargs)
        if not _hopper.aligned("mla_decode", now.latent_cache.data_ptr()):
            return portable(*args, **kwargs)
        if made is None:
            made = _launch.bind(now, config, _kernel(config["BLOCK_N"]))
        return made(*args, **kwargs)

    return call
