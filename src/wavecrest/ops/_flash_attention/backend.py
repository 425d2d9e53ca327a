"""The op flash_attention and its kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import wavecrest.ops._flash_attention.config as _config
import wavecrest.ops._flash_attention.launch as _launch
import wavecrest.ops._flash_attention.launch_cdna as _cdna
import wavecrest.ops._flash_attention.launch_hopper as _hopper
import wavecrest.ops._flash_attention.launch_hopper_group as _hopper_group
import wavecrest.ops._flash_attention.launch_short as _short
import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Key
from wavecrest.dispatch.keys import name_of, needs_grad
from wavecrest.dispatch.op import Op
from wavecrest.dispatch.tracing import constant_in_graphs
from wavecrest.dispatch.tuned import Config
from wavecrest.ops._flash_attention.call import KEY_FIELDS, FlashAttentionCall, access, check, key_of
from wavecrest.ops._flash_attention.config import shape_of
from wavecrest.ops._flash_attention.reference import reference

# below PyTorch's: its kernels are the default for what they take until a measured row says otherwise
PRIORITY = 5
# sm_90's own kernels are above the portable one where there are more queries than FEW_QUERIES, fewer of which are not
# timed: up to FEW_COLUMNS the one of one group of warps where it takes a call, else that of roles (H200, 2026-11-29:
# 1.1 to 1.5 and 1.2 to 2.2 times its speed, docs/ops/flash_attention.md)
HOPPER_PRIORITY, FEW_QUERIES, FEW_COLUMNS = 6, 32, 64

op: Op[FlashAttentionCall, Tensor | tuple[Tensor, Tensor]] = Op(
    "flash_attention",
    FlashAttentionCall,
    reference=reference,
    check=check,
    key=key_of,
    study_module="wavecrest.ops._flash_attention.study",
    key_fields=KEY_FIELDS,
    key_sizes=("batch", "queries", "keys"),
    op_class="gemm",
)


def default_config(key: Key) -> Config:
    """The portable kernel's configuration of a key where nothing measured is known."""
    return _config.default(shape_of(key), _target.arch())


def refuse(call: FlashAttentionCall) -> str | None:
    """The reason why the portable kernel cannot run a call."""
    # 8-bit q is multiplied as it is, or in these 16 bits
    reason = _checks.kernel_refusal(name_of(call.wide), call.q.device.type, 1, needs_grad(*call.differentiable))
    if reason is None and call.quantized:
        refusal: str | None = _refuse_dtype(call.k.dtype)
        return refusal
    return reason


# Dynamo would trace the detection of the GPU, which it cannot
@constant_in_graphs
def _refuse_dtype(dtype: torch.dtype) -> str | None:
    return _launch.refuse_dtype(dtype, _target.arch())


def hopper_config(key: Key) -> Config:
    """The configuration of sm_90's kernel for a key where nothing measured is known."""
    return _hopper.default(shape_of(key))


def _refuse_hopper(call: FlashAttentionCall) -> str | None:
    return refuse(call) or _hopper.refusal(call, access(call))


def hopper_group_config(key: Key) -> Config:
    """The configuration of sm_90's kernel of one group of warps for a key where nothing measured is known."""
    return _hopper_group.default(shape_of(key))


def _refuse_hopper_group(call: FlashAttentionCall) -> str | None:
    return refuse(call) or _hopper_group.refusal(call, access(call))


def cdna_config(key: Key) -> Config:
    """The configuration of gfx950's kernel for a key where nothing measured is known."""
    return _cdna.default(shape_of(key), _target.arch())


def _refuse_cdna(call: FlashAttentionCall) -> str | None:
    return refuse(call) or _cdna.refusal(call, access(call))


def short_config(key: Key) -> Config:
    """The configuration of the kernel for short sequences for a key where nothing measured is known."""
    return _short.default(shape_of(key), dict(zip(KEY_FIELDS, key, strict=True))["keys"], _target.arch())


def _refuse_short(call: FlashAttentionCall) -> str | None:
    return refuse(call) or _short.refusal(call, access(call))


def _opt_in(_call: FlashAttentionCall) -> str | None:
    return "runs where a measured row names it"


def _opt_in_hopper(call: FlashAttentionCall) -> str | None:
    return None if call.seqlen_q > FEW_QUERIES and not _group_is_first(call) else _opt_in(call)


def _opt_in_hopper_group(call: FlashAttentionCall) -> str | None:
    return None if call.seqlen_q > FEW_QUERIES and _group_is_first(call) else _opt_in(call)


def _group_is_first(call: FlashAttentionCall) -> bool:
    return call.head_dim <= FEW_COLUMNS and call.head_dim % _hopper_group.COLUMNS == 0


def _bind_hopper(
    call: FlashAttentionCall, config: Config
) -> Callable[[FlashAttentionCall], Tensor | tuple[Tensor, Tensor]]:
    return _hopper.bind(call, config, _portable(call))


def _bind_hopper_group(
    call: FlashAttentionCall, config: Config
) -> Callable[[FlashAttentionCall], Tensor | tuple[Tensor, Tensor]]:
    return _hopper_group.bind(call, config, _portable(call))


def _bind_cdna(
    call: FlashAttentionCall, config: Config
) -> Callable[[FlashAttentionCall], Tensor | tuple[Tensor, Tensor]]:
    return _cdna.bind(call, config, _portable(call))


def _bind_short(call: FlashAttentionCall, config: Config) -> Callable[[FlashAttentionCall], Tensor]:
    return _short.bind(call, config, _portable(call))


def _portable(call: FlashAttentionCall) -> Callable[[FlashAttentionCall], Tensor | tuple[Tensor, Tensor]]:
    return _launch.bind(call, _config.default(shape_of(key_of(call)), _target.arch()))


op.attach_kernel(
    "triton",
    _launch.bind,
    refuse=refuse,
    priority=PRIORITY,
    default_config=default_config,
    # rows that were timed before there was it ran head after head
    optional=("SECTION_MIB",),
)
op.attach_kernel(
    "triton_hopper",
    _bind_hopper,
    refuse=_refuse_hopper,
    opt_in=_opt_in_hopper,
    priority=HOPPER_PRIORITY,
    default_config=hopper_config,
)
op.attach_kernel(
    "triton_hopper_group",
    _bind_hopper_group,
    refuse=_refuse_hopper_group,
    opt_in=_opt_in_hopper_group,
    priority=HOPPER_PRIORITY,
    default_config=hopper_group_config,
)
op.attach_kernel(
    "triton_cdna",
    _bind_cdna,
    refuse=_refuse_cdna,
    opt_in=_opt_in,
    priority=PRIORITY,
    default_config=cdna_config,
)
op.attach_kernel(
    "triton_short",
    _bind_short,
    refuse=_refuse_short,
    opt_in=_opt_in,
    priority=PRIORITY,
    default_config=short_config,
)
