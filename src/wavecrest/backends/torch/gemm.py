"""GEMM by PyTorch: cuBLAS, hipBLASLt or oneDNN behind torch.matmul, torch._int_mm and torch._scaled_mm.

`bind` decides all that the signature of a call fixes; what it returns reads tensors of its call alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import wavecrest.ops._gemm.launch_hopper_blocks as _blocks
import wavecrest.ops.common.target as _target
from wavecrest.backends.torch.common import PRIORITY, ROUNDED, rounds, unrounded
from wavecrest.dispatch.keys import dtype_name, needs_grad, row_bucket
from wavecrest.dispatch.tracing import constant_in_graphs
from wavecrest.ops._gemm.backend import op
from wavecrest.ops._gemm.call import FAST_ACCUM, FLOATS, GATED, GemmCall, kinds
from wavecrest.ops.common.quantized import Quantization
from wavecrest.ops.common.quantized import reference as quantized

Bound = Callable[[GemmCall], Tensor]

# rows up to which the default with block scales is a kernel of wavecrest. On one H200 (2026-11-26,
# benchmarks/fp8_blocks.py) cuBLAS was behind `triton_hopper_blocks` in 17 of 20 calls of up to 128 rows, and up to 14 %
# ahead from 1,024 rows on, its copy of a's scales not counted; there is no time between
FEW_BLOCK_ROWS = 512
# and behind `triton` in all calls of 16 rows but one of 14,336 columns
FEWEST_BLOCK_ROWS = 16
# columns of K whose scales of b fill 16 bytes: versions of PyTorch differ in how it has others laid out
BLOCK_COLUMNS = 512


def more_than_linear(call: GemmCall) -> str | None:
    """The reason why a call is more than act(a @ b + bias) with one matrix b, or needs gradients."""
    if call.form != "plain" or not call.flat or call.tail is not None:
        return "takes one plain matrix b"
    if call.bias is not None and (call.bias.dtype != call.a.dtype or call.bias_along != "n"):
        return "takes a bias along N, of a's dtype"
    more = (call.residual, call.out_scale, call.norm_weight, call.scale_a, call.scale_b)
    if any(part is not None for part in more) or call.alpha != 1.0:
        return "applies no scales, norm, factor or residual"
    if 0 in (call.M, call.N, call.K):
        return "takes no empty matrices"
    if needs_grad(call.a, call.b, call.bias):
        return "has no gradients"
    return None


def refuse(call: GemmCall) -> str | None:
    """The reason why PyTorch cannot run a call as it is defined."""
    if call.form != "plain" or call.weight_only:
        return "has no GEMM with a weight stored in fewer bits, or shuffled: it would unpack it on every call"
    if call.a.dtype == torch.int8:
        return _refuse_int8(call)
    if call.a.dtype.itemsize == 1:
        return _refuse_float8(call)
    if call.a.dtype.itemsize == 2 and call.dtype in (torch.float32, torch.float64):
        return f"rounds the result to {dtype_name(call.a)} before it is made {call.dtype}"
    if torch.compiler.is_compiling() and call.keeps_float32 and rounds(call.a.device.type):
        return ROUNDED
    return None


def _refuse_int8(call: GemmCall) -> str | None:
    if not call.flat:
        return "has no batch of int8 GEMMs"
    # torch._int_mm on CUDA: more than 16 rows, and multiples of 8
    sides = (call.K, call.columns)
    if call.a.is_cuda and (row_bucket(call.M) <= 16 or any(side == 0 or side % 8 != 0 for side in sides)):
        return "multiplies int8 for more than 16 rows, and K and N that are multiples of 8"
    return "applies no block scales" if "block" in kinds(call) else None


def _refuse_float8(call: GemmCall) -> str | None:
    if not call.a.is_cuda:
        return "multiplies 8-bit floats on a GPU"
    if not call.flat or any(side == 0 or side % 16 != 0 for side in (call.K, call.columns)):
        return "multiplies 8-bit floats of one matrix b, with K and N that are multiples of 16"
    if call.a.dtype == call.b.dtype == torch.float8_e5m2:
        return "does not multiply float8_e5m2 by float8_e5m2"
    blocks = kinds(call) == ("block", "block")
    if blocks and (reason := _refuse_blocks(call)) is not None:
        return reason
    if not blocks and kinds(call) not in (("tensor", "tensor"), ("vector", "vector"), ("none", "none")):
        return f"applies scales to tensors, or to rows and columns, not {' and '.join(kinds(call))}"
    if call.b.stride(-2) != 1 or call.dtype == torch.int8:
        return "multiplies 8-bit floats with b contiguous along K"
    if call.b.stride(-1) % 16 != 0:
        # CUBLAS_STATUS_NOT_SUPPORTED (H200, torch 2.11); a copy of b on every call is no choice
        return "multiplies 8-bit floats with columns of b that begin a multiple of 16 bytes apart"
    return None


def _refuse_blocks(call: GemmCall) -> str | None:
    """The reason why PyTorch has no GEMM for these 8-bit floats with block scales here."""
    arch = _target.arch()
    if arch is None or arch.name != "sm_90" or not _has_blocks():
        return "applies scales of blocks on sm_90, in PyTorch 2.10 and later with CUDA 12.9 and later"
    if call.K % BLOCK_COLUMNS != 0:
        return f"applies scales of blocks where K is a multiple of {BLOCK_COLUMNS}"
    if call.dtype != torch.bfloat16:
        return "applies scales of blocks for a result of bfloat16"
    return None


@constant_in_graphs
def _has_blocks() -> bool:
    """True if this PyTorch names scales of 128 × 128, and its cuBLAS has them."""
    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return hasattr(getattr(F, "ScalingType", None), "BlockWise128x128") and version >= (12, 9)


def opt_in(call: GemmCall) -> str | None:
    """The reason why a call that PyTorch takes runs here only where a measured row names it."""
    if kinds(call) != ("block", "block") or call.a.dtype.itemsize != 1 or call.a.dtype == torch.int8:
        return None
    rows = row_bucket(call.M)
    if rows <= FEWEST_BLOCK_ROWS:
        return f"is behind triton up to {FEWEST_BLOCK_ROWS} rows where scales are of blocks"
    more = call.bias is not None or call.activation is not None
    if (rows <= FEW_BLOCK_ROWS or more) and _blocks.refusal(call) is None:
        return f"is left to {_blocks.NAME} up to {FEW_BLOCK_ROWS} rows, or where a pass for bias or activation is saved"
    return None


def bind(call: GemmCall) -> Bound:
    """The function for all calls with the signature of this one."""
    normed, into_residual = call.norm_weight is not None, _bind_residual(call)
    multiply, bias_is_left = _multiplication(call)
    epilogue = bind_epilogue(call, bias_is_left)

    def all_of(call: GemmCall) -> Tensor:
        if normed:
            call = normalised(call)
        if into_residual is not None and (result := into_residual(call)) is not None:
            return result
        y = multiply(call)
        return y if epilogue is None else epilogue(call, y)

    work = multiply if into_residual is None and epilogue is None and not normed else all_of
    return unrounded(call.a.device.type, work) if call.keeps_float32 else work


def run(call: GemmCall) -> Tensor:
    """One call."""
    return bind(call)(call)


def normalised(call: GemmCall) -> GemmCall:
    """The call with RMSNorm(a), rounded to a's dtype, in place of a and norm_weight."""
    a, weight = call.a, call.norm_weight
    if weight is None:
        return call
    size = a.shape[-1:]
    if weight.dtype == a.dtype:
        return call._replace(a=F.rms_norm(a, size, weight, call.norm_eps), norm_weight=None)
    # a and the weight differ in dtype, and neither may be rounded first
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    y = F.rms_norm(a.to(wide), size, weight.to(wide), call.norm_eps)
    return call._replace(a=y.to(a.dtype), norm_weight=None)


def _bind_residual(call: GemmCall) -> Callable[[GemmCall], Tensor | None] | None:
    """A function that adds a @ b to the residual in place; None if a library cannot, or the call does not ask it to."""
    a, b, r = call.a, call.b, call.residual
    # a graph's residual is the graph's
    if r is None or not call.overwrite_residual or torch.compiler.is_compiling():
        return None
    plain = call.flat and call.bias is None and call.activation is None and call.alpha == 1.0
    if not plain or not r.dtype == a.dtype == b.dtype == call.dtype or a.dtype not in FLOATS:
        return None
    if not r.is_contiguous() or needs_grad(a, b, r):
        return None
    M, N, K = call.M, call.N, call.K

    def into_residual(call: GemmCall) -> Tensor | None:
        a, b, r = call.a, call.b, call.residual
        assert r is not None
        # the memory written must not be read by another part of the GEMM
        if r.untyped_storage().data_ptr() in (a.untyped_storage().data_ptr(), b.untyped_storage().data_ptr()):
            return None
        r.view(M, N).addmm_(a.reshape(M, K), b)
        return r

    return into_residual


def _multiplication(call: GemmCall) -> tuple[Bound, bool]:
    """The function that computes a @ b and applies the scales, and whether it leaves the bias to the epilogue."""
    bias = call.bias
    if call.a.dtype == torch.int8:
        return _bind_int8(call), True
    if call.a.dtype.itemsize == 1:
        return _bind_float8(call), True
    if bias is not None and call.flat and call.bias_along == "n" and bias.dtype == call.a.dtype and call.alpha == 1.0:
        # the library adds it in the same pass; for rows of two dimensions without b's transpose
        return _addmm if call.a.ndim == 2 else _with_bias, False
    return _plain, True


def _plain(call: GemmCall) -> Tensor:
    return torch.matmul(call.a, call.b)


def _addmm(call: GemmCall) -> Tensor:
    assert call.bias is not None
    return torch.addmm(call.bias, call.a, call.b)


def _with_bias(call: GemmCall) -> Tensor:
    return F.linear(call.a, call.b.mT, call.bias)


def _bind_int8(call: GemmCall) -> Bound:
    M, K, shape, is_int32 = call.M, call.K, (*call.a.shape[:-1], call.columns), call.dtype == torch.int32
    a_shape = None if call.scale_a is None else _by_rows(call.scale_a, call.a)
    b_shape = None if call.scale_b is None else () if call.scale_b.numel() == 1 else (-1,)
    is_cuda = call.a.is_cuda
    # PyTorch 2.13's int8 GEMM on the CPU is wrong where an operand is expanded, and for K = 1
    copies = K == 1 or 0 in (*call.a.reshape(M, K).stride(), *call.b.stride())

    def run(call: GemmCall) -> Tensor:
        a, b, scale_a, scale_b = call.a.reshape(M, K), call.b, call.scale_a, call.scale_b
        if copies or (is_cuda and not _whole_lines(a)):
            a = a.clone(memory_format=torch.contiguous_format)
        if copies or (is_cuda and not _whole_lines(b)):
            b = b.clone(memory_format=torch.contiguous_format)
        y = torch._int_mm(a, b).reshape(shape)
        if is_int32:
            return y
        y = y.float()
        if scale_a is not None and a_shape is not None:
            y = y * scale_a.reshape(a_shape)
        if scale_b is not None and b_shape is not None:
            y = y * scale_b.reshape(b_shape)
        return y

    return run


def _whole_lines(x: Tensor) -> bool:
    """True for an int8 matrix as cuBLASLt takes it: lines of multiples of 8 bytes (others it refuses)."""
    inner, outer = sorted(x.stride())
    # Dynamo does not trace addresses
    return inner == 1 and outer % 8 == 0 and (torch.compiler.is_compiling() or x.data_ptr() % 8 == 0)


def _takes_float8(rows: Tensor) -> bool:
    """True for 8-bit floats [M, K] as cuBLASLt takes them: rows that begin at multiples of 16 bytes."""
    fits = rows.stride(1) == 1 and rows.stride(0) % 16 == 0 and rows.stride(0) >= rows.shape[1]
    # Dynamo does not trace addresses
    return fits and (torch.compiler.is_compiling() or rows.data_ptr() % 16 == 0)


def _by_rows(vector: Tensor, like: Tensor) -> tuple[int, ...]:
    """The shape in which one value a row, or one for all, broadcasts against rows [..., N] as those of `like`."""
    return () if vector.numel() == 1 else (*like.shape[:-1], 1)


def _bind_blocks(call: GemmCall) -> Bound:
    """With scales of blocks, a's as cuBLASLt takes them: those of one block for all rows side by side."""
    M, K, shape = call.M, call.K, (*call.a.shape[:-1], call.columns)
    # all that was measured has rows in sixteens, where each block's scales begin at multiples of 16 bytes
    padding = -M % 16

    def run(call: GemmCall) -> Tensor:
        a, b, scale_a, scale_b = call.a.reshape(M, K), call.b, call.scale_a, call.scale_b
        assert scale_a is not None and scale_b is not None
        if padding:
            # as bytes, which every version pads
            a = F.pad(a.view(torch.uint8), (0, 0, 0, padding)).view(a.dtype)
            scale_a = F.pad(scale_a, (0, 0, 0, padding))
        elif not _takes_float8(a):
            a = a.clone(memory_format=torch.contiguous_format)
        if not _takes_float8(b.mT):
            b = b.mT.clone(memory_format=torch.contiguous_format).mT
        scale_a, scale_b = scale_a.mT.contiguous().mT, scale_b.mT.contiguous().mT
        y = torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=False)
        return y[:M].reshape(shape)

    return run


def _bind_float8(call: GemmCall) -> Bound:
    if kinds(call) == ("block", "block"):
        return _bind_blocks(call)
    M, K, shape, kind = call.M, call.K, (*call.a.shape[:-1], call.columns), kinds(call)[0]
    out = call.dtype if call.dtype in FLOATS else torch.bfloat16
    fast = call.precision == FAST_ACCUM
    a_shape: tuple[int, ...] = ()
    b_shape: tuple[int, ...] = ()
    if kind == "vector":
        # by rows and columns PyTorch makes bfloat16 only
        a_shape, b_shape, out = (-1, 1), (1, -1), torch.bfloat16

    def run(call: GemmCall) -> Tensor:
        a, b = call.a.reshape(M, K), call.b
        if not _takes_float8(a):
            a = a.clone(memory_format=torch.contiguous_format)
        if not _takes_float8(b.mT):
            b = b.mT.clone(memory_format=torch.contiguous_format).mT
        if call.scale_a is None or call.scale_b is None:
            scale_a = scale_b = torch.ones((), device=a.device)
        else:
            scale_a, scale_b = call.scale_a.reshape(a_shape).contiguous(), call.scale_b.reshape(b_shape).contiguous()
        y = torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out, use_fast_accum=fast)
        return y.reshape(shape)

    return run


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def bind_epilogue(call: GemmCall, bias_is_left: bool = True) -> Callable[[GemmCall, Tensor], Tensor] | None:
    """The operations left after a library's y = a @ b: alpha, bias, activation, residual, rounding; None if nothing is.

    `bias_is_left`: the bias is not in y yet.
    """
    alpha, slope, dtype, bias = call.alpha, call.slope, call.dtype, call.bias if bias_is_left else None
    is_left = alpha != 1.0 or any(part is not None for part in (bias, call.activation, call.residual, call.out_scale))
    if not is_left and dtype in (torch.int32, call.a.dtype):
        return None
    bias_shape: tuple[int, ...] | None = None
    if bias is not None:
        bias_shape = (-1,) if call.bias_along == "n" else _by_rows(bias, call.a) if call.flat else (-1, 1)
    gated = call.activation in GATED
    name = GATED.get(call.activation or "", call.activation)
    act = partial(F.leaky_relu, negative_slope=slope) if name == "leaky_relu" else _ACTIVATIONS.get(name or "")

    def epilogue(call: GemmCall, y: Tensor) -> Tensor:
        if alpha != 1.0:
            y = y * alpha
        if bias_shape is not None and call.bias is not None:
            y = y + call.bias.reshape(bias_shape)
        if act is not None and gated:
            gate, up = y.chunk(2, dim=-1)
            y = act(gate) * up
        elif act is not None:
            y = act(y)
        if call.residual is not None:
            y = y + call.residual
        if call.out_scale is not None:
            return quantized(y.float(), Quantization(dtype, "tensor", call.out_scale.reshape(())))[0]
        return y.to(dtype)

    return epilogue


op.attach("torch", run, refuse=refuse, opt_in=opt_in, bind=bind, priority=PRIORITY)
