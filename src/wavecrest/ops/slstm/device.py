"""Device functions of the sLSTM kernels: gates, and tiles of the recurrent weights."""

from __future__ import annotations

from wavecrest.ops.common.device import exp
from wavecrest.ops.common.triton import tl, triton
from wavecrest.ops.mlstm.device import dim_offsets, log_sigmoid, sigmoid

# as in the definition: a gate is closed, not undefined, where its input is −∞
LEAST_INPUT = tl.constexpr(-1e5)


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """tanh: below 0.625 its continued fraction to x⁴ (4e-9), as (1 − e^−2x) / (1 + e^−2x) cancels there.

    Here and in `updated` a sum and its product are one operation: left to itself the compiler makes them one in some
    kernels and not in others (gfx942 and gfx950, triton 3.6), and the same token has other bits.
    """
    s = x * x
    small = x * tl.fma(s, 105.0 + s, 945.0) / tl.fma(s, tl.fma(s, 15.0, 420.0), 945.0)
    e = exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    large = tl.where(x < 0.0, -large, large)
    return tl.where(tl.abs(x) < 0.625, small, large)


@triton.jit
def gate_input(x):  # type: ignore[no-untyped-def]
    """The input of the gate i or f in float32, not below LEAST_INPUT; NaN stays."""
    x = x.to(tl.float32)
    return tl.where(x < LEAST_INPUT, LEAST_INPUT, x)


@triton.jit
def weights(i, f, n, m, EXPONENTIAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """(what the states before a token keep, what the token adds, m after it), from pre-activations of i and f.

    EXPONENTIAL: the forget gate is. Where n = 0 there is no history.
    """
    if EXPONENTIAL:
        lf = f
    else:
        lf = log_sigmoid(f)
    before = tl.where(n == 0.0, float("-inf"), lf + m)
    # a comparison with NaN is false: NaN of either is kept
    m = tl.where((i > before) | (i != i), i, before)
    return exp(before - m), exp(i - m), m


@triton.jit
def updated(forget, take, z, o, c, n):  # type: ignore[no-untyped-def]
    """(h, c, n) after a token, from its two weights and the pre-activations of z and o."""
    c = tl.fma(forget, c, take * tanh(z))
    n = tl.fma(forget, n, take)
    return sigmoid(o) * (c / n), c, n


@triton.jit
def weight_tile(  # type: ignore[no-untyped-def]
    r_ptr, gate, first, offs_k, offs_n, stride_g, stride_k, stride_n,
    CONTIGUOUS: tl.constexpr, ALIGN: tl.constexpr, UNITS: tl.constexpr, D: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A tile of a head's recurrent weights of a gate, rows first + offs_k of h, columns offs_n of it, 0 beyond D.

    Tiles differ by a scalar: the offsets within a tile are in registers once, not for each tile. UNITS: the stride of
    rows in units of D, so that these scalars are constants of the instructions; 0: it is stride_k, in units of ALIGN.
    """
    r_ptr += ALIGN * (gate * tl.cast(stride_g, tl.int64))
    if UNITS > 0:
        r_ptr += first * UNITS * D
        rows = offs_k * UNITS * D
    else:
        r_ptr += ALIGN * (first * tl.cast(stride_k, tl.int64))
        rows = ALIGN * (offs_k.to(tl.int64) * stride_k)
    at = rows[:, None] + dim_offsets(offs_n, stride_n, CONTIGUOUS)[None, :]
    if EVEN:
        r = tl.load(r_ptr + at)
    else:
        r = tl.load(r_ptr + at, mask=(offs_k < D - first)[:, None] & (offs_n < D)[None, :], other=0.0)
    return r
