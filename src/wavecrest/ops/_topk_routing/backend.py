"""The op topk_routing, with its kernel attached."""

from __future__ import annotations

import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config
from wavecrest.ops._topk_routing.call import KEY_FIELDS, Routing, TopkRoutingCall, check, key_of
from wavecrest.ops._topk_routing.config import configured
from wavecrest.ops._topk_routing.launch import bind
from wavecrest.ops._topk_routing.reference import reference

# most experts, whose scores a program has in registers
MOST_EXPERTS = 4096


def default_config(key: Key) -> Config:
    """The configuration of a key where nothing measured is known."""
    return configured(key[0], key[1], _target.wave_size())


def refuse(call: TopkRoutingCall) -> str | None:
    """The reason why the kernel cannot run a call."""
    logits = call.logits
    reason: str | None = _checks.kernel_refusal(dtype_name(logits), logits.device.type, 1, call.needs_grad)
    if reason is not None:
        return reason
    if call.bias is not None and dtype_name(call.bias) not in _checks.KERNEL_DTYPES:
        return f"takes a bias of {', '.join(_checks.KERNEL_DTYPES)}, not {dtype_name(call.bias)}"
    if call.experts > MOST_EXPERTS:
        return f"takes up to {MOST_EXPERTS} experts"
    if call.num_groups > 1 and any(_layout.power_of_two(one) != one for one in (call.experts, call.num_groups)):
        return "takes groups of experts where both numbers are powers of two"
    return None


op: Op[TopkRoutingCall, Routing] = Op(
    "topk_routing",
    TopkRoutingCall,
    reference=reference,
    check=check,
    key=key_of,
    study_module="wavecrest.ops._topk_routing.study",
    key_fields=KEY_FIELDS,
    key_sizes=("tokens", "experts"),
)
op.attach_kernel("triton", bind, refuse=refuse, priority=_launcher.KERNEL_PRIORITY, default_config=default_config)
