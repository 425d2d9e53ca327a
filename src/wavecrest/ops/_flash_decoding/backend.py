"""The op flash_decoding and its kernel."""

from __future__ import annotations

from torch import Tensor

import wavecrest.ops._flash_decoding.config as _config
import wavecrest.ops._flash_decoding.launch as _launch
import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.quantized as _quantized
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name, needs_grad
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tracing import constant_in_graphs
from wavecrest.dispatch.tuned import Config
from wavecrest.ops._flash_decoding.call import EIGHT_BIT_FLOATS, FlashDecodingCall, check
from wavecrest.ops._flash_decoding.key import KEY_FIELDS, key_of, shape_of
from wavecrest.ops._flash_decoding.reference import reference

op: Op[FlashDecodingCall, Tensor | tuple[Tensor, Tensor]] = Op(
    "flash_decoding",
    FlashDecodingCall,
    reference=reference,
    check=check,
    key=key_of,
    study_module="wavecrest.ops._flash_decoding.study",
    key_fields=KEY_FIELDS,
    key_sizes=("batch", "capacity"),
    op_class="gemm",
)


def default_config(key: Key) -> Config:
    """The kernel's configuration of a key where nothing measured is known."""
    return _config.default(shape_of(key), _target.arch())


# Dynamo would trace the detection of the GPU, which it cannot
@constant_in_graphs
def _refuse_dtype(dtype: str) -> str | None:
    """The reason why an 8-bit float cannot be widened on this architecture; for AMD the compiler emulates it."""
    arch = _target.arch()
    if arch is None:
        return f"Triton's interpreter has no {dtype}" if dtype.endswith("fnuz") else None
    if arch.vendor == "nvidia" and (arch.fp8 is None or dtype.endswith("fnuz")):
        return f"cannot widen {dtype} on {arch.name}"
    return None


def refuse(call: FlashDecodingCall) -> str | None:
    """The reason why the kernel cannot run a call."""
    tensors = (call.q, call.k_cache, call.v_cache, call.sinks, call.alibi_slopes, call.cos, call.sin)
    reason = _checks.kernel_refusal(dtype_name(call.q), call.q.device.type, 1, needs_grad(*tensors))
    if reason is not None:
        return reason
    if not call.dense:
        return "reads rows whose elements, and groups of scales, lie next to each other"
    if call.cos is not None and dtype_name(call.cos) not in _checks.KERNEL_DTYPES:
        return f"takes tables of {', '.join(_checks.KERNEL_DTYPES)}, not {dtype_name(call.cos)}"
    if call.k_cache.dtype not in EIGHT_BIT_FLOATS:
        return None
    refusal: str | None = _refuse_dtype(dtype_name(call.k_cache))
    if refusal is None and call.k is not None:
        refusal = _quantized.kernel_refusal(call.k_cache.dtype)
    return refusal


op.attach_kernel(
    "triton", _launch.bind, refuse=refuse, priority=_launcher.KERNEL_PRIORITY, default_config=default_config
)
