"""Registers a row op and attaches the row kernel to it."""

from __future__ import annotations

from functools import partial
from typing import Any

import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.quantized as _quantized
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import dtype_name, name_of
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tuned import Config
from wavecrest.ops.rows.call import KEY_FIELDS, QUANTIZED_FIELDS, RowCall, Spec, check, key_of
from wavecrest.ops.rows.config import Shape, configured
from wavecrest.ops.rows.launch import bind, refuse_width
from wavecrest.ops.rows.reference import reference

# by the op's name, for the study of the row ops
SPECS: dict[str, Spec] = {}


def register(spec: Spec) -> Op[RowCall, Any]:
    """The op of a specification, with the row kernel attached."""
    SPECS[spec.name] = spec
    op = Op(
        spec.name,
        RowCall,
        reference=reference,
        check=partial(check, spec),
        key=key_of,
        study_module="wavecrest.ops.rows.study",
        key_fields=KEY_FIELDS + (QUANTIZED_FIELDS if spec.quantized else ()),
        op_class="quantized" if spec.quantized else "row",
    )
    op.attach_kernel(
        "triton",
        bind,
        refuse=refuse,
        opt_in=opt_in,
        priority=_launcher.KERNEL_PRIORITY,
        default_config=partial(default_config, spec),
        optional=("EARLY",),
    )
    return op


def shape_of(spec: Spec, key: Key) -> Shape:
    """The parts of a key that a configuration depends on, beside rows and columns."""
    return Shape(spec.kind, key[2], spec.residual, *((key[-2], key[-1]) if spec.quantized else ()))


def default_config(spec: Spec, key: Key) -> Config:
    """The configuration of a key where nothing measured is known."""
    return configured(key[0], key[1], shape_of(spec, key), _target.arch())


def refuse(call: RowCall) -> str | None:
    """The reason why the row kernel cannot run a call."""
    x, how = call.x, call.quantization
    dtype = dtype_name(x)
    if how is not None:
        eight_bits, dtype = (x.dtype, name_of(how.dtype)) if call.kind == "scaled" else (how.dtype, dtype)
        reason: str | None = _quantized.kernel_refusal(eight_bits)
        if reason is not None:
            return reason
    rounding, static = (None, False) if how is None else (how.granularity, how.scale is not None)
    tiled = Shape(call.kind, dtype, rounding=rounding, static=static).tiled
    return _checks.kernel_refusal(dtype, x.device.type, call.leading, call.needs_grad) or refuse_width(
        x.shape[-1], not tiled
    )


def opt_in(call: RowCall) -> str | None:
    """The reason why the row kernel runs a call only where it is asked for."""
    if call.strided:
        return "reads columns one by one where they do not lie next to each other; PyTorch's kernels handle that better"
    return None
