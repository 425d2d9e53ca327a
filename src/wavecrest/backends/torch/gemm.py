"""GEMM by PyTorch: cuBLAS, hipBLASLt or oneDNN behind torch.matmul, torch._int_mm and torch._scaled_mm."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wavecrest.backends.torch.common import PRIORITY, ROUNDED, activated, rounds, unrounded
from wavecrest.dispatch import registry
from wavecrest.dispatch.keys import dtype_name, needs_grad, row_bucket
from wavecrest.ops._gemm.call import FLOATS, GATED, Operands, kinds
from wavecrest.ops.common.quantized import Quantization
from wavecrest.ops.common.quantized import reference as quantized


def _gemm_supports(*args: Any) -> str | None:
    given = Operands(*args)
    if given.form != "plain" or given.weight_only:
        return "has no product with a weight stored in fewer bits, or shuffled: it would unpack it on every call"
    if given.a.dtype == torch.int8:
        return _int8_supports(given)
    if given.a.dtype.itemsize == 1:
        return _float8_supports(given)
    if given.a.dtype.itemsize == 2 and given.dtype in (torch.float32, torch.float64):
        return f"rounds a product of {dtype_name(given.a)} to that before it is made {given.dtype}"
    if torch.compiler.is_compiling() and _is_ieee(given) and rounds(given.a.device.type):
        return ROUNDED
    return None


def _is_ieee(given: Operands) -> bool:
    return given.precision == "ieee" and given.a.dtype == torch.float32


def _int8_supports(given: Operands) -> str | None:
    if not given.flat:
        return "has no batch of int8 products"
    # torch._int_mm on CUDA: more than 16 rows, and multiples of 8
    sides = (given.K, given.columns)
    if given.a.is_cuda and (row_bucket(given.M) <= 16 or any(side == 0 or side % 8 != 0 for side in sides)):
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
    return unrounded(given.a.device.type, _is_ieee(given), partial(_product, given))


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
    return r.is_contiguous() and r.untyped_storage().data_ptr() not in read and not needs_grad(a, b, r)


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
        y = activated(gate, GATED[given.activation], given.slope) * up
    else:
        y = activated(y, given.activation, given.slope)
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


registry.get("gemm").attach("torch", _gemm, supports=_gemm_supports, priority=PRIORITY)
