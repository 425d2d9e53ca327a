"""GEMM by PyTorch without its bias, which is added afterwards, together with the activation and what else follows.

PyTorch hands the bias to the BLAS library, which adds it as it stores the result. The library then chooses among other
kernels, on ROCm often slower ones, and TunableOp looks for a solution under another key. So the same GEMM without the
bias is a candidate of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

import wavecrest.backends.torch.gemm as native
from wavecrest.ops._gemm.backend import MEASURED, op
from wavecrest.ops._gemm.call import GemmCall

# below PyTorch's own choice: it runs where a measured row, a pin or the caller names it
PRIORITY = 3
NAME = "torch_split_bias"


def refuse(call: GemmCall) -> str | None:
    """The reason why there is no bias to split off, or PyTorch cannot run the call."""
    if not call.a.is_cuda:
        return "is for GPUs"
    if call.bias is None:
        return "needs a bias"
    if torch.compiler.is_compiling():
        return "splits the bias off, and in a graph Inductor decides that"
    return _already_split(call) or native.refuse(call)


def _already_split(call: GemmCall) -> str | None:
    """Why PyTorch's backend does not hand the bias to the library in the first place."""
    assert call.bias is not None
    handed = call.a.dtype.itemsize > 1 and call.flat and call.bias_along == "n" and call.alpha == 1.0
    return None if handed and call.bias.dtype == call.a.dtype else "does what torch does: its library adds no such bias"


def bind(call: GemmCall) -> native.Bound:
    """The function for calls with the signature of this one."""
    epilogue = native.bind_epilogue(call)
    assert epilogue is not None
    multiply = native.bind(
        call._replace(
            bias=None, activation=None, residual=None, out_dtype=None, out_scale=None, overwrite_residual=False
        )
    )
    return lambda call: epilogue(call, multiply(call))


def run(call: GemmCall) -> Tensor:
    """One call."""
    return bind(call)(call)


def _opt_in(_call: GemmCall) -> str:
    return MEASURED


op.attach(NAME, run, refuse=refuse, opt_in=_opt_in, priority=PRIORITY, bind=bind)
