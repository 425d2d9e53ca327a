"""Activations: their definitions, and the device functions of the kernels that apply them."""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.ops.common.device import exp
from wavecrest.ops.common.triton import reciprocal, tl, triton

NONE, RELU, LEAKY_RELU = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
SILU, GELU, GELU_TANH = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
# name -> what kernels are compiled for
ACTIVATIONS = {"relu": 1, "leaky_relu": 2, "silu": 3, "gelu": 4, "gelu_tanh": 5}


def activated(x: Tensor, name: str | None, slope: float = 0.01) -> Tensor:
    """The definition of an activation, in x's precision. `slope`: of leaky_relu below 0."""
    if name == "relu":
        # a comparison: clamping would lose a NaN's meaning on some devices
        return torch.where(x <= 0, torch.zeros_like(x), x)
    if name == "leaky_relu":
        return torch.where(x < 0, x * slope, x)
    if name == "silu":
        return x * torch.sigmoid(x)
    if name == "gelu":
        return 0.5 * x * (1 + torch.erf(x * 0.7071067811865476))
    if name == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))
    return x


@triton.jit
def silu(x):  # type: ignore[no-untyped-def]
    """x / (1 + exp(−x))."""
    return x * reciprocal(1.0 + exp(-x))


@triton.jit
def gelu_tanh(x):  # type: ignore[no-untyped-def]
    """GELU by tanh: 0.5 · (1 + tanh(z)) = sigmoid(2z)."""
    # 2 · sqrt(2 / pi)
    z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x * reciprocal(1.0 + exp(-z))


@triton.jit
def gelu(x):  # type: ignore[no-untyped-def]
    """x · 0.5 · (1 + erf(x / sqrt(2))), the factor to 2e-7 of its value also where it is small.

    As exp(-x²/2) · t · P(t), t = 1 / (1 + 0.3 |x|) (the form of Abramowitz and Stegun 26.2.17), with P fitted for the
    least relative error over |x| < 14.5: half the instructions of `tl.erf` on sm_90, and no cancellation.
    """
    t = reciprocal(1.0 + 0.3 * tl.abs(x))
    p = 0.0354237106 * t - 0.156158353
    p = p * t + 0.204556635
    p = p * t - 0.0520338929
    p = p * t + 0.127691714
    p = p * t + 0.100175963
    p = p * t + 0.120712134
    p = p * t + 0.119632007
    tail = p * t * exp(-0.5 * x * x)
    return x * tl.where(x > 0.0, 1.0 - tail, tail)


@triton.jit
def gelu_16(x):  # type: ignore[no-untyped-def]
    """`gelu` for results of 16 bits: the factor to 1.2e-5 of its value down to x = -9, and below that -1e-18.

    log2 of the normal distribution's tail is nearly a parabola: a polynomial, fitted for its least error over |x| < 9,
    and one exponential are 13 instructions on sm_90 where `gelu` has 19 (compiled, triton 3.6).
    """
    size = tl.abs(x)
    a = tl.minimum(size, 9.0)
    p = 7.46325242e-08 * a - 3.6557733e-06
    p = p * a + 7.94375446e-05
    p = p * a - 0.0010200484
    p = p * a + 0.00875086803
    p = p * a - 0.0543046631
    p = p * a - 0.458241522
    p = p * a - 1.15129495
    p = p * a - 0.999996603
    # relu(x), and -inf's NaN. no comparison: with few predicates left, ptxas worked out one value after another
    return (0.5 * x + 0.5 * size) - a * tl.exp2(p)


@triton.jit
def activate(x, slope, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """One of ACTIVATIONS of float32 values."""
    if ACTIVATION == RELU:
        x = tl.where(x <= 0.0, 0.0, x)
    elif ACTIVATION == LEAKY_RELU:
        x = tl.where(x < 0.0, x * slope, x)
    elif ACTIVATION == SILU:
        x = silu(x)
    elif ACTIVATION == GELU:
        x = gelu(x)
    elif ACTIVATION == GELU_TANH:
        x = gelu_tanh(x)
    return x
