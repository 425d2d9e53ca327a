"""The op slstm_step and wavecrest's kernels for it: one launch, and C code for a CPU."""

from __future__ import annotations

from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config
from wavecrest.ops.slstm.backend import refuse
from wavecrest.ops.slstm.call import SlstmStepCall, check_step
from wavecrest.ops.slstm.key import STEP_KEY_FIELDS, head_dim_and_dtype, step_key_of
from wavecrest.ops.slstm.reference import step
from wavecrest.ops.slstm.sequence import launch_cpu as _cpu
from wavecrest.ops.slstm.step.config import default
from wavecrest.ops.slstm.step.launch import bind


def default_config(key: Key) -> Config:
    """The configuration of a key where nothing measured is known."""
    return default(head_dim_and_dtype(STEP_KEY_FIELDS, key)[0], _target.arch())


op: Op[SlstmStepCall, tuple[Tensor, ...]] = Op(
    "slstm_step",
    SlstmStepCall,
    reference=step,
    check=check_step,
    key=step_key_of,
    study_module="wavecrest.ops.slstm.step.study",
    key_fields=STEP_KEY_FIELDS,
    op_class="gemm",
)
op.attach_kernel("triton", bind, refuse=refuse, priority=_launcher.KERNEL_PRIORITY, default_config=default_config)
op.attach("c", _cpu.run_step, refuse=_cpu.refuse, opt_in=_cpu.opt_in, priority=_cpu.PRIORITY, bind=_cpu.bind_step)
