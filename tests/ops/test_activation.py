"""Activations of kernels: `gelu_16` against float64, over all that 16 bits can tell apart."""

from __future__ import annotations

import math

import torch

from wavecrest.ops.common.activation import gelu_16 as device_gelu_16
from wavecrest.ops.common.triton import tl, triton


@triton.jit
def _gelu_16_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(y_ptr + at, device_gelu_16(x), mask=at < n)


def gelu_16(x: torch.Tensor) -> torch.Tensor:
    y = torch.full_like(x, math.nan)
    _gelu_16_kernel[((x.numel() + 1023) // 1024,)](x, y, x.numel(), BLOCK=1024)
    return y


def test_gelu_of_16_bits(device: str) -> None:
    x = torch.cat([torch.linspace(-12, 12, 48_001), torch.logspace(-30, 4, 2_000), -torch.logspace(-30, 4, 2_000)])
    found = gelu_16(x.to(device)).double().cpu()
    want = x.double() * torch.exp(torch.special.log_ndtr(x.double()))
    # a twentieth of half a unit in the last place of float16, and what is below its least value
    assert ((found - want).abs() <= 1.3e-5 * want.abs() + 2e-18).all()


def test_gelu_of_16_bits_without_end(device: str) -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, 3e38, -3e38], device=device)
    up, down, none, zero, large, small = gelu_16(x).tolist()
    # of -inf as PyTorch's
    assert up == math.inf and math.isnan(down) and math.isnan(none) and zero == 0.0
    assert abs(large / 3e38 - 1) < 1e-6 and abs(small) < 2e-18
