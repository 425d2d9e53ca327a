"""The op conv2d, with its kernel attached."""

from __future__ import annotations

from torch import Tensor

import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config
from wavecrest.ops._conv2d.call import Conv2dCall, check
from wavecrest.ops._conv2d.config import default
from wavecrest.ops._conv2d.key import KEY_FIELDS, key_of, shape_of
from wavecrest.ops._conv2d.launch import bind
from wavecrest.ops._conv2d.reference import reference

# below PyTorch's: a library's convolution is the default until a measured row says otherwise
PRIORITY = 5


def default_config(key: Key) -> Config:
    """The configuration of a key where nothing measured is known."""
    return default(shape_of(key), _target.arch())


def refuse(call: Conv2dCall) -> str | None:
    """The reason why the kernel cannot run a call."""
    if call.residual is not None:
        return "adds no residual"
    reason: str | None = _checks.kernel_refusal(dtype_name(call.x), call.x.device.type, 1, call.needs_grad)
    return reason


op: Op[Conv2dCall, Tensor] = Op(
    "conv2d",
    Conv2dCall,
    reference=reference,
    check=check,
    key=key_of,
    study_module="wavecrest.ops._conv2d.study",
    key_fields=KEY_FIELDS,
    key_sizes=("pixels", "outputs", "channels"),
    op_class="gemm",
)
op.attach_kernel("triton", bind, refuse=refuse, priority=PRIORITY, default_config=default_config)
