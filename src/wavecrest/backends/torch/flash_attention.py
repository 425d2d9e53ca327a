"""Attention by PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wavecrest.backends.torch.common import PRIORITY, ROUNDED, other_dtype, rounds, unrounded
from wavecrest.dispatch.keys import needs_grad
from wavecrest.ops._flash_attention.backend import op as _op
from wavecrest.ops._flash_attention.call import FlashAttentionCall

# makes the mask of a call from its bias
Mask = Callable[[Tensor | None], Tensor | None]


def _refuse(call: FlashAttentionCall) -> str | None:
    if call.quantized:
        return "multiplies no 8-bit q, k and v"
    if call.packed:
        return "has no packed sequences"
    if call.return_lse:
        return "returns no logarithms"
    for name, asked in (
        ("softcap", call.softcap > 0),
        ("sinks", call.sinks is not None),
        ("ALiBi slopes in float32", call.alibi_slopes is not None),
        ("dropout whose mask a seed gives", call.dropout),
    ):
        if asked:
            return f"has no {name}"
    if call.blind:
        return "leaves to its kernels what a query without keys gives"
    if torch.compiler.is_compiling() and call.q.dtype == torch.float32 and rounds(call.q.device.type):
        return ROUNDED
    return other_dtype(call.q, bias=call.bias)


def _opt_in(call: FlashAttentionCall) -> str | None:
    if not call.q.is_cuda or needs_grad(call.q, call.k, call.v, call.bias):
        return None
    diagonal = call.right > 0 or (call.right == 0 and not call.square and call.seqlen_q != 1)
    if call.left >= 0 or diagonal or (call.right == 0 and call.bias is not None):
        return "makes a mask of all queries and keys: it runs where it is named, and for gradients"
    return None


def _mask_of(call: FlashAttentionCall, asked: bool = False) -> Mask | None:
    """A function that makes the mask of calls like this one: added to scores, or visible pairs; None without a mask.

    The diagonal of a mask is at the bottom right. The mask is made for each call, because a kept one might take more
    memory than all else. `asked`: a mask of the same shape and dtype with one row in memory, to ask PyTorch without a
    call what it takes.
    """
    left, right, seqlen_q, seqlen_k, device = call.left, call.right, call.seqlen_q, call.seqlen_k, call.q.device
    # the first query's last key, and the last one's first: where those are in sight all are
    if not (0 <= right < seqlen_q - 1 or 0 <= left < seqlen_k - 1):
        if call.bias is None:
            return None
        whole = (call.batch, call.heads, seqlen_q, seqlen_k)
        return lambda bias: None if bias is None else bias.expand(whole)
    # PyTorch takes masks of two dimensions and of four
    shape = () if call.bias is None else (1,) * (4 - call.bias.ndim) + tuple(call.bias.shape)

    def one_row(bias: Tensor | None) -> Tensor:
        row = torch.empty(seqlen_k, dtype=torch.bool if bias is None else bias.dtype, device=device)
        return row.expand(*shape[:2], seqlen_q, seqlen_k)

    def made(bias: Tensor | None) -> Tensor:
        i = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
        j = torch.arange(seqlen_k, device=device)[None, :]
        visible = torch.ones_like(i == j) if right < 0 else j <= i + right
        if left >= 0:
            visible = visible & (j >= i - left)
        return visible if bias is None else torch.where(visible, bias.reshape(shape), float("-inf"))

    return one_row if asked else made


def _options(call: FlashAttentionCall, asked: bool = False) -> tuple[dict[str, Any], Mask | None]:
    """The options of scaled_dot_product_attention that calls like this one share, and what makes their masks."""
    # branches: torch.compile may not know sizes, and what they make of flags is no constant
    options: dict[str, Any] = {"enable_gqa": True} if call.group > 1 else {}
    # PyTorch's own default is 1 / √D too, which float32 rounds to the same number; to pass one takes 0.3 µs a call
    if call.softmax_scale is not None:
        options["scale"] = call.softmax_scale
    # PyTorch's causal mask is aligned at the upper left
    if call.right == 0 and call.left < 0 and call.bias is None and call.square:
        return options | {"is_causal": True}, None
    return options, _mask_of(call, asked)


def attention_call(call: FlashAttentionCall) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """q, k and v [B, H, S, D] and options of scaled_dot_product_attention, to ask PyTorch what it takes.

    A mask has the shape and dtype of the one that a call makes, and one row in memory.
    """
    options, mask_of = _options(call, asked=True)
    if "is_causal" not in options:
        options["attn_mask"] = None if mask_of is None else mask_of(call.bias)
    return (call.bhsd(call.q), call.bhsd(call.k), call.bhsd(call.v)), options


def needs_copy(x: Tensor) -> bool:
    """True if scaled_dot_product_attention is given a copy: on a GPU, of strides that are no multiples of 16 bytes.

    PyTorch 2.11 takes such views: a result had NaN from beside rows of odd strides, and cuDNN raised for a q that was
    expanded, as the result would have had its strides (H200, 2026-11-22).
    """
    if not x.is_cuda:
        return False
    unit = 16 // x.element_size()
    steps = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    return x.stride(-1) != 1 or not all(step > 0 and step % unit == 0 for step in steps)


def fitting(copies: tuple[bool, ...], unit: int, *tensors: Tensor) -> list[Tensor]:
    """Tensors on a GPU as they are, or copies where strides, or the address of this call, do not fit."""
    # Dynamo does not trace where a view begins
    looks = not torch.compiler.is_compiling()
    return [
        x.clone(memory_format=torch.contiguous_format) if copied or (looks and x.storage_offset() % unit != 0) else x
        for copied, x in zip(copies, tensors, strict=True)
    ]


def bind(call: FlashAttentionCall) -> Callable[[FlashAttentionCall], Tensor]:
    """The function that calls scaled_dot_product_attention for calls with the signature of this one.

    Fixed here: scale, kind of mask, shared heads, layout, and which strides need a copy. Looked up by each call: where
    its tensors begin, and whether the user has PyTorch round float32.
    """
    options, mask_of = _options(call)
    transposed, on_gpu = call.layout == "bshd", call.q.is_cuda
    unit = 16 // call.q.element_size()
    copies = tuple([needs_copy(one) for one in (call.q, call.k, call.v)])
    # Dynamo does not trace where a view begins
    looks = on_gpu and (any(copies) or torch.compiler.is_compiling())

    def run(call: FlashAttentionCall) -> Tensor:
        q, k, v = call.q, call.k, call.v
        if looks or (on_gpu and (q.storage_offset() % unit or k.storage_offset() % unit or v.storage_offset() % unit)):
            q, k, v = fitting(copies, unit, q, k, v)
        if transposed:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        mask = None if mask_of is None else mask_of(call.bias)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        return (y.transpose(1, 2) if transposed else y).contiguous()

    return unrounded(call.q.device.type, run) if call.q.dtype == torch.float32 else run


def _run(call: FlashAttentionCall) -> Tensor:
    return bind(call)(call)


_op.attach("torch", _run, refuse=_refuse, opt_in=_opt_in, priority=PRIORITY, bind=bind)
