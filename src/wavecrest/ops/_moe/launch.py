"""The launches of a mixture of experts: sorting the pairs, two grouped GEMMs, the sum over a token's experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.pdl as _pdl
import wavecrest.ops.common.target as _target
import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops._moe.call import SWIGLUOAI, UNIT, MoeCall, halves, rows_of, scale_kind
from wavecrest.ops._moe.config import most_blocks
from wavecrest.ops._moe.kernel import (
    _moe_align_kernel,
    _moe_combine_kernel,
    _moe_down_kernel,
    _moe_gate_up_kernel,
)
from wavecrest.ops._moe.key import order_of
from wavecrest.ops.common.activation import ACTIVATIONS

# the contiguous dimension, by the kernels' number for it
ORDERS = {"any": 0, "columns": 1, "rows": 2}
KERNEL_ACTIVATIONS = ACTIVATIONS | {SWIGLUOAI: 16}
# what shares a scale, by the kernels' number for it
SCALES = {"none": 0, "expert": 1, "row": 1, "block": 2, "group": 3, "e8m0": 4}
# pairs that the sort looks at in one step, and columns of a program of the sum
SORTED_PAIRS, SUMMED_COLUMNS = 1024, 512
# offsets from here on need more than 32 bits; leaves room for what a tile is larger than its matrix
FAR = (1 << 31) - (1 << 24)


class Buffers(NamedTuple):
    """Memory that the launches of one call write; an input stands in where a call does not need one.

    Attributes:
        pairs, experts: int32, the pairs of each block and the expert of each block.
        h: [pairs, intermediate], act(gate) · up.
        parts: [pairs, hidden], the weighted row of each pair.
        y: the result.
    """

    pairs: Tensor
    experts: Tensor
    h: Tensor
    parts: Tensor
    y: Tensor


class Plan(NamedTuple):
    """The launches of a call, in their order; `align` is None where each pair is a block of its own."""

    align: _launcher.Launch | None
    gate_up: _launcher.Launch
    down: _launcher.Launch
    combine: _launcher.Launch

    @property
    def launches(self) -> list[_launcher.Launch]:
        """The launches that the call needs."""
        return [one for one in self if one is not None]


class Walk(NamedTuple):
    """How a matrix [..., N, K] is read: its strides in units of `align`, except for the one that is 1 (here 0)."""

    order: int
    align: int
    outer: int
    n: int
    k: int
    up: int
    wide: bool


def _walk(matrix: Tensor, up: int = 0) -> Walk:
    """`up`: elements from one part of the matrix to another that is read with it."""
    strides = [stride if size > 1 else 0 for size, stride in zip(matrix.shape, matrix.stride(), strict=True)]
    size_n, size_k = matrix.shape[-2:]
    wide = (size_n - 1) * strides[-2] + (size_k - 1) * strides[-1] >= FAR
    order = ORDERS[order_of(matrix)]
    if order > 0:
        strides[-1 if order == 1 else -2] = 0
    align = _layout.alignment(0, (*strides, up))
    outer = strides[0] if matrix.ndim == 3 else 0
    return Walk(order, align, outer // align, strides[-2] // align, strides[-1] // align, up // align, wide)


def _blocks(call: MoeCall, config: Config) -> int:
    return call.num_pairs if config["DIRECT"] else most_blocks(call.num_pairs, call.experts, config["BLOCK_M"])


def allocator(call: MoeCall, config: Config, device: torch.device) -> Callable[[MoeCall], Buffers]:
    """The function that allocates the buffers of calls with the signature of this one."""
    blocks, direct, dtype = _blocks(call, config), config["DIRECT"], call.x.dtype
    sorted_shape, h_shape = (blocks * config["BLOCK_M"],), (call.num_pairs, call.intermediate)
    parts_shape, shape = (call.num_pairs, call.hidden), (call.num_tokens, call.hidden)

    def allocate(call: MoeCall) -> Buffers:
        pairs = experts = call.topk_ids
        if not direct:
            pairs = torch.empty(sorted_shape, dtype=torch.int32, device=device)
            experts = torch.empty((blocks,), dtype=torch.int32, device=device)
        h = torch.empty(h_shape, dtype=dtype, device=device)
        parts = torch.empty(parts_shape, dtype=dtype, device=device)
        return Buffers(pairs, experts, h, parts, torch.empty(shape, dtype=dtype, device=device))

    return allocate


def _tile(config: Config, n: int, k: int) -> Config:
    """The configuration of one of the GEMMs."""
    own = {name: value for name, value in config.kwargs.items() if name not in ("DOWN_N", "DOWN_K")}
    return Config(**(own | {"BLOCK_N": n, "BLOCK_K": k}))


def _after(config: Config, overlaps: bool) -> Config:
    """A launch that with programmatic dependent launch starts while the one before it runs."""
    return Config(**config.kwargs, **({"launch_pdl": 1} if overlaps else {}))


def plan(call: MoeCall, config: Config, arch: Arch | None) -> Plan:
    """The launches of a call that has tokens, over buffers without memory."""
    device = call.x.device if torch.compiler.is_compiling() else torch.device("meta")
    buffers = allocator(call, config, device)(call)
    overlaps, xcds = _pdl.overlaps(arch), 1 if arch is None else arch.xcds
    blocks, direct, block_m = _blocks(call, config), config["DIRECT"], config["BLOCK_M"]
    ids, ids_strides = call.topk_ids, call.topk_ids.stride()
    sizes = (call.num_pairs, call.k, call.experts)
    foreign = call.w1.dtype == torch.float8_e4m3fn and not _has_e4m3fn(arch)
    constants: dict[str, Any] = {
        "XCDS": xcds, "PDL": overlaps, "FOREIGN": foreign,
        "PTX": arch is not None and arch.vendor == "nvidia" and not _triton.interpreted,
    }  # fmt: skip
    align = None
    if not direct:
        align = _launcher.Launch(
            _moe_align_kernel,
            (call.experts + 1,),
            (ids, buffers.pairs, buffers.experts, *sizes, blocks, *ids_strides),
            {
                "PDL": overlaps, "BLOCK_M": block_m, "BLOCK_E": _layout.power_of_two(call.experts + 1),
                "BLOCK_P": SORTED_PAIRS,
            },
            Config(num_warps=4),
        )  # fmt: skip
    x, w2 = _walk(call.x), _walk(call.w2)
    w1 = _walk(call.w1, 0 if call.interleaved else _to_up(call.w1, False))
    h_wide = call.num_pairs * call.intermediate >= FAR
    tiles_n = _layout.ceil_div(call.intermediate, config["BLOCK_N"])
    n_align, k_align = _layout.alignment(call.intermediate), _layout.alignment(call.hidden)
    b1, b2 = call.b1, call.b2
    b1_strides = (0, 0, 0) if b1 is None else (_to_up(b1, call.interleaved), *halves(b1, call.interleaved)[0].stride())
    s1, s2 = call.w1_scale, call.w2_scale
    s1_strides: tuple[int, ...] = (0, 0, 0)
    s2_strides: tuple[int, ...] = (0, 0)
    s1_k = s2_k = 0
    if s1 is not None and s1.ndim == 3:
        # by w1's own rows, in the order that they lie in
        s1_strides, s1_k = (0, *s1.stride()[:2]), s1.stride(2)
    elif s1 is not None:
        by_row = rows_of(s1, 2 * call.intermediate)
        s1_strides = (_to_up(by_row, call.interleaved), *halves(by_row, call.interleaved)[0].stride())
    if s2 is not None and s2.ndim == 3:
        s2_strides, s2_k = s2.stride()[:2], s2.stride(2)
    elif s2 is not None:
        s2_strides = rows_of(s2, call.hidden).stride()
    z1, z2 = call.w1_zero, call.w2_zero
    gate_up = _launcher.Launch(
        _moe_gate_up_kernel,
        (blocks * tiles_n,),
        (
            call.x, call.w1, call.x if s1 is None else s1, call.x if z1 is None else z1, call.x if b1 is None else b1,
            buffers.h, ids, buffers.pairs, buffers.experts, *sizes, blocks, tiles_n, call.intermediate // n_align,
            call.hidden // k_align, w1.up, b1_strides[0], s1_strides[0], float(call.alpha), float(call.limit),
            x.n, x.k, w1.outer, w1.n, w1.k, *b1_strides[1:], *s1_strides[1:], *ids_strides, s1_k,
            *((0, 0, 0) if z1 is None else z1.stride()),
        ),
        {
            **constants, **_scales(call, False, config["BLOCK_K"]), "BIAS": b1 is not None,
            "ACTIVATION": KERNEL_ACTIVATIONS[call.activation],
            "INTERLEAVED": call.interleaved, "X_ORDER": x.order, "W_ORDER": w1.order, "X_ALIGN": x.align,
            "W_ALIGN": w1.align, "N_ALIGN": n_align, "K_ALIGN": k_align,
            "EVEN_N": call.intermediate % config["BLOCK_N"] == 0,
            "EVEN_K": call.hidden % config["BLOCK_K"] == 0, "WIDE": x.wide or w1.wide,
        },
        _after(_tile(config, config["BLOCK_N"], config["BLOCK_K"]), overlaps and not direct),
    )  # fmt: skip
    down_n, down_k = config["DOWN_N"], config["DOWN_K"]
    down_tiles = _layout.ceil_div(call.hidden, down_n)
    down = _launcher.Launch(
        _moe_down_kernel,
        (blocks * down_tiles,),
        (
            buffers.h, call.w2, buffers.h if s2 is None else s2, buffers.h if z2 is None else z2,
            buffers.h if b2 is None else b2, call.topk_weights, buffers.parts, ids, buffers.pairs, buffers.experts,
            *sizes, blocks, down_tiles, call.hidden // k_align, call.intermediate // n_align, w2.outer, w2.n, w2.k,
            *((0, 0) if b2 is None else b2.stride()), *s2_strides, *ids_strides, *call.topk_weights.stride(), s2_k,
            *((0, 0, 0) if z2 is None else z2.stride()),
        ),
        {
            **constants, **_scales(call, True, config["DOWN_K"]), "BIAS": b2 is not None, "W_ORDER": w2.order,
            "W_ALIGN": w2.align, "N_ALIGN": k_align,
            "K_ALIGN": n_align, "EVEN_N": call.hidden % down_n == 0, "EVEN_K": call.intermediate % down_k == 0,
            "WIDE": w2.wide or h_wide,
        },
        _after(_tile(config, down_n, down_k), overlaps),
    )  # fmt: skip
    return Plan(align, gate_up, down, _combine(call, buffers, overlaps, arch))


def _scales(call: MoeCall, second: bool, block_k: int) -> dict[str, Any]:
    """The constants for the scales and zero points of w1, or of w2.

    Raises:
        InvalidArgument: a step of the configuration has columns of several scales, or no whole units of 4-bit values.
    """
    kind, columns = scale_kind(call, second)
    sums = kind == "e8m0" and call.x.dtype == torch.float16
    most = {"block": columns, "group": max(UNIT, columns), "e8m0": UNIT if sums else block_k}.get(kind, block_k)
    if block_k > most or (call.in_4_bits and block_k % UNIT != 0):
        raise InvalidArgument(
            f"moe: a {'DOWN_K' if second else 'BLOCK_K'} of {block_k} does not fit weights of {call.w1.dtype} with "
            f"scales of {columns} columns"
        )
    return {"SCALES": SCALES[kind] + sums, "HAS_ZERO": call.w1_zero is not None, "GROUP": max(1, columns)}


def _has_e4m3fn(arch: Arch | None) -> bool:
    """True where an instruction that triton 3.6 makes takes e4m3fn."""
    return arch is not None and (arch.vendor == "nvidia" or arch.name == "gfx950")


def _to_up(rows: Tensor, interleaved: bool) -> int:
    """Elements from the first row of gate to the first of up, dimension 1 of w1 or b1."""
    return rows.stride(1) if interleaved else rows.shape[1] // 2 * rows.stride(1)


def _combine(call: MoeCall, buffers: Buffers, overlaps: bool, arch: Arch | None) -> _launcher.Launch:
    block_n = min(SUMMED_COLUMNS, _layout.power_of_two(call.hidden))
    tiles_n, align = _layout.ceil_div(call.hidden, block_n), _layout.alignment(call.hidden)
    # 8 columns a lane: an access of 16 bytes of a 16-bit type
    warps = max(1, block_n // (8 * (32 if arch is None else arch.wave_size)))
    return _launcher.Launch(
        _moe_combine_kernel,
        (call.num_tokens * tiles_n,),
        (
            buffers.parts, call.topk_ids, buffers.y, call.k, call.experts, tiles_n,
            call.hidden // align, *call.topk_ids.stride(),
        ),
        {"N_ALIGN": align, "EVEN_N": call.hidden % block_n == 0, "PDL": overlaps, "BLOCK_N": block_n},
        _after(Config(num_warps=warps), overlaps),
    )  # fmt: skip


def bind(call: MoeCall, config: Config) -> Callable[[MoeCall], Tensor]:
    """The function that launches the kernels for calls with the signature of this one."""
    device, dtype, shape = call.x.device, call.x.dtype, (call.num_tokens, call.hidden)
    if call.num_tokens == 0:
        return lambda _call: torch.empty(shape, dtype=dtype, device=device)
    made = plan(call, config, _target.arch())
    align = None if made.align is None else _launcher.starter(made.align, device)
    gate_up, down, combine = (_launcher.starter(one, device) for one in (made.gate_up, made.down, made.combine))
    allocate = allocator(call, config, device)

    def run(call: MoeCall) -> Tensor:
        pairs, experts, h, parts, y = allocate(call)
        x, w1, w2, weights, ids, b1, b2 = call[:7]
        s1, s2, z1, z2 = call.w1_scale, call.w2_scale, call.w1_zero, call.w2_zero
        if align is not None:
            align(ids, pairs, experts)
        # an input stands in for what the call does not have
        first = (x if s1 is None else s1, x if z1 is None else z1, x if b1 is None else b1)
        second = (h if s2 is None else s2, h if z2 is None else z2, h if b2 is None else b2)
        gate_up(x, w1, *first, h, ids, pairs, experts)
        down(h, w2, *second, weights, parts, ids, pairs, experts)
        combine(parts, ids, y)
        return y

    return run


def launches(call: MoeCall, config: Config, arch: Arch | None) -> list[_launcher.Launch]:
    """The launches of a call, in order, over buffers without memory."""
    return plan(call, config, arch).launches if call.num_tokens > 0 else []
