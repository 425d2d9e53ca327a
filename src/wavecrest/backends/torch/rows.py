"""Row ops by PyTorch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from wavecrest.backends.torch.common import PRIORITY, other_dtype
from wavecrest.dispatch import registry
from wavecrest.ops.rows.call import RowCall


def _refuse(call: RowCall) -> str | None:
    return other_dtype(call.x, weight=call.weight, bias=call.bias)


def _rms_norm(call: RowCall) -> Tensor:
    return F.rms_norm(call.x, call.x.shape[-1:], call.weight, call.eps)


def _add_rms_norm(call: RowCall) -> tuple[Tensor, Tensor]:
    assert call.residual is not None
    h = call.x + call.residual
    return F.rms_norm(h, h.shape[-1:], call.weight, call.eps), h


def _layer_norm(call: RowCall) -> Tensor:
    return F.layer_norm(call.x, call.x.shape[-1:], call.weight, call.bias, call.eps)


def _add_layer_norm(call: RowCall) -> tuple[Tensor, Tensor]:
    assert call.residual is not None
    h = call.x + call.residual
    return F.layer_norm(h, h.shape[-1:], call.weight, call.bias, call.eps), h


def _softmax(call: RowCall) -> Tensor:
    return F.softmax(call.x, dim=-1)


registry.get("rms_norm").attach("torch", _rms_norm, refuse=_refuse, priority=PRIORITY)
registry.get("add_rms_norm").attach("torch", _add_rms_norm, refuse=_refuse, priority=PRIORITY)
registry.get("layer_norm").attach("torch", _layer_norm, refuse=_refuse, priority=PRIORITY)
registry.get("add_layer_norm").attach("torch", _add_layer_norm, refuse=_refuse, priority=PRIORITY)
registry.get("softmax").attach("torch", _softmax, priority=PRIORITY)
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
    _op.attach("torch", _op.reference, priority=PRIORITY)
