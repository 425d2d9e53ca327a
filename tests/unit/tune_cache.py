"""Compile kernels of some products ahead for sm_90, then go a real call's way to Triton's cache; writes what it saw.

Run without the interpreter, with TRITON_CACHE_DIR set: see test_tune_compile_ahead.py.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from wavecrest.hardware import ARCHS
from wavecrest.ops._gemm.backend import op as gemm
from wavecrest.ops._gemm.call import GemmCall
from wavecrest.tune import compile_ahead
from wavecrest.tune.candidates import Candidate, configurations

ARCH = ARCHS["sm_90"]
BF16, I8, F8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn


class Driver:
    """A GPU of the architecture that nothing can be launched on."""

    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda _device: 0)


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def product(M: int, N: int, K: int, dtype: torch.dtype = BF16, **more: Any) -> GemmCall:
    return GemmCall(meta(M, K, dtype=dtype), meta(N, K, dtype=dtype).mT, **more)


def scale(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.float32)


Wanted = Callable[[dict[str, int]], bool]
CASES: dict[str, tuple[str, GemmCall, Wanted]] = {
    "whole": ("triton", product(16, 4096, 4096), lambda c: c["SPLIT_K"] == 1),
    "split": ("triton", product(16, 4096, 4096), lambda c: c["SPLIT_K"] == 4),
    "descriptors": ("triton", product(4096, 4096, 4096), lambda c: c["TMA"] == 1),
    "without them": ("triton", product(4096, 4096, 4096), lambda c: c["TMA"] == 0),
    "finish": (
        "triton",
        product(33, 96, 200, bias=meta(96), activation="silu", residual=meta(33, 96), alpha=0.5),
        lambda c: True,
    ),
    "gated int8": (
        "triton",
        product(64, 512, 256, I8, scale_a=scale(64), scale_b=scale(512), activation="silu_and_mul"),
        lambda c: True,
    ),
    "block scales": ("triton", product(256, 512, 512, F8, scale_a=scale(256, 4), scale_b=scale(4, 4)), lambda c: True),
    "int4": (
        "triton",
        GemmCall(meta(16, 512), meta(256, 256, dtype=torch.uint8).mT, scale_b=scale(4, 256), form="int4", group=128),
        lambda c: True,
    ),
    "stream-K": ("triton_stream_k", product(4096, 4096, 4096), lambda c: True),
    "multiply": ("triton_gemv", product(1, 4096, 4096), lambda c: c["SPLIT_K"] == 1),
    "multiply split": ("triton_gemv", product(1, 4096, 4096), lambda c: c["SPLIT_K"] > 1),
}


def entries() -> int:
    return len(os.listdir(os.environ["TRITON_CACHE_DIR"]))


def main() -> None:
    kernels = compile_ahead.Kernels(ARCH.name)
    chosen: dict[str, Candidate] = {}
    for name, (backend, call, wanted) in CASES.items():
        space = configurations(gemm, backend, gemm.key(call), ARCH)
        chosen[name] = Candidate(backend, next(config for config in space[1:] if wanted(config.kwargs)))
        kernels.add(gemm, name, call, [chosen[name]], ARCH)
    done = compile_ahead.compile_all(kernels, 1, deadline=math.inf)
    before = entries()

    hits: dict[str, list[bool]] = {name: [] for name in CASES}
    now = ""
    driver.set_active(Driver())
    real = triton.runtime.jit.JITFunction.run

    def without_launching(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        real(self, *args, grid=grid, warmup=True, **options)

    triton.runtime.jit.JITFunction.run = without_launching
    knobs.compilation.listener = lambda *, cache_hit, **_facts: hits[now].append(cache_hit)
    importlib.import_module("wavecrest.ops.common.target").arch = lambda: ARCH
    for now, (backend, call, _) in CASES.items():
        gemm.backends[backend].bind(call, chosen[now].config)(call)
    found = {
        "kernels": done.kernels,
        "failed": done.failed,
        "jobs": len(kernels.jobs),
        "hits": hits,
        "new": entries() - before,
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
