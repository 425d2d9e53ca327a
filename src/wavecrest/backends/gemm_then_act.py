"""PyTorch's GEMM, then our gated-activation kernel, one pass over memory in place of PyTorch's two operations.

With thousands of rows a GEMM is fastest by the vendor's library, which has no gated activations: PyTorch runs two
operations over strided halves after it. In xLSTM 7B they took 4.4 of the 44.5 ms of a prompt of 2,048 tokens (H200,
2026-11-22, part `kernels` of evidence/nvidia-h200/2026-11-24_xlstm-peers_xlstm_7b.jsonl.gz).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import wavecrest.backends.torch.gemm as native
from wavecrest.dispatch.keys import needs_grad
from wavecrest.ops._gemm.backend import op
from wavecrest.ops._gemm.call import GATED, GemmCall
from wavecrest.ops.gated.gelu_and_mul import gelu_and_mul
from wavecrest.ops.gated.silu_and_mul import silu_and_mul

# above PyTorch's own two operations
PRIORITY = 11
NAME = "gemm_then_act"
# by activation: the op that makes it of [gate | up]
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_and_mul": silu_and_mul,
    "gelu_and_mul": partial(gelu_and_mul, approximate="none"),
    "gelu_tanh_and_mul": partial(gelu_and_mul, approximate="tanh"),
}


def _refuse(call: GemmCall) -> str | None:
    if call.activation not in GATED:
        return "is for gated activations"
    if call.residual is not None or call.out_scale is not None:
        return "adds no residual and makes no 8-bit results"
    if call.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return "makes float16, bfloat16 or float32"
    if call.integers:
        return "rounds before the activation, which PyTorch does not do with sums of int8"
    if needs_grad(call.a, call.b, call.bias, call.scale_a, call.scale_b, call.norm_weight):
        return "has no gradients"
    return native.refuse(call._replace(activation=None))


def _opt_in(call: GemmCall) -> str | None:
    if call.a.device.type == "cpu":
        return "runs two operations of PyTorch on a CPU, as torch does"
    return native.opt_in(call)


def bind(call: GemmCall) -> native.Bound:
    """The function for calls with the signature of this one."""
    assert call.activation is not None
    multiply, activate = native.bind(call._replace(activation=None)), OPS[call.activation]
    return lambda call: activate(multiply(call))


def run(call: GemmCall) -> Tensor:
    """One call."""
    return bind(call)(call)


op.attach(NAME, run, refuse=_refuse, opt_in=_opt_in, priority=PRIORITY, bind=bind, as_native=True)
