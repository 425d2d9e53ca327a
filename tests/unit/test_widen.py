"""Numbers rounded for matrix units without an instruction for it, against PyTorch's rounding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wavecrest.ops.common.triton import tl, triton
from wavecrest.ops.common.widen import rounded


@triton.jit
def _round_kernel(x_ptr, out_ptr, TIES_UP: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offs = tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, rounded(tl.load(x_ptr + offs), tl.bfloat16, TIES_UP))


def _rounded(x: Tensor, ties_up: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    _round_kernel[(1,)](x, out, TIES_UP=ties_up, BLOCK=x.numel())
    return out


def test_ties_alone_differ_from_ties_to_even(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=generator, dtype=torch.int32)
    # every fourth of them a tie
    bits[::4] = bits[::4] & -65536 | 0x8000
    bits[:4] = torch.tensor([math.inf, -math.inf, 0.0, -0.0]).view(torch.int32)
    x = bits.view(torch.float32)
    x = torch.where(x.isnan(), 1.0, x).to(device)
    even, up = x.bfloat16(), _rounded(x, True)
    assert torch.equal(_rounded(x, False), even)
    tie = (x.view(torch.int32) & 0xFFFF) == 0x8000
    assert tie.sum() > 500 and torch.equal(up[~tie], even[~tie])
    # away from zero, and never further than to even
    assert bool((up[tie].float().abs() > x[tie].abs()).all())
    assert bool(((up.float() - x).abs() <= (even.float() - x).abs())[tie & up.isfinite() & even.isfinite()].all())


def test_nan_stays_nan(device: str) -> None:
    x = torch.tensor([math.nan, -math.nan] * 8, device=device)
    assert bool(_rounded(x, True).isnan().all())
