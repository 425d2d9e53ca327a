"""The op mlstm_sequence and wavecrest's kernel for it."""

from __future__ import annotations

from functools import partial

from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config
from wavecrest.ops.mlstm.backend import refuse
from wavecrest.ops.mlstm.call import MlstmCall, check
from wavecrest.ops.mlstm.key import KEY_FIELDS, KEY_SIZES, head_dims, key_of
from wavecrest.ops.mlstm.reference import reference
from wavecrest.ops.mlstm.sequence.config import default
from wavecrest.ops.mlstm.sequence.launch import bind


def default_config(key: Key) -> Config:
    """The configuration of a key where nothing measured is known."""
    return default(*head_dims(KEY_FIELDS, key), _target.arch())


op: Op[MlstmCall, Tensor | tuple[Tensor, ...]] = Op(
    "mlstm_sequence",
    MlstmCall,
    reference=reference,
    check=partial(check, "mlstm_sequence"),
    key=key_of,
    study_module="wavecrest.ops.mlstm.sequence.study",
    key_fields=KEY_FIELDS,
    key_sizes=KEY_SIZES,
    op_class="gemm",
)
op.attach_kernel("triton", bind, refuse=refuse, priority=_launcher.KERNEL_PRIORITY, default_config=default_config)
