"""The sLSTM over sequences of any length, in one launch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wavecrest.ops.slstm.call import SlstmCall
from wavecrest.ops.slstm.sequence.backend import op as _op

__all__ = ["slstm_sequence"]

_run = _op.of_fields(SlstmCall)


def slstm_sequence(
    x: Tensor,
    r: Tensor,
    bias: Tensor | None = None,
    *,
    h_initial: Tensor | None = None,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool = False,
    forget_gate: str = "sigmoid",
    seq_starts: Tensor | None = None,
    seq_lens: Tensor | None = None,
    resets: Tensor | None = None,
) -> Any:
    """The sLSTM cell over sequences: gates i, f, z and o from x and from the last h through recurrent weights.

    With a = x + h r + bias by gate, and lf = log σ(a_f):

        m′ = max(lf + m, a_i)      c′ = e^(lf + m − m′) c + e^(a_i − m′) tanh(a_z)
        h′ = σ(a_o) c′ / n′        n′ = e^(lf + m − m′) n + e^(a_i − m′)

    Args:
        x: [B, S, 4, NH, D], the inputs' part of the pre-activations of i, f, z and o in this order, as one GEMM makes
            them; float32, float16, bfloat16 or float64, any strides. Below −10⁵ x of i and f counts as −10⁵, so that −∞
            closes a gate.
        r: [4, NH, D, D] in x's dtype: r[g, head, j, k] is the weight of element j of h in element k of gate g. Any
            strides; quick are those with stride 1 in the last dimension.
        bias: [4, NH, D], any float dtype.
        h_initial, c_initial, n_initial, m_initial: [B, NH, D] float32 each, all or none: the states before the first
            token; None: zeros. An element with n = 0 has no history, whatever its m is. For float64 x they may be
            float64.
        return_last_states: return the states after the last token too.
        forget_gate: "sigmoid", or "exp": lf = a_f.
        seq_starts, seq_lens: int32 [B], the first token of each row and the number of its tokens; None: from the row's
            first token, to its last. Other places leave the states as they are, and their h is 0.
        resets: bool [B, S], True where all states are zeroed before a token.

    Returns:
        h [B, S, NH, D] in x's dtype; with `return_last_states` (h, (h, c, n, m)), the states [B, NH, D] in float32,
        float64 for float64 x.

    Raises:
        InvalidArgument: a shape, dtype, device or option is outside this.
    """
    result = _run(
        x, r, bias, h_initial, c_initial, n_initial, m_initial, return_last_states, forget_gate, seq_starts, seq_lens,
        resets,
    )  # fmt: skip
    if not return_last_states:
        return result
    y, *states = result
    return y, tuple(states)
