"""The gated ops, with their kernel attached."""

from __future__ import annotations

from functools import partial

from torch import Tensor

import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config
from wavecrest.ops.gated.call import KEY_FIELDS, GatedCall, check, key_of
from wavecrest.ops.gated.config import configured
from wavecrest.ops.gated.launch import bind
from wavecrest.ops.gated.reference import reference


def _register(name: str, key_fields: tuple[str, ...]) -> Op[GatedCall, Tensor]:
    op = Op(
        name,
        GatedCall,
        reference=reference,
        check=partial(check, name),
        key=key_of,
        study_module="wavecrest.ops.gated.study",
        key_fields=key_fields,
    )
    op.attach_kernel("triton", bind, refuse=refuse, priority=_launcher.KERNEL_PRIORITY, default_config=default_config)
    return op


def default_config(key: Key) -> Config:
    """The configuration of a key where nothing measured is known."""
    return configured(key[0], key[1], _target.wave_size())


def refuse(call: GatedCall) -> str | None:
    """The reason why the kernel cannot run a call."""
    gate = call.gate
    reason: str | None = _checks.kernel_refusal(dtype_name(gate), gate.device.type, call.leading, call.needs_grad)
    return reason


silu_op = _register("silu_and_mul", KEY_FIELDS)
gelu_op = _register("gelu_and_mul", (*KEY_FIELDS, "approximate"))
