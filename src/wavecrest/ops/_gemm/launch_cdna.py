"""The launch of the kernel for gfx950 (`kernel_cdna.py`), which calls it refuses, and when another one runs instead."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

import wavecrest.ops._gemm.launch as _launch
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.target as _target
import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.decision import PortableKernel
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops._gemm.call import GATED, GemmCall, kinds
from wavecrest.ops._gemm.kernel_cdna import _cdna_kernel

ARCH = "gfx950"
# rows and columns of a tile, and elements of 16 bytes, which K and strides are multiples of
TILE, CHUNK = 256, 8
SIZES = f"makes {TILE} rows and {TILE} columns at least"
WALKS = "copies 16 bytes along K at a time, which strides of rows and columns do not allow"
FAR = "counts bytes of a tile of a and of b in 32 bits, and these rows or columns are further apart"
ALIGNED = "copies from multiples of 16 bytes, where one of the tensors does not begin; a clone of it does"


def refusal(call: GemmCall) -> str | None:
    """The reason why the kernel cannot run a call that the kernels over tiles take."""
    if _triton.no_gluon is not None:
        return _triton.no_gluon
    if torch.compiler.is_compiling():
        return "checks addresses when it is launched, which torch.compile does not trace"
    arch = _target.arch()
    if arch is None or arch.name != ARCH or _triton.interpreted:
        return f"is for {ARCH}: it copies 16 bytes a lane straight to LDS"
    if call.a.dtype not in (torch.float16, torch.bfloat16) or {call.b.dtype, call.dtype} != {call.a.dtype}:
        return "takes float16 and bfloat16, and returns the same"
    if call.activation in GATED:
        return "makes no gated activation"
    for name, asked in (
        ("residual", call.residual is not None),
        ("scales or norm", kinds(call) != ("none", "none")),
        ("batch", not call.flat),
    ):
        if asked:
            return f"takes no {name}"
    return fault(call)


def fault(call: GemmCall) -> str | None:
    """The size or stride that keeps the kernel from a call, in words; None if it can run it."""
    if min(call.M, call.N) < TILE:
        return SIZES
    if (
        call.K == 0
        or _launch.leading(call) != 1
        or _launch.orders(call) != (1, 1)
        or _launch.access_bytes(call) < 2 * CHUNK
    ):
        return WALKS
    widest = max(_launch.row_stride(call), call.b.stride(-1))
    return FAR if (TILE // 2 * widest + call.K) * call.a.itemsize >= 1 << 31 else None


def launch(call: GemmCall, y: Tensor, config: Config, arch: Arch | None) -> _launcher.Launch:
    """The kernel for a checked call that `refusal` says nothing against.

    Raises:
        InvalidArgument: the matrix instruction or the step is not one that the kernel has.
    """
    if config["MATRIX"] not in (16, 32) or config["BLOCK_K"] != 64 or config["num_warps"] != 8:
        raise InvalidArgument(
            f"gemm: triton_cdna has a MATRIX of 16 or 32, a BLOCK_K of 64 and a num_warps of 8, and not {config}"
        )
    tiles_m, tiles_n = _layout.ceil_div(call.M, TILE), _layout.ceil_div(call.N, TILE)
    align_n = _launch.column_unit(call)
    (_, _, _, _, bias_stride, *_, alpha, slope), epilogue = _launch.epilogue_of(call)
    bias, *_ = _launch.other_tensors(call)
    return _launcher.Launch(
        _cdna_kernel,
        (tiles_m * tiles_n,),
        (
            call.a, call.b, y, bias, call.M, call.N // align_n, call.K // CHUNK, tiles_m, tiles_n,
            _launch.row_stride(call) // CHUNK, call.b.stride(-1) // CHUNK, bias_stride, alpha, slope,
        ),
        {
            "EVEN_K": call.K % (2 * config["BLOCK_K"]) == 0,
            "ALIGN_N": align_n,
            "BIAS": epilogue["BIAS"],
            "ACTIVATION": epilogue["ACTIVATION"],
            "XCDS": 1 if arch is None else arch.xcds,
        },
        config,
    )  # fmt: skip


def bind(call: GemmCall, config: Config, portable: Callable[[GemmCall], Tensor]) -> Callable[[GemmCall], Tensor]:
    """The function for all calls with the signature of this one.

    `portable`: the other kernel's, for calls whose sizes, strides or addresses are not for this one, as no key says.
    """
    if math.prod(call.shape) == 0:
        return portable
    if (reason := fault(call)) is not None:
        replaced(reason)
        return portable
    shape, dtype, device = call.shape, call.dtype, call.a.device
    start = _launcher.starter(launch(call, torch.empty(0, dtype=dtype, device=device), config, _target.arch()), device)

    def run(call: GemmCall) -> Tensor:
        a, b = call.a, call.b
        if (a.data_ptr() | b.data_ptr()) % 16 != 0:
            replaced(ALIGNED)
            return portable(call)
        y = torch.empty(shape, dtype=dtype, device=device)
        start(a, b, y, a if call.bias is None else call.bias)
        return y

    return run


@functools.cache
def replaced(reason: str) -> None:
    """Warn that the portable kernel runs a call in place of this one; once of each reason."""
    warnings.warn(
        f"gemm: its portable kernel runs in place of triton_cdna, which {reason}", PortableKernel, stacklevel=2
    )
