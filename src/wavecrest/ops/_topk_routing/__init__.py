"""The router of a mixture of experts: scores, the k largest of a token, and their weights."""

from __future__ import annotations

from torch import Tensor

from wavecrest.ops._topk_routing.backend import op as _op
from wavecrest.ops._topk_routing.call import TopkRoutingCall

__all__ = ["topk_routing"]

_run = _op.of_fields(TopkRoutingCall)


def topk_routing(
    logits: Tensor,
    k: int,
    bias: Tensor | None = None,
    scores: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    num_groups: int = 1,
    topk_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """The k experts of each token with the largest scores, and these scores as weights; computed in float32.

    Args:
        logits: [tokens, experts], any strides: float32, float16, bfloat16 or float64. There may be no token.
        k: experts of a token, at most those of `topk_groups` groups.
        bias: [experts] of any floating dtype, added to the scores to choose experts, and not to their weights
            (`e_score_correction_bias` of DeepSeek-V3).
        scores: "softmax" over the experts, or "sigmoid".
        renormalize: the weights of a token are divided by their sum (plus 1e-20).
        scale: a factor of the weights, the last of all.
        num_groups: experts are in this number of groups of neighbours, of which the `topk_groups` with the largest sums
            of their two largest scores (with the bias) can be chosen from, as in DeepSeek-V3.
        topk_groups: 1 to num_groups.

    Returns:
        (weights [tokens, k] in float32, or float64 for float64; experts [tokens, k] in int32), the largest score first;
        of equal ones the lower number first. A NaN counts as the largest, and its weight is NaN.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this.
    """
    return _run(logits, k, bias, scores, renormalize, scale, num_groups, topk_groups)
