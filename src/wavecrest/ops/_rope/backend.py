"""The op rope, with its kernel attached."""

from __future__ import annotations

from torch import Tensor

import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config
from wavecrest.ops._rope.call import KEY_FIELDS, RopeCall, check, key_of
from wavecrest.ops._rope.config import configured
from wavecrest.ops._rope.launch import bind
from wavecrest.ops._rope.reference import reference


def default_config(key: Key) -> Config:
    """The configuration of a key where nothing measured is known."""
    return configured(key[0], key[1], key[2], key[3], key[4], _target.wave_size())


def refuse(call: RopeCall) -> str | None:
    """The reason why the kernel cannot run a call."""
    x, table = call.x, dtype_name(call.cos)
    reason: str | None = _checks.kernel_refusal(dtype_name(x), x.device.type, call.leading, call.needs_grad)
    if reason is not None:
        return reason
    if table not in _checks.KERNEL_DTYPES:
        return f"takes tables of {', '.join(_checks.KERNEL_DTYPES)}, not {table}"
    if not call.same_strides:
        return "takes cos and sin with the same strides"
    return None


op: Op[RopeCall, Tensor] = Op(
    "rope",
    RopeCall,
    reference=reference,
    check=check,
    key=key_of,
    study_module="wavecrest.ops._rope.study",
    key_fields=KEY_FIELDS,
    key_sizes=("tokens", "heads"),
)
op.attach_kernel("triton", bind, refuse=refuse, priority=_launcher.KERNEL_PRIORITY, default_config=default_config)
