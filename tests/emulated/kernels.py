"""Triton kernels that between them use what AMD code has: matrix instructions, LDS, lane moves, atomics, scratch.

Not of this project's ops: they hold the emulator itself to what PyTorch computes (cases.py).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(out_ptr + offs, tl.load(x_ptr + offs, mask) + tl.load(y_ptr + offs, mask), mask)


@triton.jit
def shifted(x_ptr, out_ptr, n, shift, BLOCK: tl.constexpr):
    """Stores beside its output: `shift` elements before or after where it should."""
    offs = tl.arange(0, BLOCK)
    # through an integer: a negative offset of a buffer store is outside of the buffer, and the hardware drops it
    moved = (out_ptr.to(tl.int64) + shift * 4).to(tl.pointer_type(tl.float32))
    tl.store(moved + offs, tl.load(x_ptr + offs, offs < n, 0.0), offs < n)


@triton.jit
def softmax(x_ptr, out_ptr, n, stride, BLOCK: tl.constexpr):
    row, offs = tl.program_id(0), tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(x_ptr + row * stride + offs, mask, -float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row * stride + offs, (e / tl.sum(e, 0)).to(out_ptr.dtype.element_ty), mask)


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, (offs_m[:, None] < M) & (offs_k[None, :] < K - k), 0.0)
        b = tl.load(b_ptrs, (offs_n[None, :] < N) & (offs_k[:, None] < K - k), 0.0)
        acc = tl.dot(a, b, acc, out_dtype=ACC)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tl.store(c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :], acc.to(c_ptr.dtype.element_ty), mask)


@triton.jit
def attention(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, N,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    block, head = tl.program_id(0), tl.program_id(1)
    offs_m, offs_d, offs_n = block * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, D), tl.arange(0, BLOCK_N)
    at_q = head * N * D + offs_m[:, None] * D + offs_d[None, :]
    q = tl.load(q_ptr + at_q, offs_m[:, None] < N, 0.0)
    top, total = tl.full((BLOCK_M,), -float("inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    end = tl.minimum((block + 1) * BLOCK_M, N) if CAUSAL else N
    for start in range(0, end, BLOCK_N):
        cols = start + offs_n
        k = tl.load(k_ptr + head * N * D + cols[None, :] * D + offs_d[:, None], cols[None, :] < N, 0.0)
        scores = tl.dot(q, k) * (scale * 1.44269504)
        seen = cols[None, :] < N
        if CAUSAL:
            seen = seen & (offs_m[:, None] >= cols[None, :])
        scores = tl.where(seen, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        p, decay = tl.math.exp2(scores - new_top[:, None]), tl.math.exp2(top - new_top)
        total, top = total * decay + tl.sum(p, 1), new_top
        v = tl.load(v_ptr + head * N * D + cols[:, None] * D + offs_d[None, :], cols[:, None] < N, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None])
    tl.store(out_ptr + at_q, (acc / total[:, None]).to(out_ptr.dtype.element_ty), offs_m[:, None] < N)


@triton.jit
def atomics(x_ptr, sum_ptr, histogram_ptr, max_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    x = tl.load(x_ptr + offs, mask, 0)
    tl.atomic_add(histogram_ptr + x, 1, mask)
    tl.atomic_max(max_ptr, tl.max(x, 0))
    tl.atomic_add(sum_ptr, tl.sum(x, 0).to(tl.float32))


@triton.jit
def in_turn(a_ptr, c_ptr, lock_ptr, BLOCK: tl.constexpr, REVERSED: tl.constexpr):
    """Each program waits for its turn, halves c and adds its row: as stream-k does, the lock counts who is done."""
    row, rows, offs = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCK)
    a = tl.load(a_ptr + row * BLOCK + offs)
    turn = rows - 1 - row if REVERSED else row
    while tl.atomic_cas(lock_ptr, turn, turn) != turn:
        pass
    tl.store(c_ptr + offs, tl.load(c_ptr + offs, cache_modifier=".cv") * 0.5 + a, cache_modifier=".wt")
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, turn + 1)


@triton.jit
def misc(x_ptr, out_ptr, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, offs < n, 0.0)
    if OP == "cumsum":
        y = tl.cumsum(x, 0)
    elif OP == "sort":
        y = tl.sort(x)
    elif OP == "argmax":
        y = tl.argmax(x, 0).to(tl.float32) + tl.zeros((BLOCK,), tl.float32)
    elif OP == "math":
        y = tl.erf(x) + tl.sigmoid(x) + tl.sin(x) + tl.log(tl.abs(x) + 1) + tl.sqrt(tl.abs(x)) + x / 3.7
    elif OP == "float64":
        y = (tl.sqrt(tl.abs(x.to(tl.float64))) / 3 + tl.exp(x.to(tl.float64))).to(tl.float32)
    elif OP == "fp8":
        y = x.to(tl.float8e4nv).to(tl.float32) + x.to(tl.float8e5).to(tl.float32)
    elif OP == "fp8fnuz":
        y = x.to(tl.float8e4b8).to(tl.float32) + x.to(tl.float8e5b16).to(tl.float32)
    elif OP == "int64":
        y = ((x * 1000).to(tl.int64) * 123456789 // 1000003 % 7919).to(tl.float32)
    elif OP == "transpose":
        y = tl.reshape(tl.trans(tl.reshape(x, (32, BLOCK // 32))), (BLOCK,))
    elif OP == "gather":
        y = tl.gather(x, (offs * 7 + 3) % BLOCK, 0)
    elif OP == "halves":
        half = (x.to(tl.float16) * 2 + x.to(tl.float16) / 3).to(tl.float32)
        y = half + tl.maximum(x.to(tl.bfloat16), 0.5).to(tl.float32)
    elif OP == "histogram":
        y = tl.histogram((tl.abs(x) * 16).to(tl.int32) % BLOCK, BLOCK).to(tl.float32)
    elif OP == "assert":
        tl.device_assert(x < 2.0, "too big")
        y = x
    tl.store(out_ptr + offs, y, offs < n)


@triton.jit
def scaled_matmul(
    a_ptr, scale_a_ptr, b_ptr, scale_b_ptr, c_ptr, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FORMAT: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k, offs_s = tl.arange(0, BLOCK_K // PACK), tl.arange(0, BLOCK_K // 32)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptr + offs_m[:, None] * (K // PACK) + k // PACK + offs_k[None, :])
        b = tl.load(b_ptr + offs_n[None, :] * (K // PACK) + k // PACK + offs_k[:, None])
        scale_a = tl.load(scale_a_ptr + offs_m[:, None] * (K // 32) + k // 32 + offs_s[None, :])
        scale_b = tl.load(scale_b_ptr + offs_n[:, None] * (K // 32) + k // 32 + offs_s[None, :])
        acc = tl.dot_scaled(a, scale_a, FORMAT, b, scale_b, FORMAT, acc)
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc)


@triton.jit
def matmul_descriptors(
    a_ptr, b_ptr, c_ptr, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Persistent, with tensor descriptors."""
    a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    b_desc = tl.make_tensor_descriptor(b_ptr, [K, N], [N, 1], [BLOCK_K, BLOCK_N])
    c_desc = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BLOCK_M, BLOCK_N])
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        m, n = tile // tl.cdiv(N, BLOCK_N) * BLOCK_M, tile % tl.cdiv(N, BLOCK_N) * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(a_desc.load([m, k]), b_desc.load([k, n]), acc)
        c_desc.store([m, n], acc.to(tl.bfloat16))
