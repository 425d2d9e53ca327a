"""The launch of the kernel for short sequences (`kernel_short.py`), and the calls and configurations that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.keys import row_bucket
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops._flash_attention.call import FlashAttentionCall
from wavecrest.ops._flash_attention.config import Shape
from wavecrest.ops._flash_attention.kernel_short import _short_attention_kernel
from wavecrest.ops._flash_attention.launch import FAR, LEAST_BLOCK

NAME = "triton_short"
# values of the kernel's BIAS: all sequences share a head's, or each has its own
SHARED, OF_EACH = 1, 2
# keys that one tile holds, and elements of their head_dims
MOST_KEYS, MOST_ELEMENTS = 128, 128 * 64
# rows of a tile
ROWS = (16, 32, 64, 128)
# elements in 16 bytes, the unit of strides
CHUNK = 8


def refusal(call: FlashAttentionCall, access: str) -> str | None:
    """The reason why this kernel refuses a call that the portable one takes."""
    if call.q.dtype not in (torch.float16, torch.bfloat16) or call.quantized:
        return "takes float16 and bfloat16"
    for name, asked in (
        ("packed sequences", call.packed),
        ("the left edge of a window", call.left >= 0),
        ("ALiBi slopes", call.alibi_slopes is not None),
        ("softcap", call.capped > 0),
        ("sinks", call.sinks is not None),
        ("dropout", call.dropout),
        ("logarithms of sums", call.return_lse),
        ("calls without keys", call.seqlen_k == 0),
    ):
        if asked:
            return f"does not know {name}"
    if call.seqlen_k > MOST_KEYS:
        return f"holds at most {MOST_KEYS} keys in one tile"
    block_n, *head_dims = _blocks(call)
    if block_n * max(head_dims) > MOST_ELEMENTS:
        return f"holds at most {MOST_ELEMENTS} elements of keys in one tile"
    if not access.startswith("columns 16"):
        return "reads contiguous columns, every other stride a multiple of 16 bytes"
    if call.head_dim % CHUNK != 0 or call.head_dim_v % CHUNK != 0:
        return f"has a head_dim that is a multiple of {CHUNK}"
    return fault(call)


def fault(call: FlashAttentionCall) -> str | None:
    """The strides that keep the kernel from a call, in words: no key has them; None if it can run it."""
    # the result is contiguous
    furthest = call.head_dim_v * (call.heads if call.layout == "bshd" else 1)
    for one in (call.q, call.k, call.v):
        furthest = max(furthest, _strides(call, one)[2] * CHUNK)
    bias = call.broadcast_bias()
    if bias is not None:
        furthest = max(furthest, bias.stride(2) + bias.stride(3))
    if max(call.seqlen_q + ROWS[-1], call.seqlen_k) * furthest >= FAR:
        return "counts the elements of a sequence in 32 bits, and these tokens are further apart"
    return None


def default(shape: Shape, keys: int, arch: Arch | None) -> Config:
    """Tiles of 64 queries in four warps; on NVIDIA of 128 in eight, above 64 keys and without a bias or a mask.

    By times of windows of 49 tokens and of sentences of 50 to 128 on an H200 (2026-11-28). On AMD by registers and LDS:
    beside 128 keys, or a wide head, there is room for no next sequence, and a mask takes two scalar registers for each
    element of a lane.
    """
    many = keys > 64
    rows = max(LEAST_BLOCK, min(64, _layout.power_of_two(shape.seqlen_q)))
    if arch is not None and arch.vendor == "amd":
        narrow, wide_head = arch.wave_size == 32, shape.head_dim > 64
        if many and (shape.causal or narrow):
            rows = min(rows, 16 if narrow and (shape.more or shape.causal) else 32)
        elif narrow and wide_head:
            rows = min(rows, 32)
        return made_of(rows, 4, 1 if many or narrow or wide_head else 2, 4, arch)
    if many and shape.seqlen_q > 64 and shape.head_dim > 32 and not shape.more and not shape.causal:
        return made_of(128, 8, 2, 2, arch)
    return made_of(rows, 4, 2 if many else 3, 4, arch)


def made_of(rows: int, warps: int, stages: int, per_unit: int, arch: Arch | None) -> Config:
    """The configuration of a tile, and of the programs a compute unit."""
    more = {} if arch is None or arch.vendor != "amd" else {"matrix_instr_nonkdim": 16}
    return Config(BLOCK_M=rows, PER_UNIT=per_unit, num_warps=warps, num_stages=stages, **more)


def parts_of(batch: int, tiles: int, config: Config, arch: Arch | None) -> int:
    """The parts that the sequences are dealt to, whose `tiles` are taken by a program each: about PER_UNIT a unit."""
    units = 1 if arch is None else arch.compute_units
    each = _layout.ceil_div(batch * tiles, config["PER_UNIT"] * units)
    return _layout.ceil_div(batch, each)


def launch(call: FlashAttentionCall, o: Tensor, config: Config, arch: Arch | None) -> _launcher.Launch:
    """The kernel for a checked call that `refusal` does not refuse and that has queries; `o` contiguous.

    Raises:
        InvalidArgument: the tile is not one that the kernel has.
    """
    if config["BLOCK_M"] not in ROWS or config["PER_UNIT"] < 1:
        raise InvalidArgument(
            f"flash_attention: {NAME} has a BLOCK_M of {', '.join(map(str, ROWS))} and a PER_UNIT of at least 1, and "
            f"not {config}"
        )
    tiles = _layout.ceil_div(call.seqlen_q, config["BLOCK_M"])
    parts = parts_of(call.batch, call.heads * tiles, config, arch)
    block_n, block_d, block_dv = _blocks(call)
    bias = call.broadcast_bias()
    bias_strides = (0, 0, 0, 0) if bias is None else bias.stride()
    return _launcher.Launch(
        _short_attention_kernel,
        (tiles * call.heads * parts,),
        (
            *_tensors(call, o),
            call.scale, call.seqlen_q, call.seqlen_k, call.head_dim // CHUNK, call.head_dim_v // CHUNK, call.batch,
            call.heads, call.group, tiles, parts, min(call.right, call.seqlen_q + call.seqlen_k),
            *(step for one in (call.q, call.k, call.v, o) for step in _strides(call, one)), *bias_strides,
        ),
        {
            "RIGHT": call.right >= 0,
            "BIAS": 0 if bias is None else SHARED if bias_strides[0] == 0 or call.batch == 1 else OF_EACH,
            "BIAS_ROWS": bias_strides[2] != 0,
            "EVEN_N": call.seqlen_k == block_n,
            "EVEN_D": call.head_dim == block_d,
            "EVEN_DV": call.head_dim_v == block_dv,
            "TIES_UP": arch is not None and arch.wave_size == 64 and not arch.rounds_bf16,
            "XCDS": 1 if arch is None else arch.xcds,
            "BLOCK_D": block_d,
            "BLOCK_DV": block_dv,
            "BLOCK_N": block_n,
        },
        # the kernel is told parts
        Config(**{name: value for name, value in config.kwargs.items() if name != "PER_UNIT"}),
    )  # fmt: skip


def _blocks(call: FlashAttentionCall) -> tuple[int, ...]:
    """The powers of two that hold the keys and both head_dims, and that matrix units take."""
    # by comparisons: inside torch.compile one graph serves all lengths of a bucket
    keys = row_bucket(call.seqlen_k)
    return tuple(max(LEAST_BLOCK, _layout.power_of_two(one)) for one in (keys, call.head_dim, call.head_dim_v))


def _strides(call: FlashAttentionCall, tensor: Tensor) -> tuple[int, ...]:
    """The strides of sequences, heads and tokens, in units of CHUNK."""
    one = call.bhsd(tensor)
    # a stride says nothing where there is one element
    return tuple(step // CHUNK if size > 1 else 0 for size, step in zip(one.shape[:3], one.stride()[:3], strict=True))


def _tensors(call: FlashAttentionCall, o: Tensor) -> tuple[Tensor, ...]:
    """The kernel's tensors; q, which is not read through it, in the place of an absent bias."""
    return (call.q, call.k, call.v, call.q if call.bias is None else call.bias, o)


def bind(
    call: FlashAttentionCall, config: Config, portable: Callable[[FlashAttentionCall], Any]
) -> Callable[[FlashAttentionCall], Tensor]:
    """The function that launches the kernel for calls with the signature of this one.

    `portable`: the other kernel's, for calls whose strides are not for this one, as no key says.
    """
    if (reason := fault(call)) is not None:
        _launcher.replaced("flash_attention", reason, NAME)
        return portable
    shape, dtype, device = call.shape, call.dtype, call.q.device
    start: Callable[..., None] | None = None
    if call.batch * call.seqlen_q * call.q.numel() > 0:
        # what is bound must not keep the tensors of one call
        o = torch.empty(shape, dtype=dtype, device="meta" if not torch.compiler.is_compiling() else device)
        start = _launcher.starter(launch(call, o, config, _target.arch()), device)

    def run(call: FlashAttentionCall) -> Tensor:
        o = torch.empty(shape, dtype=dtype, device=device)
        if start is not None:
            start(*_tensors(call, o))
        return o

    return run
