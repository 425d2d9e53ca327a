"""Cases of the row ops: example calls to compile and emulate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.quantized as _quantized
from wavecrest.dispatch.keys import dtype_name, name_of
from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.ops.rows.call import RowCall, Spec
from wavecrest.ops.rows.config import Shape, configured
from wavecrest.ops.rows.launch import bind_outputs, launch, rounding_of

# columns (narrow with several rows a program, odd, common, held whole or split in few, split in many) for compile tests
COMPILE_COLUMNS = (64, 1000, 4096, 65536, 262144)
# vectors [N] that each kind has: weight, bias
_VECTORS = {"rms": 1, "layer": 2}
_EPS = {"rms": 1e-6, "layer": 1e-5}


def _call(spec: Spec, rows: list[torch.Tensor], vectors: list[torch.Tensor], **options: Any) -> RowCall:
    """The op's call with default options, except those given."""
    if spec.quantized:
        options = {"dtype": spec.dtypes[0]} | options
    residual = rows[1] if spec.residual else None
    weight, bias = (*vectors, None, None)[:2]
    return RowCall(
        spec.kind, rows[0], residual, weight, bias, _EPS.get(spec.kind, 0.0), keeps_sum=spec.keeps_sum, **options
    )


def inputs(spec: Spec, M: int, N: int, dtype: torch.dtype, device: str) -> RowCall:
    """A call on random [M, N]; dequantization of random int8 to `dtype` with a scale a row."""
    if spec.kind == "scaled":
        q = torch.randint(-127, 128, (M, N), dtype=torch.int8, device=device)
        return RowCall("scaled", q, dtype=dtype, scale=torch.rand(M, 1, device=device))
    rows = [torch.randn(M, N, dtype=dtype, device=device) for _ in range(2 if spec.residual else 1)]
    vectors = [torch.randn(N, dtype=dtype, device=device) for _ in range(_VECTORS.get(spec.kind, 0))]
    return _call(spec, rows, vectors)


def compile_cases(spec: Spec, arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    """The launches that are held to a budget, by name."""
    cases = {}
    for columns in COMPILE_COLUMNS:
        row = torch.empty(64, columns, dtype=torch.bfloat16, device="meta")
        if spec.kind == "scaled":
            for granularity in _quantized.GRANULARITIES:
                scale = row.new_empty(_quantized.scale_shape(row.shape, granularity), dtype=torch.float32)
                call = RowCall("scaled", row.to(torch.int8), dtype=torch.bfloat16, scale=scale)
                cases[f"N={columns} {granularity}"] = _compiled(call, arch, config)
            continue
        call = _call(spec, [row, row], [row[0]] * _VECTORS.get(spec.kind, 0))
        cases[f"N={columns}"] = _compiled(call, arch, config)
        if columns == 4096 and spec.kind == "identity":
            cases["N=4096 few rows"] = _compiled(call, arch, config, rows=16)
        if spec.quantized and columns in (1000, 4096):
            grouped = call._replace(dtype=torch.int8, granularity="group")
            cases[f"N={columns} group"] = _compiled(grouped, arch, config)
    return cases


def _compiled(call: RowCall, arch: Arch, config: Config | None, rows: int = 0) -> _launcher.Launch:
    x, how = call.x, call.quantization
    rounding = () if how is None else (how.granularity, how.scale is not None)
    shape = Shape(call.kind, dtype_name(x), call.residual is not None, *rounding)
    slots = torch.empty(1, dtype=torch.int64, device="meta")
    chosen = config or configured(rows, x.shape[-1], shape, arch)
    return launch(call, *bind_outputs(call)(call), slots, chosen, rounding_of(how), arch)


def emulate_cases(spec: Spec, arch: str) -> dict[str, Callable[[], RowCall]]:
    """Calls that are emulated beside the standard shapes, by name."""

    def with_options(M: int, N: int, **options: Any) -> Callable[[], RowCall]:
        return lambda: inputs(spec, M, N, torch.bfloat16, "cpu")._replace(**options)

    cases = {"split": with_options(1, 70000)}
    if not spec.quantized or spec.kind == "scaled":
        return cases
    cases["group"] = with_options(3, 300, granularity="group")
    cases["given for the tensor"] = with_options(3, 300, granularity="tensor", scale=torch.tensor(0.02))
    if spec.kind == "identity":
        cases["tensor"] = with_options(3, 300, granularity="tensor")
        cases["given per row"] = with_options(3, 300, granularity="token", scale=torch.full((3, 1), 0.02))
        cases["given per group"] = with_options(3, 300, granularity="group", scale=torch.full((3, 3), 0.02))
    for dtype in spec.dtypes if len(spec.dtypes) > 1 else ():
        if dtype == torch.int8 or arch in _quantized.KERNEL_ARCHS[name_of(dtype)]:
            cases[name_of(dtype)] = with_options(3, 300, dtype=dtype)
    return cases
