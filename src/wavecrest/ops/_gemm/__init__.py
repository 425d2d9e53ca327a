"""GEMM with everything around it: dtypes, scales, packed weights, a norm in front, an epilogue behind."""

from __future__ import annotations

import torch
from torch import Tensor

from wavecrest.ops._gemm.backend import op as _op
from wavecrest.ops._gemm.call import GemmCall, stored_weight
from wavecrest.ops.packed import PackedWeight

__all__ = ["gemm", "linear"]

_run = _op.of_fields(GemmCall)


def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    alpha: float = 1.0,
    slope: float = 0.01,
    bias_along: str = "n",
    precision: str = "ieee",
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    overwrite_residual: bool = False,
) -> Tensor:
    """act(alpha · (scale_a · a) @ (scale_b · b) + bias) + residual: summed in float32, rounded once.

    8-bit floats on sm_90, whose matrix unit keeps 14 bits of a sum: it adds up to 128 products, and their sums are
    added in float32, in wavecrest's kernels as in cuBLAS. Where terms have random signs the error is then about 2⁻¹³ of
    the root of their squares' sum, whatever K is (root mean square; one H200, K from 512 to 16,384); where all of K is
    added in the matrix unit, with precision "fast_accum", 2.7 to 25 times that.

    Args:
        a: [..., M, K], any strides: float32, float16, bfloat16, float64, int8 or an 8-bit float.
        b: [K, N], or [..., K, N] for a batch of GEMMs; a's dtype. An 8-bit a takes any 8-bit float; a wider a takes
            an int8 or 8-bit b, which is then a weight stored in fewer bits.
        bias: [N] of any floating dtype, [M] with `bias_along` "m"; for gated activations of both halves.
        scale_a: float32 for 8-bit a: [] for the tensor, [M] or [M, 1] a row, or [M, ceil(K / 128)].
        scale_b: float32 for 8-bit b: [] for the tensor, [N] or [1, N] a column, or [ceil(K / 128), ceil(N / 128)].
        residual: of the result's shape, any floating dtype; added after the activation.
        activation: relu, leaky_relu (`slope` below 0), silu, gelu, gelu_tanh; or silu_and_mul, gelu_and_mul,
            gelu_tanh_and_mul: of the first N / 2 columns, times the others.
        out_dtype: of the result. None: a's; bfloat16 for 8-bit a; int32 for int8 where nothing is done to the sums.
        out_scale: float32 [], with an 8-bit `out_dtype`: the result is divided by it and saturates.
        alpha: a factor of a @ b.
        precision: "ieee". Of float32 also "tf32": a and b may be rounded to 10 mantissa bits or more, as the device
            does it; or "tf32x3": a product may be three of tf32, of the numbers and of what rounding left of them. Of
            8-bit floats also "fast_accum": sums may have as few bits as the matrix unit keeps.
        norm_weight: [K] of any floating dtype: a / sqrt(mean(a²) + norm_eps) · norm_weight, of each row in float32
            (RMSNorm; Zhang and Sennrich, 2019), takes a's place. For a of 16 bits or more without scale_a, and one
            matrix b. Kernels over tiles and PyTorch round to a's dtype once before they multiply.
        norm_eps: added to the mean square, inside the root; at least 0.
        overwrite_residual: the caller needs the residual no more, and the result may be written to its memory. The
            backend `torch` does so, and saves a pass, where the residual is contiguous, has the dtype of a, b and the
            result and memory of its own, and there is no bias, activation, alpha or gradient. Not inside torch.compile.

    Returns:
        A contiguous tensor [..., M, N] (N / 2 columns where gated); the residual where that was overwritten.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this.
    """
    return _run(
        a, b, bias, scale_a, scale_b, residual, activation, out_dtype, out_scale, alpha, slope, bias_along,
        precision, "plain", 0, None, norm_weight, norm_eps, None, overwrite_residual,
    )  # fmt: skip


def linear(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None = None,
    *,
    scale_x: Tensor | None = None,
    scale_weight: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Tensor | None = None,
    precision: str = "ieee",
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    tail: Tensor | None = None,
    overwrite_residual: bool = False,
) -> Tensor:
    """act(x @ weightᵀ + bias) + residual: `gemm` with the weight of `nn.Linear`, plain or packed.

    Args:
        x: [..., K], any strides.
        weight: [N, K], any strides; or a `PackedWeight` (see `wavecrest.ops.packed`), which brings its scales.
        bias: [N] of any floating dtype.
        scale_x: float32 for 8-bit x, as `gemm`'s scale_a.
        scale_weight: float32 for a plain 8-bit weight: [], [N], [N, 1] or [ceil(N / 128), ceil(K / 128)].
        residual, activation, out_dtype, out_scale, precision, norm_weight, norm_eps, overwrite_residual: as for
            `gemm`.
        tail: [T, K] of x's dtype, after a weight in 8 bits that has one scale or one a row: a few rows that are too
            sensitive to be stored in fewer bits, in the same launch where rows of x are few (up to 8). The bias is of
            N + T then; no gated activation, residual or 8-bit result.

    Returns:
        A contiguous tensor [..., N + T], T without a tail 0 (N / 2 columns where the activation is gated).

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this.
    """
    b, scale_weight, form, group, zero, tail = stored_weight(x, weight, scale_weight, tail)
    # by position: keywords cost 0.5 µs a call
    return _run(
        x, b, bias, scale_x, scale_weight, residual, activation, out_dtype, out_scale, 1.0, 0.01, "n", precision,
        form, group, zero, norm_weight, norm_eps, tail, overwrite_residual,
    )  # fmt: skip
