"""The mLSTM over short sequences: the recurrence token by token, states in registers, in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wavecrest.ops.mlstm.call import MlstmCall
from wavecrest.ops.mlstm.sequence.backend import op as _op

__all__ = ["mlstm_sequence"]

_run = _op.of_fields(MlstmCall)


def mlstm_sequence(
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
    """The mLSTM cell over sequences of a few tokens, one after another within one launch.

    The function of `mlstm_chunkwise`, with the same arguments and results, for sequences of 1 to about 32 tokens; any
    length works, and takes time in proportion. Products of states are float32, whatever the dtype of q.

    Args:
        q, k, v, i, f, c_initial, n_initial, m_initial, return_last_states, eps, input_gate, normalize, gate_soft_cap,
            cu_seqlens, seq_starts, seq_lens, resets, norm_weight, norm_eps, output_gate, state_dtype,
            batch_invariant: as there.
        chunk_size: checked as there, and has no effect: there are no chunks.

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
