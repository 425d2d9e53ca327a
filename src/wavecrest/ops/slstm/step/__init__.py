"""One token of the sLSTM."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wavecrest.ops.slstm.call import SlstmStepCall
from wavecrest.ops.slstm.step.backend import op as _op

__all__ = ["slstm_step"]

_run = _op.of_fields(SlstmStepCall)


def slstm_step(
    x: Tensor,
    r: Tensor,
    h: Tensor,
    c: Tensor,
    n: Tensor,
    m: Tensor,
    bias: Tensor | None = None,
    *,
    forget_gate: str = "sigmoid",
) -> Any:
    """One token of the sLSTM cell, by the formulas of `slstm_sequence`.

    Args:
        x: [B, 4, NH, D], the inputs' part of the pre-activations of i, f, z and o; float32, float16, bfloat16 or
            float64, any strides.
        r: [4, NH, D, D] in x's dtype.
        h, c, n, m: [B, NH, D] float32 each, any strides, zeros before the first token. For float64 x they may be
            float64.
        bias: [4, NH, D], any float dtype.
        forget_gate: "sigmoid" or "exp".

    Returns:
        (h, (h, c, n, m)): h [B, NH, D] in x's dtype, and the new states, of which h is not rounded to it.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this.
    """
    y, *states = _run(x, r, h, c, n, m, bias, forget_gate)
    return y, tuple(states)
