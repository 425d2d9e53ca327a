"""The row kernel: norms, softmax and rounding to 8 bits, alone and combined, with or without a residual.

A program holds its part of a row in registers: the row is read once and written once, however wide. Rows wider than
one program holds are split over several, which exchange what they found (`_lib.publish`, `_lib.collect`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import wavecrest.ops._quantized as _quantized
import wavecrest.ops._rows as _rows
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import ARCHS, Arch
from wavecrest.ops._lib import (
    collect,
    column_mask,
    column_offsets,
    exp,
    first_of,
    load_row_vector,
    magnitude,
    publish,
    row_mask,
    row_offsets,
    second_of,
    unpack,
    with_part,
)
from wavecrest.ops._quantized import Quantization, rounded, scale_of
from wavecrest.ops._triton import tl, triton
from wavecrest.registry import Cost, Key, Op, dtype_name, m_bucket, needs_grad
from wavecrest.tuned import Config


class Operands(NamedTuple):
    """The arguments of any op of this kernel. `kind`: one of KINDS; `how`: rounded to 8 bits."""

    kind: str
    x: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0
    how: Quantization | None = None


def register(
    name: str,
    operands: Callable[..., Operands],
    *,
    kind: str,
    residual: bool = False,
    quantized: bool = False,
    dtypes: tuple[torch.dtype, ...] = tuple(_quantized.LARGEST),
) -> Op:
    """An op of this kernel: `operands` takes the arguments of its public function and gives them under their names.

    `dtypes`: the 8-bit types it makes.
    """
    vectors = {"rms": 1, "layer": 2}.get(kind, 0)

    def of(function: Callable[[Operands], Any]) -> Callable[..., Any]:
        def part(*args: Any, **kwargs: Any) -> Any:
            return function(operands(*args, **kwargs))

        part.__signature__ = inspect.signature(operands)  # type: ignore[attr-defined]
        return part

    def inputs(M: int, N: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
        if kind == "scaled":
            q = torch.randint(-127, 128, (M, N), dtype=torch.int8, device=device)
            return q, torch.rand(M, 1, device=device), dtype
        rows = tuple(torch.randn(M, N, dtype=dtype, device=device) for _ in range(2 if residual else 1))
        return (*rows, *(torch.randn(N, dtype=dtype, device=device) for _ in range(vectors)))

    def compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _rows.Launch]:
        cases = {}
        for columns in COMPILE_COLUMNS:
            row = torch.empty(64, columns, dtype=torch.bfloat16, device="meta")
            if kind == "scaled":
                for granularity in _quantized.GRANULARITIES:
                    scale = row.new_empty(_quantized.scale_shape(row.shape, granularity), dtype=torch.float32)
                    given = operands(row.to(torch.int8), scale)
                    cases[f"N={columns} {granularity}"] = _compile_case(given, arch, config)
                continue
            given = operands(*((row, row) if residual else (row,)), *(row[0] for _ in range(vectors)))
            cases[f"N={columns}"] = _compile_case(given, arch, config)
            if columns == 4096 and kind == "identity":
                cases["N=4096 few rows"] = _compile_case(given, arch, config, rows=16)
            if quantized and columns in (1000, 4096):
                grouped = given._replace(how=Quantization(torch.int8, "group", None))
                cases[f"N={columns} group"] = _compile_case(grouped, arch, config)
        return cases

    def emulate_cases(arch: str) -> dict[str, Callable[[], tuple[Any, ...]]]:
        def with_arguments(M: int, N: int, **given: Any) -> Callable[[], tuple[Any, ...]]:
            def make() -> tuple[Any, ...]:
                bound = inspect.signature(operands).bind(*inputs(M, N, torch.bfloat16, "cpu"), **given)
                bound.apply_defaults()
                return bound.args

            return make

        cases = {"split": with_arguments(1, 70000)}
        if not quantized or kind == "scaled":
            return cases
        cases["group"] = with_arguments(3, 300, granularity="group")
        cases["given for the tensor"] = with_arguments(3, 300, granularity="tensor", scale=torch.tensor(0.02))
        if kind == "identity":
            cases["tensor"] = with_arguments(3, 300, granularity="tensor")
            cases["given per row"] = with_arguments(3, 300, granularity="token", scale=torch.full((3, 1), 0.02))
            cases["given per group"] = with_arguments(3, 300, granularity="group", scale=torch.full((3, 3), 0.02))
        for dtype in dtypes if len(dtypes) > 1 else ():
            if dtype == torch.int8 or arch in _quantized.KERNEL_ARCHS[_name(dtype)]:
                cases[_name(dtype)] = with_arguments(3, 300, dtype=dtype)
        return cases

    def shape_of(key: Key) -> _Shape:
        return _Shape(kind, key[2], residual, *((key[-2], key[-1]) if quantized else ()))

    op = Op(
        name,
        reference=of(_reference),
        check=of(lambda given: _check(name, given, residual, dtypes)),
        key=of(_key),
        key_fields=KEY_FIELDS + (QUANTIZED_FIELDS if quantized else ()),
        inputs=inputs,
        cost=of(_cost),
        default_config=lambda key: _config(key[0], key[1], shape_of(key), _rows.arch()),
        compile_cases=compile_cases,
        emulate_cases=emulate_cases,
        op_class="quantized" if quantized else "row",
    )
    _rows.attach_kernel(
        op, lambda *args, config, **kwargs: _bind(operands, args, kwargs, config), of(_declines), of(_reserved)
    )
    return op


def _check(op: str, given: Operands, residual: bool, dtypes: tuple[torch.dtype, ...]) -> None:
    x, how = given.x, given.how
    if given.kind == "scaled":
        _quantized.check_dequantize(op, x, how)
        return
    _rows.check_rows(op, x)
    if residual:
        _rows.check_same(op, "residual", given.residual, x)
    if given.weight is not None:
        _rows.check_vector(op, "weight", given.weight, x)
    if given.bias is not None:
        _rows.check_vector(op, "bias", given.bias, x)
    _rows.check_eps(op, given.eps)
    if how is not None:
        _quantized.check(op, x, how, dtypes)
        if how.granularity == "tensor" and how.scale is None and given.kind != "identity":
            raise InvalidArgument(
                f"{op}: a scale for the whole tensor cannot be worked out in one pass; give it, or use token"
            )


KEY_FIELDS = ("rows", "columns", "dtype", "weight", "bias", "device", "leading", "grad", "strided")
QUANTIZED_FIELDS = ("to", "granularity", "static")


def _key(given: Operands) -> Key:
    x, weight, bias, how = given.x, given.weight, given.bias, given.how
    key: Key = (
        m_bucket(_rows.row_count(x)),
        x.shape[-1],
        dtype_name(x),
        None if weight is None else dtype_name(weight),
        None if bias is None else dtype_name(bias),
        x.device.type,
        _leading(given),
        _needs_grad(given),
        _strided(given),
    )
    if how is None:
        return key
    return (*key, _name(how.dtype), how.granularity, how.scale is not None)


def _strided(given: Operands) -> bool:
    """True if the columns of an operand do not lie next to each other."""
    operands = (given.x,) if given.residual is None else (given.x, given.residual)
    return any(operand.shape[-1] > 1 and operand.stride(-1) != 1 for operand in operands)


def _needs_grad(given: Operands) -> bool:
    scale = None if given.how is None else given.how.scale
    return needs_grad(given.x, given.residual, given.weight, given.bias, scale)


def _leading(given: Operands) -> int:
    return _rows.leading(given.x) if given.residual is None else _rows.leading(given.x, given.residual)


def _declines(given: Operands) -> str | None:
    x, how = given.x, given.how
    dtype = dtype_name(x)
    if how is not None:
        eight_bits, dtype = (x.dtype, _name(how.dtype)) if given.kind == "scaled" else (how.dtype, dtype)
        reason: str | None = _quantized.kernel_refusal(eight_bits)
        if reason is not None:
            return reason
    return _rows.kernel_refusal(dtype, x.device.type, _leading(given), _needs_grad(given))


def _reserved(given: Operands) -> str | None:
    if _strided(given):
        return "reads columns one by one where they do not lie next to each other; PyTorch's kernels handle that better"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cost(given: Operands) -> Cost:
    x, how = given.x, given.how
    vectors = sum(vector.nbytes for vector in (given.weight, given.bias) if vector is not None)
    # x in; the residual in and the sum out
    moved = x.nbytes * (1 if given.residual is None else 3)
    if how is None:
        written = x.nbytes
    else:
        written = x.numel() * how.dtype.itemsize + 4 * math.prod(_quantized.scale_shape(x.shape, how.granularity))
    flops = {"identity": 3, "scaled": 1, "rms": 4, "layer": 7, "softmax": 5}[given.kind]
    flops += 0 if given.residual is None else 1
    return Cost(flops=flops * x.numel(), bytes=moved + written + vectors)


def _reference(given: Operands) -> Any:
    x = given.x
    # the norm is that of the rounded sum, as in a model that adds first
    h = x if given.residual is None else (_rows.widen(x) + _rows.widen(given.residual)).to(x.dtype)
    y = _rows.widen(h)
    if given.kind == "scaled":
        return _quantized.dequantized(y, given.how)
    if given.kind == "softmax":
        y = torch.softmax(y, -1)
    if given.kind == "layer":
        y = y - y.mean(-1, keepdim=True)
    if given.kind in ("rms", "layer"):
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + given.eps)
    if given.weight is not None:
        y = y * given.weight.to(y.dtype)
    if given.bias is not None:
        y = y + given.bias.to(y.dtype)
    results = (y.to(x.dtype),) if given.how is None else _quantized.reference(y, given.how)
    if given.residual is not None:
        results = (*results, h)
    return results[0] if len(results) == 1 else results


# columns of a program where it need not see the whole row
TILE_COLUMNS = 2048


class _Shape(NamedTuple):
    """What a configuration is chosen by, beside the columns; `rounding` is the granularity of 8-bit results."""

    kind: str
    dtype: str
    residual: bool = False
    rounding: str | None = None
    static: bool = False

    @property
    def tiled(self) -> bool:
        """True if nothing of a row is needed but the element, or its group."""
        return self.kind in ("identity", "scaled") and (self.static or self.rounding != "token")


# rows that are too few to fill a GPU: latency counts, and more threads a row shorten it
FEW_ROWS = 64


def _config(rows: int, columns: int, shape: _Shape, arch: Arch | None) -> Config:
    """A program a row, or several narrow rows a program; wider rows than a program holds well are split.

    `rows` is a bucket, 0 for any number. Chosen by sweeps over 1,024 to 262,144 columns of bfloat16 on one H200,
    2026-11-20; float32 counts as twice the columns, and where a wave is 64 wide the same numbers of threads are used.
    `maxnreg` (NVIDIA only) lets more programs run side by side: softmax over 65,536 columns went from 0.83 to 0.93 of
    a copy by it.
    """
    wave = 32 if arch is None else arch.wave_size
    least = _quantized.GROUP if shape.rounding == "group" and not shape.static else 1
    block_n = max(_rows.power_of_two(columns), least)

    def made(block_m: int, block_n: int, threads: int, packed: bool = False, registers: int = 0) -> Config:
        limit = {"maxnreg": registers} if registers and arch is not None and arch.vendor == "nvidia" else {}
        packed = packed and shape.dtype != "float32" and shape.kind != "softmax"
        warps = max(1, threads // wave)
        return Config(BLOCK_M=block_m, BLOCK_N=block_n, PACKED=int(packed), num_warps=warps, **limit)

    quantized = shape.rounding is not None and shape.kind != "scaled"
    # not where a row is summed: its sum must not depend on how many other rows there are
    few = 0 < rows <= FEW_ROWS and shape.kind in ("identity", "scaled")
    if shape.tiled:
        block_n = min(block_n, 2 * TILE_COLUMNS if few else TILE_COLUMNS)
        block_m = 1 if few else max(1, min(16, TILE_COLUMNS // block_n))
        return made(block_m, block_n, block_m * block_n // (8 if few else 32 if quantized else 16))
    if few and block_n <= 8192:
        return made(1, block_n, block_n // 8)
    if block_n <= 2048:
        # 8-bit results are stored 16 at a time, so that fewer threads have more of a row each
        elements, per_thread = (1024, 32) if quantized else (2048, 16)
        block_m = max(1, min(16, elements // block_n))
        return made(block_m, block_n, block_m * block_n // per_thread)
    return _wide_config(columns, block_n, shape, arch, made)


def _wide_config(columns: int, block_n: int, shape: _Shape, arch: Arch | None, made: Callable[..., Config]) -> Config:
    """The same for rows of more than 2,048 columns."""
    quantized = shape.rounding is not None
    doubled = 2 if shape.dtype == "float32" else 1
    width = block_n * doubled
    # RMSNorm alone needs few registers beside the row
    light = shape.kind == "rms" and not quantized
    norm_to_8_bits = quantized and shape.kind != "identity"
    if width <= 4096:
        return made(1, block_n, block_n // (64 if shape.kind == "identity" else 32 if quantized else 16))
    if width <= 8192:
        if quantized or shape.kind == "layer":
            # a block that the row does not fill costs as much as a full one: more programs side by side hide some of it
            return made(1, block_n, width // 64, registers=96 if columns < block_n and not shape.residual else 0)
        return made(1, block_n, width // 64, packed=True) if columns < block_n else made(1, block_n, width // 16)
    if width <= 16384:
        return made(1, block_n, width // 64)
    if width <= 32768 and shape.kind != "softmax" and not (norm_to_8_bits and shape.kind == "rms"):
        if norm_to_8_bits:
            return made(1, block_n, width // 64, registers=112)
        return made(1, block_n, width // 64, packed=True, registers=96 if shape.residual else 64)
    if width <= 65536 and light and not shape.residual:
        return made(1, block_n, width // 64, packed=True)
    part = 4096 if width > 131072 else 8192 if light else 2048
    # AMD compilers spill where a thread has 64 elements and a residual or 8-bit results beside them
    heavy = shape.residual or not light
    per_thread = 32 if heavy and arch is not None and arch.vendor == "amd" else 64
    registers = 0 if light or norm_to_8_bits else 80
    return made(1, part // doubled, part // per_thread, packed=True, registers=registers)


# what is done to a row: nothing, y = x · scale, y = x · rstd, y = (x − mean) · rstd, y = exp(x − max) / sum
IDENTITY, SCALED, RMS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LAYER, SOFTMAX = tl.constexpr(3), tl.constexpr(4)
KINDS = {"identity": 0, "scaled": 1, "rms": 2, "layer": 3, "softmax": 4}
# what becomes of the result: its own type; 8 bits with a scale per row, per group of columns or for the whole tensor
# (from PEAK, a launch before that only looks), or with scales that are given
OWN, TOKEN, GROUPED, WHOLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
GIVEN_TENSOR, GIVEN_TOKEN, GIVEN_GROUP, PEAK = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
ROUNDINGS = {
    ("token", False): 1,
    ("group", False): 2,
    ("tensor", False): 3,
    ("tensor", True): 4,
    ("token", True): 5,
    ("group", True): 6,
}
# words that the largest magnitude of a tensor is gathered in: one would have every program wait for every other
PEAKS = tl.constexpr(64)


@triton.jit
def _load(  # type: ignore[no-untyped-def]
    x_rows, r_rows, cols, stride_xn, stride_rn, mask, KIND: tl.constexpr, RESIDUAL: tl.constexpr
):
    other = float("-inf") if KIND == SOFTMAX else 0.0
    x = tl.load(x_rows + column_offsets(cols, stride_xn)[None, :], mask=mask, other=other)
    if RESIDUAL:
        r = tl.load(r_rows + column_offsets(cols, stride_rn)[None, :], mask=mask, other=0.0)
        x = (x.to(tl.float32) + r.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _reduced(  # type: ignore[no-untyped-def]
    x, zero, weight_ptr, cols, stride_wn, mask_n, count,
    KIND: tl.constexpr, HAS_WEIGHT: tl.constexpr, PEAKED: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """What is kept of the `count` columns at hand, and two numbers a row [BLOCK_M].

    RMS: the largest |x · weight| where that is asked for (PEAKED), and the sum of squares; LAYER: the mean and the sum
    of squared deviations; SOFTMAX: the maximum and the sum of exponentials over it, which are what is kept.
    """
    values = unpack(x, zero, 0)
    if KIND == RMS:
        first = tl.zeros([x.shape[0]], tl.float32)
        second = tl.sum(values * values, axis=1)
        if PEAKED:
            if HAS_WEIGHT:
                values *= load_row_vector(weight_ptr, cols, stride_wn, mask_n)
            # a maximum of floats would lose the NaN of a weight
            first = tl.max(magnitude(values), axis=1).to(tl.float32, bitcast=True)
    elif KIND == LAYER:
        first = tl.sum(values, axis=1) / count
        # masked lanes hold 0, which is not centred: keep them out of the variance
        centred = tl.where(mask_n[None, :], unpack(x, zero, 1 if HELD else 0) - first[:, None], 0.0)
        second = tl.sum(centred * centred, axis=1)
    else:
        first = tl.max(values, axis=1)
        x = exp(values - _shift(first)[:, None])
        second = tl.sum(x, axis=1)
    return x, first, second


@triton.jit
def _shift(peak):  # type: ignore[no-untyped-def]
    """What is subtracted before exponentials: not -inf, as other columns of the row may hold more."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _joined(first, second, index, parts, N, BLOCK_N: tl.constexpr, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two numbers of a row from those of its parts [PARTS], in the same order in every program."""
    if KIND == RMS:
        whole = tl.max(magnitude(tl.where(index < parts, first, 0.0)), axis=0).to(tl.float32, bitcast=True)
        rest = tl.sum(tl.where(index < parts, second, 0.0), axis=0)
    elif KIND == LAYER:
        # Chan, Golub and LeVeque (1983)
        counts = tl.minimum(tl.maximum(N - index * BLOCK_N, 0), BLOCK_N).to(tl.float32)
        means = tl.where(index < parts, first, 0.0)
        whole = tl.sum(means * counts, axis=0) / N
        rest = tl.sum(tl.where(index < parts, second, 0.0) + counts * (means - whole) * (means - whole), axis=0)
    else:
        peaks = tl.where(index < parts, first, float("-inf"))
        whole = tl.max(peaks, axis=0)
        rest = tl.sum(tl.where(index < parts, second, 0.0) * exp(peaks - whole), axis=0)
    return tl.full([1], 0.0, tl.float32) + whole, tl.full([1], 0.0, tl.float32) + rest


@triton.jit
def _mapped(  # type: ignore[no-untyped-def]
    x, zero, own, first, second, N, eps, weight_ptr, bias_ptr, cols, stride_wn, stride_bn, mask_n,
    KIND: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """The result in float32, from what `_reduced` kept; `own` is the first number of the columns at hand."""
    y = unpack(x, zero, AGAIN)
    if KIND == SOFTMAX:
        # a row of -inf alone is NaN, as in PyTorch: -inf - -inf; a part of it in another row is 0, its factor too
        y *= (exp(own - first) / second)[:, None]
    elif KIND >= RMS:
        rstd = tl.rsqrt(second / N + eps)
        if KIND == LAYER:
            # subtracted first: a fused multiply-add would leave what rounds off of mean · rstd, which is large
            # where a row hardly varies
            y -= first[:, None]
        y *= rstd[:, None]
    if HAS_WEIGHT:
        y *= load_row_vector(weight_ptr, cols, stride_wn, mask_n)
    if HAS_BIAS:
        y += load_row_vector(bias_ptr, cols, stride_bn, mask_n)
    return y


@triton.jit
def _peak(y, mask):  # type: ignore[no-untyped-def]
    """The largest magnitude of each row [BLOCK_M], as `magnitude` gives it."""
    return tl.max(tl.where(mask, magnitude(y), 0), axis=1)


@triton.jit(
    do_not_specialize=[
        "M", "columns", "parts", "size1", "size2", "stride_x0", "stride_x1", "stride_x2",
        "stride_r0", "stride_r1", "stride_r2", "zero",
    ]
)  # fmt: skip
def _row_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    h_ptr,
    scale_ptr,
    slots_ptr,
    M,
    columns,
    parts,
    size1,
    size2,
    stride_x0,
    stride_x1,
    stride_x2,
    stride_xn,
    stride_r0,
    stride_r1,
    stride_r2,
    stride_rn,
    stride_wn,
    stride_bn,
    zero,
    eps,
    KIND: tl.constexpr,
    RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUNDING: tl.constexpr,
    LARGEST: tl.constexpr,
    GROUP: tl.constexpr,
    LEADING: tl.constexpr,
    ALIGN: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    PATIENCE: tl.constexpr,
    ATOMIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PACKED: tl.constexpr,
):
    # columns and row strides come in units of ALIGN, which tells the compiler how wide accesses may be
    N = columns * ALIGN
    # kept as 16 bits between its uses; exponentials are kept as they are
    HELD: tl.constexpr = PACKED and KIND != SOFTMAX and x_ptr.dtype.element_ty.primitive_bitwidth == 16
    # where split: max |x · rstd · weight| is rstd times what is found with the sum of squares, in one exchange
    PEAKED: tl.constexpr = ROUNDING == TOKEN and KIND == RMS and PARTS > 1
    program = tl.program_id(0)
    part = 0 if PARTS == 1 else program % parts
    block = program if PARTS == 1 else program // parts
    # int64: row · stride passes 2³¹ on large batches
    rows = block.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = row_mask(rows, M, BLOCK_M)
    x_rows = x_ptr + ALIGN * row_offsets(rows, stride_x0, stride_x1, stride_x2, size1, size2, LEADING)[:, None]
    r_rows = residual_ptr + ALIGN * row_offsets(rows, stride_r0, stride_r1, stride_r2, size1, size2, LEADING)[:, None]
    out_rows = (rows * N)[:, None]
    offs_n = tl.arange(0, BLOCK_N)
    cols = part * BLOCK_N + offs_n
    mask_n = column_mask(cols, N, BLOCK_N, EVEN)
    mask = mask_m & mask_n[None, :]
    # a split row has its program's block to itself
    slots = slots_ptr + block.to(tl.int64) * parts * 2
    index = tl.arange(0, PARTS)

    x = _load(x_rows, r_rows, cols, stride_xn, stride_rn, mask, KIND, RESIDUAL)
    if RESIDUAL:
        tl.store(h_ptr + out_rows + cols[None, :], x, mask=mask)
    first = tl.zeros([BLOCK_M], tl.float32)
    second = first
    if KIND >= RMS:
        count = tl.minimum(N - part * BLOCK_N, BLOCK_N).to(tl.float32)
        x, first, second = _reduced(x, zero, weight_ptr, cols, stride_wn, mask_n, count, KIND, HAS_WEIGHT, PEAKED, HELD)
    own = first
    if KIND >= RMS and PARTS > 1:
        publish(slots, part, tl.sum(first, axis=0), tl.sum(second, axis=0))
        words = collect(slots, parts, zero, PARTS, PATIENCE, ATOMIC)
        if tl.min((words != 0).to(tl.int32), axis=0) == 0:
            # waited too long for parts that may not have started: work out their share, and wait no more
            for other in range(parts):
                other_cols = other * BLOCK_N + offs_n
                other_n = column_mask(other_cols, N, BLOCK_N, EVEN)
                other_m = mask_m & other_n[None, :]
                other_x = _load(x_rows, r_rows, other_cols, stride_xn, stride_rn, other_m, KIND, RESIDUAL)
                count = tl.minimum(N - other * BLOCK_N, BLOCK_N).to(tl.float32)
                _, first, second = _reduced(
                    other_x, zero, weight_ptr, other_cols, stride_wn, other_n, count, KIND, HAS_WEIGHT, PEAKED, HELD
                )
                words = with_part(words, other, tl.sum(first, axis=0), tl.sum(second, axis=0))
            # its own columns again, so that they need no registers in the meantime
            x = _load(x_rows, r_rows, cols, stride_xn, stride_rn, mask, KIND, RESIDUAL)
            count = tl.minimum(N - part * BLOCK_N, BLOCK_N).to(tl.float32)
            x, own, _ = _reduced(x, zero, weight_ptr, cols, stride_wn, mask_n, count, KIND, HAS_WEIGHT, PEAKED, HELD)
        first, second = _joined(first_of(words), second_of(words), index, parts, N, BLOCK_N, KIND)
    y = _mapped(
        x, zero, own, first, second, N, eps, weight_ptr, bias_ptr, cols, stride_wn, stride_bn, mask_n,
        KIND, HAS_WEIGHT, HAS_BIAS, 2 if HELD else 0,
    )  # fmt: skip

    if ROUNDING == OWN:
        tl.store(y_ptr + out_rows + cols[None, :], y, mask=mask)
    elif ROUNDING == PEAK:
        # a maximum does not depend on the order of the programs
        tl.atomic_max(slots_ptr + program % PEAKS, tl.max(_peak(y, mask), axis=0), sem="relaxed")
    elif ROUNDING >= WHOLE:
        if ROUNDING == WHOLE:
            scale = scale_of(tl.max(tl.load(slots_ptr + tl.arange(0, PEAKS)), axis=0), LARGEST)
            tl.store(scale_ptr, scale, mask=program == 0)
            scale = tl.full([1, 1], 0.0, tl.float32) + scale
        elif ROUNDING == GIVEN_TENSOR:
            scale = tl.load(scale_ptr + tl.zeros([1, 1], tl.int32))
        elif ROUNDING == GIVEN_TOKEN:
            scale = tl.load(scale_ptr + rows, mask=rows < M, other=1.0)[:, None]
        else:
            scale = tl.load(
                scale_ptr + (rows * tl.cdiv(N, GROUP))[:, None] + (cols // GROUP)[None, :], mask=mask, other=1.0
            )
        if KIND == SCALED:
            y *= scale
        else:
            y = rounded(y, scale, y_ptr.dtype.element_ty, LARGEST, ROUNDING != WHOLE)
        tl.store(y_ptr + out_rows + cols[None, :], y, mask=mask)
    elif ROUNDING == GROUPED:
        # what is outside the row must not count: a bias, or what 0 is mapped to, is not 0 there
        grouped = tl.reshape(tl.where(mask, y, 0.0), [BLOCK_M, BLOCK_N // GROUP, GROUP])
        scales = scale_of(tl.max(magnitude(grouped), axis=2), LARGEST)
        grouped = rounded(grouped, scales[:, :, None], y_ptr.dtype.element_ty, LARGEST, False)
        tl.store(y_ptr + out_rows + cols[None, :], tl.reshape(grouped, [BLOCK_M, BLOCK_N]), mask=mask)
        groups = tl.cdiv(N, GROUP)
        offs_g = part * (BLOCK_N // GROUP) + tl.arange(0, BLOCK_N // GROUP)
        mask_g = mask_m & (offs_g < groups)[None, :]
        tl.store(scale_ptr + (rows * groups)[:, None] + offs_g[None, :], scales, mask=mask_g)
    else:
        if PEAKED:
            peak = magnitude(first * tl.rsqrt(second / N + eps))
        else:
            peak = _peak(y, mask)
        if PARTS > 1 and not PEAKED:
            found = tl.max(peak, axis=0).to(tl.float32, bitcast=True)
            publish(slots + parts, part, found, found)
            words = collect(slots + parts, parts, zero, PARTS, PATIENCE, ATOMIC)
            if tl.min((words != 0).to(tl.int32), axis=0) == 0:
                for other in range(parts):
                    other_cols = other * BLOCK_N + offs_n
                    other_n = column_mask(other_cols, N, BLOCK_N, EVEN)
                    other_m = mask_m & other_n[None, :]
                    other_x = _load(x_rows, r_rows, other_cols, stride_xn, stride_rn, other_m, KIND, RESIDUAL)
                    other_own = first
                    if KIND == SOFTMAX:
                        other_x, other_own, _ = _reduced(
                            other_x, zero, weight_ptr, other_cols, stride_wn, other_n, 1.0,
                            KIND, HAS_WEIGHT, PEAKED, HELD,
                        )  # fmt: skip
                    other_y = _mapped(
                        other_x, zero, other_own, first, second, N, eps, weight_ptr, bias_ptr, other_cols,
                        stride_wn, stride_bn, other_n, KIND, HAS_WEIGHT, HAS_BIAS, 2 if HELD else 0,
                    )  # fmt: skip
                    found = tl.max(_peak(other_y, other_m), axis=0).to(tl.float32, bitcast=True)
                    words = with_part(words, other, found, found)
            peaks = tl.where(index < parts, magnitude(first_of(words)), 0)
            peak = tl.full([1], 0, tl.int32) + tl.max(peaks, axis=0)
        scale = scale_of(peak, LARGEST)
        if HELD:
            # made again from the packed row, rather than kept
            y = _mapped(
                x, zero, own, first, second, N, eps, weight_ptr, bias_ptr, cols, stride_wn, stride_bn, mask_n,
                KIND, HAS_WEIGHT, HAS_BIAS, 1,
            )  # fmt: skip
        y = rounded(y, scale[:, None], y_ptr.dtype.element_ty, LARGEST, False)
        tl.store(y_ptr + out_rows + cols[None, :], y, mask=mask)
        tl.store(scale_ptr + rows, scale, mask=(rows < M) & (part == 0))


def _launch(
    given: Operands,
    y: Tensor,
    h: Tensor,
    scale: Tensor,
    slots: Tensor,
    config: Config,
    rounding: int,
    arch: Arch | None = None,
) -> _rows.Launch:
    x, residual, weight, bias, how = given.x, given.residual, given.weight, given.bias, given.how
    if rounding == ROUNDINGS["group", False] and config["BLOCK_N"] % _quantized.GROUP != 0:
        raise InvalidArgument(f"groups of {_quantized.GROUP} columns need a BLOCK_N that they fill, not {config!r}")
    operands = (x,) if residual is None else (x, residual)
    rows, leading, size1, size2, strides = _rows.layout(*operands)
    columns = x.shape[-1]
    align = _rows.alignment(columns, *strides)
    parts = _rows.parts(columns, config)
    return _rows.Launch(
        _row_kernel,
        ((rows + config["BLOCK_M"] - 1) // config["BLOCK_M"] * parts,),
        (
            x,
            x if residual is None else residual,
            x if weight is None else weight,
            x if bias is None else bias,
            y,
            h,
            scale,
            slots,
            rows,
            columns // align,
            parts,
            size1,
            size2,
            *(stride // align for stride in strides[0]),
            x.stride(-1),
            *(stride // align for stride in strides[-1]),
            operands[-1].stride(-1),
            0 if weight is None else weight.stride(0),
            0 if bias is None else bias.stride(0),
            0,
            given.eps,
        ),
        {
            "KIND": KINDS[given.kind],
            "RESIDUAL": residual is not None,
            "HAS_WEIGHT": weight is not None,
            "HAS_BIAS": bias is not None,
            "ROUNDING": rounding,
            "LARGEST": 0.0 if how is None else _quantized.LARGEST.get(how.dtype, 0.0),
            "GROUP": _quantized.GROUP,
            "LEADING": leading,
            "ALIGN": align,
            "EVEN": columns % config["BLOCK_N"] == 0,
            "PARTS": _rows.power_of_two(parts),
            "PATIENCE": _rows.patience(),
            "ATOMIC": parts > 1 and (arch or _rows.arch()) in LOADS_ARE_CACHED,
        },
        config,
    )


def _rounding(how: Quantization | None) -> int:
    return 0 if how is None else ROUNDINGS[how.granularity, how.scale is not None]


def _outputs(given: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the result, for the sum with the residual, and for the scale; x where there is none of these."""
    x, how = given.x, given.how
    h = x if given.residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    if how is None:
        return torch.empty_like(x, memory_format=torch.contiguous_format), h, x
    if how.scale is not None:
        scale = how.scale.contiguous()
    else:
        shape = _quantized.scale_shape(x.shape, how.granularity)
        # a program writes the scales of its rows; without elements there is none
        allocate = torch.empty if x.numel() > 0 else torch.ones
        scale = allocate(shape, dtype=torch.float32, device=x.device)
    return torch.empty(x.shape, dtype=how.dtype, device=x.device), h, scale


def _slots(x: Tensor, config: Config, rounding: int) -> Callable[[], Tensor | None]:
    """What makes the zeros that programs exchange through, for a call; None where they do not."""
    shape = _rows.slots_shape(x, config, exchanges=2)
    if rounding == WHOLE:
        return lambda: torch.zeros(PEAKS, dtype=torch.int32, device=x.device)
    if shape is None:
        return lambda: None
    return lambda: torch.zeros(shape, dtype=torch.int64, device=x.device)


def _bind(
    operands: Callable[..., Operands], args: tuple[Any, ...], kwargs: dict[str, Any], config: Config
) -> Callable[..., Any]:
    given = operands(*args, **kwargs)
    x, rounding = given.x, _rounding(given.how)
    launch = _launch(given, x, x, x, x, config, rounding)
    start, sizes = _rows.starter(launch, x.device), launch.args[8:]
    look = None
    if rounding == WHOLE:
        look = _rows.starter(_launch(given, x, x, x, x, config, PEAK), x.device)
    make_slots = _slots(x, config, rounding)
    some = x.numel() > 0

    def call(*args: Any, **kwargs: Any) -> Any:
        given = operands(*args, **kwargs)
        kind, x, residual, weight, bias, _, how = given
        y, h, scale = _outputs(given)
        if some:
            slots = make_slots()
            tensors = (
                x,
                x if residual is None else residual,
                x if weight is None else weight,
                x if bias is None else bias,
                y,
                h,
                scale,
                x if slots is None else slots,
            )
            if look is not None:
                look(*tensors, *sizes)
            start(*tensors, *sizes)
        if how is None or kind == "scaled":
            return y if residual is None else (y, h)
        return (y, scale) if residual is None else (y, scale, h)

    return call


# triton 3.6 gives a buffer load no cache bits there, whatever the cache modifier says (read in the machine code)
LOADS_ARE_CACHED = tuple(ARCHS[name] for name in ("gfx90a", "gfx1100", "gfx1201"))
# columns (narrow with several rows a program, odd, common, held whole or split in few, split in many) for compile tests
COMPILE_COLUMNS = (64, 1000, 4096, 65536, 262144)


def _compile_case(given: Operands, arch: Arch, config: Config | None, rows: int = 0) -> _rows.Launch:
    x, how = given.x, given.how
    rounding = () if how is None else (how.granularity, how.scale is not None)
    shape = _Shape(given.kind, dtype_name(x), given.residual is not None, *rounding)
    slots = torch.empty(1, dtype=torch.int64, device="meta")
    chosen = config or _config(rows, x.shape[-1], shape, arch)
    return _launch(given, *_outputs(given), slots, chosen, _rounding(how), arch)
