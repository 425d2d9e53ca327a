"""The op mla_decode, and the kernels over a latent cache, attached to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config
from wavecrest.ops._mla_decode import launch, launch_hopper
from wavecrest.ops._mla_decode.call import MlaDecodeCall, MlaResult, check
from wavecrest.ops._mla_decode.config import default, default_hopper
from wavecrest.ops._mla_decode.key import KEY_FIELDS, key_of, shape_of, strided_columns, strided_weights
from wavecrest.ops._mla_decode.reference import reference

C = TypeVar("C", bound=MlaDecodeCall)


def refuse(call: MlaDecodeCall) -> str | None:
    """The reason why the portable kernel cannot run a call."""
    reason: str | None = _checks.kernel_refusal(dtype_name(call.q_nope), call.q_nope.device.type, 1, call.needs_grad)
    if reason is not None:
        return reason
    if strided_columns(call):
        return "reads columns that lie next to each other"
    if strided_weights(call):
        return "reads weights whose rows or columns lie next to each other"
    if call.cos is not None and dtype_name(call.cos) not in _checks.KERNEL_DTYPES:
        return f"takes tables of {', '.join(_checks.KERNEL_DTYPES)}, not {dtype_name(call.cos)}"
    return None


def refuse_hopper(call: MlaDecodeCall) -> str | None:
    """The reason why sm_90's kernel cannot run a call."""
    return refuse(call) or launch_hopper.refusal(call)


def _opt_in_hopper(_call: MlaDecodeCall) -> str:
    return "runs where a measured row names it"


def attach_kernels(op: Op[C, MlaResult], change: Callable[[Config], Config] = lambda config: config) -> None:
    """Attach the portable kernel and sm_90's to an op; `change`: what becomes of their default configurations."""

    def default_config(key: Key) -> Config:
        return change(default(shape_of(key), _target.arch()))

    def default_config_hopper(key: Key) -> Config:
        return change(default_hopper(shape_of(key), _target.arch()))

    def bind_hopper(call: C, config: Config) -> Callable[[C], MlaResult]:
        return launch_hopper.bind(call, config, launch.bind(call, default_config(key_of(call))))

    op.attach_kernel(
        "triton",
        launch.bind,
        refuse=refuse,
        priority=_launcher.KERNEL_PRIORITY,
        default_config=default_config,
    )
    op.attach_kernel(
        "triton_hopper",
        bind_hopper,
        refuse=refuse_hopper,
        opt_in=_opt_in_hopper,
        priority=_launcher.KERNEL_PRIORITY,
        default_config=default_config_hopper,
    )


op: Op[MlaDecodeCall, MlaResult] = Op(
    "mla_decode",
    MlaDecodeCall,
    reference=reference,
    check=check,
    key=key_of,
    study_module="wavecrest.ops._mla_decode.study",
    key_fields=KEY_FIELDS,
    key_sizes=("batch", "capacity"),
    op_class="gemm",
)
attach_kernels(op)
