"""What makes an op of the row kernel: its oracle, its checks, its key and its cost."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

import wavecrest.ops.common.checks as _checks
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.layout as _layout
import wavecrest.ops.common.quantized as _quantized
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.registry import Cost, Key, Op, dtype_name, m_bucket, needs_grad
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import InvalidArgument
from wavecrest.hardware import Arch
from wavecrest.ops.common.quantized import Quantization
from wavecrest.ops.rows.config import Shape, configured, work
from wavecrest.ops.rows.launch import COMPILE_COLUMNS, Operands, bind, compile_case

__all__ = ["Operands", "register"]


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

    def compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
        cases = {}
        for columns in COMPILE_COLUMNS:
            row = torch.empty(64, columns, dtype=torch.bfloat16, device="meta")
            if kind == "scaled":
                for granularity in _quantized.GRANULARITIES:
                    scale = row.new_empty(_quantized.scale_shape(row.shape, granularity), dtype=torch.float32)
                    given = operands(row.to(torch.int8), scale)
                    cases[f"N={columns} {granularity}"] = compile_case(given, arch, config)
                continue
            given = operands(*((row, row) if residual else (row,)), *(row[0] for _ in range(vectors)))
            cases[f"N={columns}"] = compile_case(given, arch, config)
            if columns == 4096 and kind == "identity":
                cases["N=4096 few rows"] = compile_case(given, arch, config, rows=16)
            if quantized and columns in (1000, 4096):
                grouped = given._replace(how=Quantization(torch.int8, "group", None))
                cases[f"N={columns} group"] = compile_case(grouped, arch, config)
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

    def shape_of(key: Key) -> Shape:
        return Shape(kind, key[2], residual, *((key[-2], key[-1]) if quantized else ()))

    op = Op(
        name,
        reference=of(_reference),
        check=of(lambda given: _check(name, given, residual, dtypes)),
        key=of(_key),
        key_fields=KEY_FIELDS + (QUANTIZED_FIELDS if quantized else ()),
        inputs=inputs,
        cost=of(_cost),
        default_config=lambda key: configured(key[0], key[1], shape_of(key), _target.arch()),
        compile_cases=compile_cases,
        emulate_cases=emulate_cases,
        op_class="quantized" if quantized else "row",
    )
    _launcher.attach_kernel(
        op, lambda *args, config, **kwargs: bind(operands, args, kwargs, config), of(_declines), of(_reserved),
        # one configuration, the architecture's
        space=lambda key, arch: (configured(key[0], key[1], shape_of(key), arch),),
        work=lambda key, config, arch: work(shape_of(key), key[0], key[1], config, arch),
        optional=("EARLY",),
    )  # fmt: skip
    return op


def _check(op: str, given: Operands, residual: bool, dtypes: tuple[torch.dtype, ...]) -> None:
    x, how = given.x, given.how
    if given.kind == "scaled":
        _quantized.check_dequantize(op, x, how)
        return
    _checks.check_rows(op, x)
    if residual:
        _checks.check_same(op, "residual", given.residual, x)
    if given.weight is not None:
        _checks.check_vector(op, "weight", given.weight, x)
    if given.bias is not None:
        _checks.check_vector(op, "bias", given.bias, x)
    _checks.check_eps(op, given.eps)
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
        m_bucket(_layout.row_count(x)),
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
    return _layout.leading(given.x) if given.residual is None else _layout.leading(given.x, given.residual)


def _declines(given: Operands) -> str | None:
    x, how = given.x, given.how
    dtype = dtype_name(x)
    if how is not None:
        eight_bits, dtype = (x.dtype, _name(how.dtype)) if given.kind == "scaled" else (how.dtype, dtype)
        reason: str | None = _quantized.kernel_refusal(eight_bits)
        if reason is not None:
            return reason
    return _checks.kernel_refusal(dtype, x.device.type, _leading(given), _needs_grad(given))


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
    h = x if given.residual is None else (_checks.widen(x) + _checks.widen(given.residual)).to(x.dtype)
    y = _checks.widen(h)
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
