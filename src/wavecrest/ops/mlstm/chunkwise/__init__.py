"""The mLSTM over sequences, in chunks whose tokens go through GEMMs; and over all pairs of tokens, as a reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wavecrest.ops.mlstm.call import MlstmCall, check
from wavecrest.ops.mlstm.chunkwise.backend import op as _op
from wavecrest.ops.mlstm.reference import parallel, result_like, rows_of

__all__ = ["mlstm_chunkwise", "mlstm_parallel"]

_run = _op.of_fields(MlstmCall)


def mlstm_chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool = False,
    eps: float = 1e-6,
    chunk_size: int | None = None,
    input_gate: str = "exp",
    normalize: bool = True,
    gate_soft_cap: float = 0.0,
    cu_seqlens: Tensor | None = None,
    seq_starts: Tensor | None = None,
    seq_lens: Tensor | None = None,
    resets: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    output_gate: Tensor | None = None,
    state_dtype: torch.dtype = torch.float32,
    batch_invariant: bool = False,
) -> Any:
    """The mLSTM cell over sequences of tokens (xLSTM, Beck et al., 2024, section 2.3), in chunks.

    With lf = log σ(f) and s = DK^−½, token by token: m′ = max(lf + m, i), c′ = e^(lf + m − m′) c + e^(i − m′) k vᵀ,
    n′ = e^(lf + m − m′) n + e^(i − m′) k, h = s qᵀc′ / (max(|s q · n′|, e^−m′) + eps).

    Args:
        q, k: [B, NH, S, DK], float32, float16, bfloat16 or float64, any strides: a view of [B, S, NH, DK] is read in
            place. DK at least 1, S at least 0.
        v: [B, NH, S, DV] in q's dtype, DV at least 1.
        i, f: [B, NH, S], pre-activations of the input and the forget gate in any float dtype; gates are float32. A log
            σ(f) below −10⁵ counts as −10⁵.
        c_initial, n_initial, m_initial: the first states, all or none: [B, NH, DK, DV] float32 or float16, [B, NH, DK]
            and [B, NH, 1] float32 (sigmoid: no m). Not written to. None: zeros.
        return_last_states: also return the states after the last token.
        eps: added to the denominator.
        chunk_size: tokens of a chunk, a multiple of 16 up to 4096; None: chosen. Results agree up to rounding.
        input_gate: "exp"; or "sigmoid": log σ(i) for i, no m, and 1 for e^−m′.
        normalize: False (sigmoid only): h = s qᵀc′.
        gate_soft_cap: c > 0: gates are c · tanh(x / c) first; 0: they are not.
        cu_seqlens: int32 [N + 1], with B = 1: sequence j is the tokens from cu_seqlens[j] up to cu_seqlens[j + 1];
            states are [N, …]. Like the next three it is not checked on the host: the kernel reads it.
        seq_starts, seq_lens: int32 [B]: a row's tokens are those from its start (0), as many as its length (to the
            end). Others leave states as they are, whatever they hold, and have h = 0.
        resets: bool [B, S]: the states are zeroed (c = n = m = 0) before these tokens.
        norm_weight: [NH · DV], any float dtype: h becomes LayerNorm(h) · weight, the norm over DV of each head in
            float32 with biased variance.
        norm_eps: of that norm.
        output_gate: [B, NH, S, DV], any float dtype and strides, with norm_weight: the result is multiplied by
            σ(output_gate).
        state_dtype: of the last c: float32, or float16 clamped to ±65504; n and m are float32 (for float64 q all are
            float64).
        batch_invariant: choose backend and configuration without a look at how many sequences and tokens there are or
            how they lie, so that a sequence has the same bits alone, in any batch, padded and packed, where a kernel
            runs (on a GPU, without gradients). PyTorch's GEMMs have no such promise.

    Returns:
        h [B, NH, S, DV] in q's dtype and v's memory order; with `return_last_states` (h, (c, n, m)), for sigmoid gates
        (h, (c, n)).

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this.
    """
    result = _run(
        q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps, chunk_size, input_gate, normalize,
        gate_soft_cap, cu_seqlens, seq_starts, seq_lens, resets, norm_weight, norm_eps, output_gate, state_dtype,
        batch_invariant,
    )  # fmt: skip
    if not return_last_states:
        return result
    h, *states = result
    return h, tuple(states)


def mlstm_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    *,
    eps: float = 1e-6,
    input_gate: str = "exp",
    normalize: bool = True,
    gate_soft_cap: float = 0.0,
) -> Tensor:
    """The mLSTM from all pairs of tokens: O(S²) memory, no states, in PyTorch. A reference, not a kernel.

    Args:
        q, k, v, i, f, eps, input_gate, normalize, gate_soft_cap: as for `mlstm_chunkwise`. The stabiliser is the
            largest exponent of a row, without the zero that a recurrence begins with, so that results differ by
            about eps.

    Returns:
        h [B, NH, S, DV] in q's dtype and v's memory order, differentiable; in float32 (float64) until it is rounded.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this.
    """
    call = MlstmCall(q, k, v, i, f, eps=eps, input_gate=input_gate, normalize=normalize, gate_soft_cap=gate_soft_cap)
    check("mlstm_parallel", call)
    h = parallel(rows_of(call), eps, call.exponential, normalize)
    return result_like(h, v)
