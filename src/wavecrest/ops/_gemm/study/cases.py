"""The product's cases for compilation, emulation and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops._gemm.config as _config
import wavecrest.ops._gemm.launch as _launch
import wavecrest.ops._gemm.launch_gemv as _multiply
import wavecrest.ops._gemm.launch_hopper as _hopper
import wavecrest.ops.common.launcher as _launcher
from wavecrest.dispatch.tuned import Cell, Config
from wavecrest.hardware import ARCHS, Arch
from wavecrest.ops._gemm.call import GATED, SCALE_BLOCK, Operands
from wavecrest.ops._gemm.key import key_of, shape_of

Cases = dict[str, Callable[[], tuple[Any, ...]]]

# [N, K] of the linear layers of Llama 3 8B (qkv, out, gate + up, down) and 70B
WEIGHTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
LARGE_WEIGHTS = ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))


def _operands(M: int, N: int, K: int, dtype: torch.dtype, weight: torch.dtype | None = None, **more: Any) -> Operands:
    a = torch.empty(M, K, dtype=dtype, device="meta")
    return Operands(a, torch.empty(N, K, dtype=weight or dtype, device="meta").mT, **more)


def _scale(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")


def compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    """Every algorithm and every path of the loop, at the sizes of a 8B model's layers; see `Op`."""
    bf16, i8 = torch.bfloat16, torch.int8
    f8 = torch.float8_e4m3fnuz if arch.fp8 == "e4m3fnuz" else torch.float8_e4m3fn
    given: dict[str, tuple[_launch.Planner, Callable[..., Config], Operands]] = {}

    def add(name: str, what: Operands, planner: _launch.Planner = _launch.tiles, make: Any = _config.tiled) -> None:
        given[name] = planner, make, what

    add("large bf16", _operands(4096, 6144, 4096, bf16))
    add("large fp16 bias silu", _operands(4096, 6144, 4096, torch.float16, bias=_scale(6144), activation="silu"))
    add("large fp32", _operands(4096, 6144, 4096, torch.float32))
    add("large int8", _operands(4096, 6144, 4096, i8, scale_a=_scale(4096), scale_b=_scale(6144)))
    add("gated bf16", _operands(4096, 28672, 4096, bf16, activation="silu_and_mul"))
    add("rows=64 bf16", _operands(64, 6144, 4096, bf16))
    add("rows=16 bf16", _operands(16, 6144, 4096, bf16))
    add("rows=16 weight int8", _operands(16, 6144, 4096, bf16, i8, scale_b=_scale(6144)))
    int4 = torch.empty(6144, 2048, dtype=torch.uint8, device="meta").mT
    a16 = torch.empty(16, 4096, dtype=bf16, device="meta")
    add("rows=16 weight int4", Operands(a16, int4, scale_b=_scale(32, 6144), form="int4", group=128))
    gain = torch.empty(4096, dtype=bf16, device="meta")
    add("rows=16 norm bf16", _operands(16, 6144, 4096, bf16, norm_weight=gain))
    add("odd sizes bf16", _operands(1000, 1001, 1003, bf16))
    add("rows=1 multiply bf16", _operands(1, 6144, 4096, bf16), _multiply.multiply, _config.multiplied)
    a1 = torch.empty(1, 4096, dtype=bf16, device="meta")
    codes = Operands(a1, int4, scale_b=_scale(32, 6144), form="int4", group=128)
    add("rows=1 multiply weight int4", codes, _multiply.multiply, _config.multiplied)
    normed = _operands(1, 6144, 4096, bf16, norm_weight=gain)
    add("rows=1 norm multiply bf16", normed, _multiply.multiply, _config.multiplied)
    add("rows=1 norm multiply weight int4", codes._replace(norm_weight=gain), _multiply.multiply, _config.multiplied)
    tail = torch.empty(16, 4096, dtype=bf16, device="meta").mT
    tailed = _operands(1, 6144, 4096, bf16, i8, scale_b=_scale(6144), norm_weight=gain, tail=tail)
    add("rows=1 norm multiply weight int8 tail", tailed, _multiply.multiply, _config.multiplied)
    add("stream-K bf16", _operands(4096, 6144, 4096, bf16), _launch.stream, _config.stream_k)
    if arch.fp8 is not None:
        add("large fp8", _operands(4096, 6144, 4096, f8, scale_a=_scale(), scale_b=_scale()))
        blocks = _operands(4096, 6144, 4096, f8, scale_a=_scale(4096, 32), scale_b=_scale(32, 48))
        add("large fp8 blocks", blocks)
    cases = {}
    for name, (planner, make, what) in given.items():
        chosen = config or make(shape_of(key_of(what)), arch)
        y = what.a.new_empty(0, dtype=what.dtype)
        parts = what.a.new_empty(0, dtype=torch.int32 if what.integers else torch.float32)
        plan = planner(what, y, parts, chosen, arch, bool(chosen.kwargs.get("TMA")))
        cases[name] = plan.first
        if plan.second is not None:
            cases[f"{name} sum"] = plan.second
    if arch.name == "sm_90" and config is None:
        for dtype, kind in ((bf16, "silu_and_mul"), (torch.float16, "gelu_and_mul")):
            what = _operands(4096, 28672, 4096, dtype, activation=kind)
            y = what.a.new_empty(what.shape, dtype=dtype)
            cases[f"hopper {kind} {'bf16' if dtype == bf16 else 'fp16'}"] = _hopper.launch(
                what, y, _hopper.default(), arch
            )
    return cases


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, dtype=dtype, device=device)
    return torch.randn(shape, device=device).to(dtype)


def emulate_cases(arch: str) -> Cases:
    """Each type of products, scales, codes, epilogues, a batch; ragged in M, N and K."""

    def args(a: Tensor, b: Tensor, **more: Any) -> tuple[Any, ...]:
        return tuple(Operands(a, b, **more))

    def int4(group: int) -> tuple[Any, ...]:
        stored = torch.randint(0, 256, (72, 64), dtype=torch.uint8).mT
        return args(_random(5, 100), stored, scale_b=torch.rand(128 // group, 72), form="int4", group=group)

    def plain(dtype: torch.dtype) -> Callable[[], tuple[Any, ...]]:
        return lambda: args(_random(33, 100, dtype=dtype), _random(72, 100, dtype=dtype).mT)

    float8 = torch.float8_e4m3fnuz if ARCHS[arch].fp8 == "e4m3fnuz" else torch.float8_e4m3fn
    types = [torch.bfloat16, torch.float16, torch.float32, torch.int8, *([float8] if ARCHS[arch].fp8 else [])]
    more: Cases = {}
    if arch == "sm_90":
        # its own kernel, which the others here have no rows for; more steps than it has stages
        more["gated, whole rows"] = lambda: args(
            _random(200, 520), _random(272, 520).mT, activation="silu_and_mul", alpha=0.05
        )
    return more | {
        **{str(dtype).removeprefix("torch."): plain(dtype) for dtype in types},
        "few rows, long sums": lambda: args(_random(3, 700), _random(40, 700).mT),
        "bias, silu, residual": lambda: args(
            _random(33, 100), _random(72, 100).mT, bias=_random(72), activation="silu", residual=_random(33, 72)
        ),
        "gated": lambda: args(_random(33, 100), _random(72, 100).mT, activation="silu_and_mul"),
        "int8, scales": lambda: args(
            _random(33, 100, dtype=torch.int8), _random(72, 100, dtype=torch.int8).mT,
            scale_a=torch.rand(33), scale_b=torch.rand(72),
        ),
        "weight int8": lambda: args(_random(5, 100), _random(72, 100, dtype=torch.int8).mT, scale_b=torch.rand(72)),
        "weight int8, whole rows": lambda: args(
            _random(3, 544), _random(24, 544, dtype=torch.int8).mT, scale_b=torch.rand(24)
        ),
        "weight int4": partial(int4, 32),
        "weight int4, groups of 64": partial(int4, 64),
        # of float32, which kernels over tiles do not round between norm and product
        "norm": lambda: args(
            _random(5, 100, dtype=torch.float32), _random(72, 100, dtype=torch.float32).mT, norm_weight=_random(100)
        ),
        "tail": lambda: args(
            _random(3, 100), _random(72, 100, dtype=torch.int8).mT, scale_b=torch.rand(72), bias=_random(75),
            tail=_random(3, 100).mT,
        ),
        "batch": lambda: args(_random(3, 20, 64), _random(3, 64, 40)),
    }  # fmt: skip


def _made(M: int, N: int, K: int, kind: str, device: str) -> tuple[Any, ...]:
    """The arguments of a benchmark's case; values such that results are about 1, as in a model."""
    unit = K**-0.5
    if kind == "int8":
        a, w = _random(M, K, dtype=torch.int8, device=device), _random(N, K, dtype=torch.int8, device=device)
        scale_a, scale_b = torch.rand(M, device=device) / 64, torch.rand(N, device=device) * unit / 64
        return tuple(Operands(a, w.mT, scale_a=scale_a, scale_b=scale_b))
    if kind == "fp8":
        a, w = (_random(rows, K, dtype=torch.float8_e4m3fn, device=device) for rows in (M, N))
        one = torch.ones((), device=device)
        return tuple(Operands(a, w.mT, scale_a=one, scale_b=one * unit))
    a = _random(M, K, dtype=torch.float16 if kind == "fp16" else torch.bfloat16, device=device)
    if kind == "weight int8":
        w = _random(N, K, dtype=torch.int8, device=device)
        return tuple(Operands(a, w.mT, scale_b=torch.rand(N, device=device) * unit / 64))
    if kind == "weight int4":
        w = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device=device)
        scale = torch.rand(K // 128, N, device=device) * unit / 4
        return tuple(Operands(a, w.mT, scale_b=scale, form="int4", group=128))
    w = torch.randn(N, K, device=device) * unit
    return tuple(Operands(a, w.to(a.dtype).mT))


def bench_cases(suite: str, device: str) -> Cases:
    """Layers of 8B and 70B models, from one row to 4,096, and squares; `quick` has three of them."""
    cases: Cases = {}

    def add(M: int, N: int, K: int, kind: str = "bf16") -> None:
        cases[f"{M}x{N}x{K} {kind}"] = partial(_made, M, N, K, kind, device)

    if suite == "quick":
        add(1, 4096, 4096)
        add(16, 4096, 4096, "weight int4")
        add(256, 1024, 1024)
        return cases
    for M in (1, 4, 16, 64, 256, 1024, 4096):
        for N, K in WEIGHTS:
            add(M, N, K)
    for M in (1, 16, 64):
        for N, K in LARGE_WEIGHTS:
            add(M, N, K)
    for size in (1024, 2048, 4096, 8192):
        add(size, size, size)
        add(size, size, size, "fp16")
        add(size, size, size, "int8")
        add(size, size, size, "fp8")
    for M in (1, 16):
        for N, K in WEIGHTS:
            add(M, N, K, "weight int8")
            add(M, N, K, "weight int4")
    for M in (256, 1024, 4096):
        for N, K in WEIGHTS:
            add(M, N, K, "int8")
            add(M, N, K, "fp8")
    return cases


def call_of_key(parts: Mapping[str, Cell], device: str) -> tuple[Any, ...] | None:
    """A call with this key, if it is a plain or a 4-bit product of two matrices, or with a tail; see `Op`."""
    rows, results, k, group = (int(parts[name] or 0) for name in ("rows", "columns", "k", "group"))
    form, _, tails = str(parts["form"]).partition(" tail ")
    if parts["batch"] != 0 or form not in ("plain", "int4") or min(rows, results, k) < 1:
        return None
    activation = None if parts["activation"] is None else str(parts["activation"])
    columns = 2 * results if activation in GATED else results - int(tails or 0)
    a_dtype, b_dtype, out = (_dtype(parts[name]) for name in ("a", "b", "out"))
    a = _random(rows, k, dtype=a_dtype, device=device)
    if form == "int4":
        b = torch.randint(0, 256, (columns, k // 2), dtype=torch.uint8, device=device).mT
    elif str(parts["order"]).split()[1] == "n":
        b = _random(k, columns, dtype=b_dtype, device=device)
    else:
        b = _random(columns, k, dtype=b_dtype, device=device).mT
    # a scale for each of these many rows of a, or columns of b
    blocks = -(-k // SCALE_BLOCK)
    shapes: dict[tuple[str, str], tuple[int, ...]] = {
        ("a", "tensor"): (), ("b", "tensor"): (), ("a", "vector"): (rows,), ("b", "vector"): (columns,),
        ("a", "block"): (rows, blocks), ("b", "block"): (blocks, -(-columns // SCALE_BLOCK)),
        ("b", "group"): (-(-k // group) if group else 0, columns),
    }  # fmt: skip
    kinds = zip("ab", str(parts["scales"]).split(), strict=True)
    scales = [shapes.get(kind) for kind in kinds]
    scale_a, scale_b = (None if shape is None else torch.rand(shape, device=device) for shape in scales)
    wide = a_dtype if a_dtype.itemsize > 1 else torch.bfloat16
    # about 1, as those of trained models
    normed = str(parts["scales"]).startswith("norm")
    norm_weight = 1 + _random(k, dtype=wide, device=device) / 8 if normed else None
    along = None if parts["bias"] is None else str(parts["bias"])
    tail = _random(int(tails), k, dtype=a_dtype, device=device).mT if tails else None
    bias = None
    if along is not None:
        bias = _random(rows if along == "m" else columns + int(tails or 0), dtype=wide, device=device)
    residual = _random(rows, results, dtype=wide, device=device) if parts["residual"] else None
    given = Operands(
        a, b, bias, scale_a, scale_b, residual, activation, out, bias_along=along or "n",
        precision=str(parts["precision"]), form=form, group=group, norm_weight=norm_weight, tail=tail,
    )  # fmt: skip
    return tuple(given)


def _dtype(name: Cell) -> torch.dtype:
    found: torch.dtype = getattr(torch, str(name))
    return found
