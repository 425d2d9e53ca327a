"""The launches of the kernel for sm_90 of block scales (`kernel_hopper_blocks.py`), and which calls it refuses."""

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
from wavecrest.ops._gemm.call import GATED, SCALE_BLOCK, GemmCall, kinds
from wavecrest.ops._gemm.kernel_hopper_blocks import _hopper_blocks_kernel
from wavecrest.ops.common.activation import NONE

NAME = "triton_hopper_blocks"
WALKS = "copies tiles along K, every other stride a multiple of 16 bytes and not 0"
# rows of a group of warps
ROWS = 64


def refusal(call: GemmCall) -> str | None:
    """The reason why the kernel cannot run a call that the kernels over tiles take."""
    reason = _hopper.refusal(in_graphs=True)
    if reason is not None:
        return reason
    if kinds(call) != ("block", "block"):
        return "is for scales of blocks of a and of b"
    if {call.a.dtype, call.b.dtype} != {torch.float8_e4m3fn}:
        return "multiplies float8_e4m3fn"
    if call.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return "returns bfloat16, float16 and float32"
    for name, asked in (
        ("bias of a row", call.bias is not None and call.bias_along != "n"),
        ("residual", call.residual is not None),
        ("alpha", call.alpha != 1.0),
    ):
        if asked:
            return f"takes no {name}"
    if call.activation in GATED and call.N % SCALE_BLOCK != 0:
        return f"takes gate and up of whole blocks of {SCALE_BLOCK} columns"
    return None if _walks(call) else WALKS


def _walks(call: GemmCall) -> bool:
    """True if descriptors can stand for a, b and the result, except for their addresses."""
    return _launch.has_descriptors(call) and _launch.orders(call) == (1, 1) and call.N * call.dtype.itemsize % 16 == 0


def parts(call: GemmCall, config: Config) -> tuple[int, ...] | None:
    """The shape of the sums of parts of K; None where K is not divided."""
    return None if config["SPLIT_K"] == 1 else (config["SPLIT_K"], 1, call.M, call.columns)


def launch(call: GemmCall, y: Tensor, config: Config, arch: Arch | None) -> _launcher.Launch:
    """The kernel for a checked call that `refusal` says nothing against. `y`: the result, or sums of parts of K.

    Raises:
        InvalidArgument: there is no such tile.
    """
    groups, halves, split = config["GROUPS"], config["HALVES"], config["SPLIT_K"]
    gated = call.activation in GATED
    for name, found, known in (
        ("GROUPS", groups, (1, 2)),
        ("HALVES", halves, (2,) if gated else (1, 2)),
        ("BLOCK_N", config["BLOCK_N"], (32, 64, 128)),
    ):
        if found not in known:
            raise InvalidArgument(f"gemm: {name} is {' or '.join(map(str, known))} here, not {found}")
    if split < 1 or config["STAGES"] < 1:
        raise InvalidArgument(f"gemm: there is no SPLIT_K of {split} with {config['STAGES']} STAGES")
    columns = config["BLOCK_N"] * (1 if gated else halves)
    tiles_m, tiles_n = _layout.ceil_div(call.M, groups * ROWS), _layout.ceil_div(call.N, columns)
    blocks = _layout.ceil_div(call.K, SCALE_BLOCK)
    (sam, sak, sbn, sbk, bias_stride, *_, slope), epilogue = _launch.epilogue_of(call)
    bias, _, scale_a, scale_b, *_ = _launch.other_tensors(call)
    ends = {name: epilogue[name] for name in ("BIAS", "ACTIVATION", "GATED")}
    if split > 1:
        # what follows the sums is done where the parts are added
        bias_stride, ends = 0, ends | {"BIAS": 0, "ACTIVATION": int(NONE)}
    units = 132 if arch is None else arch.compute_units
    return _launcher.Launch(
        _hopper_blocks_kernel,
        (min(tiles_m * tiles_n * split, units),),
        (
            *_tile_arguments(call, y, config), scale_a, scale_b, bias, call.M, call.N, tiles_m, tiles_n,
            _layout.ceil_div(blocks, split), blocks, sam, sak, sbn, sbk, bias_stride, slope,
        ),
        ends | {"FLOATS": y.dtype == torch.float32, "UNIT": sak == sbk == 1},
        config,
    )  # fmt: skip


def _tile_arguments(call: GemmCall, y: Tensor, config: Config) -> tuple[Any, ...]:
    """Tensor descriptors of a as one matrix of rows, of b's transpose and of the result; float32 as it is."""
    n = config["BLOCK_N"]
    rows = call.a.as_strided((call.M, call.K), (_launch.row_stride(call), 1))
    return (
        _triton.tile_descriptor(rows, [config["GROUPS"] * ROWS, SCALE_BLOCK]),
        _triton.tile_descriptor(call.b.mT, [n, SCALE_BLOCK]),
        y if y.dtype == torch.float32 else _triton.tile_descriptor(y.view(call.M, call.N), [ROWS, n]),
    )


def launches(call: GemmCall, y: Tensor, sums: Tensor, config: Config, arch: Arch | None) -> list[_launcher.Launch]:
    """The launches of a call: the GEMM; where K is divided the one that adds the parts, `sums`, too."""
    if parts(call, config) is None:
        return [launch(call, y, config, arch)]
    return [launch(call, sums, config, arch), _launch.sum_parts(call, y, sums, config["SPLIT_K"], arch)]


def bind(call: GemmCall, config: Config, portable: Callable[[GemmCall], Tensor]) -> Callable[[GemmCall], Tensor]:
    """The function for all calls with the signature of this one.

    `portable`: the other kernel's, for calls whose tensors do not begin at multiples of 16 bytes or have a stride of 0,
    which descriptors do not take.
    """
    if math.prod(call.shape) == 0:
        return portable
    if not _walks(call):
        _launcher.replaced("gemm", WALKS, NAME)
        return portable
    arch, shape, dtype, device = _target.arch(), call.shape, call.dtype, call.a.device
    parts_shape = parts(call, config)
    descriptors = 2 if parts_shape is not None or dtype == torch.float32 else 3
    start: Callable[..., None] | None = None
    add: Callable[..., None] | None = None

    def run(call: GemmCall) -> Tensor:
        nonlocal start, add
        a, b = call.a, call.b
        addresses = a.data_ptr() | b.data_ptr()
        if addresses % 16 != 0 and not _launcher.aligned("gemm", addresses, NAME):
            return portable(call)
        y = torch.empty(shape, dtype=dtype, device=device)
        sums = y if parts_shape is None else torch.empty(parts_shape, dtype=torch.float32, device=device)
        bias, residual, scale_a, scale_b, _, out_scale = _launch.other_tensors(call)
        if start is None:
            first, *second = launches(call, y, sums, config, arch)
            start = _launcher.starter(first, device, num_descriptors=descriptors)
            add = _launcher.starter(second[0], device) if second else None
        start(a, b, sums, scale_a, scale_b, bias)
        if add is not None:
            add(sums, y, bias, residual, scale_a, scale_b, out_scale)
        return y

    return run
