"""Row ops by PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wavecrest.backends.torch.common import PRIORITY, other_dtype
from wavecrest.dispatch import registry
from wavecrest.ops.common.quantized import dequantized
from wavecrest.ops.rows.call import RowCall

# columns that PyTorch's kernels for a GPU count in 32 bits
MOST_COLUMNS = (1 << 31) - 1


def _refuse_wide(call: RowCall) -> str | None:
    if call.x.is_cuda and call.x.shape[-1] > MOST_COLUMNS:
        return f"counts columns in 32 bits on a GPU, and there are {call.x.shape[-1]}"
    return None


def _refuse(call: RowCall) -> str | None:
    return other_dtype(call.x, weight=call.weight, bias=call.bias) or _refuse_wide(call)


def _refuse_nothing(_call: RowCall) -> None:
    return None


def _bind_norm(call: RowCall) -> Callable[[RowCall], Any]:
    """The function for calls with the signature of this one: y, or y and the sum where there is a residual."""
    size, eps = call.x.shape[-1:], call.eps

    def norm(x: Tensor, call: RowCall) -> Tensor:
        if call.kind == "rms":
            return torch.rms_norm(x, size, call.weight, eps)
        return torch.layer_norm(x, size, call.weight, call.bias, eps)

    def with_residual(call: RowCall) -> tuple[Tensor, Tensor]:
        assert call.residual is not None
        h = call.x + call.residual
        return norm(h, call), h

    def of_sum(call: RowCall) -> Tensor:
        assert call.residual is not None
        return norm(call.x + call.residual, call)

    # written out where it is all there is: a call of Python less
    if call.residual is not None:
        return with_residual if call.keeps_sum else of_sum
    if call.kind == "rms":
        return lambda call: torch.rms_norm(call.x, size, call.weight, eps)
    return lambda call: torch.layer_norm(call.x, size, call.weight, call.bias, eps)


def _bind_softmax(_call: RowCall) -> Callable[[RowCall], Tensor]:
    return lambda call: torch.softmax(call.x, -1)


def _bind_dequantize(call: RowCall) -> Callable[[RowCall], Tensor]:
    """The definition, with the granularity that the shape of the scale says."""
    assert call.quantization is not None
    # without the scale of this call, which would be kept
    how = call.quantization._replace(scale=None)

    def run(call: RowCall) -> Tensor:
        return dequantized(call.x.float(), how._replace(scale=call.scale))

    return run


def _run(bind: Callable[[RowCall], Callable[[RowCall], Any]], call: RowCall) -> Any:
    return bind(call)(call)


for _name, _bind, _refusal in (
    ("rms_norm", _bind_norm, _refuse),
    ("add_rms_norm", _bind_norm, _refuse),
    ("layer_norm", _bind_norm, _refuse),
    ("add_layer_norm", _bind_norm, _refuse),
    ("post_layer_norm", _bind_norm, _refuse),
    ("softmax", _bind_softmax, _refuse_wide),
    ("dequantize", _bind_dequantize, _refuse_nothing),
):
    registry.get(_name).attach("torch", partial(_run, _bind), refuse=_refusal, priority=PRIORITY, bind=_bind)
# PyTorch has no op for these: its form is the definition, written in its operations
for _name in (
    "quantize_int8",
    "quantize_fp8",
    "rms_norm_quantize",
    "add_rms_norm_quantize",
    "layer_norm_quantize",
    "add_layer_norm_quantize",
):
    _op = registry.get(_name)
    _op.attach("torch", _op.reference, priority=PRIORITY)
