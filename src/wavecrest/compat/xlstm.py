"""The names of the AMD guide for xLSTM, over detection and dispatch of this package."""

from __future__ import annotations

import contextlib

import torch

from wavecrest import env, hardware, ops
from wavecrest.dispatch.decision import Decision
from wavecrest.errors import InvalidArgument
from wavecrest.models.xlstm.kernels import AUTO
from wavecrest.ops.common import elsewhere

__all__ = [
    "enable_amd_optimizations",
    "get_optimal_kernel_config",
    "is_amd_gpu",
    "is_mi300x",
    "kernel_decision",
    "should_use_amd_optimized_kernel",
]

# the guide's head dimension is that of the values, which is twice that of queries and keys; its model has 32 heads
HEAD_DIM, HEADS = 128, 32
# variables that change speed on AMD and no result: `env_table.toml` has the source
VARIABLES = {"HSA_NO_SCRATCH_RECLAIM": "1"}


def is_amd_gpu() -> bool:
    """True if the current device is an AMD GPU, by `torch.version.hip` and gcnArchName alone."""
    return hardware.detect().vendor == "amd"


def is_mi300x() -> bool:
    """True if the current device is a whole gfx942 GPU of 304 compute units: MI300X, and MI325X, which has its dies."""
    found, part = hardware.detect(), hardware.ARCHS["gfx942"]
    return found.arch == part.name and found.compute_units == part.compute_units


def enable_amd_optimizations() -> dict[str, str]:
    """Set variables of this process that change speed on an AMD GPU and no result, where they are not set.

    The HIP runtime reads them when PyTorch first uses the GPU: call this before. Kernels need no switch, as each call
    is dispatched; what else may gain on a machine `wavecrest optimize` tries and measures.

    Returns:
        The variables that this call has set; none on another device, or once the GPU is in use.
    """
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if torch.version.hip is None or not torch.cuda.is_available() or in_use:
        return {}
    made = {name: value for name, value in VARIABLES.items() if not env.get(name)}
    for name, value in made.items():
        env.set_value(name, value)
    return made


def kernel_decision(batch_size: int, seq_len: int, head_dim: int | None = None, *, arch: str | None = None) -> Decision:
    """The dispatcher's decision for `mlstm_chunkwise` in bfloat16: backend, source, reason and refusals.

    Args:
        batch_size, seq_len: of the prompt.
        head_dim: of the values, twice that of queries and keys; None: 128.
        arch: decide for this architecture, such as "gfx942", which need not be here; None: the current device.

    Raises:
        InvalidArgument: a size is not a whole number of at least 1, head_dim is odd, or the architecture is unknown.
    """
    dv = HEAD_DIM if head_dim is None else head_dim
    for name, value in (("batch_size", batch_size), ("seq_len", seq_len), ("head_dim", dv)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidArgument(f"kernel_decision: {name} must be a whole number of at least 1, got {value!r}")
    if dv % 2 != 0:
        raise InvalidArgument(f"kernel_decision: head_dim must be even, twice that of queries and keys, got {dv}")
    if arch is not None and arch not in hardware.ARCHS:
        raise InvalidArgument(f"kernel_decision: arch takes {', '.join(hardware.ARCHS)}, not {arch!r}")
    target = hardware.detect().known if arch is None else hardware.ARCHS[arch]
    op = ops.get("mlstm_chunkwise")
    call = op.study.inputs(batch_size, HEADS, seq_len, dv // 2, torch.bfloat16, "meta")
    where = contextlib.nullcontext() if target is None else elsewhere.assumed(target)
    call = elsewhere.claimed(call, "cpu" if target is None else "cuda:0")
    with torch.no_grad(), where:
        op.check(call)
        return op.decide_as(op.key(call), call)


def should_use_amd_optimized_kernel(
    batch_size: int, seq_len: int, head_dim: int | None = None, *, arch: str | None = None
) -> bool:
    """True if dispatch runs wavecrest's kernel, False for the native one (PyTorch); see `kernel_decision`."""
    return kernel_decision(batch_size, seq_len, head_dim, arch=arch).own_kernel


def get_optimal_kernel_config(
    batch_size: int, seq_len: int, head_dim: int | None = None, *, arch: str | None = None
) -> dict[str, str]:
    """The kernels that dispatch runs for these sizes, as arguments of `xLSTMLargeConfig`; see `kernel_decision`.

    Sequence and step kernels stay with the dispatcher: there is no published choice for them. A model of the default
    configuration chooses at each call, and needs none of this.
    """
    own = should_use_amd_optimized_kernel(batch_size, seq_len, head_dim, arch=arch)
    return {
        "chunkwise_kernel": "chunkwise--triton_xl_chunk" if own else "chunkwise--native_autograd",
        "sequence_kernel": AUTO,
        "step_kernel": AUTO,
    }
