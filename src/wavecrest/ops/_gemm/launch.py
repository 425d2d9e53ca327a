"""Launches of the kernels over tiles: indexing of a and b (strides), compile-time options, what runs when."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.pdl as _pdl
import wavecrest.ops.common.quantized as _quantized
import wavecrest.ops.common.target as _target
import wavecrest.ops.common.triton as _triton
from wavecrest.dispatch.keys import name_of
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops._gemm.call import FAST_ACCUM, FLOAT8, GATED, NIBBLES, GemmCall, kinds
from wavecrest.ops._gemm.config import in_one_loop
from wavecrest.ops._gemm.kernel import _join_kernel, _stream_k_kernel, _sum_kernel, _tile_kernel
from wavecrest.ops.common.activation import ACTIVATIONS
from wavecrest.ops.common.triton import tl

FORMS = {"plain": 0, "shuffled": 1, "int4": 2, "mxfp4": 3}
# mxfp4 for an a of float16, which has not all of its values
MXFP4_SUMS = 4
SCALES = {"none": 0, "tensor": 1, "vector": 2, "block": 3, "group": 4, "norm": 5}
# GEMMs in a batch: CUDA has no more programs in the second dimension of a grid
MOST_BATCHES = 65535
# columns of a program of `_sum_kernel`
SUM_COLUMNS = 512
# products of 8-bit floats that sm_90's matrix unit adds in 14 bits before their sum is added in float32; cuBLAS does
# so after as many, and errors are as large as its (one H200, 2026-11-25)
UNIT_SUMS = 128


class Walk(NamedTuple):
    """How the kernels go through a and b.

    Orders: 0 by both strides, 1 contiguous along K, 2 contiguous across it. Strides of the other dimensions come in
    units of `align`. `leading`: see `_layout.Layout`.
    """

    a_order: int
    b_order: int
    align: int
    leading: int
    size1: int
    size2: int
    a_strides: tuple[int, ...]
    b_strides: tuple[int, int, int]


def batch_stride(x: Tensor, batch: tuple[int, ...]) -> int | None:
    """The one stride between the matrices of x [..., R, C] in a batch; None if they have no common stride."""
    view = x.expand(*batch, *x.shape[-2:]) if x.ndim - 2 != len(batch) or x.shape[:-2] != batch else x
    stride, inner = 0, 1
    for size, step in zip(reversed(view.shape[:-2]), reversed(view.stride()[:-2]), strict=True):
        if size == 1:
            continue
        if inner == 1:
            stride = step
        elif step != stride * inner:
            return None
        inner *= size
    return stride


def leading(call: GemmCall) -> int:
    """Dimensions of a's rows that have no common stride; the kernels index at most 3."""
    return _layout.leading(call.a) if call.flat else 1


def _order(along: int, across: int) -> int:
    """0, 1 or 2 as in Walk, by an operand's stride along K and across it."""
    return 1 if along == 1 else 2 if across == 1 else 0


def orders(call: GemmCall) -> tuple[int, int]:
    """The orders of a and b."""
    a_order = _order(call.a.stride(-1), _a_rows(call)[1][0])
    # rows that have several strides, or a shuffled weight's, are contiguous along K or nothing
    if leading(call) > 1 and a_order == 2:
        a_order = 0
    return a_order, _order(call.b.stride(-2), call.b.stride(-1))


def _a_rows(call: GemmCall) -> tuple[int, tuple[int, int, int], int, int]:
    """(leading, strides of a's rows, size1, size2)."""
    a = call.a
    if not call.flat:
        return 1, (a.stride(-2), 0, 0), 1, 1
    layout = _layout.layout(a)
    return layout.leading, layout.strides[0], layout.size1, layout.size2


def row_stride(call: GemmCall) -> int:
    """From row to row of a, whose rows have one stride."""
    return _a_rows(call)[1][0]


def walk(call: GemmCall) -> Walk:
    """The strides of a and b for the kernels, for a checked call that `refuse_strides` does not refuse."""
    a, b = call.a, call.b
    lead, rows, size1, size2 = _a_rows(call)
    a_order, b_order = orders(call)
    a_batch = 0 if call.flat else batch_stride(a, call.batch) or 0
    b_batch = 0 if call.flat else batch_stride(b, call.batch) or 0
    a_along, b_along, b_across = a.stride(-1), b.stride(-2), b.stride(-1)
    # sizes that must be multiples of the unit: K where it is contiguous, and the strides of everything else
    units = [a_batch, *rows] if a_order == 1 else [a_batch, a_along] if a_order == 2 else [1]
    units += [b_batch, b_across] if b_order == 1 else [b_batch, b_along] if b_order == 2 else [1]
    align = _layout.alignment(call.K, (*units, 0, 0))
    a_unit, b_unit = (align if a_order else 1), (align if b_order else 1)
    a_strides = (
        a_batch // a_unit,
        *(stride // a_unit if a_order != 2 else 0 for stride in rows),
        a_along // a_unit if a_order == 2 else a_along,
    )
    b_along, b_across = (b_along // b_unit, b_across) if b_order == 2 else (b_along, b_across // b_unit)
    return Walk(a_order, b_order, align, lead, size1, size2, a_strides, (b_batch // b_unit, b_along, b_across))


def _residual_strides(call: GemmCall) -> tuple[int, int, int] | None:
    """(batch, row, column) strides of the residual; None if its rows have no common stride."""
    r = call.residual
    if r is None:
        return 0, 0, 0
    if not call.flat:
        stride = batch_stride(r, call.batch)
        return None if stride is None else (stride, r.stride(-2), r.stride(-1))
    return (0, _layout.layout(r).strides[0][0], r.stride(-1)) if _layout.leading(r) == 1 else None


def _scale_strides(call: GemmCall) -> tuple[int, int, int, int]:
    """scale_a by row and along K, scale_b (and zero) by column and along K."""
    a_kind, b_kind = kinds(call)
    a, b = call.scale_a, call.scale_b
    sam = sak = sbn = sbk = 0
    if a is not None and a_kind in ("vector", "block"):
        sam = a.stride(0)
        sak = a.stride(1) if a_kind == "block" else 0
    if b is not None and b_kind in ("vector", "block", "group"):
        sbn = b.stride(-1)
        sbk = b.stride(0) if b_kind != "vector" else 0
    return sam, sak, sbn, sbk


def refuse_strides(call: GemmCall) -> str | None:
    """The reason why the kernels cannot take the strides of a call; None if they can."""
    if call.batches > MOST_BATCHES:
        return f"takes up to {MOST_BATCHES} GEMMs in a batch"
    if leading(call) > 3:
        return f"takes up to 3 dimensions of rows without a common stride, not {leading(call)}"
    if not call.flat:
        for name, x in (("a", call.a), ("b", call.b)):
            if batch_stride(x, call.batch) is None:
                return f"takes one stride from matrix to matrix, which {name} does not have"
    if _residual_strides(call) is None:
        return "takes one stride from row to row of the residual, which it does not have"
    if call.norm_weight is not None and call.K > 1 and call.norm_weight.stride(0) != 1:
        return "takes a norm_weight that is contiguous"
    return None


def access_bytes(call: GemmCall) -> int:
    """Bytes that one access to a and to b may have, up to 16, as far as sizes and strides say."""
    how = walk(call)
    unit = min(how.align, _layout.alignment(call.M, (0, 0, 0)) if how.a_order == 2 else 16)
    unit = min(unit, _layout.alignment(call.columns, (0, 0, 0)) if how.b_order == 2 else 16)
    return min(16, unit * min(call.a.itemsize, call.b.itemsize))


def has_descriptors(call: GemmCall) -> bool:
    """True if tensor descriptors can stand for a and b, except for their addresses, which are checked on each call."""
    return (
        access_bytes(call) == 16
        and call.form == "plain"
        and not call.weight_only
        and call.norm_weight is None
        and call.flat
        and leading(call) == 1
        and call.K > 0
        # expanded tensors have strides that descriptors are not known to take
        and 0 not in (*call.a.stride(), *call.b.stride())
    )


def epilogue_of(call: GemmCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The last arguments (strides of scales, bias and residual; alpha, slope), and the constants of the epilogue."""
    a_kind, b_kind = kinds(call)
    sam, sak, sbn, sbk = _scale_strides(call)
    bias = 0 if call.bias is None else call.bias.stride(0)
    residual = _residual_strides(call) or (0, 0, 0)
    activation = GATED.get(call.activation or "", call.activation)
    constants = {
        "SCALE_A": SCALES[a_kind],
        "SCALE_B": SCALES[b_kind],
        "BIAS": 0 if call.bias is None else 1 if call.bias_along == "n" else 2,
        "ACTIVATION": 0 if activation is None else ACTIVATIONS[activation],
        "GATED": call.activation in GATED,
        "RESIDUAL": call.residual is not None,
        "LARGEST": 0.0 if call.out_scale is None else _quantized.LARGEST[call.dtype],
    }
    return (sam, sak, sbn, sbk, bias, *residual, float(call.alpha), float(call.slope)), constants


def other_tensors(call: GemmCall) -> tuple[Tensor, ...]:
    """bias, residual, scale_a or the norm's weight, scale_b, zero or the tail, out_scale; a for those not given."""
    a = call.a
    scale_a = call.scale_a if call.norm_weight is None else call.norm_weight
    # zero points are of 4 bits, a tail is of 8
    zero = call.zero if call.tail is None else call.tail
    # one by one, as this runs on every call
    return (
        a if call.bias is None else call.bias,
        a if call.residual is None else call.residual,
        a if scale_a is None else scale_a,
        a if call.scale_b is None else call.scale_b,
        a if zero is None else zero,
        a if call.out_scale is None else call.out_scale,
    )


def partial_dtype(call: GemmCall) -> torch.dtype:
    """The type of sums of a part of K; scales of blocks are part of the sums."""
    return torch.int32 if call.integers and "block" not in kinds(call) else torch.float32


def scales_sums(call: GemmCall) -> bool:
    """True for mxfp4 whose scales multiply sums, not values: float16 has not all that bfloat16 and float32 have."""
    return call.form == "mxfp4" and call.a.dtype == torch.float16


def norm_eps(call: GemmCall) -> float:
    """The eps of the norm; 0 without a norm, so that another norm_eps does not compile the kernel again."""
    return 0.0 if call.norm_weight is None else float(call.norm_eps)


def refuse_parts(call: GemmCall, config: Config) -> None:
    """Raise InvalidArgument where a norm or a tail needs all of K in one program and the configuration splits K."""
    for name, value in (("SPLIT_K", 1), ("CHAINS", 1), ("PERSISTENT", 0)):
        found = config.kwargs.get(name, value)
        if call.norm_weight is not None and found != value:
            raise InvalidArgument(
                f"gemm: a row is normalised with all of K in one program: {name} is {value}, not {found}"
            )
    if call.tail is not None and config["SPLIT_K"] != 1:
        raise InvalidArgument("gemm: columns of a tail have all of K in one program: SPLIT_K is 1")


def cannot_normalise(call: GemmCall) -> str | None:
    """Why `_tile_kernel` does not normalise a's rows, where it is asked to."""
    if call.norm_weight is None:
        return None
    if call.form != "plain" or kinds(call)[1] in ("block", "group"):
        return "normalises rows for plain weights, and for those of 8 bits without blocks or groups of scales"
    if call.a.dtype == torch.float16:
        return "would round float16 rows to it before their size is known, which may be beyond its range"
    return None


class Plan(NamedTuple):
    """Launches of a call: the GEMM; with split-K also its partial results' shape and the launch that adds them."""

    first: _launcher.Launch
    parts: tuple[int, ...] | None
    second: _launcher.Launch | None
    # the first launch reads 4-bit values as words, and has no tensor of zero points
    reads_words: bool = False


def column_unit(call: GemmCall) -> int:
    """The unit that columns are counted in, so that a kernel knows their alignment."""
    return _layout.alignment(call.N, (0, 0, 0))


def assembles(arch: Arch | None) -> bool:
    """True where weights of 4 and 8 bits are widened by NVIDIA's assembly."""
    return arch is not None and arch.vendor == "nvidia" and not _triton.interpreted


def adds_short(call: GemmCall, arch: Arch | None) -> bool:
    """True where the matrix unit does not add products in float32: 8-bit floats on sm_90."""
    return arch is not None and arch.name == "sm_90" and call.a.dtype in FLOAT8 and call.b.dtype in FLOAT8


def products(call: GemmCall, arch: Arch | None) -> str:
    """How `tl.dot` multiplies: a name that is not one of float32 changes nothing else.

    AMD's matrix units take float32 as it is, and Triton has no three products of tf32 there.
    """
    if call.precision == "tf32x3":
        return _target.products(call.a.dtype, arch)
    return "tf32" if call.precision == "tf32" else "ieee"


def _mainloop(call: GemmCall, config: Config, arch: Arch | None) -> tuple[tuple[Any, ...], dict[str, Any], Walk]:
    """Sizes and constants that the kernels over tiles share; sizes without the steps, which come before size1."""
    how, config_k = walk(call), config["BLOCK_K"]
    # the smallest blocks that Triton's tl.dot takes
    least = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32 if call.a.itemsize == 1 else 16}
    for name, size in least.items():
        if config[name] < size:
            raise InvalidArgument(f"gemm: a {name} of {config[name]} is too small: matrix instructions take {size}")
    chains = config.kwargs.get("CHAINS", 1)
    if chains < 1 or config_k % chains != 0 or config_k // chains < least["BLOCK_K"]:
        raise InvalidArgument(f"gemm: a BLOCK_K of {config_k} cannot be divided into {chains} CHAINS")
    if kinds(call)[1] == "group" and call.form not in NIBBLES and call.group % config_k != 0:
        raise InvalidArgument(f"gemm: a BLOCK_K of {config_k} takes columns of more than one group of {call.group}")
    if call.form == "int4" and (config_k % 64 != 0 or (config_k > call.group and config_k != 64)):
        raise InvalidArgument(f"gemm: a BLOCK_K of {config_k} does not fit 4-bit values in groups of {call.group}")
    if call.form == "mxfp4" and (config_k % 64 != 0 or (scales_sums(call) and config_k != 64)):
        raise InvalidArgument(f"gemm: a BLOCK_K of {config_k} does not fit mxfp4 for {name_of(call.a.dtype)}")
    if "block" in kinds(call) and 128 % config_k != 0:
        raise InvalidArgument(f"gemm: a BLOCK_K of {config_k} takes more than one block of scales")
    widest = max(1, *(abs(stride) for stride in (*how.a_strides, *how.b_strides))) * how.align
    blocks = max(config["BLOCK_M"], config["BLOCK_N"], config_k)
    constants = {
        "FORMAT": MXFP4_SUMS if scales_sums(call) else FORMS[call.form],
        "HAS_ZERO": call.zero is not None,
        "GROUP": max(1, call.group),
        "LEADING": how.leading,
        "ALIGN": how.align,
        "ALIGN_N": column_unit(call),
        "A_ORDER": how.a_order,
        "B_ORDER": how.b_order,
        "EVEN_K": call.K % config_k == 0,
        "WIDE": widest * blocks >= 1 << 31,
        "PRECISION": products(call, arch),
        "ACC": tl.int32 if call.integers else tl.float32,
        "XCDS": 1 if arch is None else arch.xcds,
        "PTX": assembles(arch),
        "UNIT_SUMS": UNIT_SUMS if adds_short(call, arch) and call.precision != FAST_ACCUM else 0,
        "PDL": _pdl.overlaps(arch),
    }
    return (how.size1, how.size2, *how.a_strides, *how.b_strides), constants, how


# sizes, strides and block of a tensor descriptor
Descriptor = tuple[list[int], list[int], list[int]]


def descriptors_of(call: GemmCall, config: Config) -> tuple[Descriptor, Descriptor]:
    """The tensor descriptors of a and of b, of which `has_descriptors` has found that they can be made."""

    def made(order: int, rows: int, stride: int, block: int) -> Descriptor:
        blocks = [block, config["BLOCK_K"]] if order == 1 else [config["BLOCK_K"], block]
        return [rows, call.K] if order == 1 else [call.K, rows], [stride, 1], blocks

    a_order, b_order = orders(call)
    a_stride = row_stride(call) if a_order == 1 else call.a.stride(-1)
    b_stride = call.b.stride(-1) if b_order == 1 else call.b.stride(-2)
    a = made(a_order, call.M, a_stride, config["BLOCK_M"])
    return a, made(b_order, call.columns, b_stride, config["BLOCK_N"])


def _matrix_arguments(call: GemmCall, config: Config, tma: bool) -> tuple[Any, Any]:
    """Arguments for a and b of a kernel over tiles: the tensors, or their TMA descriptors with `tma`."""
    if not tma:
        return call.a, call.b
    a, b = descriptors_of(call, config)
    return _triton.descriptor(call.a, *a), _triton.descriptor(call.b, *b)


def with_descriptors(call: GemmCall, config: Config) -> bool:
    """True if a configuration reads a and b through tensor descriptors, except for their addresses."""
    return bool(config.kwargs.get("TMA")) and has_descriptors(call) and not _triton.interpreted


def without(config: Config, *names: str) -> Config:
    """A configuration without values that a kernel does not take."""
    return Config(**{name: value for name, value in config.items() if name not in names})


def tiles(call: GemmCall, y: Tensor, parts: Tensor, config: Config, arch: Arch | None, tma: bool) -> Plan:
    """`_tile_kernel`, and `_sum_kernel` where SPLIT_K is above 1. `tma`: with tensor descriptors."""
    refuse_parts(call, config)
    sizes, constants, _ = _mainloop(call, config, arch)
    values, epilogue = epilogue_of(call)
    tiles_m, tiles_n = _layout.ceil_div(call.M, config["BLOCK_M"]), _layout.ceil_div(call.N, config["BLOCK_N"])
    split = config["SPLIT_K"]
    steps = _layout.ceil_div(_layout.ceil_div(call.K, config["BLOCK_K"]), split)
    work = tiles_m * tiles_n * split
    units = 132 if arch is None else arch.compute_units
    programs = min(work, units * config["PERSISTENT"]) if config["PERSISTENT"] else work
    bias, residual, scale_a, scale_b, zero, out_scale = other_tensors(call)
    a, b = _matrix_arguments(call, config, tma)
    align_n = constants["ALIGN_N"]
    early, options = _pdl.start_of(config, arch)
    scaled = call.form in NIBBLES or not {"block", "group"}.isdisjoint(kinds(call))
    both = in_one_loop(call.activation in GATED, scaled, config)
    first = _launcher.Launch(
        _tile_kernel,
        (programs, call.batches),
        (
            a, b, y, parts, bias, residual, scale_a, scale_b, zero, out_scale,
            call.M, call.N // align_n, call.K // constants["ALIGN"], tiles_m, tiles_n, steps, *sizes, *values,
        ),
        {**constants, **epilogue, "EARLY": early, "BOTH": both, "NORM_EPS": norm_eps(call)},
        Config(**({"CHAINS": 1} | options.kwargs | {"TMA": int(tma)})),
    )  # fmt: skip
    if split == 1:
        return Plan(first, None, None)
    shape = (split, call.batches, call.M, call.columns)
    return Plan(first, shape, sum_parts(call, y, parts, split, arch))


def _after(warps: int, overlaps: bool) -> Config:
    """The options of a second launch, which with programmatic dependent launch starts while the first runs."""
    return Config(num_warps=warps, **({"launch_pdl": 1} if overlaps else {}))


def sum_parts(call: GemmCall, y: Tensor, parts: Tensor, split: int, arch: Arch | None) -> _launcher.Launch:
    """`_sum_kernel` after `split` parts of K."""
    (sam, _, sbn, _, *rest), epilogue = epilogue_of(call)
    bias, residual, scale_a, scale_b, _, out_scale = other_tensors(call)
    align_n, across = column_unit(call), _layout.ceil_div(call.N, SUM_COLUMNS)
    # scales of blocks and groups were made part of the sums
    epilogue |= {
        name: kind if kind <= SCALES["vector"] else 0
        for name, kind in epilogue.items()
        if name in ("SCALE_A", "SCALE_B")
    }
    overlaps = _pdl.overlaps(arch)
    return _launcher.Launch(
        _sum_kernel,
        (call.M * across, call.batches),
        (
            parts, y, bias, residual, scale_a, scale_b, out_scale, call.M, call.N // align_n, across, split,
            sam, sbn, *rest,
        ),
        {**epilogue, "PDL": overlaps, "ALIGN_N": align_n, "SUM_M": 1, "SUM_N": SUM_COLUMNS},
        # four float32 a thread: one access of 16 bytes
        _after(SUM_COLUMNS // 4 // (32 if arch is None else arch.wave_size), overlaps),
    )  # fmt: skip


def stream(call: GemmCall, y: Tensor, parts: Tensor, config: Config, arch: Arch | None, tma: bool) -> Plan:
    """`_stream_k_kernel` and `_join_kernel`; `config["PROGRAMS"]` programs a compute unit."""
    if call.activation in GATED:
        raise InvalidArgument(f"gemm: stream-K does not make {call.activation}")
    sizes, constants, _ = _mainloop(call, config, arch)
    values, epilogue = epilogue_of(call)
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    tiles_m, tiles_n = _layout.ceil_div(call.M, m), _layout.ceil_div(call.N, n)
    steps = _layout.ceil_div(call.K, config["BLOCK_K"])
    units = 132 if arch is None else arch.compute_units
    programs = max(1, min(tiles_m * tiles_n * steps, units * config["PROGRAMS"]))
    bias, residual, scale_a, scale_b, zero, out_scale = other_tensors(call)
    a, b = _matrix_arguments(call, config, tma)
    align_n = constants["ALIGN_N"]
    first = _launcher.Launch(
        _stream_k_kernel,
        (programs, call.batches),
        (
            a, b, y, parts, bias, residual, scale_a, scale_b, zero, out_scale,
            call.M, call.N // align_n, call.K // constants["ALIGN"], tiles_m, tiles_n, steps, *sizes, *values,
        ),
        {**constants, **epilogue},
        Config(**(without(config, "PROGRAMS").kwargs | {"TMA": int(tma)})),
    )  # fmt: skip
    if programs == 1:
        return Plan(first, (call.batches, 1, 2, m, n), None)
    sam, _, sbn, _, *rest = values
    epilogue = {
        name: 0 if name.startswith("SCALE") and kind > SCALES["vector"] else kind for name, kind in epilogue.items()
    }
    second = _launcher.Launch(
        _join_kernel,
        (programs - 1, call.batches),
        (
            parts, y, bias, residual, scale_a, scale_b, out_scale, call.M, call.N // align_n, tiles_m, tiles_n, steps,
            programs, sam, sbn, *rest,
        ),
        {
            **epilogue, "PDL": constants["PDL"], "ALIGN_N": align_n, "GROUP_M": config["GROUP_M"],
            "BLOCK_M": m, "BLOCK_N": n,
        },
        _after(config["num_warps"], constants["PDL"]),
    )  # fmt: skip
    return Plan(first, (call.batches, programs, 2, m, n), second)


Planner = Callable[[GemmCall, Tensor, Tensor, Config, Arch | None, bool], Plan]


def bind(planner: Planner, call: GemmCall, config: Config) -> Callable[[GemmCall], Tensor]:
    """The function for all calls with the signature of this one: allocate, launch, and add up what was split."""
    arch, dtype, device, partial = _target.arch(), call.dtype, call.a.device, partial_dtype(call)
    shape = call.shape
    if math.prod(shape) == 0:
        return lambda _call: torch.empty(shape, dtype=dtype, device=device)
    y, sums = torch.empty(0, dtype=dtype, device=device), torch.empty(0, dtype=partial, device=device)
    plan = planner(call, y, sums, config, arch, False)
    start = _launcher.starter(plan.first, device)
    second = None if plan.second is None else _launcher.starter(plan.second, device)
    # the bound function does not keep the plan, which has the tensors of one call
    reads_words, parts_shape = plan.reads_words, plan.parts
    has_tma = with_descriptors(call, config)
    # made by the first call whose addresses are multiples of 16, which descriptors need
    start_tma: Callable[..., None] | None = None

    def run(call: GemmCall) -> Tensor:
        nonlocal start_tma
        a, b = call.a, call.b
        y = torch.empty(shape, dtype=dtype, device=device)
        parts = y if parts_shape is None else torch.empty(parts_shape, dtype=partial, device=device)
        bias, residual, scale_a, scale_b, zero, out_scale = other_tensors(call)
        if reads_words:
            # a weight that starts inside a word, as a slice may: the kernel loads whole words
            if b.data_ptr() % 4 != 0:
                b = torch.empty_strided(b.shape, b.stride(), dtype=b.dtype, device=device).copy_(b)
            start(a, b, y, parts, bias, residual, scale_a, scale_b, out_scale)
        elif has_tma and (a.data_ptr() | b.data_ptr()) % 16 == 0:
            if start_tma is None:
                tma = planner(call, y, sums, config, arch, True).first
                start_tma = _launcher.starter(tma, device, num_descriptors=2)
            start_tma(a, b, y, parts, bias, residual, scale_a, scale_b, zero, out_scale)
        else:
            start(a, b, y, parts, bias, residual, scale_a, scale_b, zero, out_scale)
        if second is not None:
            second(parts, y, bias, residual, scale_a, scale_b, out_scale)
        return y

    return run
