"""FlyDSL's 16-bit GEMM as a backend, through aiter, which holds the kernels: `aiter.ops.flydsl.flydsl_hgemm`.

FlyDSL's own package (ROCm/FlyDSL) is a language: its wheel has no kernels, and its stable interface names none. aiter
ships them with a wrapper that takes a tile. aiter's dispatcher runs them where its tables say so (see `aiter`); this
backend runs them on any shape that fits, with a tile by rules of thumb. K is not split, as that adds parts in no fixed
order. Called as the sources say (ROCm/aiter, aiter/ops/flydsl/gemm_kernels.py, commit e4048607a5, 2026-08-22); it was
not run: this project has no AMD GPU. Imported inside functions only.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

import wavecrest.backends.torch.gemm as native
from wavecrest import hardware
from wavecrest.dispatch.keys import dtype_name, needs_grad, row_bucket
from wavecrest.dispatch.tracing import constant_in_graphs
from wavecrest.ops._gemm.backend import MEASURED, op
from wavecrest.ops._gemm.call import GemmCall

# below PyTorch: it runs where a measured row names it
PRIORITY = 4
NAME = "flydsl"
# architectures that the generic kernel is written for: one lane of 64 loads 8 values
ARCHS = ("gfx942", "gfx950")


class Tile(NamedTuple):
    """A tile and its waves; bytes of LDS are 2 stages of both operands."""

    m: int
    n: int
    k: int
    m_warps: int
    n_warps: int


# by the largest number of rows that each is for; the last one for all others. Not measured
TILES = ((16, Tile(16, 64, 128, 1, 2)), (64, Tile(64, 64, 64, 2, 2)), (256, Tile(128, 64, 64, 2, 2)))
LARGE = Tile(128, 128, 64, 2, 2)
# the one tile that the wrapper accepts where M, N and K are all as large as WHOLE; it takes 128 KiB of LDS
WHOLE, WHOLE_TILE, WHOLE_ARCH = 4096, Tile(256, 256, 64, 2, 4), "gfx950"


@cache
def _missing() -> str | None:
    """Why FlyDSL's kernels cannot run here at all."""
    if torch.version.hip is None:
        return "runs on AMD GPUs; this torch is no ROCm build"
    absent = [name for name in ("aiter", "flydsl") if importlib.util.find_spec(name) is None]
    if absent:
        return f"needs the packages aiter and flydsl; {' and '.join(absent)} not installed"
    return None


# Dynamo would trace the search for the packages
@constant_in_graphs
def _unavailable() -> str | None:
    return _missing()


def tile_of(M: int, N: int, K: int) -> Tile:
    """The tile for a GEMM, by its bucket of rows."""
    if min(M, N, K) >= WHOLE:
        return WHOLE_TILE
    return next((tile for most, tile in TILES if most >= M), LARGE)


def _refuse(call: GemmCall) -> str | None:
    reason: str | None = _unavailable()
    if reason is not None:
        return reason
    if not call.a.is_cuda or needs_grad(call.a, call.b, call.bias, call.residual, call.norm_weight):
        return "runs on a GPU, without gradients"
    arch = hardware.detect().arch
    if arch not in ARCHS:
        return f"has its generic GEMM for {' and '.join(ARCHS)}, not for {arch}"
    if torch.compiler.is_compiling():
        return "compiles its kernel at the call, which torch.compile does not trace"
    if call.a.dtype not in (torch.float16, torch.bfloat16):
        return f"multiplies float16 and bfloat16, not {dtype_name(call.a)}"
    if call.form != "plain" or call.weight_only or not call.flat or call.b.stride(-2) != 1:
        return "takes one plain weight [N, K] that is contiguous along K"
    tile = tile_of(row_bucket(call.M), call.columns, call.K)
    if tile == WHOLE_TILE and arch != WHOLE_ARCH:
        return f"has one tile where all sizes are {WHOLE} or more, which does not fit into the LDS of {arch}"
    if call.M == 0 or call.columns % tile.n or call.K % tile.k or not call.columns or not call.K:
        return f"has a tile of {tile.n} columns and {tile.k} of K for such calls, which N and K are multiples of"
    return None


def run(call: GemmCall) -> Tensor:
    """One call."""
    from aiter.ops.flydsl import flydsl_hgemm

    call = native.normalised(call)
    a, weight, bias = call.a.reshape(call.M, call.K), call.b.mT, call.bias
    # added by it only where nothing comes between, and in its own dtype
    joined = bias is not None and call.alpha == 1.0 and call.bias_along == "n" and bias.dtype == a.dtype
    tile = tile_of(row_bucket(call.M), call.columns, call.K)
    y = flydsl_hgemm(
        a, weight, bias=bias if joined else None, tile_m=tile.m, tile_n=tile.n, tile_k=tile.k,
        block_m_warps=tile.m_warps, block_n_warps=tile.n_warps, split_k=1, stages=2, b_to_lds=True,
    )  # fmt: skip
    y = y.reshape(*call.a.shape[:-1], call.columns)
    epilogue = native.bind_epilogue(call, not joined)
    return y if epilogue is None else epilogue(call, y)


def _opt_in(_call: GemmCall) -> str:
    return MEASURED


op.attach(NAME, run, refuse=_refuse, opt_in=_opt_in, priority=PRIORITY)
