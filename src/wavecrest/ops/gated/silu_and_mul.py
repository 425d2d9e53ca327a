"""SwiGLU's activation: y = silu(gate) · up with silu(g) = g / (1 + exp(−g)) (Shazeer, 2020)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

import wavecrest.ops.common.activation as _activation
import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.target as _target
import wavecrest.ops.gated.launch as _gated
from wavecrest.dispatch.decision import Cost, Key
from wavecrest.dispatch.legacy import LegacyOp
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.common.activation import silu
from wavecrest.ops.common.device import column_mask, column_offsets, row_mask, row_offsets
from wavecrest.ops.common.triton import tl, triton


def _reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
    dtype = gate.dtype
    gate, up = _gated.halves(gate, up)
    return (_activation.activated(_checks.widen(gate), "silu") * _checks.widen(up)).to(dtype)


def _check(gate: Tensor, up: Tensor | None = None) -> None:
    _gated.check("silu_and_mul", gate, up)


def _key(gate: Tensor, up: Tensor | None = None) -> Key:
    return _gated.key(gate, up)


def _cost(gate: Tensor, up: Tensor | None = None) -> Cost:
    return _gated.cost(gate, up, flops=5)


def _default_config(key: Key) -> Config:
    return _gated.config(key[0], key[1], _target.wave_size())


@triton.jit(do_not_specialize=["M", "blocks_n", "size1", "size2"])
def _silu_and_mul_kernel(  # type: ignore[no-untyped-def]
    gate_ptr,
    up_ptr,
    y_ptr,
    M,
    N,
    blocks_n,
    size1,
    size2,
    stride_g0,
    stride_g1,
    stride_g2,
    stride_gn,
    stride_u0,
    stride_u1,
    stride_u2,
    stride_un,
    up_offset,
    LEADING: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    program = tl.program_id(0)
    # int64: row · stride passes 2³¹ on large batches
    rows = (program // blocks_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (program % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = row_mask(rows, M, BLOCK_M) & column_mask(cols, N, BLOCK_N, EVEN)[None, :]
    g_rows = row_offsets(rows, stride_g0, stride_g1, stride_g2, size1, size2, LEADING)[:, None]
    u_rows = row_offsets(rows, stride_u0, stride_u1, stride_u2, size1, size2, LEADING)[:, None]
    gate = tl.load(gate_ptr + g_rows + column_offsets(cols, stride_gn)[None, :], mask=mask, other=0.0)
    up = tl.load(up_ptr + up_offset + u_rows + column_offsets(cols, stride_un)[None, :], mask=mask, other=0.0)
    y = silu(gate.to(tl.float32)) * up.to(tl.float32)
    tl.store(y_ptr + (rows * N)[:, None] + cols[None, :], y, mask=mask)


def _bind(gate: Tensor, up: Tensor | None = None, *, config: Config) -> Callable[..., Tensor]:
    return _gated.bind(_silu_and_mul_kernel, gate, up, config, {})


def _supports(gate: Tensor, up: Tensor | None = None) -> str | None:
    return _gated.refusal(gate, up)


def _compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    return _gated.compile_cases(_silu_and_mul_kernel, arch, config, {})


_op = LegacyOp(
    "silu_and_mul",
    reference=_reference,
    check=_check,
    key=_key,
    key_fields=_gated.KEY_FIELDS,
    inputs=_gated.inputs,
    cost=_cost,
    default_config=_default_config,
    compile_cases=_compile_cases,
)
_launcher.attach_kernel(_op, _bind, _supports)


def silu_and_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """y = silu(gate) · up, in float32 and rounded once.

    Args:
        gate: [..., N], any strides, float32, float16, bfloat16 or float64; with `up` None, [..., 2N] holding gate
            in its first and up in its second half.
        up: the shape, dtype and device of gate, strides of its own.

    Returns:
        A contiguous tensor [..., N] of gate's dtype.

    Raises:
        InvalidArgument: a shape, dtype or device is outside this.
    """
    result: Tensor = _op(gate, up)
    return result
