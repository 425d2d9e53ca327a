"""GEMM of a linear layer by oneDNN, with its activation in the same kernel: for CPUs.

PyTorch multiplies float32 by MKL where it was built with it. On CPUs that MKL has no kernels of its own for, oneDNN's
are faster by themselves, before the activation's pass over memory that they save.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wavecrest import hardware
from wavecrest.backends.torch.common import ROUNDED, rounds
from wavecrest.backends.torch.gemm import more_than_linear
from wavecrest.dispatch.tracing import constant_in_graphs
from wavecrest.ops._gemm.backend import MEASURED, op
from wavecrest.ops._gemm.call import GemmCall

# below PyTorch's own choice: it runs where a measured row, a pin or the caller names it
PRIORITY = 3
NAME = "onednn"
# by activation: oneDNN's name and algorithm
ACTIVATIONS: dict[str | None, tuple[str, str]] = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}


# asked once, by an operation of PyTorch's, which whoever counts or records operations would see
HAS_BFLOAT16 = hardware.onednn_multiplies(torch.bfloat16)


# Dynamo does not trace the question
@constant_in_graphs
def _is_there() -> bool:
    return hardware.onednn_multiplies(torch.float32)


def refuse(call: GemmCall) -> str | None:
    """The reason why oneDNN cannot run a call as it is defined."""
    if call.a.device.type != "cpu" or not _is_there():
        return "is for CPUs, in a PyTorch with oneDNN"
    if call.activation not in ACTIVATIONS:
        return "ends in gelu, gelu_tanh or silu alone: its relu makes 0 of NaN"
    if call.a.dtype not in (torch.float32, torch.bfloat16) or not call.a.dtype == call.b.dtype == call.dtype:
        return "takes float32 and bfloat16, one dtype for all"
    if call.dtype == torch.bfloat16 and not HAS_BFLOAT16:
        return "has no bfloat16 on this CPU: on x86 it needs AVX-512"
    if reason := more_than_linear(call):
        return reason
    if call.keeps_float32 and rounds("cpu"):
        return ROUNDED
    return None


def _opt_in(_call: GemmCall) -> str:
    return MEASURED


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, algorithm: str) -> Tensor:
    """act(x @ weightᵀ + bias), x [..., K] and weight [N, K] to [..., N]."""
    made: Tensor = torch.ops.mkldnn._linear_pointwise(
        x.contiguous(), weight.contiguous(), bias, activation, [], algorithm
    )
    return made


_in_graph = torch.library.custom_op("wavecrest::linear_onednn", _linear, mutates_args=())


@_in_graph.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, algorithm: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def bind(call: GemmCall) -> Callable[[GemmCall], Tensor]:
    """The function for calls with the signature of this one."""
    activation, algorithm = ACTIVATIONS[call.activation]

    def run(call: GemmCall) -> Tensor:
        # in a graph the operation, which has shapes for fake tensors
        work = _in_graph if torch.compiler.is_compiling() else _linear
        made: Tensor = work(call.a, call.b.mT, call.bias, activation, algorithm)
        return made

    return run


def run(call: GemmCall) -> Tensor:
    """One call."""
    return bind(call)(call)


op.attach(NAME, run, refuse=refuse, opt_in=_opt_in, priority=PRIORITY, bind=bind)
