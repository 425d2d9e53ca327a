"""The op moe, with its kernels attached."""

from __future__ import annotations

from torch import Tensor

import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.quantized as _quantized
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config
from wavecrest.ops._moe.call import MoeCall, check
from wavecrest.ops._moe.config import default
from wavecrest.ops._moe.key import KEY_FIELDS, key_of, shape_of
from wavecrest.ops._moe.launch import bind
from wavecrest.ops._moe.reference import reference


def default_config(key: Key) -> Config:
    """The configuration of a key where nothing measured is known."""
    return default(shape_of(key), _target.arch())


def refuse(call: MoeCall) -> str | None:
    """The reason why the kernels cannot run a call."""
    reason: str | None = _checks.kernel_refusal(dtype_name(call.x), call.x.device.type, 1, call.needs_grad)
    if reason is not None:
        return reason
    if call.w1.dtype.is_floating_point and call.w1.dtype.itemsize == 1:
        reason = _quantized.kernel_refusal(call.w1.dtype)
        if reason is not None:
            return f"weights: {reason}"
    for name, tensor in (("topk_weights", call.topk_weights), ("b1", call.b1), ("b2", call.b2)):
        if tensor is not None and dtype_name(tensor) not in _checks.KERNEL_DTYPES:
            return f"takes {name} of {', '.join(_checks.KERNEL_DTYPES)}, not {dtype_name(tensor)}"
    return None


op: Op[MoeCall, Tensor] = Op(
    "moe",
    MoeCall,
    reference=reference,
    check=check,
    key=key_of,
    study_module="wavecrest.ops._moe.study",
    key_fields=KEY_FIELDS,
    key_sizes=("tokens", "experts", "hidden", "intermediate"),
    op_class="gemm",
)
op.attach_kernel("triton", bind, refuse=refuse, priority=_launcher.KERNEL_PRIORITY, default_config=default_config)
