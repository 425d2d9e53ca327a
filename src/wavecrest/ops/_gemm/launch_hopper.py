"""The launches of the kernels for sm_90 (`kernel_hopper.py`, `kernel_hopper_epilogue.py`), and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops._gemm.launch as _launch
import wavecrest.ops.common.hopper as _hopper
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.target as _target
import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops._gemm.call import GATED, GemmCall, kinds
from wavecrest.ops._gemm.kernel_hopper import _hopper_gemm_kernel
from wavecrest.ops._gemm.kernel_hopper_epilogue import _hopper_epilogue_kernel

DESCRIPTORS, EPILOGUE_DESCRIPTORS = 3, 4
WALKS = "copies tiles along K, every other stride a multiple of 16 bytes and not 0"
# groups that multiply, each with separate rows
GROUPS = 2
# columns that the group which ends tiles stores at once
STORED = 64


def refusal(call: GemmCall) -> str | None:
    """The reason why the kernel cannot run a call that the kernels over tiles take."""
    return refusal_of_epilogue(call) or ("takes no residual" if call.residual is not None else None)


def refusal_of_epilogue(call: GemmCall) -> str | None:
    """As `refusal`, of the kernel whose epilogue has warps of its own."""
    reason = _hopper.refusal(in_graphs=True)
    if reason is not None:
        return reason
    if call.a.dtype not in (torch.float16, torch.bfloat16) or {call.b.dtype, call.dtype} != {call.a.dtype}:
        return "takes float16 and bfloat16, and returns the same"
    for name, asked in (
        ("bias of a row", call.bias is not None and call.bias_along != "n"),
        ("scales or norm", kinds(call) != ("none", "none")),
    ):
        if asked:
            return f"takes no {name}"
    return None if _walks(call) else WALKS


def _unlike(call: GemmCall) -> str | None:
    """Why a descriptor cannot stand for the residual; None where it can, or has nothing to stand for."""
    r = call.residual
    if r is None or (r.dtype == call.dtype and r.is_contiguous()):
        return None
    return "copies tiles of a contiguous residual of the result's dtype"


def _walks(call: GemmCall) -> bool:
    """True if descriptors can stand for a, b and the result, except for their addresses."""
    return _launch.has_descriptors(call) and _launch.orders(call) == (1, 1) and call.N * call.a.itemsize % 16 == 0


def launch(call: GemmCall, y: Tensor, config: Config, arch: Arch | None) -> _launcher.Launch:
    """The kernel for a checked call that `refusal` says nothing against and that has a result.

    Raises:
        InvalidArgument: the second group would stay behind by more steps than there are stages, and wait for ever.
    """
    if not 0 <= config["BEHIND"] < config["STAGES"]:
        raise InvalidArgument(f"gemm: BEHIND is below STAGES, {config['STAGES']}, and not {config['BEHIND']}")
    return _launch_of(_hopper_gemm_kernel, call, _descriptors(call, y, config, config["BLOCK_N"]), config, arch)


def launch_epilogue(call: GemmCall, y: Tensor, config: Config, arch: Arch | None) -> _launcher.Launch:
    """As `launch`, of the kernel whose epilogue has warps of its own."""
    operands = _descriptors(call, y, config, STORED)
    residual = operands[-1]
    if call.residual is not None:
        rows = call.residual.view(call.M, call.N)
        residual = _triton.tile_descriptor(rows, [config["BLOCK_M"] // GROUPS, STORED])
    made = _launch_of(_hopper_epilogue_kernel, call, (*operands, residual), config, arch)
    return made._replace(constants={**made.constants, "RESIDUAL": call.residual is not None})


def _launch_of(
    kernel: Any, call: GemmCall, operands: tuple[Any, ...], config: Config, arch: Arch | None
) -> _launcher.Launch:
    # a tile has two halves of columns of b
    columns = config["BLOCK_N"] * (1 if call.activation in GATED else 2)
    tiles_m, tiles_n = _layout.ceil_div(call.M, config["BLOCK_M"]), _layout.ceil_div(call.N, columns)
    (_, _, _, _, bias_stride, *_, alpha, slope), epilogue = _launch.epilogue_of(call)
    bias, *_ = _launch.other_tensors(call)
    units = 132 if arch is None else arch.compute_units
    return _launcher.Launch(
        kernel,
        (min(tiles_m * tiles_n, units),),
        (
            *operands, bias, call.N, tiles_m, tiles_n,
            _layout.ceil_div(call.K, config["BLOCK_K"]),
            bias_stride, alpha, slope,
        ),
        {name: epilogue[name] for name in ("BIAS", "ACTIVATION", "GATED")},
        config,
    )  # fmt: skip


def _descriptors(call: GemmCall, y: Tensor, config: Config, stored: int) -> tuple[Any, ...]:
    """Tensor descriptors of a as one matrix of rows, of b's transpose and of the result, `stored` columns a block."""
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    rows = call.a.as_strided((call.M, call.K), (_launch.row_stride(call), 1))
    return (
        _triton.tile_descriptor(rows, [m, k]),
        _triton.tile_descriptor(call.b.mT, [n, k]),
        _triton.tile_descriptor(y.view(call.M, call.N), [m // GROUPS, stored]),
    )


def bind(
    call: GemmCall,
    config: Config,
    portable: Callable[[GemmCall], Tensor],
    epilogue: str = "",
) -> Callable[[GemmCall], Tensor]:
    """The function for all calls with the signature of this one.

    `epilogue`: the name of the backend whose epilogue has warps of its own, "" for the other one.

    `portable`: the other kernel's, for calls whose tensors do not begin at multiples of 16 bytes or have a stride of 0,
    which descriptors do not take.
    """
    if math.prod(call.shape) == 0:
        return portable
    backend = epilogue or "triton_hopper"
    reason = _unlike(call) if _walks(call) else WALKS
    if reason is not None:
        _launcher.replaced("gemm", reason, backend)
        return portable
    arch, shape, dtype, device = _target.arch(), call.shape, call.dtype, call.a.device
    start: Callable[..., None] | None = None

    def run(call: GemmCall) -> Tensor:
        nonlocal start
        a, b = call.a, call.b
        residual = call.residual
        addresses = a.data_ptr() | b.data_ptr()
        if residual is not None:
            addresses |= residual.data_ptr()
        if addresses % 16 != 0 and not _launcher.aligned("gemm", addresses, backend):
            return portable(call)
        y = torch.empty(shape, dtype=dtype, device=device)
        if start is None:
            made = (launch_epilogue if epilogue else launch)(call, y, config, arch)
            number = EPILOGUE_DESCRIPTORS if epilogue else DESCRIPTORS
            start = _launcher.starter(made, device, num_descriptors=number)
        bias = a if call.bias is None else call.bias
        if epilogue:
            start(a, b, y, y if residual is None else residual, bias)
        else:
            start(a, b, y, bias)
        return y

    return run
