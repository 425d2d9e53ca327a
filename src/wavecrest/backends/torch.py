"""Native PyTorch as a backend of every op: a candidate for each shape, the path of the CPU and of gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wavecrest.dispatch import registry
from wavecrest.errors import InvalidArgument
from wavecrest.ops._conv2d.call import Operands as Convolution
from wavecrest.ops._flash_attention.call import Operands as Attention
from wavecrest.ops._flash_decoding.call import Operands as Decoding
from wavecrest.ops._flash_decoding.launch_append import appended
from wavecrest.ops._gemm.call import FLOATS, GATED, Operands, kinds
from wavecrest.ops._mla_decode.call import Operands as Latent
from wavecrest.ops._mla_decode.reference import absorbed
from wavecrest.ops.common.quantized import Quantization
from wavecrest.ops.common.quantized import reference as quantized
from wavecrest.ops.mlstm.call import Operands as MemorySequence
from wavecrest.ops.mlstm.reference import chunkwise

PRIORITY = 10
ROUNDED = "is set to round float32 before it multiplies, and ieee is asked for"


def _other_dtype(x: Tensor, **vectors: Tensor | None) -> str | None:
    """PyTorch's norms promote or refuse a weight of another dtype; ours keep its precision."""
    for name, vector in vectors.items():
        if vector is not None and vector.dtype != x.dtype:
            return f"takes a {name} of x's dtype ({registry.dtype_name(x)}), not {registry.dtype_name(vector)}"
    return None


def _rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _rms_norm_supports(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> str | None:
    return _other_dtype(x, weight=weight)


def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.rms_norm(h, h.shape[-1:], weight, eps), h


def _add_rms_norm_supports(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> str | None:
    return _other_dtype(x, weight=weight)


def _layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _layer_norm_supports(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> str | None:
    return _other_dtype(x, weight=weight, bias=bias)


def _add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    h = x + residual
    return F.layer_norm(h, h.shape[-1:], weight, bias, eps), h


def _add_layer_norm_supports(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> str | None:
    return _other_dtype(x, weight=weight, bias=bias)


def _softmax(x: Tensor) -> Tensor:
    return F.softmax(x, dim=-1)


def _silu_and_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return F.silu(gate) * up


def _gelu_and_mul(gate: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def _any(*_args: object, **_kwargs: object) -> None:
    return None


def _rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, style: str = "neox") -> Tensor:
    if positions is not None:
        # as the op defines it: indexing itself would raise, end the GPU's context, or count from the end
        inside = positions.clamp(0, cos.shape[0] - 1)
        cos, sin = cos[inside].masked_fill((inside != positions).unsqueeze(-1), float("nan")), sin[inside]
    elif cos.ndim == 2:
        cos, sin = cos[: x.shape[-3]], sin[: x.shape[-3]]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    half = cos.shape[-1]
    if style == "neox":
        first, second = x[..., :half], x[..., half : 2 * half]
        parts = [first * cos - second * sin, second * cos + first * sin]
    else:
        first, second = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
        parts = [torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)]
    y = torch.cat((*parts, x[..., 2 * half :]), dim=-1).to(x.dtype)
    # in the order of x's strides, as the kernel writes it
    return y if x.is_contiguous() else torch.empty_like(x).copy_(y)


def _rope_supports(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, style: str = "neox"
) -> str | None:
    for tensor in (x, cos):
        if tensor.element_size() == 1:
            return f"does not multiply {registry.dtype_name(tensor)}"
    return None


def _memcpy(x: Tensor, mode: str = "copy", programs: int | None = None, value: int = 0) -> Tensor:
    if mode == "copy":
        return x.clone()
    # Dynamo does not trace the offset; there it is the view that refuses
    if not torch.compiler.is_compiling() and x.storage_offset() * x.element_size() % 4 != 0:
        raise InvalidArgument(f"memcpy: x starts at element {x.storage_offset()} of its storage, inside a 32-bit word")
    words = x.detach().view(-1).view(torch.int32)
    if mode == "read":
        # as int64, which is what PyTorch sums integers in
        return words.sum()
    signed = value - (1 << 32) if value >= 1 << 31 else value
    return torch.full_like(words, signed).view(x.dtype).view(x.shape)


def _memcpy_supports(x: Tensor, mode: str = "copy", programs: int | None = None, value: int = 0) -> str | None:
    return None if programs is None else "chooses the number of programs by itself"


def _gemm_supports(*args: Any) -> str | None:
    given = Operands(*args)
    if given.form != "plain" or given.weight_only:
        return "has no product with a weight stored in fewer bits, or shuffled: it would unpack it on every call"
    if given.a.dtype == torch.int8:
        return _int8_supports(given)
    if given.a.dtype.itemsize == 1:
        return _float8_supports(given)
    if given.a.dtype.itemsize == 2 and given.dtype in (torch.float32, torch.float64):
        return f"rounds a product of {registry.dtype_name(given.a)} to that before it is made {given.dtype}"
    if torch.compiler.is_compiling() and _is_ieee(given) and _rounds(given.a.device.type):
        return ROUNDED
    return None


def _is_ieee(given: Operands) -> bool:
    return given.precision == "ieee" and given.a.dtype == torch.float32


def _settings(device: str) -> Any:
    """PyTorch's of products on a device."""
    return torch.backends.cuda.matmul if device == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


# Dynamo would trace a setting it knows as a guard on global state, which only repeats its own
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _rounds(device: str) -> bool:
    """True if float32 is rounded (to tf32, to bfloat16) before it is multiplied; "none" is PyTorch's own default."""
    return _settings(device).fp32_precision not in ("ieee", "none")


def _unrounded(device: str, wanted: bool, make: Callable[[], Tensor]) -> Tensor:
    """What `make` returns, its float32 products as they are where that is wanted.

    Looked at on every call: what a user has set may change between two, and decisions are kept.
    """
    if torch.compiler.is_compiling() or not (wanted and _rounds(device)):
        return make()
    settings = _settings(device)
    before = settings.fp32_precision
    settings.fp32_precision = "ieee"
    try:
        return make()
    finally:
        settings.fp32_precision = before


def _int8_supports(given: Operands) -> str | None:
    if not given.flat:
        return "has no batch of int8 products"
    # torch._int_mm on CUDA: more than 16 rows, and multiples of 8
    sides = (given.K, given.columns)
    if given.a.is_cuda and (registry.row_bucket(given.M) <= 16 or any(side == 0 or side % 8 != 0 for side in sides)):
        return "multiplies int8 for more than 16 rows, and K and N that are multiples of 8"
    return "applies no block scales" if "block" in kinds(given) else None


def _float8_supports(given: Operands) -> str | None:
    if not given.a.is_cuda:
        return "multiplies 8-bit floats on a GPU"
    if not given.flat or given.K % 16 != 0 or given.columns % 16 != 0:
        return "multiplies 8-bit floats of one matrix b, with K and N that are multiples of 16"
    if given.a.dtype == given.b.dtype == torch.float8_e5m2:
        return "does not multiply float8_e5m2 by float8_e5m2"
    if kinds(given) not in (("tensor", "tensor"), ("vector", "vector"), ("none", "none")):
        return f"applies scales to tensors, or to rows and columns, not {' and '.join(kinds(given))}"
    if given.b.stride(-2) != 1 or given.dtype == torch.int8:
        return "multiplies 8-bit floats with b contiguous along K"
    return None


def normed(given: Operands) -> Operands:
    """The product of an a that is normalised first, rounded to its dtype, where that is asked for."""
    weight = given.norm_weight
    if weight is None:
        return given
    a, size = given.a, (given.K,)
    if weight.dtype == a.dtype:
        return given._replace(a=F.rms_norm(a, size, weight, given.norm_eps), norm_weight=None)
    # of different dtypes, of which neither may be rounded before
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    y = F.rms_norm(a.to(wide), size, weight.to(wide), given.norm_eps)
    return given._replace(a=y.to(a.dtype), norm_weight=None)


def _gemm(*args: Any) -> Tensor:
    given = normed(Operands(*args))
    return _unrounded(given.a.device.type, _is_ieee(given), partial(_product, given))


def _ends_in_residual(given: Operands) -> bool:
    """True if a library can add its product to the residual where that lies."""
    a, b, r = given.a, given.b, given.residual
    # what a graph has in its residual is the graph's
    if r is None or not given.overwrite_residual or torch.compiler.is_compiling():
        return False
    plain = given.flat and given.bias is None and given.activation is None and given.alpha == 1.0
    if not plain or not r.dtype == a.dtype == b.dtype == given.dtype or a.dtype not in FLOATS:
        return False
    # what is written must not be read by another part of the product
    read = {one.untyped_storage().data_ptr() for one in (a, b)}
    return r.is_contiguous() and r.untyped_storage().data_ptr() not in read and not registry.needs_grad(a, b, r)


def _product(given: Operands) -> Tensor:
    if _ends_in_residual(given):
        assert given.residual is not None
        given.residual.view(given.M, given.N).addmm_(given.a.reshape(given.M, given.K), given.b)
        return given.residual
    a, b, bias = given.a, given.b, given.bias
    inner = given.dtype if given.dtype in FLOATS else torch.bfloat16
    if a.dtype == torch.int8:
        y = _int8_mm(given).reshape(*a.shape[:-1], given.columns)
        if given.dtype == torch.int32:
            return y
        y = y.float()
        if given.scale_a is not None:
            y = y * _rows_of(given.scale_a, y)
        if given.scale_b is not None:
            y = y * given.scale_b.reshape(() if given.scale_b.numel() == 1 else (-1,))
    elif a.dtype.itemsize == 1:
        y = _float8_mm(given, inner).reshape(*a.shape[:-1], given.columns)
    elif bias is not None and given.flat and given.bias_along == "n" and bias.dtype == a.dtype and given.alpha == 1.0:
        # the library adds it in the same pass
        y, bias = F.linear(a, b.mT, bias), None
    else:
        y = torch.matmul(a, b)
    return finished(given, y, bias)


def finished(given: Operands, y: Tensor, bias: Tensor | None) -> Tensor:
    """What a library leaves to do after a product y: alpha, bias (None: it is in y), activation, residual, rounding."""
    if given.alpha != 1.0:
        y = y * given.alpha
    if bias is not None:
        y = y + (bias if given.bias_along == "n" else _rows_of(bias, y) if given.flat else bias[:, None])
    if given.activation in GATED:
        gate, up = y.chunk(2, dim=-1)
        y = _activated(gate, GATED[given.activation], given.slope) * up
    else:
        y = _activated(y, given.activation, given.slope)
    if given.residual is not None:
        y = y + given.residual
    if given.out_scale is not None:
        how = Quantization(given.dtype, "tensor", given.out_scale.reshape(()))
        return quantized(y.float(), how)[0]
    return y.to(given.dtype)


def _int8_mm(given: Operands) -> Tensor:
    a, b = given.a.reshape(given.M, given.K), given.b
    # PyTorch 2.13's product on the CPU is wrong where an operand is expanded, and for K = 1
    if given.K == 1 or 0 in (*a.stride(), *b.stride()):
        a, b = (x.clone(memory_format=torch.contiguous_format) for x in (a, b))
    elif a.is_cuda:
        a, b = (x if _whole_lines(x) else x.clone(memory_format=torch.contiguous_format) for x in (a, b))
    return torch._int_mm(a, b)


def _whole_lines(x: Tensor) -> bool:
    """True for an int8 matrix as cuBLASLt takes it: lines of multiples of 8 bytes (others it refuses)."""
    inner, outer = sorted(x.stride())
    # Dynamo does not trace addresses
    return inner == 1 and outer % 8 == 0 and (torch.compiler.is_compiling() or x.data_ptr() % 8 == 0)


def _rows_of(vector: Tensor, y: Tensor) -> Tensor:
    """One value a row of y [..., N], or one for all."""
    return vector.reshape(()) if vector.numel() == 1 else vector.reshape(*y.shape[:-1], 1)


def _float8_mm(given: Operands, out: torch.dtype) -> Tensor:
    a = given.a.reshape(given.M, given.K)
    a = a if a.stride(-1) == 1 else a.contiguous()
    if given.scale_a is None or given.scale_b is None:
        scale_a = scale_b = torch.ones((), device=a.device)
    elif kinds(given)[0] == "tensor":
        scale_a, scale_b = given.scale_a.reshape(()), given.scale_b.reshape(())
    else:
        # by rows and columns PyTorch makes bfloat16 only
        scale_a, scale_b, out = given.scale_a.reshape(-1, 1), given.scale_b.reshape(1, -1), torch.bfloat16
    return torch._scaled_mm(a, given.b, scale_a=scale_a.contiguous(), scale_b=scale_b.contiguous(), out_dtype=out)


def _activated(y: Tensor, name: str | None, slope: float) -> Tensor:
    if name == "relu":
        return F.relu(y)
    if name == "leaky_relu":
        return F.leaky_relu(y, slope)
    if name == "silu":
        return F.silu(y)
    if name in ("gelu", "gelu_tanh"):
        return F.gelu(y, approximate="tanh" if name == "gelu_tanh" else "none")
    return y


def _conv2d_bind(*args: Any, **kwargs: Any) -> Callable[..., Tensor]:
    given = Convolution(*args, **kwargs)
    # these alone, as what is bound is kept: not the tensors of one call
    stride, padding, dilation, groups, activation = given[3:]
    # the op's memory format, which is PyTorch's own, also where its library has no channels_last (MIOpen)
    layout = given.memory_format

    def call(x: Tensor, weight: Tensor, bias: Tensor | None = None, *_args: Any, **_kwargs: Any) -> Tensor:
        y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
        if activation is not None:
            y = _activated(y, activation, 0.01)
        return y.contiguous(memory_format=layout)

    return call


def _conv2d_run(*args: Any, **kwargs: Any) -> Tensor:
    return _conv2d_bind(*args, **kwargs)(*args, **kwargs)


def _conv2d_last(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    given = Convolution(x, weight, *args, **kwargs)
    last = torch.channels_last
    y = _conv2d_run(*given._replace(x=x.contiguous(memory_format=last), weight=weight.contiguous(memory_format=last)))
    return y.contiguous(memory_format=given.memory_format)


def _conv2d_last_supports(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> str | None:
    if Convolution(x, weight, *args, **kwargs).channels_last:
        return "has the image, or the weight, in that layout already"
    return _conv2d_supports(x, weight, *args, **kwargs)


def _conv2d_last_reserved(*_args: Any, **_kwargs: Any) -> str:
    return "copies image and weight: it runs where a measured row names it"


def _conv2d_supports(x: Tensor, weight: Tensor, bias: Tensor | None = None, *_args: Any, **_kwargs: Any) -> str | None:
    return _other_dtype(x, bias=bias)


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
    if torch.compiler.is_compiling() and given.q.dtype == torch.float32 and _rounds(given.q.device.type):
        return ROUNDED
    return _other_dtype(given.q, bias=given.bias)


def _flash_attention_reserved(*args: Any, **kwargs: Any) -> str | None:
    given = Attention(*args, **kwargs)
    if not given.q.is_cuda or registry.needs_grad(given.q, given.k, given.v, given.bias):
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
    y = _unrounded(given.q.device.type, given.q.dtype == torch.float32, attend)
    return (y.transpose(1, 2) if given.layout == "bshd" else y).contiguous()


def _flash_decoding_supports(*args: Any, **kwargs: Any) -> str | None:
    given = Decoding(*args, **kwargs)
    if given.block_table is not None or given.k_scale is not None:
        return "would copy a cache of pages, 8 or 4 bits on every call"
    for name, asked in (
        ("softcap", given.softcap > 0),
        ("sinks", given.sinks is not None),
        ("ALiBi slopes in float32", given.alibi_slopes is not None),
        ("logarithms to return", given.return_lse),
    ):
        if asked:
            return f"has no {name}"
    return None


def _flash_decoding(*args: Any, **kwargs: Any) -> Tensor:
    given = Decoding(*args, **kwargs)
    if given.prepares:
        given = appended(given)
    q, k, v = (one.transpose(1, 2) for one in (given.q, given.k_cache, given.v_cache))
    token = torch.arange(given.tokens, device=q.device)
    own = (given.seq_lens[:, None] - given.tokens + token)[:, None, :, None]
    j = torch.arange(given.page, device=q.device)
    visible = j <= own
    if given.window >= 0:
        visible = visible & (j >= own - given.window)
    taking_part = j < given.seq_lens[:, None]
    if given.seq_starts is not None:
        taking_part = taking_part & (j >= given.seq_starts[:, None])
        visible = visible & taking_part[:, None, None, :]
    options: dict[str, Any] = {"scale": given.scale} | ({"enable_gqa": True} if given.group > 1 else {})
    # what the cache holds where a sequence has no keys may be anything: 0 · NaN would be NaN
    v = v.where(taking_part[:, None, :, None], 0.0)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, **options)
    sees = own >= (0 if given.seq_starts is None else given.seq_starts.clamp(min=0)[:, None, None, None])
    return y.where(sees, 0.0).transpose(1, 2).contiguous()


def _mla(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
    return absorbed(Latent(*args, **kwargs))


def _mlstm_chunkwise(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
    return chunkwise(MemorySequence(*args, **kwargs))


def _mlstm_supports(name: str) -> Callable[..., str | None]:
    """What PyTorch's form of an mLSTM over sequences declines: the same bits in any batch, where a kernel has them."""

    def supports(*args: Any, **kwargs: Any) -> str | None:
        given = MemorySequence(*args, **kwargs)
        if not given.batch_invariant or given.q.device.type == "cpu":
            return None
        kernel = registry.get(name).backends["triton"].supports(*args, **kwargs)
        if kernel is not None:
            return None
        return "its products may round otherwise in another batch, and batch_invariant asks for the same bits"

    return supports


registry.get("gemm").attach("torch", _gemm, supports=_gemm_supports, priority=PRIORITY)
registry.get("conv2d").attach(
    "torch_channels_last",
    _conv2d_last,
    supports=_conv2d_last_supports,
    reserved=_conv2d_last_reserved,
    priority=PRIORITY - 6,
)
registry.get("conv2d").attach("torch", _conv2d_run, supports=_conv2d_supports, priority=PRIORITY, bind=_conv2d_bind)
registry.get("rms_norm").attach("torch", _rms_norm, supports=_rms_norm_supports, priority=PRIORITY)
registry.get("add_rms_norm").attach("torch", _add_rms_norm, supports=_add_rms_norm_supports, priority=PRIORITY)
registry.get("layer_norm").attach("torch", _layer_norm, supports=_layer_norm_supports, priority=PRIORITY)
registry.get("silu_and_mul").attach("torch", _silu_and_mul, supports=_any, priority=PRIORITY)
registry.get("gelu_and_mul").attach("torch", _gelu_and_mul, supports=_any, priority=PRIORITY)
registry.get("memcpy").attach("torch", _memcpy, supports=_memcpy_supports, priority=PRIORITY)
registry.get("rope").attach("torch", _rope, supports=_rope_supports, priority=PRIORITY)
registry.get("add_layer_norm").attach("torch", _add_layer_norm, supports=_add_layer_norm_supports, priority=PRIORITY)
registry.get("flash_attention").attach(
    "torch",
    _flash_attention,
    supports=_flash_attention_supports,
    reserved=_flash_attention_reserved,
    priority=PRIORITY,
)
registry.get("flash_decoding").attach("torch", _flash_decoding, supports=_flash_decoding_supports, priority=PRIORITY)
for _name in ("mla_decode", "mla_prefill"):
    registry.get(_name).attach("torch", _mla, supports=_any, priority=PRIORITY)
# the definition of the other two is made of PyTorch's operations, one token at a time
for _name, _run, _takes in (
    ("mlstm_chunkwise", _mlstm_chunkwise, _mlstm_supports("mlstm_chunkwise")),
    ("mlstm_sequence", registry.get("mlstm_sequence").reference, _mlstm_supports("mlstm_sequence")),
    ("mlstm_step", registry.get("mlstm_step").reference, _any),
):
    registry.get(_name).attach("torch", _run, supports=_takes, priority=PRIORITY)
registry.get("softmax").attach("torch", _softmax, supports=_any, priority=PRIORITY)
# PyTorch has no op for these: its form is the definition, written in its operations
for _name in (
    "quantize_int8",
    "quantize_fp8",
    "dequantize",
    "rms_norm_quantize",
    "add_rms_norm_quantize",
    "layer_norm_quantize",
    "add_layer_norm_quantize",
):
    _op = registry.get(_name)
    _op.attach("torch", _op.reference, supports=_any, priority=PRIORITY)
