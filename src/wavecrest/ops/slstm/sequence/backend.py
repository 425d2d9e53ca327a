"""The op slstm_sequence and wavecrest's kernel for it."""

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
from wavecrest.ops.slstm.sequence.config import LARGEST_HEAD_DIM, default
from wavecrest.ops.slstm.sequence.launch import bind


def refuse(call: SlstmCall) -> str | None:
    """The reason why the kernel cannot run a call; None if it can."""
    if call.head_dim > LARGEST_HEAD_DIM:
        return f"keeps a head's gates and states in registers: takes a head_dim up to {LARGEST_HEAD_DIM}"
    return _refuse(call)


def default_config(key: Key) -> Config:
    """The configuration of a key where nothing measured is known."""
    return default(*head_dim_and_dtype(KEY_FIELDS, key), _target.arch())


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
op.attach_kernel("triton", bind, refuse=refuse, priority=_launcher.KERNEL_PRIORITY, default_config=default_config)
