"""Run the kernels of kernels.py as machine code of one architecture and print, as JSON, how far each is from PyTorch.

`python -m tests.emulated.cases gfx942 [CASE …]`, without TRITON_INTERPRET: a process of its own, in which opcodes are
compiled once for all cases. Every case returns (error, what is allowed).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from tests.emulated import kernels
from wavecrest.dispatch.tuned import Config
from wavecrest.errors import EmulationError, OutOfBounds
from wavecrest.hardware import ARCHS
from wavecrest.isa.emulate import emulated

Case = Callable[[str], tuple[float, float]]

CASES: dict[str, Case] = {}
# cases that run on one architecture only, and why
ONLY = {
    "mxfp4": ("gfx950", "gfx942 has no scaled matrix instruction"),
    "mxfp4 16x16": ("gfx950", "gfx942 has no scaled matrix instruction"),
    "mxfp8": ("gfx950", "gfx942 has no scaled matrix instruction"),
    "matmul of its own kernel": ("gfx950", "the kernel is gfx950's"),
    "matmul of gfx942's own kernel": ("gfx942", "the kernel is gfx942's"),
    "attention of its own kernel": ("gfx950", "the kernel is gfx950's"),
    "fp8fnuz": ("gfx942", "the fnuz formats are those of gfx942"),
}
# cases of what is found without the watch
UNWATCHED = ("trap", "out of bounds read", "out of bounds write", "write before the start", "endless loop")
# workgroups under way at a time, where it matters
RESIDENT = {"locks": 6, "locks reversed": 6, "endless loop": 1}


def case(name: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        CASES[name] = function
        return function

    return register


def relative(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).abs().max() / want.abs().max())


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


@case("add")
def _add(_arch: str) -> tuple[float, float]:
    x, y, out = torch.randn(5000), torch.randn(5000), nan(5000)
    kernels.add[(5,)](x, y, out, 5000, BLOCK=1024)
    return relative(out, x.double() + y.double()), 1e-6


@case("denormals")
def _denormals(_arch: str) -> tuple[float, float]:
    # Triton asks the hardware to keep them
    x, y, out = torch.full((1000,), 1e-40), torch.full((1000,), 2e-40), nan(1000)
    kernels.add[(1,)](x, y, out, 1000, BLOCK=1024)
    return relative(out, x.double() + y.double()), 1e-6


@case("softmax")
def _softmax(_arch: str) -> tuple[float, float]:
    x = torch.randn(8, 1000).half() * 3
    out = nan(8, 1000, dtype=torch.float16)
    kernels.softmax[(8,)](x, out, 1000, 1000, BLOCK=1024, num_warps=4)
    return relative(out, torch.softmax(x.double(), -1)), 2e-3


def _matmul(
    a: Tensor, b: Tensor, out: torch.dtype, limit: float, tile: tuple[int, int, int] = (128, 128, 64), **options: Any
) -> tuple[float, float]:
    (M, K), N = a.shape, b.shape[1]
    c = torch.zeros(M, N, dtype=out) if out == torch.int32 else nan(M, N, dtype=out)
    acc = kernels.tl.int32 if out == torch.int32 else kernels.tl.float32
    grid = (-(-M // tile[0]), -(-N // tile[1]))
    blocks = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile, strict=True))
    options = {"num_warps": 4, "num_stages": 2} | options
    kernels.matmul[grid](a, b, c, M, N, K, *a.stride(), *b.stride(), c.stride(0), ACC=acc, **blocks, **options)
    return relative(c, a.double() @ b.double()), limit


def _inputs(dtype: torch.dtype, M: int = 200, N: int = 136, K: int = 160) -> tuple[Tensor, Tensor]:
    if dtype == torch.int8:
        return torch.randint(-128, 128, (M, K), dtype=dtype), torch.randint(-128, 128, (K, N), dtype=dtype)
    return torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype)


@case("matmul bfloat16")
def _matmul_bf16(_arch: str) -> tuple[float, float]:
    return _matmul(*_inputs(torch.bfloat16), torch.bfloat16, 8e-3)


@case("matmul float16")
def _matmul_fp16(_arch: str) -> tuple[float, float]:
    return _matmul(*_inputs(torch.float16), torch.float16, 2e-3)


@case("matmul float16 16x16")
def _matmul_fp16_16(_arch: str) -> tuple[float, float]:
    return _matmul(*_inputs(torch.float16), torch.float16, 2e-3, matrix_instr_nonkdim=16)


@case("matmul bfloat16 16x16")
def _matmul_bf16_16(_arch: str) -> tuple[float, float]:
    return _matmul(*_inputs(torch.bfloat16), torch.float32, 1e-5, matrix_instr_nonkdim=16)


@case("matmul transposed")
def _matmul_transposed(_arch: str) -> tuple[float, float]:
    a, b = _inputs(torch.bfloat16)
    return _matmul(a, b.t().contiguous().t(), torch.float32, 1e-5)


@case("matmul float32")
def _matmul_fp32(arch: str) -> tuple[float, float]:
    # gfx942: Triton takes XF32, which has 10 bits of mantissa
    return _matmul(*_inputs(torch.float32), torch.float32, 1e-3 if arch == "gfx942" else 1e-5, tile=(128, 128, 32))


@case("matmul fp8")
def _matmul_fp8(arch: str) -> tuple[float, float]:
    dtype = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    return _matmul(*_inputs(dtype), torch.float32, 1e-4)


@case("matmul int8")
def _matmul_int8(_arch: str) -> tuple[float, float]:
    return _matmul(*_inputs(torch.int8), torch.int32, 0)


@case("matmul ping-pong")
def _matmul_pingpong(_arch: str) -> tuple[float, float]:
    # 8 warps and a 256x256 tile: the block ping-pong schedule of gfx942, LDS near its limit
    return _matmul(*_inputs(torch.bfloat16, 256, 256, 512), torch.float32, 1e-5, tile=(256, 256, 64), num_warps=8)


@case("matmul spilled")
def _matmul_spilled(_arch: str) -> tuple[float, float]:
    # far too many accumulators for one warp: scratch memory
    return _matmul(*_inputs(torch.bfloat16, 256, 256, 64), torch.float32, 1e-5, tile=(256, 128, 32), num_warps=1)


@case("matmul descriptors")
def _matmul_descriptors(_arch: str) -> tuple[float, float]:
    a, b = _inputs(torch.bfloat16, 192, 136, 96)
    c = nan(192, 136, dtype=torch.bfloat16)
    kernels.matmul_descriptors[(3,)](a, b, c, 192, 136, 96, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32)
    return relative(c, a.double() @ b.double()), 8e-3


_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def _scaled(elements: str, **options: Any) -> tuple[float, float]:
    M, N, K, pack = 128, 128, 256, 2 if elements == "e2m1" else 1
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float64)

    def operand(rows: int) -> Tensor:
        if pack == 2:
            return torch.randint(0, 256, (rows, K // 2), dtype=torch.uint8)
        return torch.randn(rows, K).to(torch.float8_e4m3fn).view(torch.uint8)

    def wide(codes: Tensor, scales: Tensor) -> Tensor:
        if pack == 2:
            values = torch.stack([table[(codes & 15).long()], table[(codes >> 4).long()]], -1).flatten(1)
        else:
            values = codes.view(torch.float8_e4m3fn).double()
        return values * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)

    a, b, c = operand(M), operand(N), nan(M, N)
    scale_a, scale_b = (torch.randint(120, 132, (rows, K // 32), dtype=torch.uint8) for rows in (M, N))
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "FORMAT": elements, "PACK": pack}
    kernels.scaled_matmul[(M // 64, N // 64)](a, scale_a, b, scale_b, c, N, K, **blocks, **options)
    return relative(c, wide(a, scale_a) @ wide(b, scale_b).t()), 1e-6


@case("mxfp4")
def _mxfp4(_arch: str) -> tuple[float, float]:
    return _scaled("e2m1")


@case("mxfp4 16x16")
def _mxfp4_16(_arch: str) -> tuple[float, float]:
    return _scaled("e2m1", matrix_instr_nonkdim=16)


@case("mxfp8")
def _mxfp8(_arch: str) -> tuple[float, float]:
    return _scaled("e4m3")


def _attention(causal: bool, dtype: torch.dtype) -> tuple[float, float]:
    heads, N, D = 2, 200, 64
    q, k, v = (torch.randn(heads, N, D).to(dtype) for _ in range(3))
    out = nan(heads, N, D, dtype=dtype)
    options = {"D": D, "BLOCK_M": 64, "BLOCK_N": 64, "CAUSAL": causal, "num_stages": 2}
    kernels.attention[(-(-N // 64), heads)](q, k, v, out, D**-0.5, N, **options)
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    return relative(out, want), 1e-2


@case("attention")
def _attention_full(_arch: str) -> tuple[float, float]:
    return _attention(False, torch.float16)


@case("attention causal")
def _attention_causal(_arch: str) -> tuple[float, float]:
    return _attention(True, torch.bfloat16)


@case("atomics")
def _atomics(_arch: str) -> tuple[float, float]:
    x = torch.randint(0, 32, (3000,), dtype=torch.int32)
    histogram, total, top = torch.zeros(32, dtype=torch.int32), torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    kernels.atomics[(6,)](x, total, histogram, top, 3000, BLOCK=512)
    wrong = int((histogram != torch.bincount(x, minlength=32)).sum())
    return float(wrong + (top.item() != x.max().item()) + (total.item() != x.sum().item())), 0


def _locks(reverse: bool) -> tuple[float, float]:
    a, c, lock = torch.randn(6, 256), torch.zeros(256), torch.zeros(1, dtype=torch.int32)
    kernels.in_turn[(6,)](a, c, lock, BLOCK=256, REVERSED=reverse, num_warps=2)
    want = torch.zeros(256, dtype=torch.float64)
    for row in reversed(range(6)) if reverse else range(6):
        want = want * 0.5 + a[row].double()
    return relative(c, want), 1e-6


@case("locks")
def _locks_in_order(_arch: str) -> tuple[float, float]:
    return _locks(False)


@case("locks reversed")
def _locks_reversed(_arch: str) -> tuple[float, float]:
    return _locks(True)


def _padded(x: Tensor) -> Tensor:
    """1,000 elements in a block of 1,024, as the kernel sees them."""
    return torch.cat([x, torch.zeros(24, dtype=x.dtype)])


def _int64(x: Tensor) -> Tensor:
    # the float32 product first, as in the kernel; division truncates as in C
    quotient = torch.div((x.float() * 1000).to(torch.int64) * 123456789, 1000003, rounding_mode="trunc")
    return torch.fmod(quotient, 7919).double()


def _cast(x: Tensor, *dtypes: torch.dtype) -> Tensor:
    return torch.stack([x.float().to(dtype).double() for dtype in dtypes]).sum(0)


def _histogram(x: Tensor) -> Tensor:
    return torch.bincount((_padded(x).abs() * 16).to(torch.int32) % 1024, minlength=1024)[:1000].double()


def _math(x: Tensor) -> Tensor:
    return torch.erf(x) + torch.sigmoid(x) + torch.sin(x) + torch.log(x.abs() + 1) + x.abs().sqrt() + x / 3.7


# operation of kernels.misc -> (what PyTorch makes of it, what is allowed)
MISC: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "cumsum": (lambda x: x.cumsum(0), 1e-5),
    "sort": (lambda x: _padded(x).sort()[0][:1000], 1e-6),
    "argmax": (lambda x: x.argmax().double().expand(1000), 0),
    "math": (_math, 1e-6),
    "float64": (lambda x: x.abs().sqrt() / 3 + x.exp(), 1e-6),
    "fp8": (lambda x: _cast(x, torch.float8_e4m3fn, torch.float8_e5m2), 0),
    "fp8fnuz": (lambda x: _cast(x, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), 0),
    "int64": (_int64, 0),
    "transpose": (lambda x: _padded(x).view(32, 32).t().reshape(-1)[:1000], 0),
    "gather": (lambda x: _padded(x)[(torch.arange(1024) * 7 + 3) % 1024][:1000], 0),
    "halves": (
        lambda x: x.half().double() * 2 + x.half().double() / 3 + x.bfloat16().double().clamp(min=0.5),
        2e-3,
    ),
    "histogram": (_histogram, 0),
}


def _misc(op: str) -> Case:
    def run(_arch: str) -> tuple[float, float]:
        x, out = torch.randn(1000), nan(1000)
        kernels.misc[(1,)](x, out, 1000, OP=op, BLOCK=1024)
        want, limit = MISC[op]
        return relative(out, want(x.double())), limit

    return run


CASES |= {op: _misc(op) for op in MISC}


def _caught(call: Callable[[], Any], kind: type[Exception], *parts: str) -> tuple[float, float]:
    """(0, 0) if a call raises this error and its message has these parts."""
    try:
        call()
    except kind as error:
        missing = [part for part in parts if part not in str(error)]
        if missing:
            raise AssertionError(f"{missing} not in {error}") from error
        return 0.0, 0.0
    raise AssertionError(f"no {kind.__name__}")


@case("trap")
def _trap(_arch: str) -> tuple[float, float]:
    x, out = torch.zeros(1000), nan(1000)
    x[3] = 5

    def launch() -> None:
        kernels.misc[(1,)](x, out, 1000, OP="assert", BLOCK=1024, debug=True)

    return _caught(launch, EmulationError, "misc", "device_assert")


@case("out of bounds read")
def _read(arch: str) -> tuple[float, float]:
    x, y, out = torch.randn(4096), torch.randn(4096), nan(8192)
    kernels.add[(4,)](x, y, out, 4096, BLOCK=1024)
    assert relative(out[:4096], x.double() + y.double()) < 1e-6
    # the fifth workgroup's reads are beyond x, unmasked
    parts = ("add", arch, "(4, 0, 0)", "past the end of argument", "float32 [4096]", "_load_")
    return _caught(lambda: kernels.add[(5,)](x, y, out, 5120, BLOCK=1024), OutOfBounds, *parts)


@case("out of bounds write")
def _write(_arch: str) -> tuple[float, float]:
    x, out = torch.randn(1024), torch.zeros(1024)
    parts = ("past the end of argument out_ptr", "_store_")
    found = _caught(lambda: kernels.shifted[(1,)](x, out, 1024, 64, BLOCK=1024), OutOfBounds, *parts)
    assert torch.equal(out, torch.zeros(1024)), "a launch that failed wrote its output"
    return found


@case("write before the start")
def _before(_arch: str) -> tuple[float, float]:
    x, out = torch.randn(1000), torch.zeros(1000)
    parts = ("up to 32 bytes before the start of argument out_ptr",)
    return _caught(lambda: kernels.shifted[(1,)](x, out, 1000, -8, BLOCK=1024), OutOfBounds, *parts)


@case("matmul of gfx942's own kernel")
@case("matmul of its own kernel")
def _own(arch: str) -> tuple[float, float]:
    """gemm's kernels for gfx950 and gfx942, each matrix instruction; steps of the loop wait for no bank of LDS."""
    # imported here: other cases need nothing of ops
    from wavecrest.ops._gemm import backend, study
    from wavecrest.ops._gemm.call import GemmCall

    worst, runs = 0.0, driver.active.runs
    float8 = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    for dtype in [float8] if arch == "gfx942" else [torch.bfloat16, float8]:
        for matrix in (32, 16):
            lost = []
            # two steps, and four
            for K in (512 // dtype.itemsize, 1024 // dtype.itemsize):
                call = GemmCall(torch.randn(256, K).to(dtype), torch.randn(256, K).to(dtype).mT)
                tried = study.space.cdna_space(backend.op.key(call), ARCHS[arch])
                config = next(config for config in tried if config["MATRIX"] == matrix)
                backend.op.pin(backend.op.key(call), "triton_cdna", config, "user", "a test")
                got = backend.op(call)
                backend.op.unpin()
                assert runs[-1].kernel == ("_cdna3_kernel" if arch == "gfx942" else "_cdna_kernel")
                lost.append(runs[-1].stats.lds_conflicts)
                worst = max(worst, relative(got, call.a.double() @ call.b.double()))
            assert lost[0] == lost[1], f"conflicts with two and four steps: {lost}"
    return worst, 8e-3


@case("attention of its own kernel")
def _own_attention(arch: str) -> tuple[float, float]:
    """flash_attention's kernel for gfx950, each tile that `tune` tries: no wave waits for a bank of LDS."""
    from wavecrest.ops._flash_attention import backend, study
    from wavecrest.ops._flash_attention.call import FlashAttentionCall

    worst, runs = 0.0, driver.active.runs
    for head_dim, dtype in ((128, torch.bfloat16), (64, torch.float16)):
        call = FlashAttentionCall(*(torch.randn(1, 1, 330, head_dim).to(dtype) for _ in range(3)), "bhsd", causal=True)
        want = backend.op.reference(call._replace(q=call.q.double(), k=call.k.double(), v=call.v.double()))
        key = backend.op.key(call)
        tiles = {(one["BLOCK_M"], one["BLOCK_N"]): one for one in study.space.space_cdna(key, ARCHS[arch])}
        for config in tiles.values():
            backend.op.pin(key, "triton_cdna", config, "user", "a test")
            got = backend.op(call)
            backend.op.unpin()
            assert runs[-1].kernel == "_cdna_attention_kernel" and runs[-1].stats.lds_conflicts == 0, config
            worst = max(worst, relative(got, want))
    return worst, 8e-3


@case("attention of one sequence and of many")
def _short_attention(_arch: str) -> tuple[float, float]:
    """Short sequences of flash_attention have the same bits alone, in a batch, and with a bias that all share.

    Triton's interpreter cannot tell: it fuses no multiplication with an addition.
    """
    from wavecrest.ops._flash_attention.backend import op
    from wavecrest.ops._flash_attention.call import FlashAttentionCall

    worst, runs = 0.0, driver.active.runs
    for dtype, tokens in ((torch.float16, 128), (torch.bfloat16, 70)):
        q, k, v = (torch.randn(2, tokens, 4, 64).to(dtype) for _ in range(3))
        call = FlashAttentionCall(q, k, v, bias=torch.randn(2, 4, tokens, tokens).to(dtype))
        whole = op.call_on("triton_short", call)
        assert runs[-1].kernel == "_short_attention_kernel"
        alone = call._replace(q=q[:1], k=k[:1], v=v[:1], bias=call.bias[:1])
        for other in (alone, call._replace(bias=call.bias[:1])):
            assert torch.equal(op.call_on("triton_short", other)[:1], whole[:1])
        wide = call._replace(q=q.double(), k=k.double(), v=v.double(), bias=call.bias.double())
        worst = max(worst, relative(whole, op.reference(wide)))
    return worst, 8e-3


@case("attention tile after tile")
def _persistent_attention(arch: str) -> tuple[float, float]:
    """Programs of flash_attention that take several tiles, on as many XCDs as there are: all tiles, the same bits."""
    from wavecrest.ops._flash_attention import backend
    from wavecrest.ops._flash_attention.call import FlashAttentionCall
    from wavecrest.ops.common import target

    call = FlashAttentionCall(*(torch.randn(1, 5, 160, 64).half() for _ in range(3)), "bhsd", causal=True)
    want = backend.op.reference(call._replace(q=call.q.double(), k=call.k.double(), v=call.v.double()))
    small = {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 1, "num_stages": 1}
    alone = backend.op.run("triton", call, config=Config(**small))
    real, runs = target.arch, driver.active.runs
    try:
        # 10 programs for 50 tiles, and fewer than XCDs; heads that go together, and head after head
        for units, mib in ((10, 1), (16, 0), (3, 1)):
            target.arch = lambda units=units: replace(ARCHS[arch], compute_units=units)
            for how in (1, 2):
                config = Config(**small, SECTION_MIB=mib, PERSISTENT=how, PER_UNIT=1)
                got = backend.op.run("triton", call, config=config)
                assert runs[-1].stats.workgroups == units and torch.equal(got, alone), config
    finally:
        target.arch = real
    return relative(alone, want), 2e-3


@case("endless loop")
def _endless(_arch: str) -> tuple[float, float]:
    a, c, lock = torch.randn(6, 256), torch.zeros(256), torch.zeros(1, dtype=torch.int32)

    def launch() -> None:
        # the last workgroup has the first turn and does not run: one at a time
        kernels.in_turn[(6,)](a, c, lock, BLOCK=256, REVERSED=True, num_warps=2)

    return _caught(launch, EmulationError, "endless loop", "in_turn")


def main(arch: str, *chosen: str) -> None:
    rows = {}
    for name, function in CASES.items():
        if ONLY.get(name, (arch,))[0] != arch or (chosen and name not in chosen):
            continue
        torch.manual_seed(0)
        limit = 1_000_000 if name == "endless loop" else 100_000_000
        begin, error, allowed, problem = time.perf_counter(), float("nan"), 0.0, ""
        resident, check = RESIDENT.get(name, 64), name not in UNWATCHED
        with emulated(arch, resident=resident, limit=limit, check=check) as driver:
            try:
                error, allowed = function(arch)
            except Exception as raised:
                problem = f"{type(raised).__name__}: {raised}"
        rows[name] = {
            "error": error,
            "allowed": allowed,
            "problem": problem,
            "seconds": time.perf_counter() - begin,
            "instructions": sum(run.stats.instructions for run in driver.runs),
            "matrix": sum(run.stats.matrix_instructions() for run in driver.runs),
        }
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
