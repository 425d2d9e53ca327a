"""The kernel's launch: how tensors are walked, and what the kernel is compiled for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.quantized as _quantized
import wavecrest.ops.common.target as _target
import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops._flash_attention.call import EIGHT_BITS, Operands
from wavecrest.ops._flash_attention.kernel import _flash_attention_kernel
from wavecrest.ops.common.triton import tl

# what is contiguous, as the kernel numbers it
ANY, COLUMNS, TOKENS = 0, 1, 2
ORDERS = ("any", "columns", "tokens")
TENSORS = 13
# matrix units take no fewer, of 8-bit values no fewer than the second
LEAST_BLOCK, LEAST_BLOCK_OF_CODES = 16, 32
# offsets in a tile from which on 32 bits are too few
FAR = 1 << 31


class Walk(NamedTuple):
    """How a tensor [B, H, S, D] is walked: what is contiguous, strides in units of `align`."""

    order: int
    align: int
    strides: tuple[int, int, int, int]


def walk(tensor: Tensor) -> Walk:
    """The walk of q, k, v or bias as [B, H, S, D]; packed sequences are one, at a stride of 0."""
    # a stride says nothing where there is one element
    b, h, s, d = (stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if d == 1 or tensor.shape[3] == 1:
        align = _layout.alignment(0, (b, h, s))
        return Walk(COLUMNS, align, (b // align, h // align, s // align, 1))
    if s == 1:
        align = _layout.alignment(0, (b, h, d))
        return Walk(TOKENS, align, (b // align, h // align, 1, d // align))
    align = _layout.alignment(0, (b, h, s, d))
    return Walk(ANY, align, (b // align, h // align, s // align, d // align))


def access(given: Operands) -> str:
    """What is contiguous in q, k and v, the bytes that their accesses may have, up to 16, and whether one repeats."""
    views = [given.bhsd(one) for one in (given.q, given.k, given.v)]
    walks = [walk(one) for one in views]
    again = any(size > 1 and step == 0 for one in views for size, step in zip(one.shape, one.stride(), strict=True))
    names = [ORDERS[one.order] for one in walks]
    together = names[0] if len(set(names)) == 1 else " ".join(names)
    width = min(16, min(one.align for one in walks) * given.k.element_size())
    return f"{together} {width}{' expanded' if again else ''}"


def _slot(tensor: Tensor | None, dims: int) -> tuple[int, ...]:
    """The strides of a small tensor: 0 where it is one number, the first of them 0 where it has fewer dimensions."""
    strides = () if tensor is None or tensor.numel() == 1 else tensor.stride()
    return (0,) * (dims - len(strides)) + tuple(strides)


def _wide(walks: tuple[Walk, ...], config: Config, columns: int) -> bool:
    """True if an offset inside a tile may need more than 31 bits."""
    rows = max(config["BLOCK_M"], config["BLOCK_N"], columns)
    return any(2 * rows * walked.align * max(walked.strides[2:]) >= FAR for walked in walks)


def multiplies(dtype: torch.dtype, arch: Arch | None) -> bool:
    """True if matrix instructions take an 8-bit type as it is; in Triton's interpreter, if it knows the type."""
    if dtype == torch.int8:
        return True
    fnuz = dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    if arch is None:
        return not fnuz
    return arch.fp8 is not None and fnuz == arch.fp8.endswith("fnuz")


def unreadable(dtype: torch.dtype, arch: Arch | None) -> str | None:
    """Why the kernel does not take 8-bit tensors; on AMD's GPUs the compiler writes out what has no instruction."""
    if multiplies(dtype, arch) or (arch is not None and arch.vendor == "amd"):
        return None
    name = str(dtype).removeprefix("torch.")
    return f"Triton's interpreter has no {name}" if arch is None else f"{arch.name} has no {name}"


def _arithmetic(given: Operands, arch: Arch | None) -> dict[str, Any]:
    """What is multiplied as it is and what is widened; of tensors that are not 8-bit always the same."""
    found = {
        "QUANTIZED": given.quantized, "TYPE": tl.float32, "WIDEN": False, "ROUNDED": 0, "LARGEST": 0.0, "PTX": False,
        "FOREIGN": False, "Q_DESCALE": given.q_descale is not None, "K_DESCALE": given.k_descale is not None,
        "V_DESCALE": given.v_descale is not None,
    }  # fmt: skip
    if given.quantized:
        kept = multiplies(given.k.dtype, arch)
        native = arch is not None and (arch.vendor == "nvidia" or arch.name == "gfx950")
        found |= {
            "TYPE": getattr(tl, str(given.wide).removeprefix("torch.")),
            "WIDEN": given.q.dtype not in EIGHT_BITS or not kept,
            # weights are as little below 8 bits as values where nothing multiplies them as they are
            "ROUNDED": 0 if given.p_descale is None else 2 if kept else 1,
            "LARGEST": _quantized.LARGEST[given.k.dtype],
            "PTX": arch is not None and arch.vendor == "nvidia" and not _triton.interpreted,
            "FOREIGN": given.k.dtype == torch.float8_e4m3fn and not native,
        }
    return found


def _columns(tensor: Tensor) -> int:
    """The power of two that holds a tensor's columns, and that matrix units take."""
    least = LEAST_BLOCK_OF_CODES if tensor.dtype in EIGHT_BITS else LEAST_BLOCK
    return max(least, _layout.power_of_two(tensor.shape[-1]))


def _words(given: Operands) -> tuple[int, int, int]:
    """The seed's halves and the least word that is kept, as signed numbers of 32 bits: their type is always one."""
    seed = 0 if given.seed is None else given.seed
    numbers = (seed % 2**32, seed // 2**32, given.least_kept)
    # without a branch, of which torch.compile would make a graph each
    low, high, least = ((number + 2**31) % 2**32 - 2**31 for number in numbers)
    return low, high, least


def launch(given: Operands, o: Tensor, lse: Tensor | None, config: Config, arch: Arch | None) -> _launcher.Launch:
    """The kernel for a checked call that has queries; `o` and `lse` contiguous."""
    q, k, v = (given.bhsd(one) for one in (given.q, given.k, given.v))
    if given.packed:
        # sequences begin where cu_seqlens says
        q, k, v = (one.expand(given.batch, *one.shape[1:]) for one in (q, k, v))
    bias = given.broadcast_bias()
    walks = tuple(walk(one) for one in (q, k, v, q if bias is None else bias))
    block_d, block_dv = _columns(q), max(LEAST_BLOCK, _layout.power_of_two(v.shape[-1]))
    d_align, dv_align = (_layout.alignment(one.shape[-1]) for one in (q, v))
    o_strides = given.bhsd(o).stride()
    tiles = _layout.ceil_div(given.queries, config["BLOCK_M"])
    # left and right of all there is
    most = given.queries + given.keys
    return _launcher.Launch(
        _flash_attention_kernel,
        (tiles * given.heads * given.batch,),
        (
            *_tensors(given, o, lse),
            given.scale, float(given.softcap), given.queries, given.keys, given.heads, given.group, tiles,
            given.columns // d_align, given.v_columns // dv_align, min(given.left, most), min(given.right, most),
            *walks[0].strides, *walks[1].strides, *walks[2].strides,
            0 if given.packed else o_strides[0] // dv_align, o_strides[1] // dv_align, o_strides[2] // dv_align,
            *_lse_strides(given), *((0, 0, 0, 0) if bias is None else walks[3].strides),
            *_slot(given.alibi_slopes, 2), *_slot(given.sinks, 1),
            *_slot(given.cu_seqlens_q, 1), *_slot(given.cu_seqlens_k, 1),
            1.0 if given.p_descale is None else float(given.p_descale),
            *_slot(given.q_descale, 2), *_slot(given.k_descale, 2), *_slot(given.v_descale, 2),
            *_words(given), 1.0 / (1.0 - given.dropout_p),
        ),
        {
            "PACKED": given.packed,
            "LEFT": given.left >= 0,
            "RIGHT": given.right >= 0,
            "SOFTCAP": given.capped,
            "BIAS": bias is not None,
            "ALIBI": given.alibi_slopes is not None,
            "SINKS": given.sinks is not None,
            "LSE": given.return_lse,
            "DROPOUT": given.dropout,
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
            "EVEN_D": given.columns == block_d,
            "EVEN_DV": given.v_columns == block_dv,
            "WIDE": _wide(walks, config, max(block_d, block_dv)),
            **_arithmetic(given, arch),
            "XCDS": 1 if arch is None else arch.xcds,
            "BLOCK_D": block_d,
            "BLOCK_DV": block_dv,
        },
        config,
    )  # fmt: skip


def _tensors(given: Operands, o: Tensor, lse: Tensor | None) -> tuple[Tensor, ...]:
    """The kernel's tensors; q, which is not read through them, where there is none."""
    q = given.q
    optional = (given.bias, given.alibi_slopes, given.sinks, given.cu_seqlens_q, given.cu_seqlens_k)
    descales = (given.q_descale, given.k_descale, given.v_descale)
    return (
        q, given.k, given.v, *(q if one is None else one for one in optional), o, q if lse is None else lse,
        *(q if one is None else one for one in descales),
    )  # fmt: skip


def _lse_strides(given: Operands) -> tuple[int, int]:
    if given.packed:
        return 0, given.q.shape[0]
    return given.heads * given.queries, given.queries


def empty_results(given: Operands) -> tuple[Tensor, Tensor | None]:
    """The result and its logarithms, not yet written."""
    device = given.q.device
    o = torch.empty(given.shape, dtype=given.dtype, device=device)
    if not given.return_lse:
        return o, None
    return o, torch.empty(given.lse_shape, dtype=torch.float32, device=device)


def bind(given: Operands, config: Config) -> Callable[..., Any]:
    """The function for all calls with arguments like these."""
    # what is kept must not keep the tensors of one call
    meta = given._replace(q=given.q.to("meta")) if not torch.compiler.is_compiling() else given
    some = given.batch * given.queries * given.q.numel() > 0
    start: Callable[..., None] | None = None
    sizes: tuple[Any, ...] = ()
    if some:
        made = launch(given, *empty_results(meta), config, _target.arch())
        start, sizes = _launcher.starter(made, given.q.device), made.args[TENSORS:]

    def call(*args: Any, **kwargs: Any) -> Any:
        now = Operands(*args, **kwargs)
        o, lse = empty_results(now)
        if start is not None:
            start(*_tensors(now, o, lse), *sizes)
        return (o, lse) if now.return_lse else o

    return call
