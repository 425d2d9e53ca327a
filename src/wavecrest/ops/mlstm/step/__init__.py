"""One token of the mLSTM: states read once and written once, in the caller's memory where that is wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wavecrest.ops.mlstm.call import MlstmStepCall
from wavecrest.ops.mlstm.step.backend import op as _op

__all__ = ["mlstm_step"]

_run = _op.of_fields(MlstmStepCall)


def mlstm_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c: Tensor,
    n: Tensor,
    m: Tensor | None,
    *,
    eps: float = 1e-6,
    input_gate: str = "exp",
    normalize: bool = True,
    gate_soft_cap: float = 0.0,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    output_gate: Tensor | None = None,
    in_place: bool = False,
    state_dtype: torch.dtype | None = None,
    arrivals: Tensor | None = None,
) -> Any:
    """One token of the mLSTM cell, by the formulas of `mlstm_chunkwise`.

    Args:
        q, k: [B, NH, DK], float32, float16, bfloat16 or float64, any strides.
        v: [B, NH, DV] in q's dtype.
        i, f: [B, NH, 1] or [B, NH], pre-activations of the gates in any float dtype.
        c: [B, NH, DK, DV], float32 or float16, any strides.
        n: [B, NH, DK] float32.
        m: [B, NH, 1] float32; None for sigmoid gates. For float64 q states may be float64.
        eps, input_gate, normalize, gate_soft_cap, norm_weight, norm_eps: as for `mlstm_chunkwise`.
        output_gate: [B, NH, DV], any float dtype and strides, with norm_weight.
        in_place: write the new states over c, n and m, and return these.
        state_dtype: of the new c, float32 or float16 (clamped to ±65504); None: c's.
        arrivals: int32 [B, NH] of zeros, contiguous, which the call leaves as zeros, and which no other call may use at
            the same time, as with states in place. With it our kernel counts the programs of each head, and the last
            one normalises h and writes n and m: one launch, where a second one follows without it. For decoding, where
            it lives as long as the states do; other backends have no use for it.

    Returns:
        (h, (c, n, m)), for sigmoid gates (h, (c, n)): h [B, NH, DV] in q's dtype and v's memory order.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this; or in_place with gradients, or with states
            whose elements share memory.
    """
    h, *states = _run(
        q, k, v, i, f, c, n, m, eps, input_gate, normalize, gate_soft_cap, norm_weight, norm_eps, output_gate,
        in_place, state_dtype, arrivals,
    )  # fmt: skip
    return h, tuple(states)
