"""The op causal_conv1d, with its kernel attached."""

from __future__ import annotations

from torch import Tensor

import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config
from wavecrest.ops._causal_conv1d.call import CausalConv1dCall, check
from wavecrest.ops._causal_conv1d.config import default
from wavecrest.ops._causal_conv1d.key import KEY_FIELDS, KEY_SIZES, key_of
from wavecrest.ops._causal_conv1d.launch import bind
from wavecrest.ops._causal_conv1d.reference import reference


def default_config(key: Key) -> Config:
    """The configuration of a key where nothing measured is known."""
    return default(key[1], key[2], key[4], _target.wave_size())


def refuse(call: CausalConv1dCall) -> str | None:
    """The reason why the kernel cannot run a call."""
    reason: str | None = _checks.kernel_refusal(dtype_name(call.x), call.x.device.type, 1, call.needs_grad)
    if reason is not None:
        return reason
    for name, one in (("a weight", call.weight), ("a bias", call.bias)):
        if one is not None and dtype_name(one) not in _checks.KERNEL_DTYPES:
            return f"takes {name} of {', '.join(_checks.KERNEL_DTYPES)}, not {dtype_name(one)}"
    return None


op: Op[CausalConv1dCall, Tensor] = Op(
    "causal_conv1d",
    CausalConv1dCall,
    reference=reference,
    check=check,
    key=key_of,
    study_module="wavecrest.ops._causal_conv1d.study",
    key_fields=KEY_FIELDS,
    key_sizes=KEY_SIZES,
)
op.attach_kernel("triton", bind, refuse=refuse, priority=_launcher.KERNEL_PRIORITY, default_config=default_config)
