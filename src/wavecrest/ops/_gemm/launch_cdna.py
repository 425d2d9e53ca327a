"""The launch of the kernels for gfx950 and gfx942 (`kernel_cdna.py`), what they refuse, and when another one runs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import wavecrest.ops._gemm.launch as _launch
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.target as _target
import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops._gemm.call import GATED, GemmCall, kinds
from wavecrest.ops._gemm.kernel_cdna import _cdna3_kernel, _cdna_kernel

NAME = "triton_cdna"
# 16-bit floats are for gfx950 alone
ARCH = "gfx950"
# rows and columns of a tile, and bytes that K and strides are multiples of
TILE, CHUNK_BYTES = 256, 16
# the types that the matrix unit multiplies, by architecture
FLOAT8 = {
    "gfx942": (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    "gfx950": (torch.float8_e4m3fn, torch.float8_e5m2),
}
ROUNDED = (torch.float16, torch.bfloat16)
SIZES = f"makes {TILE} rows and {TILE} columns at least"
WALKS = "copies 16 bytes along K at a time, which strides of rows and columns do not allow"
FAR = "counts bytes of a tile of a and of b in 32 bits, and these rows or columns are further apart"


def refusal(call: GemmCall) -> str | None:
    """The reason why the kernel cannot run a call that the kernels over tiles take."""
    if _triton.no_gluon is not None:
        return _triton.no_gluon
    if torch.compiler.is_compiling():
        return "checks addresses when it is launched, which torch.compile does not trace"
    arch = _target.arch()
    if arch is None or arch.name not in FLOAT8 or _triton.interpreted:
        return "is for gfx942 and gfx950, whose registers and LDS it counts with"
    if (reason := _refused_types(call, arch)) is not None:
        return reason
    if call.activation in GATED:
        return "makes no gated activation"
    for name, asked in (
        ("residual", call.residual is not None),
        ("packed weight", call.form != "plain"),
        ("norm, and no scales of blocks or groups", not set(kinds(call)) <= {"none", "tensor", "vector"}),
        ("batch", not call.flat),
    ):
        if asked:
            return f"takes no {name}"
    return fault(call)


def _refused_types(call: GemmCall, arch: Arch) -> str | None:
    """The reason why the kernel for an architecture does not take the types of a call."""
    a, b, y = call.a.dtype, call.b.dtype, call.dtype
    float8 = FLOAT8[arch.name]
    if a in float8:
        if b != a or y not in ROUNDED:
            return "multiplies 8-bit floats of one type, and returns float16 or bfloat16"
        return None
    if arch.name != ARCH:
        return f"takes {_words(float8)} on {arch.name}, where registers and LDS are too few for 16-bit operands"
    if a not in ROUNDED or {b, y} != {a}:
        return f"takes float16 and bfloat16, and returns the same, and takes {_words(float8)}"
    return None


def _words(dtypes: tuple[torch.dtype, ...]) -> str:
    return " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def fault(call: GemmCall) -> str | None:
    """The size or stride that keeps the kernel from a call, in words; None if it can run it."""
    if min(call.M, call.N) < TILE:
        return SIZES
    if (
        call.K == 0
        or _launch.leading(call) != 1
        or _launch.orders(call) != (1, 1)
        or _launch.access_bytes(call) < CHUNK_BYTES
    ):
        return WALKS
    widest = max(_launch.row_stride(call), call.b.stride(-1))
    return FAR if (TILE // 2 * widest + call.K) * call.a.itemsize >= 1 << 31 else None


def launch(call: GemmCall, y: Tensor, config: Config, arch: Arch | None) -> _launcher.Launch:
    """The kernel for a checked call that `refusal` says nothing against.

    Raises:
        InvalidArgument: the matrix instruction or the step is not one that the kernel has.
    """
    chunk = CHUNK_BYTES // call.a.itemsize
    narrow = arch is not None and arch.name != ARCH
    step = (4 if narrow else 8) * chunk
    if config["MATRIX"] not in (16, 32) or config["BLOCK_K"] != step or config["num_warps"] != 8:
        raise InvalidArgument(
            f"gemm: triton_cdna has a MATRIX of 16 or 32, a BLOCK_K of {step} and a num_warps of 8, and not {config}"
        )
    tiles_m, tiles_n = _layout.ceil_div(call.M, TILE), _layout.ceil_div(call.N, TILE)
    align_n = _launch.column_unit(call)
    (sam, _, sbn, _, bias_stride, *_, alpha, slope), epilogue = _launch.epilogue_of(call)
    bias, _, scale_a, scale_b, *_ = _launch.other_tensors(call)
    return _launcher.Launch(
        _cdna3_kernel if narrow else _cdna_kernel,
        (tiles_m * tiles_n,),
        (
            call.a, call.b, y, bias, scale_a, scale_b, call.M, call.N // align_n, call.K // chunk, tiles_m, tiles_n,
            _launch.row_stride(call) // chunk, call.b.stride(-1) // chunk, bias_stride, sam, sbn, alpha, slope,
        ),
        {
            "EVEN_K": call.K % (2 * config["BLOCK_K"]) == 0,
            "ALIGN_N": align_n,
            "CHUNK": chunk,
            **{name: epilogue[name] for name in ("SCALE_A", "SCALE_B", "BIAS", "ACTIVATION")},
            "XCDS": 1 if arch is None else arch.xcds,
        },
        config,
        _triton.without_accumulators(),
    )  # fmt: skip


def bind(call: GemmCall, config: Config, portable: Callable[[GemmCall], Tensor]) -> Callable[[GemmCall], Tensor]:
    """The function for all calls with the signature of this one.

    `portable`: the other kernel's, for calls whose sizes, strides or addresses are not for this one, as no key says.
    """
    if math.prod(call.shape) == 0:
        return portable
    if (reason := fault(call)) is not None:
        _launcher.replaced("gemm", reason, NAME)
        return portable
    shape, dtype, device = call.shape, call.dtype, call.a.device
    start = _launcher.starter(launch(call, torch.empty(0, dtype=dtype, device=device), config, _target.arch()), device)

    def run(call: GemmCall) -> Tensor:
        a, b = call.a, call.b
        addresses = a.data_ptr() | b.data_ptr()
        if addresses % 16 != 0 and not _launcher.aligned("gemm", addresses, NAME):
            return portable(call)
        y = torch.empty(shape, dtype=dtype, device=device)
        bias, _, scale_a, scale_b, *_ = _launch.other_tensors(call)
        start(a, b, y, bias, scale_a, scale_b)
        return y

    return run
