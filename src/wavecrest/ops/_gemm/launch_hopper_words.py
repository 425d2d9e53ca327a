"""The launches for sm_90 of few rows and packed weights, a's digits and the GEMM of those, and their refusals."""

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
import wavecrest.ops.common.pdl as _pdl
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops._gemm.call import GemmCall, kinds
from wavecrest.ops._gemm.kernel_digits import DIGITS as _DIGITS
from wavecrest.ops._gemm.kernel_digits import _digits_kernel
from wavecrest.ops._gemm.kernel_hopper_row import _hopper_row_kernel
from wavecrest.ops._gemm.kernel_hopper_words import _hopper_words_kernel

NAME = "triton_hopper_words"
WALKS = "reads a, b and scales along K, where rows of a and b are at multiples of 16 bytes and not at a stride of 0"
# rows of a, and columns of K of a step of a warp, of which 4-bit values have one scale
ROWS, BLOCK = 8, 128
# the longest row: a program of `_digits_kernel` holds one
MOST_K = 65_536
# the longest whose digits a program has in shared memory
LONGEST = 32_768
# digits of a number, bytes of what they are worth, and columns that the matrix unit multiplies at a time
DIGITS, WORTH, COLUMNS = int(_DIGITS), 4, 8


def refusal(call: GemmCall) -> str | None:
    """The reason why the kernel cannot run a call that the kernels over tiles take."""
    reason = _hopper.refusal(in_graphs=True)
    if reason is not None:
        return reason
    if call.M > ROWS:
        # without the number, as in `launch_gemv.refusal`
        return f"is for up to {ROWS} rows"
    int4 = call.form == "int4" and call.group == BLOCK and call.zero is None
    int8 = call.form == "plain" and call.b.dtype == torch.int8 and kinds(call)[1] == "vector"
    if (
        call.a.dtype not in (torch.bfloat16, torch.float16)
        or not (int4 or int8)
        or kinds(call)[0] not in ("none", "norm")
    ):
        return f"multiplies 16-bit floats by int4 in groups of {BLOCK} without zero points, or int8 with scales of rows"
    if call.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return "returns bfloat16, float16 and float32"
    for name, asked in (
        ("batch", not call.flat),
        ("tail", call.tail is not None),
        ("bias of a row", call.bias is not None and call.bias_along != "n"),
    ):
        if asked:
            return f"takes no {name}"
    if call.K % BLOCK != 0 or call.K > MOST_K:
        return f"takes a K in multiples of {BLOCK}, up to {MOST_K}"
    return None if _walks(call) else WALKS


def _walks(call: GemmCall) -> bool:
    """True if rows are contiguous, as the kernel reads them, except for the addresses where they begin."""
    if _launch.orders(call) != (1, 1) or _launch.leading(call) > 1:
        return False
    if call.form == "int4" and _launch.epilogue_of(call)[0][3] not in (0, 1):
        return False
    strides = (_launch.row_stride(call) * call.a.itemsize, call.b.stride(-1) * call.b.itemsize)
    return all(one > 0 and one % 16 == 0 for one in strides)


def size_of_digits(call: GemmCall) -> int:
    """Bytes of a's digits, and of what they are worth."""
    return DIGITS * call.M * (call.K + WORTH)


def launches(call: GemmCall, digits: Tensor, y: Tensor, config: Config, arch: Arch | None) -> list[_launcher.Launch]:
    """The launches of a checked call that `refusal` says nothing against: its digits, int8, and its result.

    Raises:
        InvalidArgument: there is no such tile.
    """
    for name, known in (("BLOCK_N", (8, 16, 32)), ("num_warps", (4, 8, 16)), ("AHEAD", (1, 2, 4))):
        if config[name] not in known:
            raise InvalidArgument(f"gemm: {name} is {', '.join(map(str, known))} here, not {config[name]}")
    if stays(config):
        return [_staying(call, y, config, arch)]
    if config["BLOCK_N"] == 8:
        raise InvalidArgument("gemm: BLOCK_N is 16 or 32 here without PROGRAMS, not 8")
    (_, _, sbn, _, bias_stride, _, srm, srn, alpha, slope), epilogue = _launch.epilogue_of(call)
    bias, residual, _, scale_b, *_ = _launch.other_tensors(call)
    early, options = _pdl.start_of(config, arch)
    blocks = call.K // BLOCK
    columns = COLUMNS * _layout.power_of_two(_layout.ceil_div(DIGITS * call.M, COLUMNS))
    second = _launcher.Launch(
        _hopper_words_kernel,
        (_layout.ceil_div(call.N, config["BLOCK_N"]),),
        (
            digits, call.b, y, bias, residual, scale_b, call.M, call.N, blocks,
            _layout.ceil_div(blocks, config["AHEAD"] * config["num_warps"]),
            call.b.stride(-1) * call.b.itemsize // 16, sbn, bias_stride, srm, srn, alpha, slope,
        ),
        {
            **{name: epilogue[name] for name in ("BIAS", "ACTIVATION", "GATED", "RESIDUAL")},
            "INT4": call.form == "int4", "COLUMNS": columns, "PDL": _pdl.overlaps(arch), "EARLY": early,
        },
        options,
    )  # fmt: skip
    return [first_launch(call, digits, arch), second]


def stays(config: Config) -> bool:
    """True if a configuration is of `_hopper_row_kernel`: PROGRAMS programs a multiprocessor, which stay."""
    return bool(config.kwargs.get("PROGRAMS"))


def _staying(call: GemmCall, y: Tensor, config: Config, arch: Arch | None) -> _launcher.Launch:
    """The one launch of a call of one row whose programs make its digits.

    Raises:
        InvalidArgument: more rows, or a longer one than shared memory holds.
    """
    if call.M != 1 or call.K > LONGEST:
        raise InvalidArgument(f"gemm: PROGRAMS is for one row of up to {LONGEST:,} columns, not {call.M} of {call.K:,}")
    (_, _, sbn, _, bias_stride, _, _, srn, alpha, slope), epilogue = _launch.epilogue_of(call)
    bias, residual, _, scale_b, *_ = _launch.other_tensors(call)
    early, options = _pdl.start_of(config, arch)
    blocks, int4 = call.K // BLOCK, call.form == "int4"
    # of 4-bit values a line is two blocks
    of_step = (2 if int4 else 1) * config["num_warps"]
    steps, tiles = _layout.ceil_div(blocks, of_step), _layout.ceil_div(call.N, config["BLOCK_N"])
    # no other architecture has it
    assert arch is not None
    return _launcher.Launch(
        _hopper_row_kernel,
        (min(tiles, arch.compute_units * config["PROGRAMS"]),),
        (
            call.a, gain_of(call), call.b, y, bias, residual, scale_b, call.N, blocks, tiles,
            call.b.stride(-1) * call.b.itemsize // 16, sbn, bias_stride, srn, alpha, slope,
        ),
        {
            **{name: epilogue[name] for name in ("BIAS", "ACTIVATION", "GATED", "RESIDUAL")},
            "INT4": int4, "STEPS": steps, "NORMED": call.norm_weight is not None, "NORM_EPS": _launch.norm_eps(call),
            "BLOCK_K": _layout.power_of_two(steps * of_step * BLOCK), "PDL": _pdl.overlaps(arch), "EARLY": early,
        },
        _launch.without(options, "PROGRAMS"),
    )  # fmt: skip


def gain_of(call: GemmCall) -> Tensor:
    """The norm's weight; a itself in its place for a call without a norm."""
    return call.a if call.norm_weight is None else call.norm_weight


def first_launch(call: GemmCall, digits: Tensor, arch: Arch | None) -> _launcher.Launch:
    """The launch that makes the digits of a's rows, normalised first if the call asks for it: a program a row."""
    block = _layout.power_of_two(call.K)
    early, options = _pdl.start_of(Config(num_warps=min(32, max(4, block // 512))), arch, _pdl.EARLY)
    return _launcher.Launch(
        _digits_kernel,
        (call.M,),
        (call.a, gain_of(call), digits, call.K // BLOCK, _launch.row_stride(call) * call.a.itemsize // 16),
        {
            "NORMED": call.norm_weight is not None, "NORM_EPS": _launch.norm_eps(call), "PDL": _pdl.overlaps(arch),
            "EARLY": early, "BLOCK": block,
        },
        options,
    )  # fmt: skip


def bind(call: GemmCall, config: Config, portable: Callable[[GemmCall], Tensor]) -> Callable[[GemmCall], Tensor]:
    """The function for all calls with the signature of this one.

    `portable`: the other kernel's, for calls whose tensors do not begin at multiples of 16 bytes.
    """
    if math.prod(call.shape) == 0 or call.K == 0:
        return portable
    if not _walks(call):
        _launcher.replaced("gemm", WALKS, NAME)
        return portable
    arch, shape, dtype, device = _target.arch(), call.shape, call.dtype, call.a.device
    size = size_of_digits(call)
    staying = stays(config)
    before: Callable[..., Any] | None = None
    start: Callable[..., Any] | None = None

    def run(call: GemmCall) -> Tensor:
        nonlocal before, start
        gain = gain_of(call)
        addresses = call.a.data_ptr() | call.b.data_ptr() | gain.data_ptr()
        if addresses % 16 != 0 and not _launcher.aligned("gemm", addresses, NAME):
            return portable(call)
        y = torch.empty(shape, dtype=dtype, device=device)
        bias, residual, _, scale_b, *_ = _launch.other_tensors(call)
        if staying:
            if start is None:
                (only,) = launches(call, gain, y, config, arch)
                start = _launcher.starter(only, device)
            start(call.a, gain, call.b, y, bias, residual, scale_b)
            return y
        digits = torch.empty(size, dtype=torch.int8, device=device)
        if before is None or start is None:
            first, second = launches(call, digits, y, config, arch)
            before, start = _launcher.starter(first, device), _launcher.starter(second, device)
        before(call.a, gain, digits)
        start(digits, call.b, y, bias, residual, scale_b)
        return y

    return run
