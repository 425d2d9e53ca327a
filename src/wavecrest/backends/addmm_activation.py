"""GEMM by cuBLASLt or hipBLASLt with bias and activation in their own epilogue: torch._addmm_activation.

The libraries have relu and the tanh form of gelu, and no exact gelu.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wavecrest.backends.torch.gemm import more_than_linear
from wavecrest.ops._gemm.backend import MEASURED, op
from wavecrest.ops._gemm.call import GemmCall

# below PyTorch's own two kernels: it runs where a measured row, a pin or the caller names it
PRIORITY = 3
NAME = "torch_addmm_act"
# by activation: what PyTorch calls use_gelu
ACTIVATIONS = {"relu": False, "gelu_tanh": True}


def refuse(call: GemmCall) -> str | None:
    """The reason why these libraries cannot run a call as it is defined."""
    if not call.a.is_cuda:
        return "is for GPUs: PyTorch's gelu of this name is the exact one on a CPU"
    return refuse_shape(call)


def refuse_shape(call: GemmCall) -> str | None:
    """The same for a call on any device."""
    if call.activation not in ACTIVATIONS:
        return f"ends in {' or '.join(ACTIVATIONS)} alone"
    if call.a.dtype not in (torch.float16, torch.bfloat16) or not call.a.dtype == call.b.dtype == call.dtype:
        return "takes float16 and bfloat16, one dtype for all"
    if call.bias is None:
        return "needs a bias"
    return more_than_linear(call)


def _opt_in(_call: GemmCall) -> str:
    return MEASURED


def bind(call: GemmCall) -> Callable[[GemmCall], Tensor]:
    """The function for calls with the signature of this one."""
    assert call.activation is not None
    use_gelu, M, K, shape = ACTIVATIONS[call.activation], call.M, call.K, call.shape

    def run(call: GemmCall) -> Tensor:
        assert call.bias is not None
        made: Tensor = torch._addmm_activation(call.bias, call.a.reshape(M, K), call.b, use_gelu=use_gelu)
        return made.reshape(shape)

    return run


def run(call: GemmCall) -> Tensor:
    """One call."""
    return bind(call)(call)


op.attach(NAME, run, refuse=refuse, opt_in=_opt_in, priority=PRIORITY, bind=bind)
