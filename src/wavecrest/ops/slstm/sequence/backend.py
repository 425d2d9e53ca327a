"""The op slstm_sequence and wavecrest's kernels for it.

All tokens in one launch, of programs with whole heads or with parts of them; a launch for each token; C code for a CPU.
"""

from __future__ import annotations

from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config
from wavecrest.ops.slstm.backend import refuse as _refuse
from wavecrest.ops.slstm.call import SlstmCall, check
from wavecrest.ops.slstm.key import KEY_FIELDS, head_dim_and_dtype, key_of
from wavecrest.ops.slstm.reference import reference
from wavecrest.ops.slstm.sequence import launch_cpu as _cpu
from wavecrest.ops.slstm.sequence.config import KEPT_HEAD_DIM, LARGEST_HEAD_DIM, default, default_cooperative
from wavecrest.ops.slstm.sequence.launch import bind
from wavecrest.ops.slstm.sequence.launch_cooperative import bind as bind_cooperative
from wavecrest.ops.slstm.sequence.launch_cooperative import refuse as refuse_cooperative
from wavecrest.ops.slstm.sequence.launch_steps import bind as bind_steps
from wavecrest.ops.slstm.step.config import default as default_step

# architectures where programs that wait for each other were seen to be faster than a launch for each token
MEASURED = ("sm_90",)


def refuse(call: SlstmCall) -> str | None:
    """The reason why the kernel cannot run a call; None if it can."""
    if call.head_dim > LARGEST_HEAD_DIM:
        return f"keeps a head's gates and states in registers: takes a head_dim up to {LARGEST_HEAD_DIM}"
    return _refuse(call)


def opt_in(call: SlstmCall) -> str | None:
    """The reason why the kernel in one launch runs a call only where it is asked for."""
    if call.head_dim > KEPT_HEAD_DIM:
        return f"reads the weights of a head of more than {KEPT_HEAD_DIM} again, by one program, at each token"
    return None


def opt_in_steps(call: SlstmCall) -> str | None:
    """The reason why a launch for each token runs a call only where it is asked for."""
    if call.head_dim <= KEPT_HEAD_DIM:
        return f"has a launch for each token; heads of up to {KEPT_HEAD_DIM} take one for all"
    return None


def opt_in_cooperative(call: SlstmCall) -> str | None:
    """The reason why programs that wait for each other run a call only where they are asked for.

    Where they run by default they took 0.40 to 0.90 of the time of a launch for each token (4 heads of 256 and 512, 1
    to 64 rows, bfloat16, H200, 2026-11-27).
    """
    arch = _target.arch()
    if arch is None or arch.name not in MEASURED:
        return "has programs that wait for each other at each token; its speed is measured on sm_90 alone"
    if call.head_dim <= KEPT_HEAD_DIM:
        return f"divides a head over programs; heads of up to {KEPT_HEAD_DIM} have one"
    if call.r.element_size() > 2:
        return "has programs that wait for each other at each token; its speed is measured in 16 bits alone"
    return None


def default_config(key: Key) -> Config:
    """The configuration of a key where nothing measured is known."""
    return default(*head_dim_and_dtype(KEY_FIELDS, key), _target.arch())


def default_config_steps(key: Key) -> Config:
    """The same for a launch of each token."""
    return default_step(head_dim_and_dtype(KEY_FIELDS, key)[0], _target.arch())


def default_config_cooperative(key: Key) -> Config:
    """The same for programs that share a head."""
    heads, device = (key[KEY_FIELDS.index(name)] for name in ("heads", "device"))
    return default_cooperative(heads, *head_dim_and_dtype(KEY_FIELDS, key), _target.arch(), _target.units(device))


op: Op[SlstmCall, Tensor | tuple[Tensor, ...]] = Op(
    "slstm_sequence",
    SlstmCall,
    reference=reference,
    check=check,
    key=key_of,
    study_module="wavecrest.ops.slstm.sequence.study",
    key_fields=KEY_FIELDS,
    op_class="gemm",
)
op.attach_kernel(
    "triton",
    bind,
    refuse=refuse,
    opt_in=opt_in,
    priority=_launcher.KERNEL_PRIORITY,
    default_config=default_config,
)
op.attach_kernel(
    "triton_cooperative",
    bind_cooperative,
    refuse=refuse_cooperative,
    opt_in=opt_in_cooperative,
    priority=_launcher.KERNEL_PRIORITY,
    default_config=default_config_cooperative,
)
op.attach_kernel(
    "triton_steps",
    bind_steps,
    refuse=_refuse,
    opt_in=opt_in_steps,
    priority=_launcher.KERNEL_PRIORITY,
    default_config=default_config_steps,
)
op.attach("c", _cpu.run, refuse=_cpu.refuse, opt_in=_cpu.opt_in, priority=_cpu.PRIORITY, bind=_cpu.bind)
