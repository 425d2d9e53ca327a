"""The kernel's launch: how tensors are indexed (strides), and what the kernel is compiled for; and its binding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.quantized as _quantized
import wavecrest.ops.common.target as _target
import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._flash_attention.call import COLUMNS, EIGHT_BITS, FlashAttentionCall, Walk, walk
from wavecrest.ops._flash_attention.kernel import _flash_attention_kernel
from wavecrest.ops.common.triton import tl

# matrix units take no fewer, of 8-bit values no fewer than the second
LEAST_BLOCK, LEAST_BLOCK_8_BITS = 16, 32
# parts of a configuration that the kernel does not take: which heads go together, and programs a compute unit
NOT_CONSTANT = ("SECTION_MIB", "PER_UNIT")
# the value of PERSISTENT with which programs take the next tile that none has
DYNAMIC = 2
# programs a compute unit where a configuration does not say: what runs at once
PER_UNIT = 2
# offsets in a tile from which on 32 bits are too few
FAR = 1 << 31


def slot(tensor: Tensor | None, dims: int) -> tuple[int, ...]:
    """The strides of a small tensor: 0 where it is one number, the first of them 0 where it has fewer dimensions."""
    strides = () if tensor is None or tensor.numel() == 1 else tensor.stride()
    return (0,) * (dims - len(strides)) + tuple(strides)


def _wide(walks: tuple[Walk, ...], config: Config, head_dim: int) -> bool:
    """True if an offset inside a tile may need more than 31 bits."""
    rows = max(config["BLOCK_M"], config["BLOCK_N"], head_dim)
    return any(2 * rows * walked.align * max(walked.strides[2:]) >= FAR for walked in walks)


def multiplies(dtype: torch.dtype, arch: Arch | None) -> bool:
    """True if matrix instructions take an 8-bit type as it is; in Triton's interpreter, if it knows the type."""
    if dtype == torch.int8:
        return True
    fnuz = dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    if arch is None:
        return not fnuz
    return arch.fp8 is not None and fnuz == arch.fp8.endswith("fnuz")


def refuse_dtype(dtype: torch.dtype, arch: Arch | None) -> str | None:
    """The reason why the kernel cannot read an 8-bit dtype; for AMD the compiler emulates a missing instruction."""
    if multiplies(dtype, arch) or (arch is not None and arch.vendor == "amd"):
        return None
    name = str(dtype).removeprefix("torch.")
    return f"Triton's interpreter has no {name}" if arch is None else f"{arch.name} has no {name}"


def _arithmetic(call: FlashAttentionCall, arch: Arch | None) -> dict[str, Any]:
    """The constants for 8-bit tensors: what is multiplied as it is, and what is widened; fixed for other dtypes."""
    # on gfx11 and gfx12 some kernels take more registers with it (triton 3.6, 2026-11-27)
    ties_up = arch is not None and arch.wave_size == 64 and not arch.rounds_bf16
    found = {
        "QUANTIZED": call.quantized, "TYPE": tl.float32, "WIDEN": False, "ROUNDED": 0, "LARGEST": 0.0, "PTX": False,
        "FOREIGN": False, "TIES_UP": ties_up,
        "Q_DESCALE": call.q_descale is not None, "K_DESCALE": call.k_descale is not None,
        "V_DESCALE": call.v_descale is not None,
    }  # fmt: skip
    if call.quantized:
        kept = multiplies(call.k.dtype, arch)
        native = arch is not None and (arch.vendor == "nvidia" or arch.name == "gfx950")
        found |= {
            "TYPE": getattr(tl, str(call.wide).removeprefix("torch.")),
            "WIDEN": call.q.dtype not in EIGHT_BITS or not kept,
            # weights are as little below 8 bits as values where nothing multiplies them as they are
            "ROUNDED": 0 if call.p_descale is None else 2 if kept else 1,
            "LARGEST": _quantized.LARGEST[call.k.dtype],
            "PTX": arch is not None and arch.vendor == "nvidia" and not _triton.interpreted,
            "FOREIGN": call.k.dtype == torch.float8_e4m3fn and not native,
        }
    return found


def _block_d(tensor: Tensor) -> int:
    """The power of two that holds a tensor's head_dim, and that matrix units take."""
    least = LEAST_BLOCK_8_BITS if tensor.dtype in EIGHT_BITS else LEAST_BLOCK
    return max(least, _layout.power_of_two(tensor.shape[-1]))


def _words(call: FlashAttentionCall) -> tuple[int, int, int]:
    """The seed's halves and the least word that is kept, as signed numbers of 32 bits: their type is always one."""
    seed = 0 if call.seed is None else call.seed
    numbers = (seed % 2**32, seed // 2**32, call.least_kept)
    # without a branch, of which torch.compile would make a graph each
    low, high, least = ((number + 2**31) % 2**32 - 2**31 for number in numbers)
    return low, high, least


def launch(
    call: FlashAttentionCall, o: Tensor, lse: Tensor | None, config: Config, arch: Arch | None
) -> _launcher.Launch:
    """The kernel for a checked call that has queries; `o` and `lse` contiguous."""
    q, k, v = (call.bhsd(one) for one in (call.q, call.k, call.v))
    if call.packed:
        # sequences begin where cu_seqlens says
        q, k, v = (one.expand(call.batch, *one.shape[1:]) for one in (q, k, v))
    bias = call.broadcast_bias()
    walks = tuple(walk(one) for one in (q, k, v, q if bias is None else bias))
    block_d, block_dv = _block_d(q), max(LEAST_BLOCK, _layout.power_of_two(v.shape[-1]))
    d_align, dv_align = (_layout.alignment(one.shape[-1]) for one in (q, v))
    o_strides = call.bhsd(o).stride()
    tiles = _layout.ceil_div(call.seqlen_q, config["BLOCK_M"])
    programs, taken = tiles * call.heads * call.batch, {"PERSISTENT": 0} | config.kwargs
    if taken["PERSISTENT"]:
        programs = min(programs, config.get("PER_UNIT", PER_UNIT) * (1 if arch is None else arch.compute_units))
    # a window of this width hides no key
    most = call.seqlen_q + call.seqlen_k
    return _launcher.Launch(
        _flash_attention_kernel,
        (programs,),
        (
            *_tensors(call, o, lse),
            counts_of(call, config, arch),
            call.scale, float(call.softcap), call.seqlen_q, call.seqlen_k, call.heads, call.group, tiles,
            call.head_dim // d_align, call.head_dim_v // dv_align, min(call.left, most), min(call.right, most),
            *walks[0].strides, *walks[1].strides, *walks[2].strides,
            0 if call.packed else o_strides[0] // dv_align, o_strides[1] // dv_align, o_strides[2] // dv_align,
            *lse_strides(call), *((0, 0, 0, 0) if bias is None else walks[3].strides),
            *slot(call.alibi_slopes, 2), *slot(call.sinks, 1),
            *slot(call.cu_seqlens_q, 1), *slot(call.cu_seqlens_k, 1),
            1.0 if call.p_descale is None else float(call.p_descale),
            *slot(call.q_descale, 2), *slot(call.k_descale, 2), *slot(call.v_descale, 2),
            *_words(call), 1.0 / (1.0 - call.dropout_p), section(call, config), call.heads * call.batch,
        ),
        {
            "PACKED": call.packed,
            "LEFT": call.left >= 0,
            "RIGHT": call.right >= 0,
            "SOFTCAP": call.capped,
            "BIAS": bias is not None,
            "ALIBI": call.alibi_slopes is not None,
            "SINKS": call.sinks is not None,
            "LSE": call.return_lse,
            "DROPOUT": call.dropout,
            "Q_ORDER": walks[0].order,
            "K_ORDER": walks[1].order,
            "V_ORDER": walks[2].order,
            "BIAS_ORDER": COLUMNS if bias is None else walks[3].order,
            "Q_ALIGN": walks[0].align,
            "K_ALIGN": walks[1].align,
            "V_ALIGN": walks[2].align,
            "BIAS_ALIGN": 1 if bias is None else walks[3].align,
            "D_ALIGN": d_align,
            "DV_ALIGN": dv_align,
            "EVEN_D": call.head_dim == block_d,
            "EVEN_DV": call.head_dim_v == block_dv,
            "WIDE": _wide(walks, config, max(block_d, block_dv)),
            **_arithmetic(call, arch),
            "XCDS": 1 if arch is None else arch.xcds,
            "SECTIONS": call.right >= 0 and config.get("SECTION_MIB", 0) > 0,
            "BLOCK_D": block_d,
            "BLOCK_DV": block_dv,
        },
        # the kernel takes neither
        Config(**{name: value for name, value in taken.items() if name not in NOT_CONSTANT}),
    )  # fmt: skip


def section(call: FlashAttentionCall, config: Config) -> int:
    """Heads that go together, longest tiles first: whole groups, whose k and v take up to SECTION_MIB, or one group."""
    kept = call.seqlen_k * (call.head_dim * call.k.element_size() + call.head_dim_v * call.v.element_size())
    groups = (config.get("SECTION_MIB", 0) << 20) // max(1, kept)
    return min(call.heads * call.batch, call.group * max(1, groups))


def counts_of(call: FlashAttentionCall, config: Config, arch: Arch | None) -> Tensor:
    """Zeros [XCDs] that programs count tiles in, where they take the next one; q in their place where they do not."""
    if config.get("PERSISTENT", 0) != DYNAMIC:
        return call.q
    return torch.zeros(1 if arch is None else arch.xcds, dtype=torch.int32, device=call.q.device)


def _tensors(call: FlashAttentionCall, o: Tensor, lse: Tensor | None) -> tuple[Tensor, ...]:
    """The kernel's tensors; q, which is not read through them, in the place of an absent one."""
    q = call.q
    return (
        q,
        call.k,
        call.v,
        q if call.bias is None else call.bias,
        q if call.alibi_slopes is None else call.alibi_slopes,
        q if call.sinks is None else call.sinks,
        q if call.cu_seqlens_q is None else call.cu_seqlens_q,
        q if call.cu_seqlens_k is None else call.cu_seqlens_k,
        o,
        q if lse is None else lse,
        q if call.q_descale is None else call.q_descale,
        q if call.k_descale is None else call.k_descale,
        q if call.v_descale is None else call.v_descale,
    )


def lse_strides(call: FlashAttentionCall) -> tuple[int, int]:
    """The strides of logarithms of sequences and of heads."""
    if call.packed:
        return 0, call.q.shape[0]
    return call.heads * call.seqlen_q, call.seqlen_q


def empty_results(call: FlashAttentionCall) -> tuple[Tensor, Tensor | None]:
    """Memory for the result and its logarithms."""
    device = call.q.device
    o = torch.empty(call.shape, dtype=call.dtype, device=device)
    if not call.return_lse:
        return o, None
    return o, torch.empty(call.lse_shape, dtype=torch.float32, device=device)


def bind(call: FlashAttentionCall, config: Config) -> Callable[[FlashAttentionCall], Tensor | tuple[Tensor, Tensor]]:
    """The function that launches the kernel for calls with the signature of this one."""
    # the bound function must not keep the tensors of one call
    meta = call._replace(q=call.q.to("meta")) if not torch.compiler.is_compiling() else call
    shape, dtype, device = call.shape, call.dtype, call.q.device
    lse_shape = call.lse_shape if call.return_lse else None
    start: Callable[..., None] | None = None
    arch = _target.arch()
    if call.batch * call.seqlen_q * call.q.numel() > 0:
        made = launch(call, *empty_results(meta), config, arch)
        start = _launcher.starter(made, device)

    def run(call: FlashAttentionCall) -> Tensor | tuple[Tensor, Tensor]:
        o = torch.empty(shape, dtype=dtype, device=device)
        lse = None if lse_shape is None else torch.empty(lse_shape, dtype=torch.float32, device=device)
        if start is not None:
            start(*_tensors(call, o, lse), counts_of(call, config, arch))
        return o if lse is None else (o, lse)

    return run
