"""The op memcpy, with its kernel attached."""

from __future__ import annotations

from torch import Tensor

import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import needs_grad
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config
from wavecrest.ops._memcpy.call import KEY_FIELDS, MemcpyCall, check, key_of
from wavecrest.ops._memcpy.config import configured
from wavecrest.ops._memcpy.launch import bind
from wavecrest.ops._memcpy.reference import reference


def default_config(_key: Key) -> Config:
    """The configuration of a key where nothing measured is known."""
    return configured(_target.wave_size())


def refuse(call: MemcpyCall) -> str | None:
    """The reason why the kernel cannot run a call."""
    # to the kernel all dtypes are words
    reason: str | None = _checks.kernel_refusal("float32", call.x.device.type, 1, needs_grad(call.x))
    return reason


op: Op[MemcpyCall, Tensor] = Op(
    "memcpy",
    MemcpyCall,
    reference=reference,
    check=check,
    key=key_of,
    study_module="wavecrest.ops._memcpy.study",
    key_fields=KEY_FIELDS,
    key_sizes=("blocks_4k",),
)
op.attach_kernel("triton", bind, refuse=refuse, priority=_launcher.KERNEL_PRIORITY, default_config=default_config)
