"""Attention by PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wavecrest.backends.torch.common import PRIORITY, ROUNDED, other_dtype, rounds, unrounded
from wavecrest.dispatch import registry
from wavecrest.dispatch.keys import needs_grad
from wavecrest.ops._flash_attention.call import Operands as Attention


def _flash_attention_supports(*args: Any, **kwargs: Any) -> str | None:
    given = Attention(*args, **kwargs)
    if given.quantized:
        return "multiplies no 8-bit q, k and v"
    if given.packed:
        return "has no packed sequences"
    if given.return_lse:
        return "returns no logarithms"
    for name, asked in (
        ("softcap", given.softcap > 0),
        ("sinks", given.sinks is not None),
        ("ALiBi slopes in float32", given.alibi_slopes is not None),
        ("dropout whose mask a seed gives", given.dropout),
    ):
        if asked:
            return f"has no {name}"
    if given.blind:
        return "leaves to its kernels what a query without keys gives"
    if torch.compiler.is_compiling() and given.q.dtype == torch.float32 and rounds(given.q.device.type):
        return ROUNDED
    return other_dtype(given.q, bias=given.bias)


def _flash_attention_reserved(*args: Any, **kwargs: Any) -> str | None:
    given = Attention(*args, **kwargs)
    if not given.q.is_cuda or needs_grad(given.q, given.k, given.v, given.bias):
        return None
    diagonal = given.right > 0 or (given.right == 0 and not given.square and given.queries != 1)
    if given.left >= 0 or diagonal or (given.right == 0 and given.bias is not None):
        return "makes a mask of all queries and keys: it runs where it is named, and for gradients"
    return None


def _flash_attention_mask(given: Attention, asked: bool) -> Tensor | None:
    """What is added to the scores, or which pairs are visible, with the diagonal at the bottom right.

    `asked`: of the same shape and dtype with a row for all, for who asks what PyTorch takes and calls nothing.
    """
    # the first query's last key, and the last one's first: where those are in sight all are
    if not (0 <= given.right < given.queries - 1 or 0 <= given.left < given.keys - 1):
        return given.broadcast_bias()
    bias, device = given.bias, given.q.device
    # PyTorch takes masks of two dimensions and of four
    shape = () if bias is None else (1,) * (4 - bias.ndim) + tuple(bias.shape)
    if asked:
        row = torch.empty(given.keys, dtype=torch.bool if bias is None else bias.dtype, device=device)
        return row.expand(*shape[:2], given.queries, given.keys)
    i = torch.arange(given.queries, device=device)[:, None] + (given.keys - given.queries)
    j = torch.arange(given.keys, device=device)[None, :]
    visible = torch.ones_like(i == j) if given.right < 0 else j <= i + given.right
    if given.left >= 0:
        visible = visible & (j >= i - given.left)
    return visible if bias is None else torch.where(visible, bias.reshape(shape), float("-inf"))


def _sixteen_bytes(x: Tensor) -> Tensor:
    """On a GPU a copy of what does not begin and go on in steps of 16 bytes, or has steps of 0.

    PyTorch 2.11 takes such views: a result had NaN from beside rows of odd strides, and cuDNN raised for a q that was
    expanded, as the result would have had its strides (H200, 2026-11-22).
    """
    if not x.is_cuda:
        return x
    unit = 16 // x.element_size()
    steps = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    # Dynamo does not trace where a view begins
    fits = x.stride(-1) == 1 and (torch.compiler.is_compiling() or x.storage_offset() % unit == 0)
    if fits and all(step > 0 and step % unit == 0 for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def attention_call(given: Attention, asked: bool = False) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """q, k and v [B, H, S, D] and the options that scaled_dot_product_attention is called with.

    `asked`: with a mask that has not been worked out, for who asks what PyTorch takes.
    """
    # branches: torch.compile may not know sizes, and what they make of flags is no constant
    options: dict[str, Any] = {"scale": given.scale} | ({"enable_gqa": True} if given.group > 1 else {})
    # PyTorch's causal mask is aligned at the upper left
    if given.right == 0 and given.left < 0 and given.bias is None and given.square:
        options["is_causal"] = True
    else:
        options["attn_mask"] = _flash_attention_mask(given, asked)
    tensors = (given.q, given.k, given.v)
    q, k, v = (given.bhsd(one if asked else _sixteen_bytes(one)) for one in tensors)
    return (q, k, v), options


def _flash_attention(*args: Any, **kwargs: Any) -> Tensor:
    given = Attention(*args, **kwargs)
    tensors, options = attention_call(given)
    attend = partial(F.scaled_dot_product_attention, *tensors, **options)
    y = unrounded(given.q.device.type, given.q.dtype == torch.float32, attend)
    return (y.transpose(1, 2) if given.layout == "bshd" else y).contiguous()


registry.get("flash_attention").attach(
    "torch",
    _flash_attention,
    supports=_flash_attention_supports,
    reserved=_flash_attention_reserved,
    priority=PRIORITY,
)
