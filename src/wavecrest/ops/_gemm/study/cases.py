"""Cases of gemm: example calls to compile, benchmark and emulate, and their cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import wavecrest.ops._gemm.config as _config
import wavecrest.ops._gemm.launch as _launch
import wavecrest.ops._gemm.launch_cdna as _cdna
import wavecrest.ops._gemm.launch_gemv as _gemv
import wavecrest.ops._gemm.launch_hopper as _hopper
import wavecrest.ops._gemm.launch_hopper_blocks as _blocks
import wavecrest.ops._gemm.launch_hopper_words as _words
import wavecrest.ops.common.launcher as _launcher
import wavecrest.ops.common.target as _target
from wavecrest.dispatch.decision import Cost
from wavecrest.dispatch.tuned import Cell, Config
from wavecrest.hardware import ARCHS, Arch
from wavecrest.ops._gemm.call import FAST_ACCUM, FORMATS, GATED, NIBBLES, SCALE_BLOCK, GemmCall
from wavecrest.ops._gemm.key import key_of, shape_of
from wavecrest.ops._gemm.reference import values_of_b
from wavecrest.ops.common.quantized import float8_of

Cases = dict[str, Callable[[], GemmCall]]

# [N, K] of the linear layers of Llama 3 8B (qkv, out, gate + up, down) and 70B
WEIGHTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
LARGE_WEIGHTS = ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))


def inputs(M: int, N: int, K: int, dtype: torch.dtype, device: str) -> GemmCall:
    """a [M, K], and b [K, N] as the transpose of a weight [N, K]."""
    if dtype == torch.int8:
        a, weight = (torch.randint(-127, 128, (rows, K), dtype=dtype, device=device) for rows in (M, N))
    else:
        a, weight = (torch.randn(rows, K, device=device).to(dtype) for rows in (M, N))
    return GemmCall(a, weight.mT)


def cost(call: GemmCall) -> Cost:
    """Two operations a product of two numbers; each tensor read once, the result written once."""
    operands = (
        call.a, call.b, call.bias, call.scale_a, call.scale_b, call.residual, call.zero, call.norm_weight, call.tail
    )  # fmt: skip
    read = sum(tensor.nbytes for tensor in operands if tensor is not None)
    written = math.prod(call.shape) * call.dtype.itemsize
    return Cost(flops=2 * call.M * call.columns * call.K * call.batches, bytes=read + written)


def unpacked(call: GemmCall) -> GemmCall:
    """The same GEMM with a packed weight as a plain one of a's dtype."""
    if call.form == "plain" and not call.weight_only:
        return call
    weight = values_of_b(call).to(call.a.dtype).mT.contiguous()
    return call._replace(b=weight.mT, scale_b=None, zero=None, form="plain", group=0, tail=None)


def _empty(M: int, N: int, K: int, dtype: torch.dtype, weight: torch.dtype | None = None, **more: Any) -> GemmCall:
    a = torch.empty(M, K, dtype=dtype, device="meta")
    return GemmCall(a, torch.empty(N, K, dtype=weight or dtype, device="meta").mT, **more)


def _scale(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="meta")


def compile_cases(arch: Arch, config: Config | None = None) -> dict[str, _launcher.Launch]:
    """Every algorithm and every path of the loop, at the sizes of an 8B model's layers; see `Study`."""
    bf16, i8 = torch.bfloat16, torch.int8
    f8 = float8_of(arch)
    planned: dict[str, tuple[_launch.Planner, Callable[..., Config], GemmCall]] = {}

    def add(name: str, what: GemmCall, planner: _launch.Planner = _launch.tiles, make: Any = _config.tiled) -> None:
        planned[name] = planner, make, what

    add("large bf16", _empty(4096, 6144, 4096, bf16))
    add("large fp16 bias silu", _empty(4096, 6144, 4096, torch.float16, bias=_scale(6144), activation="silu"))
    add("large fp32", _empty(4096, 6144, 4096, torch.float32))
    add("large int8", _empty(4096, 6144, 4096, i8, scale_a=_scale(4096), scale_b=_scale(6144)))
    add("gated bf16", _empty(4096, 28672, 4096, bf16, activation="silu_and_mul"))
    add("rows=64 bf16", _empty(64, 6144, 4096, bf16))
    add("rows=16 bf16", _empty(16, 6144, 4096, bf16))
    add("rows=16 weight int8", _empty(16, 6144, 4096, bf16, i8, scale_b=_scale(6144)))
    int4 = torch.empty(6144, 2048, dtype=torch.uint8, device="meta").mT
    a16 = torch.empty(16, 4096, dtype=bf16, device="meta")
    add("rows=16 weight int4", GemmCall(a16, int4, scale_b=_scale(32, 6144), form="int4", group=128))
    mxfp4: dict[str, Any] = {"scale_b": _scale(128, 6144).to(torch.uint8), "form": "mxfp4", "group": 32}
    add("rows=16 weight mxfp4", GemmCall(a16, int4, **mxfp4))
    add("rows=16 weight mxfp4 fp16", GemmCall(a16.half(), int4, **mxfp4))
    add("large weight mxfp4", GemmCall(torch.empty(4096, 4096, dtype=bf16, device="meta"), int4, **mxfp4))
    gain = torch.empty(4096, dtype=bf16, device="meta")
    add("rows=16 norm bf16", _empty(16, 6144, 4096, bf16, norm_weight=gain))
    add("odd sizes bf16", _empty(1000, 1001, 1003, bf16))
    add("rows=1 multiply bf16", _empty(1, 6144, 4096, bf16), _gemv.gemv, _config.gemv)
    a1 = torch.empty(1, 4096, dtype=bf16, device="meta")
    few = GemmCall(a1, int4, scale_b=_scale(32, 6144), form="int4", group=128)
    add("rows=1 multiply weight int4", few, _gemv.gemv, _config.gemv)
    add("rows=1 multiply weight mxfp4", GemmCall(a1, int4, **mxfp4), _gemv.gemv, _config.gemv)
    normed = _empty(1, 6144, 4096, bf16, norm_weight=gain)
    add("rows=1 norm multiply bf16", normed, _gemv.gemv, _config.gemv)
    add("rows=1 norm multiply weight int4", few._replace(norm_weight=gain), _gemv.gemv, _config.gemv)
    tail = torch.empty(16, 4096, dtype=bf16, device="meta").mT
    tailed = _empty(1, 6144, 4096, bf16, i8, scale_b=_scale(6144), norm_weight=gain, tail=tail)
    add("rows=1 norm multiply weight int8 tail", tailed, _gemv.gemv, _config.gemv)
    add("stream-K bf16", _empty(4096, 6144, 4096, bf16), _launch.stream, _config.stream_k)
    if arch.fp8 is not None:
        add("large fp8", _empty(4096, 6144, 4096, f8, scale_a=_scale(), scale_b=_scale()))
        blocks = _empty(4096, 6144, 4096, f8, scale_a=_scale(4096, 32), scale_b=_scale(32, 48))
        add("large fp8 blocks", blocks)
    if arch.name == "sm_90":
        fast = _empty(4096, 6144, 4096, f8, scale_a=_scale(), scale_b=_scale(), precision=FAST_ACCUM)
        add("large fp8 fast_accum", fast)
        add("large fp32 tf32x3", _empty(4096, 6144, 4096, torch.float32, precision="tf32x3"))
        add("rows=64 fp32 tf32x3", _empty(64, 6144, 4096, torch.float32, precision="tf32x3"))
    cases = {}
    for name, (planner, make, what) in planned.items():
        chosen = config or make(shape_of(key_of(what)), arch)
        y = what.a.new_empty(0, dtype=what.dtype)
        parts = what.a.new_empty(0, dtype=torch.int32 if what.integers else torch.float32)
        plan = planner(what, y, parts, chosen, arch, bool(chosen.kwargs.get("TMA")))
        cases[name] = plan.first
        if plan.second is not None:
            cases[f"{name} sum"] = plan.second
    if arch.name == "sm_90" and config is None:
        fp16 = torch.float16
        own = {
            "hopper silu_and_mul bf16": _empty(4096, 28672, 4096, bf16, activation="silu_and_mul"),
            "hopper gelu_and_mul fp16": _empty(4096, 28672, 4096, fp16, activation="gelu_and_mul"),
            "hopper bf16": _empty(4096, 6144, 4096, bf16),
            "hopper bias gelu fp16": _empty(
                4096, 6144, 4096, fp16, bias=torch.empty(6144, dtype=fp16, device="meta"), activation="gelu"
            ),
        }
        for name, what in own.items():
            y = what.a.new_empty(what.shape, dtype=what.dtype)
            cases[name] = _hopper.launch(what, y, _config.hopper(), arch)
            name = name.replace("hopper", "hopper epilogue")
            cases[name] = _hopper.launch_epilogue(what, y, _config.hopper_epilogue(), arch)
        cases |= _block_cases(f8, arch) | _words_cases(arch)
    if arch.name in _cdna.FLOAT8 and config is None:
        own = {
            "cdna fp8": _empty(4096, 6144, 4096, f8, scale_a=_scale(), scale_b=_scale()),
            "cdna fp8 scales bias silu, ragged steps": _empty(
                4096, 6144, 4112, f8, scale_a=_scale(4096), scale_b=_scale(6144), bias=_scale(6144), activation="silu"
            ),
        }
        if arch.name == _cdna.ARCH:
            own["cdna bf16"] = _empty(4096, 6144, 4096, bf16)
            own["cdna fp16 bias silu, ragged steps"] = _empty(
                4096, 6144, 4104, torch.float16, bias=_scale(6144), activation="silu"
            )
        for name, what in own.items():
            made = _config.cdna_default(shape_of(key_of(what)), arch)
            cases[name] = _cdna.launch(what, what.a.new_empty(what.shape, dtype=what.dtype), made, arch)
    return cases


def _blocked(M: int, N: int, K: int, dtype: torch.dtype, **more: Any) -> GemmCall:
    """8-bit floats, with scales by block as a layer has them."""
    scale_b = _scale(math.ceil(N / SCALE_BLOCK), math.ceil(K / SCALE_BLOCK)).mT
    return _empty(M, N, K, dtype, scale_a=_scale(M, math.ceil(K / SCALE_BLOCK)), scale_b=scale_b, **more)


def _block_cases(f8: torch.dtype, arch: Arch) -> dict[str, _launcher.Launch]:
    """`triton_hopper_blocks`: both widths, gate and up, and parts of K."""
    bias = torch.empty(6144, dtype=torch.float16, device="meta")
    own: dict[str, GemmCall] = {
        "hopper blocks": _blocked(4096, 6144, 4096, f8),
        "hopper blocks narrow bias gelu fp16": _blocked(
            4096, 6144, 4096, f8, bias=bias, activation="gelu", out_dtype=torch.float16
        ),
        "hopper blocks silu_and_mul": _blocked(4096, 28672, 4096, f8, activation="silu_and_mul"),
        "hopper blocks rows=16 parts": _blocked(16, 4096, 4096, f8),
        "hopper blocks rows=128 parts": _blocked(128, 2048, 7168, f8),
    }
    cases = {}
    for name, what in own.items():
        chosen = _config.hopper_blocks_of(shape_of(key_of(what)), arch)
        if "narrow" in name:
            chosen = _config.hopper_blocks()
        parts = _blocks.parts(what, chosen)
        y = what.a.new_empty(what.shape, dtype=what.dtype)
        sums = y if parts is None else y.new_empty(parts, dtype=torch.float32)
        cases[name] = _blocks.launches(what, y, sums, chosen, arch)[0]
    return cases


def _words_cases(arch: Arch) -> dict[str, _launcher.Launch]:
    """`triton_hopper_words`: both widths of weights, gate and up, and all that may follow a sum."""
    bf16, fp16 = torch.bfloat16, torch.float16

    def int4(M: int, N: int, dtype: torch.dtype, **more: Any) -> GemmCall:
        b = torch.empty(N, 2048, dtype=torch.uint8, device="meta").mT
        a = torch.empty(M, 4096, dtype=dtype, device="meta")
        return GemmCall(a, b, scale_b=_scale(N, 32).mT, form="int4", group=128, **more)

    residual = torch.empty(8, 4096, dtype=fp16, device="meta")
    bias = torch.empty(4096, dtype=fp16, device="meta")
    own = {
        "hopper words int4 norm": int4(1, 6144, bf16, norm_weight=torch.empty(4096, dtype=bf16, device="meta")),
        "hopper words int4 silu_and_mul": int4(1, 28672, bf16, activation="silu_and_mul"),
        "hopper words rows=8 int4 fp16 bias residual": int4(8, 4096, fp16, bias=bias, residual=residual),
        "hopper words int8 long rows": _empty(1, 4096, 14336, bf16, torch.int8, scale_b=_scale(4096)),
        "hopper words rows=8 int8 fp16 bias residual": _empty(
            8, 4096, 4096, fp16, torch.int8, scale_b=_scale(4096), bias=bias, residual=residual
        ),
    }
    # by default one row that is not long has programs that stay: these are of the kernel of a program a tile
    others = {
        "hopper words int4 norm": _config.hopper_words(),
        "hopper words int4 silu_and_mul": _config.hopper_words(ahead=1),
    }
    cases = {}
    for name, what in own.items():
        chosen = others.get(name) or _config.hopper_words_of(shape_of(key_of(what)), arch)
        digits = torch.empty(_words.size_of_digits(what), dtype=torch.int8, device="meta")
        y = what.a.new_empty(what.shape, dtype=what.dtype)
        first, cases[name] = _words.launches(what, digits, y, chosen, arch)
        if name in ("hopper words int4 norm", "hopper words int8 long rows"):
            cases[f"{name}, digits"] = first
    for name, stay in (
        ("int4 norm", None),
        ("int4 silu_and_mul", None),
        ("int8 long rows", _config.hopper_words(16, 16, 1, programs=1)),
    ):
        what = own[f"hopper words {name}"]
        y = what.a.new_empty(what.shape, dtype=what.dtype)
        stay = stay or _config.hopper_words_of(shape_of(key_of(what)), arch)
        (cases[f"hopper row {name}"],) = _words.launches(what, what.a, y, stay, arch)
    return cases


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, dtype=dtype, device=device)
    return torch.randn(shape, device=device).to(dtype)


def _whole_tiles(M: int, N: int, K: int, dtype: torch.dtype) -> GemmCall:
    """Rows and columns that are parts of longer ones, beside NaN; a bias and an activation, scales of 8 bits."""
    a, w = (torch.full((rows, K + 32), math.nan).to(dtype)[:, 16 : K + 16] for rows in (M, N))
    for x in (a, w):
        x.copy_(_random(*x.shape, dtype=dtype))
    call = GemmCall(a, w.mT, bias=_random(N), activation="silu", alpha=0.05)
    return call._replace(scale_a=torch.rand(M), scale_b=torch.rand(N)) if dtype.itemsize == 1 else call


def emulate_cases(arch: str) -> Cases:
    """Each dtype, kind of scale, epilogue, a 4-bit weight, a batch; ragged in M, N and K."""

    def int4(group: int) -> GemmCall:
        stored = torch.randint(0, 256, (72, 64), dtype=torch.uint8).mT
        return GemmCall(_random(5, 100), stored, scale_b=torch.rand(128 // group, 72), form="int4", group=group)

    def mxfp4(dtype: torch.dtype) -> GemmCall:
        stored = torch.randint(0, 256, (72, 64), dtype=torch.uint8).mT
        # from 2^-127, which is subnormal, to what float16 has no values of
        scale = torch.randint(120, 135, (4, 72), dtype=torch.uint8)
        scale[:, ::9] = 0
        return GemmCall(_random(5, 100, dtype=dtype), stored, scale_b=scale, form="mxfp4", group=32)

    def plain(dtype: torch.dtype) -> Callable[[], GemmCall]:
        return lambda: GemmCall(_random(33, 100, dtype=dtype), _random(72, 100, dtype=dtype).mT)

    float8 = float8_of(ARCHS[arch])
    types = [torch.bfloat16, torch.float16, torch.float32, torch.int8, *([float8] if ARCHS[arch].fp8 else [])]
    more: Cases = {}
    if arch == "sm_90":
        # its own kernel, for more rows than the other cases have; more steps than it has stages
        more["gated, whole rows"] = lambda: GemmCall(
            _random(200, 520), _random(272, 520).mT, activation="silu_and_mul", alpha=0.05
        )
        # and that of block scales
        more["blocks"] = lambda: GemmCall(
            _random(200, 400, dtype=torch.float8_e4m3fn), _random(264, 400, dtype=torch.float8_e4m3fn).mT,
            scale_a=torch.rand(200, 4), scale_b=torch.rand(4, 3),
        )  # fmt: skip
        # and that of words, for whole blocks of K
        stored = torch.randint(0, 256, (40, 640), dtype=torch.uint8).mT
        more["words of int4, gated"] = lambda: GemmCall(
            _random(3, 1280), stored, scale_b=torch.rand(40, 10).mT, form="int4", group=128, activation="silu_and_mul",
            alpha=0.05,
        )  # fmt: skip
        more["words of int8"] = lambda: GemmCall(
            _random(8, 384), _random(40, 384, dtype=torch.int8).mT, scale_b=torch.rand(40), residual=_random(8, 40)
        )
        # one row, by programs that stay
        more["a row of int4, gated, norm"] = lambda: GemmCall(
            _random(1, 1280), stored, scale_b=torch.rand(40, 10).mT, form="int4", group=128, activation="silu_and_mul",
            norm_weight=_random(1280),
        )  # fmt: skip
        more["a row of int8"] = lambda: GemmCall(
            _random(1, 384), _random(40, 384, dtype=torch.int8).mT, scale_b=torch.rand(40), residual=_random(1, 40)
        )
    if arch in _cdna.FLOAT8:
        # its own kernel, for more rows and columns than the other cases have; tiles that share rows or columns
        own = [(float8, (300, 264, 656))]
        if arch == _cdna.ARCH:
            own += [(torch.bfloat16, (300, 259, 392)), (torch.float16, (256, 520, 256))]
        for dtype, (M, N, K) in own:
            more[f"whole tiles, {str(dtype).removeprefix('torch.')}"] = partial(_whole_tiles, M, N, K, dtype)
    return more | {
        **{str(dtype).removeprefix("torch."): plain(dtype) for dtype in types},
        "few rows, long sums": lambda: GemmCall(_random(3, 700), _random(40, 700).mT),
        "bias, silu, residual": lambda: GemmCall(
            _random(33, 100), _random(72, 100).mT, bias=_random(72), activation="silu", residual=_random(33, 72)
        ),
        "gated": lambda: GemmCall(_random(33, 100), _random(72, 100).mT, activation="silu_and_mul"),
        "int8, scales": lambda: GemmCall(
            _random(33, 100, dtype=torch.int8), _random(72, 100, dtype=torch.int8).mT,
            scale_a=torch.rand(33), scale_b=torch.rand(72),
        ),
        "weight int8": lambda: GemmCall(_random(5, 100), _random(72, 100, dtype=torch.int8).mT, scale_b=torch.rand(72)),
        "weight int8, whole rows": lambda: GemmCall(
            _random(3, 544), _random(24, 544, dtype=torch.int8).mT, scale_b=torch.rand(24)
        ),
        "weight int4": partial(int4, 32),
        "weight int4, groups of 64": partial(int4, 64),
        "weight mxfp4": partial(mxfp4, torch.bfloat16),
        "weight mxfp4, float16": partial(mxfp4, torch.float16),
        # in float32, which kernels over tiles do not round between norm and GEMM
        "norm": lambda: GemmCall(
            _random(5, 100, dtype=torch.float32), _random(72, 100, dtype=torch.float32).mT, norm_weight=_random(100)
        ),
        "tail": lambda: GemmCall(
            _random(3, 100), _random(72, 100, dtype=torch.int8).mT, scale_b=torch.rand(72), bias=_random(75),
            tail=_random(3, 100).mT,
        ),
        "batch": lambda: GemmCall(_random(3, 20, 64), _random(3, 64, 40)),
    }  # fmt: skip


def _made(M: int, N: int, K: int, kind: str, device: str) -> GemmCall:
    """The call of a benchmark's case; values such that results are about 1, as in a model."""
    unit = K**-0.5
    if kind == "int8":
        a, w = _random(M, K, dtype=torch.int8, device=device), _random(N, K, dtype=torch.int8, device=device)
        scale_a, scale_b = torch.rand(M, device=device) / 64, torch.rand(N, device=device) * unit / 64
        return GemmCall(a, w.mT, scale_a=scale_a, scale_b=scale_b)
    if kind == "fp8":
        # that of the GPU: its matrix unit takes no other e4m3
        dtype = float8_of(None if torch.device(device).type == "cpu" else _target.arch())
        a, w = (_random(rows, K, dtype=dtype, device=device) for rows in (M, N))
        one = torch.ones((), device=device)
        return GemmCall(a, w.mT, scale_a=one, scale_b=one * unit)
    a = _random(M, K, dtype=torch.float16 if kind == "fp16" else torch.bfloat16, device=device)
    if kind == "weight int8":
        w = _random(N, K, dtype=torch.int8, device=device)
        return GemmCall(a, w.mT, scale_b=torch.rand(N, device=device) * unit / 64)
    if kind == "weight int4":
        w = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device=device)
        scale = torch.rand(N, K // 128, device=device) * unit / 4
        return GemmCall(a, w.mT, scale_b=scale.mT, form="int4", group=128)
    if kind == "weight mxfp4":
        w = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device=device)
        # values are about 3 at a scale of 1
        exponent = 125 - K.bit_length() // 2
        scale = torch.randint(exponent, exponent + 2, (N, K // 32), dtype=torch.uint8, device=device)
        return GemmCall(a, w.mT, scale_b=scale.mT, form="mxfp4", group=32)
    w = torch.randn(N, K, device=device) * unit
    return GemmCall(a, w.to(a.dtype).mT)


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
            add(M, N, K, "weight mxfp4")
    for M in (256, 1024, 4096):
        for N, K in WEIGHTS:
            add(M, N, K, "int8")
            add(M, N, K, "fp8")
    return cases


def call_of_key(parts: Mapping[str, Cell], device: str) -> GemmCall | None:
    """A call with this key, if it is of two matrices; else None (see `Study`).

    A shuffled weight has random numbers, as shuffling them would give others.
    """
    rows, results, k, group = (int(parts[name] or 0) for name in ("rows", "columns", "k", "group"))
    form, _, tails = str(parts["form"]).partition(" tail ")
    if parts["batch"] != 0 or form not in FORMATS or min(rows, results, k) < 1:
        return None
    activation = None if parts["activation"] is None else str(parts["activation"])
    columns = 2 * results if activation in GATED else results - int(tails or 0)
    a_dtype, b_dtype, out = (_dtype(parts[name]) for name in ("a", "b", "out"))
    a = _random(rows, k, dtype=a_dtype, device=device)
    if form in NIBBLES:
        b = torch.randint(0, 256, (columns, -(-k // 64) * 32), dtype=torch.uint8, device=device).mT
    elif str(parts["order"]).split()[1] == "n":
        b = _random(k, columns, dtype=b_dtype, device=device)
    else:
        b = _random(columns, k, dtype=b_dtype, device=device).mT
    # the shapes of the scales, by operand and kind
    blocks = -(-k // SCALE_BLOCK)
    shapes: dict[tuple[str, str], tuple[int, ...]] = {
        ("a", "tensor"): (), ("b", "tensor"): (), ("a", "vector"): (rows,), ("b", "vector"): (columns,),
        ("a", "block"): (rows, blocks), ("b", "block"): (blocks, -(-columns // SCALE_BLOCK)),
        ("b", "group"): (-(-k // group) if group else 0, columns),
    }  # fmt: skip
    kinds = zip("ab", str(parts["scales"]).split(), strict=True)
    scales = [shapes.get(kind) for kind in kinds]
    scale_a, scale_b = (None if shape is None else torch.rand(shape, device=device) for shape in scales)
    if scale_b is not None and scales[1] in (shapes["b", "block"], shapes["b", "group"]):
        # as a weight has them, along its K
        scale_b = scale_b.mT.contiguous().mT
    if form == "mxfp4":
        scale_b = torch.randint(120, 126, shapes["b", "group"][::-1], dtype=torch.uint8, device=device).mT
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
    return GemmCall(
        a, b, bias, scale_a, scale_b, residual, activation, out, bias_along=along or "n",
        precision=str(parts["precision"]), form=form, group=group, norm_weight=norm_weight, tail=tail,
    )  # fmt: skip


def _dtype(name: Cell) -> torch.dtype:
    found: torch.dtype = getattr(torch, str(name))
    return found
