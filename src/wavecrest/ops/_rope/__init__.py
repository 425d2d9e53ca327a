"""Rotary position embedding: pairs of columns rotated by an angle that grows with the position (Su et al., 2021).

Column pairs (a, b) become (a·cos − b·sin, b·cos + a·sin). The style says which columns are a pair: "neox" pairs column
i with column i + R/2 (GPT-NeoX, Llama), "gptj" column 2i with 2i + 1 (GPT-J, Meta's own Llama code).
"""

from __future__ import annotations

from torch import Tensor

from wavecrest.ops._rope.backend import op as _op
from wavecrest.ops._rope.call import RopeCall

__all__ = ["rope"]

_run = _op.of_fields(RopeCall)


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, style: str = "neox") -> Tensor:
    """x with the first R columns of each head rotated by the angles of its token's position, rounded once from float32.

    Args:
        x: [..., S, H, D] (batch, sequence, heads, head_dim; or tokens, heads, head_dim), any strides, float32, float16,
            bfloat16 or float64. A tensor [B, H, S, D] is passed as `x.transpose(1, 2)`.
        cos, sin: of one shape and floating dtype, any strides; R/2 columns, R at most D; columns R to D are copied.
            A table [P, R/2] has one row per position; [..., S, R/2] with three dimensions or more has one row per
            token, and its sizes before S are those of x, 1, or left out.
        positions: int32 or int64 [..., S], with a table: the row of each token, sizes before S as above. None: 0 to
            S − 1. A token whose position is negative or not in the table becomes NaN in its first R columns.
        style: which columns are a pair, "neox" (i, i + R/2) or "gptj" (2i, 2i + 1).

    Returns:
        A tensor of x's shape and dtype. It has x's strides where x has neither gaps nor overlaps, so that a transposed
        view gives the same transposed view; otherwise it is dense, in the order of x's strides.

    Raises:
        InvalidArgument: a shape, dtype, device or style is outside this.
    """
    return _run(x, cos, sin, positions, style)
