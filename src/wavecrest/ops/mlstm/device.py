"""Device functions of the mLSTM kernels: gates, where a sequence lies, strides."""

from __future__ import annotations

from wavecrest.ops.common.device import exp
from wavecrest.ops.common.triton import tl, triton

# where sequences lie: each is a row, a part of a row, or one of several packed in a row
WHOLE, PADDED, PACKED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# as in the definition: sums of logarithms stay finite
LEAST_LOG = tl.constexpr(-1e5)
LARGEST_HALF = tl.constexpr(65504.0)


@triton.jit
def dim_offsets(offs, stride, CONTIGUOUS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets along the last dimension: the indices themselves where it is contiguous."""
    if CONTIGUOUS:
        found = offs
    else:
        found = offs.to(tl.int64) * stride
    return found


# kernels load where a sequence lies themselves: torch.compile takes for written what a function is given of pointers
# whose result leads to a place that is written


@triton.jit
def within(begin, end, tokens, FORM: tl.constexpr):  # type: ignore[no-untyped-def]
    """(first token, token behind the last) of a sequence, within its row whatever the numbers are."""
    if FORM != WHOLE:
        begin = tl.minimum(tl.maximum(begin, 0), tl.cast(tokens, tl.int64))
        end = tl.minimum(tl.maximum(end, begin), tl.cast(tokens, tl.int64))
    return begin, end


@triton.jit
def _log1p(x):  # type: ignore[no-untyped-def]
    """log(1 + x) for x from 0 to 1, to about 2 units in the last place: 2 artanh(x / (2 + x)), x / (2 + x) ≤ 1/3."""
    z = x / (2.0 + x)
    s = z * z
    more = 1.0 / 11.0 + s * (1.0 / 13.0 + s * (1.0 / 15.0 + s * (1.0 / 17.0)))
    more = 1.0 / 3.0 + s * (1.0 / 5.0 + s * (1.0 / 7.0 + s * (1.0 / 9.0 + s * more)))
    return 2.0 * z * (1.0 + s * more)


@triton.jit
def log_sigmoid(x):  # type: ignore[no-untyped-def]
    """log σ(x): log(1 + e^−|x|) by itself would lose e^−15 beside 1, as much as a forget gate has."""
    return tl.minimum(x, 0.0) - _log1p(exp(-tl.abs(x)))


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """tanh: below 1 its continued fraction to x⁶ (4e-10), as 1 − 2 / (1 + e^2x) cancels there."""
    s = x * x
    small = x * (10395.0 + s * (1260.0 + 21.0 * s)) / (10395.0 + s * (4725.0 + s * (210.0 + s)))
    e = exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    large = tl.where(x < 0.0, -large, large)
    return tl.where(tl.abs(x) < 1.0, small, large)


@triton.jit
def log_forget(f, cap, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The logarithm of the forget gate, from its pre-activation."""
    f = f.to(tl.float32)
    if CAP:
        f = cap * _tanh(f / cap)
    lf = log_sigmoid(f)
    # NaN stays
    return tl.where(lf < LEAST_LOG, LEAST_LOG, lf)


@triton.jit
def log_input(i, cap, CAP: tl.constexpr, EXPONENTIAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """The logarithm of the input gate, from its pre-activation."""
    i = i.to(tl.float32)
    if CAP:
        i = cap * _tanh(i / cap)
    if not EXPONENTIAL:
        i = log_sigmoid(i)
    return i


@triton.jit
def denominator(den, m, eps, EXPONENTIAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """max(|den|, e^−m) + ε, 1 for e^−m of sigmoid gates; NaN stays."""
    den = tl.abs(den)
    floor = den * 0.0 + 1.0
    if EXPONENTIAL:
        floor = exp(-m)
    return tl.where(floor > den, floor, den) + eps


@triton.jit
def half_range(c, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """c clamped to what float16 has, where that is what it is stored in; NaN stays."""
    if dtype == tl.float16:
        c = tl.where(c > LARGEST_HALF, LARGEST_HALF, tl.where(c < -LARGEST_HALF, -LARGEST_HALF, c))
    return c


@triton.jit
def sigmoid(x):  # type: ignore[no-untyped-def]
    """σ(x)."""
    return 1.0 / (1.0 + exp(-x))


@triton.jit
def layer_norm(x, mask, DV: tl.constexpr, norm_eps):  # type: ignore[no-untyped-def]
    """Rows [M, BLOCK] less their mean and divided by their deviation, over the DV elements that there are."""
    mean = tl.sum(tl.where(mask, x, 0.0), 1) / DV
    x = tl.where(mask, x - mean[:, None], 0.0)
    return x * tl.rsqrt(tl.sum(x * x, 1) / DV + norm_eps)[:, None]
