"""Kernels in the form of those that a newer Triton or a switch of LLVM made slow, as their reports describe them.

`mxfp4` has tile and options of triton-lang/triton#11763 (gfx950, LLVM's switch amdgpu-use-amdgpu-trackers: scratch
memory in the main loop, half the speed); `transposed` has the tile of AMD-AGI/Primus-Turbo#471 (gfx942, Triton 3.7.1
to 3.8.0: 65 spilled registers, 5.4 times the time). Both are written here, and differ from those kernels elsewhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from wavecrest.dispatch.tuned import Config
from wavecrest.hardware import Arch
from wavecrest.isa import Launch

SIZE = 4096


@triton.jit
def mxfp4(
    a_ptr, b_ptr, c_ptr, a_scale_ptr, b_scale_ptr, M, N, K, stride, scale_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """c = a @ b.T of row-major MXFP4: two values a byte, a scale for 32 of them; strides in bytes."""
    offs_m = (tl.program_id(0) * BM + tl.arange(0, BM)) % M
    offs_n = (tl.program_id(1) * BN + tl.arange(0, BN)) % N
    offs_k = tl.arange(0, BK // 2)
    offs_s = tl.arange(0, BK // 32)
    a_ptrs = a_ptr + offs_m[:, None] * stride + offs_k[None, :]
    b_ptrs = b_ptr + offs_n[None, :] * stride + offs_k[:, None]
    a_scale_ptrs = a_scale_ptr + offs_m[:, None] * scale_stride + offs_s[None, :]
    b_scale_ptrs = b_scale_ptr + offs_n[:, None] * scale_stride + offs_s[None, :]
    total = tl.zeros([BM, BN], dtype=tl.float32)
    for _ in range(tl.cdiv(K, BK)):
        a_scale = tl.load(a_scale_ptrs)
        b_scale = tl.load(b_scale_ptrs)
        total = tl.dot_scaled(tl.load(a_ptrs), a_scale, "e2m1", tl.load(b_ptrs), b_scale, "e2m1", total)
        a_ptrs += BK // 2
        b_ptrs += BK // 2
        a_scale_ptrs += BK // 32
        b_scale_ptrs += BK // 32
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], total.to(c_ptr.dtype.element_ty))


@triton.jit
def transposed(a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c = a.T @ b with a K that ends within a block, as the gradient of a weight over one expert's tokens."""
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)
    offs_n = tl.program_id(1) * BN + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    total = tl.zeros([BM, BN], dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + offs_k
        a = tl.load(a_ptr + k[None, :] * M + offs_m[:, None], k[None, :] < K, other=0.0)
        b = tl.load(b_ptr + k[:, None] * N + offs_n[None, :], k[:, None] < K, other=0.0)
        total = tl.dot(a, b, total)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], total.to(c_ptr.dtype.element_ty))


def cases(arch: Arch, config: Config | None = None) -> dict[str, Launch]:
    def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*sizes, dtype=dtype, device="meta")

    def tiles(own: Config) -> tuple[int, ...]:
        return SIZE // own["BM"], SIZE // own["BN"]

    square = empty(SIZE, SIZE)
    plain = config or Config(BM=256, BN=256, BK=64, num_warps=8, num_stages=2, matrix_instr_nonkdim=16)
    made = {"transposed": Launch(transposed, tiles(plain), (square, square, square, SIZE, SIZE, SIZE), {}, plain)}
    if arch.name == "gfx950":
        values, scales = (empty(SIZE, SIZE // few, dtype=torch.uint8) for few in (2, 32))
        narrow = config or Config(
            BM=256, BN=256, BK=256, num_warps=4, num_stages=2, waves_per_eu=1, matrix_instr_nonkdim=32
        )
        arguments = (values, values, square, scales, scales, SIZE, SIZE, SIZE, SIZE // 2, SIZE // 32)
        made["mxfp4"] = Launch(mxfp4, tiles(narrow), arguments, {}, narrow)
    return made
