"""The launch of the kernel for gfx950 (`kernel_cdna.py`), and the calls and configurations that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.target as _target
import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops._flash_attention.call import FlashAttentionCall
from wavecrest.ops._flash_attention.config import Shape
from wavecrest.ops._flash_attention.kernel_cdna import _cdna_attention_kernel
from wavecrest.ops._flash_attention.launch import lse_strides, section, slot

NAME, ARCH = "triton_cdna", "gfx950"
# elements of 16 bytes, the unit of strides
CHUNK = 8
# queries of a wave, as a matrix instruction has
WAVE = 32
HEAD_DIMS = (64, 128)
KEYS = (32, 64, 128)
FAR = "counts bytes of a tile of q, k or v in 32 bits, and these tokens are further apart"


def refusal(call: FlashAttentionCall, access: str) -> str | None:
    """The reason why this kernel refuses a call that the portable one takes."""
    if _triton.no_gluon is not None:
        return _triton.no_gluon
    if torch.compiler.is_compiling():
        return "checks addresses when it is launched, which torch.compile does not trace"
    arch = _target.arch()
    if arch is None or arch.name != ARCH or _triton.interpreted:
        return f"is for {ARCH}, which copies 16 bytes a lane to LDS, and reads columns of LDS as rows"
    if call.q.dtype not in (torch.float16, torch.bfloat16) or call.quantized:
        return "takes float16 and bfloat16"
    for name, asked in (
        ("the left edge of a window", call.left >= 0),
        ("bias", call.bias is not None),
        ("ALiBi slopes", call.alibi_slopes is not None),
        ("softcap", call.capped > 0),
        ("dropout", call.dropout),
        ("a head_dim of v that is not that of q", call.head_dim_v != call.head_dim),
    ):
        if asked:
            return f"does not know {name}"
    if call.head_dim not in HEAD_DIMS:
        return f"has a head_dim of {HEAD_DIMS[0]} or {HEAD_DIMS[1]}"
    if access not in ("columns 16", "columns 16 expanded"):
        return "copies 16 bytes at a time: contiguous columns, every other stride a multiple of 16 bytes"
    return fault(call)


def fault(call: FlashAttentionCall) -> str | None:
    """The strides or the scale that keep the kernel from a call, in words: no key has them; None if it can run it."""
    if call.scale == 0:
        return "multiplies hidden scores of -inf by the scale, which is 0"
    furthest = max(call.bhsd(one).stride(2) for one in (call.q, call.k, call.v))
    # rows of the largest tile, and bytes of an element
    return FAR if 256 * furthest * 2 >= 1 << 31 else None


def default(shape: Shape, arch: Arch | None) -> Config:
    """Four waves of 32 queries, of which a compute unit has two programs: one multiplies beside the other's softmax.

    With D = 64 there are registers for the scores of 128 keys. By instructions in the emulator; not timed.
    """
    return made_of(4, 128 if shape.head_dim <= 64 else 64, shape, arch)


def made_of(waves: int, keys: int, shape: Shape, arch: Arch | None) -> Config:
    """The configuration of a program's waves and a step's keys."""
    # as in the portable kernel: longest tiles first, of the heads whose k and v an L2 cache holds
    order = {} if arch is None or not shape.causal else {"SECTION_MIB": int(arch.l2_mib)}
    return Config(BLOCK_M=WAVE * waves, BLOCK_N=keys, num_warps=waves, num_stages=1, waves_per_eu=2, **order)


def launch(
    call: FlashAttentionCall, o: Tensor, lse: Tensor | None, config: Config, arch: Arch | None
) -> _launcher.Launch:
    """The kernel for a checked call that `refusal` does not refuse and that has queries; `o` and `lse` contiguous.

    Raises:
        InvalidArgument: the tile is not one that the kernel has.
    """
    waves, keys = config["num_warps"], config["BLOCK_N"]
    if config["BLOCK_M"] != WAVE * waves or waves not in (2, 4, 8) or keys not in KEYS:
        raise InvalidArgument(
            f"flash_attention: {NAME} has a num_warps of 2, 4 or 8, {WAVE} times as many rows in BLOCK_M, and a "
            f"BLOCK_N of {', '.join(map(str, KEYS))}, and not {config}"
        )
    tiles = _layout.ceil_div(call.seqlen_q, config["BLOCK_M"])
    strides = [stride for one in (call.q, call.k, call.v) for stride in _strides(call, one)]
    out = call.bhsd(o).stride()
    return _launcher.Launch(
        _cdna_attention_kernel,
        (tiles * call.heads * call.batch,),
        (
            *_tensors(call, o, lse),
            call.scale, call.seqlen_q, call.seqlen_k, call.heads, call.group, tiles,
            min(call.right, call.seqlen_q + call.seqlen_k), *strides,
            0 if call.packed else out[0] // CHUNK, out[1] // CHUNK, out[2] // CHUNK, *lse_strides(call),
            *slot(call.sinks, 1), *slot(call.cu_seqlens_q, 1), *slot(call.cu_seqlens_k, 1),
            section(call, config), call.heads * call.batch,
        ),
        {
            "PACKED": call.packed,
            "RIGHT": call.right >= 0,
            "SINKS": call.sinks is not None,
            "LSE": call.return_lse,
            "XCDS": 1 if arch is None else arch.xcds,
            "SECTIONS": call.right >= 0 and config.get("SECTION_MIB", 0) > 0,
            "D": call.head_dim,
        },
        # the kernel takes heads, not MiB
        Config(**{name: value for name, value in config.kwargs.items() if name != "SECTION_MIB"}),
        _triton.without_accumulators(),
    )  # fmt: skip


def _strides(call: FlashAttentionCall, tensor: Tensor) -> tuple[int, ...]:
    """The strides of sequences, heads and tokens, in units of CHUNK; packed sequences begin where cu_seqlens says."""
    one = call.bhsd(tensor)
    # a stride says nothing where there is one element
    found = [step // CHUNK if size > 1 else 0 for size, step in zip(one.shape, one.stride(), strict=True)]
    return (0 if call.packed else found[0], *found[1:3])


def _tensors(call: FlashAttentionCall, o: Tensor, lse: Tensor | None) -> tuple[Tensor, ...]:
    """The kernel's tensors; q, which is not read through them, in the place of an absent one."""
    found = (call.q, call.k, call.v, call.sinks, call.cu_seqlens_q, call.cu_seqlens_k, o, lse)
    return tuple(call.q if one is None else one for one in found)


def bind(
    call: FlashAttentionCall, config: Config, portable: Callable[[FlashAttentionCall], Any]
) -> Callable[[FlashAttentionCall], Tensor | tuple[Tensor, Tensor]]:
    """The function that launches the kernel for calls with the signature of this one.

    `portable`: the other kernel's, for calls whose strides or addresses are not for this one, as no key says.
    """
    if (reason := fault(call)) is not None:
        _launcher.replaced("flash_attention", reason, NAME)
        return portable
    shape, dtype, device = call.shape, call.dtype, call.q.device
    lse_shape = call.lse_shape if call.return_lse else None
    start: Callable[..., None] | None = None
    if call.batch * call.seqlen_q * call.q.numel() > 0:
        # what is bound must not keep the tensors of one call
        o = torch.empty(shape, dtype=dtype, device="meta")
        lse = None if lse_shape is None else torch.empty(lse_shape, dtype=torch.float32, device="meta")
        start = _launcher.starter(launch(call, o, lse, config, _target.arch()), device)

    def run(call: FlashAttentionCall) -> Tensor | tuple[Tensor, Tensor]:
        addresses = call.q.data_ptr() | call.k.data_ptr() | call.v.data_ptr()
        if addresses % 16 != 0 and not _launcher.aligned("flash_attention", addresses, NAME):
            result: Tensor | tuple[Tensor, Tensor] = portable(call)
            return result
        o = torch.empty(shape, dtype=dtype, device=device)
        lse = None if lse_shape is None else torch.empty(lse_shape, dtype=torch.float32, device=device)
        if start is not None:
            start(*_tensors(call, o, lse))
        return o if lse is None else (o, lse)

    return run
