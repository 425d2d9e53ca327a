"""A mixture-of-experts layer: each token through the gated MLPs of the experts that its router chose."""

from __future__ import annotations

from torch import Tensor

from wavecrest.ops._moe.backend import op as _op
from wavecrest.ops._moe.call import MoeCall

__all__ = ["moe"]

_run = _op.of_fields(MoeCall)


def moe(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str = "silu",
    interleaved: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    w1_zero: Tensor | None = None,
    w2_zero: Tensor | None = None,
) -> Tensor:
    """Σ over j of topk_weights[t, j] · (w2[e] @ (act(gate) · up) + b2[e]), [gate | up] = w1[e] @ x[t] + b1[e].

    e = topk_ids[t, j]. Summed in float32; act(gate) · up and the weighted row of each pair of token and expert are
    rounded to x's dtype, and their sum once more. Nothing is read on the host, so that a CUDA graph can hold the call.

    Args:
        x: [tokens, hidden], any strides: float32, float16, bfloat16 or float64. There may be no token.
        w1: [experts, 2 · intermediate, hidden], any strides: the rows of gate, then those of up. Of x's dtype, or in 8
            bits with w1_scale and w2_scale: int8, float8_e4m3fn or float8_e4m3fnuz, widened as they are loaded; or in 4
            bits, uint8 [experts, 2 · intermediate, 32 · ceil(hidden / 64)], as `pack` stores int4 and mxfp4.
        w2: [experts, hidden, intermediate] of w1's dtype, any strides; in 4 bits with 32 · ceil(intermediate / 64).
        topk_weights: [tokens, k] of any floating dtype, the routing weights.
        topk_ids: int32 or int64 [tokens, k], the experts of each token. An id that is negative, or not below the number
            of experts, adds nothing: experts of another device are passed so.
        b1, b2: [experts, 2 · intermediate], in the order of w1's rows, and [experts, hidden], of any floating dtype.
        activation: silu, gelu, gelu_tanh; or swigluoai (gpt-oss), gate · sigmoid(alpha · gate) · (up + 1) with gate at
            most `limit` and up from −limit to limit.
        interleaved: w1's rows (and b1) are gate and up in turn.
        alpha, limit: of swigluoai; `limit` may be infinite.
        w1_scale, w2_scale: float32, of an expert [experts] or of its rows, [experts, 2 · intermediate] and
            [experts, hidden], or for 128 × 128 weights; both for weights in 8 bits. Of 32, 64 or 128 columns of a row,
            [experts, rows, groups], for int4; uint8 (e8m0) of 32 columns for mxfp4. No others have scales.
        w1_zero, w2_zero: uint8, the zero points of int4 in the shapes of its scales; None: values are around 8. Both or
            neither.

    Returns:
        A contiguous tensor [tokens, hidden] of x's dtype.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this.
    """
    return _run(
        x, w1, w2, topk_weights, topk_ids, b1, b2, activation, interleaved, alpha, limit, w1_scale, w2_scale,
        w1_zero, w2_zero,
    )  # fmt: skip
