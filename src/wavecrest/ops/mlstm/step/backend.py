"""The op mlstm_step and wavecrest's kernel for it."""

from __future__ import annotations

from functools import partial

from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config
from wavecrest.ops.mlstm.backend import refuse
from wavecrest.ops.mlstm.call import MlstmStepCall, check_step
from wavecrest.ops.mlstm.key import STEP_KEY_FIELDS, head_dims, step_key_of
from wavecrest.ops.mlstm.reference import step
from wavecrest.ops.mlstm.step.config import default
from wavecrest.ops.mlstm.step.launch import bind


def default_config(key: Key) -> Config:
    """The configuration of a key where nothing measured is known."""
    return default(*head_dims(STEP_KEY_FIELDS, key), _target.arch())


op: Op[MlstmStepCall, tuple[Tensor, ...]] = Op(
    "mlstm_step",
    MlstmStepCall,
    reference=step,
    check=partial(check_step, "mlstm_step"),
    key=step_key_of,
    study_module="wavecrest.ops.mlstm.step.study",
    key_fields=STEP_KEY_FIELDS,
    op_class="gemm",
)
op.attach_kernel(
    "triton",
    bind,
    refuse=refuse,
    priority=_launcher.KERNEL_PRIORITY,
    default_config=default_config,
    optional=("EARLY",),
)
