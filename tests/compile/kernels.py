"""Kernels whose machine code has what row kernels lack: matrix instructions, tiles in LDS, spills, nested loops."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.isa import Launch


@triton.jit
def matmul(a_ptr, b_ptr, c_ptr, K, stride_a, stride_b, stride_c, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)
    offs_n = tl.program_id(1) * BN + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    total = tl.zeros([BM, BN], dtype=tl.float32)
    for start in range(0, K, BK):
        a = tl.load(a_ptr + offs_m[:, None] * stride_a + (start + offs_k)[None, :])
        b = tl.load(b_ptr + (start + offs_k)[:, None] * stride_b + offs_n[None, :])
        total = tl.dot(a, b, total)
    tl.store(c_ptr + offs_m[:, None] * stride_c + offs_n[None, :], total.to(c_ptr.dtype.element_ty))


@triton.jit
def nested(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    for row in range(M):
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, N, BLOCK):
            total += tl.load(x_ptr + row * N + start + offs).to(tl.float32)
        tl.store(y_ptr + row * BLOCK + offs, total)


def _matmul(tile: tuple[int, int, int], warps: int) -> Launch:
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    bm, bn, bk = tile
    config = Config(BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=2)
    return Launch(matmul, (4096 // bm, 4096 // bn), (x, x, x, 4096, 4096, 4096, 4096), {}, config)


def _nested(dtype: torch.dtype) -> Launch:
    x = torch.empty(64, 4096, dtype=dtype, device="meta")
    y = torch.empty(64, 1024, dtype=torch.float32, device="meta")
    return Launch(nested, (1,), (x, y, 64, 4096), {}, Config(BLOCK=1024, num_warps=1))


def cases(arch: Arch, config: Config | None = None) -> dict[str, Launch]:
    dtypes = (
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
    )
    floats = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    made = {
        "large": _matmul((128, 128, 64), 8),
        "spilling": _matmul((128, 128, 64), 4),
        "small": _matmul((64, 64, 64), 4),
    }
    return made | {str(dtype).removeprefix("torch."): _nested(dtype) for dtype in (*dtypes, *floats)}


class _Dying:
    """A kernel that takes the process of whoever compiles it down, as LLVM does where it gives up."""

    __name__ = "dying"

    @property
    def _pack_args(self) -> None:
        os.abort()


def crashing(arch: Arch) -> dict[str, Launch]:
    launch = _nested(torch.float16)
    return {"before": launch, "fatal": launch._replace(kernel=_Dying()), "after": _nested(torch.float32)}
