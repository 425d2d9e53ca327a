"""PyTorch's names for the ops: matmul, linear, conv2d, attention, softmax and norms, with its arguments and meaning.

Inside of autocast the first four compute in its dtype, as PyTorch's do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.nn.attention import sdpa
from wavecrest.nn.precision import by_autocast, in_16_bits, of_gemm, rounded
from wavecrest.ops import (
    PackedWeight,
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    post_layer_norm,
    rms_norm,
    softmax,
)
from wavecrest.ops import conv2d as _conv2d
from wavecrest.ops import gemm as _gemm
from wavecrest.ops import linear as _linear
from wavecrest.ops._conv2d.call import Pair

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "conv2d",
    "layer_norm",
    "linear",
    "matmul",
    "post_layer_norm",
    "rms_norm",
    "softmax",
]


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, with the shapes of `torch.matmul`: over `wavecrest.ops.gemm`.

    Args:
        a: [K] or [..., M, K], any strides: float32, float16, bfloat16, float64, int8 or an 8-bit float.
        b: [K] or [..., K, N], of a's dtype; leading dimensions are broadcast with a's.

    Returns:
        [..., M, N], without the dimension of an argument that has one only: of a's dtype, int32 for int8, bfloat16 for
        8-bit floats. Contiguous.

    Raises:
        InvalidArgument: a shape, dtype or device is outside this.
    """
    # the op takes matrices on the right, and no vector beside a batch
    if isinstance(b, Tensor) and b.ndim == 1:
        return matmul(a, b[:, None]).squeeze(-1)
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.ndim == 1 and b.ndim > 2:
        return matmul(a[None], b).squeeze(-2)
    a, b = by_autocast(a, b)
    dtype = rounded(a)
    if dtype is None:
        return _gemm(a, b, precision=of_gemm(a))
    return _gemm(in_16_bits(a, dtype), in_16_bits(b, dtype), out_dtype=torch.float32)


def linear(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x @ weightᵀ + bias, as `torch.nn.functional.linear`: `wavecrest.ops.linear` has activation, residual and scales.

    Args:
        x: [..., K], any strides.
        weight: [N, K] of x's dtype, or a `PackedWeight`.
        bias: [N] of any floating dtype.

    Returns:
        [..., N] of x's dtype, contiguous.

    Raises:
        InvalidArgument: a shape, dtype or device is outside this.
    """
    x, weight, bias = by_autocast(x, weight, bias)
    dtype = rounded(x)
    if dtype is None:
        return _linear(x, weight, bias, precision=of_gemm(x))
    return _linear(in_16_bits(x, dtype), in_16_bits(weight, dtype), bias, out_dtype=torch.float32)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
) -> Tensor:
    """A convolution, as `torch.nn.functional.conv2d`, and an activation: `wavecrest.ops.conv2d` has a residual too.

    Args:
        x: [B, C, H, W], or [C, H, W] for one image.
        weight, bias, stride, padding, dilation, groups, activation: as for `wavecrest.ops.conv2d`.

    Returns:
        [B, O, OH, OW], or [O, OH, OW], of x's dtype.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this.
    """
    if isinstance(x, Tensor) and x.ndim == 3:
        return conv2d(x[None], weight, bias, stride, padding, dilation, groups, activation=activation)[0]
    x, weight, bias = by_autocast(x, weight, bias)
    dtype = rounded(x)
    if dtype is None:
        return _conv2d(x, weight, bias, stride, padding, dilation, groups, activation)
    # a bias of another dtype is no call for PyTorch's convolution
    x, weight, bias = in_16_bits(x, dtype), in_16_bits(weight, dtype), in_16_bits(bias, dtype)
    return _conv2d(x, weight, bias, stride, padding, dilation, groups, activation).float()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(query · keyᵀ · scale + mask) · value: `torch.nn.functional.scaled_dot_product_attention` over the ops.

    Dispatch picks the backend of `flash_attention` that runs it. Calls that this op does not take run in PyTorch, with
    an `AttentionFallback` warning for each reason, once: dropout, a head_dim above 256, a causal mask of more queries
    than keys, batches or heads that are broadcast, tensors of three dimensions, a mask of a class of its own.

    Args:
        query: [B, H, Sq, D], any strides, float32, float16, bfloat16 or float64.
        key: [B, H, Sk, D], or with `enable_gqa` fewer heads, of which H is a multiple.
        value: [B, H, Sk, Dv] with key's heads.
        attn_mask: None; bool, where True is a pair that takes part; or of query's dtype, added to the scores. Of a
            shape that broadcasts to [B, H, Sq, Sk].
        dropout_p: share of the weights that is dropped, by PyTorch's generator.
        is_causal: query i sees the keys up to i (upper left); without a mask.
        scale: None: 1 / √D.
        enable_gqa: heads of key and value are shared by groups of query's.

    Returns:
        [B, H, Sq, Dv] of query's dtype, contiguous where query is, else with the strides of a contiguous
        [B, Sq, H, Dv]. A query that sees no key has zeros.

    Raises:
        InvalidArgument: a shape or device is outside this.
        RuntimeError: PyTorch refuses a call that it was left.
    """
    query, key, value, attn_mask = by_autocast(query, key, value, attn_mask)
    dtype = rounded(query)
    # as PyTorch's kernels write it: their result is used without a copy
    layout = "bhsd" if query.ndim == 4 and query.is_contiguous() else "bshd"
    if dtype is None:
        return sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, layout=layout)
    q, k, v = (in_16_bits(one, dtype) for one in (query, key, value))
    mask = in_16_bits(attn_mask, dtype)
    return sdpa(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa, layout=layout).float()
