"""The op mlstm_chunkwise and wavecrest's kernels for it."""

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
from wavecrest.ops.mlstm.chunkwise.config import Shape, default
from wavecrest.ops.mlstm.chunkwise.launch import bind
from wavecrest.ops.mlstm.key import KEY_FIELDS, KEY_SIZES, key_of
from wavecrest.ops.mlstm.reference import reference


def shape_of(key: Key) -> Shape:
    """The parts of a key that a configuration depends on."""
    part = dict(zip(KEY_FIELDS, key, strict=True))
    return Shape(part["dk"], part["dv"], part["dtype"], part["chunk"])


def default_config(key: Key) -> Config:
    """The configuration of a key where nothing measured is known."""
    return default(shape_of(key), _target.arch())


op: Op[MlstmCall, Tensor | tuple[Tensor, ...]] = Op(
    "mlstm_chunkwise",
    MlstmCall,
    reference=reference,
    check=partial(check, "mlstm_chunkwise"),
    key=key_of,
    study_module="wavecrest.ops.mlstm.chunkwise.study",
    key_fields=KEY_FIELDS,
    key_sizes=KEY_SIZES,
    op_class="gemm",
)
op.attach_kernel("triton", bind, refuse=refuse, priority=_launcher.KERNEL_PRIORITY, default_config=default_config)
